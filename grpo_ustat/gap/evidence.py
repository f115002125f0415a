"""Data classes for a theorem and the results of its test: claims, curves and table rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_ustat.config.gap import Experiment, TheoryConfig
from grpo_ustat.runs.claims import correct_family, worst_verdict
from grpo_ustat.runs.result import Claim

Points = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class PlotLine:
    """A curve in a figure."""

    # Label in the legend.
    label: str
    x: Points
    y: Points
    # Ends of the intervals, or None if the values have no intervals.
    low: Points | None = None
    high: Points | None = None
    # True for a prediction, which is drawn as a line; measurements are drawn as markers.
    predicted: bool = False
    # True for an upper bound on the measurements, which is drawn as a dashed line.
    bound: bool = False


def line_of(
    label: str,
    rows: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    predicted: bool = False,
    bound: bool = False,
) -> PlotLine:
    """Make a curve from two columns; a measurement's interval is in the columns `low` and `high`.

    Args:
        label: label in the legend.
        rows: rows of curves.csv.
        x, y: names of the columns.
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
    # A prediction and a measurement with the same label share a colour.
    curves: Sequence[PlotLine]
    # Names of the logarithmic axes: "x", "y", "xy" or "".
    log: str = ""


@dataclass(frozen=True)
class Evidence:
    """Results of a theorem's test."""

    # Claims in order of importance. `correct_family` corrects their verdicts for multiple testing.
    claims: Sequence[Claim]
    # Panels of the figure.
    panels: Sequence[Panel]
    # Rows of curves.csv, which contain the values in the panels and further values.
    rows: Sequence[Mapping[str, Any]]
    # Result of the test in one sentence.
    answer: str
    # Limitations, unexpected results and explanations, one per entry.
    notes: Sequence[str] = ()
    # Facts about the test problem by name.
    problem: Mapping[str, float | str] = field(default_factory=dict)
    # Number of completions drawn; 0 if everything was enumerated.
    rollouts: int = 0

    def __post_init__(self):
        object.__setattr__(self, "claims", correct_family(self.claims))

    @property
    def verdict(self) -> str:
        """Worst verdict among the claims; see `worst_verdict`."""
        return worst_verdict(self.claims)


@dataclass(frozen=True)
class Theorem:
    """Theorem of the paper with its test; each theorem's module defines one as `THEOREM`."""

    # Schema of the configuration, which contains the title and the admissible kinds of problem.
    schema: type[TheoryConfig]
    # The paper's claim in a few sentences.
    statement: str
    # Function that runs the test for a configuration.
    run: Callable[[Experiment], Evidence]
    # Function that raises ConfigError, before any work, if the settings violate the assumptions.
    check: Callable[[Experiment], None]
    # Function that returns the number of completions that the test draws; 0 if it enumerates.
    completions: Callable[[Experiment], int] = lambda experiment: 0

    @property
    def title(self) -> str:
        """Title of the page, the figure and the table."""
        return self.schema.title


def theorem(kind: str) -> Theorem:
    """Return `THEOREM` from the module named `kind`."""
    return importlib.import_module(f"grpo_ustat.gap.{kind}").THEOREM
