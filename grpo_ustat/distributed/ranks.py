"""Ranks of a run started by torchrun or `accelerate launch`; a single process is also supported."""

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

# Environment variable with the process id of the command that started the ranks.
PARENT_VARIABLE = "GRPO_USTAT_PARENT"
# Environment variable with the number of a local worker.
WORKER_VARIABLE = "GRPO_USTAT_WORKER"
# Maximum time that a rank waits for other ranks; gloo's default of 30 minutes is too short.
LONGEST_WAIT = timedelta(days=20)


class RefusedByRank(ConfigError):
    """ConfigError of a single rank, which all ranks raise in the same call and print only once."""


class _PeerFailed(Exception):
    """Failure of another rank, which makes this rank's work useless."""


def check_environment() -> None:
    """Raise an error if the environment defines this process's rank only in part.

    The process would otherwise wait forever, or act as the first of several ranks.
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


def world() -> int:
    """Return the number of ranks of the run; 1 for a single process."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def rank() -> int:
    """Return the rank of this process, counted from 0; 0 for a single process."""
    return int(os.environ["RANK"]) if world() > 1 else 0


def is_main() -> bool:
    """Return True for rank 0, which prints and writes for all ranks."""
    return rank() == 0


def own_device(device: str) -> str:
    """Return the configured device, with `cuda` resolved to the device of this rank or worker."""
    if device != "cuda" or (world() == 1 and WORKER_VARIABLE not in os.environ):
        return device
    import torch

    if world() == 1:
        return f"cuda:{int(os.environ[WORKER_VARIABLE]) % max(1, torch.cuda.device_count())}"

    # Some SLURM tasks see only one device, which then has index 0.
    local_rank, visible = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if here > visible > 1:
        raise RefusedByRank(f"{here} processes on a machine with {visible} GPUs: use {visible}")
    return f"cuda:{local_rank % visible if visible else local_rank}"


def one_on_each_gpu(workers: int, device: str) -> int:
    """Return the number of local workers that load a model; on CUDA, at most one per GPU."""
    if not device.startswith("cuda"):
        return workers
    import torch

    return min(workers, max(1, torch.cuda.device_count())) if device == "cuda" else 1


def barrier() -> None:
    """Wait until every rank has made this call."""
    all_gather_call(_nothing)


def main_only(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function only on rank 0; every rank waits for the call and returns its value.

    The errors are the same as in `all_gather_call`.
    """
    return all_gather_call(function if is_main() else _nothing, *arguments)[0]


def all_gather_call(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call the function on every rank, and return the values of all ranks in rank order.

    Raises:
        RefusedByRank, Stopped: some rank raised a ConfigError or Stopped; all ranks raise this
        error.
        RuntimeError: another rank failed; the failed rank raises its original error.
        SystemExit: the connection to a rank is lost.
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
    """Add to a count during `all_gather_call`, and return the count's current sum over all ranks.

    If another rank has failed, the function raises an exception that `all_gather_call` catches.
    """
    peers = _join()
    if peers.count("failed", 0):
        raise _PeerFailed
    return peers.count("tally", added)


def _nothing(*_: Any) -> None:
    pass


class _Peers:
    """Connections to the other ranks: a process group for values, and a store for counts."""

    def __init__(self) -> None:
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        self.calls = 0
        if dist.is_initialized():
            # Accelerate has already connected the ranks.
            self._store = dist.distributed_c10d._get_default_store()
        else:
            self._store, number, size = next(rendezvous("env://"))
            # This call returns when all ranks have joined, and no rank uses a folder before that.
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
        """Add to a count for the current call, and return its current sum over all ranks."""
        with _connected():
            return self._store.add(f"grpo_ustat/{self.calls}/{key}", added)


_join = cache(_Peers)


def _leave() -> None:
    """Close the connections, because their threads would abort the process at its end."""
    import torch.distributed as dist

    _join.cache_clear()
    dist.destroy_process_group()


@contextmanager
def _connected() -> Iterator[None]:
    """End this rank and its sweep with a one-line error if the connection to a rank is lost."""
    try:
        yield
    except RuntimeError as error:
        raise _lost() from error


@contextmanager
def name_lost_ranks() -> Iterator[None]:
    """End this rank if the block loses the connection to a rank; raise other errors unchanged.

    Only errors from torch.distributed and gloo are treated as lost connections.

    Raises:
        SystemExit: the connection to a rank is lost.
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
