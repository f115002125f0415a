"""A step's row of metrics.jsonl, under TRL's names; of all ranks' completions."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate.utils import gather_object

from grpo_ustat.estimators.ustatistic import silent_share_if_alike
from grpo_ustat.records import Rollouts
from grpo_ustat.training.batch import Batch
from grpo_ustat.training.update import Constants, Found

if TYPE_CHECKING:
    from grpo_ustat.training.setup import Run


def batch_metrics(batch: Batch) -> dict[str, Any]:
    """Of rewards and lengths.

    As in TRL, `reward_std` is over the whole batch with divisor n - 1, and lengths of terminated
    completions are 0 where all were cut. `frac_reward_zero_std` counts groups of exactly equal
    rewards; `..._expected`, of 0/1 rewards alone, is `silent_share_if_alike`.
    """
    rewards_PG, size = batch.rewards_PG, batch.rewards_PG.shape[1]
    row = {
        "reward": float(rewards_PG.mean()),
        "reward_std": _spread(rewards_PG),
        "frac_reward_zero_std": float((rewards_PG == rewards_PG[:, :1]).all(axis=1).mean()),
    }
    if np.isin(rewards_PG, (0, 1)).all():
        expected = silent_share_if_alike(rewards_PG.sum(axis=1), size)
        row["frac_reward_zero_std_expected"] = expected
    return row | {
        **_lengths("length", batch.lengths_PG),
        **_lengths("terminated_length", batch.lengths_PG[batch.ended_PG]),
        "completions/clipped_ratio": float((~batch.ended_PG).mean()),
        "completions/extraction_failure_ratio": float((~batch.answered_PG).mean()),
        "tokens": int(batch.lengths_PG.sum()),
    }


def _spread(rewards_PG: np.ndarray) -> float:
    """Standard deviation, exactly 0 for equal values."""
    return 0.0 if (rewards_PG == rewards_PG[0, 0]).all() else float(rewards_PG.std(ddof=1))


def _lengths(name: str, lengths: np.ndarray) -> dict[str, float]:
    lengths = lengths if lengths.size else np.zeros(1)
    return {
        f"completions/{kind}_{name}": float(getattr(lengths, kind)())
        for kind in ("mean", "min", "max")
    }


def judging(run: Run) -> dict[str, int]:
    """Answers of all ranks that could not be judged since the last call: `judge/timeouts` and
    `judge/failures`, with a judge that can fail; they earned nothing.
    """
    mine = run.task.take_counts()
    if not mine:
        return {}
    total = sum((Counter(counts) for counts in gather_object([mine])), Counter())
    return {f"judge/{name}": total[name] for name in mine}


def tokens_seen(batch: Batch) -> int:
    """What TRL's `num_tokens` adds up: a prompt's tokens once per completion, and completions."""
    return int(batch.prompt_lengths_P.sum() * batch.lengths_PG.shape[1] + batch.lengths_PG.sum())


def update_metrics(found: Found, rollouts: Rollouts, constants: Constants) -> dict[str, Any]:
    """Of the step's updates and of the sampler's own figures, summed over ranks; only what the
    objective and the sampler have.
    """
    mine = Counter(found.sums)
    mine.update(_sampler_sums(found, rollouts, constants))
    sums: Counter = Counter()
    largest = []
    for share in gather_object([mine]):
        largest.append(share.pop("gap_max", 0.0))
        sums.update(share)
    row = {"frac_completions_skipped": sums["skipped"] / sums["rows"]}
    if sums["entropy_count"]:
        row["entropy"] = sums["entropy_sum"] / sums["entropy_count"]
    if sums["gap_count"]:
        row["sampling/sampling_logp_difference/mean"] = sums["gap_sum"] / sums["gap_count"]
        row["sampling/sampling_logp_difference/max"] = max(largest)
    if sums["ratio_count"]:
        row["ratio/mean"] = sums["ratio_sum"] / sums["ratio_count"]
        for side in ("low", "high"):
            row[f"clip_ratio/{side}_mean"] = sums[f"clip_{side}"] / sums["ratio_count"]
        low, high = row["clip_ratio/low_mean"], row["clip_ratio/high_mean"]
        row["clip_ratio/region_mean"] = low + high
    if sums["kl_count"]:
        row["kl"] = sums["kl_sum"] / sums["kl_count"]
    return row


def _sampler_sums(found: Found, rollouts: Rollouts, constants: Constants) -> dict[str, float]:
    """Entropy over this rank's tokens; distances of the sampler's log-probabilities from the
    trainer's before the update, over the tokens that it read.
    """
    sums, mask_PGT = {}, rollouts.mask_PGT
    if rollouts.entropy_PGT is not None:
        sums["entropy_sum"] = float(rollouts.entropy_PGT[mask_PGT].sum(dtype=np.float64))
        sums["entropy_count"] = int(mask_PGT.sum())
    gap = np.concatenate([np.zeros(0), *found.gap])
    if constants.old_NT is not None and rollouts.logprobs_PGT is not None:
        ours_PGT = constants.old_NT.double().cpu().numpy().reshape(mask_PGT.shape)
        gap = np.abs(rollouts.logprobs_PGT - ours_PGT)[mask_PGT]
    if gap.size:
        sums |= {"gap_sum": float(gap.sum()), "gap_count": gap.size, "gap_max": float(gap.max())}
    return sums
