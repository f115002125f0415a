"""Synthetic arithmetic: five kinds of questions with integer answers and disjoint splits.

The paper's Figure 4 uses these kinds: two-step and three-step addition/subtraction, a single
multiplication, a single exact division, and addition/subtraction with parentheses. Equivalent
questions (3*7 and 7*3, 9-(4+2) and 9-2-4, 21/7 and 3*7) must be in the same split. Each question
therefore has a canonical form, which is the same for equivalent questions, and the hash of this
form determines the split.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Container, Iterator
from dataclasses import dataclass

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.records import Question
from grpo_ustat.tasks.answers import MARK

KINDS = ("two_step", "three_step", "multiplication", "division", "parentheses")
SPLITS = ("train", "train", "train", "test", "study")
# After this number of unsuccessful draws, no further question of a kind is assumed to exist.
MAX_TRIES = 1000


@dataclass(frozen=True)
class Ranges:
    """Operand ranges, including both ends."""

    # Terms of sums and differences.
    min_term: int = 1
    max_term: int = 49
    # Larger factor of a product, or quotient of a division. Multiples of ten are excluded, because
    # they appear as intermediate steps of other questions.
    min_factor: int = 11
    max_factor: int = 99
    # Smaller factor of a product, or divisor of a division.
    min_digit: int = 2
    max_digit: int = 9


@dataclass(frozen=True)
class Exercise:
    """Question with the operands from which its worked solution is written."""

    kind: str
    text: str
    answer: int
    # Signed terms of a sum as written, or the pair (factor, digit) of a product or quotient.
    operands: tuple[int, ...]
    # Index of the first of the two terms in parentheses; None if there are no parentheses.
    inside: int | None = None

    @property
    def canonical(self) -> str:
        """Text that is the same for equivalent questions, such as 3*7 and 7*3."""
        if self.kind in ("multiplication", "division"):
            return "*".join(map(str, sorted(self.operands)))
        terms = self.operands
        if self.inside and terms[self.inside] <= 0:
            terms = (*terms[:-1], -terms[-1])
        return "+".join(map(str, sorted(terms)))

    @property
    def split(self) -> str:
        """Split determined by the hash of the canonical form: 3/5 train, 1/5 test, 1/5 study."""
        digest = hashlib.blake2b(self.canonical.encode(), digest_size=8).digest()
        return SPLITS[int.from_bytes(digest, "big") % len(SPLITS)]


def _steps(rng: random.Random, ranges: Ranges, kind: str) -> Exercise:
    count = 3 if kind == "two_step" else 4
    terms = [rng.randint(ranges.min_term, ranges.max_term) for _ in range(count)]
    signed = (terms[0], *(t * rng.choice((1, -1)) for t in terms[1:]))
    text = str(signed[0]) + "".join(f"{term:+d}" for term in signed[1:])
    return Exercise(kind, text, sum(signed), signed)


def _parentheses(rng: random.Random, ranges: Ranges, kind: str) -> Exercise:
    """Create a question with parentheses.

    The operands have the signs that are written before them. For example, 9-(4+2) has the operands
    (9, -4, 2), although its value is 9-4-2.
    """
    a, b, c = (rng.randint(ranges.min_term, ranges.max_term) for _ in range(3))
    inside = rng.choice((0, 1))
    first, second = rng.choice((1, -1)), rng.choice((1, -1))
    if inside == 0:
        if first < 0 and a < b:
            a, b = b, a
        terms = (a, first * b, second * c)
        return Exercise(kind, f"({a}{first * b:+d}){second * c:+d}", sum(terms), terms, 0)
    if second < 0 and b < c:
        b, c = c, b
    text = f"{a}{'+' if first > 0 else '-'}({b}{second * c:+d})"
    return Exercise(kind, text, a + first * (b + second * c), (a, first * b, second * c), 1)


def _product(rng: random.Random, ranges: Ranges, kind: str) -> Exercise:
    factor = rng.randint(ranges.min_factor, ranges.max_factor)
    while factor % 10 == 0:
        factor = rng.randint(ranges.min_factor, ranges.max_factor)
    digit = rng.randint(ranges.min_digit, ranges.max_digit)
    if kind == "division":
        return Exercise(kind, f"{factor * digit}/{digit}", factor, (factor, digit))
    pair = (factor, digit) if rng.random() < 0.5 else (digit, factor)
    return Exercise(kind, f"{pair[0]}*{pair[1]}", factor * digit, pair)


_MAKERS = {
    "two_step": _steps,
    "three_step": _steps,
    "multiplication": _product,
    "division": _product,
    "parentheses": _parentheses,
}


def _exercise(rng: random.Random, kind: str, split: str, ranges: Ranges) -> Exercise:
    for _ in range(MAX_TRIES):
        question = _MAKERS[kind](rng, ranges, kind)
        if question.split == split:
            return question
    raise ConfigError(
        f"no {split} question of kind {kind} exists in these operand ranges: widen the dataset's "
        "ranges"
    )


def stream(split: str, ranges: Ranges, seed: int) -> Iterator[Exercise]:
    """Yield an endless stream of questions from a split; questions can repeat.

    The kind of each question is drawn uniformly.
    """
    rng = random.Random(f"arithmetic/{split}/{seed}")
    while True:
        yield _exercise(rng, rng.choice(KINDS), split, ranges)


def draw(
    split: str, count: int, ranges: Ranges, seed: int | str, without: Container[str] = ()
) -> list[Exercise]:
    """Draw `count` distinct questions from a split, excluding the texts in `without`.

    The kind of each question is drawn uniformly.
    """
    rng = random.Random(f"arithmetic/{split}/{seed}")
    exercises: dict[str, Exercise] = {}
    while len(exercises) < count:
        kind = rng.choice(KINDS)
        tries = (_exercise(rng, kind, split, ranges) for _ in range(MAX_TRIES))
        question = next(
            (q for q in tries if q.text not in exercises and q.text not in without), None
        )
        if question is None:
            have = sum(q.kind == kind for q in exercises.values())
            raise ConfigError(
                f"{count} distinct {split} questions requested, but these operand ranges have only "
                f"about {have} of kind {kind}: widen the dataset's ranges or ask for fewer"
            )
        exercises[question.text] = question
    return list(exercises.values())


def worked(exercise: Exercise) -> str:
    """Return a worked solution: first the parentheses, then the terms from left to right.

    >>> worked(Exercise("parentheses", "9-(4+2)", 3, (9, -4, 2), 1))
    '4+2=6, 9-6=3 #### 3'
    """
    if exercise.kind in ("multiplication", "division"):
        return f"{exercise.text}={exercise.answer} {MARK} {exercise.answer}"
    terms, steps, last = list(exercise.operands), [], ""
    if exercise.inside == 1:
        sign, first = (1 if terms[1] > 0 else -1), abs(terms[1])
        steps.append(f"{first}{terms[2]:+d}={first + terms[2]}")
        terms = [terms[0], sign * (first + terms[2])]
        last = f"{terms[0]}{'+' if sign > 0 else '-'}{abs(terms[1])}={sum(terms)}"
    while len(terms) > 1:
        reached = terms[0] + terms[1]
        steps.append(last or f"{terms[0]}{terms[1]:+d}={reached}")
        terms = [reached, *terms[2:]]
    return f"{', '.join(steps)} {MARK} {exercise.answer}"


class Arithmetic:
    """Source of synthetic arithmetic questions.

    Args:
        ranges: ranges of the operands.
        sizes: number of questions of `train`, `test`, `study` and `examples`. Prompts show the
            examples with their solutions. The examples are drawn from the questions of the train
            split that are not used for training.
        seed: seed with which questions are drawn; it is separate from the seed of the run.
        examples_seed: seed with which the examples are drawn.
    """

    def __init__(self, ranges: Ranges, sizes: dict[str, int], seed: int, examples_seed: int = 0):
        self._ranges, self._sizes = ranges, sizes
        self._seed, self._examples_seed = seed, examples_seed

    def questions(self, split: str) -> list[Question]:
        """Return the split's questions in the order in which they were drawn."""
        return [
            Question(q.text, q.text, str(q.answer), q.kind, worked(q))
            for q in self._exercises(split)
        ]

    def _exercises(self, split: str) -> list[Exercise]:
        if split != "examples":
            return draw(split, self._sizes[split], self._ranges, self._seed)
        trained = {q.text for q in self._exercises("train")}
        seed = f"examples/{self._examples_seed}"
        return draw("train", self._sizes[split], self._ranges, seed, without=trained)
