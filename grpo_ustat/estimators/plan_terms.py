r"""Exact moments of a prompt's term under a plan, over all ways in which its draws can end.

A plan (`estimators.plans`) draws the completions of a prompt in stages and decides, after every
stage, how many completions come next. Completions of one stage with equal rewards are
interchangeable. A *path* is therefore a list of counts by reward level, with an entry per stage,
that ends where the plan stops. Let `M_c` be the number of completions of level c on a path. The
chance of the path is

    orders * prod_c pi_c^{M_c}                          if level c has probability pi_c
    orders * prod_c (n_c)_{M_c} / (N)_{M}               if drawn from a pool with n_c of level c

with orders = prod over stages of the stage's multinomial coefficient, and `(n)_k = n (n-1) ...`.
The second chance averages over all orders of the pool, without replacement; over pools it has the
mean of the first. The term of the prompt is `h = sum_i w_i s_i`, where an estimate (`ESTIMATES`)
determines the weights from the path. Let A_c be the sum of the weights of level c and Q_c the sum
of their squares. By exchange of the completions of a level,

    E w_i       = E A_c / n_c                            i of level c
    E w_i^2     = E Q_c / n_c
    E w_i w_j   = E[ A_c A_d - 1(c=d) Q_c ] / ( n_c (n_d - 1(c=d)) )

so the sums of a pool by level (`group_terms.LevelSums`) give unbiased estimates of `E h` and
`E||h||^2` for every plan.

**Bias.** `sum_c pi_c E[s | c] = 0` for every policy. Therefore `E h = kappa g` for every policy if
and only if `E A_c / pi_c = kappa r_c + constant`. For rewards 0 and 1 this is always true:

    kappa(p) = E A_1 / p - E A_0 / (1-p)

A plan then only reweights prompts, by a function of their success rate, and a plan with a constant
kappa is unbiased. For more levels, a plan can also change a prompt's direction.

**Remedies.** If the number of completions depends on their rewards, the mean of the others is not
independent of a completion given that it was drawn. Two estimates avoid this:

    earlier     the baseline of a completion is the mean of the other completions of its own and of
                earlier stages. That the completion is drawn depends on earlier stages only, so
                `E h = E[T] g` (Wald's equation, 1945), T trained completions
    all_orders  the leave-one-out weights of the first stage, averaged over all orders in which the
                same completions could have been drawn. The first stage has a fixed size, so its
                estimate is unbiased, and so is its conditional mean given the completions (Rao and
                Blackwell). For rewards 0 and 1 drawn one at a time this is the estimate of
                Girshick, Mosteller and Savage (1946); if drawing stops at the k-th success, it is
                `(k-1)(T-k) / ((T-1)(T-2))` times the difference of the mean scores of both levels
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from grpo_ustat.estimators.group_terms import GroupTerms, LevelSums, compositions
from grpo_ustat.estimators.plans import Plan, Rewards, Setting, all_of, trained_stages
from grpo_ustat.records import Array, Integers, ScorePool

# Largest number of paths that are listed. If a plan has more, orders of the pool are drawn.
MAX_PATHS = 5000
# Number of completions of every level in each stage.
Counts = tuple[tuple[int, ...], ...]


class TooManyPaths(ValueError):
    """Error for a plan with more than `MAX_PATHS` paths; the message names the plan."""


@dataclass(frozen=True)
class Paths:
    """All paths of a plan, for given reward levels. Axes: C paths, L levels."""

    plan: Plan
    level_L: Array
    # Counts by stage and level, without a history.
    stages_C: list[Counts]
    # Counts of the completions that are trained, by stage and level.
    trained_C: list[Counts]
    # Logarithm of the number of orders.
    log_orders_C: Array
    # Number of completions by level, with a history.
    counts_CL: Integers
    # Number of completions that are generated, without a history.
    generated_C: Array


@dataclass(frozen=True)
class Weights:
    """Weights of an estimate on every path."""

    # Sum of the weights by level, A.
    sum_CL: Array
    # Sum of the squared weights by level, Q.
    square_CL: Array
    # Number of completions that are trained.
    trained_C: Array
    # 0 if another prompt replaces the prompt, otherwise 1; None if the plan replaces no prompts.
    kept_C: Array | None = None


def paths_of(plan: Plan, setting: Setting, levels: Sequence[float]) -> Paths:
    """List all paths of a plan.

    Args:
        levels: distinct rewards in increasing order.

    Raises:
        TooManyPaths: there are more than `MAX_PATHS` paths.
    """
    found_paths: list[Counts] = []
    for path in _ends(plan, setting, levels, ()):
        found_paths.append(path)
        if len(found_paths) > MAX_PATHS:
            raise TooManyPaths(
                f"plan {plan.name} has more than {MAX_PATHS} paths at {len(levels)} reward levels"
            )
    stages_C: list[Counts] = []
    trained_C: list[Counts] = []
    for path in found_paths:
        rewards = tuple(_rewards(stage, levels) for stage in path)
        trained = trained_stages(plan, rewards)
        stages_C.append(path[plan.has_history :])
        trained_C.append(tuple(_counts(stage, levels) for stage in trained))
    return Paths(
        plan,
        np.array(levels, dtype=float),
        stages_C,
        trained_C,
        np.array([sum(map(_log_orders, path)) for path in found_paths]),
        np.array([np.sum(path, axis=0) for path in found_paths], dtype=np.int64),
        np.array([sum(map(sum, stages)) for stages in stages_C], dtype=float),
    )


def _ends(plan: Plan, setting: Setting, levels: Sequence[float], path: Counts) -> Iterator[Counts]:
    """Yield every path that starts with the given stages."""
    rewards = tuple(_rewards(stage, levels) for stage in path)
    size = plan.more(rewards, setting)
    if not size:
        yield path
        return
    if len(levels) > 2 and math.comb(size + len(levels) - 1, size) > MAX_PATHS:
        raise TooManyPaths(
            f"plan {plan.name} draws {size} completions at {len(levels)} reward levels, which "
            f"is more than {MAX_PATHS} paths"
        )
    for counts in compositions(len(levels), size):
        yield from _ends(plan, setting, levels, (*path, tuple(map(int, counts))))


def _rewards(counts: Sequence[int], levels: Sequence[float]) -> tuple[float, ...]:
    """Return the rewards of a stage in increasing order."""
    return tuple(level for level, count in zip(levels, counts, strict=True) for _ in range(count))


def _counts(rewards: Sequence[float], levels: Sequence[float]) -> tuple[int, ...]:
    """Return the number of rewards at each level."""
    return tuple(list(rewards).count(level) for level in levels)


def _log_orders(counts: Sequence[int]) -> float:
    """Return the logarithm of a multinomial coefficient."""
    return math.lgamma(sum(counts) + 1) - sum(math.lgamma(count + 1) for count in counts)


def pool_chances(paths: Paths, counts_UL: Array) -> Array:
    """Return the chance of every path, averaged over all orders of a pool, [U, C].

    Args:
        counts_UL: number of completions by level in each of U pools of N completions. N must be at
            least the number of completions on every path.
    """
    drawn_C = paths.counts_CL.sum(axis=1)
    total_U1 = counts_UL.sum(axis=1, keepdims=True)
    assert drawn_C.max() <= total_U1.min(), (drawn_C.max(), total_U1.min())
    left_UCL = counts_UL[:, None] - paths.counts_CL
    possible_UC = (left_UCL >= 0).all(axis=2)
    ways_UCL = _log_factorial(counts_UL)[:, None] - _log_factorial(np.maximum(left_UCL, 0))
    ways_UC = ways_UCL.sum(axis=2)
    all_UC = _log_factorial(total_U1) - _log_factorial(total_U1 - drawn_C)
    return np.where(possible_UC, np.exp(paths.log_orders_C + ways_UC - all_UC), 0.0)


def _log_factorial(counts: Array) -> Array:
    """Return log(n!) of every number."""
    # Imported here, so that a refused command line does not wait for SciPy.
    from scipy.special import gammaln

    return np.asarray(gammaln(counts + 1), dtype=np.float64)


def chances(paths: Paths, probability_UL: Array) -> Array:
    """Return the chance of every path if completions have levels with these probabilities, [U, C].

    >>> from grpo_ustat.estimators.plans import PLANS
    >>> until_mixed = paths_of(PLANS["until_mixed"], Setting(size=2, most=4), [0.0, 1.0])
    >>> [path[-1] for path in until_mixed.stages_C]  # wrong and right completions of the last round
    [(2, 0), (1, 1), (0, 2), (1, 1), (2, 0), (1, 1), (0, 2)]
    >>> chances(until_mixed, np.array([[0.5, 0.5]])).round(9).tolist()
    [[0.0625, 0.125, 0.0625, 0.5, 0.0625, 0.125, 0.0625]]
    """
    with np.errstate(divide="ignore"):
        log_UL = np.log(probability_UL)
    terms_UCL = np.where(paths.counts_CL > 0, paths.counts_CL * log_UL[:, None], 0.0)
    return np.exp(paths.log_orders_C + terms_UCL.sum(axis=2))


# Function (rewards of the trained completions by stage, baseline) -> weight of each of them. If the
# baseline is None, it is the mean of other trained completions.
Estimate = Callable[[Rewards, "float | None"], list[Array]]


def per_rollout(trained: Rewards, baseline: float | None = None) -> list[Array]:
    """Sum leave-one-out advantages, so that every trained completion of a batch weighs the same.

    >>> [x.tolist() for x in per_rollout(((0.0, 0.0), (1.0,)))]
    [[-0.5, -0.5], [1.0]]
    """
    if baseline is not None:
        return [np.array(stage) - baseline for stage in trained]
    count, total = sum(map(len, trained)), sum(map(sum, trained))
    if count < 2:
        return [np.zeros(len(stage)) for stage in trained]
    return [(count * np.array(stage) - total) / (count - 1) for stage in trained]


def per_prompt(trained: Rewards, baseline: float | None = None) -> list[Array]:
    """Average leave-one-out advantages, so that every prompt of a batch weighs the same.

    >>> [x.tolist() for x in per_prompt(((0.0, 1.0),))]
    [[-0.5, 0.5]]
    """
    count = max(1, sum(map(len, trained)))
    return [weights / count for weights in per_rollout(trained, baseline)]


def earlier(trained: Rewards, baseline: float | None = None) -> list[Array]:
    """Subtract the mean of the other completions of the same and of earlier stages.

    A first stage of a single completion has the baseline 0.

    >>> [x.tolist() for x in earlier(((0.0, 1.0), (1.0,)))]
    [[-1.0, 1.0], [0.5]]
    """
    sizes = accumulate(map(len, trained))
    totals = accumulate(map(sum, trained))
    weights: list[Array] = []
    for stage, size, total in zip(trained, sizes, totals, strict=True):
        rewards = np.array(stage)
        weights.append(rewards - (total - rewards) / (size - 1) if size > 1 else rewards)
    return weights


def without_last(trained: Rewards, baseline: float | None = None) -> list[Array]:
    """Subtract the mean of the other completions, without those of the last stage.

    If drawing stops at the k-th success, the baseline of the last completion is (k-1)/(T-1), the
    unbiased estimate of the success rate (Haldane 1945).

    >>> [x.tolist() for x in without_last(((0.0, 0.0), (1.0,)))]
    [[0.0, 0.0], [1.0]]
    """
    if len(trained) < 2:
        return per_rollout(trained)
    before = [reward for stage in trained[:-1] for reward in stage]
    count, total = len(before), sum(before)
    first = [
        np.array(stage) - (total - np.array(stage)) / max(count - 1, 1) for stage in trained[:-1]
    ]
    return [*first, np.array(trained[-1]) - total / count]


# Estimates by name. `all_orders` needs all paths; see `weights_of`.
ALL_ORDERS = "all_orders"
ESTIMATES: dict[str, Estimate] = {
    "per_rollout": per_rollout,
    "per_prompt": per_prompt,
    "earlier": earlier,
    "without_last": without_last,
}


def estimates_of(plan: Plan) -> list[str]:
    """Return the names of the estimates that are defined for a plan.

    If only some of the generated completions are trained, that a completion is trained depends on
    later stages, so the theory of `earlier` does not hold.
    """
    names = ["per_rollout", "per_prompt"]
    if plan.trains is all_of and not plan.has_history:
        names += ["earlier", "without_last"]
    return names if plan.has_history else [*names, ALL_ORDERS]


def distinct_weights(paths: Paths) -> dict[str, Weights]:
    """Return the weights of every estimate whose weights are no multiple of an earlier estimate's.

    `ALL_ORDERS` is left out if all completions are drawn in one stage.
    """
    weights: dict[str, Weights] = {}
    for name in estimates_of(paths.plan):
        if name == ALL_ORDERS and max(map(len, paths.stages_C)) == 1:
            continue
        of_estimate = weights_of(paths, name)
        if not any(_are_multiples(of_estimate, other) for other in weights.values()):
            weights[name] = of_estimate
    return weights


def _are_multiples(left: Weights, right: Weights) -> bool:
    """Return True if the weights of two estimates differ by a factor."""
    factor = np.sqrt(left.square_CL.sum() / max(right.square_CL.sum(), 1e-300))
    return np.allclose(left.sum_CL, factor * right.sum_CL) and np.allclose(
        left.square_CL, factor**2 * right.square_CL
    )


def weights_of(paths: Paths, estimate: str) -> Weights:
    """Return the weights of an estimate on every path.

    Args:
        estimate: key of `ESTIMATES`, or `ALL_ORDERS`, which trains all generated completions.
    """
    if estimate == ALL_ORDERS:
        return _all_orders(paths)
    levels = list(paths.level_L)
    sums: list[Array] = []
    squares: list[Array] = []
    for generated, trained in zip(paths.stages_C, paths.trained_C, strict=True):
        baseline = None
        if paths.plan.baseline_of_generated:
            baseline = float(np.sum(generated, axis=0) @ paths.level_L / np.sum(generated))
        weights = ESTIMATES[estimate](tuple(_rewards(x, levels) for x in trained), baseline)
        sum_L, square_L = _by_level(trained, weights)
        sums.append(sum_L)
        squares.append(square_L)
    trained_C = np.array([sum(map(sum, stages)) for stages in paths.trained_C], dtype=float)
    kept_C = (trained_C > 0).astype(float) if paths.plan.replaces else None
    return Weights(np.array(sums), np.array(squares), trained_C, kept_C)


def _by_level(stages: Counts, weights: Sequence[Array]) -> tuple[Array, Array]:
    """Return the sums of the weights and of their squares by level, [L] each."""
    levels = len(stages[0])
    total_L, square_L = np.zeros(levels), np.zeros(levels)
    for counts, weight_T in zip(stages, weights, strict=True):
        level_T = np.repeat(np.arange(levels), counts)
        total_L += np.bincount(level_T, weight_T, levels)
        square_L += np.bincount(level_T, np.square(weight_T), levels)
    return total_L, square_L


def _all_orders(paths: Paths) -> Weights:
    """Average the first stage's weights over all paths with the same completions."""
    levels = list(paths.level_L)
    first_CL = np.array([
        _by_level(stages[:1], per_prompt((_rewards(stages[0], levels),)))[0]
        for stages in paths.stages_C
    ])  # fmt: skip
    _, same_C = np.unique(paths.counts_CL, axis=0, return_inverse=True)
    same_C = same_C.reshape(-1)
    orders_C = np.exp(paths.log_orders_C - paths.log_orders_C.max())
    total_S = np.bincount(same_C, orders_C)
    sum_CL = np.stack(
        [(np.bincount(same_C, orders_C * first_C) / total_S)[same_C] for first_C in first_CL.T],
        axis=1,
    )
    square_CL = sum_CL**2 / np.maximum(paths.counts_CL, 1)
    return Weights(sum_CL, square_CL, paths.generated_C)


