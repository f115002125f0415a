"""SLURM, and ranks that speak to each other."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_ustat.config.command_line import install_line
from grpo_ustat.doctor.hardware import cuda_error
from grpo_ustat.doctor.runner import Finding, failed, ok, warning
from grpo_ustat.terminal.streams import single_line

SCONTROL_DEADLINE = 10.0  # seconds; scontrol needs 0.03
SUM_DEADLINE = 30.0  # seconds for the ranks to import torch and add up their numbers
SUBMITIT_PLUGIN = "hydra_plugins.hydra_submitit_launcher"


def slurm(_: Path) -> Finding:
    """Whether SLURM answers, and whether sweeps can be submitted to it."""
    job = os.environ.get("SLURM_JOB_ID")
    where = f"inside job {job}" if job else "outside a job"
    if shutil.which("scontrol") is None:
        if not job:
            return ok("none on this machine")
        return warning(
            f"{where}, without scontrol: a preempted run cannot ask to be started again",
            "put SLURM's commands into PATH of the job (containers: bind them)",
        )
    command, error = ["scontrol", "ping"], None
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_DEADLINE)
        answer = " ".join((process.stdout + process.stderr).split())
        if process.returncode != 0 or "UP" not in answer:
            error = answer[:200] or "an empty answer"
    except subprocess.TimeoutExpired:
        error = f"no answer in {SCONTROL_DEADLINE:g} s"
    if error is not None:
        level = failed if job else warning
        return level(f"{where}, scontrol ping: {error}", "ask the cluster's administrator")
    try:
        has_plugin = importlib.util.find_spec(SUBMITIT_PLUGIN) is not None
    except ModuleNotFoundError:
        has_plugin = False
    if not has_plugin:
        return warning(
            f"{where}, the controller is up; hydra/launcher=slurm needs hydra-submitit-launcher",
            install_line("slurm"),
        )
    return ok(f"{where}, the controller is up, hydra/launcher=slurm is there")


def ranks(_: Path) -> Finding:
    """Two processes of this machine add two numbers by gloo; those of GPUs by NCCL too."""
    import torch

    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    error = all_reduce_error("gloo", 2)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    if error is not None:
        by_loopback = {"GLOO_SOCKET_IFNAME": loopback}
        if interface is None and all_reduce_error("gloo", 2, by_loopback) is None:
            return warning(
                f"gloo: two ranks do not find each other by this machine's name ({error}), by "
                f"{loopback} they do",
                f"export GLOO_SOCKET_IFNAME={loopback}; on several machines the network's own name",
            )
        return failed(
            f"gloo: two ranks do not add up ({error})",
            "see that a firewall lets 127.0.0.1 through, and GLOO_SOCKET_IFNAME and MASTER_ADDR",
        )
    message = "gloo: two ranks add up" + (f" over {interface}" if interface else "")
    gpus = 0 if cuda_error() else min(2, torch.cuda.device_count())
    if not gpus:
        return ok(message)
    error = all_reduce_error("nccl", gpus)
    message = f"{message}; NCCL on {gpus} GPU{'s' * (gpus > 1)}"
    if error is None:
        return ok(f"{message} does too")
    return failed(
        f"{message} does not ({error})", "NCCL_DEBUG=INFO says why; NCCL_P2P_DISABLE=1 helps"
    )


def all_reduce_error(
    backend: str, count: int, environment: Mapping[str, str] | None = None
) -> str | None:
    """Have `count` ranks add up 1, ..., count; why they could not, None where they could."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")  # no fork survives a CUDA that has started
    answers = context.SimpleQueue()
    arguments = (backend, count, port, dict(environment or {}), answers)
    processes = [
        context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(count)
    ]
    for process in processes:
        process.start()
    until = time.monotonic() + SUM_DEADLINE
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    hung = any(process.is_alive() for process in processes)
    for process in processes:
        process.kill()
    if hung:
        return f"no sum after {SUM_DEADLINE:g} s"
    texts = [answers.get() for _ in processes if not answers.empty()]
    errors = [text for text in texts if text != str(count * (count + 1) / 2)]
    return errors[0] if errors else None if len(texts) == count else "a rank died"


def _rank(
    rank: int, backend: str, count: int, port: int, environment: dict[str, str], answers: Any
) -> None:
    """One rank, which prints nothing: put the sum, or the error, into the queue `answers`."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(environment, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        dist.init_process_group(backend, rank=rank, world_size=count)
        device = f"cuda:{rank}" if backend == "nccl" else "cpu"
        number = torch.tensor(rank + 1.0, device=device)
        dist.all_reduce(number)
        answers.put(str(number.item()))
        dist.destroy_process_group()
    except Exception as error:
        answers.put(f"{type(error).__name__}: {single_line(error, 200)}")
