"""Each check with the fault that it is there for, and without."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import doctor_faults as faults
import hostile
import pytest
import torch
from huggingface_hub import constants

from grpo_ustat.distributed import lock
from grpo_ustat.doctor import cluster, hardware, runner, software, storage
from grpo_ustat.tasks.verifier import GRACE_SECONDS

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
    assert software.python(Path()).status == software.packages(Path()).status == "ok"


def test_a_wrong_python(site):
    installed(site, "grpo-ustat", "0.1.0", python=">=3.99")
    found = software.python(site)
    assert found.status == "failed" and "needed is >=3.99" in found.message


def test_missing_old_and_mismatched_packages(site):
    installed(
        site, "grpo-ustat", "0.1.0", "numpy>=99,<100", "no-such-package>=2", "scipy",
        "judge[antlr]>=1", 'absent ; extra == "lora"', 'tomli ; python_version < "3"',
    )  # fmt: skip
    installed(site, "judge", "1.5", 'antlr4-python3-runtime==4.7 ; extra == "antlr"')
    found = software.packages(site)
    assert found.status == "failed"
    assert "no-such-package is missing, needed is no-such-package>=2" in found.message
    assert "numpy is 2" in found.message and "needed is numpy<100,>=99" in found.message
    assert "antlr4-python3-runtime is 4.9.3, needed is antlr4-python3-runtime==4.7" in found.message
    assert "scipy" not in found.message + found.fix and "tomli" not in found.message
    assert found.fix.count("'") == 6


def test_what_commands_need_is_in_two_extras(site):
    installed(
        site, "grpo-ustat", "0.1.0", "numpy", 'no-such-package>=2 ; extra == "torch"',
        'grpo-ustat[torch] ; extra == "cli"', 'scipy>=99 ; extra == "cli"',
        extras=["torch", "cli"],
    )  # fmt: skip
    found = software.packages(site)
    assert found.status == "failed" and "grpo-ustat" not in found.message
    assert "no-such-package is missing" in found.message and "needed is scipy>=99" in found.message


def test_an_extra_that_is_too_old_is_a_warning(site):
    installed(site, "grpo-ustat", "0.1.0", 'peft>=99 ; extra == "lora"', extras=["lora"])
    found = software.packages(site)
    assert found.status == "warning" and "needed is peft>=99" in found.message
    assert found.fix == "pip install -c constraints.txt 'peft>=99'"


def test_threads(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    for asked, status in (("1", "ok"), ("4096", "warning"), ("0", "failed"), ("two", "failed")):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        assert hardware.threads(tmp_path).status == status
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert hardware.threads(tmp_path).status == "ok"
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    assert "1 cores (SLURM_CPUS_PER_TASK)" in hardware.threads(tmp_path).message
    assert hardware.threads(tmp_path).status == "warning"
    monkeypatch.delenv("SLURM_CPUS_PER_TASK")
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert "1 cores (of the container)" in hardware.threads(tmp_path).message
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert hardware.threads(tmp_path).status == "ok"


def test_memory_that_a_container_grants(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    (tmp_path / "memory.current").write_text("1000000000\n")
    for limit, status in (("1500000000", "failed"), ("3000000000", "warning")):
        (tmp_path / "memory.max").write_text(limit + "\n")
        found = hardware.memory(tmp_path)
        assert found.status == status and "granted by the container" in found.message
    (tmp_path / "memory.max").write_text("max\n")
    assert "granted" not in hardware.memory(tmp_path).message


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
        found = storage.disk(tmp_path)
        assert found.status == "failed" and "No space left on device" in found.message
        assert list(tmp_path.iterdir()) == []


def test_a_disk_with_little_room(tmp_path):
    with mounted(tmp_path, "size=40m"):
        found = storage.disk(tmp_path / "run")
        assert found.status == "warning" and "41.9 MB free" in found.message


def test_a_read_only_disk(tmp_path):
    with mounted(tmp_path, "size=40m,ro"):
        for check in (storage.disk, storage.locks):
            found = check(tmp_path)
            assert found.status == "failed" and "Read-only file system" in found.message
            assert "hydra.run.dir=DIR" in found.fix


def test_a_place_that_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    assert storage.disk(tmp_path / "file" / "run").status == "failed"


def test_a_sound_disk_and_its_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "FLOCK_SECONDS", 0.1)
    monkeypatch.setattr(storage, "LEAST_FREE_BYTES", 0)
    assert storage.disk(tmp_path).status == storage.locks(tmp_path / "not/yet").status == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_loses_bytes_or_takes_long(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "PIECES", 1)
    monkeypatch.setattr(storage, "LEAST_FREE_BYTES", 0)
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: time.sleep(0.1) or fsync(file))
    found = storage.disk(tmp_path)
    assert found.status == "warning" and "checkpoints will take long" in found.message
    monkeypatch.setattr(os, "fsync", lambda file: os.ftruncate(file, 1000))
    assert "gave back other bytes" in storage.disk(tmp_path).message


def _flock_is(monkeypatch, function):
    monkeypatch.setattr(lock, "FLOCK_SECONDS", 0.1)
    monkeypatch.setattr(fcntl, "flock", function)


def test_a_file_system_without_flock(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    _flock_is(monkeypatch, unsupported)
    found = storage.locks(tmp_path)
    assert found.status == "warning" and "has no flock" in found.message


def test_a_flock_that_keeps_nobody_out(tmp_path, monkeypatch):
    _flock_is(monkeypatch, lambda *_: None)
    found = storage.locks(tmp_path)
    assert found.status == "failed" and "a second process got the lock" in found.message


def test_a_flock_that_outlives_its_owner(tmp_path, monkeypatch):
    def forever(file, how):
        if os.fstat(file if isinstance(file, int) else file.fileno()).st_size:
            raise BlockingIOError

    _flock_is(monkeypatch, forever)
    found = storage.locks(tmp_path)
    assert found.status == "failed" and "is still held" in found.message


def test_a_device_that_computes_wrongly(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert hardware.torch_devices(Path()).status == hardware.bf16(Path()).status == "ok"
    right = torch.Tensor.__matmul__
    for wrong in (1.01, float("nan")):
        monkeypatch.setattr(
            torch.Tensor, "__matmul__",
            lambda a, b, by=wrong: right(a, b) * (by if a.dtype is torch.float32 else 1),
        )  # fmt: skip
        assert hardware.torch_devices(Path()).status == "failed"


def test_a_bfloat16_that_is_none(monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    found = hardware.bf16(Path())
    assert found.status == "failed" and "is not bfloat16's" in found.message


def test_a_gpu_that_torch_cannot_use(monkeypatch, tmp_path):
    _program(tmp_path / "nvidia-smi", "echo 550.1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(torch.version, "cuda", None)
    found = hardware.torch_devices(tmp_path)
    assert found.status == "warning" and "has a GPU (driver 550.1)" in found.message
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    found = hardware.torch_devices(tmp_path)
    assert (
        found.status == "failed" and "built for CUDA 99.0 and the driver is 550.1" in found.message
    )


@pytest.mark.parametrize(
    "start, told",
    [("exec sleep 20", "did not answer in 0.2 s"), ("kill -9 $$", "ends with code -9")],
)
def test_a_cuda_that_hangs_or_crashes_when_it_starts(monkeypatch, tmp_path, start, told):
    _program(tmp_path / "nvidia-smi", "echo 550.1")
    _program(tmp_path / "python", start)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    monkeypatch.setattr(hardware, "CUDA_DEADLINE", 0.2)
    monkeypatch.setattr(hardware, "cuda_error", hardware.cuda_error.__wrapped__)
    found = hardware.torch_devices(tmp_path)
    assert found.status == "failed" and told in found.message


def test_attention_that_ignores_padding_or_order(monkeypatch):
    assert hardware.attention(Path()).status == "ok"
    right = torch.nn.functional.scaled_dot_product_attention

    def broken(q, k, v, attn_mask=None, is_causal=False, **options):
        return right(q, k, v, attn_mask=None, is_causal=True, **options)  # padding is read too

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", broken)
    found = hardware.attention(Path())
    assert found.status == "failed" and "sdpa and eager differ" in found.message
    assert found.fix == "model.attn_implementation=eager"
    monkeypatch.setattr(
        hardware, "attention_model", lambda kind: model("sdpa")
    )  # both the broken one
    model = ATTENTION_MODEL
    assert "left padding moves sdpa's logits" in hardware.attention(Path()).message


ATTENTION_MODEL = hardware.attention_model


def test_what_is_in_the_hubs_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    monkeypatch.setenv("GRPO_USTAT_CACHE", str(tmp_path / "made"))
    found = software.cache(tmp_path)
    assert found.status == "warning" and "; here: none; not here: " in found.message
    made = tmp_path / "made/smollm2-135m"
    made.mkdir(parents=True)
    (made / "config.json").touch()
    assert "; here: cached:smollm2-135m; not here: " in software.cache(tmp_path).message
    (made / "config.json").unlink()
    assert "not here: Qwen/Qwen2.5-0.5B, " in found.message and "openai/gsm8k" in found.message
    assert "hf download Qwen/Qwen2.5-0.5B;" in found.fix
    place = tmp_path / "hub/models--Qwen--Qwen2.5-0.5B"
    files = place / "snapshots/abc"
    files.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs/main").write_text("abc")
    parts = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (files / "model.safetensors.index.json").write_text(json.dumps(parts))
    for name in ("config.json", "tokenizer_config.json", "model-1.safetensors"):
        (files / name).write_text("{}")
    assert "here: none" in software.cache(tmp_path).message  # one part of two
    (files / "model-2.safetensors").touch()
    rows = tmp_path / "datasets/DigitalLearningGmbH___math-lighteval/default/0.0.0"
    rows.mkdir(parents=True)
    (rows / "train.arrow").touch()
    assert (
        "here: Qwen/Qwen2.5-0.5B, DigitalLearningGmbH/MATH-lighteval"
        in software.cache(tmp_path).message
    )


def test_a_hub_that_does_not_answer(monkeypatch, tmp_path, silent):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert software.cache(tmp_path).message.endswith("fetched when first used")
    found = software.cache(tmp_path)
    assert found.status == "warning" and "cannot be reached (Connection refused)" in found.message


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
    assert "no answer in 0.1 s" in software.connection_error("https://example.invalid", 0.1)
    assert time.monotonic() - start < 5


def test_the_proxy_is_what_must_be_reached(monkeypatch, silent):
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@127.0.0.1:9")
    assert software.connection_error("https://example.invalid").startswith(
        "127.0.0.1:9 cannot be reached"
    )


def test_trackers(monkeypatch, site, silent):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(site))
    monkeypatch.setattr(software, "TRACKERS", ("no-tracker",))
    assert software.trackers(site).message.startswith("none installed")
    monkeypatch.setattr(software, "TRACKERS", ("wandb",))
    installed(site, "wandb", "0.99")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert software.trackers(site).fix == "export WANDB_MODE=offline, later `wandb sync`"
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert "there is no key" in software.trackers(site).message
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        found = software.trackers(site)
        assert found.status == "ok" and "kkk" not in found.message
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert software.trackers(site).message == "wandb 0.99; WANDB_MODE=offline"


@pytest.mark.slow
def test_a_judge_that_judges_wrongly_or_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONCALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PYTHONPATH", str(STUB), prepend=os.pathsep)  # right only if written alike
    found = software.judge(tmp_path)
    assert found.status == "failed" and "the judge of answers is broken" in found.message
    (tmp_path / "math_verify.py").write_text('raise ImportError("no math_verify")')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    found = software.judge(tmp_path)
    assert found.status == "failed" and "no math_verify" in found.message
    assert "math-verify[antlr4-9-3]" in found.fix


@pytest.mark.slow
def test_a_judge_that_is_not_stopped_in_time(monkeypatch, tmp_path):
    assert software.judge(tmp_path).status == "ok"
    monkeypatch.setattr(software, "JUDGE_SPARE_SECONDS", -GRACE_SECONDS - 0.5)
    found = software.judge(tmp_path)
    assert found.status == "failed" and "was judged timeout after" in found.message


def _program(file, text):
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    "says, inside, status, told",
    [
        ("echo 'Slurmctld(primary) at c is UP'", "", "ok", "outside a job, the controller is up"),
        ("echo 'Slurmctld(primary) at c is DOWN'; exit 1", "", "warning", "is DOWN"),
        ("echo 'Slurmctld(primary) at c is DOWN'; exit 1", "7", "failed", "inside job 7"),
        ("sleep 20", "7", "failed", "no answer in 0.2 s"),
        (None, "", "ok", "none on this machine"),
        (None, "7", "warning", "without scontrol"),
    ],
)  # fmt: skip
def test_slurm(monkeypatch, tmp_path, says, inside, status, told):
    monkeypatch.setattr(cluster, "SCONTROL_DEADLINE", 0.2 if says == "sleep 20" else 10.0)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if inside:
        monkeypatch.setenv("SLURM_JOB_ID", inside)
    if says:
        _program(tmp_path / "scontrol", says.replace("sleep", "exec sleep"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if says else str(tmp_path))
    found = cluster.slurm(tmp_path)
    assert found.status == status and told in found.message
    if status == "ok" and says:
        monkeypatch.setattr(cluster, "SUBMITIT_PLUGIN", "hydra_plugins.not_installed")
        assert "needs hydra-submitit-launcher" in cluster.slurm(tmp_path).message
        monkeypatch.setattr(cluster, "SUBMITIT_PLUGIN", "no_plugins.at_all")
        assert cluster.slurm(tmp_path).status == "warning"


@pytest.mark.slow(minutes=0.02)
def test_ranks(monkeypatch, tmp_path):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert cluster.ranks(tmp_path).message == "gloo: two ranks add up"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    found = cluster.ranks(tmp_path)
    assert found.status == "failed" and "two ranks do not add up (RuntimeError" in found.message


@pytest.mark.slow(minutes=0.02)
def test_ranks_that_hang_die_or_cannot_find_each_other(monkeypatch, tmp_path):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(cluster, "_rank", faults.rank_without_a_way)
    found = cluster.ranks(tmp_path)
    assert found.status == "warning" and "export GLOO_SOCKET_IFNAME=lo" in found.fix
    monkeypatch.setattr(cluster, "_rank", faults.rank_that_dies)
    assert cluster.all_reduce_error("gloo", 2) == "a rank died"
    monkeypatch.setattr(cluster, "SUM_DEADLINE", 0.2)
    monkeypatch.setattr(cluster, "_rank", faults.rank_that_hangs)
    assert cluster.all_reduce_error("gloo", 2) == "no sum after 0.2 s"


@pytest.mark.parametrize("name", hostile.NAMES.values(), ids=hostile.NAMES)
def test_what_doctor_prints_are_texts(name, monkeypatch, capsys):
    """Of a folder's name, and of what a check has found in files."""
    found = runner.warning(runner.shareable(name), runner.shareable(name))
    monkeypatch.setattr(runner, "examine", lambda *_: iter([("disk", found, 0.0)]))
    runner.show([], Path(name.replace("\x00", "")))
    runner.show_json([], Path("outputs"))
    text = capsys.readouterr().out
    assert not set(text) & set(hostile.TERMINAL_ACTS) and text.encode()