@dataclass(frozen=True)
class PlanTerms:
    """Terms of a plan with an estimate, and the numbers of completions."""

    terms: GroupTerms
    # Mean number of generated and of trained completions of every prompt.
    generated_P: Array
    trained_P: Array
    # Largest number of stages of a prompt, without a history.
    stages: int


def plan_terms(sums: LevelSums, paths: Paths, weights: Weights) -> PlanTerms:
    """Compute the terms of every prompt of a pool.

    Args:
        sums: sums of the pool's scores by the levels of the paths.
    """
    counts_UL, which_P = sums.distinct_counts
    chance_UC = pool_chances(paths, counts_UL)
    products_CLL = weights.sum_CL[:, :, None] * weights.sum_CL[:, None]
    products_CLL -= weights.square_CL[:, :, None] * np.eye(len(paths.level_L))
    energy_P, mean_PR = sums.moments(
        chance_UC, weights.sum_CL, products_CLL, weights.square_CL[:, :, None, None]
    )
    kept_P = None if weights.kept_C is None else (chance_UC @ weights.kept_C)[which_P]
    return PlanTerms(
        GroupTerms(energy_P, mean_PR, kept_P),
        (chance_UC @ paths.generated_C)[which_P],
        (chance_UC @ weights.trained_C)[which_P],
        max(map(len, paths.stages_C)),
    )


