"""Durations of planned runs, at the tokens per second of an earlier run on this machine.

The estimate is rough: batches of another size, longer answers and a busier machine change the
rate. If no earlier run has finished, the time is unknown.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from grpo_ustat.config.schema import flatten
from grpo_ustat.costs.cost import Cost
from grpo_ustat.runs.contents import is_number
from grpo_ustat.runs.history import wall_seconds
from grpo_ustat.runs.record import RunRecord

# The newest finished runs that are read.
MAX_RUNS_READ = 50
# Keys of model and device in which an earlier run must agree.
AGREEING_KEYS = (
    "model.model_name_or_path", "model.dtype", "launch.device", "launch.num_threads",
    "launch.num_processes", "launch.workers", "bf16", "lora.r", "rollout.name",
)  # fmt: skip
UNITS = (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


@dataclass(frozen=True)
class Plan:
    """A planned run as its command describes it to the estimate of costs."""

    # `train` or `mse`.
    command: str
    # The settings that decide the cost, as the user types them; None is not shown.
    settings: Mapping[str, object]
    cost: Cost
    # Name of the policy.
    model: str
    # Torch device, as configured.
    device: str
    # Ranks or local workers that share the run.
    processes: int
    gpus: int
    # Tokens.
    max_completion_length: int
    # See `conditions`.
    conditions: Mapping[str, object]
    # Parent folder of this command's runs, by date.
    usual_place: Path
    # Folder of the run; None if only the running job knows it.
    folder: Path | None
    # Overrides that shorten the run to seconds or minutes, at the same rate.
    short_run: str
    # Division of a step's batch, in words.
    batch: str = ""
    # Notes on the run's memory.
    notes: Sequence[str] = ()
    # Number of test questions taken from a publication.
    published_tests: int | None = None


@dataclass(frozen=True)
class Duration:
    """Estimated time of a run."""

    # None if no earlier run tells it.
    seconds: float | None
    # Part of `seconds` until a process begins its first run; its later runs do not need it.
    start: float
    # The earlier run; without an estimate, the reason and what to run.
    basis: str
    gpus: int

    @property
    def gpu_hours(self) -> float | None:
        """Hours of all GPUs together."""
        return None if self.seconds is None else self.seconds * self.gpus / 3600


@dataclass(frozen=True)
class Pace:
    """Speed of a finished run."""

    # Tokens per second of its steps, or of a study's sampling and scoring.
    rate: float
    # Tokens per second of a training run's sampling, as in evaluations.
    sampling_rate: float
    # Tokens of a completion, on average.
    length: float
    # Seconds of the rest of the run: setup, figures.
    rest: float
    # Seconds until its process began its first run.
    start: float


def duration(plan: Plan) -> Duration:
    """Estimate the time of a planned run from the newest run that tells its pace.

    Completions are taken to be as long as those of that run.
    """
    cost = plan.cost
    completions, tests = cost.rollouts + cost.values, cost.evaluation or 0
    if not completions:
        return Duration(None, 0.0, "it samples no completions", plan.gpus)
    for run in finished_runs(plan.command, plan.conditions, plan.usual_place, plan.folder):
        pace = pace_of(run, plan.processes)
        if pace is None:
            continue
        length = min(pace.length, plan.max_completion_length)
        seconds = completions * length / pace.rate + tests * length / pace.sampling_rate
        seconds += pace.rest + pace.start
        basis = (
            f"{number_text(pace.rate)} tokens/s in {path_text(run.folder)}, "
            f"{number_text(length)} tokens a completion"
        )
        return Duration(seconds, pace.start, basis, plan.gpus)
    reason = f"no finished run of {plan.model} on {plan.device}"
    hint = f"Run once with {plan.short_run} to calibrate"
    return Duration(None, 0.0, f"{reason}. {hint}", plan.gpus)


def pace_of(run: RunRecord, processes: int) -> Pace | None:
    """Return the pace of a finished run that this many processes shared.

    None if the pace cannot be read from its history and result: several launches, a pool that
    existed before, or equal rewards.
    """
    launches, result = run.launches, run.final_result
    if [row.get("event") for row in launches] != ["start", "end"]:
        return None
    wall, start = wall_seconds(launches), launches[0].get("seconds_before", 0.0)
    if wall is None or launches[1].get("outcome") != "done" or not is_number(start):
        return None
    work = result.get("cost", result)
    parts = [work[key] for key in ("seconds_generate", "seconds_score") if key in work]
    # The parts are sums over workers.
    seconds = sum(parts) / processes if parts else work["seconds"]
    completions = work["rollouts"] + work.get("value_rollouts", 0)
    has_work = all(number > 0 for number in (*parts, seconds, completions, work["tokens"]))
    # Stored times are cut to whole seconds.
    if not has_work or seconds > wall + 1:
        return None
    rate, length = work["tokens"] / seconds, work["tokens"] / completions
    keys = ("tokens", "seconds_generate")
    rows = [row for row in run.metrics if all(is_number(row.get(key)) for key in keys)]
    tokens, generating = (sum(row[key] for row in rows) for key in keys)
    sampling_rate = tokens / generating if min(tokens, generating) > 0 else rate
    tests = sum(row["n"] * row["num_generations"] for row in result.get("evals", ()))
    rest = max(wall - seconds - tests * length / sampling_rate, 0.0)
    return Pace(rate, sampling_rate, length, rest, max(start, 0.0))


def finished_runs(
    command: str, conditions: Mapping[str, object], usual_place: Path, folder: Path | None
) -> Iterator[RunRecord]:
    """Yield finished runs of a command on this machine, newest first, at most `MAX_RUNS_READ`.

    Args:
        command: `train`, `mse` or `gap`.
        conditions: values that their configurations must have, by dotted key.
        usual_place: parent folder of this command's runs, by date.
        folder: folder of the planned run, whose neighbours are read too; None if it has none.
    """
    places = [(usual_place, "*/*/result.json")]
    if folder is not None:
        places.append((folder.parent, "*/result.json"))
        if folder.name.startswith("seed-"):
            places.append((folder.parent.parent, "*/*/result.json"))
    files = chain.from_iterable(islice(place.glob(name), 1000) for place, name in places)
    times = {file.resolve(): file.stat().st_mtime for file in files}
    for file in sorted(times, key=lambda file: times[file], reverse=True)[:MAX_RUNS_READ]:
        run = RunRecord(file.parent)
        hosts = {row.get("host") for row in run.launches if row.get("event") == "start"}
        if not run.config or run.command != command or hosts != {socket.gethostname()}:
            continue
        same = all(run.value(key) == value for key, value in conditions.items())
        if same and run.result is not None:
            yield run


def conditions(values: Mapping[str, object]) -> dict[str, object]:
    """Return the values of `AGREEING_KEYS`, by dotted key; None if the command lacks the key.

    Args:
        values: all values that a run folder stores, nested.
    """
    by_key = flatten(values)
    return {key: by_key.get(key) for key in AGREEING_KEYS}


def one_after_the_other(durations: Sequence[Duration]) -> float | None:
    """Return the seconds of runs that one process makes in turn; None if any is unknown."""
    seconds = [
        estimate.seconds - estimate.start for estimate in durations if estimate.seconds is not None
    ]
    start = max(estimate.start for estimate in durations)
    return sum(seconds) + start if len(seconds) == len(durations) else None


def time_text(seconds: float | None) -> str:
    """Format seconds in the unit that suits them, with two digits.

    >>> time_text(40), time_text(5400), time_text(86400 * 2000), time_text(None)
    ('40 s', '1.5 h', '2 000 days', 'unknown')
    """
    if seconds is None:
        return "unknown"
    unit, size = next((entry for entry in UNITS if seconds >= 1.5 * entry[1]), UNITS[-1])
    return f"{number_text(seconds / size)} {unit}"


def number_text(number: float | None) -> str:
    """Format a number with two digits, from 100 on with all digits before the point.

    >>> number_text(3.14159), number_text(1901.6), number_text(None)
    ('3.1', '1 902', 'unknown')
    """
    if number is None:
        return "unknown"
    return f"{number:.2g}" if number < 99.5 else f"{number:,.0f}".replace(",", " ")


def path_text(folder: Path) -> str:
    """Return the folder, relative to the working directory if it is inside it."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)
