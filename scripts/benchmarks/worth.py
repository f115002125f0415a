"""How often the intervals of what a rollout of a loss is worth cover the truth, by simulation.

Populations are those of populations.py, with lengths of completions that go with their rewards. The
truth is the estimate from all 8000 prompts with 64 completions each. Of every study, m prompts with
N completions each:

    decided      share of the studies in which the worth has an interval with two ends
    worth        of these, how often it covers; likewise at the unbiased estimate's best G
    direction    of all studies, how often the interval of cos^2 covers
    noise        of all studies, how often that of the share of noise covers
    best G       of the decided studies, how often the loss's best measured G is not called worse,
                 said once for each loss
    recipes      how often the intervals of all recipes that are decided cover at once, of the
                 studies that decide any, and how many those are on average

With `--lag` the completions are of another policy, whose chances of the outcomes are those of the
population times a log-normal factor (sigma .3), and as many fresh ones are compared with.

With `--turned` the loss is the mean over each completion's tokens and the populations those whose
mean it turns. A row has the shares of studies that print the worth and the direction, of these the
share that is wrong, and its 95 % interval (Clopper & Pearson 1934).

With `--smaller` a study is what TRL's callback keeps, m groups of N, and is asked what it says of
smaller groups of two losses. Rows as with `--turned`; *any* is an interval of several sizes,
*better* is wrong where the named size is truly no better, *none better* where one is so by 30 %.

    python scripts/benchmarks/worth.py --studies 300
    python scripts/benchmarks/worth.py --turned --studies 500 --cells 40x16 100x16 400x16
    python scripts/benchmarks/worth.py --lag
    python scripts/benchmarks/worth.py --smaller --cells 64x8 128x8 256x8 64x16 128x16 256x16
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from importlib import metadata
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
from populations import (
    FITTED,
    LIGHT,
    OUTCOMES,
    PROMPTS,
    TURNED,
    UNSEEN,
    Population,
    clopper_pearson,
)
from scipy.special import gammaln

from grpo_ustat.estimators.baselines import advantages
from grpo_ustat.estimators.group_terms import compositions
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.losses import UNBIASED, LossRow, loss_worths
from grpo_ustat.estimators.row_weights import Loss
from grpo_ustat.estimators.token_weights import EXACT, TokenWeights, token_factors
from grpo_ustat.estimators.worth import Worth
from grpo_ustat.measurements.recipes import recipe_worths
from grpo_ustat.pages.advice import TOLERABLE_EXTRA_ERROR
from grpo_ustat.records import Array, BaselineContext, Integers, ScorePool

# What TRL's hooks compute needs no TRL: they ask for its version alone.
version = metadata.version
with mock.patch.object(metadata, "version", lambda x: "1.16" if x == "trl" else version(x)):
    from grpo_ustat.integrations.trl.objective import OwnLoss, own_loss

ROLLOUTS, LONGEST = 64, 60
CELLS = ((20, 16), (40, 16), (100, 16), (200, 32))
SIZES = (2, 4, 8, 16)
LAGGED = [
    Loss("no ratio, sum", "group_std", {"epsilon": 1e-4}, "sum", LONGEST, tokens=TokenWeights()),
    Loss("exact ratio, sum", "leave_one_out", {}, "sum", LONGEST, tokens=EXACT),
    Loss("clipped, grpo", "group_std", {"epsilon": 1e-4}, "grpo", LONGEST,
         tokens=TokenWeights("token", "clip", 0.2, 0.2)),
    Loss("clipped, dapo", "group_std", {"epsilon": 1e-4}, "dapo", LONGEST,
         tokens=TokenWeights("token", "clip", 0.2, 0.2)),
]  # fmt: skip
BY_TOKENS, TURNED_SIZE = Loss("by tokens", "leave_one_out", {}, "grpo", LONGEST), 8
COLUMNS = [*(field.name for field in fields(Worth)), "best G"]
STD = {"epsilon": 1e-4}
TRAINED = [
    Loss("grpo", "group_std", STD, "grpo", LONGEST),
    Loss("dr_grpo", "group_mean", {}, "dr_grpo", LONGEST),
]
SMALLER = (
    "opposed", "few loud", "light, G* 3.1", "light, G* 8.8", "Pareto, high", "sparse, high",
    "camps, lognormal", "opposite camps", "partly turned",
)  # fmt: skip
POPULATIONS, BLOCK = {**FITTED, **UNSEEN}, 500  # prompts that are enumerated at once
LOSSES = [
    Loss("none, sum", "none", {}, "sum", LONGEST),
    Loss("group_std, sum", "group_std", STD, "sum", LONGEST),
    Loss("leave_one_out, grpo", "leave_one_out", {}, "grpo", LONGEST),
    Loss("group_std, grpo", "group_std", STD, "grpo", LONGEST),
    Loss("group_std, dapo", "group_std", STD, "dapo", LONGEST),
    Loss("group_std, bnpo", "group_std", STD, "bnpo", LONGEST, micro_batch_size=8),
    Loss("batch_std, sum", "batch_std", STD, "sum", LONGEST),
]


def study(population: Population, lengths_PY, chosen, completions: int, rng) -> ScorePool:
    """A scored pool of these prompts of the population."""
    prompts = len(chosen)
    draws = rng.random((prompts, completions, 1))
    outcomes = (draws > population.ends_PY[chosen][:, None, :-1]).sum(axis=2)
    rewards, lengths = (
        np.take_along_axis(x[chosen], outcomes, axis=1) for x in (population.rewards_PY, lengths_PY)
    )
    scores = np.take_along_axis(population.scores_PYD[chosen], outcomes[..., None], axis=1)
    return ScorePool(
        rewards_PN=rewards,
        gram_PNN=scores @ scores.transpose(0, 2, 1),
        lengths_PN=lengths,
        features_PNR=scores,
        centred_sums_PR=np.zeros((prompts, 1)),
    )


def group_moments(
    population: Population, vectors_PYD: Array, loss: Loss, size: int
) -> tuple[Array, float]:
    """The mean of a group's `sum_i A_i u_i / G`, and its mean squared norm.

    With k the counts of the rewards' levels in a group, of multinomial chance P(k), m_l the mean of
    u over the outcomes of level l and V_l that of its squared norm,

        G   E T      = sum_k P(k) sum_l a_l k_l m_l
        G^2 E||T||^2 = sum_k P(k) { sum_l a_l^2 k_l V_l
                                    + sum_lm a_l a_m k_l (k_m - 1(l=m)) <m_l, m_m> }

    Args:
        population: of prompts and outcomes, which are enumerated.
        vectors_PYD: u of every outcome.
        loss: whose rule gives equal rewards equal advantages a_l.
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
    advantage_CG = advantages(loss.rule, rewards_CG, BaselineContext(), loss.options)
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


