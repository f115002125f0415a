"""Relative efficiency of losses: intervals, and statements about smaller groups.

These statements are made about a loss at a given G, even if the loss's expectation does not point
along the gradient:

    efficiency_same_g   efficiency relative to the unbiased estimate at the same G
    efficiency_best_g   efficiency relative to the unbiased estimate at its best G
    direction, noise    cos^2 of the loss's expectation, and the noise's share of its error
    best G              the best measured G of the loss is called worse; counted once for each loss
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import fields, replace
from importlib import metadata
from itertools import product
from unittest import mock

import numpy as np
from counting import Asked, Cell, Kind, covers
from populations import (
    LIGHT,
    MAX_LENGTH,
    OUTCOMES,
    POPULATIONS,
    PROMPTS,
    TURNED,
    Population,
)
from scipy.special import gammaln

from grpo_ustat.estimators.baselines import advantages
from grpo_ustat.estimators.efficiency import RelativeEfficiency
from grpo_ustat.estimators.group_terms import compositions
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.losses import UNBIASED, LossRow, loss_efficiencies
from grpo_ustat.estimators.row_weights import Loss
from grpo_ustat.estimators.token_weights import EXACT, TokenWeights, token_factors
from grpo_ustat.measurements.recipes import recipe_efficiencies
from grpo_ustat.pages.advice import TOLERABLE_EXTRA_ERROR
from grpo_ustat.records import Array, BaselineContext, ScorePool

# The computations in the TRL hooks do not need TRL itself. Only the version check is patched.
version = metadata.version
with mock.patch.object(metadata, "version", lambda x: "1.16" if x == "trl" else version(x)):
    from grpo_ustat.integrations.trl.objective import OwnLoss, own_loss

ROLLOUTS = 64
# Group sizes for the unbiased estimate and the losses, and for losses on another policy's rollouts.
SIZES, LAGGED_SIZES = (2, 4, 8, 16), (4, 8)
# Number of batches drawn to compute true values.
TRUE_DRAWS = 2000
CELLS = ((20, 16), (40, 16), (100, 16), (200, 32))
CALLBACK_CELLS = ((64, 8), (128, 8), (256, 8), (64, 16), (128, 16), (256, 16))
STD = {"epsilon": 1e-4}
CLIPPED = TokenWeights("token", "clip", 0.2, 0.2)
LAGGED = [
    Loss("no ratio, sum", "group_std", STD, "sum", MAX_LENGTH, tokens=TokenWeights()),
    Loss("exact ratio, sum", "leave_one_out", {}, "sum", MAX_LENGTH, tokens=EXACT),
    Loss("clipped, grpo", "group_std", STD, "grpo", MAX_LENGTH, tokens=CLIPPED),
    Loss("clipped, dapo", "group_std", STD, "dapo", MAX_LENGTH, tokens=CLIPPED),
]
BY_TOKENS, TURNED_SIZE = Loss("by tokens", "leave_one_out", {}, "grpo", MAX_LENGTH), 8
TRAINED = [
    Loss("grpo", "group_std", STD, "grpo", MAX_LENGTH),
    Loss("dr_grpo", "group_mean", {}, "dr_grpo", MAX_LENGTH),
]
SMALLER = (
    "opposed", "few loud", "light, G* 3.1", "light, G* 8.8", "Pareto, high", "sparse, high",
    "camps, lognormal", "opposite camps", "partly turned",
)  # fmt: skip
LOSSES = [
    Loss("none, sum", "none", {}, "sum", MAX_LENGTH),
    Loss("group_std, sum", "group_std", STD, "sum", MAX_LENGTH),
    Loss("leave_one_out, grpo", "leave_one_out", {}, "grpo", MAX_LENGTH),
    Loss("group_std, grpo", "group_std", STD, "grpo", MAX_LENGTH),
    Loss("group_std, dapo", "group_std", STD, "dapo", MAX_LENGTH),
    Loss("group_std, bnpo", "group_std", STD, "bnpo", MAX_LENGTH, micro_batch_size=8),
    Loss("batch_std, sum", "batch_std", STD, "sum", MAX_LENGTH),
]
# Number of prompts that are enumerated at a time.
BLOCK = 500


def losses(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge intervals for the relative efficiency of losses, and of all decided recipes together.

    The true values are estimates from all prompts of the population with 64 completions each.
    """
    population = POPULATIONS[name]()
    large = population.pool(np.arange(len(population.p_PY)), 64, np.random.default_rng(9))
    rows = loss_efficiencies(large, LOSSES, SIZES, ROLLOUTS, TRUE_DRAWS, seed=1)
    truth = numbers_of(rows)
    best = {row.loss.name: row.group_size for row in rows if row.best}
    recipes = against_best(
        recipe_efficiencies(large, MAX_LENGTH, SIZES, ROLLOUTS, TRUE_DRAWS, seed=1)
    )

    def judged_study(pool: ScorePool, number: int) -> Iterator[tuple[str, bool | float]]:
        """Yield a study's statements about losses and recipes."""
        rows = loss_efficiencies(pool, LOSSES, SIZES, ROLLOUTS, asked.draws, seed=number)
        yield from judged_efficiencies(rows, truth)
        for row in rows:
            decided = row.efficiency is not None and math.isfinite(
                row.efficiency.efficiency_same_g.high
            )
            if decided and row.group_size == best[row.loss.name]:
                yield f"{place_of(row)}: best G", not row.may_be_best
        recipe_rows = recipe_efficiencies(
            pool, MAX_LENGTH, SIZES, ROLLOUTS, asked.draws, seed=number
        )
        if efficiencies := against_best(recipe_rows):
            yield (
                "all recipes",
                any(not covers(efficiencies[x], recipes[x].estimate) for x in efficiencies),
            )
            yield "recipes decided", float(len(efficiencies))

    for prompts, completions in asked.cells:
        rng = np.random.default_rng(10)
        pools = pools_of(population, prompts, completions, asked.studies, rng)
        yield Cell(
            {"prompts": prompts, "completions": completions},
            (dict(judged_study(pool, number)) for number, pool in enumerate(pools)),
            truth,
        )


