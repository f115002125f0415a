r"""Exact moments of a prompt's contribution to an update under a plan.

The contribution is called the *term* of the prompt. Its moments are means over all ways in which
the draws of the plan can end.

**Paths.** A plan (`estimators.plans`) draws the completions of a prompt in stages and decides,
after every stage, how many completions come next. Completions of one stage with equal rewards are
interchangeable. A *path* therefore lists, for every stage until the plan stops, the number of
completions at each reward level. Let `M_c` be the number of completions of level c on a path, and M
their total. The chance of the path is

    orders * prod_c pi_c^{M_c}                  if a completion has level c with probability pi_c
    orders * prod_c (n_c)_{M_c} / (N)_{M}       if the completions are drawn from a pool of N
                                                completions, n_c of which have level c

Here `orders` is the product over stages of the stage's multinomial coefficient, and
`(n)_k = n (n-1) .. (n-k+1)`. The second chance is for draws without replacement, averaged over all
orders of the pool. Its mean over pools is the first chance.

**Moments.** The term of the prompt is `h = sum_i w_i s_i`, where s_i is the score of completion i.
An estimate (`ESTIMATES`) determines the weights w_i from the path. Let A_c be the sum of the
weights of level c and Q_c the sum of their squares. The completions of a level are interchangeable,
so the weight of completion i of level c and of completion j of level d have the moments

    E w_i       = E A_c / n_c
    E w_i^2     = E Q_c / n_c
    E w_i w_j   = E[ A_c A_d - 1(c=d) Q_c ] / ( n_c (n_d - 1(c=d)) )

With these moments, the sums of a pool's scores by level (`group_terms.LevelSums`) give unbiased
estimates of `E h` and `E||h||^2` for every plan.

**Bias.** Let r_c be the reward of level c. For every policy, `sum_c pi_c E[s | c] = 0`. Therefore
`E h = kappa g` for every policy if and only if `E A_c / pi_c = kappa r_c + constant`. For rewards 0
and 1 such a kappa always exists. It depends on the success rate p of the prompt:

    kappa(p) = E A_1 / p - E A_0 / (1-p)

A plan then only changes the weights of prompts, and it is unbiased if kappa is constant. With more
than two reward levels, a plan can also change the direction of a prompt's gradient.

**Unbiased estimates.** If the number of completions depends on their rewards, the leave-one-out
baseline causes a bias: the fact that a completion was drawn says something about the rewards of the
others. Two estimates avoid this:

    earlier     The baseline of a completion is the mean of the other completions of its own stage
                and of earlier stages. Only earlier stages decide if the completion is drawn, so
                `E h = E[T] g` (Wald's equation, 1945), where T is the number of completions that
                are used for training.
    all_orders  The leave-one-out weights of the first stage are averaged over all orders in which
                the same completions could have been drawn. The first stage has a fixed size, so its
                estimate is unbiased. The conditional mean of this estimate given the completions is
                then unbiased too (Rao and Blackwell). For rewards 0 and 1 drawn one at a time, it
                is the estimate of Girshick, Mosteller and Savage (1946). If drawing stops at the
                k-th success, it is `(k-1)(T-k) / ((T-1)(T-2))` times the difference of the mean
                scores of both levels.
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

# Largest number of paths that are listed. If a plan has more, its terms are averages over random
# orders of the pool instead; see `drawn_plan_terms`.
MAX_PATHS = 5000
# Number of completions of every level in each stage.
Counts = tuple[tuple[int, ...], ...]


class TooManyPaths(ValueError):
    """Error for a plan with more than `MAX_PATHS` paths; the message names the plan."""


@dataclass(frozen=True)
class Paths:
    """All C paths of a plan, for L given reward levels."""

    plan: Plan
    # Reward of each level.
    level_L: Array
    # Number of completions by stage and level; a history is not included.
    stages_C: list[Counts]
    # Number of completions that are used for training, by stage and level.
    trained_C: list[Counts]
    # Logarithm of the number of orders in which the completions of the path can be drawn.
    log_orders_C: Array
    # Number of completions by level; a history is included.
    counts_CL: Integers
    # Number of completions that are generated; a history is not included.
    generated_C: Array


@dataclass(frozen=True)
class Weights:
    """Weights of an estimate on each of C paths, summed by each of L reward levels."""

    # Sum of the weights by level, A_c in the module's docstring.
    sum_CL: Array
    # Sum of the squared weights by level, Q_c.
    square_CL: Array
    # Number of completions that are used for training.
    trained_C: Array
    # 0 if the path ends with another prompt replacing the prompt, otherwise 1; None if the plan
    # replaces no prompts.
    kept_C: Array | None = None


def paths_of(plan: Plan, setting: Setting, levels: Sequence[float]) -> Paths:
    """List all paths of a plan.

    Args:
        plan: plan.
        setting: options of the plan.
        levels: distinct rewards in increasing order.

    Raises:
        TooManyPaths: there are more than `MAX_PATHS` paths.
    """
    found_paths: list[Counts] = []
    for path in _ends(plan, setting, levels, ()):
        found_paths.append(path)
        if len(found_paths) > MAX_PATHS:
            raise TooManyPaths(
                f"plan {plan.name} has more than {MAX_PATHS} paths with {len(levels)} reward levels"
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
            f"plan {plan.name} draws {size} completions with {len(levels)} reward levels, which "
            f"gives more than {MAX_PATHS} paths"
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
    """Return the chance of every path if completions are drawn from a pool, [U, C].

    The chance is the mean over all orders of the pool.

    Args:
        paths: C paths of a plan.
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
    # SciPy is imported here so that a rejected command line fails without loading it.
    from scipy.special import gammaln

    return np.asarray(gammaln(counts + 1), dtype=np.float64)


