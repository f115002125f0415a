"""A step's row of metrics.jsonl, under TRL's names."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from accelerate.utils import gather_object

from grpo_ustat.training.batch import Batch
from grpo_ustat.training.update import Found


def batch_metrics(batch: Batch) -> dict[str, Any]:
    """Of the whole step's completions, of all ranks."""
    rewards_PG, lengths_PG, ended_PG = batch.rewards_PG, batch.lengths_PG, batch.ended_PG
    return {
        "reward": float(rewards_PG.mean()),
        "reward_std": float(rewards_PG.std()),
        "frac_reward_zero_std": float((rewards_PG == rewards_PG[:, :1]).all(axis=1).mean()),
        "completions/mean_length": float(lengths_PG.mean()),
        "completions/clipped_ratio": float((~ended_PG).mean()),
        "tokens": int(lengths_PG.sum()),
    }


def update_metrics(found: Found) -> dict[str, Any]:
    """Of the step's updates, summed over ranks; only what the objective has."""
    shares = gather_object([(found.sums, found.gap)])
    sums: Counter = Counter()
    for share, _ in shares:
        sums.update(share)
    gap = np.concatenate([np.asarray(part, dtype=np.float64) for _, part in shares])
    row = {"frac_completions_skipped": sums["skipped"] / sums["rows"]}
    if len(gap):
        row["sampling/sampling_logp_difference/mean"] = float(gap.mean())
        row["sampling/sampling_logp_difference/max"] = float(gap.max())
    if sums["ratio_count"]:
        row["ratio/mean"] = sums["ratio_sum"] / sums["ratio_count"]
        for side in ("low", "high"):
            row[f"clip_ratio/{side}_mean"] = sums[f"clip_{side}"] / sums["ratio_count"]
        low, high = row["clip_ratio/low_mean"], row["clip_ratio/high_mean"]
        row["clip_ratio/region_mean"] = low + high
    if sums["kl_count"]:
        row["kl"] = sums["kl_sum"] / sums["kl_count"]
    return row
