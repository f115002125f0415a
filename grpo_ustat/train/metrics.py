"""Metrics of a step for metrics.jsonl, with TRL's names, over the completions of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from accelerate.utils import gather_object

from grpo_ustat.estimators.intervals import is_binary
from grpo_ustat.estimators.ustatistic import zero_variance_share_if_equal
from grpo_ustat.records import Rollouts
from grpo_ustat.tasks.base import extracted
from grpo_ustat.train.context import Batch, TrainContext
from grpo_ustat.train.update import FixedLogprobs, UpdateStats


def batch_metrics(batch: Batch, reward_names: Sequence[str] = ("task",)) -> dict[str, Any]:
    """Compute the metrics of rewards and completion lengths.

    - `reward` and `reward_std` are the mean and standard deviation of rewards. As in TRL, standard
      deviations are over the whole batch, with divisor n - 1.
    - With several reward functions, the reward is their weighted sum, and each function also has
      `rewards/NAME/mean` and `rewards/NAME/std`.
    - `frac_reward_zero_std` is the share of groups with exactly equal rewards.
    - `frac_reward_zero_std_expected` is the value of this share if all prompts were equally hard;
      see `zero_variance_share_if_equal`. It exists only for rewards of 0 and 1.
    - `completions/..._terminated_length` are 0 if all completions were truncated.
    """
    rewards_PG, size = batch.rewards_PG, batch.rewards_PG.shape[1]
    row = {
        "reward": float(rewards_PG.mean()),
        "reward_std": _std(rewards_PG),
        "frac_reward_zero_std": float((rewards_PG == rewards_PG[:, :1]).all(axis=1).mean()),
    }
    if is_binary(rewards_PG):
        expected = zero_variance_share_if_equal(rewards_PG.sum(axis=1), size)
        row["frac_reward_zero_std_expected"] = expected
    for f, name in enumerate(reward_names if len(reward_names) > 1 else ()):
        function_PG = batch.rewards_PGF[..., f]
        row[f"rewards/{name}/mean"] = float(function_PG.mean())
        row[f"rewards/{name}/std"] = _std(function_PG)
    for name, lengths in (
        ("length", batch.lengths_PG),
        ("terminated_length", batch.lengths_PG[batch.ended_PG]),
    ):
        lengths = lengths if lengths.size else np.zeros(1)
        row[f"completions/mean_{name}"] = float(lengths.mean())
        row[f"completions/min_{name}"] = float(lengths.min())
        row[f"completions/max_{name}"] = float(lengths.max())
    return row | {
        "completions/clipped_ratio": float((~batch.ended_PG).mean()),
        "completions/extraction_failure_ratio": float((~batch.answered_PG).mean()),
        "tokens": int(batch.lengths_PG.sum()),
    }


def _std(rewards_PG: np.ndarray) -> float:
    """Compute the standard deviation of all rewards, which is exactly 0 if they are equal.

    NumPy's result for equal rewards could be slightly larger than 0, because the mean is rounded.
    """
    equal = (rewards_PG == rewards_PG[0, 0]).all()
    return 0.0 if equal else float(rewards_PG.std(ddof=1))


def judge_failures(run: TrainContext) -> dict[str, int]:
    """Count the completions, since the last call, whose answers could not be judged.

    Such completions got reward 0. The counts `judge/timeouts` and `judge/failures` are sums over
    ranks. The result is empty if the task's judge cannot fail.
    """
    own_counts = run.task.take_counts()
    if not own_counts:
        return {}
    total = sum((Counter(counts) for counts in gather_object([own_counts])), Counter())
    return {f"judge/{name}": total[name] for name in own_counts}


def num_tokens(batch: Batch) -> int:
    """Count the tokens of a batch as TRL does in `num_tokens`.

    Prompts and completions count, and each prompt counts once for each of its completions.
    """
    return int(batch.prompt_lengths_P.sum() * batch.lengths_PG.shape[1] + batch.lengths_PG.sum())


def update_metrics(stats: UpdateStats, rollouts: Rollouts, fixed: FixedLogprobs) -> dict[str, Any]:
    """Compute the metrics of the step's updates and of the sampler, over all ranks.

    Metrics that do not apply to the objective or the sampler are left out. `entropy` is the mean
    over all tokens. `sampling/sampling_logp_difference` is the absolute difference between the
    log-probabilities of the sampler and those of the trainer before the update. It covers only
    tokens whose log-probability the trainer computed.
    """
    own_sums, mask_PGT = Counter(stats.sums), rollouts.mask_PGT
    if rollouts.entropy_PGT is not None:
        own_sums["entropy_sum"] = rollouts.entropy_PGT[mask_PGT].sum(dtype=np.float64).item()
        own_sums["entropy_count"] = int(mask_PGT.sum())
    gap = np.concatenate([np.zeros(0), *stats.gap])
    if fixed.old_NT is not None and rollouts.logprobs_PGT is not None:
        trainer_PGT = fixed.old_NT.double().cpu().numpy().reshape(mask_PGT.shape)
        gap = np.abs(rollouts.logprobs_PGT - trainer_PGT)[mask_PGT]
    own_sums.update({"gap_sum": gap.sum().item(), "gap_count": gap.size})
    largest_gaps, sums = [], Counter()
    for gap_max, rank_sums in gather_object([(gap.max(initial=0.0).item(), own_sums)]):
        largest_gaps.append(gap_max)
        sums.update(rank_sums)

    row = {"frac_completions_skipped": sums["skipped"] / sums["rows"]}
    if sums["entropy_count"]:
        row["entropy"] = sums["entropy_sum"] / sums["entropy_count"]
    if sums["gap_count"]:
        row["sampling/sampling_logp_difference/mean"] = sums["gap_sum"] / sums["gap_count"]
        row["sampling/sampling_logp_difference/max"] = max(largest_gaps)
    if sums["ratio_count"]:
        row["ratio/mean"] = sums["ratio_sum"] / sums["ratio_count"]
        for side in ("low", "high"):
            row[f"clip_ratio/{side}_mean"] = sums[f"clip_{side}"] / sums["ratio_count"]
        low, high = row["clip_ratio/low_mean"], row["clip_ratio/high_mean"]
        row["clip_ratio/region_mean"] = low + high
    if sums["kl_count"]:
        row["kl"] = sums["kl_sum"] / sums["kl_count"]
    return row


def completion_rows(
    run: TrainContext, batch: Batch, advantage_PG: np.ndarray, step: int
) -> list[dict[str, Any]]:
    """Make the rows of completions.parquet for the step's first `log_completions` completions.

    The prompts of a step are in random order, so these are completions of randomly chosen prompts.
    Every rank returns the same rows.

    Args:
        run: training run.
        batch: completions of the step.
        advantage_PG: advantages of the completions of all ranks.
        step: number of the step in the rows.
    """
    count = run.config.log_completions
    if not count:
        return []
    rollouts, size = batch.own_rollouts, batch.rewards_PG.shape[1]
    rank, world = run.accelerator.process_index, run.accelerator.num_processes
    own_rows = {}
    for place, p in enumerate(range(rank, len(batch.prompts), world)):
        prompt = rollouts.prompts[place]
        for i in range(min(size, count - p * size)):
            text = rollouts.texts_PG[place][i]
            own_rows[p * size + i] = {
                "prompt": prompt.text,
                "completion": text,
                "prompt_id": prompt.id,
                "completion_index": i,
                "length": int(rollouts.lengths_PG[place, i]),
                "ended": bool(rollouts.ended_PG[place, i]),
                "answer": prompt.answer,
                "extracted": extracted(run.task, prompt, text),
                "reward": float(batch.rewards_PG[p, i]),
                "step": step,
                "advantage": float(advantage_PG[p, i]),
            }
    rows = {number: row for share in gather_object([own_rows]) for number, row in share.items()}
    return [rows[number] for number in sorted(rows)]
