"""Cores and memory, and what a scheduler or container leaves of them."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
from rich.filesize import decimal

from grpo_ustat.checkup.findings import Finding, failed, ok, warning

CGROUP = Path("/sys/fs/cgroup")
LITTLE, TOO_LITTLE = 4e9, 1e9  # bytes free: a small model trains in the one, torch loads in none


def threads(_: Path) -> Finding:
    """OMP_NUM_THREADS against the cores that this process may use."""
    cores, why = _cores()
    asked = os.environ.get("OMP_NUM_THREADS")
    said = f"{cores} cores ({why}), OMP_NUM_THREADS={asked or 'unset'}"
    if asked is None:
        return ok(f"{said}; launch.num_threads decides in runs")
    if not asked.isdecimal() or int(asked) < 1:
        return failed(f"{said} is no number of threads", "export OMP_NUM_THREADS=1")
    if int(asked) > cores:
        return warning(
            f"{said}: threads that wait for each other's core are far slower than one",
            f"export OMP_NUM_THREADS={cores} or less; with several ranks, cores / ranks",
        )
    return ok(said)


def _cores() -> tuple[int, str]:
    """Cores that may be used, and what says so: affinity, container or SLURM."""
    affinity = getattr(os, "sched_getaffinity", None)
    found = [(len(affinity(0)) if affinity else os.cpu_count() or 1, "of this process")]
    quota = _read(CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        found.append((max(1, int(quota[0]) // int(quota[1])), "of the container"))
    task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if task.isdecimal():
        found.append((int(task), "SLURM_CPUS_PER_TASK"))
    return min(found, key=lambda pair: pair[0])


def memory(_: Path) -> Finding:
    """What is free, of the machine or of what a container grants."""
    machine = psutil.virtual_memory()
    free, said = machine.available, f"{decimal(machine.total)} in all"
    limit, used = (_read(CGROUP / f"memory.{name}").strip() for name in ("max", "current"))
    if limit.isdecimal() and used.isdecimal() and int(limit) - int(used) < free:
        free, said = int(limit) - int(used), f"{decimal(int(limit))} granted by the container"
    said = f"{decimal(max(0, free))} free of {said}"
    if free < TOO_LITTLE:
        return failed(said, "end other programs, or ask for more memory (SLURM: --mem)")
    if free < LITTLE:
        return warning(said, "more than the embedded policies may not fit; dry_run=true says")
    return ok(said)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
