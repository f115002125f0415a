"""Proposition 13: training with normalised advantages maximises the arcsin objective.

The arcsin objective is E[2 arcsin sqrt V], the mean over prompts of a function of the expected
reward V. In the proposition the number of steps T grows, and all other quantities, including G, are
fixed.

At a fixed G, the expectation of the normalised estimator is the mean over prompts of w_G(V) grad V,
with a factor w_G that is enumerated. As a function of the parameter u, this expectation is called
the field. Training ends where the field is 0, at its root. As G grows, the root tends to the
maximiser of the arcsin objective.

Two extensions of the estimator are tested, alone and together: a KL term with expectation
-beta grad KL(pi_ref || pi), and minibatches with importance ratios. Minibatches do not change the
root, because pi_old tends to pi_theta as the learning rate falls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from scipy.optimize import brentq

from grpo_ustat.config.gap import Proposition13Config
from grpo_ustat.estimators.intervals import CONFIDENCE, Interval
from grpo_ustat.gap.claims import interval_p_value, limit_claim, mean_interval
from grpo_ustat.gap.evidence import Evidence, Panel, Series
from grpo_ustat.gap.lemma11 import mean_weight
from grpo_ustat.gap.problems import Problem
from grpo_ustat.gap.simulate import Estimator, Simulation, Trajectories, reference_law
from grpo_ustat.gap.simulated import learning_rates, simulated
from grpo_ustat.runs.claims import comma_list, verdict_of
from grpo_ustat.runs.result import Claim
from grpo_ustat.terminal.streams import percentage

# A limit agrees with the prediction if their distance is at most this fraction of the distance
# between the maximisers of E[V] and of E[2 arcsin sqrt V].
TOLERANCE = 0.01

STATEMENT = (
    "Proposition 13: let rewards be 0 or 1, divide advantages by the group's standard deviation, "
    "and fix the group size, the batch and the c of the learning rate c/t. As T grows, training "
    "converges to the maximiser of E[2 arcsin sqrt(V(X))] instead of the maximiser of E[V(X)]. "
    "With a KL term, training converges to the maximiser of E[2 arcsin sqrt(V(X))] - beta "
    "KL(pi_ref || pi)."
)


@dataclass(frozen=True)
class EndPoint:
    """Point at which training with one estimator ends."""

    # Trajectories of all replicates, recorded after T/4 and T updates.
    run: Trajectories
    # Maximiser of the objective that the paper states for the estimator.
    maximiser: float
    # Coordinate u at which the expectation of the estimate, computed by enumeration, is 0.
    root: float

    @property
    def estimator(self) -> Estimator:
        """Estimator with which the policy was trained."""
        return self.run.estimator

    @property
    def baseline(self) -> str:
        """`GRPO` for advantages without normalisation, `normalised` for divided advantages."""
        return "GRPO" if self.estimator.baseline == "leave_one_out" else "normalised"

    @property
    def name(self) -> str:
        """Name of the estimator in claims and in curves.csv."""
        return f"{self.baseline}, G = {self.estimator.group_size}{variant(self.estimator)}"

    @property
    def measured(self) -> Interval:
        """Mean over replicates of the end point, extrapolated to infinite T, with a t interval."""
        return mean_interval(extrapolate(self.run))

    @property
    def at_last_step(self) -> float:
        """Mean of u over replicates after T updates."""
        return float(self.run.u_SKR[1, 0].mean())


def plan(design: Proposition13Config) -> list[Simulation]:
    """Plan GRPO at the largest G, and the normalised estimator at every G and with its variants.

    The variants add a KL term, minibatches or both.
    """
    (rate,), steps = learning_rates(design), (design.steps // 4, design.steps)
    kl, parts = kl_term(design), design.minibatches
    split = {"num_prompts": design.num_prompts // parts, "minibatches": parts}
    estimators = [
        Estimator("leave_one_out", design.num_prompts, max(design.group_sizes)),
        *(normalised(design, size) for size in design.group_sizes),
        *(
            normalised(design, size, **changes)
            for size in design.variant_sizes
            for changes in (kl, split, kl | split)
        ),
    ]
    return [Simulation(estimator, rate, steps) for estimator in estimators]


def judge(problem: Problem, design: Proposition13Config, runs: Sequence[Trajectories]) -> Evidence:
    """Compare the mean end points of training with the maximisers and the roots.

    The test problem has a single coordinate u.
    """
    ends = [
        EndPoint(
            run,
            maximiser(problem, run.estimator),
            root(problem, pull_of(run.estimator), run.estimator),
        )
        for run in runs
    ]
    claims = []
    for end in ends:
        objective = "E V" if end.baseline == "GRPO" else "E[2 arcsin sqrt V]"
        objective += " - beta KL" if end.estimator.beta else ""
        what = f"{end.name}: mean end point of u against the maximiser of {objective}"
        remark = f"; the enumerated root is {end.root:.4g}"
        claims.append(_end_claim(end, what, end.maximiser, remark))
    for end in ends[1:]:
        what = f"{end.name}: mean end point of u against the root of the enumerated expected update"
        claims.append(_end_claim(end, what, end.root, ""))
    claims.append(_limit_claim(problem, design))
    if design.variant_sizes:
        claims.append(_limit_claim(problem, design, **kl_term(design)))
    rows = [
        {
            "estimator": end.baseline, "group_size": end.estimator.group_size,
            "num_prompts": end.estimator.num_prompts, "beta": end.estimator.beta,
            "minibatches": end.estimator.minibatches, "maximiser": end.maximiser,
            "root": end.root, "j_maximiser": float(problem.best_K[0]),
            **dict(zip(("measured", "low", "high"), end.measured, strict=True)),
            "at_last_step": end.at_last_step, "replicates": end.run.replicates,
        }
        for end in ends
    ]  # fmt: skip
    by_size = [end for end in ends[1:] if not variant(end.estimator)]
    sizes, best = [end.estimator.group_size for end in by_size], float(problem.best_K[0])
    series = [
        Series(
            "normalised (line: root)", sizes,
            [end.measured for end in by_size], [end.root for end in by_size],
        ),
        Series("arcsin maximiser", sizes, predicted=[end.maximiser for end in by_size]),
        Series("maximiser of J", sizes, predicted=[best] * len(sizes)),
    ]  # fmt: skip
    return Evidence(claims, Panel("group size G", "mean end point of u", series, "x"), rows)


def normalised(design: Proposition13Config, size: int, **changes: Any) -> Estimator:
    """Return Algorithm 2's estimator at group size `size`, with the given fields changed."""
    plain = Estimator("leave_one_out_std", design.num_prompts, size, design.epsilon)
    return replace(plain, **changes)