def true_error(
    population: Population, lengths_PY: Integers, loss: Loss, size: int, rollouts: int
) -> tuple[float, float]:
    """The error of a loss's update of n rollouts and cos^2 of its mean, all outcomes enumerated."""
    gradient, _ = group_moments(population, population.scores_PYD, UNBIASED, size)
    vectors_PYD = population.scores_PYD * loss.length_factors(lengths_PY)[..., None]
    mean, energy = group_moments(population, vectors_PYD, loss, size)
    signal, square = float(gradient @ gradient), float(mean @ mean)
    kappa = float(mean @ gradient) / signal
    error = (square + (energy - square) * size / rollouts) / kappa**2 - signal
    return error, kappa**2 * signal / square


def truth_by_tokens(
    population: Population, lengths_PY: Integers, size: int, rollouts: int
) -> dict[str, float]:
    """Worth and direction of the mean over each completion's tokens, all outcomes enumerated."""
    error, direction = true_error(population, lengths_PY, BY_TOKENS, size, rollouts)
    unbiased, _ = true_error(population, lengths_PY, UNBIASED, size, rollouts)
    return {"worth": unbiased / error, "direction": direction}


def turned(
    name: str, cells: Sequence[tuple[int, int]], studies: int, seed: int = 10
) -> list[dict[str, Any]]:
    """How often worth and direction of a mean over tokens are printed and wrong, a row a cell."""
    population, lengths_PY = TURNED[name]()
    prompts = len(population.p_PY)
    truth = truth_by_tokens(population, lengths_PY, TURNED_SIZE, ROLLOUTS)
    rows: list[dict[str, Any]] = []
    for count, completions in cells:
        rng = np.random.default_rng([seed, count, completions])
        said, wrong = dict.fromkeys(truth, 0), dict.fromkeys(truth, 0)
        for number in range(studies):
            chosen = rng.integers(prompts, size=count)
            pool = study(population, lengths_PY, chosen, completions, rng)
            (row,) = loss_worths(pool, [BY_TOKENS], [TURNED_SIZE], ROLLOUTS, 2, number)
            for what, right in truth.items():
                found = getattr(row.worth, what)
                if math.isfinite(found.estimate):
                    said[what] += 1
                    wrong[what] += not covers(found, right)
        rows += [
            {"population": name, "cell": f"{count} x {completions}", "what": what,
             "truth": right, "said": said[what], "wrong": wrong[what], "studies": studies}
            for what, right in truth.items()
        ]  # fmt: skip
    return rows


