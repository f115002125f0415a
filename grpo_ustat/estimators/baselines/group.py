"""Baselines that read only the rewards of the completion's own group.

In the formulas, A_i is the advantage of completion i, r_i its reward, L_i its length and s_i its
score. The mean reward of the group is rbar. For a prompt x, V is the expected reward, sigma the std
of the rewards and g the gradient of V.
"""

from __future__ import annotations

import math

import numpy as np

from grpo_ustat.estimators.baselines.base import UnfitRewards, quotient, require
from grpo_ustat.estimators.baselines.registry import baseline
from grpo_ustat.estimators.moments import centred
from grpo_ustat.records import Array, BaselineContext

# Differences of shares or variances below this value count as rounding errors.
ROUNDING = 1e-12


@baseline(
    "The paper's GRPO: reward minus the mean reward of the group's other completions. Unbiased.",
    unbiased=True, min_group_size=2,
)  # fmt: skip
def leave_one_out(rewards_PG: Array, context: BaselineContext) -> Array:
    """Subtract the mean of the other rewards: `A_i = r_i - sum_{j != i} r_j / (G-1)`.

    This is the paper's GRPO (Lemma 1), also known as RLOO (Kool et al. 2019). The estimate is
    unbiased because the baseline of completion i is independent of the score of i, whose mean is
    zero.

    >>> leave_one_out(np.array([[1.0, 0.0, 0.0]]), BaselineContext()).tolist()
    [[1.0, -0.5, -0.5]]
    """
    group_size = rewards_PG.shape[-1]
    others = rewards_PG.sum(axis=-1, keepdims=True) - rewards_PG
    return rewards_PG - others / (group_size - 1)


@baseline(
    "Reward minus the group mean: (G-1)/G times leave_one_out. Biased, because the estimate is too "
    "short.",
    unbiased=False, min_group_size=2,
)  # fmt: skip
def group_mean(rewards_PG: Array, context: BaselineContext) -> Array:
    """Subtract the group mean: `A_i = r_i - rbar`.

    This is Dr. GRPO (Zichen Liu et al. 2025, arXiv 2503.20783). For the same completions, the
    estimate is (G-1)/G times the estimate of `leave_one_out`. Its expected direction is therefore
    right, but its expected length is too small. This shrinkage alone can make its MSE smaller than
    the MSE of unbiased baselines.

    >>> group_mean(np.array([[1.0, 0.0, 0.0, 0.0]]), BaselineContext()).tolist()
    [[0.75, -0.25, -0.25, -0.25]]
    """
    return rewards_PG - np.mean(rewards_PG, axis=-1, keepdims=True)


@baseline(
    "GRPO as published: (reward - group mean) / (group std with divisor G-1 + epsilon). Biased: "
    "for large G, the gradient g of a prompt is divided by sigma, the std of its rewards. With 0/1 "
    "rewards, g/sigma is the gradient of E[2 arcsin sqrt V], where V is the success rate.",
    unbiased=False, min_group_size=2, target="g_over_sigma",
)  # fmt: skip
def group_std(rewards_PG: Array, context: BaselineContext, *, epsilon: float = 1e-4) -> Array:
    """Divide by the group's std: GRPO (Shao et al. 2024), `A_i = (r_i - rbar) / (std + epsilon)`.

    The std has divisor G-1. The estimate is biased: for large groups its mean for each prompt
    converges to g(x) / sigma(x). For 0/1 rewards this limit is the gradient of E[2 arcsin sqrt V].
    epsilon is 1e-4 in TRL, 1e-6 in verl and 1e-9 in OpenRLHF. These libraries use the std with
    divisor G-1; GRPO-Zero uses divisor G.

    >>> group_std(np.array([[2.0, 0.0, 1.0]]), BaselineContext(), epsilon=1.0).tolist()
    [[0.5, -0.5, 0.0]]
    """
    centred_PG = centred(rewards_PG)
    return quotient(centred_PG, centred_PG.std(axis=1, ddof=1, keepdims=True) + epsilon)


@baseline(
    "group_std minus its bias of order 1/G, estimated by the jackknife; needs groups of 3 or more. "
    "Biased: a difference of order 1/G^2 from g/sigma remains; see group_std.",
    unbiased=False, min_group_size=3, target="g_over_sigma",
)  # fmt: skip
def group_std_jackknife(
    rewards_PG: Array, context: BaselineContext, *, epsilon: float = 1e-4
) -> Array:
    """Return `group_std` minus its jackknife estimate of the bias.

    The jackknife replaces an estimate N by `G N - (G-1) mean_k N^(-k)`, where N^(-k) is the
    estimate from the group without completion k. Let A^(all) be the advantages of `group_std` in
    the whole group and A^(-k) those in the group without completion k. The corrected advantages
    are

        A_i = G A_i^(all) - sum_{k != i} A_i^(-k)

    As with `group_std`, the mean converges to g/sigma, but the bias is of order 1/G^2 instead of
    1/G. If rewards rarely differ within a group, zero-variance groups add to the bias. The variance
    is `(1 + O(1/G))` times the variance of `group_std`. We know of no publication of this baseline;
    the jackknife is from Quenouille (1956).

    >>> z = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    >>> group_std_jackknife(z, BaselineContext(), epsilon=0.0).round(3).tolist()
    [[2.05, -1.025, -1.025], [0.0, 0.0, 0.0]]
    """
    size = rewards_PG.shape[1]
    result = size * group_std(rewards_PG, context, epsilon=epsilon)
    for k in range(size):
        kept = [i for i in range(size) if i != k]
        result[:, kept] -= group_std(rewards_PG[:, kept], context, epsilon=epsilon)
    return result


