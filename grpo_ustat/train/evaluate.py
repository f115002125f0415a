"""Evaluation on test questions: accuracy and pass@k, or the mean reward.

The mean reward is used if some rewards are neither 0 nor 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from grpo_ustat.estimators.intervals import (
    Interval,
    clustered_wilson,
    matched_difference,
    mean_reward,
    paired_difference,
    quantity,
)
from grpo_ustat.estimators.ustatistic import pass_at_k
from grpo_ustat.records import ACCURACY, MEAN_REWARD, joint_quantity
from grpo_ustat.rollout.local import Sampling
from grpo_ustat.train.batch import sample_batch
from grpo_ustat.train.context import Batch, TrainContext, TrainProgress


def sample_eval(run: TrainContext, decoding: str) -> Batch:
    """Sample one greedy completion or `eval.num_generations` completions per test question.

    The random numbers of a prompt are the same in evaluations at different steps. This makes their
    differences more precise.
    """
    greedy = decoding == "greedy"
    count = 1 if greedy else run.config.eval.num_generations
    sampling = Sampling.of(run.config.sampler_options, "eval", greedy=greedy)
    return sample_batch(run, run.test_prompts, count, sampling)


def eval_row(step: int, decoding: str, batch: Batch, num_generations: int) -> dict[str, Any]:
    """Make one row of eval.csv; all rows of a run have the same keys.

    Only the reward of the task itself is used, without further reward functions. Intervals cover
    the variation from drawing other questions. There are columns pass@k for k = 2, 4, 8, ...
    (pass@1 is the accuracy). They are None in two cases: if a question has fewer than k
    completions, and if some rewards are neither 0 nor 1, because such rewards do not say which
    answers are correct.

    Args:
        step: number of training steps before the evaluation.
        decoding: `sampled` or `greedy`.
        batch: completions of the evaluation.
        num_generations: largest k of the columns pass@k.
    """
    rewards_PK = batch.rewards_PGF[..., 0]
    questions, count = rewards_PK.shape
    mean, name = mean_reward(rewards_PK), quantity(rewards_PK)
    row = {"step": step, "split": "test", "decoding": decoding, "quantity": name}
    row |= {"mean_reward": mean.estimate, "low": mean.low, "high": mean.high}
    row |= {"n": questions, "num_generations": count}
    row["clipped_ratio"] = float((~batch.ended_PG).mean())
    row["extraction_failure_ratio"] = float((~batch.answered_PG).mean())
    for k in powers_of_two(num_generations):
        values = (None, None, None)
        if k <= count and name == ACCURACY:
            solved_P = pass_at_k(rewards_PK.sum(axis=1).astype(int), count, k)
            values = clustered_wilson(solved_P, most=count // k)
        row |= zip((f"pass@{k}", f"pass@{k}_low", f"pass@{k}_high"), values, strict=True)
    return row


def name_jointly(rows: list[dict[str, Any]]) -> None:
    """Use the same quantity, accuracy or mean reward, for all evaluations of a run.

    If any evaluation has a reward other than 0 and 1, the quantity is the mean reward for all
    evaluations, earlier ones included.
    """
    if joint_quantity(row["quantity"] for row in rows) == MEAN_REWARD:
        for row in rows:
            row |= {"quantity": MEAN_REWARD}
            row |= {name: None for name in row if name.startswith("pass@")}


def held_out_gain(progress: TrainProgress) -> Interval:
    """Return the mean reward in the last evaluation minus that in the first, paired by question.

    Both evaluations are those with the first of the decodings in `eval.decoding`. The interval is
    `matched_difference` for accuracies and `paired_difference` for mean rewards.
    """
    names = (row["quantity"] for row in progress.evals)
    difference = matched_difference if joint_quantity(names) == ACCURACY else paired_difference
    return difference(np.array(progress.rewards_last), np.array(progress.rewards_first))


def powers_of_two(most: int) -> list[int]:
    """Return 2, 4, 8 ... up to `most`.

    >>> powers_of_two(1), powers_of_two(9)
    ([], [2, 4, 8])
    """
    return [2**i for i in range(1, most.bit_length())]
