"""Simulation of Algorithm 1, gradient ascent on J, on a test problem.

A simulation is repeated many times; each repetition is a replicate. Blocks of replicates run as
vectors. A replicate's path does not depend on the other replicates: each has its own random
generator, keyed by seed and replicate number, and the simulation never sums over replicates.

In the names of arrays, K is the number of coordinates u of the policy, Y the number of outcomes of
a prompt, B the number of prompts per update, R the number of replicates, and S the number of
recorded steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_ustat.distributed.workers import WorkCost, share
from grpo_ustat.draws import generator
from grpo_ustat.gap.covariance import baseline_values
from grpo_ustat.gap.problems import Problem

# Number of replicates in a block, chosen so that the arrays stay in a core's cache.
REPLICATES_AT_ONCE = 500
# Number of steps whose random numbers are drawn in a single call.
STEPS_AT_ONCE = 50
STREAM = "algorithm1"


@dataclass(frozen=True)
class Estimator:
    """Gradient estimator from B prompts with G completions each."""

    # Baseline: none, oracle, optimal, leave_one_out or leave_one_out_std. The last is the paper's
    # Algorithm 2. It subtracts the mean reward of the group's other completions and divides by the
    # standard deviation of the group's rewards.
    baseline: str
    # Number of prompts per update, B.
    num_prompts: int
    # Number of completions per prompt, G.
    group_size: int
    # Constant added to the group's standard deviation.
    epsilon: float = 0.0
    # Weight of the KL term `(pi_ref/pi - 1) s`, whose expectation is -grad KL(pi_ref || pi).
    beta: float = 0.0
    # Coordinates u of pi_ref; not used if beta is 0.
    reference: tuple[float, ...] = ()
    # Number of updates per batch. Each update uses a different minibatch of B prompts. All
    # completions of a batch come from pi_old, the policy before its first update. The advantages
    # are therefore multiplied by the ratios pi_theta / pi_old.
    minibatches: int = 1

    @property
    def name(self) -> str:
        """Name of the estimator in legends and in curves.csv."""
        names = {"none": "vanilla", "leave_one_out": "GRPO"}
        return names.get(self.baseline, self.baseline)

    @property
    def rollouts(self) -> int:
        """Number of rollouts per update, n = B G."""
        return self.num_prompts * self.group_size


@dataclass(frozen=True)
class Rate:
    """Learning rate: constant at `value`, or decaying as `value / (t + offset)` at step t >= 1."""

    kind: str
    value: float
    offset: int = 0

    @property
    def name(self) -> str:
        """Name of the learning rate in legends and in curves.csv.

        >>> Rate("constant", 0.1).name, Rate("decaying", 2.0, 20).name
        ('eta = 0.1', 'eta_t = 2 / (t + 20)')
        """
        if self.kind == "constant":
            return f"eta = {self.value:g}"
        return f"eta_t = {self.value:g} / " + (f"(t + {self.offset})" if self.offset else "t")

    def values(self, steps: int) -> np.ndarray:
        """Return the learning rates eta_1 ... eta_T."""
        if self.kind == "constant":
            return np.full(steps, self.value)
        return self.value / (np.arange(1, steps + 1) + self.offset)


@dataclass(frozen=True)
class Simulation:
    """Simulation to run."""

    estimator: Estimator
    rate: Rate
    # Numbers of updates after which the state is recorded, in ascending order.
    steps: tuple[int, ...]

    @property
    def rates_T(self) -> np.ndarray:
        """Learning rates eta_1 ... eta_T, where T is the last recorded step."""
        return self.rate.values(self.steps[-1])

    @property
    def work(self) -> int:
        """Number of completions that one replicate draws."""
        return self.estimator.rollouts * self.steps[-1]


@dataclass(frozen=True)
class Trajectories:
    """Recorded coordinates and gaps of all replicates of a simulation."""

    simulation: Simulation
    # Numbers of updates after which the state was recorded; 0 is the start.
    steps_S: np.ndarray
    # Coordinates of the policy.
    u_SKR: np.ndarray
    # Gaps J* - J at the recorded coordinates.
    gap_SR: np.ndarray
    # Number of updates after which each replicate first left the sublevel set; 0 if it never did.
    exit_R: np.ndarray

    @property
    def estimator(self) -> Estimator:
        """Gradient estimator of the simulation."""
        return self.simulation.estimator

    @property
    def rate(self) -> Rate:
        """Learning rate of the simulation."""
        return self.simulation.rate

    @property
    def replicates(self) -> int:
        """Number of replicates, R."""
        return self.gap_SR.shape[1]

    @property
    def columns(self) -> dict[str, Any]:
        """Columns of curves.csv that describe the simulation."""
        one = self.estimator
        return {
            "estimator": one.name, "num_prompts": one.num_prompts, "group_size": one.group_size,
            "rate": self.rate.name, "replicates": self.replicates,
        }  # fmt: skip

    def place(self, step: int) -> int:
        """Return the index of a recorded step."""
        return self.steps_S.tolist().index(step)

    def scaled_gap(self, place: int) -> np.ndarray:
        """Return (T + offset) times each replicate's gap at a recorded step T, [R]."""
        return (self.steps_S[place] + self.rate.offset) * self.gap_SR[place]