def kl_term(design: Proposition13Config) -> dict[str, Any]:
    """Return the KL term's entries for the data class `Estimator`, as keyword arguments."""
    return {"beta": design.beta, "reference": (design.reference,)}


def variant(estimator: Estimator) -> str:
    """Return the end of an estimator's name, which says if it has a KL term and minibatches."""
    words = ["KL"] * (estimator.beta > 0)
    words += [f"{estimator.minibatches} minibatches"] * (estimator.minibatches > 1)
    return "".join(f", {word}" for word in words)


def pull_of(estimator: Estimator) -> Callable[[np.ndarray], np.ndarray]:
    """Return the factor w_G(V) of grad V in the estimator's expectation, as a function of V.

    Without normalisation this function returns 1 for every V.
    """
    if estimator.baseline == "leave_one_out":
        return np.ones_like
    return partial(mean_weight, group_size=estimator.group_size, epsilon=estimator.epsilon)


def field(problem: Problem, pull: Callable, u: float, estimator: Estimator | None = None) -> float:
    """Return the field: the mean over prompts of `pull(V) dV/du - beta dKL(pi_ref || pi)/du`.

    Args:
        problem: test problem with one coordinate, u.
        pull: factor of dV/du as a function of V, from `pull_of`.
        u: coordinate at which the field is computed.
        estimator: estimator that defines the KL term, or None for a field without a KL term.
    """
    probability_PYR, score_PYKR = problem.law(np.array([[u]]))
    reward_PYR = probability_PYR * problem.rewards_PY[..., None]
    slope_P = np.einsum("pyr,pykr->p", reward_PYR, score_PYKR)
    ascent = float((pull(reward_PYR.sum(axis=1)[:, 0]) * slope_P).mean())
    reference_PY = None if estimator is None else reference_law(problem, estimator)
    if estimator is None or reference_PY is None:
        return ascent
    penalty_P = np.einsum("py,pykr->p", reference_PY, score_PYKR)
    return ascent + estimator.beta * float(penalty_P.mean())