def lagged(population: Population, lengths_PY, prompts: int, completions: int, rng):
    """A pool of the population, and one of another policy for each way of weighing tokens, of the
    same prompts; a completion is one token.
    """
    noise_PY = np.random.default_rng(11).normal(size=(PROMPTS, OUTCOMES)) * 0.3
    q_PY = population.p_PY * np.exp(np.concatenate([noise_PY, noise_PY], axis=1))
    q_PY /= q_PY.sum(axis=1, keepdims=True)
    earlier = copy(population)
    earlier.ends_PY = q_PY.cumsum(axis=1)
    places_PY = np.tile(np.arange(2 * OUTCOMES), (PROMPTS, 1))
    chosen = rng.integers(PROMPTS, size=prompts) if prompts < PROMPTS else np.arange(PROMPTS)
    fresh = study(population, lengths_PY, chosen, completions, rng)
    stale = study(earlier, places_PY, chosen, completions, rng)
    own_PN, old_PN = (
        np.log(np.maximum(np.take_along_axis(chances[chosen], stale.lengths_PN, axis=1), 1e-300))
        for chances in (population.p_PY, q_PY)
    )
    lengths_PN = np.take_along_axis(lengths_PY[chosen], stale.lengths_PN, axis=1)
    pools = {}
    for weights in {loss.tokens for loss in LAGGED if loss.tokens is not None}:
        factors = [
            token_factors(weights, kind, own_PN.reshape(-1, 1), old_PN.reshape(-1, 1),
                          np.ones((own_PN.size, 1), bool)).reshape(own_PN.shape)
            for kind in weights.kinds
        ]  # fmt: skip
        vectors = np.concatenate([f[..., None] * stale.features_PNR for f in factors], axis=1)
        pools[weights] = replace(
            stale, lengths_PN=lengths_PN, features_PNR=vectors, kinds=weights.kinds,
            gram_PNN=vectors @ vectors.transpose(0, 2, 1),
        )  # fmt: skip
    return fresh, pools


