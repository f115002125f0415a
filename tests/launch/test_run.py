"""A study on a disk that takes no more: one line, and what is paid for is kept."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from dataclasses import replace

import pytest
from commands import run as run_command
from disks import small_disk
from safetensors import SafetensorError
from slow_cases import slow_after

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.launch.command import load_command
from grpo_ustat.launch.run import make_run
from grpo_ustat.measurements import error_figures
from grpo_ustat.mse import pool_store
from grpo_ustat.mse import study as mse_study
from grpo_ustat.runs import folder as folder_module
from grpo_ustat.runs.faults import NotSaved
from grpo_ustat.runs.folder import RunFolder

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
SMALL = (
    "study.questions=4", "budget.pool_completions=8", "group_sizes=[2,4]",
    "max_completion_length=64", "rollout_batch_size=8",
)  # fmt: skip
WAYS = {
    "a part of the pool": (pool_store, "save_file", FULL),
    "a part of the pool, as safetensors says it": (
        pool_store, "save_file",
        SafetensorError("Error while serializing: IoError(Os { code: 28, kind: StorageFull })"),
    ),
    "curves.csv": (mse_study, "write_csv", FULL),
    "a figure": (error_figures, "save", FULL),
    "the page": (mse_study, "leave_page", FULL),
    "files of the folder": (folder_module, "write_whole", FULL),
}  # fmt: skip


def begun(tmp_path, workers=1):
    config = compose_config("mse", [*SMALL, f"launch.workers={workers}"])
    return config, RunFolder(tmp_path / "run", config)


@pytest.mark.slow
@pytest.mark.parametrize("owner, name, error", WAYS.values(), ids=WAYS)
def test_a_study_on_a_full_disk_ends_in_one_line_and_goes_on(
    tmp_path, monkeypatch, capsys, owner, name, error
):
    write, calls = getattr(owner, name), []

    def full(*arguments, **options):
        calls.append(1)
        if len(calls) > 2 or name not in ("save_file",):  # unscored, then scored
            raise error
        return write(*arguments, **options)

    monkeypatch.setattr(owner, name, full)
    config, folder = begun(tmp_path)
    with pytest.raises(NotSaved) as refusal:
        make_run(load_command("mse"), config, folder)
    message = str(refusal.value)
    assert len(message.splitlines()) == 1 and "No space left on device" in message
    assert message.startswith(f"{folder.path} could not be written (")
    assert "disk" in message
    assert not list(folder.path.rglob(".*.tmp")) and not (folder.path / "result.json").exists()
    parts = {file: file.stat().st_mtime_ns for file in folder.path.glob("pool/*.safetensors")}
    assert len(parts) == {"save_file": 1, "write_whole": 0}.get(name, 4)

    monkeypatch.undo()
    assert make_run(load_command("mse"), *begun(tmp_path)) is not None
    assert (folder.path / "result.json").is_file()
    assert all(file.stat().st_mtime_ns == time for file, time in parts.items())  # kept, not remade


def ended_by(error, tmp_path):
    """Make a run that the error ends at once."""
    config, folder = begun(tmp_path)

    def fail(config, folder):
        raise error

    make_run(replace(load_command("mse"), load_run=lambda: fail), config, folder)


def refused(number, *file):
    return OSError(number, os.strerror(number), *file)


@pytest.mark.parametrize(
    "error, line",
    slow_after(2, [
        (refused(errno.EMFILE),
         "run could not be written (Too many open files): raise the limit on open files (ulimit"
         " -n), then run the same command again"),
        (refused(errno.EDQUOT, "x"), "free space in your disk quota"),
        (refused(errno.EROFS, "x"), "x): make the file system writable"),
        (refused(errno.EACCES, "x"), "x): give yourself permission to read and write it"),
        (refused(errno.EIO, "x"), "could not be written (Input/output error: x): remove the cause"),
        (RuntimeError("worker 0 failed:\n[Errno 13] Permission denied: '/there/x'"),
         "(Permission denied: /there/x)"),
    ]),
)  # fmt: skip
def test_what_the_system_refuses_is_one_line(error, line, tmp_path):
    with pytest.raises(NotSaved) as refusal:
        ended_by(error, tmp_path)
    message = str(refusal.value)
    assert line in message and message.startswith(f"{tmp_path}/run ") and "\n" not in message


@pytest.mark.parametrize(
    "error",
    slow_after(
        1,
        [
            refused(errno.ENOENT, "x"),
            refused(errno.ENOTCONN),
            refused(errno.EACCES),
            MemoryError(),
            KeyError("28"),
            RuntimeError("wrong"),
        ],
    ),
)
def test_another_error_stays_what_it_is(error, tmp_path):
    with pytest.raises(type(error)) as raised:
        ended_by(error, tmp_path)
    assert raised.value is error


@pytest.mark.slow(minutes=0.02)
def test_a_refusal_of_ours_keeps_its_words(tmp_path):
    own = ConfigError("the folder cannot be locked ([Errno 28] No space left on device)")
    with pytest.raises(ConfigError, match="cannot be locked"):
        ended_by(own, tmp_path)


@pytest.mark.slow
def test_workers_imports_begin_before_the_runs_own(tmp_path, monkeypatch):
    """Not for one process, nor for a run that is done."""
    calls = []
    monkeypatch.setattr("grpo_ustat.distributed.workers.preload", lambda *x: calls.append(x))
    command = replace(load_command("mse"), load_run=lambda: lambda *_: calls.append("run"))
    for workers in (1, 2):
        make_run(command, *begun(tmp_path, workers))
    assert calls == ["run", (["grpo_ustat.mse.pool"], "cpu"), "run"]
    config, folder = begun(tmp_path, 2)
    monkeypatch.setattr(folder, "result", dict)
    make_run(command, config, folder)
    assert calls[3:] == ["run"]


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "300k") as path:
        yield path


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_mse_on_a_disk_that_is_really_full(disk, workers):
    words = (*SMALL, f"launch.workers={workers}", "hydra.run.dir=run")
    code, _, told = run_command("mse", *words, cwd=disk)
    assert code != 0 and "Traceback" not in told
    (line,) = [line for line in told.splitlines() if line.startswith("error: ")]
    assert "/run " in line and "No space left on device" in line
    parts = {file.name for file in disk.glob("run/pool/*.safetensors")}
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    code, _, told = run_command("mse", *words, cwd=disk)
    assert code == 0, told
    assert parts <= {file.name for file in disk.glob("run/pool/*.safetensors")}


@pytest.mark.slow
def test_gap_on_a_disk_that_is_really_full(disk):
    subprocess.run(["mount", "-o", "remount,size=32k", disk], check=True)
    words = ("theorem=lemma6", "theorem.replicates=100", "hydra.run.dir=run")
    code, _, told = run_command("gap", *words, cwd=disk)
    assert code != 0 and "Traceback" not in told
    assert "/run " in told and "No space left on device" in told
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    code, _, told = run_command("gap", *words, cwd=disk)
    assert code == 0, told
    assert json.loads((disk / "run/result.json").read_text())["claims"]
