"""A measurement: a finding of a study about a pool, with its sentences, tables and figure.

It is an object of `Measurement` in a module of its own. Those of other packages are offered as an
entry point of `grpo_ustat.measurements` and asked for by name in `study.measurements`.
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
from grpo_ustat.runs.contents import misfit, record_of
from grpo_ustat.runs.record import RESULT, RunRecord, key_label, study_rollouts
from grpo_ustat.runs.result import StudyResult

R = TypeVar("R")

# Keys of a study that change no pool.
LOSS_KEYS = ("objective", "objectives", "baseline")
LAG_KEYS = ("study.scored_by", "study.reference", "study.corrections", "study.correction_cap")


@dataclass(frozen=True)
class Rescored:
    """The completions of a pool, scored by a policy that need not be the one that wrote them.

    Tokens are weighted as each loss weighs them.
    """

    # Names of the writer, of the policy at hand, and of the one that a penalty is measured from.
    written_by: str
    policy: str
    reference: str
    # lag, gap or penalty, see `measurements.off_policy.OffPolicy`.
    question: str
    drift: Drift
    # Losses whose relative efficiency is measured.
    losses: Sequence[Loss]
    # Losses that published claims are about, by the level of their importance ratio.
    judged: Mapping[str, Loss]
    # The pool of the unbiased estimate that losses are compared with.
    compared: ScorePool
    # The pool of the losses with each kind of token weights.
    weighted: Mapping[TokenWeights, ScorePool]


@dataclass(frozen=True)
class PoolStudy:
    """The input of a measurement: a pool of scored completions and what a study asks of it.

    Everything that needs a model was done before: nothing is sampled here.
    """

    pool: ScorePool
    # Every G of the curves.
    group_sizes: Sequence[int]
    # n of a training step.
    rollouts: int
    # Pairs of batches behind losses that weigh rows by the whole batch, and the seed of all draws.
    draws: int
    seed: int
    # Tokens after which a completion is cut.
    max_completion_length: int
    # Statistics of the pool by name, see `estimators.closed_form.ClosedForm`. Most measurements
    # take `population`, whose intervals are for new questions, as a training step draws them;
    # `request` is what it was computed from. `at_hand` is for the curves: its intervals are for
    # these questions (`interval` is "completions"), in AdamW's metric for new ones ("questions").
    population: ClosedForm
    at_hand: ClosedForm
    request: Request
    interval: str = "questions"
    # Measurements that are made only if they are asked for.
    asked: frozenset[str] = frozenset()
    # `closed_form`, `monte_carlo` or both.
    methods: Sequence[str] = ("closed_form",)
    # Baselines whose errors are compared, in the order of the curves.
    baselines: Sequence[str] = ("leave_one_out",)
    # Options of those baselines that have no closed form, by name; empty if none is compared.
    by_groups: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # The errors that Monte Carlo has drawn, by baseline and G.
    monte_carlo: Mapping[tuple[str, int], GradientError] = field(default_factory=dict)
    # At a batch's first update, except the unbiased estimate itself.
    losses: Sequence[Loss] = ()
    # Names of the reward functions, in the order of the pool's axis F.
    reward_names: Sequence[str] = ()
    # None where no other policy, reference or correction is asked for.
    rescored: Rescored | None = None


class Study:
    """The output of a study: what the folder of a finished one holds."""

    def __init__(self, run: RunRecord):
        self.run = run
        self._records: dict[str, Any] = {}

    @cached_property
    def result(self) -> StudyResult:
        """The part of the result that every study has."""
        return record_of(StudyResult, self.run.final_result)

    @property
    def rollouts(self) -> int:
        """n of the training step that the answer speaks of."""
        return study_rollouts(self.run.config)

    def of(self, measurement: Measurement[R]) -> R | None:
        """Return what was measured; None where the study did not, or where it is damaged."""
        name = measurement.name
        if name not in self._records:
            self._records[name] = self._read(measurement)
        return self._records[name]

    def need(self, measurement: Measurement[R]) -> R:
        """Return what every study measures, unless all of its rewards are equal."""
        record = self.of(measurement)
        if record is None:
            raise ConfigError(
                f"{self.run.folder / RESULT} has no {measurement.name}, or one of another type: "
                "delete it, the same command writes it again"
            )
        return record

    def _read(self, measurement: Measurement[R]) -> R | None:
        content = self.run.final_result.get(measurement.name)
        if content is None:
            return None
        if wrong := misfit(content, measurement.record, measurement.name):
            self.run.add_note(f"{RESULT} is damaged: {wrong}")
            return None
        return record_of(measurement.record, content)


def nothing_to_say(record: Any, study: Study) -> list[str]:
    """Return no sentence."""
    return []


def no_table(records: Mapping[Study, Any]) -> list[Table]:
    """Return no table."""
    return []


def by_pool(studies: Iterable[Study]) -> list[list[Study]]:
    """Group studies that differ only in their losses; all else in their results is equal."""
    pools: dict[str, list[Study]] = {}
    for study in studies:
        of_pool = {
            key: value
            for key, value in study.run.keys.items()
            if key.partition(".")[0] not in LOSS_KEYS and key not in LAG_KEYS
        }
        pools.setdefault(json.dumps(of_pool, sort_keys=True, default=str), []).append(study)
    return list(pools.values())


# Writes a figure's files to a folder, with lines below the panels.
Draw = Callable[[Path, Mapping[Study, R], Sequence[str]], None]


@dataclass(frozen=True)
class Figure(Generic[R]):
    """A figure of a study's folder."""

    # Base name of its files.
    name: str
    title: str
    draw: Draw[R]


