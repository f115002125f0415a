"""What a study of a theorem finds: claims with verdicts, curves to draw, rows to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grpo_ustat.runs.verdicts import AGREES, DISAGREES, OPEN


@dataclass(frozen=True)
class Claim:
    """A prediction beside its measurement.

    Attributes:
        what: is predicted, and of what, in a few words.
        predicted: a number, or a relation such as `<= 1` where it is no number.
        measured: the estimate.
        low, high: its interval; both None where it was enumerated and has no error.
        verdict: `agrees`, `disagrees` or `not decided`.
        how: the criterion, the level and the number of replicates.
    """

    what: str
    predicted: float | str
    measured: float
    low: float | None
    high: float | None
    verdict: str
    how: str


@dataclass(frozen=True)
class Curve:
    """A line of a figure.

    Attributes:
        label: in the legend.
        x, y: of its points.
        low, high: a band, None where there is none.
        predicted: whether theory draws it; measurements are markers, predictions lines.
        bound: whether theory says no more than that measurements are below; a dashed line.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    predicted: bool = False
    bound: bool = False


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
    curves: Sequence[Curve]
    log: str = ""


@dataclass(frozen=True)
class Finding:
    """What a study found.

    Attributes:
        statement: what the paper claims, in one or two sentences.
        bed: the policy and its exact truth: names and values.
        claims: in the order in which a reader wants them.
        panels: of the figure.
        rows: what the panels show and more, of equal keys, for curves.csv.
        answer: what was found, one sentence.
        notes: limits, surprises and reasons, a line each.
        rollouts: completions that were drawn; 0 where all was enumerated.
    """

    statement: str
    bed: Mapping[str, float | str]
    claims: Sequence[Claim]
    panels: Sequence[Panel]
    rows: Sequence[Mapping[str, Any]]
    answer: str
    notes: Sequence[str] = ()
    rollouts: int = 0

    @property
    def verdict(self) -> str:
        """`disagrees` where any claim does, else `not decided` where any is not."""
        verdicts = {claim.verdict for claim in self.claims}
        return next((name for name in (DISAGREES, OPEN) if name in verdicts), AGREES)

    def result(self) -> dict[str, Any]:
        """As `result.json` holds it, without the figure."""
        claims = [asdict(claim) for claim in self.claims]
        own = {"statement": self.statement, "bed": dict(self.bed), "claims": claims}
        own |= {"answer": self.answer, "notes": list(self.notes), "verdict": self.verdict}
        return own | {"cost": {"rollouts": self.rollouts}}


def decided(agrees: bool | None) -> str:
    """The verdict's word; None is not decided.

    >>> decided(True), decided(False), decided(None)
    ('agrees', 'disagrees', 'not decided')
    """
    return OPEN if agrees is None else AGREES if agrees else DISAGREES
