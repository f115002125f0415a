"""Random numbers that depend only on what they are drawn for, not on earlier draws.

Uniform numbers come from Philox (Salmon et al. 2011), a counter-based generator. The key is a hash
of (seed, stream, step, prompt id), and the counter starts at the completion's index. Therefore
results do not depend on the number of processes, the micro-batch size, the order of work or
restarts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def philox_key(seed: int, stream: str, step: int, name: str) -> np.ndarray:
    """Return a 128-bit Philox key as two uint64.

    Args:
        seed: seed of the run.
        stream: purpose of the draws, such as `rollout`, `value` or `eval`.
        step: number of the training step or replicate.
        name: prompt id.
    """
    text = f"{seed}\x1f{stream}\x1f{step}\x1f{name}"
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), dtype=np.uint64)


def generator(seed: int, stream: str, step: int = 0, name: str = "") -> np.random.Generator:
    """Return a generator for draws that belong to no completion, such as the choice of prompts."""
    return np.random.Generator(np.random.Philox(key=philox_key(seed, stream, step, name)))


def uniforms(
    seed: int, stream: str, step: int, prompt_id: str, completions: Sequence[int], count: int
) -> np.ndarray:
    """Return uniform numbers in [0, 1), as an array [len(completions), count].

    Row i depends on the completion index `completions[i]`, and not on the other indices.

    >>> both = uniforms(0, "rollout", 3, "7*3", range(2), 4)
    >>> second = uniforms(0, "rollout", 3, "7*3", range(1, 2), 2)
    >>> bool((both[1, :2] == second[0]).all())
    True
    """
    key = philox_key(seed, stream, step, prompt_id)
    rows = []
    for completion in completions:
        bits = np.random.Philox(key=key, counter=[0, 0, completion, 0])
        rows.append(np.random.Generator(bits).random(count))
    return np.array(rows)


def request_seeds(
    seed: int, stream: str, step: int, prompt_id: str, completions: range
) -> list[int]:
    """Return a seed in [0, 2^63) for each completion, for samplers that draw numbers themselves.

    >>> request_seeds(0, "rollout", 3, "7*3", range(2))[1:] == request_seeds(
    ...     0, "rollout", 3, "7*3", range(1, 2)
    ... )
    True
    """
    key = philox_key(seed, stream, step, prompt_id)
    bits = [np.random.Philox(key=key, counter=[0, 0, i, 0]) for i in completions]
    return [int(b.random_raw()) >> 1 for b in bits]
