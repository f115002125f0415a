"""Division of an update's completions into micro-batches, which affects only memory and speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from accelerate.utils.memory import clear_device_cache

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.memory import out_of_memory
from grpo_ustat.records import Rollouts
from grpo_ustat.terminal.console import warn

Result = TypeVar("Result")

# A part may end early, to save padding, only if it has at least this share of the allowed tokens.
# The share is larger on a GPU, because each further pass costs thousands of kernel launches there.
MIN_FILL = {"cpu": 1 / 8, "cuda": 1 / 2}
# Such a part ends early before a completion that is shorter than this share of its longest one.
MIN_LENGTH_RATIO = 0.9


@dataclass(frozen=True)
class MicroBatch:
    """Prompts that are read together, and their completions, divided into parts."""

    # Indices of the prompts, in ascending order.
    prompts: np.ndarray
    # Flat indices p*G + i of the completions in each part. The longest completions come first.
    parts: list[np.ndarray]


def plan(
    rollouts: Rollouts, index: np.ndarray, tokens: int, share: bool, device: str = "cpu"
) -> list[MicroBatch]:
    """Divide completions into micro-batches that respect a limit on the number of padded tokens.

    Args:
        rollouts: prompts and their completions.
        index: flat indices p*G + i of the completions to read.
        tokens: largest number of padded prompt and completion tokens at a time. A single row is
            allowed to exceed it.
        share: True if a micro-batch may read each of its prompts once for several completions.
        device: device type, a key of `MIN_FILL`.
    """
    size = rollouts.mask_PGT.shape[1]
    heads_N = np.array([len(rollouts.prompt_tokens[i // size]) for i in index], dtype=np.int64)
    lengths_N = rollouts.lengths_PG.ravel()[index]
    if not share or len(index) < 2 * len(np.unique(index // size)):
        order = np.lexsort((index, -(heads_N + lengths_N)))
        columns = (index[order], heads_N[order], lengths_N[order])
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [MicroBatch(np.unique(part // size), [part]) for part in _parts(rows, tokens)]
    heads = dict(zip((index // size).tolist(), heads_N.tolist(), strict=True))
    longest_first = sorted(heads, key=lambda p: (-heads[p], p))
    micro_batches = []
    for prompts in _parts([(p, heads[p], 0) for p in longest_first], max(1, tokens // 4)):
        inside = np.flatnonzero(np.isin(index // size, prompts))
        head = max(heads[p] for p in prompts.tolist())
        order = inside[np.lexsort((index[inside], -lengths_N[inside]))]
        rows = [(int(index[k]), head, int(lengths_N[k])) for k in order]
        rest = max(1, tokens - head * len(prompts))
        parts = list(_parts(rows, rest, int(tokens * MIN_FILL.get(device, 1 / 2))))
        micro_batches.append(MicroBatch(np.sort(prompts), parts))
    return micro_batches


def _parts(
    rows: Iterable[tuple[int, int, int]], tokens: int, enough: float = math.inf
) -> Iterator[np.ndarray]:
    """Divide consecutive rows into parts with at most `tokens` padded tokens.

    A part has count x (longest head + longest tail) padded tokens. A part with `enough` tokens also
    ends before a row whose tail is so short that it would need much padding.

    Args:
        rows: for each row, its number, the number of prompt tokens (head), and the number of
            completion tokens (tail).
        tokens: largest number of padded tokens in a part with several rows.
        enough: smallest number of padded tokens with which a part may end early.

    Yields:
        Row numbers of each part.
    """
    numbers: list[int] = []
    longest_head = longest_tail = 0
    for number, head, tail in rows:
        padded = len(numbers) * (longest_head + longest_tail)
        ragged = padded >= enough and tail < MIN_LENGTH_RATIO * longest_tail
        longest_head, longest_tail = max(longest_head, head), max(longest_tail, tail)
        full = (len(numbers) + 1) * (longest_head + longest_tail) > tokens
        if numbers and (ragged or full):
            yield np.array(numbers)
            numbers, longest_head, longest_tail = [], head, tail
        numbers.append(number)
    if numbers:
        yield np.array(numbers)


class OutOfMemory(ConfigError):
    """Error raised if memory runs out even with one completion at a time."""


class TokenBudget:
    """Largest number of padded tokens in a backward pass, which is halved when memory runs out.

    The size of micro-batches does not change gradients.

    Args:
        tokens: initial number, the setting `micro_batch_tokens`.
    """

    def __init__(self, tokens: int):
        self.tokens = tokens

    def attempt(self, work: Callable[[], Result], what: str = "an update") -> Result:
        """Call a function and return its result; if memory runs out, halve `tokens` and try again.

        Args:
            work: function to call. It must read `tokens` in each call.
            what: name of the work, for the warning.

        Raises:
            OutOfMemory: If memory runs out although `tokens` is 1.
        """
        while True:
            try:
                return work()
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
            # Memory is freed only outside the `except` block, because the exception keeps
            # references to tensors.
            if self.tokens < 2:
                raise OutOfMemory(
                    "out of memory with one completion at a time: use "
                    "gradient_checkpointing=true, bf16=true, lora=r16, or a smaller "
                    "max_completion_length"
                )
            self.tokens //= 2
            clear_device_cache(garbage_collection=True)
            warn(f"out of memory in {what}: trying again with micro_batch_tokens={self.tokens}")