def prompt_weight(paths: Paths, weights: Weights, p_U: Array) -> Array:
    """Return kappa(p), the factor of a prompt's gradient in its expected term, for rewards 0 and 1.

    >>> from grpo_ustat.estimators.plans import PLANS
    >>> paths = paths_of(PLANS["fixed"], Setting(size=4), [0.0, 1.0])
    >>> weights = weights_of(paths, "per_rollout")
    >>> prompt_weight(paths, weights, np.array([0.1, 0.5])).round(9).tolist()
    [4.0, 4.0]
    """
    chance_UC = chances(paths, np.stack([1 - p_U, p_U], axis=1))
    mean_UL = chance_UC @ weights.sum_CL
    return mean_UL[:, 1] / p_U - mean_UL[:, 0] / (1 - p_U)


# Probabilities of the levels at which `constant_weight` compares kappa.
TESTED, TOLERANCE = 7, 1e-9


def constant_weight(paths: Paths, weights: Weights) -> float | None:
    """Return kappa if `E h = kappa g` for every policy; otherwise return None."""
    levels = len(paths.level_L)
    if levels < 2:
        return None
    probability_UL = np.random.default_rng(0).dirichlet(np.ones(levels), TESTED)
    slope_UL = chances(paths, probability_UL) @ weights.sum_CL / probability_UL
    rise_UL = (slope_UL - slope_UL[:, :1])[:, 1:] / (paths.level_L[1:] - paths.level_L[0])
    kappa = float(rise_UL.mean())
    far = np.abs(rise_UL - kappa).max() > TOLERANCE * max(1.0, abs(kappa))
    return None if far or not kappa > 0 else kappa


