"""What every task offers: prompts of a split, and a reward for each completion."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from grpo_ustat.records import Prompt, Rollouts


class Task(Protocol):
    """A set of questions with a reward."""

    def prompts(self, split: str) -> list[Prompt]:
        """The prompts of `train`, `test` or `study`, in a fixed order."""
        ...

    def extract(self, completion: str) -> str | None:
        """The final answer that a completion states, None where none is found."""
        ...

    def reward(self, prompt: Prompt, completion: str) -> float:
        """The reward of one completion, in [0, 1]; 1 counts as right."""
        ...


def rewards(task: Task, rollouts: Rollouts) -> np.ndarray:
    """Rewards of every completion, shape [P, G], float64.

    Raises:
        FloatingPointError: one is not finite; names its prompt.
    """
    found_PG = np.array(
        [
            [task.reward(prompt, text) for text in texts]
            for prompt, texts in zip(rollouts.prompts, rollouts.texts_PG, strict=True)
        ],
        dtype=np.float64,
    )
    for p, i in np.argwhere(~np.isfinite(found_PG)):
        raise FloatingPointError(
            f"the reward of completion {i} of prompt {rollouts.prompts[p].id} is {found_PG[p, i]}: "
            "a reward must be a finite number"
        )
    return found_PG


def answered(task: Task, rollouts: Rollouts) -> np.ndarray:
    """Whether an answer was found in each completion, right or wrong, bool [P, G]."""
    return np.array(
        [[task.extract(text) is not None for text in texts] for texts in rollouts.texts_PG]
    )