@baseline(
    "(reward - mean of the others) / (std of the others + epsilon), where the others are the other "
    "completions of the group; needs groups of 3 or more. Its direction is exact for each prompt. "
    "With a small epsilon, it is very large if all other rewards are equal.",
    unbiased=False, min_group_size=3, target="g_over_sigma",
)  # fmt: skip
def leave_one_out_std(
    rewards_PG: Array, context: BaselineContext, *, epsilon: float = 0.1
) -> Array:
    """Return `A_i = (r_i - mean of the others) / (std of the others + epsilon)`.

    "The others" are the other G-1 rewards of the group; their std has divisor G-2. Only r_i depends
    on completion i. The estimate's expectation for a prompt is therefore a multiple of g, namely
    `g E[1 / (std of G-1 rewards + epsilon)]`. The direction is exact for each prompt, but the
    factor differs between prompts. If all other rewards are equal and r_i differs from them, the
    difference is divided by epsilon only. The variance that such groups cause grows like
    `1/epsilon^2`, so epsilon must not be small. We know of no published baseline that also leaves
    the completion out of the std.

    >>> z = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    >>> leave_one_out_std(z, BaselineContext(), epsilon=0.5).round(3).tolist()
    [[2.0, -0.414, -0.414], [0.0, 0.0, 0.0]]
    """
    size = rewards_PG.shape[1]
    result = np.empty_like(rewards_PG)
    for i in range(size):
        others_PG = np.delete(rewards_PG, i, axis=1) - rewards_PG[:, i : i + 1]
        spread_P = (others_PG - others_PG[:, :1]).std(axis=1, ddof=1)
        result[:, i] = quotient(-others_PG.mean(axis=1), spread_P + epsilon)
    return result


@baseline(
    "QAE: (reward - quantile of the group's rewards) / (group std + epsilon). Biased.",
    unbiased=False, min_group_size=2, target="g_over_sigma",
)  # fmt: skip
def quantile(
    rewards_PG: Array, context: BaselineContext, *, level: float = 0.4, epsilon: float = 1e-4
) -> Array:
    """Subtract a quantile of the group's rewards: `A_i = (r_i - Q_K) / (std + epsilon)`.

    This is QAE (Junkang Wu et al. 2025, arXiv 2509.22611). Q_K is the smallest reward such that at
    least a share K = `level` of the group is at or below it. For 0/1 rewards, Q_K is 0 if at most a
    share 1 - K of the group is right (has reward 1); only right completions then have a nonzero
    advantage. Otherwise Q_K is 1, and only wrong completions have a nonzero advantage. The estimate
    is biased because Q_K depends on the completion's reward.

    For large groups the mean converges to g/(sigma + epsilon), as with `group_std`, for any K and
    any rewards. The choice of K does not matter in the limit, because the same Q_K multiplies every
    score of the group and the mean of the scores converges to 0. The mean converges at the rate
    1/sqrt(G) if V = 1 - K, because Q_K then remains random, and at the rate 1/G otherwise.

    The paper specifies neither the divisor of the std nor the kind of quantile for rewards between
    0 and 1, and the authors' code was not available. We chose divisor G-1, as in `group_std`, and
    the quantile described above.

    >>> z = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    >>> quantile(z, BaselineContext(), level=0.4, epsilon=0.5).tolist()
    [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, -1.0]]
    """
    size = rewards_PG.shape[1]
    place = max(0, math.ceil(level * size - ROUNDING) - 1)
    base_P1 = np.sort(rewards_PG, axis=1)[:, place : place + 1]
    spread_P1 = centred(rewards_PG).std(axis=1, ddof=1, keepdims=True)
    return quotient(rewards_PG - base_P1, spread_P1 + epsilon)