def pools_of(
    population: Population, prompts: int, completions: int, studies: int, rng: np.random.Generator
) -> Iterator[ScorePool]:
    """Draw pools of prompts, which are drawn with replacement."""
    for _ in range(studies):
        chosen = rng.integers(len(population.p_PY), size=prompts)
        yield population.pool(chosen, completions, rng)


def place_of(row: LossRow) -> str:
    """Return a row's loss and G as a name."""
    return f"{row.loss.name}, G = {row.group_size}"


def numbers_of(rows: list[LossRow]) -> dict[str, float]:
    """Return the finite estimates of all relative efficiencies, named by loss, G and field."""
    numbers = {
        f"{place_of(row)}: {field.name}": getattr(row.efficiency, field.name).estimate
        for row in rows if row.efficiency is not None
        for field in fields(RelativeEfficiency)
    }  # fmt: skip
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def judged_efficiencies(
    rows: list[LossRow], truth: Mapping[str, float]
) -> Iterator[tuple[str, bool]]:
    """Yield each efficiency's interval that has both ends, with True if it misses."""
    for row in rows:
        if row.efficiency is None:
            continue
        decided = math.isfinite(row.efficiency.efficiency_same_g.high)
        for field in fields(RelativeEfficiency):
            name = f"{place_of(row)}: {field.name}"
            if name in truth and (decided or "efficiency_same_g" not in field.name):
                yield name, not covers(getattr(row.efficiency, field.name), truth[name])


def against_best(rows: list[LossRow]) -> dict[str, Interval]:
    """Return the decided efficiencies relative to the unbiased estimate at its best G."""
    efficiencies = {
        row.loss.name: row.efficiency.efficiency_best_g
        for row in rows
        if row.efficiency is not None
    }
    return {
        name: efficiency
        for name, efficiency in efficiencies.items()
        if math.isfinite(efficiency.estimate)
    }


