"""Small stand-ins: a random tiny model, a task with a trivial reward."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_ustat.policy.loading import Policy
from grpo_ustat.records import Prompt, Rollouts


class LetterTokenizer:
    """One token per letter a-z from id 2 on; 0 pads, 1 ends."""

    pad_token_id, eos_token_id = 0, 1

    def __len__(self):
        return 28

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(c) - ord("a") + 2 for c in text]}

    def batch_decode(self, rows, skip_special_tokens):
        return ["".join(chr(t - 2 + ord("a")) for t in row if t > 1) for row in rows]


class Wobble(torch.nn.Module):
    """A layer of a kind that no rule knows."""

    def __init__(self, size):
        super().__init__()
        self.phase = torch.nn.Parameter(torch.linspace(0, 1, size, dtype=torch.float64))

    def forward(self, hidden):
        return hidden + torch.sin(hidden * self.phase)


def random_model(tied=True, bias=True, seed=0, dtype=torch.float64, vocab=12):
    """A two-layer Qwen2 with every parameter moved away from its initial value."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def random_policy(**options):
    return Policy(random_model(**options), LetterTokenizer(), frozenset({1}), 0)


def letter_prompts(*texts):
    return [Prompt(id=t, text=t, question=t, answer="1", kind="letters") for t in texts]


def random_rollouts(prompt_lengths, group_size, longest, vocab=12, seed=0):
    """Rollouts with random tokens and lengths, to be scored."""
    rng = np.random.default_rng(seed)
    count = len(prompt_lengths)
    lengths = rng.integers(1, longest + 1, size=(count, group_size))
    mask = np.arange(longest) < lengths[..., None]
    tokens = rng.integers(1, vocab, size=mask.shape) * mask
    prompts = letter_prompts(*[chr(ord("a") + i) * n for i, n in enumerate(prompt_lengths)])
    return Rollouts(
        prompts=prompts,
        prompt_tokens=[rng.integers(2, vocab, size=n).tolist() for n in prompt_lengths],
        tokens_PGT=tokens.astype(np.int64),
        mask_PGT=mask,
        ended_PG=np.ones((count, group_size), dtype=bool),
        texts_PG=[["" for _ in range(group_size)] for _ in range(count)],
    )


class TextLengthTask:
    """Reward 1 where the completion has an even number of letters."""

    reward_funcs: ClassVar = {}
    reward_weights_F = np.ones(1)

    def prompts(self, split):
        return letter_prompts("ab", "c", "abcd", "ba")

    def extract(self, completion):
        return completion or None

    def rewards(self, prompts, completions):
        return [float(len(text) % 2 == 0) for text in completions]

    def take_counts(self):
        return {}
