"""Record of a theorem, and the results of its test: claims, curves to draw, rows to keep."""

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
    """A line of a figure."""

    # Text in the legend.
    label: str
    x: Points
    y: Points
    # Lower end of a band, None without one; `high` likewise.
    low: Points | None = None
    high: Points | None = None
    # True if theory draws it; measurements are markers, predictions lines.
    predicted: bool = False
    # True if theory says only that measurements are below; a dashed line.
    bound: bool = False


def line_of(
    label: str,
    rows: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    predicted: bool = False,
    bound: bool = False,
) -> PlotLine:
    """Make a line of two columns of rows; a measurement has an interval, columns `low` and `high`.

    Args:
        label: in the legend.
        rows: of curves.csv.
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
    """One of a figure's axes."""

    title: str
    xlabel: str
    ylabel: str
    # A prediction and a measurement of the same label share their colour.
    curves: Sequence[PlotLine]
    # The logarithmic axes: any of "x", "y", "xy", "".
    log: str = ""


@dataclass(frozen=True)
class Evidence:
    """Results of a test for or against a theorem."""

    # In the order of their interest to a reader; their verdicts are corrected as a family, see
    # `correct_family`.
    claims: Sequence[Claim]
    # Panels of the figure.
    panels: Sequence[Panel]
    # The values in the panels and more, of equal keys, for curves.csv.
    rows: Sequence[Mapping[str, Any]]
    # Answer of the test, in a sentence.
    answer: str
    # Limits, surprises and reasons, a line each.
    notes: Sequence[str] = ()
    # Names and exact values of the policy.
    problem: Mapping[str, float | str] = field(default_factory=dict)
    # Completions that were drawn; 0 if all was enumerated.
    rollouts: int = 0

    def __post_init__(self):
        object.__setattr__(self, "claims", correct_family(self.claims))

    @property
    def verdict(self) -> str:
        """The verdict on all claims together, see `worst_verdict`."""
        return worst_verdict(self.claims)


@dataclass(frozen=True)
class Theorem:
    """One of the paper's results and its test: the interface of a theorem's module."""

    # Schema of its configuration, with its title and the kinds of problem on which it runs.
    schema: type[TheoryConfig]
    # The paper's claim, in one or two sentences.
    statement: str
    # Function that tests it as a configuration describes.
    run: Callable[[Experiment], Evidence]
    # Function that raises ConfigError, before any work, for settings outside the theorem.
    check: Callable[[Experiment], None]
    # Function for the number of completions that a test draws; 0 if it enumerates.
    completions: Callable[[Experiment], int] = lambda experiment: 0

    @property
    def title(self) -> str:
        """The title of its page, figure and table."""
        return self.schema.title


def theorem(kind: str) -> Theorem:
    """Return the record `THEOREM` of the module that is named like the theorem's kind."""
    return importlib.import_module(f"grpo_ustat.gap.{kind}").THEOREM
