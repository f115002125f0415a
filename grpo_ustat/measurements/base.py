"""Measurements: results that a study computes from a pool of scored completions, and their display.

Each measurement is a `Measurement` object in a separate module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.closed_form import ClosedForm, Request
from grpo_ustat.estimators.drift import Drift
from grpo_ustat.estimators.minibatch import GradientError
from grpo_ustat.estimators.row_weights import Loss
from grpo_ustat.estimators.token_weights import TokenWeights
from grpo_ustat.pages.tables import Table, interval_scope
from grpo_ustat.records import MIN_QUESTIONS, ScorePool, joint_quantity
from grpo_ustat.runs.contents import DAMAGE, record_of
from grpo_ustat.runs.record import RESULT, RunRecord, key_label, study_rollouts
from grpo_ustat.runs.result import StudyResult
from grpo_ustat.terminal.streams import single_line

R = TypeVar("R")

# Configuration keys that do not change the pool of a study.
LOSS_KEYS = ("objective", "objectives", "baseline")
LAG_KEYS = ("study.scored_by", "study.reference", "study.corrections", "study.correction_cap")


@dataclass(frozen=True)
class Rescored:
    """Completions of a pool, scored by a policy that may differ from the one that wrote them."""

    # Names of the policy that wrote the completions, of the current policy, and of the reference
    # policy of a KL penalty.
    written_by: str
    policy: str
    reference: str
    # Kind of comparison: lag, gap or penalty; see `measurements.off_policy.OffPolicy`.
    question: str
    drift: Drift
    # Losses whose relative efficiency is measured.
    losses: Sequence[Loss]
    # Losses that published claims refer to, keyed by the level of the importance ratio.
    judged: Mapping[str, Loss]
    # Pool for the gradient estimate that the losses are compared with.
    compared: ScorePool
    # Pool for each kind of token weights that the losses use.
    weighted: Mapping[TokenWeights, ScorePool]


@dataclass(frozen=True)
class PoolStudy:
    """Input of a measurement: a pool of scored completions and the settings of the study.

    A measurement samples no completions and therefore does not need the model.
    """

    pool: ScorePool
    # Group sizes at which the errors of the gradient are computed.
    group_sizes: Sequence[int]
    # Number of rollouts per training step, n.
    rollouts: int
    # Number of pairs of batches drawn for losses whose row weights depend on the whole batch.
    draws: int
    # Seed of all draws.
    seed: int
    # Maximum number of tokens per completion; longer completions are truncated.
    max_completion_length: int
    # Statistics of the pool by name, computed from `request`; see
    # `estimators.closed_form.ClosedForm`.
    population: ClosedForm
    request: Request
    # True if published claims are tested.
    verdicts: bool = False
    # `closed_form`, `monte_carlo` or both.
    methods: Sequence[str] = ("closed_form",)
    # Baselines whose errors are compared, in the order of the curves.
    baselines: Sequence[str] = ("leave_one_out",)
    # Options of each compared baseline that has no closed form, keyed by baseline name.
    by_groups: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # Monte Carlo estimates of the error, keyed by baseline and G.
    monte_carlo: Mapping[tuple[str, int], GradientError] = field(default_factory=dict)
    # Losses that are compared with the unbiased estimate at the first update on a batch.
    losses: Sequence[Loss] = ()
    # Names of the reward functions, in the order of the pool's axis F.
    reward_names: Sequence[str] = ()
    # Scores under another policy; None if the study requests no other policy, no reference policy
    # and no correction.
    rescored: Rescored | None = None


class Study:
    """Output of a study, read from the folder of a finished run."""

    def __init__(self, run: RunRecord):
        self.run = run
        self._records: dict[str, Any] = {}

    @cached_property
    def result(self) -> StudyResult:
        """Part of the result that every study contains."""
        return record_of(StudyResult, self.run.final_result)

    @property
    def rollouts(self) -> int:
        """Number of rollouts per training step, n, to which the study's answer applies."""
        return study_rollouts(self.run.config)

    def of(self, measurement: Measurement[R]) -> R | None:
        """Return the record of a measurement, or None if the record is missing or damaged."""
        name = measurement.name
        if name not in self._records:
            self._records[name] = self._read(measurement)
        return self._records[name]

    def need(self, measurement: Measurement[R]) -> R:
        """Return the record of a measurement that every study makes unless all rewards are equal.

        Raises:
            ConfigError: if the record is missing or damaged.
        """
        record = self.of(measurement)
        if record is None:
            raise ConfigError(
                f"{measurement.name} is missing or has the wrong type in "
                f"{self.run.folder / RESULT}: delete this file and run the same command again"
            )
        return record

    def _read(self, measurement: Measurement[R]) -> R | None:
        content = self.run.final_result.get(measurement.name)
        if content is None:
            return None
        try:
            return record_of(measurement.record, content, measurement.name)
        except DAMAGE as error:
            self.run.add_note(f"{RESULT} is damaged: {measurement.name}: {single_line(error, 200)}")
            return None


