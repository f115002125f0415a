"""A theorem as one record, and what its study brings: claims, curves to draw, rows to keep."""

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
    """A line of a figure.

    Attributes:
        label: in the legend.
        x, y: of its points.
        low, high: a band, None where there is none.
        predicted: whether theory draws it; measurements are markers, predictions lines.
        bound: whether theory says no more than that measurements are below; a dashed line.
    """

    label: str
    x: Points
    y: Points
    low: Points | None = None
    high: Points | None = None
    predicted: bool = False
    bound: bool = False


def line_of(
    label: str,
    rows: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    predicted: bool = False,
    bound: bool = False,
) -> PlotLine:
    """Two columns of rows as a line; a measurement has its interval, columns `low` and `high`.

    Args:
        label: in the legend.
        rows: of curves.csv.
        x, y: the columns.
        predicted, bound: see `PlotLine`.
    """
    column = {name: [row[name] for row in rows] for name in (x, y)}
    low, high = (
        None if predicted or bound else [row[name] for row in rows] for name in ("low", "high")
    )
    return PlotLine(label, column[x], column[y], low, high, predicted, bound)


@dataclass(frozen=True)
class Panel:
    """One of a figure's axes.

    Attributes:
        title, xlabel, ylabel: of the axes.
        curves: of which a prediction and a measurement of the same label share their colour.
        log: which axes are logarithmic: any of "x", "y", "xy", "".
    """

    title: str
    xlabel: str
    ylabel: str
    curves: Sequence[PlotLine]
    log: str = ""


@dataclass(frozen=True)
class Evidence:
    """What a study brings for or against a theorem.

    Attributes:
        claims: in the order in which a reader wants them; their verdicts are those of a family, see
            `correct_family`.
        panels: of the figure.
        rows: what the panels show and more, of equal keys, for curves.csv.
        answer: of the study, one sentence.
        notes: limits, surprises and reasons, a line each.
        bed: the policy and its exact truth: names and values.
        rollouts: completions that were drawn; 0 where all was enumerated.
    """

    claims: Sequence[Claim]
    panels: Sequence[Panel]
    rows: Sequence[Mapping[str, Any]]
    answer: str
    notes: Sequence[str] = ()
    bed: Mapping[str, float | str] = field(default_factory=dict)
    rollouts: int = 0

    def __post_init__(self):
        object.__setattr__(self, "claims", correct_family(self.claims))

    @property
    def verdict(self) -> str:
        """The verdict on all claims together, see `worst_verdict`."""
        return worst_verdict(self.claims)


@dataclass(frozen=True)
class Theorem:
    """One of the paper's results, and how it is studied: all that the command asks of a module.

    Attributes:
        schema: of its configuration, with its title and the kinds of bed that it runs on.
        statement: what the paper claims, in one or two sentences.
        study: runs the study that a configuration describes.
        check: refuses, before any work, what the theorem says nothing about, by a ConfigError.
        completions: that the study of a configuration draws; 0 where it enumerates.
    """

    schema: type[TheoryConfig]
    statement: str
    study: Callable[[Experiment], Evidence]
    check: Callable[[Experiment], None]
    completions: Callable[[Experiment], int] = lambda experiment: 0

    @property
    def title(self) -> str:
        """The title of its page, figure and table."""
        return self.schema.title


def theorem(kind: str) -> Theorem:
    """The record `THEOREM` of the module that is named like the study's kind."""
    return importlib.import_module(f"grpo_ustat.gap.{kind}").THEOREM
