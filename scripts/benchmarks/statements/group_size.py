"""Statements about the group size and the noise of a step.

The list shows for each statement under which condition it counts as wrong:

G                the error of the recommended G exceeds the minimum by more than the tolerance
G*               the interval misses the true G*
costs            an interval of the neighbours' extra errors misses the true extra error
worse            a size of 2, 4 ... 64 is called worse than the recommended size but is not worse
at least         G* is below the printed lower bound
noise            the interval of n_c(8) misses the true value
noise at least   n_c(8) is below the printed lower bound
share            the interval of the prompts' share of the noise at G = 8 misses the true share
change           `advise` says raise or lower, from any of 4 to 64, to a size that is not better
keep             `advise` keeps a size whose error exceeds the minimum by 30 % or more

The first three are also judged in studies that draw questions until the data decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from counting import Asked, Cell, Kind
from populations import FITTED, POPULATIONS, UNSEEN, Population

from grpo_ustat.advise.runs import MIN_STEPS
from grpo_ustat.estimators.group_size import PRIORS, USUAL_SIZES, Estimates, Prior
from grpo_ustat.estimators.looks import next_count
from grpo_ustat.estimators.scaling import MIN_GSTAR, ScalingLaw
from grpo_ustat.measurements.group_size import NEIGHBOUR_OFFSETS
from grpo_ustat.pages.advice import (
    KEEP,
    LOWER,
    RAISE,
    TOLERABLE_EXTRA_ERROR,
    group_size_advice,
)
from grpo_ustat.records import Array, Integers

CELLS = ((16, 16), (20, 32), (40, 16), (40, 32), (60, 32), (100, 16), (100, 32), (200, 16))
# Largest number of questions, and completions per question.
STOPPING_CELLS = ((400, 16), (400, 32))
# Number of simulated completions per question, whatever the cells are.
MAX_COMPLETIONS = 64
SENTENCES = (
    "G", "G*", "costs", "worse", "at least", "noise", "noise at least", "share",
    "change", "keep",
)  # fmt: skip
SIZE = 8
# A lower bound on the noise is printed only if it exceeds this share of a step of 256 rollouts.
MIN_SHARE, STEP = 0.05, 256
IN_USE = (4, 8, 16, 32, 64)
# Monitored runs: numbers of steps, and cells of rollouts per step x group size.
STEPS = (4, 8, 20)
STEP_CELLS = ((64, 4), (64, 8), (64, 16), *((256, size) for size in IN_USE))
MONITORED = (
    "opposed", "few loud", "light, G* 3.1", "light, G* 8.8", "Pareto, high", "sparse, high",
)  # fmt: skip


def judged(truth: ScalingLaw, study: ScalingLaw) -> Iterator[tuple[str, bool]]:
    """Yield each statement that the study prints, with True if the statement is wrong."""
    size, tolerance = study.decide(USUAL_SIZES)
    interval = study.gstar()
    extra = {other: study.extra_error(other, size) for other in USUAL_SIZES if other <= 64}
    true = {other: truth.n_mse(other) / truth.n_mse(size) - 1 for other in USUAL_SIZES}
    if tolerance is not None:
        yield from judged_decision(truth, study)
    elif interval.low > MIN_GSTAR:
        yield "at least", truth.best_size() < interval.low
    worse = [other for other, (_, low, _) in extra.items() if low > 0]
    if worse:
        yield "worse", any(true[other] <= 0 for other in worse)
    scale, true_scale = study.noise_scale(SIZE), truth.noise_scale(SIZE).estimate
    if math.isfinite(scale.high):
        yield "noise", not scale.low <= true_scale <= scale.high
    elif scale.low / (scale.low + STEP) > MIN_SHARE:
        yield "noise at least", true_scale < scale.low
    share = study.prompt_share(SIZE)
    if math.isfinite(share.low):
        yield "share", not share.low <= truth.prompt_share(SIZE).estimate <= share.high
    yield from advised(truth, study)


def judged_decision(truth: ScalingLaw, study: ScalingLaw) -> Iterator[tuple[str, bool]]:
    """Yield "G", "G*" and "costs" of a study that decides, with True if the statement is wrong."""
    errors = {size: truth.n_mse(size) for size in USUAL_SIZES}
    size, tolerance = study.decide(USUAL_SIZES)
    assert tolerance is not None
    interval = study.gstar()
    yield "G", errors[size] / min(errors.values()) - 1 > tolerance
    yield "G*", not interval.low <= truth.best_size() <= interval.high
    place = USUAL_SIZES.index(size)
    wrong = False
    for step in NEIGHBOUR_OFFSETS:
        if 0 <= place + step < len(USUAL_SIZES) and USUAL_SIZES[place + step] <= 64:
            near = USUAL_SIZES[place + step]
            extra = study.extra_error(near, size)
            wrong |= not extra.low <= errors[near] / errors[size] - 1 <= extra.high
    yield "costs", wrong


def advised(truth: ScalingLaw, study: ScalingLaw) -> Iterator[tuple[str, bool]]:
    """Yield "change" and "keep" if printed, with True if any such advice is wrong; n is 256."""
    verdicts = [judged_advice(truth, study, size, STEP) for size in IN_USE]
    for sentence, words in (("change", (RAISE, LOWER)), ("keep", (KEEP,))):
        wrong = [is_wrong for verdict, is_wrong in verdicts if verdict in words]
        if wrong:
            yield sentence, any(wrong)


def judged_advice(
    truth: ScalingLaw, measured: ScalingLaw, size: int, rollouts: int
) -> tuple[str, bool]:
    """Return the verdict of `advise` on a size in use, and True if the verdict is wrong.

    "Raise" and "lower" are wrong if the advised size is not better. "Keep" is wrong if the error of
    the size in use exceeds the minimum by more than 30 %.
    """
    verdict, _, numbers = group_size_advice(measured, measured.gstar(), size, rollouts)
    error = truth.n_mse(size)
    if verdict in (RAISE, LOWER):
        return verdict, truth.n_mse(numbers["best_num_generations"]) >= error
    return verdict, verdict == KEEP and extra_error(truth, size, rollouts) > TOLERABLE_EXTRA_ERROR


def extra_error(truth: ScalingLaw, size: int, rollouts: int) -> float:
    """Return a size's relative extra error over the best size that divides the rollouts."""
    sizes = (other for other in range(2, rollouts + 1) if rollouts % other == 0)
    return truth.n_mse(size) / min(map(truth.n_mse, sizes)) - 1


