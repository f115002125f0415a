"""Small problems for tests."""

from __future__ import annotations

from dataclasses import replace

from grpo_ustat.gap.problems import PROBLEMS


def coins(**changes):
    return replace(PROBLEMS["coins"], **changes)


def unequal(**changes):
    """Two prompts of which one is easier, one coordinate, no style."""
    return replace(PROBLEMS["unequal_coins"], **changes)


def ridge():
    return PROBLEMS["ridge_coins"]


def softmax():
    return PROBLEMS["softmax"]
