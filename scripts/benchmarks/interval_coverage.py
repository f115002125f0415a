"""How often 95 % intervals hold the truth, and how often the warning of heavy tails fires.

Synthetic questions whose moments are known exactly: a score is `r u` with u a random direction in
the plane and r the score norm, lognormal, Student or Pareto; the reward is 1 with probability
`V + a <u, d> + b sign(r - median)`, with V, a, d and the scale of r different for every question.

    python scripts/benchmarks/interval_coverage.py --tails light heavy --questions 12 60
    python scripts/benchmarks/interval_coverage.py --spread 1.2 --intervals questions
    python scripts/benchmarks/interval_coverage.py --assumption2  # false refutations where it holds
    python scripts/benchmarks/interval_coverage.py --gradient  # ||grad J||^2, 2 to 200 dimensions
    python scripts/benchmarks/interval_coverage.py --accuracy --studies 2000
    python scripts/benchmarks/interval_coverage.py --norms  # noise scale without scores
    python scripts/benchmarks/interval_coverage.py --windows  # groups of policies in training
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy import stats

from grpo_ustat.estimators.closed_form import ClosedForm, CurvePoint, Request, closed_form
from grpo_ustat.estimators.gradient_norms import noise_scale_from_norms
from grpo_ustat.estimators.groups import group_terms, noise_estimate, policy_drift
from grpo_ustat.estimators.intervals import clustered_wilson, jackknife_interval
from grpo_ustat.estimators.moments import centred, pool_gradient_weights, refutes_assumption2
from grpo_ustat.estimators.scaling import CONSTANTS_AND_GRADIENT, ScalingLaw
from grpo_ustat.records import ScorePool

GROUP_SIZE = 2
BASELINES = ("none", "oracle", "leave_one_out", "optimal")
POPULATION = 100_000  # questions behind the truth over questions


@dataclass(frozen=True)
class Norm:
    """A law of the score norm r: quantiles, E r, E r^2 and E[r^2; r > median]."""

    quantile: Callable[[np.ndarray], np.ndarray]
    mean: float
    square: float
    upper: float


def lognormal(sd: float) -> Norm:
    """log r is normal with this standard deviation, that of log q is twice it."""
    square = math.exp(2 * sd**2)
    upper = square * stats.norm.cdf(2 * sd)
    return Norm(lambda u: np.exp(sd * stats.norm.ppf(u)), math.exp(sd**2 / 2), square, upper)


def pareto(index: float) -> Norm:
    """q = r^2 of tail index `index`."""
    square = index / (index - 1)
    mean, upper = 2 * index / (2 * index - 1), square * 0.5 ** (1 - 1 / index)
    return Norm(lambda u: (1 - u) ** (-1 / (2 * index)), mean, square, upper)


def student(dof: float) -> Norm:
    """r is the absolute value of a Student variable."""
    law = stats.t(dof)

    def moment(power: int, above: float) -> float:
        return 2 * law.expect(lambda x: x**power, lb=above)

    middle = law.ppf(0.75)
    return Norm(lambda u: law.ppf((1 + u) / 2), moment(1, 0), moment(2, 0), moment(2, middle))


TAILS = {
    "light": lognormal(0.25), "moderate": lognormal(0.5), "heavy": lognormal(0.75),
    "very heavy": lognormal(1.0), "student": student(8), "pareto": pareto(1.7),
}  # fmt: skip


class Bed:
    """m questions.

    Args:
        norm: law of the score norm.
        count: m.
        link: b, how far the reward depends on the score norm; 0: Assumption 2 holds.
        spread: standard deviation of the logarithm of a question's scale.
        rng: of V, a, d and the scales.
        alternate: whether b changes its sign from question to question.
    """

    def __init__(self, norm, count, link, spread, rng, alternate=False):
        self.norm, self.count = norm, count
        sign_P = np.where(np.arange(count) % 2, -1, 1) if alternate else np.ones(count)
        self.link_P = link * sign_P
        self.value_P = rng.uniform(0.35, 0.65, count)
        self.slope_P = rng.uniform(0.1, 0.34 - abs(link), count)
        ahead = rng.normal(size=(count, 2)) + np.array([0.5, 0])
        self.ahead_P2 = ahead / np.linalg.norm(ahead, axis=1, keepdims=True)
        self.scale_P = np.exp(spread * rng.normal(size=count) - spread**2)

    def pool(self, completions: int, rng) -> ScorePool:
        """Completions of every question."""
        shape = (self.count, completions)
        u = rng.random(shape)
        direction = rng.normal(size=(*shape, 2))
        direction /= np.linalg.norm(direction, axis=2, keepdims=True)
        chance = self.value_P[:, None] + self.link_P[:, None] * np.sign(u - 0.5)
        chance += self.slope_P[:, None] * np.einsum("pnd,pd->pn", direction, self.ahead_P2)
        z = (rng.random(shape) < chance).astype(float)
        scores = (self.norm.quantile(u) * self.scale_P[:, None])[..., None] * direction
        return ScorePool(
            rewards_PN=z,
            gram_PNN=np.einsum("pid,pjd->pij", scores, scores, optimize=True),
            lengths_PN=np.ones(shape, dtype=int),
            features_PNR=scores,
            centred_sums_PR=np.einsum("pn,pnd->pd", centred(z), scores),
        )

    def truth(self, questions: int) -> dict[str, float]:
        """Exact values; of curves for a batch of so many questions, each once."""
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
        errors = {f"mse {name}": curves[name] / GROUP_SIZE / questions for name in BASELINES}
        constants = {"c1": c1, "c2": c2, "c3": c3, "gstar": 1 + math.sqrt(c3 / c1)}
        noise = 4 * c1 + c2 + c3 / 3
        constants |= {"grad_sq": grad_sq, "noise/4": noise / grad_sq}
        constants |= {"noise/best": (c1 + c2 + 2 * math.sqrt(c1 * c3)) / grad_sq}
        constants |= {"prompt_share/4": 4 * c1 / noise}
        return errors | constants | {"share": excess / a_v}


def studies(norm, questions, completions, interval, count, seed, **bed) -> Iterator[ClosedForm]:
    """So many studies; given the questions all of the same ones."""
    rng = np.random.default_rng(seed)
    fixed = Bed(norm, questions, rng=np.random.default_rng(7), **bed)
    over = interval == "questions"
    rows = [CurvePoint(name, GROUP_SIZE, "all_questions_once", questions) for name in BASELINES]
    request = Request(rows, {}, questions, over, {})
    for _ in range(count):
        drawn = Bed(norm, questions, rng=rng, **bed) if over else fixed
        yield closed_form(drawn.pool(completions, rng), request, interval)


def coverage(
    tail: str, questions: int, completions: int, interval: str, count: int, spread: float
) -> None:
    """A row of the table: coverage of every quantity, bias of G*, and how often it warns."""
    bed = {"link": -0.1, "spread": spread}
    norm, over = TAILS[tail], interval == "questions"
    size = POPULATION if over else questions
    exact = Bed(norm, size, rng=np.random.default_rng(7), **bed).truth(questions)
    hits, warned, best, unbounded = dict.fromkeys(exact, 0), 0, [], 0
    given = dict.fromkeys(exact, 0)
    for result in studies(norm, questions, completions, interval, count, 1, **bed):
        warned += result.tails.heavy
        if over:  # given the questions nothing is said of training
            unbounded += math.isinf(result["gstar"].high)
            best.append(result["gstar"].estimate)
        for name, value in exact.items():
            if not over and name.startswith(("gstar", "noise", "prompt_share")):
                continue
            key = name
            if name.startswith("mse "):
                key = CurvePoint(name[4:], GROUP_SIZE, "all_questions_once", questions).key
            hits[name] += result[key].low <= value <= result[key].high
            given[name] += not math.isnan(result[key].low)
    shares = " | ".join(f"{hits[x] / given[x]:.3f}" if given[x] else "-" for x in exact)
    off = f"{np.nanmedian(best) / exact['gstar'] - 1:+.1%}" if best else "-"
    print(
        f"| {tail} | {interval} | {questions} x {completions} | {shares} | {unbounded / count:.2f} "
        f"| {off} | {warned / count:.2f} |",
        flush=True,
    )


def assumption2(count: int) -> None:
    """False refutations where Assumption 2 holds at every question, and power where it fails."""
    print("| tails | interval | questions x completions | b | refuted | corr's interval misses 0 |")
    print("|---|---|---|---|---|---|")
    for tail in ("light", "moderate", "heavy", "very heavy", "pareto"):
        for questions, completions in ((4, 16), (12, 16), (12, 64), (60, 16)):
            for interval in ("completions", "questions"):
                for link in (0.0, 0.2):
                    if link and tail not in ("light", "moderate"):
                        continue
                    bed = {"link": link, "spread": 0.3, "alternate": True}
                    law = (TAILS[tail], questions, completions, interval, count, 1)
                    results = [
                        (refutes_assumption2(f["share"], f["corr"]), f["corr"])
                        for f in studies(*law, **bed)
                    ]
                    share = np.mean([fails for fails, _ in results])
                    other = np.mean([not c.low <= 0 <= c.high for _, c in results])
                    print(
                        f"| {tail} | {interval} | {questions} x {completions} | "
                        f"{'+-' if link else ''}{link} | {share:.3f} | {other:.3f} |",
                        flush=True,
                    )


def gradient(count: int) -> None:
    """Coverage of ||grad J||^2 by the jackknife over questions of its U-statistic, where the
    questions' estimates are normal, equally noisy in D directions.
    """
    print("| dimensions | questions | signal over noise | coverage | above | below | low end > 0 |")
    print("|---" * 7 + "|")
    rng = np.random.default_rng(0)
    for dimensions in (2, 30, 200):
        for questions in (12, 60):
            for signal in (0.5, 1, 2, 4, 10):
                truth = signal * dimensions / questions
                shape = (count, questions, dimensions)
                estimates = rng.standard_normal(shape) + math.sqrt(truth / dimensions)
                others = np.einsum("rmd,rd->rm", estimates, estimates.sum(axis=1))
                others -= np.square(estimates).sum(axis=2)
                pairs = questions * (questions - 1)
                deleted = (others.sum(axis=1)[:, None] - 2 * others) / (pairs - 2 * questions + 2)
                whole = others.sum(axis=1) / pairs
                ends = [jackknife_interval(x, d[None]) for x, d in zip(whole, deleted, strict=True)]
                low, high = np.array([(x.low, x.high) for x in ends]).T
                shares = ((low <= truth) & (truth <= high), low > truth, high < truth, low > 0)
                cells = " | ".join(f"{share.mean():.3f}" for share in shares)
                print(f"| {dimensions} | {questions} | {signal} | {cells} |", flush=True)


def accuracy(count: int) -> None:
    """Coverage of the accuracy over questions whose chances are of Beta(a, b)."""
    print("| chances | questions | completions | coverage | width |\n" + "|---" * 5 + "|")
    rng = np.random.default_rng(0)
    for a, b in ((1, 2), (4, 8), (0.5, 2), (0.3, 6)):
        for questions in (4, 8, 12, 30, 60, 500):
            for completions in (1, 8, 32):
                chances = rng.beta(a, b, (count, questions))
                values = rng.binomial(completions, chances) / completions
                ends = [clustered_wilson(own, completions)[1:] for own in values]
                low, high = np.array(ends).T
                held = ((low <= a / (a + b)) & (a / (a + b) <= high)).mean()
                row = f"Beta({a:g}, {b:g}) | {questions} | {completions} | {held:.3f}"
                print(f"| {row} | {(high - low).mean():.3f} |", flush=True)


def norms(count: int) -> None:
    """Coverage and relative half-width of the noise scale after so many steps of 32 groups of 8,
    from scores and from squared norms of gradients of b groups: of every part of the step beside
    the whole, and of one more gradient a step, of other rollouts.

    Scores are normal in 30 dimensions, rewards linear in them plus noise, the questions' slopes
    normal with variance 1/4 a dimension.
    """
    print(
        "| n_c(8) | steps | from | coverage | median half-width / n_c | upper end |"
        + "\n"
        + "|---" * 6
        + "|"
    )
    rng, dimensions, prompts, size = np.random.default_rng(0), 30, 32, 8
    for grad_sq in (1.6, 0.36):
        length = (dimensions + 1) * (grad_sq + dimensions / 4) + dimensions  # C2, and C3
        truth = (size * dimensions / 4 + length + length / (size - 1)) / grad_sq
        for steps in (10, 40, 160):
            found: dict[str, list] = {}
            for _ in range(count):
                # as many steps again, for gradients of other rollouts
                shape = (2 * steps, prompts, size)
                slope = rng.standard_normal((2 * steps, prompts, 1, dimensions)) / 2
                slope += math.sqrt(grad_sq / dimensions)
                scores = rng.standard_normal((*shape, dimensions))
                rewards = (scores * slope).sum(axis=-1) + rng.standard_normal(shape)
                ghat = np.einsum("spg,spgd->spd", pool_gradient_weights(rewards), scores)
                terms = [
                    group_terms(z, np.square(s).sum(axis=-1), x @ x.T)
                    for z, s, x in zip(rewards[:steps], scores, ghat, strict=False)
                ]
                scale = noise_estimate(terms, size).intervals["noise_scale"]
                found.setdefault("scores", []).append(scale)
                whole = np.square(ghat[:steps].mean(axis=1)).sum(axis=-1)
                for b in (1, 4, 8, 16):
                    means = ghat.reshape(2 * steps, -1, b, dimensions).mean(axis=2)
                    squares = np.square(means).sum(axis=-1)
                    for kind, small in (
                        ("parts", squares[:steps]), ("others", squares[steps:, 0])
                    ):  # fmt: skip
                        scale = noise_scale_from_norms({b: small, prompts: whole}, size)
                        found.setdefault(f"b = {b}, {kind}", []).append(scale["noise_scale"])
            for kind, scales in found.items():
                low, high = np.array(scales)[:, 1:].T
                cells = [((low <= truth) & (truth <= high)).mean()]
                cells += [np.median(high - low) / 2 / truth, np.isfinite(high).mean()]
                row = f"{truth:.0f} | {steps} | {kind}"
                print(f"| {row} | {' | '.join(f'{x:.2f}' for x in cells)} |", flush=True)


class Softmax:
    """Questions with six outcomes and 0/1 rewards, `p = softmax(phi theta)` in 20 directions.

    Args:
        shared: how far the reward depends on the first direction, the same for all questions.
    """

    def __init__(self, shared: float):
        rng = np.random.default_rng(3)
        self.phi_PYD = rng.normal(size=(40, 6, 20))
        noise_PY = rng.normal(size=(40, 6))
        self.rewards_PY = (shared * self.phi_PYD[..., 0] + noise_PY > 0.5).astype(float)

    def policy(self, theta_RD):
        """Chances [R, P, Y], mean features [R, P, D] and C1, C2, C3, ||grad J||^2 [R, 4]."""
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


def windows(count: int) -> None:
    """Bias and coverage of windows of 32 batches of one group of 8, each after an update by the one
    before, against the means over their policies; one group, or one window, left out at a time.
    """
    names, size, batches = (*CONSTANTS_AND_GRADIENT, "n_c(8)"), 8, 32
    columns = ["rate", "windows", "nats", *(f"{x} off" for x in names[:4])]
    print("| " + " | ".join(columns + ["left out", *names]) + " |\n" + "|---" * 13 + "|")
    bed, run_R1 = Softmax(0.8), np.arange(count)[:, None]
    for rate in (0.0, 0.02, 0.05, 0.1, 0.2):
        for number in (1, 4, 8):
            rng, theta, drift = np.random.default_rng(7), np.zeros((count, 20)), 0.0
            values, exact, parts = np.empty((count, 4, number)), [], [[] for _ in range(count)]
            for window in range(number):
                terms = []
                for _ in range(batches):
                    p, mean, constants = bed.policy(theta)
                    exact.append(constants)
                    question_R1 = rng.integers(40, size=(count, 1))
                    ends = p[run_R1, question_R1].cumsum(axis=2)[..., None, :-1]
                    outcome_RG = (rng.random((count, 1, size, 1)) > ends).sum(axis=3)[:, 0]
                    rewards = bed.rewards_PY[question_R1, outcome_RG]
                    scores = bed.phi_PYD[question_R1, outcome_RG] - mean[run_R1, question_R1]
                    ghat = np.einsum("rg,rgd->rd", pool_gradient_weights(rewards), scores)
                    terms.append((rewards, np.square(scores).sum(axis=2), ghat))
                    if len(exact) == 1:
                        asked = run_R1, question_R1, outcome_RG
                        before = np.log(p[asked])
                    if len(exact) == batches:
                        after = np.log(p[asked])
                        drift = policy_drift(before.reshape(-1, 1), after.reshape(-1, 1))
                    theta = theta + rate * ghat
                rewards, norms_sq, ghat = (np.stack(x, axis=1) for x in zip(*terms, strict=True))
                for run in range(count):
                    step = group_terms(rewards[run], norms_sq[run], ghat[run] @ ghat[run].T)
                    parts[run].append(step)
                    alone = noise_estimate([step], size).intervals
                    values[run, :, window] = [alone[x].estimate for x in CONSTANTS_AND_GRADIENT]
            truth = np.mean(exact, axis=0)
            off = (values.mean(axis=2) - truth).mean(axis=0) / truth.mean(axis=0)
            c1, c2, c3, grad_sq = truth.T
            truth = [*truth.T, (size * c1 + c2 + c3 / (size - 1)) / grad_sq]
            row = f"{rate} | {number} | {drift:.3f} | " + " | ".join(f"{x:+.1%}" for x in off)
            for unit in ("group", "window")[: 1 + (number > 1)]:
                ends = []
                for run in range(count):
                    if unit == "group":
                        found = noise_estimate(parts[run], size).intervals
                    else:
                        found = ScalingLaw.of_steps(values[run]).intervals(size)
                    quantities = (*CONSTANTS_AND_GRADIENT, "noise_scale")
                    ends.append([found[x][1:] for x in quantities])
                low, high = np.array(ends).transpose(2, 1, 0)
                held = ((low <= truth) & (truth <= high)).mean(axis=1)
                width = np.median((high - low) / 2 / truth, axis=1)
                cells = [f"{x:.2f} ({y:.2f})" for x, y in zip(held, width, strict=True)]
                print(f"| {row} | {unit} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tails", nargs="+", choices=TAILS, default=["light", "heavy"])
    parser.add_argument("--questions", nargs="+", type=int, default=[12, 25, 60, 120, 250, 500])
    parser.add_argument("--completions", nargs="+", type=int, default=[16])
    parser.add_argument(
        "--intervals", nargs="+", choices=("completions", "questions"), default=["completions"]
    )
    parser.add_argument("--studies", type=int, default=300)
    parser.add_argument("--spread", type=float, default=0.3, help="of log scales of questions")
    parser.add_argument("--assumption2", action="store_true")
    parser.add_argument("--gradient", action="store_true")
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--norms", action="store_true")
    parser.add_argument("--windows", action="store_true")
    options = parser.parse_args()
    if options.norms:
        norms(options.studies)
        return
    if options.windows:
        windows(options.studies)
        return
    if options.accuracy:
        accuracy(options.studies)
        return
    if options.gradient:
        gradient(options.studies)
        return
    if options.assumption2:
        assumption2(options.studies)
        return
    names = [f"mse {name}" for name in BASELINES] + ["c1", "c2", "c3", "gstar"]
    names += ["grad_sq", "n_c(4)", "n_c(G*)", "prompts at 4", "share"]
    columns = ["tails", "interval", "questions x completions", *names]
    columns += ["G* unbounded", "median G* off", "warned"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for interval in options.intervals:
        for tail in options.tails:
            for completions in options.completions:
                for questions in options.questions:
                    law = tail, questions, completions, interval
                    coverage(*law, options.studies, options.spread)


if __name__ == "__main__":
    main()