@dataclass(frozen=True)
class Joint(Generic[R]):
    """A report's view of all studies that have measured something, also several of one pool."""

    tables: Callable[[Mapping[Study, R]], list[Table]] = no_table
    # A sentence on all of them, where there is a table.
    answer: Callable[[Mapping[Study, R]], str] | None = None
    # The figure of the first table's name.
    draw: Draw[R] | None = None


@dataclass(frozen=True)
class Measurement(Generic[R]):
    """A finding of a study, from pool to page; fields with a default may be left out."""

    # Its key in `result.json`, and its name in `study.measurements`.
    name: str
    # The type of what it measures: a frozen dataclass, or a list of one. An `Interval` is three
    # keys of the file, see `runs.contents`.
    record: Any
    # None where the pool does not tell it, or where it was not asked for.
    measure: Callable[[PoolStudy], R | None]
    # Sentences beside the answer.
    sentences: Callable[[R, Study], list[str]] = nothing_to_say
    # On the page of a study, and in a report of the studies that have measured it, one a pool.
    tables: Callable[[Mapping[Study, R]], list[Table]] = no_table
    # True if its tables are printed on the terminal, too.
    prints: bool = False
    # False if `report` makes its own table of it.
    in_reports: bool = True
    # True if every study has it, unless all of its rewards are equal.
    always: bool = False
    figure: Figure[R] | None = None
    # What a report of several studies shows in place of `tables`.
    joint: Joint[R] | None = None
    # True if it is shown before the errors of the gradient, because a user asked for it.
    leads: bool = False

    def of(self, studies: Iterable[Study]) -> dict[Study, R]:
        """Return what each of the studies that have measured it found."""
        records = {study: study.of(self) for study in studies}
        return {study: record for study, record in records.items() if record is not None}


def table_of_studies(
    title: str,
    columns: Sequence[str],
    rows_by_study: Mapping[Study, Sequence[Sequence[Any]]],
    notes: Sequence[str],
) -> Table:
    """Return a table of one study, or of several with their policies in a column before the others.

    Args:
        rows_by_study: cells of each study, in `columns`.
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
    """Return the columns of the CSV files that name the study of a row.

    Args:
        study_keys: configuration keys in which the studies differ.
    """
    return {
        "run": run.label,
        "differs_in": key_label(run.keys, study_keys),
        "policy": run.policy,
        "dataset": run.dataset,
    }


def policies_quantity(studies: Iterable[Study]) -> str:
    """Return the name of the policies' quantity, an accuracy or a mean reward."""
    return joint_quantity(study.result.policy.quantity for study in studies)


def scopes_text(studies: Iterable[Study]) -> str:
    """Describe intervals for new questions, where studies have enough of them and where not."""
    scopes = sorted({interval_scope(study.result.questions) for study in studies})
    few = f" (fewer than {MIN_QUESTIONS})" * (len(scopes) > 1)
    return f"{' or '.join(scopes)}{few}"
