"""Correlations of two reward functions, and of p (1-p) with a prompt's noise.

The correlation of two reward functions is measured within prompts. The first reward is 1 with a
probability that is drawn from Beta(a, b) for each prompt. In `formats`, the second reward copies
the first with probability 0.3, and is otherwise 1 with a probability from a second Beta
distribution (Beta(40, 1) in `rare`). In `lengths`, the second reward is minus a length. The length
is lognormal with a scale that depends on the prompt, and is multiplied by 1.5 if the first reward
is 0. In `long tails` the standard deviation of the log length is 1. The true correlation is
computed exactly for the same prompts and for 200 000 other prompts.

For the correlation of p (1-p) with the noise, each pool has new prompts. These prompts have
probabilities p drawn from Beta(a, b), 40 outcomes, and squared score norms with a factor exp(2
spread N(0, 1) - 2 slope p). The true correlation is enumerated from 12 000 prompts. The row
"uncorrected" is the estimate from the whole pool, which is not split into halves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from counting import Asked, Cell, Kind
from populations import Population

from grpo_ustat.estimators.halves import group_error, halves_of
from grpo_ustat.estimators.proxies import corrected_correlation
from grpo_ustat.estimators.reward_correlation import reward_correlation
from grpo_ustat.records import Array, ScorePool

COPIES, LONGER = 0.3, 1.5
# a and b for the first probability, and either a and b for the second probability or the standard
# deviation of the log length.
REWARDS = {
    "formats": ((1.0, 2.0), (2.0, 2.0)),
    "rare": ((1.0, 2.0), (40.0, 1.0)),
    "lengths": ((1.0, 2.0), 0.4),
    "long tails": ((1.0, 2.0), 1.0),
}
Law = tuple[tuple[float, float], tuple[float, float] | float]


def prompts(law: Law, count: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Draw probabilities of the first reward, and probabilities or scales of the second, [P]."""
    first, second = law
    chance_P = rng.beta(*first, count)
    if isinstance(second, float):
        return chance_P, np.exp(0.5 * rng.normal(size=count))
    return chance_P, rng.beta(*second, count)


def moments(law: Law, chance_P: Array, other_P: Array) -> Array:
    """Return the exact covariance and both variances of the rewards within each prompt, [3, P]."""
    variance_P = chance_P * (1 - chance_P)
    if not isinstance(law[1], float):
        mean_P = COPIES * chance_P + (1 - COPIES) * other_P
        return np.stack([COPIES * variance_P, variance_P, mean_P * (1 - mean_P)])
    mean, square = math.exp(law[1] ** 2 / 2), math.exp(2 * law[1] ** 2)
    mean_P = other_P * mean * (chance_P + LONGER * (1 - chance_P))
    square_P = other_P**2 * square * (chance_P + LONGER**2 * (1 - chance_P))
    covariance_P = variance_P * other_P * mean * (LONGER - 1)
    return np.stack([covariance_P, variance_P, square_P - mean_P**2])


def draw(law: Law, chance_P: Array, other_P: Array, size: int, rng: np.random.Generator) -> Array:
    """Draw both rewards for N completions of each prompt, [P, N, 2]."""
    shape = (len(chance_P), size)
    first_PN = rng.random(shape) < chance_P[:, None]
    if isinstance(law[1], float):
        lengths_PN = other_P[:, None] * np.exp(law[1] * rng.normal(size=shape))
        second_PN = -lengths_PN * np.where(first_PN, 1, LONGER)
    else:
        drawn_PN = rng.random(shape) < other_P[:, None]
        second_PN = np.where(rng.random(shape) < COPIES, first_PN, drawn_PN)
    return np.stack([first_PN, second_PN], axis=-1).astype(float)


def correlation(moments_3P: Array) -> float:
    """Divide the mean covariance by the square root of the product of the mean variances."""
    covariance, first, second = moments_3P.mean(axis=1)
    return float(covariance / math.sqrt(first * second))


