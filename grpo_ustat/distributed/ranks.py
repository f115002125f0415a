"""Ranks of a run that torchrun or `accelerate launch` started, or a single process."""

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

# Process id of the command that started the ranks.
PARENT_VARIABLE = "GRPO_USTAT_PARENT"
# Number of a local worker, in its environment.
WORKER_VARIABLE = "GRPO_USTAT_WORKER"
# Time for which a rank waits for the others; the 30 minutes of gloo are too short.
LONGEST_WAIT = timedelta(days=20)


class RefusedByRank(ConfigError):
    """A ConfigError of one rank, raised on all ranks at the same call; it is printed once."""


class _PeerFailed(Exception):
    """Failure of another rank, which makes this rank's work useless."""


def check_environment() -> None:
    """Refuse an environment that defines this process's rank only in part.

    The process would wait forever, or act as the first of several.
    """
    if "RANK" not in os.environ:
        return
    fix = "start ranks by torchrun or launch.num_processes=N, or for one process unset RANK"
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
    """Return the rank of this process, from 0; 0 for a single process."""
    return int(os.environ["RANK"]) if world() > 1 else 0


def is_main() -> bool:
    """Return True for rank 0, which prints and writes for all ranks."""
    return rank() == 0


def own_device(device: str) -> str:
    """Return the configured device; `cuda` becomes the device of this rank or local worker."""
    if device != "cuda" or (world() == 1 and WORKER_VARIABLE not in os.environ):
        return device
    import torch

    if world() == 1:
        return f"cuda:{int(os.environ[WORKER_VARIABLE]) % max(1, torch.cuda.device_count())}"

    # A task of SLURM may see only its own device, as the first.
    local_rank, visible = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if here > visible > 1:
        raise RefusedByRank(f"{here} processes on a machine with {visible} GPUs: use {visible}")
    return f"cuda:{local_rank % visible if visible else local_rank}"


def one_on_each_gpu(workers: int, device: str) -> int:
    """Return the number of local workers that get a model: on CUDA one for each GPU."""
    if not device.startswith("cuda"):
        return workers
    import torch

    return min(workers, max(1, torch.cuda.device_count())) if device == "cuda" else 1


def barrier() -> None:
    """Wait until every rank has made this call."""
    all_gather_call(_nothing)


def main_only(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function only on rank 0; every rank waits for it and returns its value.

    Errors are those of `all_gather_call`.
    """
    return all_gather_call(function if is_main() else _nothing, *arguments)[0]


def all_gather_call(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call the function on every rank; every rank returns the values of all, in their order.

    Raises:
        RefusedByRank, Stopped: raised on all ranks if it was raised on one.
        RuntimeError: another rank failed; the failed rank raises its own error.
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
    """Add to a count, from inside `all_gather_call`, and return the sum over all ranks so far.

    If another rank failed, it raises an exception that `all_gather_call` catches.
    """
    peers = _join()
    if peers.count("failed", 0):
        raise _PeerFailed
    return peers.count("tally", added)


def _nothing(*_: Any) -> None:
    pass


class _Peers:
    """Connections to the other ranks: a group for values, a store for counts between its calls."""

    def __init__(self) -> None:
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        self.calls = 0
        if dist.is_initialized():
            # Accelerate has joined the ranks.
            self._store = dist.distributed_c10d._get_default_store()
        else:
            self._store, number, size = next(rendezvous("env://"))
            # It returns once all ranks have joined; before that no rank has touched a folder.
            dist.init_process_group("gloo", store=self._store, rank=number, world_size=size)
        self._group = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
        self._gather = dist.all_gather_object
        atexit.register(_leave)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        values: list[Any] = [None] * world()
        with _connected():
            self._gather(values, value, group=self._group)
        return values

    def count(self, key: str, added: int) -> int:
        """Add to a count of the current call, and return the sum over all ranks so far."""
        with _connected():
            return self._store.add(f"grpo_ustat/{self.calls}/{key}", added)


_join = cache(_Peers)


def _leave() -> None:
    """Close the connections: their threads abort the process if they outlive the interpreter."""
    import torch.distributed as dist

    _join.cache_clear()
    dist.destroy_process_group()


@contextmanager
def _connected() -> Iterator[None]:
    """End this rank, and its sweep, with one line if the connection to another rank is lost."""
    try:
        yield
    except RuntimeError as error:
        raise _lost() from error


@contextmanager
def name_lost_ranks() -> Iterator[None]:
    """End this rank as `_connected` does, around work that may also raise other errors.

    Only errors of torch.distributed and gloo count as lost connections.

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
        f"error: rank {rank()} of {world()} lost another rank: see that rank's message, then run "
        "the same command again"
    )
