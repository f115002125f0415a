r"""Test a rule for the learning rate after a change of the rollouts per step n or the group size G.

    python scripts/benchmarks/learning_rate.py bandits
    python scripts/benchmarks/learning_rate.py train --minutes 48
    python scripts/benchmarks/learning_rate.py report

The rule says that from (n1, G1) to (n2, G2) the best learning rate of plain ascent changes by

    ( 1 + n_c(G1)/n1 ) / ( 1 + n_c(G2)/n2 ),    n_c(G) = n E||ghat - g||^2 / ||g||^2

and the best rate of Adam by a factor between this and its square root. Expand J(theta + eta ghat)
to second order with the curvature H = -d^2 J / dtheta^2, where ghat has covariance Sigma(G)/n. The
best rate is then, exactly,

    eta = ||g||^2 / ( g'Hg + tr(H Sigma(G))/n ) = eta_0 / ( 1 + n_H(G)/n ),
    n_H(G) = tr(H Sigma(G)) / g'Hg

The rule replaces n_H by n_c, which assumes that J curves equally in all directions (McCandlish et
al., arXiv 1812.06162, section 2.2; for Adam they report exponents between 1/2 and 1).

`bandits` enumerates all batches of small softmax policies with shared parameters, whose rewards
disagree between prompts, so that J has a finite maximiser. A group's gradient, times G (G-1), is a
vector of integers. The law of the sum over B groups is therefore a power of the Fourier transform
of one group's law. The best rate is the root of d/d eta E[J(theta + eta ghat)] next to the largest
value on a grid. In the last two policies the arms also differ in a style without reward, which adds
noise in a direction in which J is flat. (Tabular policies with two arms have no best rate: the
gradient of each group points to the better arm.)

`train` trains `tiny_base` on arithmetic for 16 steps with `trl_dr_grpo`, whose gradient is that of
`leave_one_out` up to a factor that depends only on G. Each cell (optimizer, n, G) starts with three
learning rates in steps of a factor of 2. The grid is extended until the best rate is not the lowest
and half of the best gain is lost at the highest. Two definitions were fixed before the runs:

    best       vertex of the parabola in the logarithm of the rate through the mean gains at the
               best rate of the grid and its neighbours
    largest    highest rate at which half of the best mean gain is left, by linear interpolation
               in the logarithm

A third, `harmless`, was added afterwards: the highest rate at which the mean gain is not below 0.
In the expansion above it is twice the best rate. A gain is held-out accuracy (all test questions,
4 completions each) after training minus before. Its standard deviation between seeds is pooled over
the cells of an optimizer. Intervals of factors are those of 2000 draws of all mean gains with this
standard deviation. n_c is that of the study in `NUMBERS`.

The record has 82 runs, made in 42 minutes on a busy CPU. With SGD at n = 32 no rate has a gain that
differs significantly from 0, so factors from n = 32 rest on the rates at which accuracy falls. Left
out for lack of time: AdamW at n = 256 and at G = 2, n = 512, more than three seeds. All n are far
below n_c(8) = 3461, so for n the rule hardly differs there from n2/n1.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from efficiency_and_training import accuracy
from scipy.optimize import brentq

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.gap.covariance import covariance_parts
from grpo_ustat.gap.problems import SoftmaxProblem
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.train import setup, trainer

ROOT = Path(__file__).resolve().parents[2]
BANDITS, TRAINING = (
    ROOT / "docs/examples" / f"learning_rate_{name}.csv" for name in ("bandits", "training")
)
IMAGE = ROOT / "docs/images/learning_rate.png"

# Features of the arms.
TWO, THREE = [[1], [0]], [[1, 0], [0, 1], [-1, -1]]
STRETCHED = [[3, 0], [0, 1], [-3, -1]]
FOUR = [[1, 0], [-1, 0], [0, 1], [0, -1]]
# Two arms in two styles; the second feature is the style.
STYLED = [[1, 1], [1, -1], [0, 1], [0, -1]]
LOUDLY_STYLED = [[1, 3], [1, -3], [0, 3], [0, -3]]
# Features; rewarded arms of each prompt; their probability at u = 0, the rest being shared equally.
POLICIES: dict[str, tuple[list[list[int]], list[list[int]], list[float]]] = {
    "2 arms, equal difficulty": (TWO, [[0], [0], [1]], [0.7, 0.7, 0.7]),
    "2 arms, unequal difficulty": (TWO, [[0], [0], [1], [1]], [0.9, 0.4, 0.8, 0.3]),
    "3 arms, equal difficulty": (THREE, [[0], [0], [1], [2]], [0.6] * 4),
    "3 arms, unequal difficulty": (THREE, [[0], [0], [1], [2]], [0.9, 0.3, 0.6, 0.4]),
    "3 arms, one parameter 3 times as strong": (STRETCHED, [[0], [0], [1], [2]], [0.6] * 4),
    "4 arms, unequal difficulty": (FOUR, [[0], [0], [1], [2], [3]], [0.9, 0.3, 0.5, 0.6, 0.4]),
    "2 arms, style without reward": (STYLED, [[0, 1], [0, 1], [2, 3]], [0.7, 0.7, 0.7]),
    "2 arms, strong style without reward": (
        LOUDLY_STYLED, [[0, 1], [0, 1], [2, 3]], [0.7, 0.7, 0.7]
    ),
}  # fmt: skip
# Distance from the maximiser, in parameters; direction of the first two.
DISTANCES = {"near": 0.1, "middle": 0.3, "far": 1.0}
DIRECTION = (1.0, 0.4)
ROLLOUTS, GROUP_SIZES = (8, 32, 128), (2, 4, 8)
# Smallest probability of a batch gradient that is kept; rounding errors are smaller.
MIN_PROBABILITY = 1e-15
# First guess of the best rate if J is not concave along its gradient.
GUESS = 5.0


@dataclass(frozen=True)
class Exact:
    """Best rate and noise scales of a policy at one (n, G)."""

    # Name of the policy, and of its distance from the maximiser.
    policy: str
    distance: str
    rollouts: int
    group_size: int
    # Best learning rate; infinite if E[J] still rises at the end of the grid.
    rate: float
    # n_c(G) and n_H(G); n_H is NaN if J is not concave along its gradient.
    noise_scale: float
    weighted_scale: float


def bandit(name: str) -> SoftmaxProblem:
    """Return the policy of a name."""
    features, right, right_probability = POLICIES[name]
    arms = len(features)
    rewards_PY = np.array([[float(arm in of_prompt) for arm in range(arms)] for of_prompt in right])
    p_P1 = np.array(right_probability)[:, None]
    count_P1 = rewards_PY.sum(axis=1, keepdims=True)
    offset_PY = np.log(np.where(rewards_PY, p_P1 / count_P1, (1 - p_P1) / (arms - count_P1)))
    return SoftmaxProblem(
        rewards_PY=rewards_PY, parameters=len(features[0]), start_K=np.zeros(len(features[0])),
        reach=1.0, feature_YK=np.array(features, float), offset_PY=offset_PY,
    )  # fmt: skip


def policy_at(name: str, distance: float) -> tuple[SoftmaxProblem, np.ndarray]:
    """Return a policy and its parameters u at a distance from its maximiser.

    Newton's method needs curvature in all directions, so the maximiser along the style, in which J
    is flat, is set to 0.
    """
    problem = bandit(name)
    if "style" in name:
        best = bandit("2 arms, equal difficulty").best_K[0]
        return problem, np.array([best - distance, 0.0])
    return problem, problem.best_K - distance * np.array(DIRECTION[: len(problem.start_K)])


def group_law(
    problem: SoftmaxProblem, u_K: np.ndarray, group_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct values of G (G-1) times a group's gradient, [V, K], and their law, [V].

    With c_y completions of arm y and a reward sum S, this vector is `sum_y c_y (G r_y - S) phi_y`.
    """
    probability_PY = problem.law(u_K[:, None])[0][..., 0]
    features, rewards_PY = problem.feature_YK.astype(int), problem.rewards_PY.astype(int)
    prompts, arms = rewards_PY.shape
    law: dict[tuple[int, ...], float] = {}
    for counts in itertools.product(range(group_size + 1), repeat=arms):
        if sum(counts) != group_size:
            continue
        c_Y = np.array(counts)
        ways = math.factorial(group_size) // math.prod(map(math.factorial, counts))
        for r_Y, p_Y in zip(rewards_PY, probability_PY, strict=True):
            value = tuple(map(int, (c_Y * (group_size * r_Y - c_Y @ r_Y)) @ features))
            law[value] = law.get(value, 0.0) + ways * float(np.prod(p_Y**c_Y)) / prompts
    return np.array(list(law)), np.array(list(law.values()))