def chances(paths: Paths, probability_UL: Array) -> Array:
    """Return the chance of every path if completions have levels with these probabilities, [U, C].

    Args:
        paths: C paths of a plan.
        probability_UL: U sets of probabilities of the L levels.

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


# Function (rewards of the completions for training by stage, baseline) -> weights of these
# completions by stage. If the argument `baseline` is None, the baseline of a completion is the mean
# reward of other completions for training.
Estimate = Callable[[Rewards, "float | None"], list[Array]]


def per_rollout(trained: Rewards, baseline: float | None = None) -> list[Array]:
    """Return leave-one-out advantages as weights.

    Every completion for training then has the same weight in a batch, and a prompt with more
    completions weighs more.

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
    """Return leave-one-out advantages divided by the prompt's number of completions for training.

    Every prompt of a batch then has the same weight.

    >>> [x.tolist() for x in per_prompt(((0.0, 1.0),))]
    [[-0.5, 0.5]]
    """
    count = max(1, sum(map(len, trained)))
    return [weights / count for weights in per_rollout(trained, baseline)]


def earlier(trained: Rewards, baseline: float | None = None) -> list[Array]:
    """Subtract the mean of the other completions of the same and of earlier stages.

    If the first stage has a single completion, its baseline is 0. The argument `baseline` is not
    used.

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
    """Subtract the mean of the other completions, but leave the last stage out of this mean.

    An example is a plan that draws one completion at a time and stops at the k-th success, after T
    completions. The baseline of the last completion is then (k-1)/(T-1), the unbiased estimate of
    the success rate (Haldane 1945). The argument `baseline` is not used.

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


# Estimates by name. The estimate `all_orders` is not in the dictionary, because it is not a
# function of one path; see `weights_of`.
ALL_ORDERS = "all_orders"
ESTIMATES: dict[str, Estimate] = {
    "per_rollout": per_rollout,
    "per_prompt": per_prompt,
    "earlier": earlier,
    "without_last": without_last,
}


def estimates_of(plan: Plan) -> list[str]:
    """Return the names of the estimates that are defined for a plan.

    The estimate `earlier` requires that the use of a completion for training depends only on its
    own and earlier stages. If a plan uses only some of the generated completions, the use of a
    completion can also depend on later stages. `earlier` and `without_last` are then left out. They
    are also left out, like `all_orders`, if the plan has a history.
    """
    names = ["per_rollout", "per_prompt"]
    if plan.trains is all_of and not plan.has_history:
        names += ["earlier", "without_last"]
    return names if plan.has_history else [*names, ALL_ORDERS]


