"""Intervals for constants, G* and noise scale at distributions with exactly known moments.

Scores are vectors in the plane. A score is `r u`, where u is a random direction and r is the score
norm, which has a lognormal, Student or Pareto distribution. The reward is 1 with probability `V + a
<u, d> + b sign(r - median)`, where V, a, d and the scale of r differ between questions. The scale
of r is lognormal over questions, with sigma 1.2 in populations named "norms differ" and .3 in the
others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from counting import Asked, Cell, Kind
from populations import pool_of
from scipy import stats

from grpo_ustat.estimators.closed_form import ClosedForm, CurvePoint, Request, closed_form
from grpo_ustat.estimators.gradient_norms import noise_scale_from_norms
from grpo_ustat.estimators.groups import GroupTerms, group_terms, noise_estimate, policy_drift
from grpo_ustat.estimators.intervals import Interval, clustered_wilson, jackknife_interval
from grpo_ustat.estimators.moments import pool_gradient_weights
from grpo_ustat.estimators.scaling import CONSTANTS_AND_GRADIENT, ScalingLaw
from grpo_ustat.records import Array, ScorePool

GROUP_SIZE = 2
BASELINES = ("none", "oracle", "leave_one_out", "optimal")
# Number of questions from which true values for new questions are computed.
POPULATION = 100_000
CELLS = tuple((questions, 16) for questions in (12, 25, 60, 120, 250, 500))


@dataclass(frozen=True)
class Norm:
    """A law of the score norm r, with its quantiles, E r, E r^2 and E[r^2; r > median]."""

    quantile: Callable[[np.ndarray], np.ndarray]
    mean: float
    square: float
    upper: float


def lognormal(sd: float) -> Norm:
    """Make the law in which log r is normal with this standard deviation."""
    square = math.exp(2 * sd**2)
    upper = square * stats.norm.cdf(2 * sd)
    return Norm(lambda u: np.exp(sd * stats.norm.ppf(u)), math.exp(sd**2 / 2), square, upper)


def pareto(index: float) -> Norm:
    """Make the law in which q = r^2 has tail index `index`."""
    square = index / (index - 1)
    mean, upper = 2 * index / (2 * index - 1), square * 0.5 ** (1 - 1 / index)
    return Norm(lambda u: (1 - u) ** (-1 / (2 * index)), mean, square, upper)


def student(dof: float) -> Norm:
    """Make the law in which r is the absolute value of a Student's t variable."""
    law = stats.t(dof)

    def moment(power: int, above: float) -> float:
        return 2 * law.expect(lambda x: x**power, lb=above)

    middle = law.ppf(0.75)
    return Norm(lambda u: law.ppf((1 + u) / 2), moment(1, 0), moment(2, 0), moment(2, middle))


TAILS = {
    "light": lognormal(0.25), "moderate": lognormal(0.5), "heavy": lognormal(0.75),
    "very heavy": lognormal(1.0), "student": student(8), "pareto": pareto(1.7),
}  # fmt: skip