def batch_law(
    problem: SoftmaxProblem, u_K: np.ndarray, rollouts: int, group_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return all values of ghat, [K, V], and their probabilities, [V]."""
    value_VK, probability_V = group_law(problem, u_K, group_size)
    groups = rollouts // group_size
    reach_K = np.abs(value_VK).max(axis=0) * groups
    shape = tuple(map(int, 2 * reach_K + 1))
    grid = np.zeros(shape)
    grid[tuple((value_VK % shape).T)] = probability_V
    axes = tuple(range(len(shape)))
    power = np.fft.irfftn(np.fft.rfftn(grid, axes=axes) ** groups, shape, axes=axes)
    places = np.nonzero(power > MIN_PROBABILITY)
    sum_KV = np.stack(places)
    sum_KV = np.where(sum_KV > reach_K[:, None], sum_KV - np.array(shape)[:, None], sum_KV)
    weight_V = power[places]
    return sum_KV / (rollouts * (group_size - 1)), weight_V / weight_V.sum()


def best_rate(
    problem: SoftmaxProblem, u_K: np.ndarray, rollouts: int, group_size: int, guess: float
) -> float:
    """Return the learning rate with the largest E[J(u + eta ghat)]."""
    ghat_KV, weight_V = batch_law(problem, u_K, rollouts, group_size)

    def gain(rate: float) -> float:
        return float(weight_V @ problem.objective(u_K[:, None] + rate * ghat_KV))

    def slope(rate: float) -> float:
        gradient_KV = problem.gradient(u_K[:, None] + rate * ghat_KV)
        return float(weight_V @ (gradient_KV * ghat_KV).sum(axis=0))

    grid = guess * 2.0 ** np.arange(-5, 6)
    place = int(np.argmax([gain(rate) for rate in grid]))
    if place == len(grid) - 1:
        return math.inf
    return float(brentq(slope, grid[max(place - 1, 0)], grid[place + 1], rtol=1e-10))


def scales(problem: SoftmaxProblem, u_K: np.ndarray) -> tuple[ScalingLaw, ScalingLaw, float]:
    """Return the laws of n_c and n_H, and eta_0 = ||g||^2 / g'Hg."""
    parts = covariance_parts(*problem.law(u_K[:, None]), problem.rewards_PY, "leave_one_out")
    parts_KK = [part[..., 0] for part in (parts.prompts, parts.completions, parts.pairs)]
    g_K, curvature_KK = problem.gradient(u_K[:, None])[:, 0], problem.curvature_at(u_K)

    def law(weight_KK: np.ndarray) -> ScalingLaw:
        c1, c2, c3 = (float(np.trace(weight_KK @ part)) for part in parts_KK)
        return ScalingLaw.exact(c1, c2, c3, float(g_K @ weight_KK @ g_K))

    plain, weighted = law(np.eye(len(u_K))), law(curvature_KK)
    return plain, weighted, float(g_K @ g_K) / float(g_K @ curvature_KK @ g_K)


def enumerated(
    names: Iterable[str] = POLICIES,
    rollouts: Sequence[int] = ROLLOUTS,
    group_sizes: Sequence[int] = GROUP_SIZES,
) -> list[Exact]:
    """Enumerate the best rate of every policy, distance, n and G."""
    rows = []
    for name, distance in itertools.product(names, DISTANCES):
        problem, u_K = policy_at(name, DISTANCES[distance])
        plain, weighted, first = scales(problem, u_K)
        for size, n in itertools.product(group_sizes, rollouts):
            n_c, n_h = (law.noise_scale(size).estimate for law in (plain, weighted))
            guess = (first if first > 0 else GUESS) / (1 + (n_h if n_h > 0 else n_c) / n)
            rate = best_rate(problem, u_K, n, size, guess)
            rows.append(Exact(name, distance, n, size, rate, n_c, n_h))
    return rows


def rate_factor(scale_1: float, rollouts_1: int, scale_2: float, rollouts_2: int) -> float:
    """Return the factor of the rule from (n1, G1) to (n2, G2), with the noise scales at G1 and G2.

    >>> rate_factor(300.0, 100, 300.0, 300)
    2.0
    """
    return (1 + scale_1 / rollouts_1) / (1 + scale_2 / rollouts_2)


@dataclass(frozen=True)
class Change:
    """Exact factor of the best rate of a policy, and the factor of the rule with each scale."""

    policy: str
    distance: str
    exact: float
    # With n_c and with n_H.
    rule: float
    weighted: float

    @property
    def errors(self) -> tuple[float, float]:
        """Largest of factor/exact and exact/factor, minus 1, with n_c and n_H."""
        both = (abs(math.log(factor / self.exact)) for factor in (self.rule, self.weighted))
        plain, weighted = (math.expm1(error) for error in both)
        return plain, weighted


def changes(rows: Iterable[Exact], kind: str) -> list[Change]:
    """Return all changes of one kind: "n" (four times the rollouts) or "G" (from 2 to 8)."""
    cells = {(r.policy, r.distance, r.rollouts, r.group_size): r for r in rows}
    result = []
    for (policy, distance, n, size), first in cells.items():
        key = (policy, distance, 4 * n, size) if kind == "n" else (policy, distance, n, 8)
        if key not in cells or (kind == "G" and size != 2):
            continue
        second = cells[key]
        rule, weighted = (
            rate_factor(getattr(first, scale), n, getattr(second, scale), second.rollouts)
            for scale in ("noise_scale", "weighted_scale")
        )
        result.append(Change(policy, distance, second.rate / first.rate, rule, weighted))
    return result


# Learning of `tiny_base`.

# Overrides of every training run.
RUN = [
    "model=tiny_base", "dataset=arithmetic", "objective=trl_dr_grpo", "max_steps=16",
    "eval.num_generations=4", "rollout_batch_size=1024",
]  # fmt: skip
# First middle rate by optimizer, n and G, in the order in which they are run.
MIDDLE = {
    ("sgd", 128, 8): 0.4,
    ("sgd", 128, 2): 0.4,
    ("sgd", 256, 8): 0.8,
    ("sgd", 32, 8): 0.1,
    ("adamw", 128, 8): 1e-4,
    ("adamw", 32, 8): 5e-5,
    ("adamw", 256, 8): 2e-4,
    ("adamw", 128, 2): 1e-4,
}
SEEDS = (0, 1, 2)
# Share of the best gain that is left at the largest rate.
USEFUL = 0.5
# Pairs of cells to compare: n1, G1 and n2, G2.
COMPARED = (((32, 8), (128, 8)), ((128, 8), (256, 8)), ((32, 8), (256, 8)), ((128, 2), (128, 8)))
NUMBERS = ROOT / "docs/examples/numbers/tiny_base_arithmetic-bare_base_full.json"
DRAWS = 2000
COLUMNS = ("optimizer", "rollouts", "group_size", "rate", "seed", "before", "after", "seconds")
Cell = tuple[str, int, int]
Gains = dict[tuple[Cell, float, int], float]


@dataclass(frozen=True)
class Curve:
    """Gain of a cell by learning rate. Axes: R rate, S seed."""

    rate_R: np.ndarray
    gain_RS: np.ndarray

    @property
    def mean_R(self) -> np.ndarray:
        """Mean gain over the seeds."""
        return self.gain_RS.mean(axis=1)

    def next_rate(self) -> float | None:
        """Return a rate beyond an end of the grid, or None if the grid is wide enough."""
        if self.mean_R.argmax() == 0:
            return self.rate_R[0] / 2
        if self.mean_R[-1] > USEFUL * self.mean_R.max():
            return self.rate_R[-1] * 2
        return None

    def best(self, mean_R: np.ndarray) -> float:
        """Return log2 of the best rate, see the description of the script."""
        x_R = np.log2(self.rate_R)
        middle = min(max(int(mean_R.argmax()), 1), len(x_R) - 2)
        near = slice(middle - 1, middle + 2)
        curvature, slope, _ = np.polyfit(x_R[near] - x_R[middle], mean_R[near], 2)
        if curvature >= 0:
            return float(x_R[mean_R.argmax()])
        vertex = x_R[middle] - slope / (2 * curvature)
        return float(np.clip(vertex, x_R[middle - 1], x_R[middle + 1]))

    def largest(self, mean_R: np.ndarray, share: float) -> float:
        """Return log2 of the largest rate at which this share of the best gain is left.

        It is at most the highest rate of the grid.
        """
        x_R, left = np.log2(self.rate_R), share * mean_R.max()
        place = int(np.nonzero(mean_R >= left)[0].max(initial=0))
        if place == len(x_R) - 1:
            return float(x_R[-1])
        return float(np.interp(left, mean_R[[place + 1, place]], x_R[[place + 1, place]]))


def train(cell: Cell, rate: float, seed: int, before: float | None) -> tuple[float, float]:
    """Train once; return held-out accuracy before and after.

    Args:
        cell, rate, seed: the run.
        before: accuracy before training, if it was measured in another run of this seed.
    """
    optimizer, rollouts, group_size = cell
    config = compose_config("train", [
        *RUN, f"optimizer={optimizer}", f"learning_rate={rate:g}", f"seed={seed}",
        f"budget.rollouts={rollouts}", f"group_size={group_size}",
    ])  # fmt: skip
    # Nothing is written to this folder.
    with tempfile.TemporaryDirectory() as folder:
        run = setup.set_up(config, RunFolder(Path(folder), config))
        before = accuracy(run) if before is None else before
        progress = trainer.TrainProgress()
        try:
            while progress.step < config.max_steps:
                trainer.train_step(run, progress)
            after = accuracy(run)
        except FloatingPointError:
            after = 0.0
    return before, after


def run_cells(file: Path, minutes: float) -> None:
    """Train the runs that the file does not have, and add a line for each run as it ends.

    Args:
        file: CSV of the runs.
        minutes: no run starts after this time.
    """
    end = time.monotonic() + 60 * minutes
    rows = read_rows(file) if file.exists() else []
    starts = {int(row["seed"]): float(row["before"]) for row in rows}
    if not rows:
        file.write_text(",".join(COLUMNS) + "\n")
    for cell, middle in MIDDLE.items():
        wanted = [middle / 2, middle, 2 * middle]
        while wanted:
            gains = gains_of(read_rows(file))
            rates = sorted({*wanted, *(rate for of_cell, rate, _ in gains if of_cell == cell)})
            for rate, seed in itertools.product(rates, SEEDS):
                if (cell, rate, seed) in gains:
                    continue
                if time.monotonic() > end:
                    return
                start = time.perf_counter()
                before, after = train(cell, rate, seed, starts.get(seed))
                starts[seed] = before
                seconds = round(time.perf_counter() - start, 1)
                with file.open("a", newline="") as out:
                    writer = csv.writer(out, lineterminator="\n")
                    writer.writerow([*cell, rate, seed, before, after, seconds])
            beyond = curves(gains_of(read_rows(file)))[cell].next_rate()
            wanted = [] if beyond is None else [beyond]


def read_rows(file: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV."""
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def gains_of(rows: Iterable[Mapping[str, str]]) -> Gains:
    """Return the gains by cell, rate and seed."""
    gains: Gains = {}
    for row in rows:
        cell = row["optimizer"], int(row["rollouts"]), int(row["group_size"])
        key = cell, float(row["rate"]), int(row["seed"])
        gains[key] = float(row["after"]) - float(row["before"])
    return gains


def curves(gains: Gains) -> dict[Cell, Curve]:
    """Return the curve of every cell, from the rates that all seeds have."""
    result = {}
    for cell in dict.fromkeys(key[0] for key in gains):
        rates = sorted({rate for of_cell, rate, _ in gains if of_cell == cell})
        rates = [rate for rate in rates if all((cell, rate, seed) in gains for seed in SEEDS)]
        gain = [[gains[cell, rate, seed] for seed in SEEDS] for rate in rates]
        if len(rates) >= 3:
            result[cell] = Curve(np.array(rates), np.array(gain))
    return result


@dataclass(frozen=True)
class Measured:
    """Factor of the learning rate from one cell to another, and the rule."""

    optimizer: str
    # n1, G1 and n2, G2.
    before: tuple[int, int]
    after: tuple[int, int]
    # Factor of the best, the largest and the harmless rate.
    factors: tuple[Interval, Interval, Interval]
    # The rule for plain ascent.
    rule: float

    @property
    def range(self) -> tuple[float, float]:
        """Lowest and highest factor that the rule allows."""
        ends = (self.rule, self.rule if self.optimizer == "sgd" else math.sqrt(self.rule))
        return min(ends), max(ends)


def policy_law() -> ScalingLaw:
    """Return the scaling law of `tiny_base`, without errors, from its row in Numbers."""
    row = json.loads(NUMBERS.read_text())
    # In units of C1, from G*, the prompts' share of the noise at G = 8, and n_c(8).
    c3 = (row["gstar"] - 1) ** 2
    total = 8 / row["prompt_share"]
    return ScalingLaw.exact(1.0, total - 8 - c3 / 7, c3, total / row["n_c"])


def measured(gains: Gains) -> list[Measured]:
    """Return the factors of all pairs of cells whose curves are known."""
    by_cell, law, rng = curves(gains), policy_law(), np.random.default_rng(0)
    result = []
    for optimizer in ("sgd", "adamw"):
        mine = {cell: curve for cell, curve in by_cell.items() if cell[0] == optimizer}
        if not mine:
            continue
        variances = np.concatenate([c.gain_RS.var(axis=1, ddof=1) for c in mine.values()])
        deviation = math.sqrt(float(variances.mean()))
        # Log2 of the three rates: the estimate, then those of each draw.
        logs_DX3: dict[tuple[int, int], np.ndarray] = {}
        for (_, *key), curve in mine.items():
            error = deviation / math.sqrt(curve.gain_RS.shape[1])
            drawn = curve.mean_R + error * rng.standard_normal((DRAWS, len(curve.rate_R)))
            logs = [
                (curve.best(m), curve.largest(m, USEFUL), curve.largest(m, 0.0))
                for m in (curve.mean_R, *drawn)
            ]
            # The gradient of `trl_dr_grpo` is (G-1)/G times that of `leave_one_out`. AdamW's step
            # does not depend on the gradient's length.
            unit = math.log2(1 - 1 / key[1]) if optimizer == "sgd" else 0.0
            logs_DX3[key[0], key[1]] = np.array(logs) + unit
        for before, after in COMPARED:
            if not (before in logs_DX3 and after in logs_DX3):
                continue
            factor_D3 = 2.0 ** (logs_DX3[after] - logs_DX3[before])
            ends_23 = np.quantile(factor_D3[1:], [0.025, 0.975], axis=0)
            best, largest, harmless = (
                Interval(*map(float, row)) for row in zip(factor_D3[0], *ends_23, strict=True)
            )
            scale_1, scale_2 = (law.noise_scale(size).estimate for _, size in (before, after))
            rule = rate_factor(scale_1, before[0], scale_2, after[0])
            factors = best, largest, harmless
            result.append(Measured(optimizer, before, after, factors, rule))
    return result


# Tables and figure.


def number(value: float) -> str:
    """Format a factor with two or three digits."""
    return "none" if not math.isfinite(value) else f"{value:.2f}"


def report(rows: list[Exact], gains: Gains) -> None:
    """Print the tables as Markdown."""
    print("| policy | distance | change | exact | rule, n_c | n_H |\n|---|---|---|---|---|---|")
    for policy, distance in itertools.product(dict.fromkeys(r.policy for r in rows), DISTANCES):
        mine = [r for r in rows if (r.policy, r.distance) == (policy, distance)]
        for kind in ("n", "G"):
            for change in changes(mine, kind):
                values = (change.exact, change.rule, change.weighted)
                print(f"| {policy} | {distance} | {kind} |", " | ".join(map(number, values)), "|")
    print(
        "\n| optimizer | from n, G | to | best | largest | harmless | rule |"
        "\n|---|---|---|---|---|---|---|"
    )
    for m in measured(gains):
        spans = [f"{x.estimate:.2g} [{x.low:.2g}, {x.high:.2g}]" for x in m.factors]
        low, high = m.range
        rule = f"{low:.2g}" if low == high else f"{low:.2g} to {high:.2g}"
        print(f"| {m.optimizer} | {m.before} | {m.after} | {' | '.join(spans)} | {rule} |")
    print("\n| cell | rate: gain of each seed |\n|---|---|")
    for cell, curve in curves(gains).items():
        text = "; ".join(
            f"{rate:.3g}: " + " ".join(f"{gain:.3f}" for gain in gain_S)
            for rate, gain_S in zip(curve.rate_R, curve.gain_RS, strict=True)
        )
        print(f"| {cell} | {text} |")


GROUPS = {
    "every parameter affects the reward": ("#0072B2", "o"),
    "some parameters do not affect the reward": ("#D55E00", "s"),
}
OPTIMIZERS = {"sgd": ("SGD", "#0072B2", "o"), "adamw": ("AdamW", "#D55E00", "s")}


def draw(rows: list[Exact], gains: Gains, path: Path) -> None:
    """Draw the factor of the best rate against the factor of the rule: enumerated, and in training.

    A line is a 95 % interval. A horizontal line is the range of the rule for AdamW.
    """
    with plt.rc_context({"font.size": 9}):
        image, (exact, trained) = plt.subplots(1, 2, figsize=(7.2, 4.7), layout="constrained")
        for label, (colour, marker) in GROUPS.items():
            styled = label == "some parameters do not affect the reward"
            points = [c for kind in ("n", "G") for c in changes(rows, kind)]
            points = [c for c in points if ("style" in c.policy) == styled]
            exact.plot([c.rule for c in points], [c.exact for c in points], marker, color=colour,
                       markersize=4, alpha=0.6, label=label)  # fmt: skip
        exact.set_title("small softmax policies, enumerated", loc="left", fontsize=9)
        for row in measured(gains):
            label, colour, marker = OPTIMIZERS[row.optimizer]
            low, high = row.range
            x, (y, *ends) = math.sqrt(low * high), row.factors[1]
            trained.plot([x, x], ends, color=colour, linewidth=1.2)
            trained.plot([low, high], [y, y], color=colour, linewidth=1.2)
            trained.plot(x, y, marker, color=colour, markersize=5)
        for label, colour, marker in OPTIMIZERS.values():
            trained.plot([], [], marker, color=colour, markersize=5, label=label)
        trained.set_title("training of tiny_base", loc="left", fontsize=9)
        for axes, name in ((exact, "best"), (trained, "largest useful")):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter("{x:g}")
            ends = (*axes.get_xlim(), *axes.get_ylim())
            ends = min(ends), max(ends)
            axes.plot(
                ends, ends, color="black", linestyle="--", linewidth=1, label="equal to the rule"
            )
            axes.set(xlim=ends, ylim=ends, aspect="equal", xlabel="factor predicted by the rule",
                     ylabel=f"factor by which the {name} rate changes")  # fmt: skip
            axes.grid(alpha=0.3)
            axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.17))
        image.savefig(path, dpi=100)
        plt.close(image)


def read_bandits(file: Path) -> list[Exact]:
    """Read the record of the enumerations."""
    kinds = {field.name: {"str": str, "int": int, "float": float}[str(field.type)]
             for field in fields(Exact)}  # fmt: skip
    return [Exact(**{key: kinds[key](row[key]) for key in kinds}) for row in read_rows(file)]


def write_bandits(file: Path, rows: list[Exact]) -> None:
    """Write a line for each policy, distance, n and G."""
    with file.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([field.name for field in fields(Exact)])
        for row in rows:
            cells = (getattr(row, field.name) for field in fields(Exact))
            writer.writerow([f"{x:.8g}" if isinstance(x, float) else x for x in cells])


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("bandits", "train", "report"))
    parser.add_argument("--minutes", type=float, default=50.0, help="no run starts after that")
    parser.add_argument("--bandits", type=Path, default=BANDITS, help="record of `bandits`")
    parser.add_argument("--training", type=Path, default=TRAINING, help="record of `train`")
    parser.add_argument("--image", type=Path, default=IMAGE, help="drawn by `report`")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "bandits":
        write_bandits(options.bandits, enumerated())
    elif options.part == "train":
        run_cells(options.training, options.minutes)
    else:
        rows, gains = read_bandits(options.bandits), gains_of(read_rows(options.training))
        report(rows, gains)
        draw(rows, gains, options.image)


if __name__ == "__main__":
    main()
