"""Correlation of p (1-p) with a prompt's noise, corrected by halves of a pool, beside the true one.

Prompts of a law drawn anew for every pool: chances of Beta(a, b), 40 outcomes, score norms that
differ between prompts by a factor exp(2 spread N(0, 1) - 2 slope p). The truth is that of 12 000
prompts, by enumeration. Printed: mean estimate, that of whole pools, coverage of the interval.

    python scripts/benchmarks/proxies.py --pools 200
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from grpo_ustat.estimators.halves import group_error, halves_of
from grpo_ustat.estimators.proxies import corrected_correlation
from grpo_ustat.records import ScorePool

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/helpers"))
from tabular import TabularPolicy  # noqa: E402

LAWS = {  # a, b, spread, slope
    "harder, larger scores": (1.5, 3.5, 0.25, 1.0),
    "much larger scores": (1.5, 3.5, 0.25, 3.0),
    "scores alike": (1.5, 3.5, 0.0, 0.0),
    "many zero-variance": (0.6, 1.0, 0.25, 1.0),
    "heavy tails": (0.6, 1.0, 0.5, 0.0),
}


def draw_prompts(count: int, law: tuple[float, ...], rng: np.random.Generator) -> TabularPolicy:
    """Prompts of a law."""
    a, b, spread, slope = law
    p_P1 = rng.beta(a, b, (count, 1))
    rewards_PY = (rng.random((count, 40)) < p_P1).astype(float)
    scale_P1 = np.exp(spread * rng.normal(size=(count, 1)) - slope * p_P1)
    features = rng.normal(size=(count, 40, 8)) * np.exp(0.3 * rng.normal(size=(count, 40, 1)))
    return TabularPolicy(features * scale_P1[:, :, None], 0.5 * np.eye(8)[0], rewards_PY)


def draw_pool(policy: TabularPolicy, size: int, rng: np.random.Generator) -> ScorePool:
    """N completions of every prompt."""
    outcomes, rows = policy.sample(size, rng), np.arange(len(policy.rewards_PY))[:, None]
    scores, rewards = policy.scores_PYD[rows, outcomes], policy.rewards_PY[rows, outcomes]
    gram, nothing = np.einsum("pid,pjd->pij", scores, scores), np.zeros((1, 1))
    return ScorePool(rewards, gram, 1 + outcomes, nothing[None], nothing, nothing)


def main() -> None:
    """Print truth, mean estimate and coverage by law, prompts and completions."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pools", type=int, default=200, help="of every line")
    parser.add_argument("--questions", type=int, nargs="+", default=[60], help="m")
    parser.add_argument("--completions", type=int, nargs="+", default=[16, 32], help="N")
    options = parser.parse_args()
    print("law                     m    N  zero-v | truth  mean  uncorr  cover")
    for name, law in LAWS.items():
        rng = np.random.default_rng(0)
        parts = [draw_prompts(3000, law, rng).moments() for _ in range(4)]
        x, y = (
            np.concatenate(values)
            for values in zip(
                *((part.var_z, part.mse("leave_one_out", 8)) for part in parts), strict=True
            )
        )
        truth = np.corrcoef(x, y)[0, 1]
        for questions in options.questions:
            for size in options.completions:
                intervals, uncorrected, zero_variance = [], [], []
                for _ in range(options.pools):
                    halves, whole = halves_of(
                        draw_pool(draw_prompts(questions, law, rng), size, rng)
                    )
                    noise, of_pool = (
                        group_error(part["first"], part["second"], 8) for part in (halves, whole)
                    )
                    intervals.append(corrected_correlation(halves["variance"], noise))
                    uncorrected.append(np.corrcoef(whole["variance"], of_pool)[0, 1])
                    zero_variance.append((halves["variance"] == 0).mean())
                known = [interval for interval in intervals if np.isfinite(interval.estimate)]
                covers = [interval.low <= truth <= interval.high for interval in known]
                print(
                    f"{name:21} {questions:4} {size:4} {np.mean(zero_variance):7.2f} | "
                    f"{truth:5.2f} {np.mean([interval.estimate for interval in known]):5.2f} "
                    f"{np.mean(uncorrected):7.2f} {np.mean(covers):6.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