def stale(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge the efficiency of another policy's completions relative to the current policy's."""
    population = POPULATIONS[name]()
    indices = np.arange(PROMPTS)
    fresh, pools = lagged(population, indices, 64, np.random.default_rng(9))
    truth = numbers_of(
        loss_efficiencies(fresh, LAGGED, LAGGED_SIZES, ROLLOUTS, TRUE_DRAWS, 1, pools)
    )
    truth = {x: y for x, y in truth.items() if x.endswith((": efficiency_same_g", ": direction"))}

    def studies(prompts: int, completions: int) -> Iterator[dict[str, bool]]:
        """Yield the judged statements of each study."""
        rng = np.random.default_rng(10)
        for number in range(asked.studies):
            chosen = rng.integers(PROMPTS, size=prompts)
            fresh, pools = lagged(population, chosen, completions, rng)
            arguments = LAGGED, LAGGED_SIZES, ROLLOUTS, asked.draws, number, pools
            yield dict(judged_efficiencies(loss_efficiencies(fresh, *arguments), truth))

    for prompts, completions in asked.cells:
        facts = {"prompts": prompts, "completions": completions}
        yield Cell(facts, studies(prompts, completions), truth)


def lagged(
    population: Population, chosen: Array, completions: int, rng: np.random.Generator
) -> tuple[ScorePool, dict[TokenWeights, ScorePool]]:
    """Draw a pool from the population, and a pool from another policy for each token weighting.

    The other policy's outcome probabilities are the population's probabilities times a lognormal
    factor (sigma .3), normalised. The prompts are the same, and each completion has the ratio of a
    single token.
    """
    noise_PY = np.random.default_rng(11).normal(size=(PROMPTS, OUTCOMES)) * 0.3
    q_PY = population.p_PY * np.exp(np.concatenate([noise_PY, noise_PY], axis=1))
    q_PY /= q_PY.sum(axis=1, keepdims=True)
    fresh = population.pool(chosen, completions, rng)
    earlier = copy(population)
    earlier.ends_PY = q_PY.cumsum(axis=1)
    # The outcomes are stored in place of lengths, so that the pool contains them.
    earlier.lengths_PY = np.tile(np.arange(2 * OUTCOMES), (PROMPTS, 1))
    stale = earlier.pool(chosen, completions, rng)
    outcomes_PN = stale.lengths_PN
    now_PN, then_PN = (
        np.log(np.maximum(np.take_along_axis(chances_PY[chosen], outcomes_PN, axis=1), 1e-300))
        for chances_PY in (population.p_PY, q_PY)
    )
    lengths_PN = np.take_along_axis(population.lengths_PY[chosen], outcomes_PN, axis=1)
    pools = {}
    for weights in {loss.tokens for loss in LAGGED if loss.tokens is not None}:
        factors = [
            token_factors(weights, kind, now_PN.reshape(-1, 1), then_PN.reshape(-1, 1),
                          np.ones((now_PN.size, 1), bool)).reshape(now_PN.shape)
            for kind in weights.kinds
        ]  # fmt: skip
        vectors = np.concatenate([f[..., None] * stale.features_PNR for f in factors], axis=1)
        pools[weights] = replace(
            stale, lengths_PN=lengths_PN, features_PNR=vectors, kinds=weights.kinds,
            gram_PNN=vectors @ vectors.transpose(0, 2, 1),
        )  # fmt: skip
    return fresh, pools


def turned(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge efficiency and direction of a mean over tokens, which turns with the lengths."""
    population = POPULATIONS[name]()
    truth = truth_by_tokens(population, TURNED_SIZE, ROLLOUTS)
    for count, completions in asked.cells:
        rng = np.random.default_rng([10 + asked.seed, count, completions])
        pools = pools_of(population, count, completions, asked.studies, rng)
        yield Cell(
            {"prompts": count, "completions": completions},
            (judged_by_tokens(pool, truth, number) for number, pool in enumerate(pools)),
            truth,
            statements=tuple(truth),
        )


def judged_by_tokens(pool: ScorePool, truth: Mapping[str, float], seed: int) -> dict[str, bool]:
    """Return a study's statements about the mean over tokens, with True if they are wrong."""
    (row,) = loss_efficiencies(pool, [BY_TOKENS], [TURNED_SIZE], ROLLOUTS, 2, seed)
    printed = {name: getattr(row.efficiency, name) for name in truth}
    return {
        name: not covers(x, truth[name]) for name, x in printed.items() if math.isfinite(x.estimate)
    }


def smaller(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge statements of the TRL callback about smaller groups; cells are groups x their size.

    The statement "any" is wrong if the interval for any smaller size misses. "better" is wrong if
    the named size is not better. "none better" is wrong if some size is better by more than 30 %.
    """
    population = POPULATIONS[name]()
    for loss, (count, size) in product(TRAINED, asked.cells):
        errors = {
            g: true_error(population, loss, g, ROLLOUTS)[0]
            for g in (size // 8, size // 4, size // 2, size) if g >= 2
        }  # fmt: skip
        truth = {g: errors[size] / error for g, error in errors.items() if g < size}
        rng = np.random.default_rng([10 + asked.seed, count, size])
        pools = pools_of(population, count, size, asked.studies, rng)
        numbers = {f"groups of {g}": efficiency for g, efficiency in truth.items()}
        numbers |= dict.fromkeys(("any", "better", "none better"), max(truth.values()))
        yield Cell(
            {"loss": loss.name, "groups": count, "size": size},
            (dict(judged_sizes(own_loss(pool, loss, ROLLOUTS, ""), truth)) for pool in pools),
            numbers,
            statements=tuple(numbers),
        )


def judged_sizes(result: OwnLoss, truth: Mapping[int, float]) -> Iterator[tuple[str, bool]]:
    """Yield each statement about smaller groups, with True if it is wrong.

    Args:
        result: result that the callback reports.
        truth: true relative efficiency of a rollout in groups of size g, by g.
    """
    decided = {g: x for g, x in result.against.items() if math.isfinite(x.estimate)}
    if not (result.decided and decided):
        return
    missed = {g: not covers(interval, truth[g]) for g, interval in decided.items()}
    yield from ((f"groups of {g}", is_wrong) for g, is_wrong in missed.items())
    yield "any", any(missed.values())
    if result.unbiased:
        return
    if (g := result.better) is not None:
        yield "better", truth[g] <= 1
    elif result.none_better:
        yield "none better", max(truth.values()) > 1 + TOLERABLE_EXTRA_ERROR


def group_moments(
    population: Population, vectors_PYD: Array, loss: Loss, size: int
) -> tuple[Array, float]:
    """Compute the mean of a group's `sum_i A_i u_i / G`, and its mean squared norm.

    Let T be this sum, `sum_i A_i u_i / G`. Let k be the counts of the reward levels in a group,
    with multinomial probability P(k). Let m_l and V_l be the means of u and of ||u||^2 over the
    outcomes at level l. Then

        G   E T      = sum_k P(k) sum_l a_l k_l m_l
        G^2 E||T||^2 = sum_k P(k) { sum_l a_l^2 k_l V_l
                                    + sum_lm a_l a_m k_l (k_m - 1(l=m)) <m_l, m_m> }

    Args:
        population: prompts and outcomes, which are enumerated.
        vectors_PYD: vector u of every outcome.
        loss: loss with a baseline that gives completions with equal rewards equal advantages a_l.
        size: G.
    """
    p_PY = population.p_PY
    level_L, level_PY = np.unique(population.rewards_PY, return_inverse=True)
    member_PYL = p_PY[..., None] * (level_PY[..., None] == np.arange(len(level_L)))
    chance_PL = member_PYL.sum(axis=1)
    share_PYL = member_PYL / np.maximum(chance_PL, 1e-300)[:, None]
    mean_PLD = np.einsum("pyl,pyd->pld", share_PYL, vectors_PYD)
    square_PL = np.einsum("pyl,py->pl", share_PYL, np.square(vectors_PYD).sum(axis=2))
    inner_PLL = mean_PLD @ mean_PLD.transpose(0, 2, 1)
    counts_CL = compositions(len(level_L), size)
    rewards_CG = np.array([np.repeat(level_L, counts) for counts in counts_CL])
    advantage_CG = advantages(loss.baseline, rewards_CG, BaselineContext(), loss.options)
    first_CL = np.minimum(np.cumsum(counts_CL, axis=1) - counts_CL, size - 1)
    a_CL = np.take_along_axis(advantage_CG, first_CL, axis=1)
    pairs_CLL = counts_CL[:, :, None] * (counts_CL[:, None] - np.eye(len(level_L)))
    pairs_CLL = pairs_CLL * a_CL[:, :, None] * a_CL[:, None]
    ways_C = gammaln(size + 1) - gammaln(counts_CL + 1).sum(axis=1)
    total_D, energy = np.zeros(vectors_PYD.shape[2]), 0.0
    for first in range(0, len(p_PY), BLOCK):
        part = slice(first, first + BLOCK)
        log_PL = np.log(np.maximum(chance_PL[part], 1e-300))
        chance_PC = np.exp(ways_C + log_PL @ counts_CL.T)
        once_PL, twice_PL = chance_PC @ (a_CL * counts_CL), chance_PC @ (a_CL**2 * counts_CL)
        pairs_PLL = np.tensordot(chance_PC, pairs_CLL, axes=1)
        total_D += np.einsum("pl,pld->d", once_PL, mean_PLD[part])
        energy += (twice_PL * square_PL[part]).sum() + (pairs_PLL * inner_PLL[part]).sum()
    return total_D / size / len(p_PY), float(energy) / size**2 / len(p_PY)


def true_error(population: Population, loss: Loss, size: int, rollouts: int) -> tuple[float, float]:
    """Enumerate the error of a loss's update with n rollouts, and the cos^2 of its mean."""
    gradient, _ = group_moments(population, population.scores_PYD, UNBIASED, size)
    vectors_PYD = population.scores_PYD * loss.length_factors(population.lengths_PY)[..., None]
    mean, energy = group_moments(population, vectors_PYD, loss, size)
    signal, square = float(gradient @ gradient), float(mean @ mean)
    kappa = float(mean @ gradient) / signal
    error = (square + (energy - square) * size / rollouts) / kappa**2 - signal
    return error, kappa**2 * signal / square


def truth_by_tokens(population: Population, size: int, rollouts: int) -> dict[str, float]:
    """Enumerate the efficiency and the direction of the mean over tokens."""
    error, direction = true_error(population, BY_TOKENS, size, rollouts)
    unbiased, _ = true_error(population, UNBIASED, size, rollouts)
    return {"efficiency_same_g": unbiased / error, "direction": direction}


KINDS = {
    "losses": Kind(losses, list(LIGHT), CELLS, 300),
    "stale": Kind(stale, list(LIGHT), CELLS, 300),
    "turned": Kind(turned, list(TURNED), CELLS, 300),
    "smaller": Kind(smaller, SMALLER, CALLBACK_CELLS, 300),
}
