"""Train the embedded policies from scratch: `python scripts/tools/train_tiny.py tiny`.

Each policy is a Qwen2 model of about 0.2 M parameters with a character-level tokenizer. It is
trained by next-token prediction on arithmetic questions from the train split only. Splits are
assigned by a hash of each question's canonical form, so no study or test question occurs in
training with its terms in any order. The training is seeded. The script prints the number of
questions of each kind and the time taken.
"""

from __future__ import annotations

import argparse
import collections
import string
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from worked_solutions import Writer, direct

from grpo_ustat.tasks.arithmetic import Ranges, stream

ASSETS = Path(__file__).resolve().parents[2] / "grpo_ustat" / "assets"
PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"


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
    write = Writer(seed, recipe.careless, recipe.chatty).solution if recipe.reasons else direct
    questions = stream("train", Ranges(), seed)
    tokenizer = character_tokenizer()
    model = small_qwen2(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    seen: collections.Counter[str] = collections.Counter()
    distinct: dict[str, set[str]] = collections.defaultdict(set)
    start = time.perf_counter()
    for step in range(1, steps + 1):
        texts = []
        for question, _ in zip(questions, range(recipe.rows), strict=False):
            seen[question.kind] += 1
            distinct[question.kind].add(question.canonical)
            texts.append((f"{question.text}=", write(question)))
        ids, labels = batch(texts, tokenizer)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            spent = time.perf_counter() - start
            print(f"{name} step {step}/{steps} loss {loss.item():.4f} {spent:.0f} s", flush=True)
    folder = ASSETS / name
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    counts = ", ".join(
        f"{k} {seen[k]} questions, {len(distinct[k])} of them distinct" for k in sorted(seen)
    )
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{name}: {parameters} parameters, {time.perf_counter() - start:.0f} s; {counts}")


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