class Questions:
    """`count` questions with scores in the plane.

    Args:
        norm: law of the score norm.
        count: number of questions.
        link: b, the dependence of the reward on the score norm; if 0, Assumption 2 holds.
        spread: standard deviation of the logarithm of a question's scale.
        rng: generator from which V, a, d and the scales are drawn.
    """

    def __init__(self, norm, count, link, spread, rng):
        self.norm, self.count = norm, count
        self.link_P = np.full(count, link)
        self.value_P = rng.uniform(0.35, 0.65, count)
        self.slope_P = rng.uniform(0.1, 0.34 - abs(link), count)
        ahead = rng.normal(size=(count, 2)) + np.array([0.5, 0])
        self.ahead_P2 = ahead / np.linalg.norm(ahead, axis=1, keepdims=True)
        self.scale_P = np.exp(spread * rng.normal(size=count) - spread**2)

    def pool(self, completions: int, rng) -> ScorePool:
        """Draw a pool with `completions` completions of each question."""
        shape = (self.count, completions)
        u = rng.random(shape)
        direction = rng.normal(size=(*shape, 2))
        direction /= np.linalg.norm(direction, axis=2, keepdims=True)
        chance = self.value_P[:, None] + self.link_P[:, None] * np.sign(u - 0.5)
        chance += self.slope_P[:, None] * np.einsum("pnd,pd->pn", direction, self.ahead_P2)
        z = (rng.random(shape) < chance).astype(float)
        scores = (self.norm.quantile(u) * self.scale_P[:, None])[..., None] * direction
        return pool_of(z, scores)

    def truth(self, questions: int) -> dict[str, float]:
        """Return exact values; errors are for a batch with each of `questions` questions once."""
        scale_sq = self.scale_P**2
        m0 = self.norm.square * scale_sq
        covariance = self.link_P * (2 * self.norm.upper - self.norm.square) * scale_sq
        m1, v = m0 * self.value_P + covariance, self.value_P
        a_v = (m1 - 2 * v * m1 + v**2 * m0).mean()
        length = self.slope_P * self.norm.mean * self.scale_P / 2
        g_sq = np.square(length).mean()
        grad_sq = float(np.square((length[:, None] * self.ahead_P2).mean(axis=0)).sum())
        excess = (covariance**2 / m0).mean()
        c1, c2 = g_sq - grad_sq, a_v - g_sq
        c3 = (m0 * v * (1 - v)).mean() + g_sq
        curves = {"none": m1.mean() - g_sq, "oracle": c2, "optimal": c2 - excess}
        curves["leave_one_out"] = c2 + c3 / (GROUP_SIZE - 1)
        errors = {
            row_of(name, questions).key: curves[name] / GROUP_SIZE / questions for name in BASELINES
        }
        constants = {"c1": c1, "c2": c2, "c3": c3, "gstar": 1 + math.sqrt(c3 / c1)}
        noise = 4 * c1 + c2 + c3 / 3
        constants |= {"grad_sq": grad_sq, "noise/4": noise / grad_sq}
        constants |= {"prompt_share/4": 4 * c1 / noise}
        return errors | constants | {"share": excess / a_v}


def row_of(name: str, questions: int) -> CurvePoint:
    """Return the key of a baseline's error for a batch with each question once."""
    return CurvePoint(name, GROUP_SIZE, "all_questions_once", questions)


def simulated(norm: Norm, cell: tuple[int, int], count: int, **law: float) -> Iterator[ClosedForm]:
    """Simulate studies of new questions."""
    questions, completions = cell
    rng = np.random.default_rng(1)
    request = Request([row_of(x, questions) for x in BASELINES], {}, {})
    for _ in range(count):
        drawn = Questions(norm, questions, rng=rng, **law)
        yield closed_form(drawn.pool(completions, rng), request)


