"""One-step arithmetic questions, shown after solved examples, for base models and small models.

There are few distinct questions of this kind, so the splits must be kept disjoint. Each question
has a canonical form, which is the same for 3 * 7 and 7 * 3. The hash of this form assigns the
question to one of the splits train, test, study and examples.
"""

from __future__ import annotations

import hashlib
import operator
import random
from dataclasses import dataclass

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.records import Question

# The hash of a question selects one entry, so the shares of the splits are the shares of entries.
SPLITS = ("train", "train", "test", "study", "study", "examples")
_DIGITS = range(1, 10)
# Kinds of questions: sign, operation, left operands and right operands.
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
    """Return all questions of some kinds, each once; `tables` are keys of `TABLES`."""
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
    """Draw `count` distinct questions from a split.

    A question and its mirror image, such as 3 * 7 and 7 * 3, may both be drawn, except as examples.
    With the same seed, the questions of a smaller draw are the first ones of a larger draw.
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
        tables: kinds of questions to include; each is a key of `TABLES`.
        sizes: number of questions of `train`, `test`, `study` and `examples`.
        seed: seed with which questions are drawn; it is separate from the seed of the run.
        examples_seed: seed with which the examples are drawn.
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
