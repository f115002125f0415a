"""Sweeps through submitit on this machine, a process for each rank."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from launching import alive, lines, until  # noqa: E402
from resuming import SHORT, rows  # noqa: E402

from grpo_ustat.runs import history  # noqa: E402

pytest.importorskip("submitit")
pytestmark = pytest.mark.nightly(minutes=3)
SWEEP = (
    sys.executable, "-m", "grpo_ustat.train", "-m", *SHORT, "max_steps=30", "eval_steps=30",
    "save_steps=30", "seed=0,1", "hydra.sweep.dir=sweep", "hydra/launcher=submitit_local",
    "hydra.launcher.tasks_per_node=2", "hydra.launcher.timeout_min=60",
)  # fmt: skip


def tasks_of(seed):
    """The processes that run it, by what the history says of the first."""
    (first,) = (row["pid"] for row in history.launches(seed)[:1])
    controller = psutil.Process(first).parent()
    return controller, controller.children()


def test_tasks_are_ranks_and_a_signal_requeues_them(tmp_path):
    """USR2 to all tasks of a run: saved, started again, finished; typed again nothing runs."""
    with subprocess.Popen(SWEEP, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as sweep:
        until(lambda: [*tmp_path.glob("sweep/*/seed-0/metrics.jsonl")], seconds=120)
        (zero,) = tmp_path.glob("sweep/*/seed-0")
        until(lambda: lines(zero / "metrics.jsonl") >= 1)
        controller, tasks = tasks_of(zero)
        assert len(tasks) == 2
        for task in tasks:
            task.send_signal(signal.SIGUSR2)
        said = sweep.stderr.read()
    assert sweep.returncode == 0, said
    assert not any(map(alive, (controller, *tasks)))
    for path in tmp_path.glob("sweep/*/seed-*"):
        assert [row["step"] for row in rows(path)] == list(range(1, 31))
    told = [row.get("outcome", row["event"]) for row in history.launches(zero)]
    assert told == ["start", "stopped", "start", "resumed", "done"]
    assert {row["processes"] for row in history.launches(zero) if "processes" in row} == {2}
    (one,) = tmp_path.glob("sweep/*/seed-1")
    assert [row.get("outcome", row["event"]) for row in history.launches(one)] == ["start", "done"]
    again = subprocess.run(SWEEP, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0 and again.stdout.count("done already") == 2
    assert len(history.launches(zero)) == 5
