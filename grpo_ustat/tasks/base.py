"""What a task is made of: questions, a way to put them, and a judge of completions."""

from __future__ import annotations

import sys
from collections import Counter
from decimal import Decimal
from typing import Protocol

import numpy as np

from grpo_ustat.ranks import is_main
from grpo_ustat.records import Prompt, Question, Rollouts
from grpo_ustat.tasks.answers import final_number, stated
from grpo_ustat.tasks.prompts import Prompting


class Source(Protocol):
    """Questions of each split.

    Attributes:
        counts: of what was dropped and why, told once a run; may be missing.
    """

    def questions(self, split: str) -> list[Question]:
        """The questions of `train`, `test`, `study` or `examples`, in a fixed order; no question is
        in two of them.
        """
        ...


class Judge(Protocol):
    """Reads and rewards completions.

    Attributes:
        counts: of what went wrong while judging, `timeouts` and `failures`; grows.
    """

    counts: Counter[str]

    def extract(self, completion: str) -> str | None:
        """The final answer that a completion states, None where none is found."""
        ...

    def rewards(self, prompts: list[Prompt], completions: list[str]) -> list[float]:
        """The reward of each completion of its prompt, in [0, 1]; 1 counts as right."""
        ...


class NumberJudge:
    """1 for the right final number, else 0; see `final_number`."""

    def __init__(self):
        self.counts: Counter[str] = Counter()

    def extract(self, completion: str) -> str | None:
        """The number in its plainest writing."""
        return stated(completion)

    def rewards(self, prompts: list[Prompt], completions: list[str]) -> list[float]:
        """See `Judge.rewards`."""
        return [
            float(final_number(text) == Decimal(prompt.answer))
            for prompt, text in zip(prompts, completions, strict=True)
        ]


class Task:
    """Questions, a way to put them, and a judge of completions.

    Args:
        source: of the questions.
        prompting: how they are put.
        judge: of completions.
    """

    def __init__(self, source: Source, prompting: Prompting, judge: Judge):
        self._source, self._prompting, self._judge = source, prompting, judge

    def questions(self, split: str) -> list[Question]:
        """See `Source.questions`."""
        return self._source.questions(split)

    def prompts(self, split: str) -> list[Prompt]:
        """The prompts of `train`, `test` or `study`, in a fixed order."""
        return [self._prompting.prompt(question) for question in self.questions(split)]

    def extract(self, completion: str) -> str | None:
        """See `Judge.extract`."""
        return self._judge.extract(completion)

    def rewards(self, prompts: list[Prompt], completions: list[str]) -> list[float]:
        """See `Judge.rewards`."""
        return self._judge.rewards(prompts, completions)

    def take_counts(self) -> dict[str, int]:
        """What went wrong while judging since the last call: keys `timeouts` and `failures`, with a
        judge that can fail, else none.
        """
        counts = dict(self._judge.counts)
        self._judge.counts.update({name: -count for name, count in counts.items()})
        return counts

    @property
    def dropped(self) -> dict[str, int]:
        """How many questions the source left out, by reason; reasons without any are not named."""
        counts = getattr(self._source, "counts", {})
        return {reason: count for reason, count in counts.items() if count}


def tell_dropped(task: Task) -> None:
    """Say, once for all ranks, what the data set left out."""
    told = ", ".join(f"{count} {reason}" for reason, count in task.dropped.items())
    if told and is_main():
        print(f"note: questions left out: {told}", file=sys.stderr)


def rewards(task: Task, rollouts: Rollouts) -> np.ndarray:
    """Rewards of every completion, shape [P, G], float64.

    Raises:
        FloatingPointError: one is not finite; names its prompt.
    """
    texts = [text for texts in rollouts.texts_PG for text in texts]
    prompts = [p for p, of_p in zip(rollouts.prompts, rollouts.texts_PG, strict=True) for _ in of_p]
    found = np.array(task.rewards(prompts, texts), dtype=np.float64)
    found_PG = found.reshape(len(rollouts.prompts), -1)
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
