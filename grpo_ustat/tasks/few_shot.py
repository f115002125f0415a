"""One-step arithmetic after solved examples: for base and small language models.

A prompt is some solved lines, `3 * 4 = 12`, and one unsolved line. There are few such questions, so
each falls by the hash of its canonical form (3 * 7 and 7 * 3 share one) into train, test, study or
the solved examples; a split never holds what another one or an example shows.
"""

from __future__ import annotations

import hashlib
import operator
import random
from dataclasses import dataclass

from grpo_ustat.checks import ConfigError
from grpo_ustat.records import Prompt
from grpo_ustat.tasks.prompts import render

SPLITS = ("train", "train", "test", "study", "study", "shots")
_DIGITS = range(1, 10)
_TABLES = {
    "one_digit_product": ("*", operator.mul, _DIGITS, _DIGITS),
    "one_digit_sum": ("+", operator.add, _DIGITS, _DIGITS),
    "plus_one": ("+", operator.add, range(10, 100), (1,)),
}


@dataclass(frozen=True)
class Question:
    """One question, `7 * 8`, its answer, and what it is in whatever order it is written."""

    text: str
    answer: int
    canonical: str

    @property
    def split(self) -> str:
        """2/6 train, 1/6 test, 2/6 study, 1/6 shots."""
        digest = hashlib.blake2b(self.canonical.encode(), digest_size=8).digest()
        return SPLITS[int.from_bytes(digest, "big") % len(SPLITS)]


def questions(name: str) -> list[Question]:
    """Every question of the dataset `name`."""
    sign, result, lefts, rights = _TABLES[name]
    return [
        Question(f"{a} {sign} {b}", result(a, b), f"{min(a, b)}{sign}{max(a, b)}")
        for a in lefts
        for b in rights
    ]


def draw(name: str, split: str, count: int, seed: int) -> list[Question]:
    """`count` distinct questions of a split, of `shots` in one order each; fewer are the first of
    more.

    Raises:
        ConfigError: the split holds fewer.
    """
    held = [question for question in questions(name) if question.split == split]
    random.Random(f"few_shot/{name}/{split}/{seed}").shuffle(held)
    if split == "shots":
        held = list({question.canonical: question for question in held}.values())
    if count > len(held):
        key = split if split == "shots" else f"{split}_size"
        raise ConfigError(f"dataset.{key}={count} of {name}, which has {len(held)}: ask for fewer")
    return held[:count]


class FewShotTask:
    """The task: prompts of each split and a 0/1 reward for the right integer and nothing else.

    Args:
        name: `one_digit_product`, `one_digit_sum` or `plus_one`.
        shots: number of solved lines, the same ones before every question.
        sizes: number of questions of each split.
        template: prompt template, with `{shots}` for the solved lines and `{question}`.
        seed: of questions and solved lines, not of the run.

    Raises:
        ConfigError: more questions or solved lines are asked for than there are.
    """

    def __init__(self, name: str, shots: int, sizes: dict[str, int], template: str, seed: int):
        solved = draw(name, "shots", shots, seed)
        self._name = name
        self._template = template
        self._shots = "".join(f"{q.text} = {q.answer}\n" for q in solved)
        self._questions = {split: draw(name, split, size, seed) for split, size in sizes.items()}

    def prompts(self, split: str) -> list[Prompt]:
        """The split's questions as prompts, in the order in which they were drawn."""
        return [
            Prompt(
                id=q.text,
                text=render(self._template, q.text, self._shots),
                question=q.text,
                answer=str(q.answer),
                kind=self._name,
            )
            for q in self._questions[split]
        ]

    def extract(self, completion: str) -> str | None:
        """The completion without the space around it, if it is digits and nothing else."""
        text = completion.strip()
        return text if text.isascii() and text.isdecimal() else None

    def reward(self, prompt: Prompt, completion: str) -> float:
        """1 if the completion is the right integer but for the space around it, else 0."""
        return float(self.extract(completion) == prompt.answer)
