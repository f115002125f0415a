"""Monte Carlo estimates as in the paper: squared distances of gradients to a reference gradient.

One replicate r is one gradient estimate ghat_r. For each question, it draws fresh rollouts for a
group of the largest size. This group is also split into disjoint groups of the smaller sizes, so
the errors of all baselines and sizes are computed from the same rollouts. The reference gradient is
the mean of H independent gradients ref_h (blocks), from a separate random stream. Then

    MSE    = mean_r ||ghat_r||^2 - 2 mean_{r,h} <ghat_r, ref_h> + mean_{h != k} <ref_h, ref_k>
    bias^2 = mean_{r != s} <ghat_r, ghat_s> - (the same cross term) + (the same last term)

A mean over two different indices leaves out the product of a vector with itself. So noise in the
reference does not bias the estimate of the MSE, and noise in the reference or in the replicates
does not bias the estimate of bias^2. Both estimates can be slightly negative.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_ustat.config.parts import StudySampling
from grpo_ustat.config.study import StudyBudget
from grpo_ustat.distributed.ranks import one_on_each_gpu
from grpo_ustat.distributed.workers import WorkCost, share
from grpo_ustat.estimators.baselines import (
    BASELINES,
    OF_THE_BATCH,
    advantages,
    best_constant,
    weighted_sum,
)
from grpo_ustat.estimators.intervals import jackknife_variance, positive_interval
from grpo_ustat.estimators.minibatch import GradientError, scale_free
from grpo_ustat.estimators.moments import norm_moments, pool_gradient_weights
from grpo_ustat.mse.pool import greedy_rewards_with_cost, reward_completions, sample_with_cost
from grpo_ustat.mse.sampler import start_sampler
from grpo_ustat.mse.scoring import rows_that_fit
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.scores.backward import parameter_sizes
from grpo_ustat.policy.scores.rollouts import score_rollouts
from grpo_ustat.policy.scores.sketch import Sketch
from grpo_ustat.records import BaselineContext, Prompt, Rollouts
from grpo_ustat.rollout.local import Sampling
from grpo_ustat.terminal.progress import Progress

# Maximum number of completions to score in one batch.
MAX_ROWS = 512
# Size of gradient sketches, a prime number; gradients of smaller models are stored completely.
SKETCH_SIZE = 262139


@dataclass(frozen=True)
class _Reference:
    """Reference gradient in H blocks, and inputs for the baselines."""

    blocks_HD: np.ndarray
    context: BaselineContext
    # Correction for the estimated V of the oracle; see `_value_excess`.
    excess: float


@dataclass(frozen=True)
class _Replicates:
    """Replicates of one worker, keyed by baseline and group size.

    Stored are the squared norms of the gradients, their inner products with the H blocks, and their
    sum.
    """

    squared: dict[tuple[str, int], list[float]]
    products_H: dict[tuple[str, int], list[np.ndarray]]
    sums_D: dict[tuple[str, int], np.ndarray]


def monte_carlo(
    sampling: StudySampling,
    budget: StudyBudget,
    options: Mapping[str, Mapping[str, float]],
    group_sizes: Sequence[int],
    prompts: list[Prompt],
) -> tuple[dict[tuple[str, int], GradientError], WorkCost]:
    """Estimate the error of each baseline and group size from `budget.replicates` replicates.

    Args:
        sampling: Sampling settings for all processes.
        options: Options by baseline name.

    Returns:
        Errors, keyed by baseline and group size, and the cost.
    """
    needs = frozenset().union(*(BASELINES[name].needs for name in options))
    reference, reference_cost = _reference(sampling, budget, needs, prompts)
    total = budget.replicates * max(group_sizes) * len(prompts)
    workers = one_on_each_gpu(sampling.workers, sampling.policy.device)
    parts, cost = share(
        _replicate, list(range(budget.replicates)), workers, "replicates", total, sampling,
        options, group_sizes, prompts, reference.blocks_HD, reference.context,
    )  # fmt: skip
    gram_HH = reference.blocks_HD @ reference.blocks_HD.T
    curves = {}
    for name, size in itertools.product(options, group_sizes):
        key, sum_D = (name, size), np.zeros(reference.blocks_HD.shape[1])
        for part in parts:
            sum_D += part.sums_D[key]
        squared_R = np.concatenate([part.squared[key] for part in parts])
        products_RH = np.concatenate([part.products_H[key] for part in parts])
        excess = reference.excess / size if BASELINES[name].needs_value else 0.0
        curves[key] = curve(squared_R, products_RH, gram_HH, float(sum_D @ sum_D), excess)
    return curves, reference_cost + cost


def _reference(
    sampling: StudySampling, budget: StudyBudget, needs: frozenset[str], prompts: list[Prompt]
) -> tuple[_Reference, WorkCost]:
    cost, context = WorkCost(), BaselineContext()
    if needs - OF_THE_BATCH:
        each = budget.value_completions + ("greedy_P" in needs)
        (context,), cost = share(
            _context, [prompts], 1, "values", len(prompts) * each, sampling,
            budget.value_completions, needs,
        )  # fmt: skip
    workers = one_on_each_gpu(sampling.workers, sampling.policy.device)
    parts, block_cost = share(
        _blocks, list(range(budget.reference_blocks)), workers, "reference",
        len(prompts) * budget.reference_completions, sampling,
        budget.reference_completions // budget.reference_blocks, prompts,
    )  # fmt: skip
    parts.sort(key=lambda part: part[0])
    value_P = np.zeros(len(prompts)) if context.value_P is None else context.value_P
    excess = np.mean([_value_excess(q_PN, z_PN, value_P) for _, _, q_PN, z_PN in parts])
    blocks_HD = np.array([part[1] for part in parts])
    return _Reference(blocks_HD, context, float(excess)), cost + block_cost


def _value_excess(q_PN: np.ndarray, rewards_PN: np.ndarray, value_P: np.ndarray) -> float:
    """Estimate the extra squared error from an estimate v in place of V, 1/P^2 sum_x (A_v - A_V).

    The estimate is unbiased given v, because the reference completions are independent of v. If v
    is computed from K completions per prompt, the expected extra error is proportional to 1/K.
    """
    # The third argument, ||g||^2, is not used here.
    moments = norm_moments(q_PN, rewards_PN, np.zeros(len(q_PN)))
    a_v_hat = moments.a_0 - 2 * value_P * moments.m1 + value_P**2 * moments.m0
    return float((a_v_hat - moments.a_v).mean() / len(value_P))


def _context(
    items: list[list[Prompt]], sampling: StudySampling, size: int, needs: frozenset[str]
) -> Iterator:
    """Estimate from separate completions the baseline inputs that do not come from the group.

    The running mean is set to the mean reward over all questions, to which it converges if the
    policy does not change. The oracle uses an estimate of V, and the extra error of this estimate
    is subtracted later. The estimate of b* (best baseline of a prompt) is used without such a
    correction.
    """
    policy, engine, task = start_sampler(sampling)
    sampler = sampling.sampler
    for prompts in items:
        rollouts, cost = sample_with_cost(engine, prompts, size, Sampling.of(sampler, "value"))
        z_PKF, judge_cost = reward_completions(task, rollouts)
        z_PK = weighted_sum(z_PKF, task.reward_weights_F)
        yield cost + judge_cost + WorkCost(rollouts=len(prompts) * size)
        optimal_P, greedy_P = None, None
        if "optimal_P" in needs:
            no_weights = np.zeros((1, *z_PK.shape))
            _, q_PK = _gradients(policy, rollouts, no_weights, sampler.temperature)
            optimal_P = best_constant(q_PK, z_PK)
        if "greedy_P" in needs:
            greedy_P, cost = greedy_rewards_with_cost(sampler, engine, task, prompts)
            yield cost
        yield BaselineContext(
            value_P=z_PK.mean(axis=1),
            running=float(z_PK.mean()),
            optimal_P=optimal_P,
            greedy_P=greedy_P,
        )


def _blocks(
    items: list[int], sampling: StudySampling, size: int, prompts: list[Prompt]
) -> Iterator:
    policy, engine, task = start_sampler(sampling)
    temperature, draws = sampling.sampler.temperature, Sampling.of(sampling.sampler, "reference")
    for h in items:
        rollouts, cost = sample_with_cost(engine, prompts, size, draws, first=h * size)
        start = time.perf_counter()
        rewards_PNF, judge_cost = reward_completions(task, rollouts)
        rewards_PN = weighted_sum(rewards_PNF, task.reward_weights_F)
        weights_PN = pool_gradient_weights(rewards_PN) / len(prompts)
        gradient, q_PN = _gradients(policy, rollouts, weights_PN[None], temperature)
        scored = WorkCost(rollouts=len(prompts) * size, seconds_score=time.perf_counter() - start)
        yield cost + judge_cost + scored
        yield h, gradient[0], q_PN, rewards_PN


def _gradients(
    policy: Policy, rollouts: Rollouts, weights_CPG: np.ndarray, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """Compute C weighted sums of scores, and the squared norm of each score.

    For a model with more than 262 139 parameters, each sum is replaced by an unbiased sketch with
    262 139 numbers. The error of an inner product is then about 0.2 % of the product of the norms.

    Returns:
        `sum_{p,i} w_cpi s_pi` for every c, as a float64 array [C, D], and squared norms [P, G].
    """
    count, size = rollouts.mask_PGT.shape[:2]
    sketch = Sketch(parameter_sizes(policy.model), SKETCH_SIZE)
    total_CD, squared = np.zeros((len(weights_CPG), sketch.dimension)), []
    tokens = max(map(len, rollouts.prompt_tokens)) + rollouts.mask_PGT.shape[-1]
    per_call = max(1, min(MAX_ROWS, rows_that_fit(policy, tokens) // 4) // size)
    progress = Progress("scoring", count * size)
    for start in range(0, count, per_call):
        prompts = np.arange(start, min(start + per_call, count))
        index = (prompts[:, None] * size + np.arange(size)).ravel()
        weights = weights_CPG[:, prompts].reshape(len(weights_CPG), -1)
        scores = score_rollouts(
            policy, rollouts, index, temperature, weights_KB=weights, pooled=sketch
        )
        # `pooled_KR` is set because `pooled` was given.
        assert scores.pooled_KR is not None
        total_CD += scores.pooled_KR.cpu().numpy()
        squared.append(scores.sq_norm_B.cpu().numpy().reshape(-1, size))
        progress.add(len(index))
    return total_CD, np.concatenate(squared)


def _replicate(
    items: list[int],
    sampling: StudySampling,
    options: Mapping[str, Mapping[str, float]],
    group_sizes: Sequence[int],
    prompts: list[Prompt],
    blocks_HD: np.ndarray,
    context: BaselineContext,
) -> Iterator:
    policy, engine, task = start_sampler(sampling)
    largest, draws = max(group_sizes), Sampling.of(sampling.sampler, "replicate")
    keys = [(name, size) for name in options for size in group_sizes]
    result = _Replicates(
        squared={key: [] for key in keys},
        products_H={key: [] for key in keys},
        sums_D={key: np.zeros(blocks_HD.shape[1]) for key in keys},
    )
    for r in items:
        rollouts, cost = sample_with_cost(engine, prompts, largest, draws, step=r)
        began = time.perf_counter()
        rewards_PGF, judge_cost = reward_completions(task, rollouts)
        rewards_PG = weighted_sum(rewards_PGF, task.reward_weights_F)
        group_context = replace(
            context,
            lengths_PG=rollouts.lengths_PG,
            # A study has no earlier training steps.
            history=np.zeros((2, 3)),
            rewards_PGF=rewards_PGF,
            reward_weights_F=task.reward_weights_F,
        )
        weights = {
            (name, size): group_weights(rewards_PG, name, size, group_context, options[name])
            for name, size in keys
        }
        stacked = np.concatenate(list(weights.values()))
        gradients_CD, _ = _gradients(policy, rollouts, stacked, sampling.sampler.temperature)
        products_CH, squared_C = gradients_CD @ blocks_HD.T, np.square(gradients_CD).sum(axis=1)
        start = 0
        for key in keys:
            rows = slice(start, start + len(weights[key]))
            result.squared[key].extend(squared_C[rows])
            result.products_H[key].extend(products_CH[rows])
            result.sums_D[key] = result.sums_D[key] + gradients_CD[rows].sum(axis=0)
            start = rows.stop
        seconds = time.perf_counter() - began
        cost += judge_cost + WorkCost(seconds_score=seconds)
        yield cost + WorkCost(rollouts=len(prompts) * largest)
    yield result


def group_weights(
    rewards_PL: np.ndarray,
    baseline: str,
    group_size: int,
    context: BaselineContext,
    options: Mapping[str, float],
) -> np.ndarray:
    """Compute the weights of completions in gradient estimates from disjoint groups of size G.

    Args:
        rewards_PL: Rewards of L completions for each of P prompts.
        context: Inputs of the baseline; `lengths_PG` and `rewards_PGF` cover all L completions.

    Returns:
        Weights as an array [L // G, P, L], with one estimate per row. Weights of completions
        outside the group of an estimate are 0.
    """
    prompts, largest = rewards_PL.shape
    groups = largest // group_size
    weights = np.zeros((groups, prompts, largest))
    for k in range(groups):
        inside = slice(k * group_size, (k + 1) * group_size)
        of_group = {
            key: None if (all_PL := getattr(context, key)) is None else all_PL[:, inside]
            for key in ("lengths_PG", "rewards_PGF")
        }
        group_context = replace(context, **of_group)
        advantage_PG = advantages(baseline, rewards_PL[:, inside].copy(), group_context, options)
        weights[k, :, inside] = advantage_PG / (group_size * prompts)
    return weights


def curve(
    squared_R: np.ndarray,
    products_RH: np.ndarray,
    gram_HH: np.ndarray,
    sum_sq: float,
    excess: float = 0.0,
) -> GradientError:
    """Compute MSE, bias^2 and variance from R replicates and H reference blocks.

    Args:
        squared_R: Squared norms, ||ghat_r||^2.
        products_RH: Inner products <ghat_r, ref_h>.
        gram_HH: Inner products <ref_h, ref_k>.
        sum_sq: Squared norm of the sum, ||sum_r ghat_r||^2.
        excess: Extra error from using an estimate of V; it is subtracted from the MSE.
    """
    count, grad_sq = len(squared_R), _off_diagonal(gram_HH)
    cross = float(products_RH.mean())
    mse = float(squared_R.mean()) - 2 * cross + grad_sq - excess
    bias2 = (sum_sq - squared_R.sum()) / (count * (count - 1)) - 2 * cross + grad_sq
    cross_H = products_RH.mean(axis=0)
    others_H = [np.delete(np.arange(len(cross_H)), h) for h in range(len(cross_H))]
    delete_one_H = np.array(
        [-2 * cross_H[k].mean() + _off_diagonal(gram_HH[np.ix_(k, k)]) for k in others_H]
    )
    block_variance = float(jackknife_variance(delete_one_H))
    replicate_variance = float((squared_R - 2 * products_RH.mean(axis=1)).var(ddof=1) / count)
    parts = np.array(
        [block_variance / (len(gram_HH) - 1) ** 0.5, replicate_variance / (count - 1) ** 0.5]
    )
    dof = (block_variance + replicate_variance) ** 2 / max(
        float(parts @ parts), np.finfo(float).tiny
    )
    cosine, best = scale_free(float(squared_R.mean()) - excess, cross, grad_sq)
    return GradientError(
        mse=positive_interval(mse, block_variance + replicate_variance, max(dof, 1.0)),
        bias2=float(bias2),
        variance=mse - float(bias2),
        cosine=cosine,
        best_scalar_mse=best,
        draws=count,
    )


def _off_diagonal(gram_HH: np.ndarray) -> float:
    count = len(gram_HH)
    return float((gram_HH.sum() - np.trace(gram_HH)) / (count * (count - 1)))
