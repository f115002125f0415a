"""C1, C2, C3 and G* of each reward function, and correlations between reward functions.

All reward functions are evaluated on the same completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from grpo_ustat.estimators.closed_form import ClosedForm, closed_form
from grpo_ustat.estimators.intervals import UNDETERMINED, Interval, pool_mean_reward
from grpo_ustat.estimators.reward_correlation import reward_correlation
from grpo_ustat.measurements.base import Measurement, PoolStudy, Study, table_of_studies
from grpo_ustat.pages.tables import Table, interval_scope, interval_text, three_digits
from grpo_ustat.records import ScorePool

SUM_NAME = "weighted sum"
COLUMNS = {"mean": "mean reward", "c1": "C1", "c2": "C2", "c3": "C3", "gstar": "G*"}
MEASURED = ("c1", "c2", "c3", "gstar", "a_v", "grad_sq")
PAIRS_NOTE = (
    "Correlations are within prompts. A negative value means that completions with a higher reward "
    "from one function tend to have a lower reward from the other."
)


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """Statistics of one reward function, or of the weighted sum; then `weight` is null."""

    name: str
    weight: float | None
    c1: Interval
    c2: Interval
    c3: Interval
    gstar: Interval
    a_v: Interval
    grad_sq: Interval
    mean: Interval


@dataclass(frozen=True, kw_only=True)
class RewardCorrelation:
    """Within-prompt correlation of two reward functions."""

    first: str
    second: str
    correlation: Interval


def measure_functions(study: PoolStudy) -> list[RewardFunction] | None:
    """Measure each unweighted reward function and the weighted sum of the functions.

    The statistics of a function are NaN if its rewards never differ within a prompt. The result is
    None if there is only one function.
    """
    pool = study.pool
    if pool.rewards_PNF is None or pool.rewards_PNF.shape[-1] == 1:
        return None
    assert pool.reward_weights_F is not None
    rows = []
    for f, (name, weight) in enumerate(zip(study.reward_names, pool.reward_weights_F, strict=True)):
        function = function_pool(pool, f)
        values = dict.fromkeys(MEASURED, UNDETERMINED)
        if (function.rewards_PN != function.rewards_PN[:, :1]).any():
            values = _measured(closed_form(function, replace(study.request, points=[])))
        mean = pool_mean_reward(function.rewards_PN)
        rows.append(RewardFunction(name=name, weight=float(weight), mean=mean, **values))
    mean, values = pool_mean_reward(pool.rewards_PN), _measured(study.population)
    return [*rows, RewardFunction(name=SUM_NAME, weight=None, mean=mean, **values)]


def function_pool(pool: ScorePool, f: int) -> ScorePool:
    """Return the same completions with the rewards of function f only."""
    assert pool.rewards_PNF is not None and pool.centred_sums_PFR is not None
    return replace(
        pool,
        rewards_PN=pool.rewards_PNF[..., f],
        centred_sums_PR=pool.centred_sums_PFR[:, f],
        rewards_PNF=None,
        centred_sums_PFR=None,
        reward_weights_F=None,
    )


def _measured(of_pool: ClosedForm) -> dict[str, Interval]:
    return {key: of_pool[key] for key in MEASURED}


def measure_correlations(study: PoolStudy) -> list[RewardCorrelation] | None:
    """Measure the correlation of each pair of reward functions, for new questions.

    A pair is omitted if the rewards of either function never differ within a prompt.
    """
    rewards_PNF = study.pool.rewards_PNF
    if rewards_PNF is None or rewards_PNF.shape[-1] == 1:
        return None
    rows = []
    for f, g in combinations(range(rewards_PNF.shape[-1]), 2):
        value = reward_correlation(rewards_PNF, f, g)
        if value.is_known:
            first, second = study.reward_names[f], study.reward_names[g]
            rows.append(
                RewardCorrelation(first=first, second=second, correlation=value.within(-1, 1))
            )
    return rows


def function_tables(rows_by_study: Mapping[Study, list[RewardFunction]]) -> list[Table]:
    """Return a table with a row per function and a row for the weighted sum."""
    cells = {
        study: [
            [row.name, "" if row.weight is None else three_digits(row.weight)]
            + [interval_text(getattr(row, key)) for key in COLUMNS]
            for row in rows
        ]
        for study, rows in rows_by_study.items()
    }
    scopes = sorted({interval_scope(study.result.questions) for study in rows_by_study})
    note = (
        "Each row describes the rewards of one function before they are weighted. All rows use the "
        "same completions. A weight w multiplies C1, C2 and C3 by w^2 and leaves G* unchanged. "
        "The last row is the weighted sum, which training uses (except with gdpo). Brackets "
        f"contain 95 % intervals. The intervals of the mean reward are {' or '.join(scopes)}."
    )
    columns = ["function", "weight", *COLUMNS.values()]
    return [table_of_studies("Reward functions", columns, cells, [note])]


def correlation_tables(rows_by_study: Mapping[Study, list[RewardCorrelation]]) -> list[Table]:
    """Return a table with a row per pair of reward functions."""
    cells = {
        study: [[row.first, row.second, interval_text(row.correlation)] for row in rows]
        for study, rows in rows_by_study.items()
        if rows
    }
    columns, title = ["function", "and", "correlation"], "Correlation of reward functions"
    return [table_of_studies(title, columns, cells, [PAIRS_NOTE])] if cells else []


REWARD_FUNCTIONS = Measurement(
    "reward_functions", list[RewardFunction], measure_functions, tables=function_tables, prints=True
)
REWARD_CORRELATIONS = Measurement(
    "reward_correlations", list[RewardCorrelation], measure_correlations,
    tables=correlation_tables, prints=True,
)  # fmt: skip
