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

    python scripts/benchmarks/worth.py --studies 300
    python scripts/benchmarks/worth.py --turned --studies 500 --cells 40x16 100x16 400x16
    python scripts/benchmarks/worth.py --lag
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from dataclasses import fields, replace
from typing import Any

import numpy as np
from populations import LIGHT, OUTCOMES, PROMPTS, TURNED, Population, clopper_pearson

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.losses import LossRow, loss_worths
from grpo_ustat.estimators.row_weights import Loss
from grpo_ustat.estimators.token_weights import EXACT, TokenWeights, token_factors
from grpo_ustat.estimators.worth import Worth
from grpo_ustat.mse.recipes import recipe_worths
from grpo_ustat.records import Array, ScorePool

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


def group_moments(population: Population, vectors_PYD: Array, size: int) -> tuple[Array, float]:
    """The mean of a group's `sum_i A_i u_i / G`, A leave-one-out, and its mean squared norm.

    The sum is the U-statistic of `h(i, j) = (R_i - R_j) (u_i - u_j) / 2`, whose variance follows
    from those of h and of its mean over j (Hoeffding 1948).

    Args:
        population: of prompts and outcomes, which are enumerated.
        vectors_PYD: u of every outcome.
        size: G.
    """
    p_PY, rewards_PY = population.p_PY, population.rewards_PY
    centred_PY = rewards_PY - (p_PY * rewards_PY).sum(axis=1, keepdims=True)
    centred_PYD = vectors_PYD - np.einsum("py,pyd->pd", p_PY, vectors_PYD)[:, None]
    products_PYD = centred_PY[..., None] * centred_PYD
    mean_PD = np.einsum("py,pyd->pd", p_PY, products_PYD)
    square_P = np.square(mean_PD).sum(axis=1)
    of_row_PYD = (products_PYD + mean_PD[:, None]) / 2
    first_P = np.einsum("py,pyd->p", p_PY, np.square(of_row_PYD)) - square_P
    distance_PYY = np.square(vectors_PYD[:, :, None] - vectors_PYD[:, None]).sum(axis=3)
    apart_PYY = np.square(rewards_PY[:, :, None] - rewards_PY[:, None])
    second_P = np.einsum("py,pz,pyz->p", p_PY, p_PY, distance_PYY * apart_PYY) / 4 - square_P
    variance_P = (4 * (size - 2) * first_P + 2 * second_P) / (size * (size - 1))
    return mean_PD.mean(axis=0), float((square_P + variance_P).mean())


def truth_by_tokens(
    population: Population, lengths_PY: Array, size: int, rollouts: int
) -> dict[str, float]:
    """Worth and direction of the mean over each completion's tokens, all outcomes enumerated."""
    scores_PYD, groups = population.scores_PYD, rollouts / size
    gradient, energy = group_moments(population, scores_PYD, size)
    signal = float(gradient @ gradient)
    mean, energy_by_tokens = group_moments(population, scores_PYD / lengths_PY[..., None], size)
    square, kappa = float(mean @ mean), float(mean @ gradient) / signal
    error = (square + (energy_by_tokens - square) / groups) / kappa**2 - signal
    return {
        "worth": (energy - signal) / groups / error,
        "direction": kappa**2 * signal / square,
    }


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


def main_turned(asked: argparse.Namespace) -> None:
    """The table of losses whose mean is turned."""
    print(f"n = {ROLLOUTS}, G = {TURNED_SIZE}, {asked.studies} studies a cell")
    for name in asked.populations or TURNED:
        for row in turned(name, asked.cells, asked.studies):
            share, ends = math.nan, (math.nan, math.nan)
            if row["said"]:
                share = row["wrong"] / row["said"]
                ends = clopper_pearson(row["wrong"], row["said"])
            print(f"{name:18}{row['cell']:>9} {row['what']:10}{row['truth']:7.3f}"
                  f"{row['said'] / asked.studies:8.3f}{share:8.3f} [{ends[0]:.3f}, {ends[1]:.3f}]",
                  flush=True)  # fmt: skip


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
    parser.add_argument("--cells", nargs="+", type=cell, default=CELLS, help="such as 64x8")
    asked = parser.parse_args()
    if asked.turned:
        main_turned(asked)
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
