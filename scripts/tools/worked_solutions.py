"""Texts that the embedded policies learn to write.

A worked solution involves choices that do not affect its correctness: the order of commuting steps,
the order of two summands or factors, the words between steps, and spaces around operators.
"""

from __future__ import annotations

import operator
import random

from grpo_ustat.tasks.answers import MARK
from grpo_ustat.tasks.arithmetic import Exercise

OPENINGS = ("", "so ", "first ", "we get ", "now ")
LINKS = (", ", "; ", ". ", ": ", " so ", " then ", " and ", " next ")


def direct(question: Exercise) -> str:
    """Return the answer only."""
    return str(question.answer)


FILLERS = ("", "well ", "ok ", "hm ", "look ", "see ")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
SLIPS = (-10, -2, -1, 1, 2, 10)


class Writer:
    """Writer of worked solutions with random wording, spacing and order of steps.

    Args:
        seed: seed of the random choices.
        careless: the probability that a step's result is wrong; later steps use that result.
        chatty: True if each step begins with a random filler word, which can be empty.
    """

    def __init__(self, seed: int, careless: float = 0.0, chatty: bool = False):
        self._rng = random.Random(f"wording/{seed}")
        self._careless = careless
        self._chatty = chatty

    def solution(self, question: Exercise) -> str:
        """Write a short solution that ends in ` #### answer`."""
        steps, answer = self._steps(question)
        text = self._rng.choice(OPENINGS) + self._filler() + steps[0]
        for step in steps[1:]:
            text += self._rng.choice(LINKS) + self._filler() + step
        return f"{text} {MARK} {answer}"

    def _filler(self) -> str:
        return self._rng.choice(FILLERS) if self._chatty else ""

    def _steps(self, question: Exercise) -> tuple[list[str], int]:
        if question.kind == "multiplication":
            return self._product(max(question.operands), min(question.operands))
        if question.kind == "division":
            return self._quotient(*question.operands)
        if question.kind == "parentheses":
            return self._parentheses(question)
        return self._sum(question.operands)

    def _step(self, a: int, sign: str, b: int) -> tuple[str, int]:
        """Write `a sign b=result` with optional spaces; return the text and the result."""
        result = OPERATORS[sign](a, b)
        if self._rng.random() < self._careless:
            result += self._rng.choice(SLIPS)
        gaps = [self._rng.choice(("", " ")) for _ in range(3)]
        return f"{a}{gaps[0]}{sign}{gaps[1]}{b}{gaps[2]}={result}", result

    def _add(self, a: int, b: int) -> tuple[str, int]:
        """Write a + b; b can be negative, and non-negative summands come in random order."""
        if b < 0:
            return self._step(a, "-", -b)
        if a >= 0 and self._rng.random() < 0.5:
            a, b = b, a
        return self._step(a, "+", b)

    def _times(self, a: int, b: int) -> tuple[str, int]:
        a, b = (a, b) if self._rng.random() < 0.5 else (b, a)
        return self._step(a, "*", b)

    def _sum(self, terms: tuple[int, ...]) -> tuple[list[str], int]:
        """Add signed terms two at a time in a random order that starts with a positive term."""
        rest = list(terms)
        total = rest.pop(self._rng.choice([i for i, t in enumerate(rest) if t > 0]))
        steps = []
        while rest:
            step, total = self._add(total, rest.pop(self._rng.randrange(len(rest))))
            steps.append(step)
        return steps, total

    def _parentheses(self, question: Exercise) -> tuple[list[str], int]:
        a, b, c = question.operands
        if question.inside == 0:
            first, inner = self._add(a, b)
            second, result = self._add(inner, c)
        else:
            first, inner = self._add(abs(b), c)
            second, result = self._add(a, inner if b > 0 else -inner)
        return [first, second], result

    def _product(self, factor: int, digit: int) -> tuple[list[str], int]:
        parts = [self._times(part, digit) for part in (factor - factor % 10, factor % 10)]
        self._rng.shuffle(parts)
        last, result = self._add(parts[0][1], parts[1][1])
        return [parts[0][0], parts[1][0], last], result

    def _quotient(self, factor: int, digit: int) -> tuple[list[str], int]:
        tens = factor - factor % 10
        first, product = self._times(tens, digit)
        second, rest = self._step(factor * digit, "-", product)
        third, ones = self._step(rest, "/", digit)
        return [first, second, third], tens + ones