def sentences(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge the statements of `mse` about the group size and about a step's noise."""
    population = POPULATIONS[name]()
    gstar = round(population.law.best_size(), 2)
    for prompts, completions in asked.cells:
        rng = np.random.default_rng([prompts, completions])
        studies = population.studies(prompts, completions, asked.studies, rng)
        facts = {"fitted": name in FITTED, "gstar": gstar}
        yield Cell(
            facts | {"prompts": prompts, "completions": completions},
            (dict(judged(population.law, study)) for study in studies),
            statements=SENTENCES,
        )


def stopping(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge studies that draw questions until the data decide; cells are questions x completions.

    The first number is the largest number of questions. A study stops at the first look that
    decides. If none decides, `rollouts` is infinite. The column `fixed` has the smallest number of
    rollouts at which 80 % of studies decide if they look only once.
    """
    population, rng = POPULATIONS[name](), np.random.default_rng([asked.seed, 31])
    most = max(questions for questions, _ in asked.cells)
    sizes = sorted({size for _, size in asked.cells})
    counts = looks(most)
    studies: list[GrowingStudy] = []
    for chosen, outcomes in population.draw_studies(most, MAX_COMPLETIONS, asked.studies, rng):
        for first in range(0, len(chosen), most):
            of_study = slice(first, first + most)
            studies.append(grown(population, chosen[of_study], outcomes[of_study], counts, sizes))
    facts = {"fitted": name in FITTED, "gstar": round(population.law.best_size(), 2)}
    for prior in PRIORS.values():
        decided = {size: decisions(studies, size, prior) for size in sizes}
        for questions, completions in asked.cells:
            within = [count for count in counts if count <= questions]
            decided_LS = decided[completions][: len(within)]
            shares = zip(within, decided_LS.mean(axis=1), strict=True)
            enough = (count for count, share in shares if share >= 0.8)
            more = {
                "prior": prior.name,
                "completions": completions,
                "fixed": next(enough, math.inf) * completions,
            }
            stops = [
                stopped(population.law, study[completions], decided_L, within, completions, prior)
                for study, decided_L in zip(studies, decided_LS.T, strict=True)
            ]
            yield Cell(facts | more, stops, statements=("G", "G*", "costs"))


def looks(most: int) -> list[int]:
    """Return the numbers of questions at which a study of at most `most` questions looks."""
    counts = [next_count(0, most)]
    while counts[-1] < most:
        counts.append(next_count(counts[-1], most))
    return counts


# Scaling laws of a simulated study at its looks, by the number of completions per question.
GrowingStudy = Mapping[int, Sequence[ScalingLaw]]


def grown(
    population: Population,
    chosen: Integers,
    outcomes: Integers,
    counts: Sequence[int],
    sizes: Sequence[int],
) -> GrowingStudy:
    """Estimate the scaling law at each look, with each number of completions."""
    scored = {size: population.scored(chosen, outcomes[:, :size]) for size in sizes}
    return {size: [prompts.law(m) for m in counts] for size, prompts in scored.items()}


def decisions(studies: Sequence[GrowingStudy], completions: int, prior: Prior) -> Array:
    """Return True where a look of a study decides, [L, S]."""
    looks_LS = zip(*(study[completions] for study in studies), strict=True)
    rows: list[Array] = []
    for laws in looks_LS:
        estimates = Estimates(
            np.array([law.constants_4[:3] for law in laws]),
            np.array([law.covariance_33 for law in laws]),
            laws[0].dof,
            laws[0].prompts,
            prior,
        )
        rows.append(np.isfinite(estimates.decide(USUAL_SIZES)[1]))
    return np.array(rows)


def stopped(
    truth: ScalingLaw,
    laws: Sequence[ScalingLaw],
    decided_L: Array,
    counts: Sequence[int],
    completions: int,
    prior: Prior,
) -> dict[str, bool | float]:
    """Return the statements of a study at the first look that decides, and its rollouts.

    Args:
        laws: Scaling law at each look.
        decided_L: True where a look decides.
        counts: Numbers of questions at the looks.
        completions: Number of completions per question.
    """
    for law, decided, count in zip(laws, decided_L, counts, strict=False):
        if decided:
            judged_look = judged_decision(truth, replace(law, prior=prior))
            return {"rollouts": float(count * completions), **dict(judged_look)}
    return {"rollouts": math.inf}


def needs(name: str, asked: Asked) -> Iterator[Cell]:
    """Compare the numbers of prompts that undecided studies print with the true numbers.

    The true numbers are those at which half, and nine in ten, of new studies with 16 completions
    per prompt decide.
    """
    population = POPULATIONS[name]()
    rng = np.random.default_rng(7)
    counts = np.unique(np.geomspace(12, 2000, 22).round()).astype(int)
    shares: list[float] = []
    for count in counts:
        fresh = population.studies(int(count), 16, 100, rng)
        shares.append(float(np.mean([s.decide(USUAL_SIZES).tolerance is not None for s in fresh])))
        if shares[-1] > 0.97:
            break
    rising = np.maximum.accumulate(shares)
    half, most = (float(np.interp(share, rising, counts[: len(rising)])) for share in (0.5, 0.9))
    for prompts, completions in asked.cells:
        pilots = population.studies(prompts, completions, asked.studies, rng)
        yield Cell(
            {"prompts": prompts, "completions": completions},
            map(prompts_to_decide, pilots),
            {"half decide": half, "nine in ten decide": most},
        )


def prompts_to_decide(study: ScalingLaw) -> dict[str, float]:
    """Return the numbers of prompts that an undecided study prints; empty if the study decides."""
    if study.decide(USUAL_SIZES).tolerance is not None:
        return {}
    half, most = study.prompts_to_decide(USUAL_SIZES)
    return {"half decide": float(half), "nine in ten decide": float(most)}


def monitored_runs(
    population: Population, prompts: int, size: int, steps: int, runs: int, rng: np.random.Generator
) -> Iterator[Array]:
    """Yield C1, C2, C3, ||grad J||^2 at a run's steps, [4, S]; NaN if no group has variance."""
    laws = population.studies(prompts, size, runs * steps, rng)
    while values := [law.constants_4 for law in islice(laws, steps)]:
        values_4S = np.array(values).T
        yield np.where(values_4S[2] == 0, np.nan, values_4S)


def advice(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge `advise` on training runs with 4, 8 or 20 monitored steps; cells are n x G.

    For each step, C1, C2 and C3 are estimated as by `monitor.gradient_mse_every`. The steps are
    averaged as in `advise`.
    """
    population = POPULATIONS[name]()
    for rollouts, size in asked.cells:
        rng = np.random.default_rng([asked.seed, rollouts, size])
        prompts = rollouts // size
        runs = list(monitored_runs(population, prompts, size, max(STEPS), asked.studies, rng))
        for steps in STEPS:
            facts = {"gstar": population.law.best_size(), "rollouts": rollouts, "size": size}
            facts |= {"extra": extra_error(population.law, size, rollouts), "steps": steps}
            measured = [run_4S[:, :steps] for run_4S in runs]
            yield Cell(
                facts,
                [verdict_of(population.law, run_4S, size, rollouts) for run_4S in measured],
                statements=(RAISE, LOWER, KEEP),
            )


def verdict_of(truth: ScalingLaw, run_4S: Array, size: int, rollouts: int) -> dict[str, bool]:
    """Return the verdict on a run, with True if it is wrong; empty if there are too few steps."""
    measured_4S = run_4S[:, np.isfinite(run_4S[0])]
    if measured_4S.shape[1] < MIN_STEPS:
        return {}
    law = ScalingLaw.of_steps(measured_4S, rollouts // size)
    verdict, is_wrong = judged_advice(truth, law, size, rollouts)
    return {verdict: is_wrong} if verdict in (RAISE, LOWER, KEEP) else {}


KINDS = {
    "group_size": Kind(sentences, [*FITTED, *UNSEEN], CELLS, 1000),
    "stopping": Kind(stopping, [*FITTED, *UNSEEN], STOPPING_CELLS, 400),
    "needs": Kind(needs, [*FITTED, *UNSEEN], ((16, 16), (40, 16)), 40),
    "advice": Kind(advice, MONITORED, STEP_CELLS, 300),
}
