"""Lemma 6: comparison of Algorithm 1's mean gap J* - J with the lemma's recursion and bounds.

Algorithm 1 is gradient ascent, here simulated many times (replicates) on a test problem. Its mean
gap is the mean over replicates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

from grpo_ustat.config.gap import Lemma6Config
from grpo_ustat.estimators.intervals import CONFIDENCE, Interval
from grpo_ustat.gap.claims import mean_interval, mean_p_value, tested_claim
from grpo_ustat.gap.convergence import decaying_bound, quadratic_recursion, recursion
from grpo_ustat.gap.evidence import Evidence, Panel, Series, columns_of, rows_of
from grpo_ustat.gap.exact import largest_error, noise, noise_everywhere
from grpo_ustat.gap.problems import CoinProblem, Problem
from grpo_ustat.gap.simulate import Estimator, Simulation, Trajectories, log_spaced_steps
from grpo_ustat.gap.simulated import learning_rates, simulated
from grpo_ustat.runs.claims import Claim
from grpo_ustat.runs.record import AGREES, OPEN
from grpo_ustat.terminal.streams import percentage

# The bound of order 1/T is tested only at large T. T counts as large if the recursion's bound is at
# most this multiple of the bound of order 1/T.
LARGE_T_RATIO = 1.1
# Multiples of the predicted bound. They are tested as well, to show which smaller bounds the data
# reject.
OTHER_BOUNDS = (0.9, 0.7, 0.5, 0.3)
# Multiples of the predicted noise variance. They are tested as well, to show which other variances
# the data reject.
OTHER_NOISE = (0.5, 0.7, 0.9, 0.95, 1.05, 1.1, 1.4, 2.0)
STATEMENT = (
    "If J is L-smooth and satisfies a Polyak-Lojasiewicz inequality with constant mu, and the "
    "gradient's mean squared error is at most s2, the mean gap J* - J of Algorithm 1 is bounded by "
    "a linear recursion. For a constant learning rate the mean gap is at most the recursion's "
    "solution at every number of steps T. For the learning rate c/t and large T, the mean gap is "
    "at most a constant divided by T."
)


def plan(design: Lemma6Config) -> list[Simulation]:
    """Plan a simulation of every estimator at every learning rate.

    The gap is recorded at the start, at the steps that the figure shows, and one step after each of
    them. The next step is needed to test the mean of the next gap; see `_next_step_claim`.
    """
    curve, prompts = log_spaced_steps(design.steps), design.rollouts // design.group_size
    with_next = tuple(sorted({0, *curve, *(step + 1 for step in curve)}))
    estimators = [Estimator(name, prompts, design.group_size) for name in design.baselines]
    rates = learning_rates(design)
    return [Simulation(estimator, rate, with_next) for rate in rates for estimator in estimators]


def judge(problem: Problem, design: Lemma6Config, runs: Sequence[Trajectories]) -> Evidence:
    """Compare the mean gap with the recursion's solution and with the bound of order 1/T."""
    curve, (mu, smoothness) = log_spaced_steps(design.steps), problem.constants
    first, claims, rows, series = problem.start_K - problem.best_K, [], [], []
    for run in runs:
        name, rates_T = f"{run.estimator.name}, {run.rate.name}", run.simulation.rates_T
        s2 = largest_error(problem, run.estimator)
        bound = recursion(float(run.gap_SR[0, 0]), mu, smoothness, s2, rates_T)
        sigma = noise(problem, problem.best_K, run.estimator)
        model = quadratic_recursion(first, problem.curvature_KK, sigma, rates_T)
        gaps = [mean_interval(run.gap_SR[run.place(step)]) for step in curve]
        left = [int(((run.exit_R > 0) & (run.exit_R <= step)).sum()) for step in curve]
        columns = {"step": curve, "bound": bound[curve], "quadratic_model": model[curve]}
        columns |= {"left": left, **columns_of("gap", gaps)}
        rows += rows_of(run.columns | {"s2": s2}, columns)
        shares = np.array(gaps) / bound[curve][:, None]
        series.append(Series(name, curve, shares, model[curve] / bound[curve]))
        what = f"{name}: largest ratio over T of the mean gap to the recursion's bound"
        claims.append(_bound_claim(what, run, bound, curve))
        if run.rate.kind == "decaying":
            limit = np.full(len(bound), np.inf)
            after = np.arange(1.0, len(bound)) + run.rate.offset
            limit[1:] = decaying_bound(mu, smoothness, s2, run.rate.value, after)
            what = f"{name}: ratio of the mean gap to the bound of order 1/T at T = {design.steps}"
            holds = bool(bound[design.steps] <= LARGE_T_RATIO * limit[design.steps])
            claims.append(_bound_claim(what, run, limit, [design.steps], holds))
        if isinstance(problem, CoinProblem):
            claims.append(_next_step_claim(problem, run, curve))
    label = "mean gap / bound (line: quadratic recursion)"
    return Evidence(claims, Panel("step T", label, series, "x"), rows)


