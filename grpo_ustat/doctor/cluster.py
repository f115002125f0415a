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

from grpo_ustat.checkup.findings import Finding, failed, ok, warning

ANSWER = 10.0  # seconds for scontrol, which needs 0.03
JOIN = 12.0  # seconds for two ranks to add up two numbers
PLUGIN = "hydra_plugins.hydra_submitit_launcher"


def slurm(_: Path) -> Finding:
    """Whether SLURM answers, and whether sweeps can be submitted to it."""
    inside = os.environ.get("SLURM_JOB_ID")
    where = f"inside job {inside}" if inside else "outside a job"
    if shutil.which("scontrol") is None:
        if not inside:
            return ok("none on this machine")
        return warning(
            f"{where}, without scontrol: a preempted run cannot ask to be started again",
            "put SLURM's commands into PATH of the job (containers: bind them)",
        )
    why = _unanswered()
    if why is not None:
        broken = failed if inside else warning
        return broken(f"{where}, scontrol ping: {why}", "ask the cluster's administrator")
    if not _is_there(PLUGIN):
        return warning(
            f"{where}, the controller is up; hydra/launcher=slurm needs hydra-submitit-launcher",
            "pip install -c constraints.txt 'grpo-ustat[slurm]'",
        )
    return ok(f"{where}, the controller is up, hydra/launcher=slurm is there")


def _unanswered() -> str | None:
    """Why the controller gave no good answer; None: it did."""
    try:
        done = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=ANSWER)
    except subprocess.TimeoutExpired:
        return f"no answer in {ANSWER:g} s"
    told = " ".join((done.stdout + done.stderr).split())
    return None if done.returncode == 0 and "UP" in told else told[:200] or "an empty answer"


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def ranks(_: Path) -> Finding:
    """Two processes of this machine add two numbers by gloo; those of GPUs by NCCL too."""
    import torch

    torch.set_num_threads(1)
    own = os.environ.get("GLOO_SOCKET_IFNAME")
    why = together("gloo", 2)
    if why is None:
        return _of_gpus("gloo: two ranks add up" + (f" over {own}" if own else ""))
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    if own is None and together("gloo", 2, {"GLOO_SOCKET_IFNAME": loopback}) is None:
        return warning(
            f"gloo: two ranks do not find each other by this machine's name ({why}), by "
            f"{loopback} they do",
            f"export GLOO_SOCKET_IFNAME={loopback}; on several machines the network's own name",
        )
    return failed(
        f"gloo: two ranks do not add up ({why})",
        "see that a firewall lets 127.0.0.1 through, and GLOO_SOCKET_IFNAME and MASTER_ADDR",
    )


def _of_gpus(said: str) -> Finding:
    import torch

    count = min(2, torch.cuda.device_count())  # without starting CUDA, which no fork survives
    if not count:
        return ok(said)
    why = together("nccl", count)
    named = f"{said}; NCCL on {count} GPU{'s' * (count > 1)}"
    if why is None:
        return ok(f"{named} does too")
    return failed(f"{named} does not ({why})", "NCCL_DEBUG=INFO says why; NCCL_P2P_DISABLE=1 helps")


def together(backend: str, count: int, environment: Mapping[str, str] = {}) -> str | None:  # noqa: B006
    """Have ranks add up their numbers; why they could not, None if they could."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    arguments = (backend, count, port, dict(environment), found)
    processes = [context.Process(target=_rank, args=(r, *arguments)) for r in range(count)]
    for process in processes:
        process.start()
    until = time.monotonic() + JOIN
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    hung = sum(process.is_alive() for process in processes)
    for process in processes:
        process.kill()
    if hung:
        return f"no sum after {JOIN:g} s"
    told = [found.get() for _ in processes if not found.empty()]
    wrong = [word for word in told if word != str(count * (count + 1) / 2)]
    return wrong[0] if wrong else None if len(told) == count else "a rank died"


def _rank(rank: int, backend: str, count: int, port: int, environment: dict, found) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(environment, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        dist.init_process_group(backend, rank=rank, world_size=count)
        device = f"cuda:{rank}" if backend == "nccl" else "cpu"
        number = torch.tensor(rank + 1.0, device=device)
        dist.all_reduce(number)
        found.put(str(number.item()))
        dist.destroy_process_group()
    except Exception as error:
        found.put(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
