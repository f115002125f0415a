"""How often `advise` is wrong about a training run, by simulation.

A population of prompts has 8 outcomes each, with features for scores and rewards 0 and 1, some of
which are flipped: that adds to C3, so G* grows. C1, C2 and C3 are enumerated. At the flips of "tie"
G = 4 and G = 8 are equally good, where a wrong verdict is most likely.

A run draws n / G prompts and G completions of each, 4, 8 or 20 times; each step is measured as
`monitor.gradient_mse_every` does, and the steps are averaged as `advise` does. Where G is truly the
best of the sizes from 4 that divide n, "raise" and "lower" are wrong.

    python scripts/benchmarks/advice.py --runs 1000
"""

from __future__ import annotations

import argparse
from collections import Counter

import numpy as np
from scipy.optimize import brentq

from grpo_ustat.estimators.groups import law_of_prompts
from grpo_ustat.estimators.moments import exact_moments, pool_gradient_weights
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.pages.advice import group_size_advice

POPULATION, OUTCOMES, WIDTH = 400, 8, 24


class Bed:
    """Prompts with their scores, rewards and probabilities.

    Args:
        rng: draws them.
        flips: how often a reward is 1 less itself.
        tail: of the prompts' score norms, the sigma of a log-normal factor.
    """

    def __init__(self, rng: np.random.Generator, flips: float, tail: float):
        shape = (POPULATION, OUTCOMES)
        p_PY = rng.dirichlet(np.ones(OUTCOMES), POPULATION)
        z_PY = (rng.random(shape) < rng.beta(1, 1, (POPULATION, 1))).astype(float)
        features = rng.normal(size=(*shape, WIDTH)) * np.exp(
            tail * rng.normal(size=(POPULATION, 1, 1))
        )
        self.p_PY = np.concatenate([(1 - flips) * p_PY, flips * p_PY], axis=1)
        self.z_PY = np.concatenate([z_PY, 1 - z_PY], axis=1)
        features = np.concatenate([features, features], axis=1)
        self.s_PYR = features - np.einsum("py,pyr->pr", self.p_PY, features)[:, None]
        self.q_PY = (self.s_PYR**2).sum(axis=2)
        g_PR = np.einsum("py,py,pyr->pr", self.p_PY, self.z_PY, self.s_PYR)
        moments = exact_moments(self.q_PY, self.z_PY, self.p_PY, (g_PR**2).sum(axis=1))
        self.law = ScalingLaw.of_moments(moments, float((g_PR.mean(axis=0) ** 2).sum()))

    def step(self, rng: np.random.Generator, prompts: int, size: int) -> np.ndarray | None:
        """C1, C2, C3 and ||grad J||^2 as a step's monitor estimates them; None where no group has
        variance.
        """
        chosen = rng.integers(POPULATION, size=prompts)
        ends_PY = self.p_PY[chosen].cumsum(axis=1)
        draws_PG = (rng.random((prompts, size))[..., None] > ends_PY[:, None]).sum(axis=2)
        draws_PG = draws_PG.clip(max=2 * OUTCOMES - 1)
        rewards_PG = np.take_along_axis(self.z_PY[chosen], draws_PG, axis=1)
        if (rewards_PG == rewards_PG[:, :1]).all():
            return None
        q_PG = np.take_along_axis(self.q_PY[chosen], draws_PG, axis=1)
        s_PGR = np.take_along_axis(self.s_PYR[chosen], draws_PG[..., None], axis=1)
        ghat_PR = np.einsum("pg,pgr->pr", pool_gradient_weights(rewards_PG), s_PGR)
        return law_of_prompts(rewards_PG, q_PG, ghat_PR @ ghat_PR.T)[0].constants_4


def tie(seed: int, tail: float) -> float:
    """The share of flips at which G = 4 and G = 8 have the same error, C3 = 21 C1."""

    def excess(flips: float) -> float:
        law = Bed(np.random.default_rng(seed), flips, tail).law
        return law.c3 / law.c1 - 21

    return float(brentq(excess, 0.0, 0.45, xtol=1e-6))


def main() -> None:
    """Print, for each kind of run, how often each verdict is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    print("| flips | tail | G* | n | G of the run | true extra error | steps | verdicts |")
    for name, tail in (("none", 0.0), ("tie", 0.0), ("tie", 0.7), ("0.35", 0.0)):
        flips = {"none": 0.0, "tie": tie(options.seed, tail), "0.35": 0.35}[name]
        bed = Bed(np.random.default_rng(options.seed), flips, tail)
        law, gstar = bed.law, bed.law.best_size()
        for n in (64, 256):
            sizes = [size for size in range(4, n // 4 + 1) if n % size == 0]
            best = law.least(sizes)
            far = [size for size in sizes if law.n_mse(size) > 1.3 * law.n_mse(best)]
            for size in (best, *far[-1:]):
                extra = law.n_mse(size) / law.n_mse(best) - 1
                for steps in (4, 8, 20):
                    verdicts = Counter()
                    for _ in range(options.runs):
                        drawn = (bed.step(rng, n // size, size) for _ in range(steps))
                        values = [one for one in drawn if one is not None]
                        if len(values) < 4:
                            verdicts["fewer than 4 steps"] += 1
                            continue
                        found = ScalingLaw.of_steps(np.stack(values, axis=1), n // size)
                        verdicts[group_size_advice(found, found.gstar(), size, n)[0]] += 1
                    shares = ", ".join(
                        f"{name} {100 * count / options.runs:.1f} %"
                        for name, count in verdicts.most_common()
                    )
                    row = (f"{flips:.3f}", tail, f"{gstar:.1f}", n, size, f"{100 * extra:.0f} %")
                    print("|", *(f"{cell} |" for cell in (*row, steps, shares)), flush=True)


if __name__ == "__main__":
    main()
