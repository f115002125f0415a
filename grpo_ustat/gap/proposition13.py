"""Proposition 13: training with normalised advantages maximises the arcsin objective.

The proposition lets T grow, G and all else fixed. At a fixed G the normalised estimator follows a
field of its own, the sum over prompts of w_G(V) grad V with w_G enumerated; its root is where
training ends, and as G grows it tends to the arcsin maximiser. Variants have the KL term, whose
mean is -beta grad KL(pi_ref || pi), and minibatches with importance ratios: as the learning rate
falls pi_old tends to pi_theta, so that they change no root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from scipy.optimize import brentq

from grpo_ustat.config.gap import Experiment, Proposition13Config
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.intervals import CONFIDENCE, Interval
from grpo_ustat.gap.claims import interval_p_value, limit_claim, mean_interval
from grpo_ustat.gap.evidence import Evidence, Panel, PlotLine
from grpo_ustat.gap.normalised import mean_weight
from grpo_ustat.gap.problems import Problem, build_problem
from grpo_ustat.gap.simulate import Estimator, Simulation, Trajectories, reference_law
from grpo_ustat.gap.simulated import check_rates, learning_rates, simulated
from grpo_ustat.runs.claims import comma_list, correct_family, verdict_of
from grpo_ustat.runs.result import AGREES, DISAGREES, Claim
from grpo_ustat.terminal.streams import percentage

# Distance from a limit that counts as reached, as a share of that between the two maximisers.
TOLERANCE = 0.01

STATEMENT = (
    "Proposition 13: with 0/1 rewards and advantages divided by the group's standard deviation, "
    "group size, batch and the c of the learning rate c/t fixed, training converges as T grows to "
    "the maximiser of E[2 arcsin sqrt(V(X))] instead of that of E[V(X)]; with a KL term, of the "
    "same minus beta KL(pi_ref || pi)."
)


@dataclass(frozen=True)
class EndPoint:
    """The point where runs of one estimator end."""

    # All replicates, recorded after T/4 and T updates.
    run: Trajectories
    # Of the objective that the paper names for its estimator.
    maximiser: float
    # The zero of the enumerated mean of the estimate.
    root: float

    @property
    def estimator(self) -> Estimator:
        """The estimator of the gradient."""
        return self.run.estimator

    @property
    def baseline(self) -> str:
        """The name of the baseline that makes advantages."""
        return "GRPO" if self.estimator.baseline == "leave_one_out" else "normalised"

    @property
    def name(self) -> str:
        """The estimator's name in claims and rows."""
        return f"{self.baseline}, G = {self.estimator.group_size}{variant(self.estimator)}"

    @property
    def measured(self) -> Interval:
        """Mean end over replicates, with its interval."""
        return mean_interval(extrapolate(self.run))

    @property
    def at_last_step(self) -> float:
        """Mean of u after T updates."""
        return float(self.run.u_SKR[1, 0].mean())


def plan(design: Proposition13Config) -> list[Simulation]:
    """Plan GRPO at the largest G, normalised at every G; variants with KL term or minibatches."""
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
    """Compare replicates' ends with maximisers and roots, on a problem of one coordinate."""
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
        what = f"{end.name}: mean end of u, beside the maximiser of {objective}"
        remark = f"; the enumerated root is {end.root:.4g}"
        claims.append(_end_claim(end, what, end.maximiser, remark))
    for end in ends[1:]:
        what = f"{end.name}: mean end of u, beside its own field's root"
        claims.append(_end_claim(end, what, end.root, ""))
    claims.append(_limit_claim(problem, design))
    if design.variant_sizes:
        claims.append(_limit_claim(problem, design, **kl_term(design)))
    claims = correct_family(claims)
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
    return Evidence(
        claims=claims,
        panels=_panels(problem, ends),
        rows=rows,
        answer=_answer(claims, ends),
        notes=_notes(ends),
        problem={
            "u that maximises J": float(problem.best_K[0]),
            "u that maximises the arcsin objective": ends[1].maximiser,
        },
    )


def normalised(design: Proposition13Config, size: int, **changes: Any) -> Estimator:
    """Return the estimator of Algorithm 2 at one G, with changes to its fields."""
    plain = Estimator("leave_one_out_std", design.num_prompts, size, design.epsilon)
    return replace(plain, **changes)


def kl_term(design: Proposition13Config) -> dict[str, Any]:
    """Return the fields of an estimator that has the KL term."""
    return {"beta": design.beta, "reference": tuple(design.reference)}


def variant(estimator: Estimator) -> str:
    """Return the part of an estimator's name that describes everything besides its group."""
    words = ["KL"] * (estimator.beta > 0)
    words += [f"{estimator.minibatches} minibatches"] * (estimator.minibatches > 1)
    return "".join(f", {word}" for word in words)


