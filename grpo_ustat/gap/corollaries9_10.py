"""Corollaries 9 and 10: limit laws of the gap J* - J with GRPO, the oracle and other baselines.

The oracle subtracts the exact expected reward V(x) of the prompt instead of an estimate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize

from grpo_ustat.config.gap import CorollariesConfig
from grpo_ustat.draws import generator
from grpo_ustat.estimators.intervals import CONFIDENCE
from grpo_ustat.gap.claims import (
    enumerated_claim,
    mean_interval,
    mean_p_value,
    replicates_converge,
    tested_claim,
)
from grpo_ustat.gap.convergence import limit_weights
from grpo_ustat.gap.covariance import baseline_values
from grpo_ustat.gap.evidence import Evidence, Panel, Series, columns_of, rows_of
from grpo_ustat.gap.exact import assumption2, limit_weighting, noise
from grpo_ustat.gap.problems import Problem
from grpo_ustat.gap.simulate import Estimator, Simulation, Trajectories
from grpo_ustat.gap.simulated import learning_rates, simulated
from grpo_ustat.runs.claims import Claim
from grpo_ustat.terminal.streams import percentage

STATEMENT = (
    "The gap J* - J has a limit law that depends on the baseline. As G grows, GRPO's limit law "
    "converges to that of the oracle, which uses the exact expected reward V as the baseline. At "
    "fixed n = B G, n times the difference between the weights of the two laws falls like "
    "1/(G-1). If E[S S' (Z - V) | X] = 0 (Assumption 2), V has the smallest weights of all "
    "baselines that depend only on the prompt."
)
# Group sizes at which the limit weights are enumerated.
ENUMERATED_SIZES = tuple(2**k for k in range(1, 12))
# Baselines V + shift are tested with these shifts, which are the same for all prompts.
COMMON_SHIFTS = tuple(np.linspace(-0.5, 0.5, 21))
# Number of random baselines that are tested; each adds an independent shift to V for every prompt.
RANDOM_SHIFTS = 1000
# Number of starting points from which the optimiser searches for the best shifts.
OPTIMISER_STARTS = 8
ROUNDING = 1e-9
BASELINE_NAMES = ("leave_one_out", "oracle")
# The optimiser is not more accurate than this value, so a smaller shift counts as 0.
SHIFT_TOLERANCE = 1e-5
# Multiples of the predicted difference. They are tested as well, to show which other values the
# data reject.
OTHER_DIFFERENCES = (0.0, 0.5, 0.8, 0.9, 1.1, 1.25, 2.0)


def plan(design: CorollariesConfig) -> list[Simulation]:
    """Plan GRPO and the oracle at every G, recorded after T/4 and T steps.

    Both use the same random numbers, so that the difference between their gaps has little noise.
    """
    (rate,), record = learning_rates(design), (design.steps // 4, design.steps)
    return [
        Simulation(Estimator(name, design.rollouts // size, size), rate, record)
        for size in design.group_sizes
        for name in BASELINE_NAMES
    ]


def judge(problem: Problem, design: CorollariesConfig, runs: Sequence[Trajectories]) -> Evidence:
    """Enumerate the limit weights and compare GRPO's gaps with the oracle's gaps."""
    n, c = design.rollouts, design.decaying_rate
    claims, rows, last = _weight_claims(problem, c), [], []
    for grpo, oracle in zip(runs[::2], runs[1::2], strict=True):
        sums = [weight_sum(problem, c, run.estimator) for run in (grpo, oracle)]
        predicted = n * (sums[0] - sums[1])
        differences = [n * (grpo.scaled_gap(place) - oracle.scaled_gap(place)) for place in (0, 1)]
        measured = [mean_interval(difference_R) for difference_R in differences]
        same = {"grpo_weights": sums[0], "oracle_weights": sums[1]}
        same |= {"predicted_difference": predicted}
        columns = {"step": grpo.steps_S} | columns_of("difference", measured)
        rows += rows_of(grpo.columns | same, columns)
        last.append((grpo.estimator.group_size, measured[-1], predicted))
        claims.append(_difference_claim(grpo, predicted, differences))
    claims += baseline_claims(problem, c)
    series = Series("GRPO - oracle", *zip(*last, strict=True))
    panel = Panel("group size G", "n T x difference of mean gaps", [series])
    return Evidence(claims, panel, rows)


def weight_sum(problem: Problem, c: float, estimator: Estimator) -> float:
    """Return the sum of an estimator's limit weights at learning rate c / t."""
    return float(
        limit_weights(problem.curvature_KK, noise(problem, problem.best_K, estimator), c).sum()
    )


