"""Functions for the ranks of a run: processes that share its work and wait for each other.

torchrun, `accelerate launch`, SLURM or the command itself starts the ranks. In a run with a single
process, all functions behave as if it were the only rank.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed.signals import Stopped

# Environment variable with the number of a local worker.
WORKER_VARIABLE = "GRPO_USTAT_WORKER"
# Longest time for which a rank waits for the others. The default of gloo, 30 minutes, is too short.
LONGEST_WAIT = timedelta(days=20)


class RefusedByRank(ConfigError):
    """ConfigError that occurred on one rank and is raised by all; it is printed only once."""


class _PeerFailed(Exception):
    """Exception that ends the work of this rank because another rank has failed."""


def check_environment() -> None:
    """Raise an error if the environment variables that define a rank are incomplete or wrong.

    Otherwise the process would wait forever, or act as the first of several ranks.

    Raises:
        ConfigError: If RANK is set, but other variables are missing or contradict it.
    """
    if "RANK" not in os.environ:
        return
    fix = "start ranks with torchrun or launch.num_processes=N; for one process, unset RANK"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not os.environ.get(name, "0").isdecimal():
            raise ConfigError(f"{name}={os.environ[name]!r} is not a whole number: {fix}")
    if int(os.environ["RANK"]) >= int(os.environ.get("WORLD_SIZE", 1)):
        size = os.environ.get("WORLD_SIZE")
        but = "WORLD_SIZE is not set" if size is None else f"WORLD_SIZE={size}"
        raise ConfigError(f"RANK={os.environ['RANK']}, but {but}: {fix}")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing and world() > 1:
        raise ConfigError(
            f"RANK={rank()} of WORLD_SIZE={world()} without {' and '.join(missing)}: {fix}"
        )


def check_ranks(config: Any, tasks: int = 1) -> None:
    """Refuse contradictory numbers of processes, and steps with fewer prompts than processes.

    Args:
        config: configuration of the run.
        tasks: number of processes that a scheduler will start for this run.
    """
    num_processes, others = config.launch.num_processes, max(world(), tasks)
    if num_processes > 1 and (tasks > 1 or ("RANK" in os.environ and num_processes != others)):
        raise RefusedByRank(
            f"launch.num_processes={num_processes}, but a launcher sets the number of processes "
            f"to {others}: set launch.num_processes=1, or do not use a launcher"
        )
    ranks = max(num_processes, others)
    # A preview is made without the launcher that will start the processes.
    if ranks == 1 and getattr(config.launch, "fsdp2", False) and not config.only_shows:
        raise RefusedByRank(
            "launch.fsdp2=true needs several processes: use torchrun, or set "
            "launch.num_processes=2 or more"
        )
    prompts = getattr(config, "prompts_per_step", ranks)
    if prompts < ranks:
        raise RefusedByRank(
            f"{prompts} prompts per step (budget.rollouts / group_size) for {ranks} processes, "
            "which need at least one each: raise budget.rollouts, or lower group_size or the "
            "number of processes"
        )


def world() -> int:
    """Return the number of ranks of the run; 1 for a single process."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def rank() -> int:
    """Return the rank of this process, counted from 0; 0 for a single process."""
    return int(os.environ["RANK"]) if world() > 1 else 0


def is_main() -> bool:
    """Return True on rank 0, which prints and writes files for all ranks."""
    return rank() == 0


def own_device(device: str) -> str:
    """Return the device of this process: the configured one, or for `cuda` the GPU of this rank.

    Local workers, the processes of `workers.share`, each get a GPU in the same way.
    """
    if device != "cuda" or (world() == 1 and WORKER_VARIABLE not in os.environ):
        return device
    import torch

    if world() == 1:
        return f"cuda:{int(os.environ[WORKER_VARIABLE]) % max(1, torch.cuda.device_count())}"

    # A SLURM task may see only one device, which then has the index 0.
    local_rank, visible = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if here > visible > 1:
        raise RefusedByRank(
            f"{here} processes on a machine with {visible} GPUs: use {visible} processes"
        )
    return f"cuda:{local_rank % visible if visible else local_rank}"


def one_on_each_gpu(workers: int, device: str) -> int:
    """Return how many of the configured local workers can load a model: on GPUs, one on each."""
    if not device.startswith("cuda"):
        return workers
    import torch

    return min(workers, max(1, torch.cuda.device_count())) if device == "cuda" else 1


