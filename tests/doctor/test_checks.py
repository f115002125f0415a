"""Each check with the fault that it is there for, and without."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from grpo_ustat.doctor import checks

STUB = Path(__file__).parents[1] / "helpers" / "stub_math_verify"
ROOT = os.geteuid() == 0


def installed(folder, name, version, *requires, python=">=3.11", extras=()):
    """A package's metadata, as pip leaves them."""
    place = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    place.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Python: {python}", *(f"Provides-Extra: {extra}" for extra in extras)]
    lines += [f"Requires-Dist: {one}" for one in requires]
    (place / "METADATA").write_text("\n".join(lines) + "\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages before all others."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_versions_in_range():
    assert checks.check_packages(Path()).status == "ok"


def test_missing_old_and_mismatched_packages(site):
    installed(
        site, "grpo-ustat", "0.1.0", "numpy>=99,<100", "no-such-package>=2", "scipy",
        'absent ; extra == "lora"', 'tomli ; python_version < "3"',
    )  # fmt: skip
    found = checks.check_packages(site)
    assert found.status == "failed"
    for words in ("no-such-package>=2", "numpy is 2", "numpy<100,>=99"):
        assert words in found.message
    assert "scipy" not in found.message + found.fix and "tomli" not in found.message
    assert found.fix.count("'") == 4


def test_what_commands_need_is_in_two_extras(site):
    installed(
        site, "grpo-ustat", "0.1.0", "numpy", 'no-such-package>=2 ; extra == "torch"',
        'grpo-ustat[torch] ; extra == "cli"', 'scipy>=99 ; extra == "cli"',
        extras=["torch", "cli"],
    )  # fmt: skip
    found = checks.check_packages(site)
    assert found.status == "failed" and "grpo-ustat" not in found.message
    assert "no-such-package" in found.message and "scipy>=99" in found.message


def test_an_extra_that_is_too_old_is_a_warning(site):
    installed(site, "grpo-ustat", "0.1.0", 'peft>=99 ; extra == "lora"', extras=["lora"])
    found = checks.check_packages(site)
    assert found.status == "warning" and "peft>=99" in found.message
    assert found.fix.startswith("pip install ") and found.fix.endswith("'peft>=99'")


def test_threads(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "CGROUP", tmp_path)
    for asked, status in (("1", "ok"), ("4096", "warning"), ("0", "failed"), ("two", "failed")):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        assert checks.check_threads(tmp_path).status == status
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert checks.check_threads(tmp_path).status == "ok"
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    assert "1 cores (SLURM_CPUS_PER_TASK)" in checks.check_threads(tmp_path).message
    assert checks.check_threads(tmp_path).status == "warning"
    monkeypatch.delenv("SLURM_CPUS_PER_TASK")
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert "1 cores (container limit)" in checks.check_threads(tmp_path).message
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert checks.check_threads(tmp_path).status == "ok"


def test_memory_that_a_container_grants(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "CGROUP", tmp_path)
    (tmp_path / "memory.current").write_text("1000000000\n")
    for limit, status in (("1500000000", "failed"), ("3000000000", "warning")):
        (tmp_path / "memory.max").write_text(limit + "\n")
        found = checks.check_memory(tmp_path)
        assert found.status == status and "container" in found.message
    (tmp_path / "memory.max").write_text("max\n")
    assert "container" not in checks.check_memory(tmp_path).message


@contextlib.contextmanager
def mounted(folder, options):
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if not ROOT or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(tmp_path):
    with mounted(tmp_path, "size=4m"):
        found = checks.check_disk(tmp_path)
        assert found.status == "failed" and "No space left on device" in found.message
        assert list(tmp_path.iterdir()) == []


def test_a_disk_with_little_room(tmp_path):
    with mounted(tmp_path, "size=40m"):
        found = checks.check_disk(tmp_path / "run")
        assert found.status == "warning" and "41.9 MB free" in found.message


def test_a_read_only_disk(tmp_path):
    with mounted(tmp_path, "size=40m,ro"):
        for check in (checks.check_disk, checks.check_locks):
            found = check(tmp_path)
            assert found.status == "failed" and "Read-only file system" in found.message
            assert "hydra.run.dir=DIR" in found.fix


def test_a_place_that_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    assert checks.check_disk(tmp_path / "file" / "run").status == "failed"


def test_a_sound_disk_and_its_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "MIN_DISK_BYTES", 0)
    assert checks.check_disk(tmp_path).status == "ok"
    assert checks.check_locks(tmp_path / "not/yet").status == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_loses_bytes_or_takes_long(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "TRIAL_BYTES", 2**20)
    monkeypatch.setattr(checks, "MIN_DISK_BYTES", 0)
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: time.sleep(0.1) or fsync(file))
    found = checks.check_disk(tmp_path)
    assert found.status == "warning" and "checkpoints" in found.message
    monkeypatch.setattr(os, "fsync", lambda file: os.ftruncate(file, 1000))
    assert "bytes" in checks.check_disk(tmp_path).message


