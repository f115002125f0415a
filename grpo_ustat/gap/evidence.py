"""Data classes for a theorem and for the results of its test."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_ustat.config.gap import GapConfig
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.runs.claims import agreement, correct_family, worst_verdict
from grpo_ustat.runs.result import Claim

Points = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Series:
    """Measurements and predictions in the figure that share a colour."""

    # Label in the legend.
    label: str
    x: Points
    # Measured values, or intervals of them; drawn as markers.
    measured: Points | Sequence[Interval] = ()
    # Predicted values, drawn as a line.
    predicted: Points = ()


@dataclass(frozen=True)
class Panel:
    """The figure of a theorem's test."""

    xlabel: str
    ylabel: str
    series: Sequence[Series]
    # Logarithmic axes: "x" or "xy".
    log: str = "xy"


def columns_of(name: str, intervals: Sequence[Interval]) -> dict[str, Points]:
    """Return the columns `name`, `low` and `high` of estimates with intervals."""
    return dict(zip((name, "low", "high"), np.array(intervals).T, strict=True))


def rows_of(same: Mapping[str, Any], columns: Mapping[str, Points]) -> list[dict[str, Any]]:
    """Return rows of curves.csv.

    Args:
        same: values that all rows share, keyed by column.
        columns: values of the rows, keyed by column.
    """
    values = (np.asarray(x).tolist() for x in columns.values())
    return [{**same, **dict(zip(columns, row, strict=True))} for row in zip(*values, strict=True)]


@dataclass(frozen=True)
class Evidence:
    """Results of a theorem's test."""

    # Claims in order of importance. `correct_family` corrects their verdicts for multiple testing.
    claims: Sequence[Claim]
    panel: Panel
    # Rows of curves.csv. They contain the values in the figure and further values.
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
