"""Check the bounds on the zero-variance share over simulated mixtures of prompt difficulties.

    python scripts/benchmarks/zero_variance_bounds.py             # 1 000 mixtures, the CSV file
    python scripts/benchmarks/zero_variance_bounds.py --mixtures 20

For each mixture the true share at every size is compared with the bounds from the exact averages,
and from averages of simulated steps with their sampling error. A mixture counts as outside if the
true share of any size is outside; with sampled averages this may happen for 5 % of mixtures.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np

from grpo_ustat.estimators.intervals import CONFIDENCE, Interval, steps_mean
from grpo_ustat.estimators.zero_variance_bounds import zero_variance_bounds
from grpo_ustat.records import Array

RESULTS = Path(__file__).with_suffix(".csv")
# Group size of the log, sizes at which the share is bounded, groups per step, and steps.
LOGGED_SIZE, SIZES, GROUPS, STEPS = 8, (2, 4, 16, 64), 16, 50
PROMPTS = 2000


def beta(generator: np.random.Generator) -> Array:
    return generator.beta(*generator.uniform(0.5, 5, 2), size=PROMPTS)


def u_shaped(generator: np.random.Generator) -> Array:
    return generator.beta(*generator.uniform(0.05, 0.6, 2), size=PROMPTS)


def j_shaped(generator: np.random.Generator) -> Array:
    p = generator.beta(generator.uniform(0.1, 0.7), generator.uniform(1.5, 6), size=PROMPTS)
    return p if generator.integers(2) else 1 - p


def few_points(generator: np.random.Generator) -> Array:
    points = generator.uniform(size=generator.integers(1, 5))
    return generator.choice(points, size=PROMPTS, p=generator.dirichlet(np.ones(len(points))))


def with_ends(generator: np.random.Generator) -> Array:
    points = np.concatenate([generator.uniform(size=generator.integers(1, 4)), [0.0, 1.0]])
    return generator.choice(points, size=PROMPTS, p=generator.dirichlet(np.ones(len(points))))


KINDS: dict[str, Callable[[np.random.Generator], Array]] = {
    "beta": beta,
    "U-shaped": u_shaped,
    "J-shaped": j_shaped,
    "one to four points": few_points,
    "points with 0 and 1": with_ends,
}


def zero_share(p: Array, size: int) -> float:
    return float(np.mean(p**size + (1 - p) ** size))


def exact_averages(p: Array) -> list[Interval]:
    """Compute the zero-variance share and the mean reward."""
    values = zero_share(p, LOGGED_SIZE), p.mean()
    return [Interval(float(x), float(x), float(x)) for x in values]


def sampled_averages(p: Array, generator: np.random.Generator) -> list[Interval]:
    """Return the two averages over simulated steps, with intervals that hold jointly."""
    prompts = generator.integers(len(p), size=(STEPS, GROUPS))
    successes = generator.binomial(LOGGED_SIZE, p[prompts])
    level = 1 - (1 - CONFIDENCE) / 2
    share = np.isin(successes, (0, LOGGED_SIZE)).mean(axis=1)
    means = successes.mean(axis=1) / LOGGED_SIZE
    draws = STEPS * GROUPS
    return [steps_mean(share, level, draws), steps_mean(means, level, draws * LOGGED_SIZE)]


def one_mixture(seed: int) -> list[dict[str, object]]:
    """Compare the bounds of one mixture with the truth, for exact and for sampled averages."""
    generator = np.random.default_rng(seed)
    kind = list(KINDS)[seed % len(KINDS)]
    p = KINDS[kind](generator)
    rows = []
    for averages, (share, mean) in (
        ("exact", exact_averages(p)),
        ("sampled", sampled_averages(p, generator)),
    ):
        bounds = {
            size: zero_variance_bounds(size, {LOGGED_SIZE: share}, mean) or (1.0, 0.0)
            for size in SIZES
        }
        inside = [low <= zero_share(p, size) <= high for size, (low, high) in bounds.items()]
        widths = {f"width_{size}": high - low for size, (low, high) in bounds.items()}
        setting = {"averages": averages, "kind": kind}
        rows.append({**setting, "outside": not all(inside), **widths})
    return rows


def summary(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Average over the mixtures of each kind, and over all."""
    table = []
    for averages in ("exact", "sampled"):
        for kind in (*KINDS, "all"):
            chosen = [
                row for row in rows
                if row["averages"] == averages and kind in ("all", row["kind"])
            ]  # fmt: skip
            if not chosen:
                continue
            means = {
                name: round(float(np.mean([float(str(row[name])) for row in chosen])), 3)
                for name in chosen[0]
                if name.startswith("width")
            }
            outside = sum(bool(row["outside"]) for row in chosen)
            setting = {"averages": averages, "kind": kind}
            table.append({**setting, "mixtures": len(chosen), "outside": outside, **means})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixtures", type=int, default=1000)
    arguments = parser.parse_args()
    rows = [row for seed in range(arguments.mixtures) for row in one_mixture(seed)]
    table = summary(rows)
    for row in table:
        print(*row.values(), sep="\t")
    if arguments.mixtures >= 1000:
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, table[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    main()