def drawn_plan_terms(
    pool: ScorePool,
    plan: Plan,
    setting_P: Sequence[Setting],
    estimates: Sequence[str],
    order_PDN: Integers,
    blocks: int,
) -> dict[str, list[PlanTerms]]:
    """Compute the terms of a plan over drawn orders, if its paths cannot be listed.

    The result contains the terms from each block of orders, by estimate.

    Args:
        setting_P: setting for every prompt.
        estimates: keys of `ESTIMATES`.
        order_PDN: D orders of the completions of every prompt. Use the same for all plans.
        blocks: number of equal blocks of orders, for the Monte Carlo error.
    """
    prompts, draws, completions = order_PDN.shape
    energy_EPD = np.empty((len(estimates), prompts, draws))
    weight_EPBN = np.zeros((len(estimates), prompts, blocks, completions))
    generated_PD, trained_PD, kept_PD = np.empty((3, prompts, draws))
    most_stages = 0
    for x in range(prompts):
        weight_EDN = np.zeros((len(estimates), draws, completions))
        for d, order_N in enumerate(order_PDN[x]):
            stages = _drawn_stages(plan, setting_P[x], pool.rewards_PN[x][order_N])
            rewards = tuple(tuple(sorted(pool.rewards_PN[x][order_N[s]])) for s in stages)
            trained = trained_stages(plan, rewards)
            generated = [z for stage in rewards[plan.has_history :] for z in stage]
            baseline = float(np.mean(generated)) if plan.baseline_of_generated else None
            most_stages = max(most_stages, len(trained))
            generated_PD[x, d] = len(generated)
            trained_PD[x, d] = sum(map(len, trained))
            kept_PD[x, d] = not plan.replaces or trained_PD[x, d] > 0
            for e, estimate in enumerate(estimates):
                by_stage = ESTIMATES[estimate](trained, baseline)
                for place, kept, weights in zip(
                    stages[plan.has_history :], trained, by_stage, strict=True
                ):
                    _place(weight_EDN[e, d], order_N[place], pool.rewards_PN[x], kept, weights)
        energy_EPD[:, x] = ((weight_EDN @ pool.gram_PNN[x]) * weight_EDN).sum(axis=2)
        weight_EPBN[:, x] = weight_EDN.reshape(len(estimates), blocks, -1, completions).mean(axis=2)
    generated_PB, trained_PB, kept_PB = (
        x.reshape(prompts, blocks, -1).mean(axis=2) for x in (generated_PD, trained_PD, kept_PD)
    )
    energy_EPB = energy_EPD.reshape(len(estimates), prompts, blocks, -1).mean(axis=3)
    return {
        estimate: [
            PlanTerms(
                GroupTerms(
                    energy_EPB[e, :, b],
                    np.einsum("pn,pnr->pr", weight_EPBN[e, :, b], pool.features_PNR),
                    kept_PB[:, b] if plan.replaces else None,
                ),
                generated_PB[:, b],
                trained_PB[:, b],
                most_stages,
            )
            for b in range(blocks)
        ]
        for e, estimate in enumerate(estimates)
    }


def _drawn_stages(plan: Plan, setting: Setting, rewards_N: Array) -> list[slice]:
    """Return the stages that a plan draws from a sequence of completions."""
    stages: list[slice] = []
    end = 0
    while size := plan.more(tuple(tuple(sorted(rewards_N[s])) for s in stages), setting):
        stages.append(slice(end, end + size))
        end += size
    return stages


def _place(
    weight_N: Array, place_T: Integers, rewards_N: Array, kept: Sequence[float], weights: Array
) -> None:
    """Write the weights of the trained completions of a stage to the completions drawn first."""
    of_reward = dict(zip(kept, weights.tolist(), strict=True))
    left = Counter(kept)
    for place in place_T.tolist():
        reward = float(rewards_N[place])
        if left[reward]:
            left[reward] -= 1
            weight_N[place] = of_reward[reward]