def weight_excess(problem: Problem, c: float, size: int) -> float:
    """Return the sum of GRPO's weights minus the sum of the oracle's weights, at B = 1.

    For any other B, divide the result by B.
    """
    grpo, oracle = (weight_sum(problem, c, Estimator(name, 1, size)) for name in BASELINE_NAMES)
    return grpo - oracle


def _weight_claims(problem: Problem, c: float) -> list[Claim]:
    """Make claims about how the enumerated weights depend on G.

    The claims at fixed n use n = 1, and the claims at fixed B use B = 1. This is enough, because
    the weights are proportional to 1/n and 1/B.
    """
    sizes = np.array(ENUMERATED_SIZES, dtype=float)
    excess = np.array([weight_excess(problem, c, size) for size in ENUMERATED_SIZES])
    flat = sizes * excess * (sizes - 1)
    spread = float(flat.max() / flat.min() - 1)
    oracle = np.array(
        [weight_sum(problem, c, Estimator("oracle", 1, size)) for size in ENUMERATED_SIZES[-2:]]
    )
    share = excess[-2:] / oracle
    slope = float(np.log(share[1] / share[0]) / np.log(sizes[-1] / sizes[-2]))
    how = f"enumerated, G = {ENUMERATED_SIZES[0]} ... {ENUMERATED_SIZES[-1]}"
    return [
        enumerated_claim(
            "n (sum w_grpo - sum w_oracle) (G - 1) at fixed n: largest value over G divided by the "
            "smallest, minus 1", 0.0,
            spread, spread < 1e-6, f"{how}; agrees below 1e-6",
        ),
        enumerated_claim(
            "slope of log(sum w_grpo / sum w_oracle - 1) on log G at fixed B", -2.0, slope,
            abs(slope + 2) < 0.01, f"{how}, slope between the two largest G; agrees within 0.01",
        ),
    ]  # fmt: skip


def _difference_claim(
    grpo: Trajectories, predicted: float, differences: Sequence[np.ndarray]
) -> Claim:
    """Make a claim about the mean difference between the scaled gaps at the last step.

    A rejected claim is undecided if the difference approaches the prediction as T grows.
    """
    (before_R, last_R), (early, late) = differences, grpo.simulation.steps
    nearing = replicates_converge(last_R - predicted, before_R - predicted, late, early)
    return tested_claim(
        f"G = {grpo.estimator.group_size}: n T (gap of GRPO - gap of the oracle)",
        predicted,
        mean_interval(last_R),
        f"{percentage(CONFIDENCE)} interval, paired t test, {len(last_R)} replicates with "
        f"shared random numbers, T = {late}; a rejected claim is undecided if the difference "
        "significantly approaches the prediction, at least as fast as T^(-1/4)",
        mean_p_value(last_R - predicted),
        alternatives={
            f"difference x {x}": mean_p_value(last_R - x * predicted) for x in OTHER_DIFFERENCES
        },
        nearing=nearing,
    )


def second_moments(problem: Problem) -> np.ndarray:
    """Return E[s s' z^k | x] for k = 0, 1, 2 at the maximiser, [3, P, K, K].

    Here s is the score (the gradient of the log-probability) and z the reward of a completion.
    """
    probability_PYR, score_PYKR = problem.law(problem.best_K[:, None])
    power_kPY = np.stack([problem.rewards_PY**k for k in range(3)])
    weight_kPY = probability_PYR[..., 0] * power_kPY
    score = score_PYKR[..., 0]
    return np.einsum("jpy,pyk,pyl->jpkl", weight_kPY, score, score)


