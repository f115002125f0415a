"""Which completions of a step are kept, and as what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate.utils import gather_object

from grpo_ustat.training.batch import Batch

if TYPE_CHECKING:
    from grpo_ustat.training.setup import Run


def completion_rows(
    run: Run, batch: Batch, advantage_PG: np.ndarray, step: int
) -> list[dict[str, Any]]:
    """Rows of completions.parquet: the step's first `log_completions` completions, so whole groups
    of its first prompts, which were drawn at random; the same on every rank.
    """
    count = run.config.log_completions
    if not count:
        return []
    size = batch.rewards_PG.shape[1]
    rank, world = run.accelerator.process_index, run.accelerator.num_processes
    mine = {}
    for own, prompt in enumerate(range(rank, len(batch.prompts), world)):
        for i in range(min(size, count - prompt * size)):
            reward, advantage = batch.rewards_PG[prompt, i], advantage_PG[prompt, i]
            row = _row(run, batch, own, i) | {"reward": float(reward)}
            mine[prompt * size + i] = row | {"step": step, "advantage": float(advantage)}
    every = {place: row for share in gather_object([mine]) for place, row in share.items()}
    return [every[place] for place in sorted(every)]


def _row(run: Run, batch: Batch, own: int, i: int) -> dict[str, Any]:
    """What is known of completion i of this rank's own prompt."""
    rollouts = batch.rollouts
    prompt, text = rollouts.prompts[own], rollouts.texts_PG[own][i]
    return {
        "prompt": prompt.text,
        "completion": text,
        "prompt_id": prompt.id,
        "completion_index": i,
        "length": int(rollouts.lengths_PG[own, i]),
        "ended": bool(rollouts.ended_PG[own, i]),
        "answer": prompt.answer,
        "extracted": run.task.extract(text),
    }