def simulate(
    problem: Problem, simulation: Simulation, replicates: range, seed: int
) -> Trajectories:
    """Run Algorithm 1, `theta <- theta + eta_t g_hat`, from the test problem's initial policy.

    Only the coordinates u = Q theta are simulated. Their update has the same form, since the score
    lies in the row space of Q and Q Q' = 1.

    Args:
        problem: test problem.
        simulation: estimator, learning rate and steps to record.
        replicates: numbers of the replicates to simulate together.
        seed: seed that, together with a replicate's number, determines its path.
    """
    estimator, steps, rates_T = simulation.estimator, simulation.steps, simulation.rates_T
    u_KR = np.repeat(problem.start_K[:, None], len(replicates), axis=1)
    exit_R = np.zeros(len(replicates), dtype=int)
    record: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    low_K1, high_K1 = ((problem.best_K + side * problem.box_K)[:, None] for side in (-1, 1))
    has_box, reference_PY = np.isfinite(problem.box_K).all(), reference_law(problem, estimator)
    old_PYR = None
    for t, uniform in enumerate(_uniforms(replicates, seed, estimator, len(rates_T))):
        law = problem.law(u_KR)
        gap_R = problem.highest - problem.value(law[0]).mean(axis=0)
        exit_R[(gap_R > problem.reach) & (exit_R == 0)] = t
        if t in steps:
            record[t] = u_KR, gap_R
        if t == len(rates_T):
            break
        if t % estimator.minibatches == 0:
            old_PYR = law[0]
        u_KR = u_KR + rates_T[t] * gradient(problem, estimator, law, uniform, old_PYR, reference_PY)
        if has_box:
            u_KR = np.clip(u_KR, low_K1, high_K1)
    u_SKR, gap_SR = (np.stack([record[step][i] for step in steps]) for i in (0, 1))
    return Trajectories(simulation, np.array(steps), u_SKR, gap_SR, exit_R)


def _uniforms(
    replicates: range, seed: int, estimator: Estimator, count: int
) -> Iterator[np.ndarray]:
    """Yield the uniform random numbers of each step, float32 [B + B G, R].

    An empty array follows the last step, because `simulate` also visits the state after that step.
    """
    generators = [generator(seed, STREAM, number) for number in replicates]
    width = estimator.num_prompts + estimator.rollouts
    for first in range(0, count, STEPS_AT_ONCE):
        size = min(STEPS_AT_ONCE, count - first)
        uniform_RTn = np.empty((len(replicates), size, width), dtype=np.float32)
        for uniform_Tn, source in zip(uniform_RTn, generators, strict=True):
            source.random(dtype=np.float32, out=uniform_Tn)
        yield from np.ascontiguousarray(uniform_RTn.transpose(1, 2, 0))
    yield np.empty((0, len(replicates)), dtype=np.float32)


