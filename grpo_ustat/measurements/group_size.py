"""Answer of a study: the best G, the extra error of other G, and the noise of a training step.

If two group sizes G use the same number of rollouts n, the ratio of their errors does not depend on
n. Only the set of possible group sizes depends on n, because G must divide n. One study can
therefore answer for any n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grpo_ustat.estimators.closed_form import CURVE_SIZES
from grpo_ustat.estimators.group_size import (
    PRIORS,
    TOLERANCES,
    USUAL_SIZE,
    USUAL_SIZES,
    WEAK_PRIOR,
)
from grpo_ustat.estimators.intervals import CONFIDENCE, Interval
from grpo_ustat.estimators.scaling import (
    MIN_GSTAR,
    GroupSizeCosts,
    ScalingLaw,
    divisible_rollouts,
    divisors,
)
from grpo_ustat.measurements.assumption2 import (
    ALL_EQUAL,
    ASSUMPTION2,
    Assumption2,
    rewards_vary,
    summary_sentences,
)
from grpo_ustat.measurements.base import (
    Measurement,
    PoolStudy,
    Study,
    policies_quantity,
    scopes_text,
    study_columns,
)
from grpo_ustat.measurements.errors import GRADIENT
from grpo_ustat.measurements.panels import study_title
from grpo_ustat.pages.advice import noise_text
from grpo_ustat.pages.caveats import summary_and_warnings
from grpo_ustat.pages.figures import (
    SMALL,
    STYLE,
    figure_fonts,
    fitted,
    legend_above,
    legend_label,
    line_style,
    log_sizes,
    note,
    panel_figure,
    panel_rows,
    save,
)
from grpo_ustat.pages.tables import (
    Cell,
    Table,
    enumeration,
    interval_scope,
    interval_text,
    number_text,
    three_digits,
)
from grpo_ustat.records import MIN_QUESTIONS
from grpo_ustat.runs.contents import content_of
from grpo_ustat.terminal.streams import best_size, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WHY_FIXED_ROLLOUTS = (
    "There is a best G because a training step has a fixed number of rollouts, so a larger G "
    "leaves fewer prompts. If every batch contains all questions instead (all_questions_once), the "
    "error falls with G, because a larger G draws more completions of the same questions."
)
# A study without a best G prints the numbers of questions at which half and nine in ten of similar
# studies decide. The second number is printed only if it is at most this multiple of the first.
USEFUL_RATIO = 10
# The answer gives the extra errors of the next smaller and the next larger group size that divides
# n.
NEIGHBOUR_OFFSETS = (-1, 1)
# Largest G in the table of extra errors, unless twice the best G is larger.
MAX_SHOWN = 64
EXTRA_ERROR_NOTE = (
    "The error is the mean squared error of the leave-one-out gradient. Its advantages are not "
    "divided by a standard deviation. The 95 % intervals are for new questions: they include the "
    "variation from drawing other questions. They hold simultaneously for all G."
)
# Quantities in the tables on the scaling law, other definitions of the best G and Assumption 2.
LAW_ROWS = {"c1": "C1", "c2": "C2", "c3": "C3", "gstar": "G*"}
DATA_ALONE, PRIOR_ALONE, DATA_AND_PRIOR = "data alone", "prior alone", "data and prior"
OTHER_SIZES = {
    "gstar_tokens": "best G at a fixed number of tokens",
    "gstar_paper": "sqrt(C3/C1), which the paper calls G*",
}
ASSUMPTION_ROWS = {
    "corr": "corr(q, Z)", "a0": "A_0, vanilla (no baseline)", "a_v": "A_V, oracle",
    "a_bstar": "A_b*, best", "av_minus_a0": "A_V - A_0", "av_minus_abstar": "A_V - A_b*",
    "share": "(A_V - A_b*) / A_V",
    "crossover_group_size": "GRPO beats vanilla (no baseline) above this G",
}  # fmt: skip
SIZES_NOTE = "The answer above uses the best G at a fixed number of rollouts, G* = 1 + sqrt(C3/C1)."
NOISE_COLUMNS = {
    "rollouts": "n_c, rollouts",
    "tokens": "n_c, tokens",
    "prompt_share": "share of noise from prompts",
}
NOISE_NOTE = (
    "The noise scale n_c is the number of rollouts per step at which half of E||ghat||^2, the mean "
    "squared norm of the gradient estimate, is noise. If n_c is given in tokens, each prompt is "
    "counted once per group. The estimator is leave_one_out with independently drawn prompts. "
    "Brackets contain 95 % intervals."
)
EXTRA_ERROR = "extra gradient error at\na fixed number of rollouts (%)"
# Minimum ratio of two labelled group sizes, so that the labels do not overlap.
APART = 1.3
# Upper limit of the axis of extra errors, in percent. At 100 % the error is twice the minimum.
TOP_PERCENT = 105

Three = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class FixedCost:
    """Error of `leave_one_out` at one G, multiplied by n; the product does not depend on n."""

    group_size: int
    n_mse: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The scaling law `C1/B + C2/(BG) + C3/(BG(G-1))` for new questions.

    See `estimators.scaling`.
    """

    c1: Interval
    c2: Interval
    c3: Interval
    # 1 + sqrt(C3/C1), with the interval that uses the prior.
    gstar: Interval
    # The same estimate, with the interval of the data alone.
    gstar_data: Interval
    # Name of the prior of C1/C3, a key of `PRIORS`.
    prior: str = WEAK_PRIOR.name
    # sqrt(C3/C1).
    gstar_paper: Interval
    # Best G at a fixed number of tokens.
    gstar_tokens: Interval
    # Sampling covariance of the estimates of C1, C2, C3, and its degrees of freedom.
    covariance: tuple[Three, Three, Three] | None = None
    dof: float | None = None
    # Best G that divides n, keyed by n. A prime n is replaced by the next multiple of 8.
    best_divisor: dict[str, int] | None = None
    # Error at a fixed number of rollouts, for each G.
    curve: list[FixedCost]
    # Reason why the interval of G* has no upper end.
    reason: str | None = None

    @property
    def law(self) -> ScalingLaw:
        """Scaling law with sampling errors of C1, C2 and C3; ||grad J||^2 is not included."""
        constants = (self.c1.estimate, self.c2.estimate, self.c3.estimate)
        return ScalingLaw.stored(*constants, self.covariance, self.dof, PRIORS[self.prior])

    @property
    def is_decided(self) -> bool:
        """True if G* and both ends of its interval are finite."""
        return all(map(math.isfinite, self.gstar))

    @property
    def needs_prior(self) -> bool:
        """True if a best G is decided, but the data alone give no upper end for G*."""
        return self.is_decided and math.isinf(self.law.gstar_of_data().high)