def smaller(
    name: str, groups: Sequence[int], size: int, studies: int, seed: int = 10
) -> list[dict[str, Any]]:
    """How often what the callback says of smaller groups is wrong, a row a loss and sentence."""
    if name in TURNED:
        population, lengths_PY = TURNED[name]()
    else:
        population = POPULATIONS[name]()
        lengths_PY = lengths_of(population)
    rows: list[dict[str, Any]] = []
    for loss, count in product(TRAINED, groups):
        errors = {
            g: true_error(population, lengths_PY, loss, g, ROLLOUTS)[0]
            for g in (size // 8, size // 4, size // 2, size) if g >= 2
        }  # fmt: skip
        truth = {g: errors[size] / error for g, error in errors.items() if g < size}
        said, wrong = Counter[str](), Counter[str]()
        rng = np.random.default_rng([seed, count, size])
        for _ in range(studies):
            chosen = rng.integers(len(population.p_PY), size=count)
            pool = study(population, lengths_PY, chosen, size, rng)
            for sentence, is_wrong in judged_sizes(own_loss(pool, loss, ROLLOUTS, ""), truth):
                said[sentence] += 1
                wrong[sentence] += is_wrong
        sentences = [*(f"groups of {g}" for g in truth), "any", "better", "none better"]
        truths = [*truth.values(), *[max(truth.values())] * 3]
        rows += [
            {"population": name, "loss": loss.name, "groups": count, "size": size,
             "sentence": sentence, "truth": true, "said": said[sentence],
             "wrong": wrong[sentence], "studies": studies}
            for sentence, true in zip(sentences, truths, strict=True)
        ]  # fmt: skip
    return rows


def judged_sizes(found: OwnLoss, truth: Mapping[int, float]) -> Iterator[tuple[str, bool]]:
    """Each thing that is said of smaller groups, and whether it is wrong.

    Args:
        found: by the callback.
        truth: the worth of a rollout in smaller groups, by g.
    """
    known = {g: x for g, x in found.against.items() if math.isfinite(x.estimate)}
    if not (found.decided and known):
        return
    missed = {g: not covers(interval, truth[g]) for g, interval in known.items()}
    yield from ((f"groups of {g}", is_wrong) for g, is_wrong in missed.items())
    yield "any", any(missed.values())
    if found.unbiased:
        return
    if (g := found.better) is not None:
        yield "better", truth[g] <= 1
    elif found.none_better:
        yield "none better", max(truth.values()) > 1 + TOLERABLE_EXTRA_ERROR


def print_shares(heading: str, row: Mapping[str, Any]) -> None:
    """A row: the truth, the share of studies that say it, that of these which are wrong."""
    share, ends = math.nan, (math.nan, math.nan)
    if row["said"]:
        share = row["wrong"] / row["said"]
        ends = clopper_pearson(row["wrong"], row["said"])
    print(f"{heading}{row['truth']:7.3f}{row['said'] / row['studies']:8.3f}{share:8.3f} "
          f"[{ends[0]:.3f}, {ends[1]:.3f}]", flush=True)  # fmt: skip


def main_smaller(asked: argparse.Namespace) -> None:
    """The table of what the callback says of smaller groups."""
    print(f"n = {ROLLOUTS}, {asked.studies} studies a cell")
    sizes = {size: [m for m, n in asked.cells if n == size] for _, size in asked.cells}
    for name, (size, groups) in product(asked.populations or SMALLER, sizes.items()):
        for row in smaller(name, groups, size, asked.studies):
            heading = f"{name:18}{row['groups']:5} x {size:<3} {row['loss']:8}{row['sentence']:13}"
            if row["said"]:
                print_shares(heading, row)


def main_turned(asked: argparse.Namespace) -> None:
    """The table of losses whose mean is turned."""
    print(f"n = {ROLLOUTS}, G = {TURNED_SIZE}, {asked.studies} studies a cell")
    for name in asked.populations or TURNED:
        for row in turned(name, asked.cells, asked.studies):
            print_shares(f"{name:18}{row['cell']:>9} {row['what']:10}", row)


def main_lag(asked: argparse.Namespace) -> None:
    """The table of rollouts that another policy wrote."""
    print(f"n = {ROLLOUTS}, {asked.studies} studies a cell")
    print(f"{'G*':12}{'m x N':>10}{'G':>4}  {'loss':26}{'truth':>7}{'decided':>9}{'worth':>10}"
          f"{'direction':>10}")  # fmt: skip
    for name in asked.populations or LIGHT:
        population = LIGHT[name]()
        lengths_PY = lengths_of(population)
        fresh, pools = lagged(population, lengths_PY, PROMPTS, 64, np.random.default_rng(9))
        rows = loss_worths(fresh, LAGGED, [4, 8], ROLLOUTS, 2000, 1, pools)
        truth = {(row.loss.name, row.group_size): row.worth for row in rows}
        for prompts, completions in asked.cells:
            rng, hits = np.random.default_rng(10), defaultdict(list)
            for number in range(asked.studies):
                fresh, pools = lagged(population, lengths_PY, prompts, completions, rng)
                arguments = fresh, LAGGED, [4, 8], ROLLOUTS, asked.draws, number, pools
                for row in loss_worths(*arguments):
                    if row.worth is None:
                        continue
                    key = row.loss.name, row.group_size
                    right, decided = truth[key], math.isfinite(row.worth.worth.high)
                    assert right is not None  # of all 8000 prompts
                    hits[key, "decided"].append(decided)
                    if decided:
                        covered = covers(row.worth.worth, right.worth.estimate)
                        hits[key, "worth"].append(covered)
                    if math.isfinite(direction := right.direction.estimate):
                        hits[key, "direction"].append(covers(row.worth.direction, direction))
            for key, right in truth.items():
                if right is None or not hits[key, "decided"]:
                    continue
                seen = hits[key, "worth"]
                text = f"{np.mean(seen):.3f}" if len(seen) >= 50 else "too few"
                turned = hits[key, "direction"]
                print(f"{name:12}{f'{prompts} x {completions}':>10}{key[1]:4}  {key[0]:26}"
                      f"{right.worth.estimate:7.2f}{np.mean(hits[key, 'decided']):9.2f}{text:>10}"
                      f"{np.mean(turned) if turned else math.nan:8.3f}", flush=True)  # fmt: skip


def lengths_of(population: Population):
    """Lengths of 1 to 60 tokens by prompt and outcome, shorter where the reward is 1."""
    rng = np.random.default_rng(8)
    prompts, outcomes = population.rewards_PY.shape
    doubled = population.scores_PYD[:, : outcomes // 2] == population.scores_PYD[:, outcomes // 2 :]
    distinct = outcomes // 2 if outcomes % 2 == 0 and doubled.all() else outcomes
    spread = rng.normal(size=(prompts, 1)) * 0.4 + rng.normal(size=(prompts, distinct)) * 0.4
    spread = np.tile(spread, (1, outcomes // distinct)) - 0.3 * population.rewards_PY
    return np.clip(20 * np.exp(spread), 1, LONGEST).astype(np.int64)


def cell(text: str) -> tuple[int, int]:
    """Prompts and completions of each."""
    prompts, completions = map(int, text.split("x"))
    return prompts, completions


def covers(interval: Interval, truth: float) -> bool:
    """Whether the truth is within, but for rounding."""
    return interval.low - 1e-9 <= truth <= interval.high + 1e-9


def against_best(rows: list[LossRow]) -> dict[str, Interval]:
    """Worths against the unbiased estimate's best G, where they are decided."""
    found = {row.loss.name: row.worth.worth_best for row in rows if row.worth is not None}
    return {name: worth for name, worth in found.items() if math.isfinite(worth.estimate)}


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=300, help="of each cell")
    parser.add_argument("--draws", type=int, default=100, help="of batches, of coupled losses")
    parser.add_argument("--populations", nargs="+")
    parser.add_argument("--lag", action="store_true", help="completions of another policy")
    parser.add_argument("--turned", action="store_true", help="losses whose mean is turned")
    parser.add_argument("--smaller", action="store_true", help="what is said of smaller groups")
    parser.add_argument("--cells", nargs="+", type=cell, default=CELLS, help="such as 64x8")
    asked = parser.parse_args()
    if asked.turned:
        main_turned(asked)
        return
    if asked.smaller:
        main_smaller(asked)
        return
    if asked.lag:
        main_lag(asked)
        return
    print(f"n = {ROLLOUTS}, {asked.studies} studies a cell")
    print(f"{'G*':12}{'m x N':>10}{'G':>4}  {'loss':22}{'truth':>7}{'decided':>9}", end="")
    print("".join(f"{name:>12}" for name in COLUMNS))
    for name in asked.populations or LIGHT:
        population = LIGHT[name]()
        lengths_PY = lengths_of(population)
        large = study(population, lengths_PY, np.arange(PROMPTS), 64, np.random.default_rng(9))
        rows = loss_worths(large, LOSSES, SIZES, ROLLOUTS, 2000, seed=1)
        truth = {(row.loss.name, row.group_size): row.worth for row in rows}
        best = {row.loss.name: row.group_size for row in rows if row.best}
        recipes = against_best(recipe_worths(large, LONGEST, SIZES, ROLLOUTS, 2000, seed=1))
        for prompts, completions in asked.cells:
            rng = np.random.default_rng(10)
            hits = defaultdict(list)
            together: list[tuple[int, bool]] = []  # recipes that are decided, whether all cover
            for number in range(asked.studies):
                chosen = rng.integers(PROMPTS, size=prompts)
                pool = study(population, lengths_PY, chosen, completions, rng)
                found = recipe_worths(pool, LONGEST, SIZES, ROLLOUTS, asked.draws, seed=number)
                if own := against_best(found):
                    right = all(covers(own[name], recipes[name].estimate) for name in own)
                    together.append((len(own), right))
                for row in loss_worths(pool, LOSSES, SIZES, ROLLOUTS, asked.draws, seed=number):
                    if row.worth is None:
                        continue
                    key = row.loss.name, row.group_size
                    decided = math.isfinite(row.worth.worth.high)
                    hits[key, "decided"].append(decided)
                    if decided and row.group_size == best[row.loss.name]:
                        hits[key, "best G"].append(row.alike)
                    for field in fields(Worth):
                        if decided or "worth" not in field.name:
                            found = getattr(row.worth, field.name)
                            right = getattr(truth[key], field.name).estimate
                            if math.isfinite(right):
                                hits[key, field.name].append(covers(found, right))
            for key, right in truth.items():
                if not hits[key, "decided"]:
                    continue
                print(f"{name:12}{f'{prompts} x {completions}':>10}{key[1]:4}  {key[0]:22}", end="")
                print(f"{right.worth.estimate:7.2f}{np.mean(hits[key, 'decided']):9.2f}", end="")
                for column in COLUMNS:
                    seen = hits[key, column]
                    text = f"{np.mean(seen):.3f}" if len(seen) >= 50 else "too few"
                    print(f"{text:>12}", end="")
                print(flush=True)
            count, right = np.mean(together or [(0, math.nan)], axis=0)
            print(f"{name:12}{f'{prompts} x {completions}':>10}  recipes: {right:.3f} of "
                  f"{len(together)} studies, {count:.1f} recipes decided", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
