"""Sampling of a step's completions on all ranks, and of what a baseline needs besides rewards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from accelerate.utils import gather_object

from grpo_ustat.estimators.baselines import BASELINES, best_constant
from grpo_ustat.policy.scores.rollouts import score_rollouts
from grpo_ustat.records import BaselineContext, Prompt, Rollouts
from grpo_ustat.rollout.local import Sampling
from grpo_ustat.tasks.base import answered, rewards, summed_rewards
from grpo_ustat.train.context import Batch, SamplingCost, TrainContext


def gather_by_prompt(own_rows: Iterable[Any]) -> list[Any]:
    """Gather one entry per prompt from all ranks; every rank receives all, in prompt order.

    Args:
        own_rows: entries of this rank's prompts. Rank r of w ranks has `prompts[r::w]`.
    """
    shares = gather_object([list(own_rows)])
    rows: list[Any] = [None] * sum(map(len, shares))
    for rank, share in enumerate(shares):
        rows[rank :: len(shares)] = share
    return rows


def sample_batch(
    run: TrainContext, prompts: list[Prompt], count: int, sampling: Sampling, step: int = 0
) -> Batch:
    """Sample `count` completions of each prompt and compute their rewards.

    Each rank samples completions of its share of the prompts, which may be empty. Then all ranks
    receive the rewards and lengths of all completions.
    """
    own_prompts = prompts[run.accelerator.process_index :: run.accelerator.num_processes]
    rollouts, rows = None, []
    if own_prompts:
        rollouts = run.engine.sample(own_prompts, count, sampling, step=step)
        rows = zip(
            rewards(run.task, rollouts), rollouts.lengths_PG, rollouts.ended_PG,
            answered(run.task, rollouts), map(len, rollouts.prompt_tokens), strict=True,
        )  # fmt: skip
    columns = map(np.array, zip(*gather_by_prompt(rows), strict=True))
    return Batch(prompts, rollouts, *columns, reward_weights_F=run.task.reward_weights_F)


def sample_extra(
    run: TrainContext, prompts: list[Prompt], count: int, step: int, greedy: bool = False
) -> tuple[Rollouts | None, SamplingCost]:
    """Sample additional completions, from which a baseline is computed.

    Args:
        run: training run.
        prompts: prompts of this rank; may be empty.
        count: number of completions per prompt.
        step: number of the step, which determines the random draws.
        greedy: True for greedy decoding, False for sampling.

    Returns:
        Completions of this rank's prompts (None if there are no prompts), and the cost of sampling
        summed over ranks.
    """
    rollouts, cost = None, (0, 0)
    if prompts:
        sampling = Sampling.of(
            run.config.sampler_options, "greedy" if greedy else "value", greedy=greedy
        )
        rollouts = run.engine.sample(prompts, count, sampling, step=step)
        cost = (len(prompts) * count, int(rollouts.lengths_PG.sum()))
    totals = (sum(column) for column in zip(*gather_object([cost]), strict=True))
    return rollouts, SamplingCost(*totals)


def baseline_context(
    run: TrainContext, batch: Batch, step: int
) -> tuple[BaselineContext, SamplingCost]:
    """Return what the baseline needs besides rewards, for all prompts, and the sampling cost."""
    needs = BASELINES[run.config.baseline.name].needs
    fields, cost = run.baseline_state.context(run, batch), SamplingCost()
    if "lengths_PG" in needs:
        fields["lengths_PG"] = batch.lengths_PG
    if "rewards_PGF" in needs:
        fields["rewards_PGF"] = batch.rewards_PGF
        fields["reward_weights_F"] = batch.reward_weights_F
    prompts, count = batch.own_rollouts.prompts, run.config.budget.value_completions
    for name in ("greedy_P", "value_P", "optimal_P"):
        if name not in needs:
            continue
        greedy = name == "greedy_P"
        rollouts, cost = sample_extra(run, prompts, 1 if greedy else count, step, greedy=greedy)
        # Every rank has at least one prompt in each step.
        assert rollouts is not None
        if name == "optimal_P":
            own_P = optimal_baseline(run, rollouts)
        else:
            own_P = summed_rewards(run.task, rollouts).mean(axis=1)
        fields[name] = np.array(gather_by_prompt(own_P))
    return BaselineContext(**fields), cost


def optimal_baseline(run: TrainContext, rollouts: Rollouts) -> np.ndarray:
    """Compute the baseline with the smallest variance for each of this rank's prompts.

    It is `b* = sum q z / sum q`, a sum over the prompt's completions. z is the reward, and q is the
    squared norm of the score (the gradient of the log-probability). If all q are 0, b* is 0.
    """
    count = rollouts.lengths_PG.size
    longest = max(map(len, rollouts.prompt_tokens)) + rollouts.mask_PGT.shape[-1]

    def squared_norms() -> np.ndarray:
        """Compute q for all completions, a few at a time so that they fit the token budget."""
        size = max(1, run.token_budget.tokens // longest)
        parts = np.split(np.arange(count), range(size, count, size))
        scores = (
            score_rollouts(run.policy, rollouts, part, run.config.temperature) for part in parts
        )
        return np.concatenate([part.sq_norm_B.cpu().numpy() for part in scores])

    q_N = run.token_budget.attempt(squared_norms)
    return best_constant(q_N.reshape(rollouts.lengths_PG.shape), summed_rewards(run.task, rollouts))