def reward_functions(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge intervals for the correlation of two rewards, for these prompts and for new prompts."""
    law, rng = REWARDS[name], np.random.default_rng(0)
    truth = correlation(moments(law, *prompts(law, 200_000, rng)))

    def studies(count: int, size: int) -> Iterator[dict[str, bool]]:
        """Yield each study's intervals, with True if an interval misses."""
        for _ in range(asked.studies):
            of_prompts = prompts(law, count, rng)
            rewards_PNF = draw(law, *of_prompts, size, rng)
            truths = {"completions": correlation(moments(law, *of_prompts)), "questions": truth}
            intervals = {x: reward_correlation(rewards_PNF, 0, 1, x) for x in truths}
            yield {
                sentence: not intervals[x].low <= truths[x] <= intervals[x].high
                for sentence, x in (("these prompts", "completions"), ("new prompts", "questions"))
            }

    for count, size in asked.cells:
        facts = {"prompts": count, "completions": size}
        yield Cell(facts, studies(count, size), {"new prompts": truth})


# Values of a, b, spread and slope.
PROXIES = {
    "harder, larger scores": (1.5, 3.5, 0.25, 1.0),
    "much larger scores": (1.5, 3.5, 0.25, 3.0),
    "scores alike": (1.5, 3.5, 0.0, 0.0),
    "many zero-variance": (0.6, 1.0, 0.25, 1.0),
    "heavy tails": (0.6, 1.0, 0.5, 0.0),
}


def draw_prompts(count: int, law: tuple[float, ...], rng: np.random.Generator) -> Population:
    """Draw prompts with the law's parameters, whose policy is a softmax in 8 features."""
    a, b, spread, slope = law
    p_P1 = rng.beta(a, b, (count, 1))
    rewards_PY = (rng.random((count, 40)) < p_P1).astype(float)
    scale_P1 = np.exp(spread * rng.normal(size=(count, 1)) - slope * p_P1)
    features = rng.normal(size=(count, 40, 8)) * np.exp(0.3 * rng.normal(size=(count, 40, 1)))
    features = features * scale_P1[:, :, None]
    return Population(np.exp(0.5 * features[:, :, 0]), rewards_PY, features)


def proxies(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge intervals for the correlation of p (1-p) with a prompt's noise at G = 8."""
    law, rng = PROXIES[name], np.random.default_rng(0)
    parts = [draw_prompts(3000, law, rng).moments for _ in range(4)]
    variance_P, noise_P = np.concatenate(
        [(part.var_z, part.mse("leave_one_out", 8)) for part in parts], axis=1
    )
    truth = float(np.corrcoef(variance_P, noise_P)[0, 1])
    for count, size in asked.cells:
        drawn = (draw_prompts(count, law, rng) for _ in range(asked.studies))
        pools = (population.pool(np.arange(count), size, rng) for population in drawn)
        yield Cell(
            {"prompts": count, "completions": size},
            (judged_proxy(pool, truth) for pool in pools),
            {"correlation": truth, "estimate": truth},
        )


def judged_proxy(pool: ScorePool, truth: float) -> dict[str, bool | float]:
    """Return interval misses, estimates with and without halves, and zero-variance shares."""
    halves, full = halves_of(pool)
    noise, of_pool = (group_error(part["first"], part["second"], 8) for part in (halves, full))
    interval = corrected_correlation(halves["variance"], noise)
    statements: dict[str, bool | float] = {
        "uncorrected": float(np.corrcoef(full["variance"], of_pool)[0, 1]),
        "zero-variance prompts": float((halves["variance"] == 0).mean()),
    }
    if math.isfinite(interval.estimate):
        statements["correlation"] = not interval.low <= truth <= interval.high
        statements["estimate"] = interval.estimate
    return statements


QUESTIONS, COMPLETIONS = (12, 60, 500), (4, 8, 32)
KINDS = {
    "reward_correlation": Kind(
        reward_functions, list(REWARDS), [(m, n) for m in QUESTIONS for n in COMPLETIONS], 1000
    ),
    "proxies": Kind(proxies, list(PROXIES), ((60, 16), (60, 32))),
}
