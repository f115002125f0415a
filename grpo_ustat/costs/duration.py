"""Durations of planned runs, estimated from the speed of an earlier run on this machine.

The estimate is rough, because the speed depends on the batch size, the length of the completions
and the load of the machine. If no similar run has finished on this machine, the duration is
unknown.
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

# Largest number of finished runs that are read; the newest are read first.
MAX_RUNS_READ = 50
# Keys of the configuration. A duration is estimated only from a run with the same values.
AGREEING_KEYS = (
    "model.model_name_or_path", "model.dtype", "launch.device", "launch.num_threads",
    "launch.num_processes", "launch.workers", "bf16", "lora.r", "rollout.name",
)  # fmt: skip
UNITS = (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


@dataclass(frozen=True)
class Plan:
    """Facts about a planned run, from which its cost and duration are estimated and shown."""

    # `train` or `mse`.
    command: str
    # Settings that determine the cost, by the names that are shown. A value None is not shown.
    settings: Mapping[str, object]
    cost: Cost
    # Name of the policy.
    model: str
    # Configured torch device.
    device: str
    # Number of ranks or local workers that share the run.
    processes: int
    gpus: int
    # Largest length of a completion in tokens.
    max_completion_length: int
    # Values of `AGREEING_KEYS`, from the function `conditions`.
    conditions: Mapping[str, object]
    # Default parent folder of this command's runs, with a subfolder for each date.
    usual_place: Path
    # Folder of the run; None if it is known only once the run's job has started.
    folder: Path | None
    # Overrides for a run of seconds or minutes with the same speed. Such a run allows an estimate.
    short_run: str
    # Sentence that says how the batch of a step is divided.
    batch: str = ""
    # Notes on the run's memory.
    notes: Sequence[str] = ()
    # Published number of test questions, if the estimate relies on it; else None.
    published_tests: int | None = None


@dataclass(frozen=True)
class Duration:
    """Estimated time of a run."""

    # Estimated seconds; None if no earlier run allows an estimate.
    seconds: float | None
    # Part of `seconds` before the run itself starts. Several runs in one process need it only once.
    start: float
    # Earlier run on which the estimate is based. Without an estimate, the reason for this, and
    # overrides for a short run that would allow an estimate.
    basis: str
    gpus: int

    @property
    def gpu_hours(self) -> float | None:
        """Hours summed over all GPUs."""
        return None if self.seconds is None else self.seconds * self.gpus / 3600


@dataclass(frozen=True)
class Pace:
    """Speed of a finished run."""

    # Tokens per second, in training steps or while a study samples and computes gradients.
    rate: float
    # Tokens per second while a training run only samples, as in evaluations.
    sampling_rate: float
    # Mean number of tokens per completion.
    length: float
    # Seconds of all other parts of the run, such as loading the model and drawing figures.
    rest: float
    # Seconds from the start of the process to the start of its first run.
    start: float


def duration(plan: Plan) -> Duration:
    """Estimate the duration of a planned run from the newest earlier run whose speed is known.

    The estimate assumes that completions are as long as in the earlier run.
    """
    cost = plan.cost
    completions, tests = cost.rollouts + cost.values, cost.evaluation or 0
    if not completions:
        return Duration(None, 0.0, "the run samples no completions", plan.gpus)
    for run in finished_runs(plan.command, plan.conditions, plan.usual_place, plan.folder):
        pace = pace_of(run, plan.processes)
        if pace is None:
            continue
        length = min(pace.length, plan.max_completion_length)
        seconds = completions * length / pace.rate + tests * length / pace.sampling_rate
        seconds += pace.rest + pace.start
        basis = (
            f"{number_text(pace.rate)} tokens/s in {path_text(run.folder)}, "
            f"{number_text(length)} tokens per completion"
        )
        return Duration(seconds, pace.start, basis, plan.gpus)
    reason = f"no run of {plan.model} on {plan.device} has finished"
    hint = f"For an estimate, first run the same command with {plan.short_run}"
    return Duration(None, 0.0, f"{reason}. {hint}", plan.gpus)


def pace_of(run: RunRecord, processes: int) -> Pace | None:
    """Return the speed of a finished run.

    Args:
        run: run whose times are read.
        processes: number of processes among which the run was divided.

    Returns:
        Speed, or None if it cannot be determined. This is the case if the run was launched several
        times, used stored completions of another run, or computed no gradients because all rewards
        were equal.
    """
    launches, result = run.launches, run.final_result
    if [row.get("event") for row in launches] != ["start", "end"]:
        return None
    wall, start = wall_seconds(launches), launches[0].get("seconds_before", 0.0)
    if wall is None or launches[1].get("outcome") != "done" or not is_number(start):
        return None
    work = result.get("cost", result)
    parts = [work[key] for key in ("seconds_generate", "seconds_score") if key in work]
    # The seconds in `parts` are sums over processes.
    seconds = sum(parts) / processes if parts else work["seconds"]
    completions = work["rollouts"] + work.get("value_rollouts", 0)
    has_work = all(number > 0 for number in (*parts, seconds, completions, work["tokens"]))
    # One second is added, because stored times are truncated to whole seconds.
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
    """Yield finished runs of a command on this machine, newest first.

    At most the `MAX_RUNS_READ` newest results are read.

    Args:
        command: `train`, `mse` or `gap`.
        conditions: values that the runs' configurations must have, keyed by dotted names.
        usual_place: default parent folder of this command's runs, with a subfolder for each date.
        folder: folder of the planned run, or None. Runs in neighbouring folders are read too.
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
    """Return the values of `AGREEING_KEYS` in a configuration; None for a key that it lacks.

    Args:
        values: nested values of a run's configuration.
    """
    by_key = flatten(values)
    return {key: by_key.get(key) for key in AGREEING_KEYS}


def one_after_the_other(durations: Sequence[Duration]) -> float | None:
    """Return the total seconds of runs that one process executes; None if one is unknown."""
    seconds = [
        estimate.seconds - estimate.start for estimate in durations if estimate.seconds is not None
    ]
    start = max(estimate.start for estimate in durations)
    return sum(seconds) + start if len(seconds) == len(durations) else None


def time_text(seconds: float | None) -> str:
    """Format a duration with two digits, in seconds, minutes, hours or days.

    >>> time_text(40), time_text(5400), time_text(86400 * 2000), time_text(None)
    ('40 s', '1.5 h', '2 000 days', 'unknown')
    """
    if seconds is None:
        return "unknown"
    unit, size = next((entry for entry in UNITS if seconds >= 1.5 * entry[1]), UNITS[-1])
    return f"{number_text(seconds / size)} {unit}"


def number_text(number: float | None) -> str:
    """Format a number with two digits; from 100 on, as an integer.

    >>> number_text(3.14159), number_text(1901.6), number_text(None)
    ('3.1', '1 902', 'unknown')
    """
    if number is None:
        return "unknown"
    return f"{number:.2g}" if number < 99.5 else f"{number:,.0f}".replace(",", " ")


def path_text(folder: Path) -> str:
    """Return the path of a folder, relative to the working directory if the folder is inside it."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)
