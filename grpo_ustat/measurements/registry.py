"""All measurements of a study, in the order in which its page shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_ustat.measurements.assumption2 import ASSUMPTION2
from grpo_ustat.measurements.base import (
    Joint,
    Measurement,
    PoolStudy,
    Study,
    by_pool,
    study_columns,
)
from grpo_ustat.measurements.dynamic_sampling import DYNAMIC_SAMPLING
from grpo_ustat.measurements.errors import CURVES, GRADIENT, NOT_MEASURED, RATIOS
from grpo_ustat.measurements.group_size import NOISE, SCALING
from grpo_ustat.measurements.losses import LOSSES
from grpo_ustat.measurements.off_policy import OFF_POLICY
from grpo_ustat.measurements.recipes import RECIPE_EFFICIENCIES
from grpo_ustat.measurements.rewards import REWARD_CORRELATIONS, REWARD_FUNCTIONS
from grpo_ustat.measurements.verdicts import VERDICTS
from grpo_ustat.pages.tables import Table
from grpo_ustat.runs.contents import content_of
from grpo_ustat.runs.record import RESULT, RunRecord

MEASUREMENTS: tuple[Measurement[Any], ...] = (
    VERDICTS,
    OFF_POLICY,
    LOSSES,
    CURVES,
    SCALING,
    ASSUMPTION2,
    GRADIENT,
    RECIPE_EFFICIENCIES,
    NOISE,
    REWARD_FUNCTIONS,
    REWARD_CORRELATIONS,
    DYNAMIC_SAMPLING,
    RATIOS,
    NOT_MEASURED,
)


def finished_study(run: RunRecord) -> Study | None:
    """Return the study of a run, or None if the run is unfinished or damaged.

    Damage is reported in a note of the run.
    """
    if run.result is None:
        return None
    study = Study(run)
    if study.result.equal_rewards is not None:
        return study
    absent = [
        measurement.name
        for measurement in MEASUREMENTS
        if measurement.always and study.of(measurement) is None
    ]
    if absent:
        run.add_note(f"{RESULT} is damaged and not shown: {absent[0]} is missing")
    return None if absent else study


def measure_all(study: PoolStudy) -> dict[str, Any]:
    """Return the record of each measurement that was made, keyed by name."""
    records = {measurement.name: measurement.measure(study) for measurement in MEASUREMENTS}
    return {name: record for name, record in records.items() if record is not None}


def sentences(study: Study, of: Sequence[Measurement[Any]]) -> list[str]:
    """Return the sentences of the given measurements for a study."""
    return [
        line
        for measurement in of
        for record in measurement.of([study]).values()
        for line in measurement.sentences(record, study)
    ]


def tables(study: Study, of: Sequence[Measurement[Any]]) -> list[Table]:
    """Return the tables of the given measurements for a study."""
    return [
        table
        for measurement in of
        if (records := measurement.of([study]))
        for table in measurement.tables(records)
    ]


def printed_tables(study: Study, of: Sequence[Measurement[Any]]) -> list[Table]:
    """Return the tables of the given measurements that are printed on the terminal."""
    printed = [measurement for measurement in of if measurement.prints]
    return [table for table in tables(study, printed) if not table.page_only]


def draw_figures(folder: Path, study: Study) -> None:
    """Draw the figures of all measurements of a study."""
    for measurement in MEASUREMENTS:
        if measurement.figure is not None and (records := measurement.of([study])):
            measurement.figure.draw(folder, records, [])


def report_tables(studies: Sequence[Study], study_keys: Sequence[str]) -> list[Table]:
    """Return the tables of a report, each with a file name and with the records as data.

    Args:
        studies: All studies of the report. A measurement without a joint view is shown for the
            first study of each pool, because all studies of a pool have the same result.
        study_keys: Configuration keys in which the pools differ.
    """
    report = [
        table for measurement, records in _joint(studies) for table in measurement.tables(records)
    ]
    for measurement in MEASUREMENTS:
        if measurement.joint is not None or not measurement.in_reports:
            continue
        records = measurement.of([members[0] for members in by_pool(studies)])
        data = [
            study_columns(study.run, study_keys) | content_of(row)
            for study, record in records.items()
            for row in (record if isinstance(record, list) else [record])
        ]
        for place, table in enumerate(measurement.tables(records) if records else []):
            name = f"{measurement.name}_{place + 1}" if place else measurement.name
            report.append(replace(table, name=name, data=data))
    return report


def report_answers(studies: Sequence[Study]) -> list[str]:
    """Return the report's sentences that summarise all studies."""
    return [
        joint.answer(records)
        for joint, records in _joint(studies)
        if joint.answer is not None and joint.tables(records)
    ]


def draw_report_figures(folder: Path, studies: Sequence[Study], lines: Sequence[str]) -> None:
    """Draw the figures of a report, with the given lines of text below each figure."""
    for joint, records in _joint(studies):
        first = next(iter(joint.tables(records)), None)
        if joint.draw is not None and first is not None and first.figure_notes is not None:
            joint.draw(folder, records, [*first.figure_notes, *lines])


def _joint(studies: Sequence[Study]) -> Iterator[tuple[Joint[Any], dict[Study, Any]]]:
    """Yield the joint view of each measurement that has one, with the records of the studies."""
    for measurement in MEASUREMENTS:
        if measurement.joint is not None and (records := measurement.of(studies)):
            yield measurement.joint, records
