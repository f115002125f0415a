"""Errors of the gradient for each baseline and G, and ratios of these errors to the oracle's error.

There are three methods. Some baselines have a closed form, so their errors are computed from a
formula. The error of any other baseline is computed from all groups of completions in the pool, for
a fixed number of rollouts of new questions. The Monte Carlo method estimates errors from randomly
drawn groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_ustat.estimators.baseline_errors import baseline_errors, baseline_rows
from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.estimators.closed_form import CurvePoint
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.minibatch import GradientError, scale_free
from grpo_ustat.measurements.base import (
    Measurement,
    PoolStudy,
    Study,
    policies_quantity,
    scopes_text,
    study_columns,
)
from grpo_ustat.pages.symbols import baseline_word
from grpo_ustat.pages.tables import (
    Table,
    closed_interval_text,
    count_text,
    enumeration,
    interval_scope,
    rows_table,
)
from grpo_ustat.runs.contents import content_of

# Vector that all gradient estimates are compared with.
EXPECTED_REWARD = "gradient of the expected reward"
CLOSED_FORM, NEW_QUESTIONS, MONTE_CARLO = "closed_form", "new_questions", "monte_carlo"
ONCE, REPLACED = "all_questions_once", "with_replacement"
# Descriptions of the scope of intervals.
INTERVAL_WORDS = {
    "completions": "conditional on these questions",
    "questions": "for new questions",
}
NEED_VALUES = ("oracle", "optimal")
# Mark for an error that is significantly above the smallest error.
WORSE = "*"
WORSE_NOTE = (
    f"{WORSE} marks an error significantly above the smallest error in its row: the intervals do "
    "not overlap. The comparison leaves out biased baselines, and baselines that need each "
    "question's expected reward (oracle and optimal)."
)
BIASED_NOTE = (
    "Biased baselines: {}. Most of the error of a biased baseline comes from the wrong length of "
    "the gradient estimate, which matters little in training. To compare a biased baseline, "
    "measure its relative efficiency instead of its error (objectives=[NAME])."
)


@dataclass(frozen=True, kw_only=True)
class CurveRow:
    """Mean squared error of the gradient with one baseline; also a row of `curves.csv`."""

    # Method of measurement.
    method: str
    # Name of the baseline; for method new_questions see `estimators.baseline_errors`.
    baseline: str
    # Vector that the estimate is compared with.
    target: str
    # Questions of a batch: each of the study's questions once, or questions drawn at random with
    # replacement.
    setting: str
    # Population that the interval refers to: new completions of the study's questions for method
    # monte_carlo, new questions for the other two methods.
    interval: str
    # Group size, G.
    group_size: int
    # Number of prompts per batch.
    num_prompts: int
    # True if the expectation of the estimate is the target.
    unbiased: bool
    # Mean squared error, and the ends of its interval.
    mse: float
    low: float
    high: float
    # Number of Monte Carlo draws; null for the other two methods.
    replicates: int | None
    # Squared bias and variance, whose sum is the mean squared error.
    bias2: float
    variance: float
    # Error divided by ||target||^2.
    relative_mse: float
    # Relative error of the estimate after multiplication by the best scalar.
    best_scalar_mse: float
    # Cosine of the estimate and the target.
    cosine: float

    @property
    def error(self) -> Interval:
        """Mean squared error with its interval."""
        return Interval(self.mse, self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class OracleRatio:
    """Ratio of a baseline's error to the oracle's at the same G, with a paired interval."""

    baseline: str
    setting: str
    group_size: int
    num_prompts: int
    ratio: Interval


@dataclass(frozen=True, kw_only=True)
class NotMeasured:
    """Baseline whose error for new questions was not measured at one G, with the reason."""

    baseline: str
    group_size: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class GradientNorm:
    """Squared norm of the mean gradient of the study's questions, ||grad J||^2."""

    grad_sq: Interval
    # Reason why the relative errors of some methods are null; absent if none is null.
    reason: str | None = None


def measure_curves(study: PoolStudy) -> list[CurveRow]:
    """Measure the error of each baseline at each G with each method."""
    rows = []
    if CLOSED_FORM in study.methods:
        rows += _formula_rows(study, CLOSED_FORM)
    if study.by_groups:
        rows += _new_questions_rows(study)
    for (name, size), error in study.monte_carlo.items():
        point = CurvePoint(name, size, ONCE, len(study.pool.rewards_PN))
        rows.append(_row(study, point, error, MONTE_CARLO))
    return rows