@dataclass(frozen=True, kw_only=True)
class NoiseRow:
    """Noise scale of `leave_one_out` at one G, in rollouts and tokens.

    See `estimators.scaling`.
    """

    group_size: float | None
    rollouts: Interval
    tokens: Interval
    # Share of the noise that is due to the choice of prompts.
    prompt_share: Interval


@dataclass(frozen=True, kw_only=True)
class LeastNoise(NoiseRow):
    """Noise scale at G*, where it is smallest."""

    # Best G at a fixed number of tokens.
    group_size_tokens: float | None


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Noise scale at each G, and its minimum over G."""

    curve: list[NoiseRow]
    best: LeastNoise
    # ||grad J||^2, from which the noise scale is computed.
    grad_sq: Interval
    # Reason why the interval of the noise scale has no upper end.
    reason: str | None = None


def measure_scaling(study: PoolStudy) -> Scaling:
    """Measure the scaling law for new questions, and the best G at common numbers of rollouts."""
    population, best_divisor = study.population, None
    law, gstar = population.law, population["gstar"]
    if math.isfinite(gstar.estimate):
        counts = sorted({256, 1024, 2048, 4096, study.rollouts})
        best_divisor = {str(n): law.least(divisors(divisible_rollouts(n))) for n in counts}
    curve = []
    for size in CURVE_SIZES:
        n_mse, low, high = population[f"n_mse/{size}"]
        curve.append(FixedCost(group_size=size, n_mse=n_mse, low=low, high=high))
    return Scaling(
        **{name: population[name] for name in (*LAW_ROWS, *OTHER_SIZES)},
        gstar_data=law.gstar_of_data(),
        prior=law.prior.name,
        **law.stored_errors(),
        best_divisor=best_divisor,
        curve=curve,
        reason=None if math.isfinite(gstar.high) else _unbounded_reason(gstar.low),
    )


def _unbounded_reason(low: float) -> str:
    """Return the reason why the interval of G* has no upper end."""
    if not math.isfinite(low):
        return (
            "G* has no interval: fewer than 4 questions, or C1 is below 0 by more than its "
            "sampling error"
        )
    if low <= 1:
        return "the interval of G* has no lower or upper end: the data exclude no group size"
    return "no group size can be recommended: the interval of G* has no upper end"


def measure_noise(study: PoolStudy) -> Noise:
    """Measure the noise scale at each G, and its minimum over G; see `estimators.scaling`."""
    population, reason = study.population, None

    def numbers(name: str) -> dict[str, Interval]:
        keys = {"rollouts": "noise", "tokens": "noise_tokens", "prompt_share": "prompt_share"}
        return {key: population[f"{statistic}/{name}"] for key, statistic in keys.items()}

    if not population["grad_sq"].low > 0:
        reason = (
            "the interval of the noise scale has no upper end because ||grad J||^2 is not "
            "significantly different from 0"
        )
    return Noise(
        curve=[NoiseRow(group_size=size, **numbers(str(size))) for size in CURVE_SIZES],
        best=LeastNoise(
            group_size=_scaled_size(population["gstar"]),
            **numbers("best"),
            group_size_tokens=_scaled_size(population["gstar_tokens"]),
        ),
        grad_sq=population["grad_sq"],
        reason=reason,
    )


def _scaled_size(best: Interval) -> float | None:
    """Return the best G, or None if its interval has no upper end.

    In the second case, the smallest noise scale over G is unknown.
    """
    return best.estimate if math.isfinite(best.estimate) and math.isfinite(best.high) else None


def summary_text(study: PoolStudy) -> str:
    """Return the summary of a study.

    The summary states whether Assumption 2 is refuted and which baseline has the lower error. It
    mentions G* only if the interval of G* is missing or has no upper end, because the answer of
    the study gives a complete interval.
    """
    rewards_PN, best = study.pool.rewards_PN, study.population["gstar"]
    if (rewards_PN == rewards_PN[:, :1]).all():
        return ALL_EQUAL
    missing = []
    if best_size(*best) is None:
        missing = ["There is not enough data for G*, so no group size can be recommended."]
    elif not math.isfinite(best.high):
        missing = ["The interval of G* has no upper end, so no group size can be recommended."]
    return " ".join([*summary_sentences(study), *missing])


def study_answer(study: Study, rollouts: int) -> str:
    """Return the study's answer: best G, extra errors of neighbouring G, and noise of a step.

    Args:
        rollouts: Number of rollouts per training step, n.
    """
    return f"{decision_sentence(study, rollouts)} {noise_sentence(study, rollouts)}".rstrip()


def decision_sentence(study: Study, rollouts: int) -> str:
    """Return the best G and the extra errors of neighbouring G, or the amount of data still needed.

    Args:
        rollouts: Number of rollouts per training step, n.
    """
    sentence = best_size_sentence(study)
    if not rewards_vary(study):
        return sentence
    scaling, divisible = study.need(SCALING), divisible_rollouts(rollouts)
    costs = scaling.law.costs(divisible)
    if not scaling.is_decided and costs.tolerance is None:
        return sentence
    text = costs_sentence(costs)
    if divisible != rollouts:
        text = f"With {rollouts} rollouts per step, only G = {rollouts} is possible. {text}"
    # A size that divides n may be decided even if G* has no interval.
    return f"{sentence} {text}" if scaling.is_decided else text


def best_size_sentence(study: Study) -> str:
    """Return a sentence with G* and its interval, or with the amount of data still needed."""
    if not rewards_vary(study):
        return summary_and_warnings(study.result.summary)[0]
    scaling = study.need(SCALING)
    best, low, high = scaling.gstar
    if scaling.is_decided:
        sentence = f"The best G is about {best:.1f} [{low:.1f}, {high:.1f}]."
        return f"{sentence} {_prior_sentence(scaling)}" if scaling.needs_prior else sentence
    more = (
        f"{_prompts_text(*prompts_to_decide(scaling))}. This study has {study.result.questions} "
        "questions"
    )
    if low > MIN_GSTAR:
        return f"The best G is at least {low:.1f}; {more}."
    return f"Not enough data for a best G: {more}."


def _prior_sentence(scaling: Scaling) -> str:
    """Return a sentence for a G* whose interval has an upper end only because of the prior."""
    low = scaling.law.gstar_of_data().low
    return (
        f"The upper end comes from the prior (study.prior={scaling.prior}): the data alone show "
        f"only that G* is at least {low:.1f}."
    )


def prompts_to_decide(scaling: Scaling) -> tuple[float, float]:
    """Return the numbers of questions at which 50 % and 90 % of studies like this one decide.

    A study decides if it finds a best G. Both numbers are rounded to two significant digits; see
    `ScalingLaw.prompts_to_decide`.
    """
    half, most = scaling.law.prompts_to_decide(USUAL_SIZES)
    return float(f"{half:.2g}"), float(f"{most:.2g}")


def _prompts_text(half: float, most: float) -> str:
    """Describe the numbers of questions that 50 % and 90 % of similar studies need for a best G.

    >>> _prompts_text(130, 300)
    'half of all similar studies find it with 130 questions, and nine in ten with 300'
    >>> _prompts_text(130, math.inf)
    'half of all similar studies find it with 130 questions'
    >>> _prompts_text(math.inf, math.inf)
    'the number of questions needed is not known yet'
    """
    if math.isinf(half):
        return "the number of questions needed is not known yet"
    text = f"half of all similar studies find it with {half:.0f} questions"
    return f"{text}, and nine in ten with {most:.0f}" if most <= USEFUL_RATIO * half else text


def costs_sentence(costs: GroupSizeCosts) -> str:
    """Describe the best G that divides n, and the extra errors of the neighbouring sizes.

    >>> extra = {2: Interval(0.4, 0.3, 0.5), 4: Interval(0, 0, 0)}
    >>> costs_sentence(GroupSizeCosts(4, 4, extra, 0.05)).split(": ")[1]
    'its error is within 5 % of the minimum. The error is 40 % [30 %, 50 %] larger at G = 2.'
    >>> costs_sentence(GroupSizeCosts(4, 4, extra))
    'At 4 rollouts per step, no G is known to have an error within 10 % of the minimum.'
    """
    if costs.tolerance is None:
        return (
            f"At {costs.rollouts} rollouts per step, no G is known to have an error within "
            f"{100 * TOLERANCES[-1]:.0f} % of the minimum."
        )
    sentences = [
        f"At {costs.rollouts} rollouts per step, use G = {costs.best}: its error is within "
        f"{100 * costs.tolerance:.0f} % of the minimum."
    ]
    sizes = list(costs.extra)
    place = sizes.index(costs.best)
    neighbours = [place + offset for offset in NEIGHBOUR_OFFSETS]
    larger, maybe_as_good = [], []
    for size in [sizes[k] for k in neighbours if 0 <= k < len(sizes)]:
        extra = costs.extra[size]
        if math.isfinite(extra.low) and extra.low <= 0:
            maybe_as_good.append(f"G = {size}")
        elif math.isfinite(extra.low):
            estimate, low, high = (percent(value).removeprefix("+") for value in extra)
            larger.append(f"{estimate} [{low}, {high}] larger at G = {size}")
    if larger:
        sentences.append(f"The error is {enumeration(larger)}.")
    if maybe_as_good:
        sentences.append(f"{enumeration(maybe_as_good)} may be as good.")
    return " ".join(sentences)


def noise_sentence(study: Study, rollouts: int, group_size: int | None = None) -> str:
    """Return a sentence on the noise of a step and on the effect of more or fewer rollouts.

    Args:
        rollouts: Number of rollouts per training step, n.
        group_size: Group size G. If None, G is the best size that divides n, or 8 if the best size
            is not decided. The noise is given for the measured group size nearest to G.
    """
    if not rewards_vary(study):
        return ""
    size = USUAL_SIZE if group_size is None else group_size
    if group_size is None and study.need(SCALING).is_decided:
        size = study.need(SCALING).law.costs(divisible_rollouts(rollouts)).best
    row = min(study.need(NOISE).curve, key=lambda row: abs(math.log((row.group_size or 1) / size)))
    return noise_text(row.rollouts, rollouts)


def interval_note(study: Study) -> str:
    """Return a sentence on the scope of the intervals in the answer."""
    questions = study.result.questions
    if questions < MIN_QUESTIONS:
        return (
            "There are no intervals for the gradient error, because they need at least "
            f"{MIN_QUESTIONS} questions."
        )
    return (
        f"The 95 % intervals are for new questions like these {questions}. The intervals for G* "
        "and for the extra errors hold simultaneously."
    )


def extra_error_table(study: Study) -> Table | None:
    """Return a table of the extra error of each G that divides n, relative to the recommended G.

    The result is None if no G can be recommended.
    """
    if not rewards_vary(study):
        return None
    costs = study.need(SCALING).law.costs(divisible_rollouts(study.rollouts))
    if costs.tolerance is None:
        return None
    sizes = [size for size in costs.extra if size <= max(MAX_SHOWN, 2 * costs.best)]
    rows = []
    for size in sizes:
        extra, low, high = map(percent, costs.extra[size])
        interval = "" if size == costs.best else f"[{low}, {high}]"
        rows.append([str(size), str(costs.rollouts // size), extra, interval])
    columns = ["G", "prompts", "extra error", "95 % interval"]
    title = (
        f"Extra gradient error relative to G = {costs.best}, at {costs.rollouts} rollouts per step"
    )
    return Table(title, columns, rows, [EXTRA_ERROR_NOTE])


def law_tables(scaling_by_study: Mapping[Study, Scaling]) -> list[Table]:
    """Return tables on G*, the scaling law, Assumption 2, and other definitions of the best G."""
    ((study, scaling),) = scaling_by_study.items()
    assumption = study.need(ASSUMPTION2)
    rows = [
        *_quantity_rows(scaling, LAW_ROWS),
        *_quantity_rows(assumption, ASSUMPTION_ROWS),
    ]
    reasons = (scaling.reason, assumption.reason, study.need(GRADIENT).reason)
    notes = [f"The 95 % intervals are {interval_scope(study.result.questions)}."]
    notes += dict.fromkeys(reason for reason in reasons if reason)
    columns = ["quantity", "estimate", "low", "high"]
    others = _quantity_rows(scaling, OTHER_SIZES)
    return [
        *_prior_tables(scaling),
        Table("Scaling law and Assumption 2", columns, rows, notes),
        Table("Other definitions of the best G", columns, others, [SIZES_NOTE], folded=True),
    ]


def _prior_tables(scaling: Scaling) -> list[Table]:
    """Return a table of G* by the data alone, by the prior alone, and by both.

    The list is empty if the errors of the constants are unknown.
    """
    data, prior = scaling.law.gstar_of_data(), PRIORS[scaling.prior]
    if math.isnan(data.low):
        return []
    by_source = {DATA_ALONE: data}
    note = (
        "The interval has level 95 %. No prior is used (study.prior=none): a G is recommended only "
        "if the interval of the data alone supports it."
    )
    if prior.exponents:
        ends = (1 + math.sqrt(ratio) for ratio in prior.ratio_quantiles(CONFIDENCE))
        low, middle, high = ends
        by_source |= {PRIOR_ALONE: Interval(middle, low, high), DATA_AND_PRIOR: scaling.gstar}
        note = (
            f"The intervals have level 95 %. The prior (study.prior={prior.name}) consists of two "
            "probability densities of C1/C3. The interval of the prior alone contains the central "
            "95 % of each density. A G is recommended only if it is supported under each density."
        )
    rows: list[list[Cell]] = [
        [source, *(x if math.isfinite(x) else None for x in interval)]
        for source, interval in by_source.items()
    ]
    return [Table("Best G and the prior", ["source", "G*", "low", "high"], rows, [note])]


def _quantity_rows(record: Scaling | Assumption2, names: Mapping[str, str]) -> list[list[Cell]]:
    """Return a row for each named number of a record, with its interval if it has one."""
    rows: list[list[Cell]] = []
    for key, name in names.items():
        value = getattr(record, key)
        ends = value if isinstance(value, Interval) else (value, math.nan, math.nan)
        rows.append([name, *(x if math.isfinite(x) else None for x in ends)])
    return rows


def noise_tables(noise_by_study: Mapping[Study, Noise]) -> list[Table]:
    """Return a table of one study's noise scale at each G and at G*."""
    (noise,) = noise_by_study.values()
    best = noise.best
    rows = [[number_text(row.group_size or math.nan), *_noise_cells(row)] for row in noise.curve]
    if best.group_size is not None:
        rows.append([f"G* = {best.group_size:.1f}", *_noise_cells(best)])
    notes = [NOISE_NOTE, *([noise.reason] if noise.reason else [])]
    return [Table("Noise scale", ["G", *NOISE_COLUMNS.values()], rows, notes)]


