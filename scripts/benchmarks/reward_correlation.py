"""How often the interval of two reward functions' correlation within prompts holds the truth.

The first function is 1 with a chance of Beta(a, b), another for each prompt. The second copies it
with probability 0.3 and is 1 with a chance of its own else (`formats`, `rare`: a chance of Beta(40,
1)), or it is minus a length, lognormal with a scale of the prompt and 1.5 times as long where the
first is 0 (`lengths`; `long tails`: the log's standard deviation is 1). The truth is enumerated, of
the prompts themselves and of 200 000 others.

    python scripts/benchmarks/reward_correlation.py --studies 1000
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from grpo_ustat.estimators.reward_correlation import reward_correlation
from grpo_ustat.records import Array

COPIES, LONGER = 0.3, 1.5
LAWS = {  # of the first chance; of the second, or the standard deviation of log length
    "formats": ((1.0, 2.0), (2.0, 2.0)),
    "rare": ((1.0, 2.0), (40.0, 1.0)),
    "lengths": ((1.0, 2.0), 0.4),
    "long tails": ((1.0, 2.0), 1.0),
}
Law = tuple[tuple[float, float], tuple[float, float] | float]


def prompts(law: Law, count: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Chances of the first function, and of the second, or scales of lengths, [P] each."""
    first, second = law
    chance_P = rng.beta(*first, count)
    if isinstance(second, float):
        return chance_P, np.exp(0.5 * rng.normal(size=count))
    return chance_P, rng.beta(*second, count)


def moments(law: Law, chance_P: Array, other_P: Array) -> Array:
    """Covariance and both variances within each prompt, [3, P], exact."""
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
    """Rewards of N completions of each prompt, [P, N, 2]."""
    shape = (len(chance_P), size)
    first_PN = rng.random(shape) < chance_P[:, None]
    if isinstance(law[1], float):
        lengths_PN = other_P[:, None] * np.exp(law[1] * rng.normal(size=shape))
        second_PN = -lengths_PN * np.where(first_PN, 1, LONGER)
    else:
        own_PN = rng.random(shape) < other_P[:, None]
        second_PN = np.where(rng.random(shape) < COPIES, first_PN, own_PN)
    return np.stack([first_PN, second_PN], axis=-1).astype(float)


def correlation(moments_3P: Array) -> float:
    """Mean covariance over the root of both mean variances."""
    covariance, first, second = moments_3P.mean(axis=1)
    return float(covariance / math.sqrt(first * second))


def main() -> None:
    """Print the coverage of 95 % intervals, conditional on the prompts and generalising."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=1000, help="of a cell")
    parser.add_argument("--questions", type=int, nargs="+", default=[12, 60, 500])
    parser.add_argument("--completions", type=int, nargs="+", default=[4, 8, 32])
    options = parser.parse_args()
    print("| rewards | questions | completions | truth | conditional on these | new questions |")
    print("|---|---|---|---|---|---|")
    for name, law in LAWS.items():
        rng = np.random.default_rng(0)
        population = correlation(moments(law, *prompts(law, 200_000, rng)))
        for count in options.questions:
            for size in options.completions:
                held = np.zeros(2)
                for _ in range(options.studies):
                    of_prompts = prompts(law, count, rng)
                    rewards_PNF = draw(law, *of_prompts, size, rng)
                    truths = correlation(moments(law, *of_prompts)), population
                    for k, interval in enumerate(("completions", "questions")):
                        value = reward_correlation(rewards_PNF, 0, 1, interval)
                        held[k] += value.low <= truths[k] <= value.high
                given, new = held / options.studies
                row = (name, count, size, f"{population:.3f}", f"{given:.3f}", f"{new:.3f}")
                print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
