"""Cost of dynamic sampling at each G.

Dynamic sampling draws groups until enough of them contain differing rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from grpo_ustat.estimators.closed_form import CURVE_SIZES
from grpo_ustat.estimators.dynamic_sampling import kept_groups
from grpo_ustat.estimators.group_size import USUAL_SIZE
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.ustatistic import zero_variance_share
from grpo_ustat.measurements.base import Measurement, PoolStudy, Study, table_of_studies
from grpo_ustat.pages.tables import Table, interval_text

# Smallest relative reduction of the error that justifies drawing new groups.
WORTHWHILE_SAVING = 0.05
COLUMNS = ("G", "groups kept", "generated per kept group", "break-even discarded / kept")
NOTE = (
    "With dynamic sampling (DAPO), groups are drawn until enough of them have differing rewards. "
    "The direction of the gradient estimate stays unbiased, but its length is multiplied by the "
    "number of groups generated per kept group. If more groups with differing rewards were drawn "
    "than a step needs, the surplus is discarded. The last column is the break-even: dynamic "
    "sampling needs fewer rollouts than dropping zero-variance groups without replacement only if "
    "the number of discarded groups per kept group is below this value. Brackets contain intervals "
    "over prompts. Their level is at least 90 % in the last column and 95 % in the other columns."
)


@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """Cost of dynamic sampling at one G; see `estimators.dynamic_sampling`."""

    group_size: int
    # Share of generated groups that have differing rewards and are kept.
    kept: Interval
    # Number of groups generated per kept group.
    generated: Interval
    # Largest number of discarded groups per kept group at which dynamic sampling still saves
    # rollouts. It equals the relative reduction of the error if no group is discarded.
    break_even: Interval


def measure(study: PoolStudy) -> list[DynamicSampling]:
    """Compute the cost at each G up to the number of completions per question."""
    rewards_PN = study.pool.rewards_PN
    completions, rows = rewards_PN.shape[1], []
    for size in CURVE_SIZES:
        if size > completions:
            break
        noise_scale = study.population[f"noise/{size}"]
        groups = kept_groups(
            zero_variance_share(rewards_PN, size), size, noise_scale, completions // size
        )
        rows.append(DynamicSampling(group_size=size, **groups._asdict()))
    return rows


def sentences(rows: list[DynamicSampling], study: Study) -> list[str]:
    """Return a sentence if dynamic sampling saves little at the measured G nearest to 8."""
    if not rows:
        return []
    nearest = min(rows, key=lambda row: abs(math.log(row.group_size / USUAL_SIZE)))
    most = nearest.break_even.high
    if not most < WORTHWHILE_SAVING:
        return []
    return [
        "Dynamic sampling (drawing new groups in place of groups whose rewards are all equal) is "
        "not worthwhile here: at the same number of rollouts it reduces the error by less than "
        f"{100 * most:.1g} %."
    ]


def tables(rows_by_study: Mapping[Study, list[DynamicSampling]]) -> list[Table]:
    """Return a table with one row per G."""
    cells = {
        study: [
            [str(row.group_size), *map(interval_text, (row.kept, row.generated, row.break_even))]
            for row in rows
        ]
        for study, rows in rows_by_study.items()
        if rows
    }
    return [table_of_studies("Dynamic sampling", COLUMNS, cells, [NOTE])] if cells else []


DYNAMIC_SAMPLING = Measurement(
    "dynamic_sampling", list[DynamicSampling], measure, sentences, tables
)