def reference_law(problem: Problem, estimator: Estimator) -> np.ndarray | None:
    """Return the probabilities of pi_ref, [P, Y], or None if there is no KL term."""
    return (
        problem.law(np.array(estimator.reference)[:, None])[0][..., 0] if estimator.beta else None
    )


def gradient(
    problem: Problem,
    estimator: Estimator,
    law: tuple,
    uniform: np.ndarray,
    old_PYR: np.ndarray | None = None,
    reference_PY: np.ndarray | None = None,
) -> np.ndarray:
    """Compute one gradient estimate with respect to u for each replicate, [K, R].

    Args:
        problem: test problem that defines the rewards.
        estimator: gradient estimator.
        law: probabilities and scores from `problem.law`.
        uniform: random numbers in [0, 1), [B + B G, R]. The first B select the prompts, and the
            others select the completions.
        old_PYR: probabilities of pi_old, which samples the completions. None uses the probabilities
            in `law`.
        reference_PY: probabilities of pi_ref, required if there is a KL term.
    """
    probability_PYR, score_PYKR = law
    prompts, outcomes = probability_PYR.shape[:2]
    b, old_PYR = estimator.num_prompts, probability_PYR if old_PYR is None else old_PYR
    prompt_BR = (uniform[:b] * np.float32(prompts)).astype(np.intp)
    counts_YBR = outcome_counts(old_PYR, prompt_BR, uniform[b:], estimator.group_size)
    value_BR = None
    if estimator.baseline in ("oracle", "optimal"):
        value_PR = baseline_values(
            probability_PYR, score_PYKR, problem.rewards_PY, estimator.baseline
        )
        value_BR = np.take_along_axis(value_PR, prompt_BR, axis=0)
    rewards_YBR = problem.rewards_PY.T[:, prompt_BR]
    weight_YBR = counts_YBR * advantage(estimator, counts_YBR, rewards_YBR, value_BR)
    total_KR = np.zeros(score_PYKR.shape[2:])
    for x in range(prompts):
        weight_YR = np.where(prompt_BR == x, weight_YBR, 0.0).sum(axis=1)
        if old_PYR is not probability_PYR:
            weight_YR = weight_YR * probability_PYR[x] / old_PYR[x]
        if estimator.beta:
            assert reference_PY is not None
            count_YR = np.where(prompt_BR == x, counts_YBR, 0.0).sum(axis=1)
            excess_YR = reference_PY[x][:, None] / probability_PYR[x] - 1
            weight_YR = weight_YR + estimator.beta * count_YR * excess_YR
        for y in range(outcomes):
            total_KR += weight_YR[y] * score_PYKR[x, y]
    return total_KR / estimator.rollouts


def outcome_counts(
    probability_PYR: np.ndarray, prompt_BR: np.ndarray, uniform: np.ndarray, group_size: int
) -> np.ndarray:
    """Draw the outcomes of each group and return how often each occurs, float64 [Y, B, R].

    The outcomes are drawn by inverting the cumulative distribution.

    Args:
        probability_PYR: probabilities of the policy that samples the completions.
        prompt_BR: prompt of each group.
        uniform: random numbers in [0, 1), [G B, R]. Every B-th row belongs to the same group.
        group_size: number of completions per group, G.
    """
    uniform_GBR = uniform.reshape(group_size, *prompt_BR.shape)
    edge_PYR = probability_PYR.cumsum(axis=1)[:, :-1].astype(np.float32)
    beyond = [np.full(prompt_BR.shape, group_size, dtype=np.float32)]
    for y in range(edge_PYR.shape[1]):
        edge_BR = np.take_along_axis(edge_PYR[:, y], prompt_BR, axis=0)
        beyond.append((uniform_GBR >= edge_BR).sum(axis=0, dtype=np.float32))
    beyond.append(np.zeros(prompt_BR.shape, dtype=np.float32))
    return -np.diff(np.stack(beyond), axis=0).astype(float)


