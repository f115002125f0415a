"""What runs leave behind: no process, no descriptor, no temporary file, no memory."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from commands import compose

from grpo_ustat.measurements import error_figures, group_size
from grpo_ustat.mse import study as study_run
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.train import trainer

RUNS = int(os.environ.get("LEAK_RUNS", "25"))
STUDY = (
    "debug=mse", "model=tiny_direct", "study.questions=2", "group_sizes=[2,4]",
    "budget.pool_completions=4", "max_completion_length=4", "launch.workers=1",
    "budget.feature_sketch=64", "budget.gradient_sketch=64",
)  # fmt: skip
TRAINING = (
    "debug=train", "model=tiny_direct", "max_steps=1", "eval_steps=1", "save_steps=1",
    "max_completion_length=4", "dataset.test_size=4",
)  # fmt: skip
WAYS = {  # a command that lasts, and how many processes of it there are at work
    "one process": (("launch.workers=1",), 1),
    "workers": (("launch.workers=2",), 4),  # with what forks them, and what tracks resources
    "ranks": (("launch.num_processes=2",), 4),
}


def state():
    """Descriptors, threads and children of this process, and its megabytes."""
    gc.collect()
    process = psutil.Process()
    names = [thread.name for thread in threading.enumerate()]
    return process.num_fds(), len(names), len(process.children()), process.memory_info().rss / 1e6


@pytest.mark.nightly(minutes=1)
@pytest.mark.parametrize("entry", ["mse", "train"])
def test_many_runs_leave_a_process_as_it_was(entry, tmp_path, monkeypatch):
    for drawing in ((study_run, "draw_figures"), (error_figures, "draw"), (group_size, "draw")):
        monkeypatch.setattr(*drawing, lambda *_: None)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    config = compose(entry, *(STUDY if entry == "mse" else TRAINING))
    run = study_run.run if entry == "mse" else trainer.fit
    states = []
    for number in range(RUNS):
        run(config, RunFolder(tmp_path / str(number), config))
        states.append(state())
    early, late = states[9], states[-1]
    assert late[:3] == early[:3], (early, late)
    assert late[3] - early[3] < 10 + 0.75 * (RUNS - 10), [round(one[3]) for one in states]
    assert list((tmp_path / "tmp").iterdir()) == []


def processes_of(folder):
    """Living processes that have this folder for temporary files, but for zombies."""
    alive = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("TMPDIR") == str(folder)
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except psutil.Error:
            continue
    return alive


def until(condition, seconds):
    """Whether it holds before so many seconds are over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.nightly(minutes=1)
@pytest.mark.parametrize("way", WAYS)
def test_a_killed_command_leaves_no_process_and_no_temporary_file(way, tmp_path):
    words, count = WAYS[way]
    place = tmp_path / "tmp"
    place.mkdir()
    environment = os.environ | {"TMPDIR": str(place)}
    command = subprocess.Popen(
        [sys.executable, "-m", "grpo_ustat.mse", "model=tiny_base", "hydra.run.dir=run", *words],
        cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert until(lambda: list(tmp_path.glob("run/pool/*.safetensors")), 120)
        assert len(processes_of(place)) >= count
        shared = set(Path("/dev/shm").iterdir())
        command.send_signal(signal.SIGKILL)
        command.wait()
        assert until(lambda: not processes_of(place), 20), processes_of(place)
        of_others = ("pymp-", "torchelastic_")  # of the server of workers, and of torchrun
        assert [path for path in place.iterdir() if not path.name.startswith(of_others)] == []
        assert set(Path("/dev/shm").iterdir()) <= shared
    finally:
        for process in processes_of(place):
            process.kill()
