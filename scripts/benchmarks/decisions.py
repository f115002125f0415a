"""How often an answer on the best group size is wrong, given that it is said, by simulation.

Populations of 8000 prompts with 6 outcomes each, whose constants are enumerated; flipped rewards
add to C3, so that G* grows, and a log-normal factor of the scores makes their tails heavy. Of every
study, m prompts drawn from one of them with N completions each:

    decided          G* has an interval with two ends, so that a group size is named
    G* wrong         of these, the interval misses the population's G*
    costs wrong      of these, some interval of the extra errors at n = 256 misses the true one
    direction wrong  of the neighbours said to cost error, those that truly do not
    bound wrong      of the others that say "at least", G* is below
    G*               mean over the decided ones

`--needs` follows the studies that are not decided: of those that say how many prompts are needed at
most, how many fresh studies of so many are decided, the median of what was said, and the number
that truly decides half of the studies; of those that say "at least" more, how often that is more
than this number.

    python scripts/benchmarks/decisions.py --decided 2000
    python scripts/benchmarks/decisions.py --needs
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import numpy as np
from scipy.special import stdtrit

from grpo_ustat.estimators.moments import norm_moments, pool_gradient_weights
from grpo_ustat.estimators.scaling import (
    ScalingEstimate,
    ScalingLaw,
    group_size_interval,
    scaling_estimate,
    widening,
)
from grpo_ustat.pages.findings import NEIGHBOUR_OFFSETS
from grpo_ustat.records import Array
from grpo_ustat.runs.record import DEFAULT_ROLLOUTS

POPULATIONS = {"3.1": (0.0, 0.0), "5.5": (0.257, 0.0), "5.4, heavy": (0.257, 0.7), "8.8": (0.36, 0)}
CELLS = ((8, 8), (8, 16), (8, 64), (16, 8), (16, 16), (40, 8), (40, 16), (60, 32), (100, 16))
SIZES = [size for size in range(2, DEFAULT_ROLLOUTS + 1) if DEFAULT_ROLLOUTS % size == 0]
PROMPTS, OUTCOMES, WIDTH, SEED = 8000, 6, 20, 5


class Population:
    """Prompts with their outcomes' chances, rewards and scores, and the constants of all of them.

    Args:
        flips: how often a reward is 1 less itself.
        tail: sigma of the log-normal factor of a prompt's scores.
    """

    def __init__(self, flips: float, tail: float):
        rng = np.random.default_rng(SEED)
        scores = rng.normal(size=(PROMPTS, OUTCOMES, WIDTH))
        if tail:
            scores *= np.exp(tail * rng.normal(size=(PROMPTS, 1, 1)))
        logits = rng.normal(size=(PROMPTS, OUTCOMES))
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        common = 0.5 * scores[..., 0] / np.abs(scores[..., 0]).mean()
        rewards = (common + rng.normal(size=(PROMPTS, OUTCOMES)) > 0).astype(float)
        scores -= np.einsum("py,pyd->pd", p, scores)[:, None]
        self.p_PY = np.concatenate([p * (1 - flips), p * flips], axis=1)
        self.ends_PY = self.p_PY.cumsum(axis=1)
        self.rewards_PY = np.concatenate([rewards, 1 - rewards], axis=1)
        self.scores_PYD = np.concatenate([scores, scores], axis=1)
        self.norms_PY = np.square(self.scores_PYD).sum(axis=2)
        value_P = (self.p_PY * self.rewards_PY).sum(axis=1)
        centred_PY = self.rewards_PY - value_P[:, None]
        g_PD = np.einsum("py,py,pyd->pd", self.p_PY, self.rewards_PY, self.scores_PYD)
        g_sq = float(np.square(g_PD).sum(axis=1).mean())
        first = float((self.p_PY * self.norms_PY * centred_PY**2).sum(axis=1).mean())
        spread_P = (self.p_PY * centred_PY**2).sum(axis=1)
        second = float(((self.p_PY * self.norms_PY).sum(axis=1) * spread_P).mean())
        c1 = g_sq - float(np.square(g_PD.mean(axis=0)).sum())
        self.law = ScalingLaw(c1, first - g_sq, second + g_sq)

    def n_mse(self, size: float) -> float:
        """n times the error of groups of `size`."""
        return size * self.law.c1 + self.law.c2 + self.law.c3 / (size - 1)

    def studies(self, prompts: int, completions: int, count: int, rng) -> Iterator[tuple]:
        """C1, C2, C3 of studies, each with its values without each prompt, [m]."""
        chunk = max(1, 200_000 // (prompts * completions))
        for first in range(0, count, chunk):
            several = min(chunk, count - first)
            chosen = rng.integers(PROMPTS, size=several * prompts)
            draws = rng.random((len(chosen), completions, 1))
            outcomes = (draws > self.ends_PY[chosen][:, None, :-1]).sum(axis=2)
            rewards = np.take_along_axis(self.rewards_PY[chosen], outcomes, axis=1)
            norms = np.take_along_axis(self.norms_PY[chosen], outcomes, axis=1)
            scores = np.take_along_axis(self.scores_PYD[chosen], outcomes[..., None], axis=1)
            ghat = np.einsum("pn,pnd->pd", pool_gradient_weights(rewards), scores)
            moments = norm_moments(norms, rewards, np.square(ghat).sum(axis=1))
            terms = moments.g_sq, moments.a_v - moments.g_sq, moments.d + moments.g_sq
            terms_3SP = np.stack(terms).reshape(3, several, prompts)
            ghat = ghat.reshape(several, prompts, -1)
            others_SP = np.einsum("spd,sd->sp", ghat, ghat.sum(axis=1))
            others_SP -= np.square(ghat).sum(axis=2)

            def constants(sums_3: Array, between: Array, m: int) -> Array:
                g_sq, c2, c3 = sums_3 / m
                return np.stack([g_sq - between / (m * (m - 1)), c2, c3])

            sums_3S1 = terms_3SP.sum(axis=2, keepdims=True)
            between_S1 = others_SP.sum(axis=1, keepdims=True)
            whole_3S1 = constants(sums_3S1, between_S1, prompts)
            without = sums_3S1 - terms_3SP, between_S1 - 2 * others_SP, prompts - 1
            without_3SP = constants(*without)
            yield from zip(whole_3S1[..., 0].T, without_3SP.transpose(1, 0, 2), strict=True)


def estimates(study: tuple[Array, Array], factor: float) -> tuple[ScalingEstimate, Array]:
    """The scaling law of one study as `mse` has it, and the interval of G*."""
    whole_3, without_3P = study
    names = ("c1", "c2", "c3")
    whole = dict(zip(names, whole_3, strict=True))
    delete_one = {name: one[None] for name, one in zip(names, without_3P, strict=True)}
    return scaling_estimate(whole, delete_one, factor), np.array(
        group_size_interval(whole, delete_one, factor)
    )


def conditional_errors(population: Population, prompts: int, completions: int, options) -> str:
    """A row of the first table."""
    rng, factor = np.random.default_rng(prompts * 100 + completions), widening(prompts, completions)
    critical = factor * float(stdtrit(prompts - 1, 0.975))
    gstar, counts = population.law.best_group_size, dict.fromkeys(("all", "sets", "costs"), 0)
    said = directions = bounds = below = 0
    named: list[float] = []
    for study in population.studies(prompts, completions, options.studies, rng):
        counts["all"] += 1
        z = study[0][0] / math.sqrt(study[1][0].var() * (prompts - 1))
        if z < 0.99 * critical and bounds >= options.decided:  # no interval with two ends
            continue
        estimate, (best, low, high) = estimates(study, factor)
        if not math.isfinite(high):
            if low > 2:
                bounds, below = bounds + 1, below + (low > gstar)
            continue
        named.append(best)
        counts["sets"] += not low <= gstar <= high
        reference = estimate.best_of(SIZES)
        extra = {size: estimate.extra_error(size, reference) for size in SIZES}
        truth = {size: population.n_mse(size) / population.n_mse(reference) - 1 for size in SIZES}
        counts["costs"] += any(
            not extra[size].low - 1e-12 <= truth[size] <= extra[size].high + 1e-12 for size in SIZES
        )
        place = SIZES.index(reference)
        for step in NEIGHBOUR_OFFSETS:
            if 0 <= place + step < len(SIZES) and extra[SIZES[place + step]].low > 0:
                said, directions = said + 1, directions + (truth[SIZES[place + step]] <= 0)
        if len(named) == options.decided:
            break
    few = len(named) < options.decided
    cells = [f"{len(named) / counts['all']:.2g}"]
    if few and len(named) < options.few:
        cells += [f"too few: {len(named)} of {counts['all']}", "", "", ""]
    else:
        shares = [f"{counts[key] / len(named):.3f}" for key in ("sets", "costs")]
        direction = f"{directions / said:.3f}" if said else "-"
        cells += [f"{len(named)}", *shares, direction]
    cells.append(f"{below / bounds:.3f}" if bounds else "-")
    cells.append(f"{np.mean(named):.2f}" if named else "-")
    return f"| {gstar:.2f} | {prompts} x {completions} | {' | '.join(cells)} |"


def follow_ups(population: Population, prompts: int, completions: int, options) -> str:
    """A row of the second table."""
    rng, factor = np.random.default_rng(prompts * 7 + completions), widening(prompts, completions)

    def decided_share(count: int, studies: int) -> float:
        of = population.studies(count, completions, studies, rng)
        every = [estimates(study, widening(count, completions))[1] for study in of]
        return float(np.mean([math.isfinite(high) for _, _, high in every]))

    counts = np.unique(np.geomspace(4, 4000, 31).round()).astype(int)
    shares: list[float] = []
    for count in counts:
        shares.append(decided_share(int(count), 400 if count < 400 else 100))
        if shares[-1] > 0.995:
            break
    known = counts[: len(shares)]
    median = float(np.interp(0.5, shares, known))
    highs, lows, undecided = [], [], 0
    for study in population.studies(prompts, completions, options.pilots, rng):
        estimate, (_, _, end) = estimates(study, factor)
        if math.isfinite(end):
            continue
        undecided += 1
        low, high = estimate.prompts_for_best_size(prompts, completions)
        if math.isfinite(high):
            highs.append(high)
        if low > prompts:
            lows.append(low)
    enough = float(np.mean(np.interp(highs, known, shares))) if highs else math.nan
    more = np.mean(np.array(lows) > median) if lows else math.nan
    return (
        f"| {population.law.best_group_size:.2f} | {prompts} x {completions} | {median:.0f} | "
        f"{undecided / options.pilots:.2f} | {len(lows) / max(undecided, 1):.2f} | {more:.3f} | "
        f"{len(highs) / max(undecided, 1):.3f} | {enough:.2f} | "
        f"{np.median(highs) if highs else math.nan:.0f} |"
    )


def main() -> None:
    """Print a table, a row for each population and size of study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decided", type=int, default=2000, help="decided studies of a row")
    parser.add_argument("--few", type=int, default=200, help="below these no share is printed")
    parser.add_argument("--studies", type=int, default=200_000, help="studies of a row at most")
    parser.add_argument("--needs", action="store_true")
    parser.add_argument("--pilots", type=int, default=4000)
    parser.add_argument("--populations", nargs="+", default=list(POPULATIONS))
    options = parser.parse_args()
    if options.needs:
        print("| G* | pilot | half decided at | undecided | say at least | of these too many | "
              "say at most | of these enough | median |")  # fmt: skip
    else:
        print("| G* | study | decided | of them | G* wrong | costs wrong | direction wrong | "
              "bound wrong | mean G* |")  # fmt: skip
    for name in options.populations:
        population = Population(*POPULATIONS[name])
        for prompts, completions in CELLS:
            row = follow_ups if options.needs else conditional_errors
            print(row(population, prompts, completions, options), flush=True)


if __name__ == "__main__":
    main()
