"""Tests of published claims on one policy.

Each claim is turned into a number with bounds: the claim holds if the number lies between the
bounds. A claim gets a verdict only if the interval of its number lies entirely inside or entirely
outside the bounds. The level is corrected for all claims of a study (Holm 1979), so that at most
5 % of studies give a wrong verdict. There is no correction over several studies. The papers give no
thresholds, so this project chose the bounds. Two numbers of rollouts count as equal if they differ
by at most `TOLERANCE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from grpo_ustat.estimators.closed_form import ClosedForm
from grpo_ustat.estimators.dynamic_sampling import kept_groups
from grpo_ustat.estimators.efficiency import direction, relative
from grpo_ustat.estimators.group_size import USUAL_SIZE
from grpo_ustat.estimators.intervals import UNDETERMINED, Interval, decide
from grpo_ustat.estimators.losses import UNBIASED, loss_errors, refusal
from grpo_ustat.estimators.row_weights import Loss, RowFilter
from grpo_ustat.estimators.token_weights import TokenWeights
from grpo_ustat.estimators.ustatistic import zero_variance_share
from grpo_ustat.measurements.base import Joint, Measurement, PoolStudy, Rescored, Study
from grpo_ustat.pages.tables import Table, interval_text
from grpo_ustat.records import ScorePool
from grpo_ustat.runs.claims import FAMILY_ERROR, holm_adjust

HOLDS, FAILS, UNDECIDED, UNMEASURED = WORDS = (
    "holds", "does not hold", "not decided", "not measured",
)  # fmt: skip
LARGE_SIZE = 64
# Relative difference up to which two numbers of rollouts, or two errors, count as equal.
TOLERANCE = 0.1
# Rollouts per step and group sizes in arXiv 2510.01135.
STEP, SPLITS = 8192, (16, 32, 64)
# top-p of RAGEN-2.
VARIANCE_SHARE = 0.9
NO_DIRECTION = "these questions do not determine its direction"
FILTERED = Loss("filtered", "leave_one_out", {}, "sum", 1,
                rows=RowFilter(reward_variance_share=VARIANCE_SHARE))  # fmt: skip
BY_MEAN = Loss("mean over each completion's tokens", "leave_one_out", {}, "grpo", 1)
# Bounds of at least this size are printed as whole numbers.
ROUND = 100
# Smallest p-value that is printed as a number.
MIN_P_VALUE = 1e-6
NOTE = (
    "The 95 % intervals are for new questions and do not hold simultaneously. A claim gets a "
    "verdict only if its number lies significantly inside or significantly outside the bounds. "
    "Holm's correction covers the claims of this study (at most 5 % of studies give a wrong "
    "verdict), but not several studies. The papers give no thresholds, so we chose the bounds. "
    "Two numbers of rollouts count as equal if they differ by at most 10 %."
)
# Claim, source and description of the number.
Words = tuple[str, str, str]
# Interval of a number at a confidence level.
IntervalAt = Callable[[float], Interval]


@dataclass(frozen=True, kw_only=True)
class ClaimVerdict:
    """Result of testing a published claim on this policy."""

    # The claim in words.
    claim: str
    # Paper that makes the claim.
    source: str
    # Description of the number that represents the claim.
    measured: str
    # Value of the number, with its interval for new questions.
    number: Interval | None = None
    # The claim holds if the number is between `least` and `most`; null means no bound.
    least: float
    most: float
    # p-value of the hypothesis that the true number is on the other side of a bound than its
    # estimate, with Holm's correction over all rows.
    holm_p: float | None = None
    verdict: str
    # Further numbers, as text beside the verdict.
    beside: str | None = None
    # Reason why the number was not measured.
    reason: str | None = None


class Claim(NamedTuple):
    """A claim before Holm's correction; `ClaimVerdict` describes the other fields."""

    claim: str
    source: str
    measured: str
    # None if the number was not measured.
    interval_at: IntervalAt | None = None
    least: float = -math.inf
    most: float = math.inf
    beside: str | None = None
    reason: str | None = None


def measure(study: PoolStudy) -> list[ClaimVerdict] | None:
    """Test each claim for new questions; None if the study does not request verdicts."""
    return claim_verdicts(study) if study.verdicts else None


