"""Ranks as forked processes that gloo joins: there in a second, with nothing to import."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from contextlib import suppress

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState

from grpo_ustat.distributed import ranks

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # fmt: skip


def in_ranks(count, work, environment=()):
    """`work(rank)` on every rank; returns what each returned, a traceback where it failed.

    Tensors do not travel: return numpy arrays.
    """
    port = free_port()
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(count):
        mine, theirs = context.Pipe(duplex=False)
        known = dict(
            RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=count, LOCAL_WORLD_SIZE=count,
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )  # fmt: skip
        known = {name: str(value) for name, value in known.items()} | dict(environment)
        process = context.Process(target=_rank, args=(work, rank, known, theirs))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    found = [_received(pipe) for pipe in pipes]
    for process in processes:
        process.join(60)
        assert not process.is_alive(), "a rank never ended"
    return found


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _received(pipe):
    try:
        assert pipe.poll(300), "a rank said nothing for five minutes"
        return pipe.recv()
    except EOFError:
        return "gone"


def _rank(work, rank, environment, pipe):
    os.environ.update(environment)
    for state in (AcceleratorState, PartialState, GradientState):
        state._shared_state.clear()
    ranks._join.cache_clear()
    torch.set_num_threads(1)
    try:
        pipe.send(work(rank))
        refused = False
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        refused = isinstance(error, ranks.RefusedByRank)
        if not refused:
            return
    if refused or dist.is_initialized():
        # Rank 0 holds the store: where it leaves first, others have lost it before they are told.
        with suppress(SystemExit):
            ranks.barrier()