def _noise_cells(row: NoiseRow) -> list[str]:
    return [interval_text(getattr(row, name)) for name in NOISE_COLUMNS]


def joint_table(studies: Sequence[Study], study_keys: Sequence[str]) -> Table:
    """Return a table of each policy's best G and crossover group size.

    The crossover is the group size above which GRPO beats vanilla (paper, section 6).

    Args:
        study_keys: Configuration keys in which the studies differ.
    """
    rows, data = [], []
    for study in studies:
        scaling, assumption = study.need(SCALING), study.need(ASSUMPTION2)
        rows.append([
            f"{study.run.policy}\n{study.run.dataset}",
            _estimate_text(study.result.policy.mean_reward, 2),
            (best_size(*scaling.gstar) or "not decided").replace(" [", "\n["),
            _estimate_text(assumption.crossover_group_size, 1),
            _estimate_text(assumption.av_minus_a0, None),
        ])  # fmt: skip
        content = content_of(scaling)
        names = [f"{x}{end}" for x in ("c1", "c2", "c3", "gstar") for end in ("", "_low", "_high")]
        columns = study_columns(study.run, study_keys) | {name: content[name] for name in names}
        data += [columns | point for point in content["curve"]]
    interval_note = f"The 95 % intervals are {scopes_text(studies)}. Each study has one seed."
    law = (
        "G* = 1 + sqrt(C3/C1) is the best group size of leave_one_out for every n, if questions "
        "are drawn independently."
    )
    crossover = (
        "Vanilla is the gradient without a baseline. A_V is the size of the gradient noise with "
        "the oracle as baseline, and A_0 is the size without a baseline. A dash (-) marks a value "
        "that is unknown or infinite."
    )
    quantity = policies_quantity(studies)
    return Table(
        name="fixed_n",
        title="Best group size of each policy",
        columns=[
            "policy",
            quantity,
            "G*",
            "leave-one-out\nbeats vanilla\nabove G",
            "oracle's noise\nminus vanilla's,\nA_V - A_0",
        ],
        rows=rows,
        notes=[law, crossover, interval_note],
        data=data,
        figure_notes=[
            "Markers are the group sizes that divide n. The extra error is relative to the best of "
            f"these sizes, whose extra error is 0. {interval_note}"
        ],
        headings=True,
    )


