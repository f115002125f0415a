"""Data classes for a theorem and for the results of its test."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_ustat.config.gap import GapConfig
from grpo_ustat.runs.claims import agreement, correct_family, worst_verdict
from grpo_ustat.runs.result import Claim

Points = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class PlotLine:
    """A curve in a figure."""

    # Label in the legend.
    label: str
    x: Points
    y: Points
    # Ends of the intervals of y, or None if y has no intervals.
    low: Points | None = None
    high: Points | None = None
    # True to draw a line, for a prediction. Measurements are drawn as markers.
    predicted: bool = False
    # True to draw a dashed line, for an upper bound on the measurements.
    bound: bool = False


def line_of(
    label: str,
    rows: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    predicted: bool = False,
    bound: bool = False,
) -> PlotLine:
    """Make a curve from two columns of curves.csv.

    Measurements must also have the columns `low` and `high`, the ends of their intervals.

    Args:
        label: label in the legend.
        rows: rows of curves.csv.
        x, y: names of the columns that are plotted.
        predicted, bound: see `PlotLine`.
    """
    column = {name: [row[name] for row in rows] for name in (x, y)}
    low, high = (
        None if predicted or bound else [row[name] for row in rows] for name in ("low", "high")
    )
    return PlotLine(label, column[x], column[y], low, high, predicted, bound)


@dataclass(frozen=True)
class Panel:
    """One panel of a figure."""

    title: str
    xlabel: str
    ylabel: str
    # Curves with the same label share a colour, for example a measurement and its prediction.
    curves: Sequence[PlotLine]
    # Logarithmic axes: "x", "y", "xy" or "" for none.
    log: str = ""


@dataclass(frozen=True)
class Evidence:
    """Results of a theorem's test."""

    # Claims in order of importance. `correct_family` corrects their verdicts for multiple testing.
    claims: Sequence[Claim]
    # Panels of the figure.
    panels: Sequence[Panel]
    # Rows of curves.csv. They contain the values in the panels and further values.
    rows: Sequence[Mapping[str, Any]]
    # Facts about the test problem, keyed by their names on the page.
    problem: Mapping[str, float | str] = field(default_factory=dict)
    # Number of completions drawn; 0 if everything was enumerated.
    rollouts: int = 0

    def __post_init__(self):
        object.__setattr__(self, "claims", correct_family(self.claims))

    @property
    def verdict(self) -> str:
        """Verdict of the whole test: the worst verdict of its claims, from `worst_verdict`."""
        return worst_verdict(self.claims)

    @property
    def answer(self) -> str:
        """Result of the test in a sentence."""
        return f"{agreement(self.claims)} claims agree with the measurement."


@dataclass(frozen=True)
class Theorem:
    """Theorem of the paper with its test; each theorem's module defines one as `THEOREM`."""

    # The paper's claim in a few sentences.
    statement: str
    # Function that runs the test.
    run: Callable[[GapConfig], Evidence]
    # Function that is called with the theorem's settings before any work. It raises ConfigError if
    # they violate the theorem's assumptions.
    check: Callable[[Any], None] = lambda theorem: None
    # Function of the theorem's settings that returns the number of completions that the test will
    # draw; 0 for a test that enumerates all outcomes.
    completions: Callable[[Any], int] = lambda theorem: 0


def theorem(kind: str) -> Theorem:
    """Return the theorem with a name such as `lemma6`, from the module of the same name."""
    return importlib.import_module(f"grpo_ustat.gap.{kind}").THEOREM
