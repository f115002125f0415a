"""The texts that the embedded policies learn to write, and which of their tokens decide the answer.

A worked solution leaves free choices that do not touch correctness: the order of commuting steps,
the order of two summands or factors, the wording between steps, spaces around operators.
"""

from __future__ import annotations

import random
import re

from grpo_ustat.tasks.answers import MARK
from grpo_ustat.tasks.arithmetic import Question

OPENINGS = ("", "so ", "first ", "we get ", "now ")
LINKS = (", ", "; ", ". ", ": ", " so ", " then ", " and ", " next ")


def direct(question: Question) -> str:
    """The bare answer."""
    return str(question.answer)


def worked(question: Question, rng: random.Random) -> str:
    """A short worked solution ending in ` #### answer`, with random wording and order."""
    steps = [_spaced(step, rng) for step in _steps(question, rng)]
    text = rng.choice(OPENINGS) + steps[0]
    for step in steps[1:]:
        text += rng.choice(LINKS) + step
    return f"{text} {MARK} {question.answer}"


def _spaced(step: str, rng: random.Random) -> str:
    """The step with a space or none at each of its joints but the last."""
    first, *rest = re.fullmatch(r"(-?\d+)([-+*/])(-?\d+)(=-?\d+)", step).groups()
    return first + "".join(rng.choice(("", " ")) + part for part in rest)


def _steps(question: Question, rng: random.Random) -> list[str]:
    if question.kind == "multiplication":
        return _product_steps(max(question.operands), min(question.operands), rng)
    if question.kind == "division":
        return _quotient_steps(*question.operands, rng)
    if question.kind == "parentheses":
        return _parenthesis_steps(question, rng)
    return _sum_steps(question.operands, rng)[0]


def _add(a: int, b: int, rng: random.Random) -> str:
    """One step a+b; b may be negative, and two non-negative summands come in either order."""
    if a >= 0 and b >= 0 and rng.random() < 0.5:
        a, b = b, a
    return f"{a}{b:+d}={a + b}"


def _times(a: int, b: int, rng: random.Random) -> str:
    a, b = (a, b) if rng.random() < 0.5 else (b, a)
    return f"{a}*{b}={a * b}"


def _sum_steps(terms: tuple[int, ...], rng: random.Random) -> tuple[list[str], int]:
    """Add signed terms two at a time in a random order that starts with a positive one."""
    rest = list(terms)
    total = rest.pop(rng.choice([i for i, t in enumerate(rest) if t > 0]))
    steps = []
    while rest:
        term = rest.pop(rng.randrange(len(rest)))
        steps.append(_add(total, term, rng))
        total += term
    return steps, total


def _parenthesis_steps(question: Question, rng: random.Random) -> list[str]:
    a, b, c = question.operands
    if question.inside == 0:
        return [_add(a, b, rng), _add(a + b, c, rng)]
    inner = abs(b) + c
    return [_add(abs(b), c, rng), _add(a, inner if b > 0 else -inner, rng)]


def _product_steps(factor: int, digit: int, rng: random.Random) -> list[str]:
    tens, ones = factor - factor % 10, factor % 10
    parts = [_times(tens, digit, rng), _times(ones, digit, rng)]
    rng.shuffle(parts)
    return [*parts, _add(tens * digit, ones * digit, rng)]


def _quotient_steps(factor: int, digit: int, rng: random.Random) -> list[str]:
    tens, ones = factor - factor % 10, factor % 10
    rest = ones * digit
    subtract = f"{factor * digit}-{tens * digit}={rest}"
    return [_times(tens, digit, rng), subtract, f"{rest}/{digit}={ones}"]


def decides_answer(completion: str) -> list[bool]:
    """For each character and then the end token, whether it belongs to a result or the answer.

    True from the first character after `=` or `#### ` up to and including the one that ends the
    number. Whether a position is marked depends only on what precedes it, so the scores of marked
    and unmarked tokens have inner products of mean zero and E q is the sum of the two parts.
    A text without the answer mark is an answer from its first character on.
    """
    marks, deciding = [], MARK not in completion
    for i, character in enumerate(completion):
        before = completion[:i]
        if before.endswith(("=", f"{MARK} ")):
            deciding = True
        marks.append(deciding)
        ends_number = before[-1:].isdigit() if character == " " else character not in "-0123456789"
        if deciding and ends_number:
            deciding = False
    return [*marks, deciding]
