"""Prompts of a law that is known, and pools of their completions."""

from __future__ import annotations

import math

import numpy as np
from tabular import TabularPolicy

from grpo_ustat.estimators.closed_form import Request, closed_form
from grpo_ustat.estimators.moments import centred
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.measurements.base import PoolStudy
from grpo_ustat.records import ScorePool


def prompts(count, rng, beta=(1.5, 3.5), spread=0.25, slope=1.0):
    """Score norms that differ between prompts by exp(+-2 spread), and fall with V."""
    p_P1 = rng.beta(*beta, (count, 1))
    rewards_PY = (rng.random((count, 40)) < p_P1).astype(float)
    scale_P1 = np.exp(spread * rng.normal(size=(count, 1)) - slope * p_P1)
    features = rng.normal(size=(count, 40, 8)) * np.exp(0.3 * rng.normal(size=(count, 40, 1)))
    return TabularPolicy(features * scale_P1[:, :, None], 0.5 * np.eye(8)[0], rewards_PY)


def whole_pool(scores, rewards, lengths, **more):
    """A pool [P, N] whose features and sums are those of the scores [P, N, D], in full."""
    return ScorePool(
        rewards_PN=rewards,
        gram_PNN=np.einsum("pid,pjd->pij", scores, scores),
        lengths_PN=lengths,
        features_PNR=scores,
        centred_sums_PR=np.einsum("pn,pnd->pd", centred(rewards), scores),
        **more,
    )


def study_of_pool(pool, group_sizes=(4,), rollouts=8, draws=2, seed=0, **more):
    """A pool as a study hands it to measurements, with its closed forms."""
    request = more.pop("request", Request([], {}, {}))
    population = more.pop("population", None) or closed_form(pool, request)
    return PoolStudy(
        pool, group_sizes, rollouts, draws, seed, population=population, request=request,
        **{"max_completion_length": 9} | more,
    )  # fmt: skip


def pool_with_lengths(policy, size, rng):
    """A score pool without features, of completions of 1 + y tokens."""
    outcomes, rows = policy.sample(size, rng), np.arange(len(policy.rewards_PY))[:, None]
    scores, rewards = policy.scores_PYD[rows, outcomes], policy.rewards_PY[rows, outcomes]
    gram = np.einsum("pid,pjd->pij", scores, scores)
    nothing = np.zeros((1, 1))
    return ScorePool(rewards, gram, 1 + outcomes, nothing[None], nothing, nothing)


def pool_of(policy, count, rng):
    """A score pool of tabular completions; features and sums are the scores' own, in full."""
    outcomes = policy.sample(count, rng)
    rows = np.arange(len(outcomes))[:, None]
    scores, z = policy.scores_PYD[rows, outcomes], policy.rewards_PY[rows, outcomes]
    greedy_P = policy.rewards_PY[np.arange(len(z)), policy.probabilities_PY.argmax(axis=1)]
    return whole_pool(scores, z, np.ones_like(z, dtype=int), greedy_P=greedy_P)


def truth(policy, group_sizes):
    """Exact values of what `closed_form` estimates."""
    moments, count = policy.moments(), len(policy.rewards_PY)
    grad_sq = float(np.square(policy.gradient_PD.mean(axis=0)).sum())
    result = {
        "grad_sq": grad_sq,
        "c1": moments.g_sq.mean() - grad_sq,
        "c3": (moments.d + moments.g_sq).mean(),
        "av_minus_a0": (moments.a_v - moments.a_0).mean(),
        "av_minus_abstar": (moments.cov_qz**2 / moments.m0).mean(),
        "share": (moments.cov_qz**2 / moments.m0).mean() / moments.a_v.mean(),
        "corr": moments.cov_qz.mean() / np.sqrt(moments.var_q.mean() * moments.var_z.mean()),
    }
    c2 = (moments.a_v - moments.g_sq).mean()
    result["gstar"] = 1 + np.sqrt(result["c3"] / result["c1"])
    result["gstar_tokens"] = ScalingLaw.exact(result["c1"], c2, result["c3"]).best_size(5.0, 2.0)
    result["n_mse/8"] = 8 * result["c1"] + c2 + result["c3"] / 7
    result["noise/8"] = result["n_mse/8"] / grad_sq
    result["prompt_share/8"] = 8 * result["c1"] / result["n_mse/8"]
    result["noise_tokens/8"] = (5.0 + 8 * 2.0) / 8 * result["noise/8"]
    least = result["c1"] + c2 + 2 * math.sqrt(result["c1"] * result["c3"])
    result["noise/best"] = least / grad_sq
    greedy = policy.rewards_PY[np.arange(count), policy.probabilities_PY.argmax(axis=1)]
    levels = {"optimal": moments.m1 / moments.m0, "constant": 0.4, "remax": greedy}
    for size in group_sizes:
        for name in ("none", "leave_one_out", "oracle"):
            result[f"mse/{name}/{size}"] = moments.mse(name, size).mean() / count
        for name, b in levels.items():
            a_b = moments.a_0 - 2 * b * moments.m1 + b**2 * moments.m0
            result[f"mse/{name}/{size}"] = ((a_b - moments.g_sq) / size).mean() / count
        shrink = (size - 1) / size
        loo = result[f"mse/leave_one_out/{size}"]
        result[f"mse/group_mean/{size}"] = shrink**2 * loo + grad_sq / size**2
    return result
