"""All measurements of a study, in the order of its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any

from grpo_ustat.config.own_functions import MEASUREMENTS
from grpo_ustat.measurements.assumption2 import ASSUMPTION2
from grpo_ustat.measurements.base import Measurement, PoolStudy, Study, study_columns
from grpo_ustat.measurements.dynamic_sampling import DYNAMIC_SAMPLING
from grpo_ustat.measurements.errors import CURVES, GRADIENT, NOT_MEASURED, RATIOS
from grpo_ustat.measurements.group_size import NOISE, SCALING
from grpo_ustat.measurements.rewards import REWARD_CORRELATIONS, REWARD_FUNCTIONS
from grpo_ustat.measurements.unequal_groups import UNEQUAL_GROUPS
from grpo_ustat.pages.tables import Table
from grpo_ustat.runs.contents import content_of
from grpo_ustat.runs.record import RESULT, RunRecord

OURS: tuple[Measurement[Any], ...] = (
    CURVES,
    SCALING,
    ASSUMPTION2,
    GRADIENT,
    NOISE,
    REWARD_FUNCTIONS,
    REWARD_CORRELATIONS,
    DYNAMIC_SAMPLING,
    UNEQUAL_GROUPS,
    RATIOS,
    NOT_MEASURED,
)


def measurements(names: Sequence[str] = ()) -> list[Measurement[Any]]:
    """Return our measurements, and those of other packages that are named.

    Raises:
        TypeError: an entry point is no `Measurement` of its name.
    """
    others = []
    for name in names:
        offered = entry_points(group=MEASUREMENTS)[name].load()
        if not isinstance(offered, Measurement) or offered.name != name:
            raise TypeError(
                f"entry point {name} of {MEASUREMENTS} is {offered!r:.80}: it must be a "
                f"Measurement of name {name!r}"
            )
        others.append(offered)
    return [*OURS, *others]


def finished_study(run: RunRecord) -> Study | None:
    """Return the study of a run; None while it is unfinished, or damaged, which is noted."""
    if run.result is None:
        return None
    study = Study(run)
    if study.result.equal_rewards is not None:
        return study
    absent = [one.name for one in OURS if one.always and study.of(one) is None]
    if absent:
        run.add_note(f"{RESULT} is damaged and not shown: it has no {absent[0]}")
    return None if absent else study


def measure_all(study: PoolStudy, names: Sequence[str]) -> dict[str, Any]:
    """Return what every measurement finds in the pool, by name."""
    found = {one.name: one.measure(study) for one in measurements(names)}
    return {name: record for name, record in found.items() if record is not None}


def sentences(study: Study) -> list[str]:
    """Return what the measurements of a study say."""
    return [
        line
        for one in _shown([study])
        for record in one.of([study]).values()
        for line in one.sentences(record, study)
    ]


def tables(studies: Sequence[Study], printed: bool = False) -> list[Table]:
    """Return the tables of one study or of several, all of them or those for a terminal."""
    return [
        table
        for one in _shown(studies)
        if one.prints or not printed
        if (records := one.of(studies))
        for table in one.tables(records)
    ]


def report_tables(studies: Sequence[Study], study_keys: Sequence[str]) -> list[Table]:
    """Return the tables of a report, each with a name for its files and the records as its data.

    Args:
        study_keys: configuration keys in which the studies differ.
    """
    found = []
    for one in _shown(studies):
        records = one.of(studies) if one.in_reports else {}
        data = [
            study_columns(study.run, study_keys) | content_of(row)
            for study, record in records.items()
            for row in (record if isinstance(record, list) else [record])
        ]
        for place, table in enumerate(one.tables(records) if records else []):
            name = f"{one.name}_{place + 1}" if place else one.name
            found.append(replace(table, name=name, data=data))
    return found


def _shown(studies: Sequence[Study]) -> list[Measurement[Any]]:
    """Return our measurements and those of packages that are installed here."""
    asked = [name for study in studies for name in study.run.value("study.measurements") or []]
    offered = entry_points(group=MEASUREMENTS).names if asked else set()
    return measurements([name for name in dict.fromkeys(asked) if name in offered])