def _estimate_text(value: Interval, digits: int | None) -> str:
    """Format an estimate with its interval on a second line, or `-` if both are unknown.

    Args:
        digits: Number of decimals; None for three significant digits.
    """

    def text(number: float) -> str:
        return three_digits(number) if digits is None else f"{number:.{digits}f}"

    if math.isnan(value.low):
        return f"{text(value.estimate)}\n-" if value.is_known else "-"
    if not value.is_known:
        return f"at least {text(value.low)}"
    end = f"{text(value.high)}]" if math.isfinite(value.high) else "infinity)"
    return f"{text(value.estimate)}\n[{text(value.low)}, {end}"


def draw(folder: Path, study: Study) -> None:
    """Plot the extra error of each G at the study's n and save it as `scaling.{pdf,svg,png}`."""
    with figure_fonts():
        figure, [[[axes]]] = panel_figure([1])
        scaling_panel(axes, study.need(SCALING), study.rollouts)
        axes.set_ylabel(EXTRA_ERROR)
        axes.set_title(f"{study_title(study)}, bands: 95 % for new questions", loc="left")
        save(figure, folder, "scaling")


def draw_joint(folder: Path, name: str, studies: Sequence[Study], notes: Sequence[str]) -> None:
    """Plot the extra error of each G at a fixed number of rollouts, with a panel per data set.

    Each policy is a line in its panel. The legend gives the name and G* of each policy.

    Args:
        notes: Lines under the figure.
    """
    by_dataset: dict[str, list[Study]] = {}
    for study in studies:
        by_dataset.setdefault(str(study.run.dataset), []).append(study)
    with figure_fonts():
        figure, panels = panel_figure(panel_rows(len(by_dataset)))
        for axes, (dataset, members) in zip(figure.axes, by_dataset.items(), strict=True):
            laws = [(study.need(SCALING), divisible_rollouts(study.rollouts)) for study in members]
            limits = [_limit(scaling.law.costs(n)) for scaling, n in laws if scaling.is_decided]
            _set_axes(axes, [2**k for k in range(1, 11)], max(limits, default=64))
            for study, (scaling, n) in zip(members, laws, strict=True):
                colour, marker = line_style(studies.index(study))
                size_text = best_size(*scaling.gstar) or "not enough data for a best G"
                label = legend_label(f"{_name_among(study, studies)}: G* = {size_text}")
                if not scaling.is_decided:
                    label = label.replace("G* = ", "", 1)
                    axes.plot([], [], color=colour, marker=marker, markersize=4, label=label)
                    continue
                costs = scaling.law.costs(n)
                _draw_curve(axes, scaling.law, costs, colour)
                heights = [100 * extra.estimate for extra in costs.extra.values()]
                axes.plot(list(costs.extra), heights, linestyle="", color=colour, marker=marker,
                          markersize=5, label=label)  # fmt: skip
            axes.set_xlabel("group size G")
            axes.set_title(fitted(dataset, len(panels[0])), loc="left")
        for line in panels:
            line[0][0].set_ylabel(EXTRA_ERROR)
        legend_above(figure)
        note(figure, notes)
        save(figure, folder, name)


