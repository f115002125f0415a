"""Completions of several turns, split into one row per turn.

In each turn, the policy may read a different context, such as a summary of the earlier turns. The
log-probability of the completion is the sum of the log-probabilities of its turns. Its score, the
gradient of this log-probability, is therefore the sum of the scores of the turns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from grpo_ustat.policy.scores.backward import CompletionScores
from grpo_ustat.records import Rollouts


@dataclass(frozen=True)
class TurnRows:
    """R rows, each a turn of one of B completions of at most T tokens."""

    # The turns as rollouts. Each turn is the only completion of its prompt, and the prompt is the
    # context that the policy read in this turn.
    rollouts: Rollouts
    # Index of the completion to which each row belongs (0 to B - 1), in ascending order.
    completion_R: np.ndarray
    # Index of the completion's token with which each turn begins.
    start_R: np.ndarray

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.completion_R)

    def by_row(self, values_BT: np.ndarray) -> np.ndarray:
        """Convert values of the completions' tokens to values of the rows' tokens.

        The result has one row per turn and is 0 on padding.
        """
        width = self.rollouts.mask_PGT.shape[-1]
        padded_BT = np.pad(values_BT, ((0, 0), (0, width)))
        columns_RT = self.start_R[:, None] + np.arange(width)
        values_RT = padded_BT[self.completion_R[:, None], columns_RT]
        return np.ascontiguousarray(values_RT * self.rollouts.mask_PGT[:, 0])

    def by_completion(self, values_RT: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        """Convert values of the rows' tokens to values of the completions' tokens.

        The result has the given shape [B, T] and is 0 on padding.
        """
        values_BT = np.zeros(shape, values_RT.dtype)
        lengths_R = self.rollouts.lengths_PG[:, 0]
        for values_T, place, start, length in zip(
            values_RT, self.completion_R, self.start_R, lengths_R, strict=True
        ):
            values_BT[place, start : start + length] = values_T[:length]
        return values_BT

    def summed(self, scores: CompletionScores, count: int) -> CompletionScores:
        """Add up the scores of each completion's turns; `count` is the number of completions."""
        # The squared norm of a sum needs the inner products of the rows.
        assert scores.gram_BB is not None
        sums_BR = torch.zeros(count, self.count).to(scores.gram_BB)
        sums_BR[torch.from_numpy(self.completion_R), torch.arange(self.count)] = 1
        gram_BB = sums_BR @ scores.gram_BB @ sums_BR.T
        features_BR = scores.features_BR
        return replace(
            scores,
            sq_norm_B=gram_BB.diagonal(),
            gram_BB=gram_BB,
            features_BR=None if features_BR is None else sums_BR.to(features_BR) @ features_BR,
        )


def split_turns(rollouts: Rollouts, index: np.ndarray) -> TurnRows:
    """Split completions into one row per turn; a completion without turns is one row.

    Args:
        rollouts: prompts and their completions.
        index: flat indices p*G + i of completion i of prompt p.
    """
    size, longest = rollouts.mask_PGT.shape[1:]
    flat = {
        name: array.reshape(-1, longest)
        for name in ("tokens_PGT", "mask_PGT", "turn_PGT", "scored_PGT", "logprobs_PGT")
        if (array := getattr(rollouts, name)) is not None
    }
    contexts: list[list[int]] = []
    places: list[int] = []
    starts: list[int] = []
    stops: list[int] = []
    for place, i in enumerate(index):
        p, g = divmod(int(i), size)
        length = int(flat["mask_PGT"][i].sum())
        read = [rollouts.prompt_tokens[p]]
        turn_T = np.zeros(length, dtype=int)
        if rollouts.contexts_PG is not None:
            read, turn_T = rollouts.contexts_PG[p][g], flat["turn_PGT"][i, :length]
        first = np.searchsorted(turn_T, np.arange(len(read) + 1))
        contexts += read
        places += [place] * len(read)
        starts += first[:-1].tolist()
        stops += first[1:].tolist()
    width = max(stop - start for start, stop in zip(starts, stops, strict=True))
    rows: dict[str, Any] = {
        name: np.zeros((len(places), 1, width), array.dtype) for name, array in flat.items()
    }
    for row, (place, start, stop) in enumerate(zip(places, starts, stops, strict=True)):
        for name, array in flat.items():
            rows[name][row, 0, : stop - start] = array[index[place], start:stop]
    rows.pop("turn_PGT", None)
    return TurnRows(
        Rollouts(
            prompts=[rollouts.prompts[int(index[place]) // size] for place in places],
            prompt_tokens=contexts,
            ended_PG=np.ones((len(places), 1), dtype=bool),
            texts_PG=[[""] for _ in places],
            **rows,
        ),
        np.array(places),
        np.array(starts),
    )


def most_turns(rollouts: Rollouts) -> int:
    """Return the largest number of rows into which all completions of one prompt are split."""
    if rollouts.contexts_PG is None:
        return rollouts.mask_PGT.shape[1]
    return max(sum(map(len, completions)) for completions in rollouts.contexts_PG)