def _new_questions_rows(study: PoolStudy) -> list[CurveRow]:
    """Return a row per baseline and G for n rollouts of new questions."""
    rows = _formula_rows(study, NEW_QUESTIONS)
    errors = baseline_errors(
        study.pool, study.by_groups, study.group_sizes, study.rollouts, study.draws, study.seed
    )
    for (name, size), error in errors.items():
        point = CurvePoint(name, size, REPLACED, study.rollouts // size)
        rows.append(_row(study, point, error, NEW_QUESTIONS))
    order = study.baselines.index
    return sorted(rows, key=lambda row: (order(row.baseline), row.group_size))


def _formula_rows(study: PoolStudy, method: str) -> list[CurveRow]:
    """Return a row for each point of the closed-form curves of a method."""
    rows, statistics = [], study.population
    for point, (bias2, variance, *moments) in statistics.parts.items():
        if point.is_new == (method == NEW_QUESTIONS):
            error = GradientError(statistics[point.key], bias2, variance, *scale_free(*moments))
            rows.append(_row(study, point, error, method))
    return rows


def _row(study: PoolStudy, point: CurvePoint, error: GradientError, method: str) -> CurveRow:
    """Return a row; relative columns are null if ||grad J||^2 is not significantly above 0."""
    target_sq = _target_sq(study, method)
    is_above_0 = target_sq.low > 0
    return CurveRow(
        method=method,
        baseline=point.baseline,
        target=EXPECTED_REWARD,
        setting=point.setting,
        interval="completions" if method == MONTE_CARLO else "questions",
        group_size=point.group_size,
        num_prompts=point.num_prompts,
        unbiased=BASELINES[point.baseline].unbiased,
        mse=error.mse.estimate,
        low=error.mse.low,
        high=error.mse.high,
        replicates=error.draws,
        bias2=error.bias2,
        variance=error.variance,
        relative_mse=error.mse.estimate / target_sq.estimate if is_above_0 else math.nan,
        best_scalar_mse=_known(error.best_scalar_mse) if is_above_0 else math.nan,
        cosine=_known(error.cosine) if is_above_0 else math.nan,
    )


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _target_sq(study: PoolStudy, method: str) -> Interval:
    """Return ||grad J||^2 for the population of questions from which a method draws batches."""
    return study.population["grad_sq" if method == NEW_QUESTIONS else "grad_sq_at_hand"]


def measure_gradient(study: PoolStudy) -> GradientNorm:
    """Measure ||grad J||^2 and name the methods for which it is not significantly above 0."""
    points = study.population.parts
    made = {
        CLOSED_FORM: CLOSED_FORM in study.methods and any(not x.is_new for x in points),
        NEW_QUESTIONS: bool(study.by_groups),
        MONTE_CARLO: bool(study.monte_carlo),
    }
    unknown = [name for name, is_made in made.items() if is_made]
    unknown = [name for name in unknown if not _target_sq(study, name).low > 0]
    reason = None
    if unknown:
        reason = (
            "relative_mse, best_scalar_mse and cosine are null because ||grad J||^2 is not "
            f"significantly different from 0 ({', '.join(unknown)})"
        )
    return GradientNorm(grad_sq=study.population["grad_sq_at_hand"], reason=reason)


def measure_ratios(study: PoolStudy) -> list[OracleRatio]:
    """Measure ratios to the oracle's error; a ratio is NaN if that error is not positive."""
    return [
        OracleRatio(
            baseline=point.baseline,
            setting=point.setting,
            group_size=point.group_size,
            num_prompts=point.num_prompts,
            ratio=study.population[point.ratio_key],
        )
        for point in study.population.parts
        if point.baseline != "oracle"
    ]


def list_not_measured(study: PoolStudy) -> list[NotMeasured]:
    """List baselines without a closed form that were not measured at some G, with the reasons."""
    rows = baseline_rows(study.pool, study.by_groups, study.group_sizes, study.rollouts)
    return [
        NotMeasured(baseline=row.loss.baseline, group_size=row.group_size, reason=row.reason.line)
        for row in rows
        if row.reason is not None
    ]


def curve_tables(rows_by_study: Mapping[Study, list[CurveRow]]) -> list[Table]:
    """Return a table of errors by G and baseline for each method and way of drawing questions.

    `curves.csv` has all numbers of each point.
    """
    ((study, curves),) = rows_by_study.items()
    if not curves:
        return []
    *first, last = (_by_baseline(study, of_kind) for of_kind in _by_kind(curves))
    return [*first, replace(last, notes=[*last.notes, *_biased_note(curves)])]


def ratio_tables(rows_by_study: Mapping[Study, list[OracleRatio]]) -> list[Table]:
    """Return a table with a row per baseline, way of drawing questions and G."""
    (ratios,) = rows_by_study.values()
    rows = [
        content_of(row)
        | {"baseline": baseline_word(row.baseline), "ratio": closed_interval_text(row.ratio)}
        | {"ratio_low": None, "ratio_high": None}
        for row in ratios
    ]
    note = "Both errors are from the same completions. Brackets contain paired 95 % intervals."
    return [rows_table("Ratio of the gradient error to the oracle's", rows, note)] if rows else []


def not_measured_tables(rows_by_study: Mapping[Study, list[NotMeasured]]) -> list[Table]:
    """Return a table with a row per baseline and G that were not measured."""
    (absent,) = rows_by_study.values()
    return [rows_table("Not measured", list(map(content_of, absent)))] if absent else []


CURVES: Measurement[list[CurveRow]] = Measurement(
    "curves", list[CurveRow], measure_curves, tables=curve_tables, in_reports=False, always=True
)
RATIOS: Measurement[list[OracleRatio]] = Measurement(
    "ratio_to_oracle", list[OracleRatio], measure_ratios, tables=ratio_tables, in_reports=False,
    always=True,
)  # fmt: skip
NOT_MEASURED: Measurement[list[NotMeasured]] = Measurement(
    "not_measured", list[NotMeasured], list_not_measured, tables=not_measured_tables,
    in_reports=False, always=True,
)  # fmt: skip
GRADIENT: Measurement[GradientNorm] = Measurement(
    "grad_sq", GradientNorm, measure_gradient, in_reports=False, always=True
)


def _by_kind(curves: Iterable[CurveRow]) -> list[list[CurveRow]]:
    """Group rows by method and setting."""
    kinds: dict[tuple[str, str], list[CurveRow]] = {}
    for row in curves:
        kinds.setdefault((row.method, row.setting), []).append(row)
    return list(kinds.values())


def _by_baseline(study: Study, rows: Sequence[CurveRow]) -> Table:
    """Return a table for one method and setting, with a row per G and a column per baseline."""
    result, first = study.result, rows[0]
    policy, (mean, low, high) = result.policy, result.policy.mean_reward
    setting = f"averaged over {count_text(result.questions, 'question')} ({first.method})"
    if first.setting == REPLACED:
        setting = f"{first.num_prompts * first.group_size} rollouts of new questions"
    source = f"Each question has {result.pool_completions} completions."
    if first.method == MONTE_CARLO:
        fewest = min(row.replicates or 0 for row in rows)
        source = f"The largest G has {count_text(fewest, 'replicate')}."
    unbiased = {row.baseline: row.unbiased for row in rows}
    cells, worse = _error_cells(rows)
    sizes = sorted({row.group_size for row in rows})
    return Table(
        title=f"MSE of the gradient, {setting}",
        columns=["G", *(baseline_word(x) + " (biased)" * (not unbiased[x]) for x in unbiased)],
        rows=[[str(size), *(cells.get((size, x), "-") for x in unbiased)] for size in sizes],
        notes=[
            f"The target is the {first.target} of {policy.name}, whose {policy.quantity} is "
            f"{mean:.3f} [{low:.3f}, {high:.3f}] (interval {interval_scope(result.questions)}).",
            f"The 95 % intervals of the errors are {INTERVAL_WORDS[first.interval]}. {source}",
            *worse,
            *missing_errors(rows),
        ],
    )


def _error_cells(rows: Sequence[CurveRow]) -> tuple[dict[tuple[int, str], str], list[str]]:
    """Format the error for each G and baseline, with the interval on a second line.

    Errors significantly above the smallest error in their row are marked; a note explains the mark.
    """
    cells = {}
    for row in rows:
        value, *interval = (closed_interval_text(row.error) or "-").split(" ", 1)
        cells[row.group_size, row.baseline] = "\n".join([value, *interval])
    worse = [
        (size, name)
        for size in {row.group_size for row in rows}
        for name in worse_baselines([row for row in rows if row.group_size == size])
    ]
    for key in worse:
        cells[key] = cells[key].replace("\n", f"{WORSE}\n", 1)
    return cells, [WORSE_NOTE] * bool(worse)


def _biased_note(rows: Iterable[CurveRow]) -> list[str]:
    """Return a note on biased baselines; no note if there are none."""
    names = dict.fromkeys(baseline_word(row.baseline) for row in rows if not row.unbiased)
    return [BIASED_NOTE.format(enumeration([*names]))] if names else []


def missing_errors(rows: Iterable[CurveRow]) -> list[str]:
    """Return a line for each baseline whose error is missing at some group sizes."""
    sizes: dict[str, list[int]] = {}
    for row in rows:
        if not row.error.is_known:
            sizes.setdefault(row.baseline, []).append(row.group_size)
    return [
        f"result.json has no error of {baseline_word(name)} at G = "
        f"{', '.join(map(str, dict.fromkeys(missing)))}."
        for name, missing in sizes.items()
    ]


def joint_table(studies: Sequence[Study], study_keys: Sequence[str]) -> Table:
    """Return a table with a row per policy, kind of curve and G, and a column per baseline.

    Args:
        study_keys: Configuration keys in which the studies differ.
    """
    curves = [row for study in studies for row in study.need(CURVES)]
    names = list(dict.fromkeys(row.baseline for row in curves))
    several = [key for key in ("method", "setting") if len({getattr(x, key) for x in curves}) > 1]
    rows, worse_notes, data = [], [], []
    for study in studies:
        columns = _columns(study, study_keys)
        data += [columns | content_of(row) for row in study.need(CURVES)]
        for kind in _by_kind(study.need(CURVES)):
            heading = _heading(study, [getattr(kind[0], key) for key in several])
            cells, worse = _error_cells(kind)
            worse_notes += worse
            for size in sorted({row.group_size for row in kind}):
                rows.append([heading, str(size), *(cells.get((size, x), "-") for x in names)])
    missing = [*_missing_points(studies), *missing_in(studies)]
    worse_notes = [*dict.fromkeys(worse_notes)]
    notes = [_interval_note(studies, curves), *worse_notes, *_biased_note(curves), *missing]
    return Table(
        name="mse",
        title="MSE of the gradient",
        columns=["policy", "G", *map(baseline_word, names)],
        rows=rows,
        notes=notes,
        data=data,
        figure_notes=[_interval_note(studies, curves), *missing],
        headings=True,
    )


def _columns(study: Study, study_keys: Sequence[str]) -> dict[str, Any]:
    """Return the columns of a CSV row that describe its study."""
    result, policy = study.result, content_of(study.result.policy)
    names = ("quantity", "mean_reward", "mean_reward_low", "mean_reward_high")
    return (
        study_columns(study.run, study_keys)
        | {"seed": study.run.config["seed"], "questions": result.questions}
        | {"pool_completions": result.pool_completions}
        | {name: policy[name] for name in names}
    )


def _heading(study: Study, kind: Sequence[str]) -> str:
    """Return a heading: policy, data set, pool size, accuracy or mean reward, kind of curve."""
    result, (mean, low, high) = study.result, study.result.policy.mean_reward
    lines = [
        f"{study.run.policy}\n{study.run.dataset}",
        f"{result.questions} x {result.pool_completions}",
        f"{mean:.2f} [{low:.2f}, {high:.2f}]",
    ]
    return "\n".join([*lines, *(word.replace("_", " ") for word in kind)])


def missing_in(studies: Iterable[Study]) -> list[str]:
    """Return lines on missing errors, each of which starts with the label of the study."""
    return [
        f"{study.run.label}: {line}"
        for study in studies
        for line in missing_errors(study.need(CURVES))
    ]


def worse_baselines(rows: Sequence[CurveRow]) -> list[str]:
    """Return the unbiased baselines whose error at one G is significantly above the smallest error.

    An error is significantly above the smallest error if their intervals do not overlap. A paired
    comparison may find a difference even if the intervals overlap. Biased baselines are excluded
    because most of their error comes from the length of the estimate. Baselines that need each
    question's expected reward are excluded too.
    """
    compared = [
        row
        for row in rows
        if row.unbiased and row.baseline not in NEED_VALUES and row.error.is_known
    ]
    least = min(compared, key=lambda row: row.error.estimate, default=None)
    return [row.baseline for row in compared if least and row.error.low > least.error.high]


def _interval_note(studies: Sequence[Study], curves: Sequence[CurveRow]) -> str:
    """Return a note on the scope of the intervals."""
    kinds = dict.fromkeys(INTERVAL_WORDS[row.interval] for row in curves)
    return (
        f"The 95 % intervals of errors are {' or '.join(kinds)}. The intervals of "
        f"{policies_quantity(studies)} are {scopes_text(studies)}. Each study has one seed."
    )


def _missing_points(studies: Iterable[Study]) -> list[str]:
    """List the baselines and group sizes that a study lacks but another study has."""
    points = {
        study.run.label: {(row.baseline, row.group_size) for row in study.need(CURVES)}
        for study in studies
    }
    all_points = set().union(*points.values())
    missing = {name: sorted(all_points - of_study) for name, of_study in points.items()}
    return [
        f"Missing in {name}: {', '.join(f'{baseline_word(b)} at G = {g}' for b, g in of_study)}."
        for name, of_study in missing.items()
        if of_study
    ]
