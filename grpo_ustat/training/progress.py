"""What a run has done so far, how it is kept in checkpoints, and how it goes on from one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from grpo_ustat.ranks import on_main
from grpo_ustat.runs.log import RunLog, attempt
from grpo_ustat.runs.snapshots import newest_whole, prune
from grpo_ustat.training import checkpoint, sharded
from grpo_ustat.training.card import write_card
from grpo_ustat.training.setup import Run


@dataclass
class Progress:
    """What a run has done so far; stored in each checkpoint.

    Attributes:
        seconds_save: what the latest checkpoint took to write.
        failed_saves: checkpoints that the disk refused.
    """

    step: int = 0
    rollouts: int = 0
    value_rollouts: int = 0
    tokens: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    seconds_save: float = 0.0
    failed_saves: int = 0
    clipped_ratio: float = 0.0
    evals: list[dict[str, Any]] = field(default_factory=list)
    rewards_first: list[float] = field(default_factory=list)
    rewards_last: list[float] = field(default_factory=list)
    streaks: dict[str, int] = field(default_factory=dict)
    alarms: dict[str, int] = field(default_factory=dict)


def resume(run: Run) -> Progress:
    """Go on from the newest checkpoint that is whole; without any, start.

    Raises:
        ConfigError: see `newest_whole` and `checkpoint.load`.
    """
    found = on_main(newest_whole, run.folder.path)
    if found is None:
        return Progress()
    state = checkpoint.load(found, run.policy, run.optimizer)
    if run.sharded is not None:
        sharded.scatter(run)
    run.engine.refresh()
    run.scheduler.load_state_dict(state["scheduler"])
    for group, rate in zip(run.optimizer.param_groups, run.scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
    run.memory.load_state_dict(checkpoint.load_memory(found))
    return Progress(step=state["step"], **state["progress"])


def save(run: Run, progress: Progress, log: RunLog | None) -> bool:
    """Write a checkpoint, after the rows up to it; returns whether it is there.

    A disk that refuses it stops nothing: that is said and counted, and the checkpoint before stays.

    Raises:
        FloatingPointError: see `checkpoint.check_finite`.
    """
    start, failed = time.perf_counter(), 0
    moments = sharded.moments(run.policy, run.optimizer)
    if log:
        attempt(f"the last rows of {run.folder.path}", log.sync)
        what = f"checkpoint-{progress.step} of {run.folder.path}"
        with named(run, progress.step):
            failed = not attempt(what, lambda: _write(run, progress, moments))
    failed = int(run.all_ranks_sum(np.array([int(failed)]))[0])
    progress.failed_saves += failed
    progress.seconds_save = time.perf_counter() - start
    return not failed


def drop_old(run: Run, step: int) -> None:
    """Also where a killed run had come no further than the save."""
    path, limit = run.folder.path, run.config.save_total_limit
    attempt(f"removal of old checkpoints in {path}", lambda: prune(path, step, limit))


def _write(run: Run, progress: Progress, moments: dict[str, torch.Tensor]) -> None:
    state = {
        "progress": {key: value for key, value in vars(progress).items() if key != "step"},
        "scheduler": run.scheduler.state_dict(),
    }
    last = progress.step == run.config.max_steps
    describe = partial(write_card, run=run, progress=progress) if last else None
    memory = run.memory.state_dict()
    checkpoint.save(run.folder.path, progress.step, run.policy, moments, state, memory, describe)


@contextmanager
def named(run: Run, step: int) -> Iterator[None]:
    """Say where and when a number was not finite."""
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(f"{run.folder.path} stopped in step {step}: {error}") from error