def claim_verdicts(study: PoolStudy) -> list[ClaimVerdict]:
    """Test each claim; losses are compared at the measured G nearest to 8 on a log scale."""
    size = min(study.group_sizes, key=lambda group_size: abs(math.log(group_size / USUAL_SIZE)))
    claims = [
        *_of_noise(study.population, size),
        *_of_losses(study, size),
        *(_of_ratios(study.rescored, study, size) if study.rescored else []),
        _of_dynamic_sampling(study.pool, study.population, size),
    ]
    decisions = [
        decide(claim.interval_at, claim.least, claim.most) if claim.interval_at else None
        for claim in claims
    ]
    holm = iter(holm_adjust([x.p_value for x in decisions if x is not None]))
    rows: list[ClaimVerdict] = []
    for claim, decision in zip(claims, decisions, strict=True):
        holm_p, verdict, number = None, UNMEASURED, None
        if decision is not None:
            holm_p, verdict, number = next(holm), UNDECIDED, decision.number
            if holm_p <= FAMILY_ERROR:
                verdict = HOLDS if decision.inside else FAILS
        rows.append(
            ClaimVerdict(
                claim=claim.claim, source=claim.source, measured=claim.measured, number=number,
                least=claim.least, most=claim.most, holm_p=holm_p, verdict=verdict,
                beside=claim.beside, reason=claim.reason,
            )
        )  # fmt: skip
    return rows


def _of_noise(population: ClosedForm, size: int) -> list[Claim]:
    """Test claims about the noise of a step and about its split into groups."""
    law, step = population.law, "arXiv 2510.01135"
    best, worst = law.best_of(SPLITS), max(SPLITS, key=law.n_mse)
    splits = {split: f"{STEP // split} x {split}" for split in SPLITS}
    extra = ", ".join(f"{x}: {_percent(law.extra_error(y, best))}" for y, x in splits.items())
    of_prompts = [
        Claim(
            f"the noise is that of a prompt's completions, not of the prompts, G = {group_size}",
            "Critical Batch Size, HiLD at ICML 2026",
            f"share of the noise that comes from the choice of prompts, G = {group_size}",
            partial(law.prompt_share, group_size),
            most=0.5,
        )
        for group_size in (size, LARGE_SIZE)
    ]
    return [
        *of_prompts,
        Claim(
            f"a step of {STEP} rollouts is about right",
            step,
            f"number of rollouts at which half of a step is noise, n_c at G = {SPLITS[0]}",
            lambda level: law.noise_scale(SPLITS[0], level=level),
            least=STEP / 2,
            most=2 * STEP,
        ),
        Claim(
            f"{', '.join(splits.values())} have similar errors",
            step,
            f"extra error of {splits[worst]} relative to {splits[best]}",
            lambda level: law.extra_error(worst, best, level),
            most=TOLERANCE,
            beside=f"extra error relative to the best split: {extra}",
        ),
    ]


class _Efficiencies:
    """Relative efficiencies of losses at one G, which are measured on the same pool."""

    def __init__(
        self,
        pool: ScorePool,
        losses: Sequence[Loss],
        size: int,
        study: PoolStudy,
        weighted: Mapping[TokenWeights, ScorePool] | None = None,
    ):
        refusals = {x: refusal(pool, x, size, study.rollouts) for x in (UNBIASED, *losses)}
        self.reasons = {x: reason.line for x, reason in refusals.items() if reason is not None}
        measured = {x: [size] for x in refusals if x not in self.reasons}
        errors = {}
        if UNBIASED in measured:
            errors = loss_errors(pool, measured, study.rollouts, study.draws, study.seed, weighted)
        self.errors = {loss: error for (loss, _), error in errors.items()}

    def at(self, loss: Loss, against: Loss = UNBIASED) -> IntervalAt | None:
        """Return the efficiency of a loss relative to another, or None if it is not known."""
        both = [self.errors[x] for x in (against, loss) if x in self.errors]
        if len(both) < 2 or not all(error.kappa_known for error in both):
            return None
        return partial(relative, both[0].error_D, both[1])

    def reason(self, loss: Loss, against: Loss = UNBIASED) -> str | None:
        """Return the reason why `at` returns None; None if there is an efficiency."""
        if self.at(loss, against) is not None:
            return None
        refused = (self.reasons.get(x) for x in (UNBIASED, against, loss))
        return next(filter(None, refused), NO_DIRECTION)