def pull_of(estimator: Estimator) -> Callable[[np.ndarray], np.ndarray]:
    """Return the factor of grad V in an estimator's mean, a function of V: 1 if not normalised."""
    if estimator.baseline == "leave_one_out":
        return np.ones_like
    return partial(mean_weight, group_size=estimator.group_size, epsilon=estimator.epsilon)


def field(problem: Problem, pull: Callable, u: float, estimator: Estimator | None = None) -> float:
    """Return the mean over prompts of `pull(V) dV/du - beta dKL(pi_ref || pi)/du`.

    Args:
        problem: of one coordinate.
        pull: a function of V.
        estimator: its KL term counts; None: no KL term.
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
    """Return the zero of the field, within the problem's box about the maximiser of J."""
    centre, half = float(problem.best_K[0]), half_width(problem)
    low, high = centre - half, centre + half
    zero = brentq(lambda u: field(problem, pull, u, estimator), low, high, xtol=1e-13)
    return round(float(zero), 12)


def half_width(problem: Problem) -> float:
    """Return the distance from the maximiser of J within which roots are looked for."""
    return min(float(problem.box_K[0]), 10.0)


def maximiser(problem: Problem, estimator: Estimator) -> float:
    """Return the maximiser of the objective that the paper names.

    The objective is E[2 arcsin sqrt V], J without normalisation, either minus beta KL(pi_ref ||
    pi).
    """

    def arcsin_pull(value: np.ndarray) -> np.ndarray:
        return 1 / np.sqrt(value * (1 - value))

    pull = np.ones_like if estimator.baseline == "leave_one_out" else arcsin_pull
    return root(problem, pull, estimator)


def extrapolate(run: Trajectories) -> np.ndarray:
    """Return each replicate's end without the part of order 1/T, from T and T/4.

    Richardson's: with `e(T) = e + b/T`, `e = e(T) + (e(T) - e(T')) / (T/T' - 1)`, T with offset.
    """
    early, late = run.steps_S + run.rate.offset
    return run.u_SKR[1, 0] + (run.u_SKR[1, 0] - run.u_SKR[0, 0]) / (late / early - 1)


def _end_claim(end: EndPoint, what: str, predicted: float, remark: str) -> Claim:
    """Compare the mean end of u with a point; not decided if the extrapolation goes further."""
    measured, count = end.measured, end.run.replicates
    distance, change = (abs(measured.estimate - x) for x in (predicted, end.at_last_step))
    inside = measured.low <= predicted <= measured.high
    agrees = True if inside else None if distance <= change else False
    how = (
        f"{percentage(CONFIDENCE)} t interval, {count} replicates, T = {end.run.steps_S[-1]}, "
        "extrapolated to its limit; outside it but nearer than the extrapolation goes is "
        f"not decided{remark}"
    )
    p_value = interval_p_value(measured, count - 1, predicted)
    return Claim(what, predicted, *measured, verdict_of(agrees), how, p_value)


def _limit_claim(problem: Problem, design: Proposition13Config, **changes: Any) -> Claim:
    """Test that roots at growing G tend to the paper's maximiser, epsilon = 0 and other changes."""
    exact = [normalised(design, size, epsilon=0.0, **changes) for size in design.limit_sizes]
    roots, limit = (
        np.array([root(problem, pull_of(x), x) for x in exact]),
        maximiser(problem, exact[0]),
    )
    distance = abs(maximiser(problem, replace(exact[0], beta=0.0)) - float(problem.best_K[0]))
    sizes, label = comma_list(design.limit_sizes), " - beta KL" if exact[0].beta else ""
    how = (
        f"roots enumerated at G = {sizes}, epsilon = 0, extrapolated in "
        f"1/G; within {percentage(TOLERANCE)} of the distance to J's maximiser, not decided where "
        "closer"
    )
    what = f"as G grows: limit of the root, beside the maximiser of E[2 arcsin sqrt V]{label}"
    return limit_claim(what, limit, roots, TOLERANCE * distance, how)


def _answer(claims: Sequence[Claim], ends: list[EndPoint]) -> str:
    """Summarise the claims, in the order of the ends, on the maximisers that the paper names."""
    verdict = {end.name: claim.verdict for end, claim in zip(ends, claims, strict=False)}
    grpo, *by_size = (end for end in ends if not variant(end.estimator))
    variants = [end for end in ends if variant(end.estimator)]
    disagreeing = [end for end in by_size if verdict[end.name] == DISAGREES]
    agreeing = [end for end in by_size if verdict[end.name] == AGREES]
    sentences = []
    if disagreeing:
        at = ", ".join(f"{end.measured.estimate:.4f}" for end in disagreeing)
        sizes = comma_list(end.estimator.group_size for end in disagreeing)
        sentences.append(
            f"At fixed G training ends elsewhere: at u = {at} for G = {sizes}, where "
            f"E[2 arcsin sqrt V] is largest at {by_size[0].maximiser:.4f}"
        )
    if agreeing:
        sizes = comma_list(end.estimator.group_size for end in agreeing)
        sentences.append(
            f"at G = {sizes} the end is not significantly different from the maximiser"
        )
    limit = next(claim for claim in claims if claim.what.startswith("as G grows"))
    if limit.verdict == AGREES:
        sentences.append("as G grows its end tends to the arcsin maximiser")
    if variants:
        count = sum(verdict[end.name] == DISAGREES for end in variants)
        sentences.append(
            f"of {len(variants)} variants with KL term or minibatches {count} disagree"
        )
    sentences.append(
        f"GRPO without normalisation ends at {grpo.measured.estimate:.4f}, where J is largest "
        f"at {grpo.maximiser:.4f}"
    )
    return "; ".join(sentences) + "."