def _bound_claim(
    what: str, run: Trajectories, bound: np.ndarray, steps: list[int], holds: bool = True
) -> Claim:
    """Make a claim that the mean gap is at most the bound at all the given steps.

    The claim shows the step with the largest ratio of the mean gap to the bound. Its interval is
    simultaneous over the steps. At every step a one-sided t test tests the hypothesis that the mean
    is at most the bound. The p-value combines these tests with Bonferroni's correction.

    Args:
        what: text of the claim.
        run: trajectories, recorded at least at `steps`.
        bound: bound after 0, 1, 2, ... steps.
        steps: steps at which the bound is tested.
        holds: False if T is too small for the theory to guarantee the bound. The claim then has no
            p-value, and a mean above the bound leaves it undecided.
    """
    places = [run.place(step) for step in steps]
    intervals = [mean_interval(run.gap_SR[place], among=len(steps)) for place in places]
    ratios = np.array([np.array(x) / bound[s] for x, s in zip(intervals, steps, strict=True)])
    mean, low, high = ratios[ratios[:, 0].argmax()]

    def p_value(share: float) -> float:
        excess = (run.gap_SR[x] - share * bound[s] for x, s in zip(places, steps, strict=True))
        return min(1.0, len(steps) * min(mean_p_value(over_R, above=True) for over_R in excess))

    how = f"{percentage(CONFIDENCE)} intervals over {run.replicates} replicates"
    how += f", simultaneous over {len(steps)} steps (Bonferroni)" if len(steps) > 1 else ""
    how += "; undecided if an interval reaches above the bound"
    how += "" if holds else "; T is too small for the theory to guarantee the bound of order 1/T"
    return tested_claim(
        what,
        "<= 1",
        Interval(float(mean), float(low), float(high)),
        how,
        p_value(1.0) if holds else None,
        alternatives={f"bound x {x}": p_value(x) for x in OTHER_BOUNDS if holds},
        verdict=AGREES if ratios[:, 2].max() <= 1 else OPEN,
    )


def _next_step_claim(problem: CoinProblem, run: Trajectories, curve: list[int]) -> Claim:
    """Make a claim about the mean of the next gap, given the current parameters.

    Since J is exactly quadratic, this mean, `E[Delta_{t+1} | theta_t]`, is known exactly for every
    replicate. Next gaps minus their means have mean zero and are uncorrelated between steps. The
    sum over steps of their squared t statistics is therefore approximately chi-square distributed.
    """
    rates_T = run.simulation.rates_T
    shares_F = np.array([1.0, *OTHER_NOISE])
    total_F = np.zeros(len(shares_F))
    for step in curve:
        at_KR, eta = run.u_SKR[run.place(step)], rates_T[step]
        u_KR = at_KR - problem.best_K[:, None]
        sigma_KR = np.einsum("kkr->kr", noise_everywhere(problem, at_KR, run.estimator))
        shrink_K = np.square(1 - eta * problem.lambda_K)
        drift_R = problem.lambda_K @ (shrink_K[:, None] * u_KR**2) / 2
        noise_R = eta**2 * problem.lambda_K @ sigma_KR / 2
        after_drift_R = run.gap_SR[run.place(step + 1)] - drift_R
        rest_FR = after_drift_R - shares_F[:, None] * noise_R
        score_F = rest_FR.mean(axis=1) / rest_FR.std(axis=1, ddof=1)
        total_F += after_drift_R.size * np.square(score_F)
    count = len(curve)
    p_F = stats.chi2.sf(total_F, count)
    high = stats.chi2.ppf(CONFIDENCE, count)
    return tested_claim(
        f"{run.estimator.name}, {run.rate.name}: chi-square statistic, over {count} steps, "
        "of the difference between E[next gap | current parameters] and the exact recursion",
        f"<= {high:.3g}",
        total_F[0],
        f"compared with the {percentage(CONFIDENCE)} quantile of chi-square, {run.replicates} "
        "replicates",
        float(p_F[0]),
        alternatives={f"noise x {x}": float(p) for x, p in zip(shares_F[1:], p_F[1:], strict=True)},
    )


THEOREM = simulated(STATEMENT, plan, judge)
