"""Lemma 6: the mean gap of Algorithm 1 against its recursion and its bounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

from grpo_ustat.config.gap import Experiment, Lemma6Config
from grpo_ustat.estimators.convergence import decaying_bound, quadratic_recursion, recursion
from grpo_ustat.estimators.intervals import CONFIDENCE
from grpo_ustat.gap.claims import mean_interval, mean_p_value
from grpo_ustat.gap.evidence import Evidence, Panel, Theorem, line_of
from grpo_ustat.gap.exact import bed_facts, largest_error, noise, noise_everywhere
from grpo_ustat.gap.simulate import (
    Estimator,
    Rate,
    Simulation,
    Trajectories,
    check_rates,
    exits_text,
    learning_rates,
    log_spaced_steps,
    run_simulations,
)
from grpo_ustat.gap.testbeds import CoinTestbed, Testbed, build_testbed
from grpo_ustat.runs.claims import Claim, agreement
from grpo_ustat.runs.record import AGREES, DISAGREES, OPEN
from grpo_ustat.terminal.streams import percentage

LARGE_T_RATIO = 1.1  # the recursion's bound over that of order 1/T, below which T counts as large
OTHER_BOUNDS = (0.9, 0.7, 0.5, 0.3)  # other bounds, as shares of the bound
OTHER_NOISE = (0.5, 0.7, 0.9, 0.95, 1.05, 1.1, 1.4, 2.0)  # other noise, as shares of the noise
STATEMENT = (
    "If J is L-smooth and satisfies a Polyak-Lojasiewicz inequality with mu, and the gradient's "
    "mean squared error is at most s2, the mean gap J* - J of Algorithm 1 obeys a linear "
    "recursion: for a constant learning rate it is below the recursion's solution at every T, for "
    "c/t below a constant over T when T is large."
)


def lemma6(
    bed: Testbed,
    estimators: Sequence[Estimator],
    rates: Sequence[Rate],
    steps: int,
    replicates: int,
    seed: int,
    workers: int,
) -> Evidence:
    """Run every estimator at every learning rate, and hold the mean gap against the bounds.

    Args:
        bed: with mu and L of its sublevel set.
        estimators, rates: all pairs are run.
        steps: T.
        replicates, seed, workers: see `run_simulations`.
    """
    curve = log_spaced_steps(steps)
    with_next = tuple(sorted({0, *curve, *(step + 1 for step in curve)}))
    simulations = [Simulation(one, rate, with_next) for rate in rates for one in estimators]
    runs, rollouts = run_simulations(simulations, bed, replicates, seed, workers)
    mu, smoothness = bed.constants
    claims, rows = [], []
    for simulation, run in zip(simulations, runs, strict=True):
        estimator, rate = simulation.estimator, simulation.rate
        name = f"{estimator.name}, {rate.name}"
        s2, rates_T = largest_error(bed, estimator), rate.values(run.steps_S[-1])
        bound = recursion(float(run.gap_SR[0, 0]), mu, smoothness, s2, rates_T)
        rows += _rows(bed, simulation, run, curve, bound, s2)
        what = f"{name}: mean gap over the recursion, largest of all T"
        claims.append(_bound_claim(what, run, bound, curve))
        if rate.kind == "decaying":
            limit = np.full(len(bound), np.inf)
            after = np.arange(1.0, len(bound)) + rate.offset
            limit[1:] = decaying_bound(mu, smoothness, s2, rate.value, after)
            what = f"{name}: mean gap over the bound of order 1/T, at T = {steps}"
            holds = bool(bound[steps] <= LARGE_T_RATIO * limit[steps])
            claims.append(_bound_claim(what, run, limit, [steps], holds))
        if isinstance(bed, CoinTestbed):
            claims.append(_next_step_claim(bed, simulation, run, curve))
    return Evidence(
        bed=bed_facts(bed),
        claims=claims,
        panels=[_panel(rate, rows) for rate in rates],
        rows=rows,
        answer=f"{agreement(claims)} predictions of the recursion and its bounds agree.",
        notes=[
            f"{exits_text(runs)}; they stay in every mean",
            "s2 is the largest error on the sublevel set, so the bounds are as loose as errors "
            "differ there",
        ],
        rollouts=rollouts,
    )


def _rows(
    bed: Testbed,
    simulation: Simulation,
    run: Trajectories,
    curve: list[int],
    bound: np.ndarray,
    s2: float,
) -> list[dict]:
    """A row for each step of the curve."""
    estimator, rate = simulation.estimator, simulation.rate
    sigma = noise(bed, bed.best_K, estimator)
    rates_T = rate.values(run.steps_S[-1])
    model = quadratic_recursion(bed.start_K - bed.best_K, bed.curvature_KK, sigma, rates_T)
    rows = []
    for step in curve:
        gap_R = run.gap_SR[list(run.steps_S).index(step)]
        mean, low, high = mean_interval(gap_R)
        rows.append(
            {"estimator": estimator.name, "group_size": estimator.group_size}
            | {"num_prompts": estimator.num_prompts, "rate": rate.name, "step": step}
            | {"gap": mean, "low": low, "high": high, "bound": float(bound[step])}
            | {"quadratic_model": float(model[step]), "s2": s2, "replicates": len(gap_R)}
            | {"left": int(((run.exit_R > 0) & (run.exit_R <= step)).sum())}
        )
    return rows


def _bound_claim(
    what: str, run: Trajectories, bound: np.ndarray, steps: list[int], holds: bool = True
) -> Claim:
    """The largest ratio of mean and bound, with intervals that hold together.

    The p-value is Bonferroni's over the steps, of one-sided t tests that the mean is at most the
    bound. Where theory does not say yet that the bound `holds`, as of 1/T while T is small, a mean
    above it decides nothing.
    """
    places = [list(run.steps_S).index(step) for step in steps]
    intervals = [mean_interval(run.gap_SR[place], among=len(steps)) for place in places]
    ratios = np.array([np.array(x) / bound[s] for x, s in zip(intervals, steps, strict=True)])
    mean, low, high = ratios[ratios[:, 0].argmax()]

    def p_value(share: float) -> float:
        excess = (run.gap_SR[x] - share * bound[s] for x, s in zip(places, steps, strict=True))
        return min(1.0, len(steps) * min(mean_p_value(over_R, above=True) for over_R in excess))

    how = f"{percentage(CONFIDENCE)} intervals over {run.gap_SR.shape[1]} replicates"
    how += f", {len(steps)} steps at once (Bonferroni)" if len(steps) > 1 else ""
    how += "; not decided where an interval has the bound within"
    how += "" if holds else "; T is too small for this bound: the recursion's own is above it"
    return Claim(
        what=what,
        predicted="<= 1",
        measured=float(mean),
        low=float(low),
        high=float(high),
        verdict=AGREES if ratios[:, 2].max() <= 1 else OPEN,
        how=how,
        p_value=p_value(1.0) if holds else None,
        when_rejected=DISAGREES,
        alternatives={f"bound x {share}": p_value(share) for share in OTHER_BOUNDS}
        if holds
        else {},
    )


def _next_step_claim(
    bed: CoinTestbed, simulation: Simulation, run: Trajectories, curve: list[int]
) -> Claim:
    """J is exactly quadratic, so `E[Delta_{t+1} | theta_t]` is known for every replicate's theta_t;
    the rest has mean zero, and no correlation between steps: the sum of its squared t scores is
    chi-square.
    """
    rates_T, places = simulation.rate.values(run.steps_S[-1]), list(run.steps_S)
    shares_F = np.array([1.0, *OTHER_NOISE])
    total_F = np.zeros(len(shares_F))
    for step in curve:
        at_KR, eta = run.u_SKR[places.index(step)], rates_T[step]
        u_KR = at_KR - bed.best_K[:, None]
        sigma_KR = np.einsum("kkr->kr", noise_everywhere(bed, at_KR, simulation.estimator))
        shrink_K = np.square(1 - eta * bed.lambda_K)
        drift_R = bed.lambda_K @ (shrink_K[:, None] * u_KR**2) / 2
        noise_R = eta**2 * bed.lambda_K @ sigma_KR / 2
        after_drift_R = run.gap_SR[places.index(step + 1)] - drift_R
        rest_FR = after_drift_R - shares_F[:, None] * noise_R
        score_F = rest_FR.mean(axis=1) / rest_FR.std(axis=1, ddof=1)
        total_F += after_drift_R.size * np.square(score_F)
    count = len(curve)
    p_F = stats.chi2.sf(total_F, count)
    high = stats.chi2.ppf(CONFIDENCE, count)
    return Claim(
        what=f"{simulation.estimator.name}, {simulation.rate.name}: E[gap of the next step | now] "
        f"as the exact recursion has it, chi-square of {count} steps",
        predicted=f"<= {high:.3g}",
        measured=float(total_F[0]),
        low=None,
        high=None,
        verdict=AGREES,
        how=f"chi-square, {percentage(CONFIDENCE)} quantile, {run.gap_SR.shape[1]} replicates",
        p_value=float(p_F[0]),
        alternatives={f"noise x {x}": float(p) for x, p in zip(shares_F[1:], p_F[1:], strict=True)},
    )


def _panel(rate: Rate, rows: list[dict]) -> Panel:
    curves = []
    for name in dict.fromkeys(row["estimator"] for row in rows):
        points = [row for row in rows if (row["estimator"], row["rate"]) == (name, rate.name)]
        curves.append(line_of(name, points, "step", "gap"))
        curves.append(line_of(name, points, "step", "quadratic_model", predicted=True))
        curves.append(line_of(name, points, "step", "bound", bound=True))
    label = "mean gap (line: quadratic recursion, dashes: bound)"
    return Panel(rate.name, "step T", label, curves, "xy")


def study(experiment: Experiment) -> Evidence:
    """`lemma6` with the estimators and learning rates of a configuration."""
    design: Lemma6Config = experiment.study
    prompts = design.rollouts // design.group_size
    return lemma6(
        build_testbed(experiment.bed),
        [Estimator(name, prompts, design.group_size) for name in design.baselines],
        learning_rates(design),
        design.steps,
        design.replicates,
        experiment.seed,
        experiment.workers,
    )


def check(experiment: Experiment) -> None:
    """Refuse learning rates outside the bounds, see `check_rates`; mu is the inequality's."""
    bed = build_testbed(experiment.bed)
    check_rates(experiment, bed, bed.constants[0])


def completions(experiment: Experiment) -> int:
    """How many completions all replicates draw, with every estimator at every learning rate."""
    design: Lemma6Config = experiment.study
    pairs = len(design.baselines) * (len(design.constant_rates) + 1)
    return pairs * design.rollouts * design.steps * design.replicates


THEOREM = Theorem(Lemma6Config, STATEMENT, study, check, completions)