def advantage(
    estimator: Estimator,
    counts_YBR: np.ndarray,
    rewards_YBR: np.ndarray,
    value_BR: np.ndarray | None = None,
) -> np.ndarray:
    """Compute the advantage of each outcome, with the definitions of `estimators.baselines`.

    Args:
        estimator: estimator that defines the baseline and epsilon.
        counts_YBR: number of times that each outcome occurs in each group.
        rewards_YBR: reward of each outcome for the group's prompt.
        value_BR: baseline values, required for `oracle` and `optimal`.

    Returns:
        Advantages, [Y, B, R].

    Raises:
        ValueError: If the baseline cannot be simulated.
    """
    size, name = estimator.group_size, estimator.baseline
    if name == "none":
        return rewards_YBR
    if name in ("oracle", "optimal"):
        assert value_BR is not None
        return rewards_YBR - value_BR
    centred_YBR = rewards_YBR - (counts_YBR * rewards_YBR).sum(axis=0) / size
    of_the_others = size / (size - 1)
    if name == "leave_one_out":
        return centred_YBR * of_the_others
    if name == "leave_one_out_std":
        variance_BR = (counts_YBR * np.square(centred_YBR)).sum(axis=0) / (size - 1)
        divisor_BR = np.sqrt(variance_BR) + estimator.epsilon
        # Groups with equal rewards have advantage 0.
        zero_variance_BR = variance_BR <= 1e-12
        advantage_YBR = np.where(
            zero_variance_BR, 0.0, centred_YBR / np.where(zero_variance_BR, 1.0, divisor_BR)
        )
        return of_the_others * advantage_YBR
    raise ValueError(f"baseline {name!r} cannot be simulated on a test problem")


def run_simulations(
    simulations: Sequence[Simulation], problem: Problem, replicates: int, seed: int, workers: int
) -> tuple[list[Trajectories], int]:
    """Run all simulations, with the replicates divided among worker processes.

    Args:
        simulations: simulations to run.
        problem: test problem.
        replicates: number of replicates, R.
        seed: seed that, together with a replicate's number, determines its path.
        workers: number of processes.

    Returns:
        Trajectories in the order of `simulations`, and the number of completions drawn.
    """
    items = [
        (place, range(first, min(first + REPLICATES_AT_ONCE, replicates)))
        for place in range(len(simulations))
        for first in range(0, replicates, REPLICATES_AT_ONCE)
    ]
    weights = [float(simulations[place].work * len(block)) for place, block in items]
    total = int(sum(weights))
    parts, _ = share(
        _simulate_blocks, items, workers, "replicates", total, list(simulations), problem, seed,
        weights=weights,
    )  # fmt: skip
    parts.sort(key=lambda part: part[:2])
    trajectories = []
    for place, simulation in enumerate(simulations):
        blocks = [block for part, _, block in parts if part == place]
        u_SKR, gap_SR, exit_R = (
            np.concatenate([getattr(block, name) for block in blocks], axis=-1)
            for name in ("u_SKR", "gap_SR", "exit_R")
        )
        trajectories.append(Trajectories(simulation, blocks[0].steps_S, u_SKR, gap_SR, exit_R))
    return trajectories, total


def _simulate_blocks(
    items: list[tuple[int, range]], simulations: list[Simulation], problem: Problem, seed: int
) -> Iterator:
    """Run blocks of replicates in a worker process."""
    for place, block in items:
        yield place, block[0], simulate(problem, simulations[place], block, seed)
        yield WorkCost(rollouts=simulations[place].work * len(block))


def log_spaced_steps(last: int, count: int = 12) -> list[int]:
    """Return about `count` steps from 1 to `last`, evenly spaced on a logarithmic scale.

    >>> log_spaced_steps(100, 5)
    [1, 3, 10, 32, 100]
    """
    return sorted({int(round(x)) for x in np.geomspace(1, last, count)})
