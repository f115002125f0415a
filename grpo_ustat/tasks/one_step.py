"""One-step arithmetic questions, shown after solved examples, for base models and small models.

There are few distinct questions of this kind. The hash of a question's canonical form, which is the
same for 3 * 7 and 7 * 3, assigns the question to one of the splits train, test, study and examples.
These splits are therefore disjoint.
"""

from __future__ import annotations

import hashlib
import operator
import random
from dataclasses import dataclass

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.records import Question

SPLITS = ("train", "train", "test", "study", "study", "examples")
_DIGITS = range(1, 10)
TABLES = {
    "one_digit_product": ("*", operator.mul, _DIGITS, _DIGITS),
    "one_digit_sum": ("+", operator.add, _DIGITS, _DIGITS),
    "plus_one": ("+", operator.add, range(10, 100), (1,)),
    "plus_digit": ("+", operator.add, range(10, 100), _DIGITS),
}


@dataclass(frozen=True)
class Exercise:
    """Question such as `7 * 8`, with a canonical form that ignores the order of operands."""

    text: str
    answer: int
    table: str
    canonical: str

    @property
    def split(self) -> str:
        """Split determined by the canonical form: 2/6 train, 1/6 test, 2/6 study, 1/6 examples."""
        digest = hashlib.blake2b(self.canonical.encode(), digest_size=8).digest()
        return SPLITS[int.from_bytes(digest, "big") % len(SPLITS)]


def exercises(tables: list[str]) -> list[Exercise]:
    """Return all questions from the named `TABLES`; a question in two tables is returned once."""
    by_text = {}
    for name in tables:
        sign, result, lefts, rights = TABLES[name]
        for a in lefts:
            for b in rights:
                canonical = f"{min(a, b)}{sign}{max(a, b)}"
                exercise = Exercise(f"{a} {sign} {b}", result(a, b), name, canonical)
                by_text.setdefault(exercise.text, exercise)
    return list(by_text.values())


def draw(tables: list[str], split: str, count: int, seed: int) -> list[Exercise]:
    """Draw `count` distinct questions from a split; examples also have distinct canonical forms.

    With the same seed, a smaller draw is a prefix of a larger one.
    """
    name, stream = "+".join(tables), "shots" if split == "examples" else split
    held = [exercise for exercise in exercises(tables) if exercise.split == split]
    random.Random(f"few_shot/{name}/{stream}/{seed}").shuffle(held)
    if split == "examples":
        held = list({exercise.canonical: exercise for exercise in held}.values())
    if count > len(held):
        key = "prompt.shots" if split == "examples" else f"dataset.{split}_size"
        raise ConfigError(f"{key}={count}, but {name} has {len(held)}: use {len(held)} or less")
    return held[:count]


class OneStep:
    """Source of one-step arithmetic questions.

    Args:
        tables: names of entries of `TABLES`.
        sizes: number of questions of `train`, `test`, `study` and `examples`.
        seed: seed of the questions; it is not the seed of the run.
    """

    def __init__(self, tables: list[str], sizes: dict[str, int], seed: int, examples_seed: int = 0):
        self._exercises = {
            split: draw(tables, split, size, examples_seed if split == "examples" else seed)
            for split, size in sizes.items()
        }

    def questions(self, split: str) -> list[Question]:
        """Return the split's questions in the order in which they were drawn."""
        return [
            Question(q.text, q.text, str(q.answer), q.table, f"{q.text} = {q.answer}")
            for q in self._exercises[split]
        ]
