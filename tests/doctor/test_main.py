"""The doctor as a whole: checks that break are lines, and what is shown can be shown to anybody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import doctor_faults
import hostile
import pytest

from grpo_ustat.doctor import __main__ as doctor_main
from grpo_ustat.doctor.__main__ import examine, shareable
from grpo_ustat.doctor.checks import CHECKS, Check, warning


def doctor(*arguments, path=None, **environment):
    known = dict(os.environ, **environment)
    if path:
        known["PYTHONPATH"] = os.pathsep.join([str(path), known.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "grpo_ustat.doctor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=known)


def test_whatever_a_check_does_it_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    names = ("well", "crash", "leave", "missing", "hang")
    checks = [
        Check(name, getattr(doctor_faults, name), 0.5 if name == "hang" else 20) for name in names
    ]
    found = {name: finding for name, finding, _ in examine(checks, tmp_path)}
    assert list(found) == list(names)
    assert [one.status for one in found.values()] == ["ok"] + ["failed"] * 4
    assert found["well"].message == f"well in {tmp_path}; WANDB_API_KEY=***"
    assert "failed: RuntimeError: *** was refused" in found["crash"].message
    assert "import doctor_faults as m" in found["crash"].fix
    assert "failed: SystemExit: 3" in found["leave"].message
    assert "No module named 'no_such_package'" in found["missing"].message
    assert found["missing"].fix == "pip install -e '.[cli]'"
    assert found["hang"].message == "no answer in 0.5 s"
    assert all(one.fix and "\n" not in one.message + one.fix for one in list(found.values())[1:])
    assert capsys.readouterr().out == ""


def test_exit_codes_lines_and_json(tmp_path):
    well = doctor("--only", "threads", "code", "--output", tmp_path, OMP_NUM_THREADS="1")
    assert well.returncode == 0 and well.stderr == ""
    lines = well.stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["ok", "code"], ["ok", "threads"]]
    assert lines[3].startswith("2 ok, 0 warning, 0 failed in ")
    ill = doctor("--only", "threads", "--json", OMP_NUM_THREADS="many")
    told = json.loads(ill.stdout)
    assert (ill.returncode, told["failed"]) == (1, 1)
    (row,) = told["checks"]
    assert (row["check"], row["status"], row["fix"]) == (
        "threads", "failed", "export OMP_NUM_THREADS=1",
    )  # fmt: skip


def test_a_missing_package_stops_only_what_needs_it(tmp_path):
    """The doctor itself needs none; rich stands for any."""
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError(\"No module named 'rich'\")")
    done = doctor("--only", "memory", "threads", path=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert "failed  memory    the check itself failed: ModuleNotFoundError" in done.stdout


def test_nothing_secret_and_no_home_is_shown(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    secrets = ["hf_" + "aB3" * 10, "sk-" + "x1" * 12, "ab12" * 10, "wandb_v1_" + "q" * 20]
    text = shareable(
        f"/home/ada/runs /home/adam {' '.join(secrets)} http://ada:pw@proxy:80/x password=pw "
        "TOKEN=t1 commit 475641f2a8\nsecond"
    )
    assert text == (
        "~/runs /home/adam *** *** *** *** http://***@proxy:80/x password=*** TOKEN=*** "
        "commit 475641f2a8 second"
    )


@pytest.mark.parametrize("name", hostile.NAMES.values(), ids=hostile.NAMES)
def test_what_doctor_prints_are_texts(name, monkeypatch, capsys):
    """Of a folder's name, and of what a check has found in files."""
    found = warning(shareable(name), shareable(name))
    monkeypatch.setattr(doctor_main, "examine", lambda *_: iter([("disk", found, 0.0)]))
    doctor_main.show([], Path(name.replace("\x00", "")))
    doctor_main.show_json([], Path("outputs"))
    text = capsys.readouterr().out
    assert not set(text) & set(hostile.TERMINAL_ACTS) and text.encode()


@pytest.mark.slow
def test_a_sound_machine(tmp_path):
    """All checks for real; caches, trackers and SLURM are as they are here."""
    done = doctor("--json", "--output", tmp_path / "not" / "yet" / "there")
    told = {row["check"]: row for row in json.loads(done.stdout)["checks"]}
    own = set(told) - {"cache", "trackers", "slurm", "memory", "disk"}
    assert {name: told[name] for name in own if told[name]["status"] != "ok"} == {}
    assert list(told) == [check.name for check in CHECKS]
    assert all(row["fix"] for row in told.values() if row["status"] != "ok")
    assert list(tmp_path.iterdir()) == []