@baseline(
    "PODS: group_std, applied only to the completions whose rewards vary most. Biased.",
    unbiased=False, min_group_size=2, target="kept_part",
)  # fmt: skip
def pods(
    rewards_PG: Array, context: BaselineContext, *, share: float = 0.25, epsilon: float = 1e-4
) -> Array:
    """Apply `group_std` to a part of the group: PODS, max-variance (Xu et al. 2025).

    The source is arXiv 2504.13818. PODS keeps m of the G completions, where m is `share` G,
    rounded, and at least 2. It chooses the m completions whose rewards have the largest variance.
    They always consist of some with the largest rewards and some with the smallest. The other
    completions have advantage 0. Advantages are normalised within the kept part and multiplied by
    G/m, so that the estimate is a mean over the kept part. Among equal rewards, the first ones are
    kept. Among parts with equal variance, the part with the fewest large rewards is kept. The
    estimate is biased because the choice of completions depends on their rewards.

    The limit for large groups has a simple form for 0/1 rewards. Let rho be the share of right
    completions in the kept part. If right and wrong completions can each fill half of the part, rho
    is 1/2; otherwise it is V/share or 1 - (1-V)/share. Because E[s | right] = g/V and
    E[s | wrong] = -g/(1-V), the mean for epsilon = 0 converges to

        g sqrt(rho (1-rho)) / (V (1-V))

    This limit is g / (2 V (1-V)) if rho = 1/2, and g / sigma if share = 1. For other rewards the
    limit is not a multiple of g.

    >>> z = np.array([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    >>> (pods(z, BaselineContext(), share=0.5, epsilon=0.0) / 2).round(3).tolist()  # G/m = 2
    [[1.155, 0.0, -0.577, -0.577, 0.0, 0.0]]
    """
    size = rewards_PG.shape[1]
    kept = min(size, max(2, round(share * size)))
    order_PG = np.argsort(rewards_PG, axis=1, kind="stable")
    falling_PG = np.argsort(-rewards_PG, axis=1, kind="stable")
    parts_KPM = np.stack([
        np.concatenate([falling_PG[:, :large], order_PG[:, : kept - large]], axis=1)
        for large in range(kept + 1)
    ])  # fmt: skip
    variance_KP = np.stack([
        centred(np.take_along_axis(rewards_PG, part_PM, axis=1)).var(axis=1)
        for part_PM in parts_KPM
    ])  # fmt: skip
    most_KP = variance_KP >= variance_KP.max(axis=0) * (1 - ROUNDING) - ROUNDING
    place_1P1 = most_KP.argmax(axis=0)[None, :, None]
    part_PM = np.take_along_axis(parts_KPM, place_1P1, axis=0)[0]
    inside_PM = np.take_along_axis(rewards_PG, part_PM, axis=1)
    result = np.zeros_like(rewards_PG)
    scaled_PM = group_std(inside_PM, context, epsilon=epsilon) * size / kept
    np.put_along_axis(result, part_PM, scaled_PM, axis=1)
    return result


@baseline(
    "MaxRL: (reward - group mean) / (group mean + epsilon). Biased: for large G, the gradient g of "
    "a prompt is divided by its expected reward V; g/V is the gradient of E[log V].",
    unbiased=False, min_group_size=2, target="g_over_v",
)  # fmt: skip
def maxrl(rewards_PG: Array, context: BaselineContext, *, epsilon: float = 1e-6) -> Array:
    """Divide by the group's mean: `A_i = (r_i - rbar) / (rbar + epsilon)`.

    This is MaxRL (arXiv 2602.02710). All advantages are 0 if every reward is 0. The estimate is
    biased: for large groups its mean converges to g(x) / V(x), the gradient of E[log V]. For 0/1
    rewards and epsilon = 0 the mean is exactly `(1 - (1-V)^(G-1)) / V` times g(x). This is the
    gradient of the power series of log V in 1 - V, truncated after G - 1 terms.

    Raises:
        UnfitRewards: a reward is negative, so that rbar could be 0 or negative.

    >>> maxrl(np.array([[1.0, 0.0], [0.0, 0.0]]), BaselineContext(), epsilon=0.0).tolist()
    [[1.0, -1.0], [0.0, 0.0]]
    """
    if rewards_PG.min() < 0:
        raise UnfitRewards(
            f"baseline maxrl divides by the mean reward and needs rewards of at least 0, got "
            f"{rewards_PG.min()}: shift the rewards"
        )
    return quotient(centred(rewards_PG), rewards_PG.mean(axis=1, keepdims=True) + epsilon)


@baseline(
    "OPO: reward minus the length-weighted mean reward of the group's other completions. Unbiased.",
    unbiased=True, min_group_size=2, needs={"lengths_PG"},
)  # fmt: skip
def opo(rewards_PG: Array, context: BaselineContext) -> Array:
    """Subtract OPO's leave-one-out mean: `A_i = r_i - sum_{j!=i} L_j r_j / sum_{j!=i} L_j`.

    OPO (Hao et al. 2025) replaces the squared score norms of the optimal baseline by the lengths L.
    The estimate is unbiased because the rewards and lengths of the other completions are
    independent of completion i.

    >>> lengths = np.array([[1, 1, 3]])
    >>> opo(np.array([[1.0, 0.0, 1.0]]), BaselineContext(lengths_PG=lengths)).tolist()
    [[0.25, -1.0, 0.5]]
    """
    lengths_PG = require(context.lengths_PG, "lengths_PG", "opo")
    weighted_PG = lengths_PG * rewards_PG
    others_PG = weighted_PG.sum(axis=1, keepdims=True) - weighted_PG
    return rewards_PG - others_PG / (lengths_PG.sum(axis=1, keepdims=True) - lengths_PG)