def distinct_weights(paths: Paths) -> dict[str, Weights]:
    """Return the weights of the estimates of a plan, without duplicates.

    An estimate is left out if its weights are a multiple of the weights of an estimate before it in
    `estimates_of`. `ALL_ORDERS` is left out if all completions are drawn in one stage.
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
    """Return True if the weights of one estimate are a multiple of the weights of the other."""
    factor = np.sqrt(left.square_CL.sum() / max(right.square_CL.sum(), 1e-300))
    return np.allclose(left.sum_CL, factor * right.sum_CL) and np.allclose(
        left.square_CL, factor**2 * right.square_CL
    )


def weights_of(paths: Paths, estimate: str) -> Weights:
    """Return the weights of an estimate on every path.

    Args:
        paths: all paths of a plan.
        estimate: key of `ESTIMATES`, or `ALL_ORDERS`, which uses all generated completions for
            training.
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
    """Return the sums of the weights and of their squares by level, [L] each.

    Args:
        stages: number of completions by stage and level.
        weights: weights of the completions of each stage, in the order of the levels.
    """
    levels = len(stages[0])
    total_L, square_L = np.zeros(levels), np.zeros(levels)
    for counts, weight_T in zip(stages, weights, strict=True):
        level_T = np.repeat(np.arange(levels), counts)
        total_L += np.bincount(level_T, weight_T, levels)
        square_L += np.bincount(level_T, np.square(weight_T), levels)
    return total_L, square_L


def _all_orders(paths: Paths) -> Weights:
    """Return the weights of `all_orders`.

    The leave-one-out weights of the first stage are averaged over all paths that have the same
    number of completions of every level.
    """
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
    """Moments of every prompt's term under a plan with an estimate, and numbers of completions."""

    terms: GroupTerms
    # Mean number of completions of every prompt: generated, and used for training.
    generated_P: Array
    trained_P: Array
    # Largest number of stages of a prompt; a history does not count.
    stages: int


def plan_terms(sums: LevelSums, paths: Paths, weights: Weights) -> PlanTerms:
    """Compute the moments of the terms of all prompts of a pool.

    Args:
        sums: sums of the pool's scores by reward level; the levels must be those of the paths.
        paths: all paths of the plan.
        weights: weights of an estimate on these paths.
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
    """Return the factor kappa(p) of a prompt's gradient in its expected term, for rewards 0 and 1.

    Args:
        paths: all paths of the plan, with the levels 0 and 1.
        weights: weights of an estimate on these paths.
        p_U: success rates p, strictly between 0 and 1.

    >>> from grpo_ustat.estimators.plans import PLANS
    >>> paths = paths_of(PLANS["fixed"], Setting(size=4), [0.0, 1.0])
    >>> weights = weights_of(paths, "per_rollout")
    >>> prompt_weight(paths, weights, np.array([0.1, 0.5])).round(9).tolist()
    [4.0, 4.0]
    """
    chance_UC = chances(paths, np.stack([1 - p_U, p_U], axis=1))
    mean_UL = chance_UC @ weights.sum_CL
    return mean_UL[:, 1] / p_U - mean_UL[:, 0] / (1 - p_U)


# `constant_weight` compares kappa at TESTED random sets of level probabilities. Relative
# differences up to TOLERANCE count as rounding errors.
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
    """Compute the terms of a plan that has too many paths to list, from random orders of the pool.

    Args:
        pool: N scored completions of each of P prompts.
        plan: plan.
        setting_P: setting for every prompt.
        estimates: keys of `ESTIMATES`.
        order_PDN: D random orders of the completions of every prompt. If all plans get the same
            orders, their comparison is more precise.
        blocks: number of blocks of equal size into which the D orders are divided.

    Returns:
        For each estimate, the terms from each block of orders. Their spread shows the Monte Carlo
        error.
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
    """Return the stages that a plan draws from a sequence of completions, as slices of it."""
    stages: list[slice] = []
    end = 0
    while size := plan.more(tuple(tuple(sorted(rewards_N[s])) for s in stages), setting):
        stages.append(slice(end, end + size))
        end += size
    return stages


def _place(
    weight_N: Array, place_T: Integers, rewards_N: Array, kept: Sequence[float], weights: Array
) -> None:
    """Write the weights of a stage's completions for training into `weight_N`.

    Only rewards identify these completions. Among completions of the stage with equal rewards,
    those drawn first are taken.

    Args:
        weight_N: weights of all completions of the prompt; changed in place.
        place_T: indices of the stage's completions, in the order of the draw.
        rewards_N: rewards of all completions of the prompt.
        kept: rewards of the completions for training.
        weights: weights of these completions.
    """
    of_reward = dict(zip(kept, weights.tolist(), strict=True))
    left = Counter(kept)
    for place in place_T.tolist():
        reward = float(rewards_N[place])
        if left[reward]:
            left[reward] -= 1
            weight_N[place] = of_reward[reward]
