r"""Audit: comparison of a trainer's applied gradient with the gradient that its loss declares.

The *applied* gradient p is the gradient that the optimizer receives, before clipping, with its sign
reversed to point uphill. The *declared* gradient is d = `sum_i W_i s_i`, where the loss determines
the row weights W_i (`row_weights`) and s_i is the score of row i. The audit computes

    ratio = <p, d> / ||d||^2        cosine = <p, d> / (||p|| ||d||)

If p = d, the ratio and the cosine are both 1. A constant factor changes only the ratio. Different
row weights change the ratio and the cosine. To name the cause of a difference, p is therefore also
compared with the gradients of losses with other row weights.

Rounding also makes p and d differ. The rounding error of each row is a fraction of W_i s_i, even
if these vectors cancel in the sum d. This fraction is small if scores and loss are computed in the
same precision. Two gradients therefore count as equal if

    ||p - d||^2 <= epsilon^2 ( ||d||^2 + sum_i W_i^2 ||s_i||^2 )

The gradients can be sketches, that is, random projections to a lower dimension. Inner products of
sketches are unbiased (`policy.scores.sketch`), and their error is proportional to ||p - c d|| for
the best factor c. If p equals c d up to rounding, sketches therefore give the same result as full
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from grpo_ustat.estimators.baselines import advantages
from grpo_ustat.estimators.row_weights import Loss, token_weights
from grpo_ustat.records import Array, BaselineContext, Integers

NO_CAUSE = "no known cause"
NOT_OF_ROWS = (
    "no row weights reproduce it; check for dropout, for importance weights, for another term in "
    "the loss (such as a penalty or an entropy bonus), and for tokens, masks or parameters that "
    "were not declared"
)
# If the tolerance for ||p - d|| / ||d|| is at least this value, rounding errors are as large as d.
# The declared gradient d then counts as 0.
VANISHES = 1.0
# Value of epsilon in the module's docstring if all computations use float32. Both values were
# measured by scripts/benchmarks/audit_tolerances.py at commit ebbcb118.
FULL = 1e-3
# Value of epsilon if scores and loss both use bfloat16, float16 or TF32.
REDUCED = 0.1


class Agreement(NamedTuple):
    """Ratio and cosine of an applied gradient p and another gradient d."""

    # <p, d> / ||d||^2; NaN if d is 0.
    ratio: float
    # Cosine of the angle between p and d; NaN if d or p is 0.
    cosine: float

    @property
    def difference(self) -> float:
        """Relative difference, ||p - d|| / ||d||."""
        if math.isnan(self.cosine):
            return 1.0 if self.ratio == 0 else math.nan
        # The difference is computed from two orthogonal parts, because subtracting nearly equal
        # numbers would make it inaccurate.
        return math.hypot(self.ratio - 1, self.ratio * self.tangent)

    @property
    def tangent(self) -> float:
        """Relative difference `||p - c d|| / ||c d||` for the best-fitting factor c."""
        if not self.cosine:
            return math.inf
        return math.sqrt(max(0.0, 1 - self.cosine**2)) / abs(self.cosine)


def agreement(applied_declared: float, declared_sq: float, applied_sq: float) -> Agreement:
    """Compute ratio and cosine from <p, d>, ||d||^2 and ||p||^2.

    >>> agreement(2.0, 4.0, 1.0)
    Agreement(ratio=0.5, cosine=1.0)
    """
    if not (declared_sq > 0 and applied_sq > 0):
        return Agreement(0.0 if declared_sq > 0 and applied_sq == 0 else math.nan, math.nan)
    cosine = applied_declared / math.sqrt(declared_sq) / math.sqrt(applied_sq)
    return Agreement(applied_declared / declared_sq, max(-1.0, min(1.0, cosine)))


class Fault(NamedTuple):
    """Known mistake in a trainer that multiplies the gradient by a factor."""

    # Factor: applied gradient divided by declared gradient.
    ratio: float
    # Description of the mistake, phrased as the end of a sentence about the applied gradient.
    says: str


def divided(by: int, what: str) -> list[Fault]:
    """Return two faults: the gradient is divided by a number once too often, or not at all.

    The list is empty for the number 1.

    Args:
        by: number.
        what: name of the number, such as "processes".

    >>> [fault.ratio for fault in divided(4, "gradient_accumulation_steps")]
    [0.25, 4.0]
    """
    if by == 1:
        return []
    return [
        Fault(1 / by, f"divided once more by {what} = {by}"),
        Fault(float(by), f"not divided by {what} = {by}"),
    ]


@dataclass(frozen=True)
class GradientAudit:
    """Comparison of an applied gradient with the declared gradient."""

    # Ratio and cosine; see `Agreement`.
    ratio: float
    cosine: float
    # ||p - d|| / ||d||.
    difference: float
    # Largest difference that rounding can explain; see `rounding`.
    tolerance: float
    # Description of the cause of a difference; empty if the gradients count as equal.
    cause: str = ""

    @property
    def agrees(self) -> bool:
        """True if rounding explains the difference."""
        return not self.cause

    def sentence(self) -> str:
        """Describe the result in one line.

        >>> GradientAudit(0.2, 1.0, 0.8, 1e-3, "every weight is capped at 0.2").sentence()
        'applied = 0.200 x declared, cosine 1.000: every weight is capped at 0.2'
        """
        if self.agrees and not self.tolerance < VANISHES:
            return "The declared gradient is 0 up to rounding, so there is nothing to compare"
        if self.agrees and math.isnan(self.cosine):
            return "The applied gradient and the declared gradient are both 0"
        if self.agrees:
            numbers = f"ratio {self.ratio:.3f}, cosine {self.cosine:.3f}"
            return f"The applied gradient equals the declared gradient ({numbers})"
        if math.isnan(self.cosine):
            return self.cause
        ratio = f"{self.ratio:.3f}" if 0.01 <= abs(self.ratio) < 100 else f"{self.ratio:.3g}"
        return f"applied = {ratio} x declared, cosine {self.cosine:.3f}: {self.cause}"


def rounding(epsilon: float, declared_sq: float, rows_sq: float) -> float:
    """Return the largest ||p - d|| / ||d|| that rounding can cause; infinite if d cancels to 0.

    Args:
        epsilon: `FULL` or `REDUCED`, depending on the precision.
        declared_sq: ||d||^2.
        rows_sq: sum_i W_i^2 ||s_i||^2.
    """
    if declared_sq > 0:
        return epsilon * math.sqrt(1 + rows_sq / declared_sq)
    return math.inf if rows_sq > 0 else epsilon


def judged(
    applied_R: Array,
    declared_R: Array,
    others: Mapping[str, Array],
    tolerance: float,
    faults: Sequence[Fault] = (),
) -> GradientAudit:
    """Compare two gradients, or their sketches, and name the cause of a difference.

    Args:
        applied_R, declared_R: gradients p and d.
        others: gradients of losses with other row weights, by description; the most likely come
            first.
        tolerance: largest relative difference that rounding explains; see `rounding`.
        faults: known faults that multiply the gradient by a factor. If none has the right factor,
            divisions by small whole numbers are considered.
    """
    comparison = compared(applied_R, declared_R)
    if (settled := without_cause(comparison, tolerance, bool(applied_R.any()))) is not None:
        return settled
    cause = cause_of(applied_R, declared_R, others, tolerance, faults) or NOT_OF_ROWS
    return GradientAudit(*comparison, comparison.difference, tolerance, cause)


def compared(applied_R: Array, other_R: Array) -> Agreement:
    """Compute ratio and cosine of two gradients or sketches."""
    products = (applied_R @ other_R, other_R @ other_R, applied_R @ applied_R)
    return agreement(*map(float, products))


def without_cause(comparison: Agreement, tolerance: float, applied: bool) -> GradientAudit | None:
    """Return the audit if no search for a cause is needed; otherwise return None.

    No search is needed if p equals d, or if p or d is 0 or not finite. No search is possible if the
    rows of the declared gradient cancel, because d then consists only of rounding errors.

    Args:
        comparison: ratio and cosine of p and d.
        tolerance: largest difference that rounding explains.
        applied: True if p has a nonzero entry.
    """
    difference = comparison.difference
    nothing = math.isnan(comparison.ratio) and not applied
    if difference <= tolerance or tolerance >= VANISHES or nothing:
        return GradientAudit(*comparison, difference, tolerance)
    if not math.isnan(comparison.cosine):
        return None
    cause = "The declared gradient is 0 or not finite, or the applied gradient is not finite"
    if comparison.ratio == 0:
        cause = "The applied gradient is 0, but the declared gradient is not"
    return GradientAudit(*comparison, difference, tolerance, cause)


def cause_of(
    applied_R: Array,
    declared_R: Array,
    others: Mapping[str, Array],
    tolerance: float,
    faults: Sequence[Fault],
) -> str:
    """Describe a factor or other row weights that explain the applied gradient; "" if none do.

    The arguments are those of `judged`.
    """
    comparison = compared(applied_R, declared_R)
    factor = factor_text(comparison.ratio, tolerance, faults)
    if comparison.tangent <= tolerance and factor:
        return factor
    candidates = [(says, compared(applied_R, other_R)) for says, other_R in others.items()]
    candidates = [(says, other) for says, other in candidates if other.tangent <= tolerance]
    for says, other in candidates:
        if other.difference <= tolerance:
            return f"it is the gradient of {says}"
    if comparison.tangent <= tolerance:
        return "the direction is right, but the factor has no known cause"
    for says, other in candidates:
        if text := factor_text(other.ratio, tolerance, faults):
            return f"it is {other.ratio:.3g} x the gradient of {says}: {text}"
    for says, other in candidates:
        return f"it is {other.ratio:.3g} x the gradient of {says}"
    return ""


def factor_text(ratio: float, tolerance: float, faults: Sequence[Fault]) -> str:
    """Describe the faults that would multiply a gradient by this ratio; "" if none is known.

    >>> factor_text(0.25, FULL, divided(4, "processes"))
    'divided once more by processes = 4'
    >>> factor_text(-3.0, FULL, ())
    'the sign is reversed; 3 times too large, as if a division by 3 were missing'
    """

    def is_near(expected: float) -> bool:
        return abs(ratio / expected - 1) <= tolerance

    if ratio < 0:
        rest = "" if is_near(-1) else factor_text(-ratio, tolerance, faults)
        return f"the sign is reversed{rest and '; '}{rest}"
    if not 0 < ratio < math.inf:
        return ""
    if exact := [fault.says for fault in faults if is_near(fault.ratio)]:
        return " or ".join(exact)
    parts = round(max(ratio, 1 / ratio))
    # If the tolerance is too large, a neighbouring whole number would fit equally well.
    if parts == 1 or 2 * parts * tolerance > 1:
        return ""
    if is_near(1 / parts):
        return f"1/{parts}, as if it were divided once more by {parts}"
    if is_near(parts):
        return f"{parts} times too large, as if a division by {parts} were missing"
    return ""


def advantages_by_baseline(
    loss: Loss, rewards_PG: Array, context: BaselineContext
) -> dict[str, Array]:
    """Compute the advantages of a batch, [P, G], with the loss's baseline and with other baselines.

    The audit can then find out if a trainer uses another baseline than declared.

    Returns:
        The advantages by baseline. The baseline of the loss comes first.
    """
    baselines: dict[str, Mapping[str, float]] = {loss.baseline: loss.options}
    baselines |= {
        baseline: options
        for baseline, options in OTHER_BASELINES.items()
        if baseline != loss.baseline
    }
    return {
        baseline: advantages(baseline, rewards_PG, context, options)
        for baseline, options in baselines.items()
    }


def other_losses(
    loss: Loss, advantage_N: Mapping[str, Array], weight_N: Array, lengths_N: Integers
) -> dict[str, Array]:
    """Return the row weights of losses that are similar to the declared loss, by description.

    Each loss differs from the declared loss in the loss type (`row_weights.token_weights`), in the
    advantages, or in both. Losses that differ in both come last.

    Args:
        loss: declared loss.
        advantage_N: advantages of the rows, keyed by baseline; see `advantages_by_baseline`.
        weight_N: declared token weight of each row.
        lengths_N: number of tokens of each row that contribute to the loss; 0 for a masked row.
    """
    same = ALIASES.get(loss.loss_type, loss.loss_type)
    kinds = {loss.loss_type: weight_N}
    for kind in OTHER_KINDS:
        if kind != same:
            kinds[kind] = token_weights(kind, lengths_N, loss.max_completion_length)
    variants: list[tuple[list[str], Array]] = []
    for baseline, advantage in advantage_N.items():
        for kind, weight in kinds.items():
            changes = [f"loss_type={kind}"] if kind != loss.loss_type else []
            changes += [f"advantages {baseline}"] if baseline != loss.baseline else []
            variants.append((changes, advantage * weight))
    variants.sort(key=lambda variant: len(variant[0]))
    return {" with ".join(changes): weights for changes, weights in variants if changes}


# Loss types that `other_losses` tries.
OTHER_KINDS = ("sum", "dr_grpo", "grpo", "dapo")
# Loss types with the same weights as one of `OTHER_KINDS`.
ALIASES = {"luspo": "sum", "sapo": "grpo", "cispo": "dapo", "vespo": "dapo"}
# Baselines, with options, that `advantages_by_baseline` tries.
OTHER_BASELINES: dict[str, Mapping[str, float]] = {
    "group_mean": {},
    "group_std": {"epsilon": 1e-4},
    "batch_std": {"epsilon": 1e-4},
    "leave_one_out": {},
    "none": {},
}


def rows_text(applied_R: Array, scores_BR: Array, weights_B: Array, tolerance: float) -> str:
    """Describe rows that an applied gradient omits, adds or weights differently from the loss.

    The weights c_i in p = sum_i c_i s_i are fitted by least squares and compared with the declared
    weights. Rows with equal scores are merged, because their weights cannot be separated.

    Args:
        applied_R: sketch of p.
        scores_BR: sketches of the scores.
        weights_B: declared row weights, W.
        tolerance: largest difference that rounding explains.

    Returns:
        Description of the rows, or `NOT_OF_ROWS` if p is not a weighted sum of these scores. The
        result is empty if the sketches are too short for the number of rows.

    >>> rows_text(np.eye(12)[:2].sum(axis=0), np.eye(12)[:3], np.ones(3), FULL)
    '1 of 3 rows is missing (2)'
    """
    _, first_U, place_B = np.unique(scores_BR, axis=0, return_index=True, return_inverse=True)
    if 4 * len(first_U) > len(applied_R):
        return ""
    declared_U = np.bincount(place_B.ravel(), weights_B)
    weight_U, *_rest = np.linalg.lstsq(scores_BR[first_U].T, applied_R, rcond=1e-5)
    if not compared(applied_R, weight_U @ scores_BR[first_U]).tangent <= tolerance:
        return NOT_OF_ROWS
    counts_U = declared_U != 0
    factor_C = weight_U[counts_U] / declared_U[counts_U]
    present_C = np.abs(factor_C) > 0.1 * np.quantile(np.abs(factor_C), 0.9)
    common_factor = float(np.median(factor_C[present_C]))
    if np.abs(factor_C[present_C] / common_factor - 1).max() > 0.1:
        low, high = np.quantile(factor_C, (0.1, 0.9))
        return (
            "it is a sum of the same scores with other weights, mostly "
            f"{low:.2f} to {high:.2f} times the declared weights"
        )
    missing = np.sort(first_U[counts_U][~present_C])
    typical = abs(common_factor) * float(np.abs(declared_U[counts_U]).mean())
    added = np.sort(first_U[~counts_U & (np.abs(weight_U) > 0.1 * typical)])
    parts: list[str] = []
    if len(missing):
        verb = "is" if len(missing) == 1 else "are"
        parts.append(f"{len(missing)} of {len(weights_B)} rows {verb} missing ({_places(missing)})")
    if len(added):
        parts.append(f"{len(added)} rows with weight 0 are included ({_places(added)})")
    return " and ".join(parts)


def _places(rows: Integers) -> str:
    """Format row numbers as text, with consecutive numbers as a range.

    >>> _places(np.array([1, 2, 3, 7]))
    '1 to 3, 7'
    """
    runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    texts = [f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ", ".join(texts[:4]) + (" ..." if len(texts) > 4 else "")
