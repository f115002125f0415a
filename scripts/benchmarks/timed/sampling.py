"""Time `rollout=local` with given, equal, or model-chosen completion lengths.

    python scripts/benchmarks/speed.py sampling --model FOLDER --lengths gsm8k \\
        --questions gsm8k/train.jsonl --prompts 8 --rows 8

The length of a completion is the length of a question's reference answer in tokens (`gsm8k`), the
maximum length (`equal`), or the length at which the model ends it (`own`, on arithmetic). The
column `check` is a checksum of the tokens, which another checkout must reproduce.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_ustat.policy.loading import Policy, load_policy
from grpo_ustat.records import Prompt
from grpo_ustat.rollout import local


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for the model, the questions and the shape of the batch."""
    parser.add_argument(
        "--model", default="embedded:tiny", help="embedded:NAME, or a model's folder"
    )
    parser.add_argument("--lengths", choices=["gsm8k", "equal", "own"], default="own")
    parser.add_argument("--questions", type=Path, help="gsm8k/train.jsonl")
    parser.add_argument(
        "--letters",
        type=int,
        default=1,
        help="factor by which answers are shortened, for character-level models",
    )
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--longest", type=int, default=300)


def programs(options: argparse.Namespace) -> list[str]:
    """Return the only program."""
    return [options.lengths]


def prepare(options: argparse.Namespace, program: str) -> Callable[[], dict[str, float]]:
    """Load the model and sample a few tokens; a run is a call of `sample`."""
    torch.set_num_threads(options.threads)
    policy = load_policy(options.model)
    if options.lengths == "own":
        texts = [f"{i % 89 + 10}+{i % 7 + 2}*3=" for i in range(options.prompts)]
    else:
        rows = [json.loads(line) for line in options.questions.read_text().splitlines()]
        rows = rows[: options.prompts * options.group]
        texts = [row["question"] for row in rows[: options.prompts]]
        texts = [text[: len(text) // options.letters] for text in texts]
        ids = policy.encode([row["answer"] for row in rows])
        policy = Policy(policy.model, policy.tokenizer, frozenset({0}), 0)
        local.uniforms = ending(options, [len(row) // options.letters + 1 for row in ids])
    prompts = [Prompt(str(i), text, text, "", "") for i, text in enumerate(texts)]
    sampling = local.Sampling(0, "benchmark", options.longest, rows=options.rows)
    local.sample(policy, prompts[:1], 2, local.Sampling(0, "warm", 4, rows=2))

    def run() -> dict[str, float]:
        rollouts = local.sample(policy, prompts, options.group, sampling)
        lengths, tokens = rollouts.lengths_PG, rollouts.tokens_PGT
        check = int((tokens % 9973).sum())
        return {"tokens": int(lengths.sum()), "longest": int(lengths.max()), "check": check}

    return run


def ending(options: argparse.Namespace, lengths: list[int]) -> Callable[..., np.ndarray]:
    """Make uniforms that draw token 0, which ends a completion, at the completion's length only."""
    uniforms = local.uniforms

    def until_the_end(*arguments: Any) -> np.ndarray:
        draws, prompt, completions = (
            np.maximum(uniforms(*arguments), 0.02), arguments[3], arguments[4]
        )  # fmt: skip
        for row, i in zip(draws, completions, strict=True):
            length = lengths[(int(prompt) * options.group + i) % len(lengths)]
            if options.lengths == "gsm8k":
                row[min(length, options.longest, len(row)) - 1] = 0
        return draws

    return until_the_end