def nothing_to_say(record: Any, study: Study) -> list[str]:
    """Return an empty list of sentences."""
    return []


def no_table(records: Mapping[Study, Any]) -> list[Table]:
    """Return an empty list of tables."""
    return []


def by_pool(studies: Iterable[Study]) -> list[list[Study]]:
    """Group studies that have the same pool: they differ only in their losses."""
    pools: dict[str, list[Study]] = {}
    for study in studies:
        of_pool = {
            key: value
            for key, value in study.run.keys.items()
            if key.partition(".")[0] not in LOSS_KEYS and key not in LAG_KEYS
        }
        pools.setdefault(json.dumps(of_pool, sort_keys=True, default=str), []).append(study)
    return list(pools.values())


# Function that writes the files of a figure to a folder, with lines of text below the panels.
Draw = Callable[[Path, Mapping[Study, R], Sequence[str]], None]


@dataclass(frozen=True)
class Figure(Generic[R]):
    """A figure in the folder of a study."""

    # Base name of the figure's files.
    name: str
    title: str
    draw: Draw[R]


@dataclass(frozen=True)
class Joint(Generic[R]):
    """View of a measurement in a report over all its studies, including several on one pool."""

    tables: Callable[[Mapping[Study, R]], list[Table]] = no_table
    # Returns a sentence that summarises all studies; called only if there is a table.
    answer: Callable[[Mapping[Study, R]], str] | None = None
    # Draws the figure, which is named after the first table.
    draw: Draw[R] | None = None


@dataclass(frozen=True)
class Measurement(Generic[R]):
    """Functions that compute and present a result of a pool; fields with defaults are optional."""

    # Key in `result.json`.
    name: str
    # Type of the result: a frozen dataclass or a list of one. An `Interval` is stored as three
    # keys; see `runs.contents`.
    record: Any
    # Returns the result, or None if the pool does not determine the result or it was not requested.
    measure: Callable[[PoolStudy], R | None]
    # Returns sentences shown beside the answer.
    sentences: Callable[[R, Study], list[str]] = nothing_to_say
    # Returns the tables for the page of one study, or for a report on several studies that made
    # this measurement (one study per pool).
    tables: Callable[[Mapping[Study, R]], list[Table]] = no_table
    # True if the tables are also printed on the terminal.
    prints: bool = False
    # False if `report` builds a different table for this measurement.
    in_reports: bool = True
    # True if every study makes this measurement, unless all rewards are equal.
    always: bool = False
    figure: Figure[R] | None = None
    # View shown by a report of several studies in place of `tables`.
    joint: Joint[R] | None = None
    # True if the result is shown before the errors of the gradient. Such results exist only if a
    # user requested them.
    leads: bool = False

    def of(self, studies: Iterable[Study]) -> dict[Study, R]:
        """Return the result of each study that made this measurement."""
        records = {study: study.of(self) for study in studies}
        return {study: record for study, record in records.items() if record is not None}


def table_of_studies(
    title: str,
    columns: Sequence[str],
    rows_by_study: Mapping[Study, Sequence[Sequence[Any]]],
    notes: Sequence[str],
) -> Table:
    """Return a table; if it covers several studies, their policies are in the first column.

    Args:
        columns: Column headings, without the column of policies.
        rows_by_study: Rows of cells of each study.
    """
    if len(rows_by_study) == 1:
        (rows,) = rows_by_study.values()
        return Table(title, columns, list(rows), notes)
    joint = [
        [f"{study.run.policy}\n{study.run.dataset}", *row]
        for study, rows in rows_by_study.items()
        for row in rows
    ]
    return Table(title, ["policy", *columns], joint, notes, headings=True)


def study_columns(run: RunRecord, study_keys: Sequence[str]) -> dict[str, Any]:
    """Return the columns of a CSV row that identify its study.

    Args:
        study_keys: Configuration keys in which the studies differ.
    """
    return {
        "run": run.label,
        "differs_in": key_label(run.keys, study_keys),
        "policy": run.policy,
        "dataset": run.dataset,
    }


def policies_quantity(studies: Iterable[Study]) -> str:
    """Return `accuracy` if every policy's mean reward is an accuracy; otherwise `mean reward`."""
    return joint_quantity(study.result.policy.quantity for study in studies)


def scopes_text(studies: Iterable[Study]) -> str:
    """Describe whether the studies' intervals apply to new questions or to the studies' questions.

    Studies with fewer than `MIN_QUESTIONS` questions have intervals for these questions.
    """
    scopes = sorted({interval_scope(study.result.questions) for study in studies})
    few = f" (fewer than {MIN_QUESTIONS})" * (len(scopes) > 1)
    return f"{' or '.join(scopes)}{few}"
