"""Held-out accuracy and pass@k of the test questions."""

from __future__ import annotations

from typing import Any

import numpy as np

from grpo_ustat.estimators.intervals import clustered_wilson
from grpo_ustat.estimators.ustatistic import pass_at_k
from grpo_ustat.rollout.local import Sampling
from grpo_ustat.train.batch import sample_batch
from grpo_ustat.train.context import Batch, TrainContext


def sample_eval(run: TrainContext, decoding: str) -> Batch:
    """Completions of all test questions: of each one greedy or `eval.num_generations` sampled.

    Draws are keyed by prompt alone, so evaluations at different steps share their randomness and
    differences between them are paired.
    """
    greedy = decoding == "greedy"
    count = 1 if greedy else run.config.eval.num_generations
    sampling = Sampling.of(run.config, "eval", greedy=greedy)
    return sample_batch(run, run.test_prompts, count, sampling)


def correct(batch: Batch) -> np.ndarray:
    """Which completions are correct, bool [P, K]: those with reward 1 by the task's own judge, the
    largest there is.
    """
    return batch.rewards_PGF[..., 0] == 1


def eval_row(step: int, decoding: str, batch: Batch, num_generations: int) -> dict[str, Any]:
    """One row of eval.csv; all rows of a run have the same keys.

    Intervals are over questions, see `clustered_wilson`; with one completion a question, Wilson's.

    Args:
        step: updates before it.
        decoding: `sampled` or `greedy`.
        batch: its completions.
        num_generations: up to which k = 2, 4, 8 ... pass@k has a column; None in a row with fewer
            completions. pass@1 is the accuracy.
    """
    correct_PK = correct(batch)
    questions, count = correct_PK.shape
    accuracy = clustered_wilson(correct_PK.mean(axis=1), most=count)
    row = {"step": step, "split": "test", "decoding": decoding, "accuracy": accuracy.estimate}
    row |= {"low": accuracy.low, "high": accuracy.high, "n": questions, "num_generations": count}
    row["clipped_ratio"] = float((~batch.ended_PG).mean())
    row["extraction_failure_ratio"] = float((~batch.answered_PG).mean())
    for k in powers_of_two(num_generations):
        values = (None, None, None)
        if k <= count:
            solved_P = pass_at_k(correct_PK.sum(axis=1), count, k)
            values = clustered_wilson(solved_P, most=count // k)
        row |= zip((f"pass@{k}", f"pass@{k}_low", f"pass@{k}_high"), values, strict=True)
    return row


def powers_of_two(most: int) -> list[int]:
    """2, 4, 8 ... up to `most`.

    >>> powers_of_two(1), powers_of_two(9)
    ([], [2, 4, 8])
    """
    return [2**i for i in range(1, most.bit_length())]
