"""A disk that is full or read-only: training goes on, says so in red, and loses nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from disks import small_disk
from resuming import differences, fit, left, rows

from grpo_ustat.runs.faults import NotSaved
from grpo_ustat.runs.log import MetricsLog, attempt
from grpo_ustat.train import checkpoint, trainer
from grpo_ustat.train.snapshots import checkpoints

pytestmark = pytest.mark.slow

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def said(capsys):
    return " ".join(capsys.readouterr().err.split())


def failing(monkeypatch, owner, name, at, error=FULL, of=None):
    """The listed calls of a function raise; or those whose last argument is a path `of` a name."""
    function, calls = getattr(owner, name), []

    def called(*arguments, **options):
        calls.append(1)
        if Path(arguments[-1]).name == of if of else len(calls) in at:
            raise error
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, called)


@pytest.mark.parametrize(
    "owner, name", [(checkpoint, "save_file"), (checkpoint.np, "savez"), (os, "replace")]
)
def test_a_save_that_fails_is_said_counted_and_leaves_the_one_before(
    tmp_path, monkeypatch, capsys, through, owner, name
):
    failing(monkeypatch, owner, name, [2], of="checkpoint-2" if owner is os else None)
    path = fit(tmp_path / "run")
    monkeypatch.undo()
    assert "warning: checkpoint-2 of" in said(capsys)
    assert json.loads((path / "result.json").read_text())["failed_saves"] == 1
    assert not list(path.glob(".checkpoint*"))
    whole = {f"checkpoint-{n}" for n in (1, 3, 4)}
    assert {p.name for p in path.glob("checkpoint-*")} == whole
    changed = {name for name in differences(path, through) if not name.startswith("checkpoint-2")}
    states = {f"checkpoint-{n}/{checkpoint.STATE_FILE}" for n in (3, 4)}  # they count the failure
    assert changed == states | {"result.json"}


def test_a_run_ends_with_an_error_where_its_last_save_fails_and_then_goes_on(
    tmp_path, monkeypatch, through
):
    failing(monkeypatch, checkpoint, "save_file", [4])
    with pytest.raises(NotSaved, match=str(tmp_path / "run")):
        fit(tmp_path / "run")
    monkeypatch.undo()
    assert not (tmp_path / "run" / "result.json").exists()
    assert checkpoints(tmp_path / "run")[0].name == "checkpoint-3"
    assert differences(fit(tmp_path / "run"), through) == []


def test_an_error_that_is_not_the_disks_is_raised(monkeypatch, tmp_path):
    failing(monkeypatch, checkpoint, "save_file", [2], TypeError("a mistake of ours"))
    with pytest.raises(TypeError, match="a mistake of ours"):
        fit(tmp_path / "run")
    assert not list((tmp_path / "run").glob(".checkpoint*"))


@pytest.mark.parametrize(
    "text",
    [
        "Error while serializing: IoError(Os { code: 28, kind: StorageFull })",
        "No space left on device (os error 28)",
    ],
)
def test_errors_of_rust_libraries_are_recognised(text, capsys):
    def write():
        raise Exception(text)

    assert not attempt("this file", write)
    assert "warning: this file" in said(capsys)


def test_rows_wait_until_the_disk_takes_them(tmp_path, monkeypatch, capsys):
    log = MetricsLog(tmp_path, keep_up_to=0)
    log.write({"step": 1})
    failing(monkeypatch, os, "fsync", [1, 2])
    log.write({"step": 2})  # on the disk or not: nobody knows, so it is written again
    log.write({"step": 3})
    assert said(capsys).count("warning: step") == 2
    log.write({"step": 4})
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_a_table_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch, capsys, through):
    failing(monkeypatch, trainer, "write_csv", [1, 2])
    assert differences(fit(tmp_path / "run"), through) == []
    assert said(capsys).count("eval.csv") == 2


@pytest.mark.parametrize("name, at", [("write_csv", [4]), ("write_csv", [1, 2, 3, 4])])
def test_a_run_without_its_tables_is_not_finished(tmp_path, monkeypatch, through, name, at):
    failing(monkeypatch, trainer, name, at)
    with pytest.raises(NotSaved, match=str(tmp_path / "run")):
        fit(tmp_path / "run")
    monkeypatch.undo()
    assert differences(fit(tmp_path / "run"), through) == []


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "4m") as path:
        yield path


def test_a_disk_that_is_really_full(disk, through, capsys):
    """Room for one checkpoint of 2.5 MB beside a filler: the second fails, rows do not fit."""
    filler = disk / "filler"
    filler.write_bytes(b"x" * 1_000_000)
    with pytest.raises(NotSaved):
        fit(disk / "run")
    text = said(capsys)
    assert "checkpoint-2 of" in text and "checkpoint-4 of" in text
    assert checkpoints(disk / "run")[0].name == "checkpoint-1"
    assert not list((disk / "run").glob(".checkpoint*"))
    filler.unlink()
    moved = shutil.copytree(disk / "run", disk.parent / "moved")
    assert {n.partition("/")[0] for n in differences(fit(moved), through)} <= {
        "checkpoint-1", "checkpoint-2", "checkpoint-3", "checkpoint-4", "result.json",
    }  # fmt: skip


def test_a_disk_without_room_for_a_row(disk, tmp_path):
    log = MetricsLog(disk, keep_up_to=0)
    log.write({"step": 1})
    with pytest.raises(OSError, match="No space left"):
        (disk / "filler").write_bytes(b"x" * 8_000_000)
    log.write({"step": 2, "text": "x" * 20_000})
    (disk / "filler").unlink()
    log.write({"step": 3})
    assert [row["step"] for row in rows(disk)] == [1, 2, 3]


def test_a_disk_that_turns_read_only(disk, monkeypatch, capsys):
    judged, calls = trainer.penalised_rewards, []

    def turned(*arguments):
        calls.append(1)
        if len(calls) == 2:
            for options in (["--bind"], ["-o", "remount,bind,ro"]):  # no mount with open files may
                subprocess.run(["mount", *options, disk, disk], check=True)
        return judged(*arguments)

    monkeypatch.setattr(trainer, "penalised_rewards", turned)
    with pytest.raises(NotSaved):
        fit(disk / "run")
    assert len(calls) == 4
    assert "Read-only file system" in said(capsys)
    assert checkpoints(disk / "run")[0].name == "checkpoint-1"
    assert "result.json" not in left(disk / "run")