def root(problem: Problem, pull: Callable, estimator: Estimator | None = None) -> float:
    """Return the coordinate u at which the field is 0; the search stays within `half_width`."""
    centre, half = float(problem.best_K[0]), half_width(problem)
    low, high = centre - half, centre + half
    zero = brentq(lambda u: field(problem, pull, u, estimator), low, high, xtol=1e-13)
    return round(float(zero), 12)


def half_width(problem: Problem) -> float:
    """Return the largest distance from the maximiser of J at which `root` searches."""
    return min(float(problem.box_K[0]), 10.0)


def maximiser(problem: Problem, estimator: Estimator) -> float:
    """Return the maximiser of the objective that the paper states for an estimator.

    The objective is E[2 arcsin sqrt V] with normalisation, and J = E V without. If the estimator
    has a KL term, beta KL(pi_ref || pi) is subtracted from the objective.
    """

    def arcsin_pull(value: np.ndarray) -> np.ndarray:
        return 1 / np.sqrt(value * (1 - value))

    pull = np.ones_like if estimator.baseline == "leave_one_out" else arcsin_pull
    return root(problem, pull, estimator)


def extrapolate(run: Trajectories) -> np.ndarray:
    """Extrapolate each replicate's u from T' = T/4 and T steps to infinitely many steps.

    Richardson extrapolation removes the error of order 1/T: if `u(T) = u + b/T`, then
    `u = u(T) + (u(T) - u(T')) / (T/T' - 1)`. The offset of the learning rate is added to T and T'.
    """
    early, late = run.steps_S + run.rate.offset
    return run.u_SKR[1, 0] + (run.u_SKR[1, 0] - run.u_SKR[0, 0]) / (late / early - 1)


def _end_claim(end: EndPoint, what: str, predicted: float, remark: str) -> Claim:
    """Make a claim that the mean end point of u equals a predicted value.

    A prediction outside the interval leaves the claim undecided if it is near: its distance from
    the mean is at most the distance by which the extrapolation moved the mean.
    """
    measured, count = end.measured, end.run.replicates
    distance, change = (abs(measured.estimate - x) for x in (predicted, end.at_last_step))
    inside = measured.low <= predicted <= measured.high
    agrees = True if inside else None if distance <= change else False
    how = (
        f"{percentage(CONFIDENCE)} t interval, {count} replicates, T = {end.run.steps_S[-1]}, "
        "extrapolated to infinite T; a prediction outside the interval leaves the claim undecided "
        "if its distance from the mean is at most the change that the extrapolation "
        f"made{remark}"
    )
    p_value = interval_p_value(measured, count - 1, predicted)
    return Claim(what, predicted, *measured, verdict_of(agrees), how, p_value)


def _limit_claim(problem: Problem, design: Proposition13Config, **changes: Any) -> Claim:
    """Make a claim that, at epsilon = 0, the root tends to the paper's maximiser as G grows."""
    exact = [normalised(design, size, epsilon=0.0, **changes) for size in design.limit_sizes]
    roots, limit = (
        np.array([root(problem, pull_of(x), x) for x in exact]),
        maximiser(problem, exact[0]),
    )
    distance = abs(maximiser(problem, replace(exact[0], beta=0.0)) - float(problem.best_K[0]))
    sizes, label = comma_list(design.limit_sizes), " - beta KL" if exact[0].beta else ""
    how = (
        f"roots enumerated at G = {sizes}, epsilon = 0, extrapolated in 1/G; agrees within "
        f"{percentage(TOLERANCE)} of the distance between the maximisers of J and of E[2 arcsin "
        "sqrt V], otherwise undecided if the roots approach the prediction"
    )
    what = f"as G grows: limit of the root, against the maximiser of E[2 arcsin sqrt V]{label}"
    return limit_claim(what, limit, roots, TOLERANCE * distance, how)


THEOREM = simulated(STATEMENT, plan, judge)
