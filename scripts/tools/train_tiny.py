"""Train the embedded policies from scratch: `python scripts/tools/train_tiny.py tiny`.

Each policy is a Qwen2 model of about 0.2 M parameters with a character-level tokenizer. It is
trained by next-token prediction on arithmetic questions from the train split only. Splits are
assigned by a hash of each question's canonical form, so no study or test question occurs in
training with its terms in any order. The training is seeded.

A worked solution involves choices that do not affect its correctness: the order of commuting steps,
the order of two summands or factors, the words between steps, and spaces around operators.
"""

from __future__ import annotations

import argparse
import operator
import random
import string
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo_ustat.tasks.answers import MARK
from grpo_ustat.tasks.arithmetic import Exercise, Ranges, stream

ASSETS = Path(__file__).resolve().parents[2] / "grpo_ustat" / "assets"
PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
OPENINGS = ("", "so ", "first ", "we get ", "now ")
LINKS = (", ", "; ", ". ", ": ", " so ", " then ", " and ", " next ")
FILLERS = ("", "well ", "ok ", "hm ", "look ", "see ")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
SLIPS = (-10, -2, -1, 1, 2, 10)


@dataclass(frozen=True)
class Recipe:
    """Settings for the training of a policy."""

    # Optimizer steps.
    steps: int
    # Solutions per step.
    rows: int
    # True if the policy learns to write worked solutions, False if it learns to write answers only.
    reasons: bool
    # Probability that a step in the teacher's solutions is wrong. A policy trained on such mistakes
    # has a skill that sampling hides and that reinforcement learning can bring out.
    careless: float = 0.0
    # True if the teacher adds filler words before its steps, which are random but do not affect the
    # answer.
    chatty: bool = False


RECIPES = {
    "tiny_base": Recipe(steps=2600, rows=96, reasons=True, careless=0.28),
    "tiny": Recipe(steps=3600, rows=96, reasons=True, chatty=True),
    "tiny_direct": Recipe(steps=16000, rows=192, reasons=False),
}


