"""How long runs would take, from earlier runs of the same model on this machine.

A time is always a range, with the earlier runs that it rests on. Where none of them was timed from
start to end, start-up, closed forms and figures are not counted. Where there is no earlier run, no
time is given.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grpo_ustat.costs.cost import Cost
from grpo_ustat.runs.contents import is_number
from grpo_ustat.runs.record import RunRecord

OTHER_SHAPE_FACTOR = 2.0  # a token of a run of another shape may be so much faster or slower
SAME_SHAPE_FACTOR = 1.3  # a run of the same shape may be so much faster or slower

MOST_FOLDERS = 50  # that are read, the newest
MOST_STEPS = 500  # of each that are read, the last
SHARED_KEYS = (  # keys that an earlier run must share, or nothing can be learnt from it
    "model.model_name_or_path", "model.dtype", "launch.device", "launch.num_threads",
    "launch.num_processes", "launch.workers", "bf16", "lora.r", "rollout.name",
)  # fmt: skip
SHAPE_KEYS = (  # keys with which its steps take as long as the planned ones
    "budget.rollouts", "budget.value_completions", "group_size", "max_completion_length",
    "dataset.name", "prompt.name", "prompt.shots", "baseline.name", "objective.num_iterations",
    "objective.num_minibatches", "objective.minibatch_size", "objective.beta",
    "gradient_checkpointing", "rollout_batch_size",
    "monitor.gradient_mse_every", "budget.pool_completions", "study.questions", "study.methods",
    "study.metric", "study.parameters",
)  # fmt: skip
STEP_COSTS = ("step_time", "seconds_generate", "tokens", "completions/mean_length")
UNITS = (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("days", 86400.0))


class Span(NamedTuple):
    """A range of a quantity, its least and its largest value; seconds unless said otherwise."""

    low: float
    high: float

    def __add__(self, other: Span) -> Span:  # type: ignore[override]
        return Span(self.low + other.low, self.high + other.high)

    def times(self, low: float, high: float | None = None) -> Span:
        """Both ends scaled, by one factor or by one each."""
        return Span(self.low * low, self.high * (low if high is None else high))


@dataclass(frozen=True)
class Plan:
    """A planned run as its command describes it to costs.

    Attributes:
        command: `train` or `mse`.
        settings: what decides its cost, as one types it; what is None is not shown.
        cost: what it takes beside time.
        model: name of the policy.
        device: torch device, as configured.
        processes: that share it out, its ranks or local workers.
        gpus: number of GPUs in use.
        steps: of training; None of a study.
        max_completion_length: tokens.
        conditions: see `conditions`.
        usual_place: where runs of this command are, by date.
        folder: of the run; None where only the running job knows it.
        batch: how a step's batch is divided, in words.
        notes: on its memory.
        published_tests: number of test questions that was taken from a publication.
    """

    command: str
    settings: Mapping[str, object]
    cost: Cost
    model: str
    device: str
    processes: int
    gpus: int
    steps: int | None
    max_completion_length: int
    conditions: Mapping[str, object]
    usual_place: Path
    folder: Path | None
    batch: str = ""
    notes: Sequence[str] = ()
    published_tests: int | None = None


@dataclass(frozen=True)
class Duration:
    """What a run would take.

    Attributes:
        seconds: None where no earlier run says it.
        basis: the earlier runs, or what to run to have one.
        gpus: number of GPUs in use.
    """

    seconds: Span | None
    basis: str
    gpus: int

    @property
    def gpu_hours(self) -> Span | None:
        """Hours of all GPUs together."""
        return None if self.seconds is None else self.seconds.times(self.gpus / 3600)


@dataclass(frozen=True)
class EarlierRun:
    """One run, finished or interrupted.

    Attributes:
        same_shape: whether it has the planned run's values of `SHAPE_KEYS`.
        steps: rows of metrics.jsonl.
        cost: of a study's result.json.
        wall: seconds from the start of its process to the end of a run that one launch finished,
            else None.
    """

    same_shape: bool
    steps: list[dict[str, Any]]
    cost: dict[str, float]
    wall: float | None


def duration(plan: Plan) -> Duration:
    """What a run would take, see the module."""
    trains, device = plan.steps is not None, plan.device
    runs = [run for run in earlier_runs(plan) if (run.steps if trains else run.cost)]
    if not runs:
        reason = f"left out, for no run of {plan.model} on {device} is known on this machine"
        hint = f"run debug={plan.command} with this model and device first"
        return Duration(None, f"{reason}; {hint}", plan.gpus)

    seconds = step_seconds(plan, runs) if trains else study_seconds(plan, runs)
    steps = f"{sum(len(run.steps) for run in runs)} steps of " if trains else ""
    count = f"{len(runs)} earlier run{'s' * (len(runs) > 1)}"
    shape = (
        "this shape"
        if runs[0].same_shape
        else f"another shape, so {OTHER_SHAPE_FACTOR:g} times either way"
    )
    basis = (
        f"measured: {steps}{count} of {plan.model} on {device} here, of {shape}; "
        "on a machine as busy as then"
    )
    return Duration(seconds, basis, plan.gpus)


def step_seconds(plan: Plan, runs: list[EarlierRun]) -> Span:
    """Seconds of all steps and evaluations of a training run, from the steps of earlier ones.

    Of the same shape: steps between the 10th and the 90th percentile of those before; evaluations
    by the seconds of sampling one token, at most what earlier runs took beside their steps. Of
    another shape: by the seconds of one token.
    """
    rows = [row for run in runs for row in run.steps]
    length = _percentiles([row["completions/mean_length"] for row in rows])
    sampling = _percentiles([row["seconds_generate"] / row["tokens"] for row in rows])
    tests = plan.cost.evaluation or 0
    evaluations = sampling.times(tests * length.low, tests * length.high)
    if runs[0].same_shape:
        outside = [evaluations.high]  # evaluations, saving and all else of whole runs
        for run in runs:
            if run.wall is not None and run.steps[0]["step"] == 1:
                outside.append(run.wall - sum(row["step_time"] for row in run.steps))
        steps = _percentiles([row["step_time"] for row in rows]).times(plan.steps or 0)
        return (steps + Span(evaluations.low, max(outside))).times(
            1 / SAME_SHAPE_FACTOR, SAME_SHAPE_FACTOR
        )
    length = Span(length.low, min(length.high, plan.max_completion_length))
    token = _percentiles([row["step_time"] / row["tokens"] for row in rows])
    completions = plan.cost.rollouts + plan.cost.values
    steps = token.times(completions * length.low, completions * length.high)
    return (steps + evaluations).times(1 / OTHER_SHAPE_FACTOR, OTHER_SHAPE_FACTOR)


def study_seconds(plan: Plan, runs: list[EarlierRun]) -> Span:
    """Seconds of a study: the least and the most that earlier ones took for a completion, times its
    completions, and what they took for all else (start, formulas, figures), which does not grow
    with completions and is known of studies of a single launch.
    """
    each, beside = [], []
    for run in runs:
        seconds = run.cost["seconds_generate"] + run.cost["seconds_score"]
        seconds /= plan.processes
        each.append(seconds / run.cost["rollouts"])
        beside.append(max(run.wall - seconds, 0.0) if run.wall else 0.0)
    work = Span(min(each), max(each)).times(plan.cost.rollouts + plan.cost.values)
    wide = SAME_SHAPE_FACTOR if runs[0].same_shape else OTHER_SHAPE_FACTOR
    return (work + Span(min(beside), max(beside))).times(1 / wide, wide)


def _percentiles(values: Sequence[float]) -> Span:
    low, high = np.quantile(values, [0.1, 0.9])
    return Span(float(low), float(high))


def earlier_runs(plan: Plan) -> list[EarlierRun]:
    """Runs of the same model on the same kind of device of this host, beside the planned run and in
    the usual place; if any has the planned shape, only those that have.
    """
    folders = newest_folders(plan.usual_place, plan.folder)
    runs = [run for folder in folders if (run := _read(folder, plan.conditions)) is not None]
    return [run for run in runs if run.same_shape] or runs


def conditions(values: Mapping[str, object]) -> dict[str, object]:
    """Configured values on which a run's time depends, by dotted key; None where the command has no
    such key.
    """

    def value(key: str) -> object:
        group, _, name = key.rpartition(".")
        inner = values.get(group) if group else values
        return inner.get(name) if isinstance(inner, Mapping) else None

    return {key: value(key) for key in SHARED_KEYS + SHAPE_KEYS}


def newest_folders(usual_place: Path, folder: Path | None) -> list[Path]:
    """Run folders beside the planned run's, if it has one, and in its command's usual place; at
    most MOST_FOLDERS.
    """
    places = [(usual_place, "*/*/code.json")]
    if folder is not None:
        places.append((folder.parent, "*/code.json"))
        if folder.name.startswith("seed-"):
            places.append((folder.parent.parent, "*/*/code.json"))
    marks = chain.from_iterable(islice(place.glob(name), 1000) for place, name in places)
    times = {file.resolve(): file.stat().st_mtime for file in marks}
    return [
        file.parent for file in sorted(times, key=lambda x: times[x], reverse=True)[:MOST_FOLDERS]
    ]


def started_here(launches: Sequence[dict[str, Any]]) -> bool:
    """Whether all launches of a run were on this machine."""
    hosts = {row.get("host") for row in launches if row.get("event") == "start"}
    return hosts == {socket.gethostname()}


def _read(folder: Path, planned: Mapping[str, object]) -> EarlierRun | None:
    """What an earlier run has measured; None where it is of another model, device or machine,
    damaged, or has measured nothing.
    """
    run = RunRecord(folder)
    own = conditions(run.config)
    launches = run.launches
    if not started_here(launches) or any(own[key] != planned[key] for key in SHARED_KEYS):
        return None
    steps = [
        row
        for row in run.metrics[-MOST_STEPS:]
        if all(is_number(row.get(name)) and row[name] >= 0 for name in STEP_COSTS)
        and row["tokens"] > 0
    ]
    cost = (run.result or {}).get("cost") or {}
    names = ("rollouts", "seconds_generate", "seconds_score")  # 0 of equal rewards, unscored
    if not all(cost.get(name, 0) > 0 for name in names):
        cost = {}
    same_shape, wall = all(own[key] == planned[key] for key in SHAPE_KEYS), None
    if len(launches) == 2 and launches[1].get("outcome") == "done":
        times = [row["time"] for row in launches if "time" in row]
        if len(times) == 2:
            start, end = map(datetime.fromisoformat, times)
            seconds = (end - start).total_seconds() + 0.5  # times are cut to seconds
            before = launches[0].get("seconds_before", 0.0)
            wall = seconds + float(before if is_number(before) else 0.0) if seconds > 0 else None
    return EarlierRun(same_shape, steps, cost, wall) if steps or cost else None


def span_text(span: Span | None) -> str:
    """A range of seconds, each end in the unit that suits it.

    >>> span_text(Span(40, 5400)), span_text(Span(3, 4.04)), span_text(None)
    ('40 s to 1.5 h', '3 to 4 s', 'unknown')
    """
    if span is None:
        return "unknown"
    ends = []
    for seconds in span:
        unit, size = next((one for one in UNITS[::-1] if seconds >= 1.5 * one[1]), UNITS[0])
        ends.append((_short(seconds / size), unit))
    (low, unit), (high, upper) = ends
    return f"{low} to {high} {upper}" if unit == upper else f"{low} {unit} to {high} {upper}"


def hours_text(span: Span | None) -> str:
    """A range of hours."""
    return "unknown" if span is None else f"{_short(span.low)} to {_short(span.high)}"


def _short(number: float) -> str:
    return f"{number:.2g}" if number < 100 else f"{number:,.0f}".replace(",", " ")
