"""Each check with the fault that it is there for, and without; and checks that break."""

from __future__ import annotations

import os
import sys
import time
from importlib import metadata
from pathlib import Path

import hostile
import pytest
import torch
from huggingface_hub import constants

from grpo_ustat.doctor import __main__ as doctor
from grpo_ustat.doctor import checks
from grpo_ustat.doctor.checks import CHECKS, Finding

STUB = Path(__file__).parents[1] / "helpers" / "stub_math_verify"


def program(file, text):
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


@pytest.mark.parametrize(
    "declared, status, told",
    [
        (["numpy"], "ok", "torch 2"),
        (["numpy>=99"], "failed", "numpy>=99 is needed"),
        (['no-such-package>=2 ; extra == "torch"'], "failed", "no-such-package is missing"),
        (['absent ; extra == "lora"', 'tomli ; python_version < "3"'], "ok", "Python"),
        (None, "warning", "not installed"),
    ],
)
def test_versions(monkeypatch, declared, status, told):
    def requires(name):
        if declared is None:
            raise metadata.PackageNotFoundError
        return declared

    monkeypatch.setattr(checks, "requires", requires)
    found = checks.check_versions(Path())
    assert found.status == status and told in found.message


def test_a_gpu_that_torch_cannot_use(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checks.check_device(tmp_path).status == "ok"
    program(tmp_path / "nvidia-smi", "")
    for built_for, status in ((None, "warning"), ("99.0", "failed")):
        monkeypatch.setattr(torch.version, "cuda", built_for)
        assert checks.check_device(tmp_path).status == status


def test_the_disk_of_a_folder_that_is_not_there_yet(monkeypatch, tmp_path):
    assert str(tmp_path) in checks.check_disk(tmp_path / "not" / "yet").message
    monkeypatch.setattr(checks, "MIN_DISK_BYTES", 1e18)
    assert checks.check_disk(tmp_path).status == "warning" and not list(tmp_path.iterdir())
    assert checks.check_disk(Path("/proc")).status == "failed"


def test_what_is_in_the_hubs_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("GRPO_USTAT_CACHE", str(tmp_path / "made"))
    assert checks.check_cache(tmp_path).status == "warning"
    for folder in ("made/smollm2-135m", "hub/models--Qwen--Qwen2.5-0.5B/snapshots/abc"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    found = checks.check_cache(tmp_path)
    assert found.status == "ok" and "model Qwen/Qwen2.5-0.5B 2.0" in found.message


@pytest.mark.slow
def test_a_judge_that_is_wrong_missing_or_late(monkeypatch, tmp_path):
    assert checks.check_judge(tmp_path).status == "ok"
    monkeypatch.setattr(checks, "JUDGE_SPARE_SECONDS", -1.0)
    assert "timeout" in checks.check_judge(tmp_path).message
    monkeypatch.setenv("PYTHONCALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PYTHONPATH", str(STUB), prepend=os.pathsep)  # right only if written alike
    assert checks.check_judge(tmp_path).status == "failed"
    (tmp_path / "math_verify.py").write_text('raise ImportError("no math_verify")')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert "no math_verify" in checks.check_judge(tmp_path).message


@pytest.mark.parametrize(
    "says, inside, status, told",
    [
        ("echo 'Slurmctld(primary) at c is UP'", "", "ok", "SLURM is up"),
        ("echo 'Slurmctld(primary) at c is DOWN'; exit 1", "", "warning", "is DOWN"),
        ("echo 'Slurmctld(primary) at c is DOWN'; exit 1", "7", "failed", "inside job 7"),
        (None, "", "ok", "SLURM is not on this machine"),
        (None, "7", "warning", "without scontrol"),
    ],
)  # fmt: skip
def test_slurm(monkeypatch, tmp_path, says, inside, status, told):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if inside:
        monkeypatch.setenv("SLURM_JOB_ID", inside)
    if says:
        program(tmp_path / "scontrol", says)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = checks.check_slurm(tmp_path)
    assert found.status == status and told in found.message


@pytest.mark.parametrize("name", hostile.NAMES.values(), ids=hostile.NAMES)
def test_what_a_check_finds_in_files_is_shown_as_text(name, capsys):
    doctor.show({lambda _: Finding("warning", name, name): 5.0}, Path(name.replace("\x00", "")))
    text = capsys.readouterr().out
    assert not set(text) & set(hostile.TERMINAL_ACTS) and text.encode()


def test_a_check_that_hangs_is_a_line(tmp_path, capsys):
    assert doctor.show({lambda _: time.sleep(5): 0.1}, tmp_path) == 1
    assert "no answer in 0.1 s" in capsys.readouterr().out


@pytest.mark.slow
def test_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doctor", "--output", str(tmp_path / "new")])
    with pytest.raises(SystemExit) as ended:
        doctor.main()
    lines = capsys.readouterr().out.splitlines()[1:]
    names = [line.split()[1] for line in lines if not line.startswith(" ")]
    assert ended.value.code == 0 and not list(tmp_path.iterdir())
    assert names == [check.__name__.removeprefix("check_") for check in CHECKS]