def constants(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge intervals for errors, constants, G* and noise."""
    tail, _, differ = name.partition(", ")
    law = {"link": -0.1, "spread": 1.2 if differ else 0.3}
    for cell in asked.cells:
        exact = Questions(TAILS[tail], POPULATION, rng=np.random.default_rng(7), **law)
        truth = exact.truth(cell[0])
        results = simulated(TAILS[tail], cell, asked.studies, **law)
        yield Cell(
            {"questions": cell[0], "completions": cell[1]},
            (judged(result, truth) for result in results),
            truth,
        )


def judged(result: ClosedForm, truth: Mapping[str, float]) -> dict[str, bool | float]:
    """Return True for each of a study's intervals that misses, and the study's warnings."""
    statements: dict[str, bool | float] = {
        name: not result[name].low <= value <= result[name].high
        for name, value in truth.items()
        if not math.isnan(result[name].low)
    }
    statements["warning: heavy tails"] = float(result.tails.heavy)
    statements["gstar: no upper end"] = float(math.isinf(result["gstar"].high))
    statements["gstar: relative bias"] = result["gstar"].estimate / truth["gstar"] - 1
    return statements


def gradient(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge jackknife intervals for ||grad J||^2 with normal gradients in D directions."""
    rng = np.random.default_rng(0)
    for dimensions in (2, 30, 200):
        for questions in (12, 60):
            for signal in (0.5, 1, 2, 4, 10):
                truth = signal * dimensions / questions
                shape = (asked.studies, questions, dimensions)
                estimates = rng.standard_normal(shape) + math.sqrt(truth / dimensions)
                others = np.einsum("rmd,rd->rm", estimates, estimates.sum(axis=1))
                others -= np.square(estimates).sum(axis=2)
                pairs = questions * (questions - 1)
                deleted = (others.sum(axis=1)[:, None] - 2 * others) / (pairs - 2 * questions + 2)
                square = others.sum(axis=1) / pairs
                intervals = [
                    jackknife_interval(x, d[None]) for x, d in zip(square, deleted, strict=True)
                ]
                yield Cell(
                    {"dimensions": dimensions, "questions": questions, "signal / noise": signal},
                    [judged_ends(interval, truth) for interval in intervals],
                    {"||grad J||^2": truth},
                    statements=("||grad J||^2", "low end", "high end", "||grad J||^2 > 0"),
                )


def judged_ends(interval: Interval, truth: float) -> dict[str, bool]:
    """Return statements about misses on either side, and about an interval above 0."""
    low, high = interval.low > truth, interval.high < truth
    statements = {"||grad J||^2": low or high, "low end": low, "high end": high}
    return statements | ({"||grad J||^2 > 0": False} if interval.low > 0 else {})


def accuracy(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge intervals for the accuracy over questions with probabilities from Beta(a, b)."""
    rng = np.random.default_rng(0)
    for a, b in ((1, 2), (4, 8), (0.5, 2), (0.3, 6)):
        for questions in (4, 8, 12, 30, 60, 500):
            for completions in (1, 8, 32):
                chances = rng.beta(a, b, (asked.studies, questions))
                values = rng.binomial(completions, chances) / completions
                intervals = [clustered_wilson(x, completions) for x in values]
                truth = a / (a + b)
                yield Cell(
                    {"a": a, "b": b, "questions": questions, "completions": completions},
                    [
                        {"accuracy": not x.low <= truth <= x.high, "width": x.high - x.low}
                        for x in intervals
                    ],
                    {"accuracy": truth},
                )


def noise_scale(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge the noise scale for steps of 32 groups of 8, from scores and from norms of b groups.

    The norms of gradients from b groups are either those of the step's parts, or those of one
    further gradient per step from other rollouts. Scores are normal in 30 dimensions. Rewards are
    linear in the scores plus noise. The slopes differ between questions and are normal with
    variance 1/4 per dimension.
    """
    rng, dimensions, prompts, size = np.random.default_rng(0), 30, 32, 8
    for grad_sq in (1.6, 0.36):
        # C2 and C3 are equal here, to `length`.
        length = (dimensions + 1) * (grad_sq + dimensions / 4) + dimensions
        truth = (size * dimensions / 4 + length + length / (size - 1)) / grad_sq
        for steps in (10, 40, 160):
            studies = []
            for _ in range(asked.studies):
                # Twice as many steps are drawn. The second half gives the gradients from other
                # rollouts.
                shape = (2 * steps, prompts, size)
                slope = rng.standard_normal((2 * steps, prompts, 1, dimensions)) / 2
                slope += math.sqrt(grad_sq / dimensions)
                scores = rng.standard_normal((*shape, dimensions))
                rewards = (scores * slope).sum(axis=-1) + rng.standard_normal(shape)
                studies.append(dict(judged_scales(rewards, scores, steps, truth)))
            yield Cell({"n_c(8)": truth, "steps": steps}, studies)


def judged_scales(
    rewards: Array, scores: Array, steps: int, truth: float
) -> Iterator[tuple[str, bool | float]]:
    """Yield miss, relative half-width and finite upper end for each noise-scale estimate.

    Args:
        rewards: rewards, [steps, prompts, size], with twice as many steps as are measured.
        scores: scores of the same completions.
        steps: number of measured steps.
        truth: true noise scale.
    """
    prompts, size = rewards.shape[1:]
    ghat = np.einsum("spg,spgd->spd", pool_gradient_weights(rewards), scores)
    terms = [
        group_terms(z, np.square(s).sum(axis=-1), x @ x.T)
        for z, s, x in zip(rewards[:steps], scores, ghat, strict=False)
    ]
    scales = {"scores": noise_estimate(terms, size).intervals["noise_scale"]}
    step_squares = np.square(ghat[:steps].mean(axis=1)).sum(axis=-1)
    for b in (1, 4, 8, 16):
        means = ghat.reshape(2 * steps, -1, b, ghat.shape[-1]).mean(axis=2)
        squares = np.square(means).sum(axis=-1)
        for kind, small in (("parts", squares[:steps]), ("others", squares[steps:, 0])):
            scale = noise_scale_from_norms({b: small, prompts: step_squares}, size)
            scales[f"b = {b}, {kind}"] = scale["noise_scale"]
    for name, scale in scales.items():
        yield name, not scale.low <= truth <= scale.high
        yield f"{name}: half-width / n_c", (scale.high - scale.low) / 2 / truth
        yield f"{name}: upper end", float(math.isfinite(scale.high))


class Softmax:
    """Questions with six outcomes and 0/1 rewards, `p = softmax(phi theta)` in 20 directions.

    Args:
        shared: dependence of the reward on the first direction, which is the same for all
            questions.
    """

    def __init__(self, shared: float):
        rng = np.random.default_rng(3)
        self.phi_PYD = rng.normal(size=(40, 6, 20))
        noise_PY = rng.normal(size=(40, 6))
        self.rewards_PY = (shared * self.phi_PYD[..., 0] + noise_PY > 0.5).astype(float)

    def policy(self, theta_RD):
        """Return probabilities [R, P, Y], mean features [R, P, D], and the constants [R, 4]."""
        logits = np.einsum("pyd,rd->rpy", self.phi_PYD, theta_RD, optimize=True)
        p = np.exp(logits - logits.max(axis=2, keepdims=True))
        p /= p.sum(axis=2, keepdims=True)
        mean = np.einsum("rpy,pyd->rpd", p, self.phi_PYD, optimize=True)
        q = np.square(self.phi_PYD).sum(axis=2) + np.square(mean).sum(axis=2)[..., None]
        q -= 2 * np.einsum("pyd,rpd->rpy", self.phi_PYD, mean, optimize=True)
        centred = self.rewards_PY - (p * self.rewards_PY).sum(axis=2, keepdims=True)
        g = np.einsum("rpy,pyd->rpd", p * centred, self.phi_PYD, optimize=True)
        g_sq = np.square(g).sum(axis=2).mean(axis=1)
        grad_sq = np.square(g.mean(axis=1)).sum(axis=1)
        a_v = (p * q * centred**2).sum(axis=2).mean(axis=1)
        d = ((p * q).sum(axis=2) * (p * centred**2).sum(axis=2)).mean(axis=1)
        return p, mean, np.stack([g_sq - grad_sq, a_v - g_sq, d + g_sq, grad_sq], axis=1)


def windows(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge windows of 32 batches with one group of 8 each and an update after each batch.

    The true values are means over the windows' policies. The intervals come from a jackknife that
    deletes one group, or one window, at a time.
    """
    for rate in (0.0, 0.02, 0.05, 0.1, 0.2):
        for number in (1, 4, 8):
            trained = train(rate, number, asked.studies)
            facts = {"rate": rate, "windows": number, "nats": trained.drift}
            for unit in ("group", "window")[: 1 + (number > 1)]:
                yield Cell(
                    facts | {"left out": unit},
                    [judged_run(trained, run, unit) for run in range(asked.studies)],
                )


class Trained(NamedTuple):
    """Training runs that share a learning rate."""

    # Estimates by window, [R, 4, windows], and each run's group terms by window.
    values: Array
    steps: list[list[GroupTerms]]
    # True C1, C2, C3 and ||grad J||^2, averaged over the policies, [R, 4].
    truth: Array
    # Drift of the policy within the first window, in nats per completion.
    drift: float


def train(rate: float, number: int, count: int, size: int = 8, batches: int = 32) -> Trained:
    """Train `count` runs for a number of windows."""
    problem, run_R1 = Softmax(0.8), np.arange(count)[:, None]
    rng, theta, drift = np.random.default_rng(7), np.zeros((count, 20)), 0.0
    values, exact, steps = np.empty((count, 4, number)), [], [[] for _ in range(count)]
    for window in range(number):
        terms = []
        for _ in range(batches):
            p, mean, constants = problem.policy(theta)
            exact.append(constants)
            question_R1 = rng.integers(40, size=(count, 1))
            ends = p[run_R1, question_R1].cumsum(axis=2)[..., None, :-1]
            outcome_RG = (rng.random((count, 1, size, 1)) > ends).sum(axis=3)[:, 0]
            rewards = problem.rewards_PY[question_R1, outcome_RG]
            scores = problem.phi_PYD[question_R1, outcome_RG] - mean[run_R1, question_R1]
            ghat = np.einsum("rg,rgd->rd", pool_gradient_weights(rewards), scores)
            terms.append((rewards, np.square(scores).sum(axis=2), ghat))
            if len(exact) == 1:
                outcomes = run_R1, question_R1, outcome_RG
                before = np.log(p[outcomes])
            if len(exact) == batches:
                after = np.log(p[outcomes])
                drift = policy_drift(before.reshape(-1, 1), after.reshape(-1, 1))
            theta = theta + rate * ghat
        rewards, norms_sq, ghat = (np.stack(x, axis=1) for x in zip(*terms, strict=True))
        for run in range(count):
            step = group_terms(rewards[run], norms_sq[run], ghat[run] @ ghat[run].T)
            steps[run].append(step)
            step_intervals = noise_estimate([step], size).intervals
            values[run, :, window] = [step_intervals[x].estimate for x in CONSTANTS_AND_GRADIENT]
    return Trained(values, steps, np.mean(exact, axis=0), drift)


def judged_run(trained: Trained, run: int, unit: str, size: int = 8) -> dict[str, bool | float]:
    """Return a run's relative errors of estimates, and misses and half-widths of intervals."""
    if unit == "group":
        intervals = noise_estimate(trained.steps[run], size).intervals
    else:
        intervals = ScalingLaw.of_steps(trained.values[run]).intervals(size)
    truth = ScalingLaw.exact(*trained.truth[run])
    numbers = dict(zip(CONSTANTS_AND_GRADIENT, truth.constants_4, strict=True))
    off = trained.values[run].mean(axis=1) - trained.truth[run]
    means = trained.truth.mean(axis=0)
    statements: dict[str, bool | float] = {
        f"{name}: relative error": float(error)
        for name, error in zip(CONSTANTS_AND_GRADIENT, off / means, strict=True)
    }
    numbers["noise_scale"] = truth.noise_scale(size).estimate
    for name, value in numbers.items():
        interval = intervals[name]
        statements[name] = not interval.low <= value <= interval.high
        statements[f"{name}: half-width"] = (interval.high - interval.low) / 2 / value
    return statements


TAIL_NAMES = [*TAILS, *(f"{name}, norms differ" for name in TAILS)]
KINDS = {
    "constants": Kind(constants, TAIL_NAMES, CELLS, 300),
    "gradient": Kind(gradient, ["normal"], studies=300),
    "accuracy": Kind(accuracy, ["Beta"], studies=2000),
    "noise_scale": Kind(noise_scale, ["normal"]),
    "windows": Kind(windows, ["softmax"]),
}  # fmt: skip