def _name_among(study: Study, studies: Sequence[Study]) -> str:
    """Return the name of a study's policy, with the seed or n if it differs between the studies."""
    names = [str(study.run.policy)]
    if len({other.run.config["seed"] for other in studies}) > 1:
        names.append(f"seed {study.run.config['seed']}")
    if len({other.rollouts for other in studies}) > 1:
        names.append(f"n = {study.rollouts}")
    return ", ".join(names)


def _set_axes(axes: Axes, sizes: Sequence[int], limit: float) -> None:
    """Set the axis of G, with ticks at the sizes below the limit, and the axis of extra errors."""
    log_sizes(axes, [size for size in sizes if size < limit])
    axes.set_xlim(1.5, limit)
    axes.set_ylim(-10, TOP_PERCENT)
    axes.grid(alpha=0.3, linewidth=0.5)


def _limit(costs: GroupSizeCosts) -> float:
    """Return the largest G on the axis, so that extra errors up to `TOP_PERCENT` are visible."""
    shown = [size for size, extra in costs.extra.items() if 100 * extra.estimate <= TOP_PERCENT]
    return max([32, *shown]) * 2.2


def _draw_curve(axes: Axes, law: ScalingLaw, costs: GroupSizeCosts, colour: str) -> None:
    """Plot the extra error relative to the best G that divides n, with simultaneous bands."""
    grid = np.geomspace(2, max(costs.extra), 200)
    curve = [law.extra_error(size, costs.best) for size in grid]
    heights, lows, highs = (100 * np.array(ends) for ends in zip(*curve, strict=True))
    axes.plot(grid, heights, color=colour, linewidth=1.5)
    # An infinite upper end cannot be drawn, so it is moved to a point far above the visible range.
    highs = np.minimum(highs, 10 * TOP_PERCENT)
    axes.fill_between(grid, lows, highs, color=colour, alpha=0.2, linewidth=0)