def barrier() -> None:
    """Wait until every rank has called this function."""
    all_gather_call(_nothing)


def main_only(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on rank 0 only; every rank waits for the result and returns it.

    If the function raises an error, all ranks raise one, as in `all_gather_call`.
    """
    return all_gather_call(function if is_main() else _nothing, *arguments)[0]


def all_gather_call(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function on every rank, and return the results of all ranks in rank order.

    Raises:
        RefusedByRank: the function raised a ConfigError on some rank. All ranks raise this error.
        Stopped: the function raised Stopped on some rank. All ranks raise it.
        RuntimeError: the function raised any other error on another rank. On the rank with the
            error, the original error is raised.
        SystemExit: the connection to another rank is lost.
    """
    if world() == 1:
        return [function(*arguments)]
    peers, own_error = _join(), None
    peers.calls += 1
    try:
        outcome = ("value", function(*arguments))
    except Exception as error:
        own_error = error
        peers.count("failed", 1)
        if isinstance(error, _PeerFailed):
            outcome = ("in vain", "")
        elif isinstance(error, ConfigError):
            outcome = ("refused", str(error))
        elif isinstance(error, Stopped):
            outcome = ("stopped", str(error))
        else:
            outcome = ("failed", f"{type(error).__name__}: {error}")
    outcomes = peers.gather(outcome)
    for kind, text in outcomes:
        if kind == "refused":
            raise RefusedByRank(text)
    for kind, text in outcomes:
        if kind == "stopped":
            raise Stopped(text)
    for number, (kind, text) in enumerate(outcomes):
        if kind == "failed" and number == rank() and own_error is not None:
            raise own_error
        if kind == "failed":
            raise RuntimeError(f"rank {number} failed: {text}")
    return [value for _, value in outcomes]


def tally(added: int) -> int:
    """Add to a count that all ranks share, and return its current value.

    This works only inside a function that `all_gather_call` calls. If another rank has failed, an
    exception ends this function early, and `all_gather_call` catches it.
    """
    peers = _join()
    if peers.count("failed", 0):
        raise _PeerFailed
    return peers.count("tally", added)


def _nothing(*_: Any) -> None:
    pass


class _Peers:
    """Connections to the other ranks: a process group for results, and a store for counts."""

    def __init__(self) -> None:
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        self.calls = 0
        if dist.is_initialized():
            # Accelerate has connected the ranks before.
            self._store = dist.distributed_c10d._get_default_store()
        else:
            self._store, number, size = next(rendezvous("env://"))
            # This call returns when all ranks have joined. No rank uses a folder before that.
            dist.init_process_group("gloo", store=self._store, rank=number, world_size=size)
        self._group = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
        self._gather = dist.all_gather_object
        atexit.register(_leave)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order."""
        values: list[Any] = [None] * world()
        with _connected():
            self._gather(values, value, group=self._group)
        return values

    def count(self, key: str, added: int) -> int:
        """Add to a count that belongs to the current call; return its sum over all ranks so far."""
        with _connected():
            return self._store.add(f"grpo_ustat/{self.calls}/{key}", added)


_join = cache(_Peers)


def _leave() -> None:
    """Close the connections; otherwise their threads would abort the process when it ends."""
    import torch.distributed as dist

    _join.cache_clear()
    dist.destroy_process_group()


@contextmanager
def _connected() -> Iterator[None]:
    """End this rank, and the sweep, if the block loses the connection to another rank.

    The error is shown as one line.
    """
    try:
        yield
    except RuntimeError as error:
        raise _lost() from error


@contextmanager
def name_lost_ranks() -> Iterator[None]:
    """End this rank if the block loses the connection to another rank.

    Errors of torch.distributed and gloo count as lost connections. All other errors are raised
    unchanged.

    Raises:
        SystemExit: the connection to another rank is lost.
    """
    try:
        yield
    except RuntimeError as error:
        if world() == 1:
            raise
        import torch.distributed as dist

        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise _lost() from error


def _lost() -> SystemExit:
    return SystemExit(
        f"error: rank {rank()} of {world()} lost the connection to another rank: see that rank's "
        "message, then run the same command again"
    )