@pytest.mark.parametrize(
    "flock, status, told",
    [
        ("raise OSError(37, 'No locks available')", "warning", "has no file locks"),
        ("return None", "failed", "a second process got the lock"),
        (
            "if pathlib.Path(file.name + '.seen').exists(): raise BlockingIOError\n"
            "    pathlib.Path(file.name + '.seen').touch()",
            "failed",
            "is still held",
        ),
    ],
)  # fmt: skip
def test_a_flock_that_does_not_lock(tmp_path, monkeypatch, flock, status, told):
    modules = tmp_path / "modules"
    modules.mkdir()
    lines = [
        "import fcntl, pathlib",
        "def flock(file, how):",
        f"    {flock}",
        "fcntl.flock = flock",
    ]
    (modules / "sitecustomize.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(modules), prepend=os.pathsep)
    found = checks.check_locks(tmp_path)
    assert found.status == status and told in found.message


def test_a_device_that_computes_wrongly(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert checks.check_torch(Path()).status == "ok"
    right = torch.Tensor.__matmul__
    for wrong in (1.01, float("nan")):
        monkeypatch.setattr(
            torch.Tensor, "__matmul__",
            lambda a, b, by=wrong: right(a, b) * (by if a.dtype is torch.float32 else 1),
        )  # fmt: skip
        assert checks.check_torch(Path()).status == "failed"


def test_a_bfloat16_that_is_none(monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    found = checks.check_torch(Path())
    assert found.status == "failed" and "in bfloat16" in found.message


def test_a_gpu_that_torch_cannot_use(monkeypatch, tmp_path):
    _program(tmp_path / "nvidia-smi", "echo 550.1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(torch.version, "cuda", None)
    found = checks.check_torch(tmp_path)
    assert found.status == "warning" and "550.1" in found.message
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    found = checks.check_torch(tmp_path)
    assert found.status == "failed" and "99.0" in found.message and "550.1" in found.message


@pytest.mark.parametrize(
    "start, told",
    [("exec sleep 20", "did not start in 0.2 s"), ("kill -9 $$", "code -9")],
)
def test_a_cuda_that_hangs_or_crashes_when_it_starts(monkeypatch, tmp_path, start, told):
    _program(tmp_path / "nvidia-smi", "echo 550.1")
    _program(tmp_path / "python", start)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    monkeypatch.setattr(checks, "CUDA_SECONDS", 0.2)
    monkeypatch.setattr(checks, "cuda_error", checks.cuda_error.__wrapped__)
    found = checks.check_torch(tmp_path)
    assert found.status == "failed" and told in found.message


def test_what_is_in_the_hubs_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("GRPO_USTAT_CACHE", str(tmp_path / "made"))
    found = checks.check_cache(tmp_path)
    assert found.status == "warning" and "cached: none" in found.message
    made = tmp_path / "made/smollm2-135m"
    made.mkdir(parents=True)
    (made / "config.json").touch()
    assert checks.check_cache(tmp_path).message.endswith("cached:smollm2-135m")
    snapshot = tmp_path / "hub/models--Qwen--Qwen2.5-0.5B/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    found = checks.check_cache(tmp_path)
    assert found.status == "ok" and "model Qwen/Qwen2.5-0.5B 2.0" in found.message


def test_a_hub_that_does_not_answer(monkeypatch, tmp_path, silent):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert checks.check_cache(tmp_path).message.endswith("on first use")
    found = checks.check_cache(tmp_path)
    assert found.status == "warning" and "Connection refused" in found.message


@pytest.fixture
def silent(monkeypatch):
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)


def too_late(*_, **__):
    """A connection of which nobody hears any more."""
    time.sleep(30)
    raise OSError("too late")


@pytest.mark.slow
def test_a_name_that_is_looked_up_forever(monkeypatch, silent):
    monkeypatch.setattr(socket, "create_connection", too_late)
    start = time.monotonic()
    assert "no answer in 0.1 s" in checks.connection_error("https://example.invalid", 0.1)
    assert time.monotonic() - start < 5


def test_the_proxy_is_what_must_be_reached(monkeypatch, silent):
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@127.0.0.1:9")
    assert checks.connection_error("https://example.invalid").startswith("127.0.0.1:9 ")


def test_trackers(monkeypatch, site, silent):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(site))
    monkeypatch.setattr(checks, "TRACKERS", ("no-tracker",))
    assert checks.check_trackers(site).message.startswith("no tracker is installed")
    monkeypatch.setattr(checks, "TRACKERS", ("wandb",))
    installed(site, "wandb", "0.99")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert "WANDB_MODE=offline" in checks.check_trackers(site).fix
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert checks.check_trackers(site).status == "warning"
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        found = checks.check_trackers(site)
        assert found.status == "ok" and "kkk" not in found.message
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert checks.check_trackers(site).message == "wandb 0.99; WANDB_MODE=offline"


@pytest.mark.slow
def test_a_judge_that_judges_wrongly_or_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONCALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PYTHONPATH", str(STUB), prepend=os.pathsep)  # right only if written alike
    found = checks.check_judge(tmp_path)
    assert found.status == "failed" and "judge" in found.message
    (tmp_path / "math_verify.py").write_text('raise ImportError("no math_verify")')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    found = checks.check_judge(tmp_path)
    assert found.status == "failed" and "no math_verify" in found.message
    assert "math-verify[antlr4-9-3]" in found.fix


@pytest.mark.slow
def test_a_judge_that_is_not_stopped_in_time(monkeypatch, tmp_path):
    assert checks.check_judge(tmp_path).status == "ok"
    monkeypatch.setattr(checks, "JUDGE_SPARE_SECONDS", -1.0)
    found = checks.check_judge(tmp_path)
    assert found.status == "failed" and "timeout" in found.message


def _program(file, text):
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    "says, inside, status, told",
    [
        ("echo 'Slurmctld(primary) at c is UP'", "", "ok", "the controller is up"),
        ("echo 'Slurmctld(primary) at c is DOWN'; exit 1", "", "warning", "is DOWN"),
        ("echo 'Slurmctld(primary) at c is DOWN'; exit 1", "7", "failed", "inside job 7"),
        ("sleep 20", "7", "failed", "no answer in 0.2 s"),
        (None, "", "ok", "SLURM is not on this machine"),
        (None, "7", "warning", "without scontrol"),
    ],
)  # fmt: skip
def test_slurm(monkeypatch, tmp_path, says, inside, status, told):
    monkeypatch.setattr(checks, "SCONTROL_SECONDS", 0.2 if says == "sleep 20" else 10.0)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if inside:
        monkeypatch.setenv("SLURM_JOB_ID", inside)
    if says:
        _program(tmp_path / "scontrol", says.replace("sleep", "exec sleep"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if says else str(tmp_path))
    found = checks.check_slurm(tmp_path)
    assert found.status == status and told in found.message
    if status == "ok" and says:
        monkeypatch.setattr(checks, "SUBMITIT_PLUGIN", "hydra_plugins.not_installed")
        assert "hydra-submitit-launcher" in checks.check_slurm(tmp_path).message
        monkeypatch.setattr(checks, "SUBMITIT_PLUGIN", "no_plugins.at_all")
        assert checks.check_slurm(tmp_path).status == "warning"


@pytest.mark.slow(minutes=0.02)
def test_ranks(monkeypatch, tmp_path):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert checks.check_ranks(tmp_path).status == "ok"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    found = checks.check_ranks(tmp_path)
    assert found.status == "failed" and "RuntimeError" in found.message


@pytest.mark.slow(minutes=0.02)
def test_ranks_that_hang_die_or_cannot_find_each_other(monkeypatch, tmp_path):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    nowhere = "import os; os.environ.setdefault('GLOO_SOCKET_IFNAME', 'nowhere0'); "
    monkeypatch.setattr(checks, "RANK_CODE", nowhere + checks.RANK_CODE)
    found = checks.check_ranks(tmp_path)
    assert found.status == "warning" and "export GLOO_SOCKET_IFNAME=lo" in found.fix
    monkeypatch.setattr(checks, "RANK_CODE", "import os; os._exit(9)")
    assert checks.all_reduce_error("gloo", 2) == "a rank died"
    monkeypatch.setattr(checks, "SUM_SECONDS", 0.2)
    monkeypatch.setattr(checks, "RANK_CODE", "import time; time.sleep(30)")
    assert checks.all_reduce_error("gloo", 2) == "no sum after 0.2 s"