def covariance(moments: np.ndarray, baseline_P: np.ndarray) -> np.ndarray:
    """Return the covariance of the gradient estimate `s (z - b(x))` from one completion, [K, K].

    The covariance is computed at the maximiser. There grad J is 0, so it equals the second moment.

    Args:
        moments: result of `second_moments`.
        baseline_P: baseline b(x) of each prompt.
    """
    weight_kP = np.stack([np.square(baseline_P), -2 * baseline_P, np.ones_like(baseline_P)])
    return np.einsum("jp,jpkl->kl", weight_kP, moments) / len(baseline_P)


def value_at(problem: Problem, baseline: str = "oracle") -> np.ndarray:
    """Return the exact baseline b(x) of each prompt at the maximiser, [P]; `oracle` gives V."""
    return baseline_values(*problem.law(problem.best_K[:, None]), problem.rewards_PY, baseline)[
        :, 0
    ]


def shifted_sum(problem: Problem, c: float, shift_P: np.ndarray | float) -> float:
    """Return the sum of the limit weights with the baseline V + shift, at B = G = 1."""
    sigma = covariance(second_moments(problem), value_at(problem) + shift_P)
    return float(np.trace(limit_weighting(problem.curvature_KK, c) @ sigma))


def baseline_claims(problem: Problem, c: float) -> list[Claim]:
    """Return claims that V has the smallest limit weights of the baselines b(x).

    The claims are undecided if Assumption 2 fails, because Corollary 10 assumes it.
    """
    holds = assumption2(problem, problem.best_K) < ROUNDING
    value_P, moments = value_at(problem), second_moments(problem)
    weighting, oracle = limit_weighting(problem.curvature_KK, c), covariance(moments, value_P)

    def weights(shift_P: np.ndarray) -> float:
        return float(np.trace(weighting @ covariance(moments, value_P + shift_P)))

    def least_excess(baseline_P: np.ndarray) -> float:
        """Return the least eigenvalue of Sigma(b) - Sigma(V); >= 0 if V has the smaller weights."""
        return float(np.linalg.eigvalsh(covariance(moments, baseline_P) - oracle)[0])

    shift_MP = generator(0, "corollary10").uniform(-0.5, 0.5, size=(RANDOM_SHIFTS, len(value_P)))
    ends = [minimize(weights, start_P, tol=1e-12).x for start_P in shift_MP[:OPTIMISER_STARTS]]
    furthest = max(float(np.abs(end_P).max()) for end_P in ends)
    sums = {shift: shifted_sum(problem, c, shift) for shift in COMMON_SHIFTS}
    common = min(sums, key=sums.__getitem__)
    least = [least_excess(value_P + shift_P) for shift_P in shift_MP]
    worst = minimize(
        lambda shift_P: least_excess(value_P + shift_P),
        shift_MP[int(np.argmin(least))],
        method="Nelder-Mead",
    )
    how = "enumerated; tested only if Assumption 2 holds for each prompt"

    def claim(what: str, predicted: float | str, value: float, agrees: bool, how: str) -> Claim:
        return enumerated_claim(what, predicted, value, agrees if holds else None, how)

    def below(what: str, value: float, how: str) -> Claim:
        return claim(what, ">= 0", value, value >= -ROUNDING, how)

    return [
        claim(
            "baseline V + shift, with the same shift for all prompts: shift at which the sum of "
            "weights is smallest", 0.0, common,
            abs(common) < ROUNDING, f"{how}, {len(COMMON_SHIFTS)} shifts",
        ),
        claim(
            "baseline V + shift, with one shift per prompt: largest |shift| where the sum of "
            "weights is smallest", 0.0,
            furthest, furthest < SHIFT_TOLERANCE,
            f"{how}; shifts optimised by BFGS from {OPTIMISER_STARTS} random starts; agrees within "
            f"{SHIFT_TOLERANCE:g}",
        ),
        below(
            "smallest eigenvalue of Sigma(V + shift) - Sigma(V), with one shift per prompt",
            min(*least, float(worst.fun)),
            f"{how}; minimum over {RANDOM_SHIFTS} random vectors of shifts, then refined by "
            "Nelder-Mead; B = G = 1",
        ),
        *(
            below(
                f"smallest eigenvalue of Sigma({baseline}) - Sigma(V), B = G = 1",
                least_excess(value_at(problem, baseline)), how,
            )
            for baseline in ("none", "optimal")
        ),
    ]  # fmt: skip


THEOREM = simulated(STATEMENT, plan, judge)