def scaling_panel(axes: Axes, scaling: Scaling, rollouts: int) -> None:
    """Plot one study's extra error at a fixed number of rollouts.

    The extra error is in percent of the error at the best group size that divides n. A curve with
    simultaneous bands shows the extra error at all sizes. Dots mark the sizes that divide n. If
    the interval of G* has two ends, the dots are labelled with their extra errors; a dashed line
    marks G*, and a grey band marks its interval. Otherwise a dotted line marks the lower end of
    the interval.

    Args:
        rollouts: Number of rollouts per training step, n.
    """
    costs, colour = scaling.law.costs(divisible_rollouts(rollouts)), STYLE["leave_one_out"][0]
    best, low, high = scaling.gstar
    size_text = best_size(best, low, high)
    named = [costs.best]
    for size in costs.extra:
        if all(max(size / other, other / size) > APART for other in named):
            named.append(size)
    _set_axes(axes, sorted(named), _limit(costs))
    if size_text is None:
        axes.text(0.5, 0.5, "not enough data for a best G", transform=axes.transAxes, ha="center")
        axes.set_xlabel("group size G")
        return
    dots = f"group size G\ndots: sizes that divide n = {costs.rollouts}"
    bounded = math.isfinite(high)
    if bounded:
        axes.axvspan(low, high, color="#999999", alpha=0.3, linewidth=0)
        if math.isfinite(best):
            axes.axvline(best, ymin=0.12, color="black", linestyle="--", linewidth=1)
        axes.set_xlabel(f"{dots}\ndashed: G* = {size_text}")
    else:
        axes.axvline(low, color="black", linestyle=":", linewidth=1)
        axes.set_xlabel(f"{dots}\ndotted: G* is {size_text}")
    _draw_curve(axes, scaling.law, costs, colour)
    for size, extra in costs.extra.items():
        if not 100 * extra.estimate <= TOP_PERCENT - 10:
            continue
        is_best = size == costs.best
        axes.plot(size, 100 * extra.estimate, "o", color=colour, markersize=6)
        # If the best size is unknown, an extra error relative to it has no meaning.
        if not bounded or size not in named:
            continue
        axes.annotate(
            f"G = {size}" if is_best else percent(extra.estimate),
            (size, 100 * extra.estimate), (0, -14) if is_best else (6, -10) if size > costs.best
            else (4, 5), textcoords="offset points", fontsize=SMALL,
            ha="center" if is_best else "left",
            fontweight="bold" if is_best else "normal",
            bbox=dict(facecolor="white", alpha=0.9, linewidth=0, pad=0.5), zorder=5,
        )  # fmt: skip


SCALING: Measurement[Scaling] = Measurement(
    "scaling", Scaling, measure_scaling, tables=law_tables, in_reports=False, always=True
)
NOISE: Measurement[Noise] = Measurement(
    "noise", Noise, measure_noise, tables=noise_tables, in_reports=False, always=True
)