def _of_losses(study: PoolStudy, size: int) -> list[Claim]:
    """Test claims about a filter by reward variance and about the mean over each completion."""
    where = f"n = {study.rollouts}, G = {size}"
    losses = _Efficiencies(study.pool, [FILTERED, BY_MEAN], size, study)

    def claim(loss: Loss, words: Words, least: float = -math.inf, most: float = math.inf) -> Claim:
        at, beside = losses.at(loss), None
        if at is not None:
            beside = f"cos^2 with the gradient: {_text(direction(losses.errors[loss]), 3)}"
        return Claim(*words, at, least, most, beside, losses.reason(loss))

    return [
        claim(
            FILTERED,
            (
                "a filter by reward variance raises the signal-to-noise ratio",
                "RAGEN-2, arXiv 2604.06268",
                "relative efficiency of a sampled rollout if only the groups with "
                f"{VARIANCE_SHARE} of the reward variance count, {where}",
            ),
            least=1.0,
        ),
        claim(
            BY_MEAN,
            (
                "the mean over a completion's tokens lowers the efficiency",
                "Dr. GRPO, arXiv 2503.20783",
                f"relative efficiency of a rollout with the mean instead of the sum, {where}",
            ),
            most=1 - TOLERANCE,
        ),
    ]


def _of_ratios(rescored: Rescored, study: PoolStudy, size: int) -> list[Claim]:
    """Test claims about rollouts of an earlier policy or of another sampler.

    The compared losses use no importance ratios, ratios of tokens, or ratios of whole completions.
    """
    drift, losses = rescored.drift, rescored.judged
    if not losses:
        return []
    shares = f"effective share: tokens {_text(drift.tokens)}, completions " + _text(
        drift.completions
    )
    beside = f"{shares}; KL divergence {drift.kl.estimate:.2g} nats per token"
    measured = _Efficiencies(rescored.compared, [*losses.values()], size, study, rescored.weighted)

    def claim(
        loss: Loss, against: Loss, words: Words, least: float = -math.inf, most: float = math.inf
    ) -> Claim:
        at, reason = measured.at(loss, against), measured.reason(loss, against)
        return Claim(*words, at, least, most, beside, reason)

    if rescored.question == "gap":
        others = {"sequence": ("truncated", "the truncated ratio of the completion")}
        rows = [
            claim(
                losses["none"],
                losses["token"],
                (
                    "a mismatch between sampler and model must be corrected",
                    "TRL's vllm_importance_sampling_correction",
                    "relative efficiency of rollouts without ratios against rollouts weighted by "
                    f"token ratios, G = {size}",
                ),
                most=1 - TOLERANCE,
            )
        ]
    else:
        others = {
            "sequence": ("geometric mean", "the geometric mean of the token ratios"),
            "whole_sequence": ("product", "the product of the token ratios"),
        }
        words = {"none": "without ratios", "token": "weighted by tokens' ratios"}
        rows = [
            claim(
                losses[level],
                UNBIASED,
                (
                    f"stale rollouts {word} are as efficient as fresh rollouts",
                    "arXiv 2605.17570",
                    f"relative efficiency of a stale rollout {word}, G = {size}",
                ),
                least=1 - TOLERANCE,
            )
            for level, word in words.items()
        ]
        efficiency_at, reason = measured.at(losses["token"]), measured.reason(losses["token"])
        joined = None
        if efficiency_at is not None and drift.completions.low > 0:
            joined = partial(_over, efficiency_at, drift.completions_at)
        elif efficiency_at is not None:
            reason = "the effective share depends on a few completions"
        rows.append(
            Claim(
                "the effective sample size equals the efficiency of stale rollouts",
                "VCPO, arXiv 2602.17616",
                "relative efficiency of a stale rollout weighted by token ratios, divided by the "
                "effective share of completions",
                joined,
                least=2 / 3,
                most=3 / 2,
                beside=shares,
                reason=reason,
            )
        )
    return rows + [
        claim(
            losses[level],
            losses["token"],
            (
                f"ratios of the sequence ({word}) beat ratios of tokens",
                "trl#4493, NeMo-RL#2269",
                f"relative efficiency of rollouts weighted by {name} against rollouts weighted by "
                f"token ratios, G = {size}",
            ),
            least=1.0,
        )
        for level, (word, name) in others.items()
    ]


def _over(efficiency_at: IntervalAt, share_at: IntervalAt, level: float) -> Interval:
    """Divide an efficiency by a share, with an interval from the ends of both intervals."""
    value, low, high = efficiency_at(_of_two(level))
    share = share_at(_of_two(level))
    # With a few questions, the lower end at a high level underflows to 0.
    above = high / share.low if share.low > 0 else math.inf
    return Interval(value / share.estimate, low / share.high, above)


def _of_two(level: float) -> float:
    """Return the level of each of two intervals whose simultaneous level is given (Bonferroni)."""
    return (1 + level) / 2