def _notes(ends: list[EndPoint]) -> list[str]:
    """Return notes on the estimator's own field, and on variants."""
    plain = [end for end in ends[1:] if not variant(end.estimator)]
    roots = ", ".join(f"{end.root:.4f} at {end.estimator.group_size}" for end in plain)
    lines = [
        "At a fixed G the normalised estimator follows a field of its own, the mean over prompts "
        "of G/(G-1) w_G(V) grad V with w_G enumerated over the law of successes; its roots are "
        f"{roots}, the arcsin maximiser {plain[0].maximiser:.4f}. More steps, prompts or a smaller "
        "learning rate do not move a root.",
        "Without a KL term advantages less the group's own mean, instead of the others', have the "
        "same roots: their field is (G-1)/G as long.",
    ]
    if any(variant(end.estimator) for end in ends):
        lines.append(
            "The KL term (pi_ref/pi - 1) s of an on-policy completion has mean "
            "-grad KL(pi_ref || pi) and so the maximiser of the objective minus beta "
            "KL(pi_ref || pi) takes the arcsin maximiser's place; minibatches with importance "
            "ratios of pi_old have the same roots, since pi_old tends to pi_theta as c/t falls."
        )
    return lines


def _panels(problem: Problem, ends: list[EndPoint]) -> list[Panel]:
    """Return panels of the ends by group size and of variants, and of the two objectives."""
    by_size = [end for end in ends[1:] if not variant(end.estimator)]
    x = [end.estimator.group_size for end in by_size]
    curves = [
        *_end_lines("normalised", by_size),
        PlotLine("arcsin maximiser", x, [end.maximiser for end in by_size], predicted=True),
        PlotLine("maximiser of J", x, [float(problem.best_K[0])] * len(x), predicted=True),
    ]
    axes = "group size G", "mean end of u"
    panels = [Panel("where training ends", *axes, curves, "x")]
    variants, curves = {variant(end.estimator): None for end in ends}, []
    for kind in filter(None, variants):
        same, label = [end for end in ends if variant(end.estimator) == kind], kind[2:]
        maximisers = [end.maximiser for end in same]
        x = [end.estimator.group_size for end in same]
        curves += _end_lines(label, same)
        curves.append(PlotLine(f"{label}: arcsin maximiser", x, maximisers, bound=True))
    if curves:
        panels.append(Panel("variants: ends and roots", *axes, curves, "x"))
    u = problem.best_K[0] + np.linspace(-half_width(problem), half_width(problem), 81)
    value_PR = problem.value(problem.law(u[None])[0])
    objectives = {
        "J": value_PR.mean(axis=0),
        "arcsin": 2 * np.arcsin(np.sqrt(value_PR)).mean(axis=0),
    }
    curves = [
        PlotLine(name, list(u), list((y - y.min()) / (y.max() - y.min())), predicted=True)
        for name, y in objectives.items()
    ]
    return [*panels, Panel("the two objectives", "u", "share of its range", curves)]


def _end_lines(label: str, ends: list[EndPoint]) -> list[PlotLine]:
    """Return lines of measured ends with their intervals, and of the roots."""
    x = [end.estimator.group_size for end in ends]
    y, low, high = (list(values) for values in zip(*(end.measured for end in ends), strict=True))
    roots = [end.root for end in ends]
    return [PlotLine(label, x, y, low, high), PlotLine(label, x, roots, predicted=True)]


def check(experiment: Experiment) -> None:
    """Refuse a problem of several coordinates, a reference outside it, and a rate too small."""
    problem, design = build_problem(experiment.problem), experiment.theorem
    if len(problem.start_K) != 1:
        raise ConfigError(
            f"theorem=proposition13 with {len(problem.start_K)} coordinates in problem.start: "
            "it needs one"
        )
    reference, half = design.reference, half_width(problem)
    if len(reference) != 1 or not abs(reference[0] - problem.best_K[0]) <= half:
        raise ConfigError(
            f"theorem.reference={reference} on problem={experiment.problem.name}: give one number "
            f"within {half:.3g} of {problem.best_K[0] + 0.0:.3g}"
        )
    check_rates(experiment, problem, problem.least_curvature)


THEOREM = simulated(Proposition13Config, STATEMENT, plan, judge, check)