class Writer:
    """Writer of worked solutions with random wording, spacing and order of steps.

    Args:
        seed: seed of the random choices.
        careless: the probability that a step's result is wrong; later steps use that result.
        chatty: True if each step begins with a random filler word, which can be empty.
    """

    def __init__(self, seed: int, careless: float = 0.0, chatty: bool = False):
        self._rng = random.Random(f"wording/{seed}")
        self._careless = careless
        self._chatty = chatty

    def solution(self, question: Exercise) -> str:
        """Write a short solution that ends in ` #### answer`."""
        steps, answer = self._steps(question)
        text = self._rng.choice(OPENINGS) + self._filler() + steps[0]
        for step in steps[1:]:
            text += self._rng.choice(LINKS) + self._filler() + step
        return f"{text} {MARK} {answer}"

    def _filler(self) -> str:
        return self._rng.choice(FILLERS) if self._chatty else ""

    def _steps(self, question: Exercise) -> tuple[list[str], int]:
        if question.kind == "multiplication":
            return self._product(max(question.operands), min(question.operands))
        if question.kind == "division":
            return self._quotient(*question.operands)
        if question.kind == "parentheses":
            return self._parentheses(question)
        return self._sum(question.operands)

    def _step(self, a: int, sign: str, b: int) -> tuple[str, int]:
        """Write `a sign b=result` with optional spaces; return the text and the result."""
        result = OPERATORS[sign](a, b)
        if self._rng.random() < self._careless:
            result += self._rng.choice(SLIPS)
        gaps = [self._rng.choice(("", " ")) for _ in range(3)]
        return f"{a}{gaps[0]}{sign}{gaps[1]}{b}{gaps[2]}={result}", result

    def _add(self, a: int, b: int) -> tuple[str, int]:
        """Write a + b; b can be negative, and non-negative summands come in random order."""
        if b < 0:
            return self._step(a, "-", -b)
        if a >= 0 and self._rng.random() < 0.5:
            a, b = b, a
        return self._step(a, "+", b)

    def _times(self, a: int, b: int) -> tuple[str, int]:
        a, b = (a, b) if self._rng.random() < 0.5 else (b, a)
        return self._step(a, "*", b)

    def _sum(self, terms: tuple[int, ...]) -> tuple[list[str], int]:
        """Add signed terms two at a time in a random order that starts with a positive term."""
        rest = list(terms)
        total = rest.pop(self._rng.choice([i for i, t in enumerate(rest) if t > 0]))
        steps = []
        while rest:
            step, total = self._add(total, rest.pop(self._rng.randrange(len(rest))))
            steps.append(step)
        return steps, total

    def _parentheses(self, question: Exercise) -> tuple[list[str], int]:
        a, b, c = question.operands
        if question.inside == 0:
            first, inner = self._add(a, b)
            second, result = self._add(inner, c)
        else:
            first, inner = self._add(abs(b), c)
            second, result = self._add(a, inner if b > 0 else -inner)
        return [first, second], result

    def _product(self, factor: int, digit: int) -> tuple[list[str], int]:
        parts = [self._times(part, digit) for part in (factor - factor % 10, factor % 10)]
        self._rng.shuffle(parts)
        last, result = self._add(parts[0][1], parts[1][1])
        return [parts[0][0], parts[1][0], last], result

    def _quotient(self, factor: int, digit: int) -> tuple[list[str], int]:
        tens = factor - factor % 10
        first, product = self._times(tens, digit)
        second, rest = self._step(factor * digit, "-", product)
        third, ones = self._step(rest, "/", digit)
        return [first, second, third], tens + ones


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each printable ASCII character and for newline.

    All other characters become UNKNOWN. The tokenizer is a byte-level BPE without merges, like
    Qwen2's tokenizers, because for this type of model `AutoTokenizer` uses a class that reads only
    the vocabulary and the merges.
    """
    characters = [c for c in string.printable if c.isprintable()] + ["\n"]
    # Byte-level vocabularies write space and newline with these characters.
    as_byte = {" ": "Ġ", "\n": "Ċ"}
    tokens = [PAD, END, UNKNOWN, *(as_byte.get(c, c) for c in sorted(characters))]
    vocab = {token: i for i, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocab, [], unk_token=UNKNOWN, fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def small_qwen2(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Make a small Qwen2 model with grouped-query attention and tied embeddings."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def answer(question: Exercise) -> str:
    """Return the answer only."""
    return str(question.answer)


def batch(rows: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast):
    """Return right-padded token ids and labels, [B, T]; prompt and padding have label -100."""
    ids, labels = [], []
    for prompt, completion in rows:
        head = tokenizer(prompt)["input_ids"]
        tail = [*tokenizer(completion)["input_ids"], tokenizer.eos_token_id]
        ids.append(torch.tensor(head + tail))
        labels.append(torch.tensor([-100] * len(head) + tail))
    pad = torch.nn.utils.rnn.pad_sequence
    return (
        pad(ids, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad(labels, batch_first=True, padding_value=-100),
    )


def train(name: str, recipe: Recipe, steps: int, seed: int) -> None:
    """Train a policy and save it in its folder."""
    torch.manual_seed(seed)
    write = Writer(seed, recipe.careless, recipe.chatty).solution if recipe.reasons else answer
    questions = stream("train", Ranges(), seed)
    tokenizer = character_tokenizer()
    model = small_qwen2(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(1, steps + 1):
        chosen = [next(questions) for _ in range(recipe.rows)]
        ids, labels = batch([(f"{q.text}=", write(q)) for q in chosen], tokenizer)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            print(f"{name} step {step}/{steps} loss {loss.item():.4f}", flush=True)
    model.save_pretrained(ASSETS / name)
    tokenizer.save_pretrained(ASSETS / name)


def main() -> None:
    """Parse the command line and train the named policies in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=sorted(RECIPES))
    parser.add_argument("--steps", type=int, help="number of steps (default: the recipe's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=1, help="number of threads; several are slower on busy cores"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.names:
        recipe = RECIPES[name]
        train(name, recipe, arguments.steps or recipe.steps, arguments.seed)


if __name__ == "__main__":
    main()