def _of_dynamic_sampling(pool: ScorePool, population: ClosedForm, size: int) -> Claim:
    """Test whether replacing groups whose rewards are all equal reduces the error."""
    claim = Claim(
        "replacing zero-variance groups saves rollouts",
        "DAPO, arXiv 2503.14476",
        f"relative reduction of the error at the same number of generated rollouts, G = {size}",
        least=TOLERANCE,
    )
    if size > pool.rewards_PN.shape[1]:
        return claim._replace(reason=f"the pool has fewer than {size} completions per question")
    zero_variance_P = zero_variance_share(pool.rewards_PN, size)
    most = pool.rewards_PN.shape[1] // size

    def saved(level: float) -> Interval:
        scale = population.law.noise_scale(size, level=_of_two(level))
        return kept_groups(zero_variance_P, size, scale, most, _of_two(level)).break_even

    kept = kept_groups(zero_variance_P, size, UNDETERMINED, most).kept
    return claim._replace(interval_at=saved, beside=f"{_text(kept)} of the groups are kept")


def _text(interval: Interval, decimals: int = 2) -> str:
    """Format an estimate with its interval.

    >>> _text(Interval(0.5, 0.25, 1.0)), _text(Interval(4.54, 4.1, math.inf), 1)
    ('0.50 [0.25, 1.00]', '4.5 [4.1, infinity)')
    """
    value, low, high = interval
    end = f"{high:.{decimals}f}]" if math.isfinite(high) else "infinity)"
    return f"{value:.{decimals}f} [{low:.{decimals}f}, {end}"


def _percent(extra: Interval) -> str:
    """Format a share in percent with its interval.

    >>> _percent(Interval(0.104, -0.004, 0.2))
    '+10 % [+0, +20]'
    """
    value, low, high = (f"{x:+.0f}" if math.isfinite(x) else "infinity" for x in _hundredths(extra))
    return f"{value} % [{low}, {high}]"


def _hundredths(extra: Interval) -> list[float]:
    """Convert a share to whole percent, with 0 in place of -0."""
    return [round(100 * x) + 0.0 if math.isfinite(x) else x for x in extra]


def tables(rows_by_study: Mapping[Study, list[ClaimVerdict]]) -> list[Table]:
    """Return a table per study with a row per claim; the terminal omits columns of long text."""
    return [_table(rows) for rows in rows_by_study.values()]


def _table(rows: list[ClaimVerdict]) -> Table:
    cells = [
        [
            row.claim,
            row.source,
            row.measured,
            "-" if row.number is None else interval_text(row.number),
            bounds_text(row.least, row.most),
            p_text(row.holm_p),
            row.verdict,
            row.reason or row.beside or "",
        ]
        for row in rows
    ]
    columns = [
        "claim",
        "source",
        "measured",
        "number",
        "holds if",
        "p (Holm)",
        "verdict",
        "details",
    ]
    sentences = ("source", "measured", "p (Holm)", "details")
    return Table(
        "Published claims on this policy", columns, cells, [NOTE], headings=True,
        sentences=sentences,
    )  # fmt: skip


def p_text(p_value: float | None) -> str:
    """Format a p-value; `-` for a claim that was not measured.

    >>> p_text(0.0312), p_text(2e-9), p_text(None)
    ('0.031', 'below 1e-6', '-')
    """
    if p_value is None:
        return "-"
    return "below 1e-6" if p_value < MIN_P_VALUE else f"{p_value:.2g}"


def bounds_text(least: float | None, most: float | None) -> str:
    """Format the bounds between which a claim holds; None and NaN mean no bound.

    >>> bounds_text(0.5, math.nan), bounds_text(None, 0.9), bounds_text(0.67, 1.5)
    ('above 0.5', 'below 0.9', '0.67 to 1.5')
    >>> bounds_text(4096, 16384)
    '4096 to 16384'
    """
    bounded = [x for x in (least, most) if x is not None and math.isfinite(x)]
    words = [f"{x:.0f}" if abs(x) >= ROUND else f"{x:.2g}" for x in bounded]
    if len(bounded) == 2:
        return " to ".join(words)
    return f"{'above' if least in bounded else 'below'} {words[0]}"


VERDICTS = Measurement(
    "verdicts",
    list[ClaimVerdict],
    measure,
    tables=tables,
    prints=True,
    # Holm's correction applies within a study, so a report has no joint table.
    joint=Joint(),
    leads=True,
)
