"""What runs of this machine took, read from the folders that they left beside a planned one."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any

import yaml

from grpo_ustat.config import TrainConfig
from grpo_ustat.runs import history
from grpo_ustat.runs.points import Point
from grpo_ustat.runs.rowfiles import read_rows

MOST = 50  # folders that are read, the newest
STEPS = 500  # of each, the last
SAME = (  # without which nothing can be learnt from a run
    "model.model_name_or_path", "model.dtype", "launch.device", "launch.num_threads",
    "launch.num_processes", "launch.workers", "bf16", "lora.r", "rollout.name",
)  # fmt: skip
SHAPE = (  # with which its steps take as long as the planned ones
    "budget.rollouts", "budget.value_completions", "group_size", "max_completion_length",
    "dataset.name", "prompt.name", "prompt.shots", "baseline.name", "objective.num_iterations",
    "objective.minibatch_size", "objective.beta", "gradient_checkpointing", "rollout_batch_size",
    "monitor.gradient_mse_every", "budget.pool_completions", "study.questions", "study.methods",
)  # fmt: skip


@dataclass(frozen=True)
class Earlier:
    """One run, finished or interrupted.

    Attributes:
        alike: whether its shape is that of the planned one.
        steps: rows of metrics.jsonl.
        cost: of a study's result.json.
        wall: seconds from start to end of a run that one launch finished, else None.
    """

    alike: bool
    steps: list[dict[str, Any]]
    cost: dict[str, float]
    wall: float | None


def earlier_runs(point: Point) -> list[Earlier]:
    """Runs of the same model on the same kind of device of this host; if any has the planned
    shape, only those that have.
    """
    asked = asdict(point.config)
    found = [run for folder in _folders(point) if (run := _read(folder, asked)) is not None]
    return [run for run in found if run.alike] or found


def _folders(point: Point) -> list[Path]:
    """Run folders beside the planned one and in the usual place, the newest first."""
    entry = "train" if isinstance(point.config, TrainConfig) else "mse"
    places = [(Path("outputs") / entry, "*/*/code.json")]
    if point.folder is not None:
        path = point.folder.path
        places.append((path.parent, "*/code.json"))
        if path.name.startswith("seed="):
            places.append((path.parent.parent, "*/*/code.json"))
    found = chain.from_iterable(islice(place.glob(name), 1000) for place, name in places)
    files = {file.resolve(): file.stat().st_mtime for file in found}
    return [file.parent for file in sorted(files, key=files.get, reverse=True)[:MOST]]


def _read(folder: Path, asked: dict[str, Any]) -> Earlier | None:
    """None where it is of another model, device or machine, damaged, or has measured nothing."""
    with suppress(OSError, ValueError, yaml.YAMLError, AttributeError, KeyError, TypeError):
        stored = yaml.safe_load((folder / ".hydra/config.yaml").read_text())
        launches = history.launches(folder)
        hosts = {row.get("host") for row in launches if row["event"] == "start"}
        if hosts != {socket.gethostname()} or not _equal(stored, asked, SAME):
            return None
        steps, cost = list(_steps(folder)), _cost(folder)
        alike = _equal(stored, asked, SHAPE)
        return Earlier(alike, steps, cost, _wall(launches)) if steps or cost else None
    return None


def _equal(stored: dict[str, Any], asked: dict[str, Any], keys: tuple[str, ...]) -> bool:
    return all(_at(stored, key) == _at(asked, key) for key in keys)


def _at(config: Any, key: str) -> Any:
    """None where one of the entries does not know the key."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def _steps(folder: Path) -> Iterator[dict[str, Any]]:
    needed = {"step_time", "seconds_generate", "tokens", "completions/mean_length"}
    for row in read_rows(folder / "metrics.jsonl")[0][-STEPS:]:
        if needed <= row.keys() and row["tokens"] > 0:
            yield row


def _wall(launches: list[dict[str, Any]]) -> float | None:
    if len(launches) != 2 or launches[1].get("outcome") != "done":
        return None
    start, end = (datetime.fromisoformat(row["time"]) for row in launches)
    return (end - start).total_seconds() + 0.5  # times are cut to seconds


def _cost(folder: Path) -> dict[str, float]:
    if not (folder / "result.json").is_file():
        return {}
    cost = json.loads((folder / "result.json").read_text()).get("cost") or {}
    return cost if cost.get("rollouts") and cost.get("seconds_generate") else {}
