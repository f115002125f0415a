"""How an update's completions are cut into backward passes: for memory and speed only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from accelerate.utils.memory import clear_device_cache

from grpo_ustat.checks import ConfigError
from grpo_ustat.policy.devices import out_of_memory
from grpo_ustat.records import Rollouts
from grpo_ustat.runs.log import warn

Result = TypeVar("Result")

FULL = 8  # a part of 1/FULL of the tokens allowed makes large enough products
RAGGED = 0.9  # of a part's longest completion: shorter ones go into a part of their own


@dataclass(frozen=True)
class Pass:
    """Prompts read together, and the completions that continue them, part by part.

    Attributes:
        prompts: prompt numbers, ascending.
        parts: flat completion indices p*G + i; the longest completions come first.
    """

    prompts: np.ndarray
    parts: list[np.ndarray]


def plan(rollouts: Rollouts, index: np.ndarray, tokens: int, share: bool) -> list[Pass]:
    """Cut completions into passes whose padded tokens stay below a limit.

    Args:
        rollouts: prompts and completions.
        index: flat indices of the completions that count.
        tokens: padded prompt and completion tokens at a time; a single row may exceed them.
        share: whether a pass reads each of its prompts once.
    """
    size = rollouts.mask_PGT.shape[1]
    heads_N = np.array([len(rollouts.prompt_tokens[i // size]) for i in index], dtype=np.int64)
    lengths_N = rollouts.lengths_PG.ravel()[index]
    if not share or len(index) < 2 * len(np.unique(index // size)):
        order = np.lexsort((index, -(heads_N + lengths_N)))
        rows = [(index[k], heads_N[k], lengths_N[k]) for k in order]
        return [Pass(np.unique(part // size), [part]) for part in _parts(rows, tokens)]
    known = dict(zip((index // size).tolist(), heads_N.tolist(), strict=True))
    prompts = sorted(known, key=lambda p: (-known[p], p))
    passes = []
    for chosen in _parts([(p, known[p], 0) for p in prompts], max(1, tokens // 4)):
        inside = np.flatnonzero(np.isin(index // size, chosen))
        head = max(known[p] for p in chosen.tolist())
        order = inside[np.lexsort((index[inside], -lengths_N[inside]))]
        rows = [(index[k], head, lengths_N[k]) for k in order]
        left = max(1, tokens - head * len(chosen))
        passes.append(Pass(np.sort(chosen), list(_parts(rows, left, tokens // FULL))))
    return passes


def _parts(
    rows: Iterable[tuple[int, int, int]], tokens: int, enough: float = math.inf
) -> Iterator[np.ndarray]:
    """Consecutive (name, head, tail) while count x (longest head + longest tail) <= tokens.

    Once a part has enough tokens, it also ends before a tail that would be padded by much.
    """
    names: list[int] = []
    head = tail = 0
    for name, own_head, own_tail in rows:
        padded = len(names) * (head + tail) >= enough and own_tail < RAGGED * tail
        head, tail = max(head, own_head), max(tail, own_tail)
        if names and (padded or (len(names) + 1) * (head + tail) > tokens):
            yield np.array(names)
            names, head, tail = [], own_head, own_tail
        names.append(name)
    if names:
        yield np.array(names)


class Limit:
    """Padded tokens of a backward pass; halved where memory runs out, which changes no gradient.

    Args:
        tokens: `micro_batch_tokens`.
    """

    def __init__(self, tokens: int):
        self.tokens = tokens

    def attempt(self, work: Callable[[], Result]) -> Result:
        """What the work returns; where memory runs out, again with half as many tokens.

        Raises:
            ConfigError: nothing is left to halve.
        """
        while True:
            try:
                return work()
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
            self._halve()  # not in the handler: the error holds all that was allocated

    def _halve(self) -> None:
        if self.tokens < 2:
            raise ConfigError(
                "out of memory with one completion at a time: use gradient_checkpointing=true, "
                "bf16=true, lora=r16, or a smaller max_completion_length"
            )
        self.tokens //= 2
        clear_device_cache(garbage_collection=True)
        warn(
            f"out of memory in an update; the same gradient again with "
            f"micro_batch_tokens={self.tokens}"
        )
