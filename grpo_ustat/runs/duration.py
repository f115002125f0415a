"""How long runs would take: from earlier runs here, else from what a device is assumed to do.

Always a range with what it stands on; without start-up, and where a study was not measured without
its closed forms and figures.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from grpo_ustat.config import MseConfig, TrainConfig
from grpo_ustat.runs.cost import Cost, evaluations, model_size
from grpo_ustat.runs.earlier import Earlier, earlier_runs
from grpo_ustat.runs.points import Point

WIDER = 2.0  # runs of another shape: so much faster or slower a token may be written and read
AGAIN = 1.3  # runs of the same shape, from one time to another
SHORTEST = 1 / 4  # of max_completion_length, where nothing is known of lengths


class Span(NamedTuple):
    """From the least to the most, seconds unless said."""

    low: float
    high: float

    def __add__(self, other: Span) -> Span:  # type: ignore[override]
        return Span(self.low + other.low, self.high + other.high)

    def times(self, low: float, high: float | None = None) -> Span:
        """Both ends scaled, by one factor or by one each."""
        return Span(self.low * low, self.high * (low if high is None else high))


@dataclass(frozen=True)
class Duration:
    """What a run would take.

    Attributes:
        seconds: None where it is not known.
        basis: what it stands on, or what to do to know it.
        gpus: that it keeps busy.
    """

    seconds: Span | None
    basis: str
    gpus: int

    @property
    def gpu_hours(self) -> Span | None:
        """Of all GPUs that it keeps busy."""
        return None if self.seconds is None else self.seconds.times(self.gpus / 3600)


@dataclass(frozen=True)
class Device:
    """What a device is assumed to do, from the slowest to the fastest.

    Attributes:
        flops: multiplications and additions a second, in bfloat16 and in float32.
        bandwidth: bytes a second.
        layer: seconds that one layer takes for one token however small it is.
    """

    name: str
    flops: dict[str, Span]
    bandwidth: Span
    layer: Span


PEAKS = {  # of the makers' data sheets: TFLOP/s in bfloat16, dense, and in float32; TB/s
    "H200": (989, 67, 4.8), "H100": (989, 67, 3.35), "A100": (312, 19.5, 2.0),
    "L40S": (362, 92, 0.86), "4090": (165, 83, 1.0), "A10": (125, 31, 0.6), "L40": (181, 90, 0.86),
    "L4": (121, 30, 0.3),
}  # fmt: skip
USED = Span(0.1, 0.45)  # of its peak in updates of a language model
READ = Span(0.25, 0.8)  # of its bandwidth while sampling
CPU = Device(
    "CPU at 5 to 50 GFLOP/s a thread",
    {"bf16": Span(2e9, 5e10), "float32": Span(5e9, 5e10)},
    Span(3e9, 2e10),
    Span(3e-4, 2e-5),
)


def duration(point: Point, found: Cost) -> Duration:
    """What a run would take, see the module."""
    config = point.config
    gpus = _gpus(config)
    runs = earlier_runs(point)
    if isinstance(config, TrainConfig):
        measured = [run for run in runs if run.steps]
        seconds = _of_steps(config, found, measured) if measured else None
        count = f"{sum(len(run.steps) for run in measured)} steps of "
    else:
        measured = [run for run in runs if run.cost]
        seconds = _of_studies(config, found, measured) if measured else None
        count = ""
    if seconds is not None:
        return Duration(seconds, _told(config, measured, count), gpus)
    return _assumed(config, found, gpus)


def _told(config: TrainConfig | MseConfig, runs: list[Earlier], count: str) -> str:
    like = "of this shape" if runs[0].alike else f"of another shape, so {WIDER:g} times either way"
    like += "; on a machine as busy as then"
    runs_said = f"{len(runs)} earlier run{'s' * (len(runs) > 1)}"
    return f"measured: {count}{runs_said} of {config.model.name} on {_where(config)} here, {like}"


def _where(config: Any) -> str:
    return config.launch.device


def _gpus(config: TrainConfig | MseConfig) -> int:
    return config.launch.num_processes if config.launch.device.startswith("cuda") else 0


def _of_steps(config: TrainConfig, found: Cost, runs: list[Earlier]) -> Span:
    """Steps between the 10th and the 90th percentile of those before, and evaluations by the
    seconds of writing one token; at most what runs of the same shape took beside their steps.
    """
    rows = [row for run in runs for row in run.steps]
    length = _percentiles([row["completions/mean_length"] for row in rows])
    write = _percentiles([row["seconds_generate"] / row["tokens"] for row in rows])
    tests = write.times((found.evaluation or 0) * length.low, (found.evaluation or 0) * length.high)
    if runs[0].alike:
        steps = _percentiles([row["step_time"] for row in rows]).times(config.max_steps)
        beside = Span(tests.low, max(tests.high, *map(_outside_steps, runs)))
        return (steps + beside).times(1 / AGAIN, AGAIN)
    length = Span(length.low, min(length.high, config.max_completion_length))
    each = _percentiles([row["step_time"] / row["tokens"] for row in rows])
    completions = found.rollouts + found.values
    steps = each.times(completions * length.low, completions * length.high)
    return (steps + tests).times(1 / WIDER, WIDER)


def _outside_steps(run: Earlier) -> float:
    """Seconds of evaluations, saving and all else, of a run that one launch finished; else 0."""
    whole = run.wall is not None and run.steps[0]["step"] == 1
    return max(0.0, run.wall - sum(row["step_time"] for row in run.steps)) if whole else 0.0


def _of_studies(config: MseConfig, found: Cost, runs: list[Earlier]) -> Span:
    """Seconds of a completion, the least and the most of the studies before: of the whole study, or
    of what its workers did where several launches made it.
    """
    each = [
        (run.wall or _work_of(run) / config.launch.workers) / run.cost["rollouts"] for run in runs
    ]
    wide = AGAIN if runs[0].alike else WIDER
    return Span(min(each) / wide, max(each) * wide).times(found.rollouts + found.values)


def _work_of(run: Earlier) -> float:
    return run.cost["seconds_generate"] + run.cost["seconds_score"]


def _percentiles(values: Sequence[float]) -> Span:
    low, high = np.quantile(values, [0.1, 0.9])
    return Span(float(low), float(high))


def _assumed(config: TrainConfig | MseConfig, found: Cost, gpus: int) -> Duration:
    """Reading and writing tokens by arithmetic, at the lengths that are possible."""
    size = model_size(config.model)
    if size.parameters is None or size.layers is None:
        debug = "debug=train" if isinstance(config, TrainConfig) else "debug=mse"
        return Duration(None, f"unknown: run {debug} with this model here first", gpus)
    device = _gpu() if config.launch.device.startswith("cuda") else CPU
    fast, slow = _work(config, found, device, SHORTEST, 1), _work(config, found, device, 1.0, 0)
    basis = (
        f"assumed, not measured: one idle {device.name}, completions of {SHORTEST:g} to 1 times "
        "max_completion_length, prompts left out"
    )
    return Duration(Span(fast, slow), basis, gpus)


def _work(config: Any, found: Cost, device: Device, share: float, end: int) -> float:
    """Seconds at one end of what is assumed: `end` 0 the slow, 1 the fast one.

    A token costs 2 P multiplications and additions to write, 6 P in an update beside 2 P for its
    log-probability before; 2 P more where activations are computed twice, 2 P less for adapters.
    Writing goes token by token, each reading all weights and passing through all layers.
    """
    size, trains = model_size(config.model), isinstance(config, TrainConfig)
    shared = 1 if config.launch.device.startswith("cuda") else getattr(config.launch, "workers", 1)
    processes = config.launch.num_processes if trains else shared  # workers share one GPU
    tokens = config.max_completion_length * share
    rows = found.rollouts + found.values + (found.evaluation or 0)
    low = config.model.dtype in ("bfloat16", "float16") or getattr(config, "bf16", False)
    flops = device.flops["bf16" if low else "float32"][end]
    read = 8 if not trains else 2 + _passes(config)
    work = size.parameters * tokens * (2 * rows + read * found.rollouts) / flops
    each = found.weights / device.bandwidth[end] + size.layers * device.layer[end]
    return work / processes + _batches(config, found, processes) * tokens * each


def _passes(config: TrainConfig) -> int:
    """Of an update, in P multiplications and additions a token."""
    each = 6 + 2 * config.gradient_checkpointing - 2 * (config.lora.r > 0)
    return each * config.objective.num_iterations


def _batches(config: Any, found: Cost, processes: int) -> int:
    """Batches of completions written one after the other by one process."""
    side = config.rollout_batch_size * processes
    if not isinstance(config, TrainConfig):
        return math.ceil((found.rollouts + found.values) / side)
    steps, tests = config.max_steps, evaluations(config)
    each = math.ceil(config.budget.rollouts / side) + math.ceil(found.values / steps / side)
    return steps * each + tests * math.ceil((found.evaluation or 0) / tests / side)


@cache
def _gpu() -> Device:
    """The first GPU here where it is a known one; else between an A100 and an H100."""
    name = _name_of_gpu()
    known = next((key for key in PEAKS if name and key in name.replace("RTX ", "")), None)
    ends = (known, known) if known else ("A100", "H100")
    low, high = (PEAKS[end] for end in ends)
    called = known or "GPU between an A100 and an H100"
    return Device(
        f"{called} at {USED.low:.0%} to {USED.high:.0%} of its peak",
        {
            "bf16": Span(low[0] * USED.low * 1e12, high[0] * USED.high * 1e12),
            "float32": Span(low[1] * USED.low * 1e12, high[1] * USED.high * 1e12),
        },
        Span(low[2] * READ.low * 1e12, high[2] * READ.high * 1e12),
        Span(5e-4, 5e-5),
    )


def _name_of_gpu() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


UNITS = (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("days", 86400.0))


def said(span: Span | None) -> str:
    """A range of seconds, each end in the unit that suits it.

    >>> said(Span(40, 5400)), said(Span(3, 4.04)), said(None)
    ('40 s to 1.5 h', '3 to 4 s', 'unknown')
    """
    if span is None:
        return "unknown"
    (low, unit), (high, upper) = map(_in_unit, span)
    return f"{low} to {high} {upper}" if unit == upper else f"{low} {unit} to {high} {upper}"


def _in_unit(seconds: float) -> tuple[str, str]:
    unit, size = next((one for one in UNITS[::-1] if seconds >= 1.5 * one[1]), UNITS[0])
    return _short(seconds / size), unit


def count_of(span: Span | None) -> str:
    """A range of hours."""
    return "unknown" if span is None else f"{_short(span.low)} to {_short(span.high)}"


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 100 else f"{value:,.0f}".replace(",", " ")
