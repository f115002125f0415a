"""Statements of simulated studies with `mse`, with True if they are wrong.

A kind of statements is a function that yields cells of simulated studies. Its docstring says which
statements it judges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
from populations import FITTED, LIGHT, MAX_LENGTH, POPULATIONS, TURNED, UNSEEN, Population

from grpo_ustat.estimators.closed_form import Request, closed_form
from grpo_ustat.estimators.efficiency import RelativeEfficiency
from grpo_ustat.estimators.group_size import PRIORS, USUAL_SIZES, Prior
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.looks import next_count
from grpo_ustat.estimators.losses import LossRow, loss_efficiencies
from grpo_ustat.estimators.row_weights import Loss
from grpo_ustat.estimators.scaling import MIN_GSTAR, ScalingLaw
from grpo_ustat.measurements.base import PoolStudy
from grpo_ustat.measurements.group_size import NEIGHBOUR_OFFSETS
from grpo_ustat.measurements.verdicts import FAILS, HOLDS, ClaimVerdict, claim_verdicts
from grpo_ustat.records import ScorePool

# Number of rollouts per step, and of batches drawn to compute true values.
ROLLOUTS, TRUE_DRAWS = 64, 2000
# Statements of a study by name. The value is True if the statement is wrong, or a number.
Statements = Mapping[str, bool | float]


class Asked(NamedTuple):
    """Options of the command line."""

    # Number of studies per cell.
    studies: int
    # Sizes of a study: prompts and completions per prompt.
    cells: Sequence[tuple[int, int]]
    # Number of batches drawn for a loss that couples groups.
    draws: int = 100


@dataclass(frozen=True)
class Cell:
    """Simulated studies of one size, from one population."""

    # Table columns that identify the cell.
    facts: Mapping[str, Any]
    # The studies, which are simulated while they are counted.
    studies: Iterable[Statements]
    # True values by statement; statements without a true value are missing.
    truth: Mapping[str, float] = field(default_factory=dict)
    # Statements that get a row even if no study prints them.
    statements: Sequence[str] = ()


class Kind(NamedTuple):
    """A kind of statement, and defaults for its simulation."""

    # Function that yields the cells of a population.
    cells_of: Callable[[str, Asked], Iterator[Cell]]
    populations: Sequence[str]
    cells: Sequence[tuple[int, int]]
    studies: int = 300


def covers(interval: Interval, truth: float) -> bool:
    """Return True if the interval contains the true value, up to rounding."""
    return interval.low - 1e-9 <= truth <= interval.high + 1e-9


def pools_of(
    population: Population, prompts: int, completions: int, studies: int
) -> Iterator[ScorePool]:
    """Draw pools of prompts, which are drawn with replacement."""
    rng = np.random.default_rng([10, prompts, completions])
    for _ in range(studies):
        chosen = rng.integers(len(population.p_PY), size=prompts)
        yield population.pool(chosen, completions, rng)


def large_pool(population: Population) -> ScorePool:
    """Draw a pool of all prompts, or of 6000 if there are fewer, with 64 completions each."""
    count = len(population.p_PY)
    chosen = np.resize(np.arange(count), max(count, 6000))
    return population.pool(chosen, 64, np.random.default_rng(9))


def group_size(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge statements about the group size and the noise of a step.

    G                the error of the recommended G exceeds the minimum by more than the tolerance
    G*               the interval misses the true G*
    costs            an interval of the neighbours' extra errors misses the true extra error
    worse            a size of 2, 4 ... 64 is called worse than the recommended size but is not
    at least         G* is below the printed lower bound
    noise            the interval of n_c(8) misses the true value
    noise at least   n_c(8) is below the printed lower bound
    share            the interval of the prompts' share of the noise at G = 8 misses the true share
    """
    population = POPULATIONS[name]()
    law = population.law
    for prompts, completions in asked.cells:
        rng = np.random.default_rng([prompts, completions])
        studies = population.studies(prompts, completions, asked.studies, rng)
        yield Cell(
            {"fitted": name in FITTED, "gstar": round(law.best_size(), 2)}
            | {"prompts": prompts, "completions": completions},
            (dict(judged(law, study)) for study in studies),
            statements=SENTENCES,
        )


SENTENCES = ("G", "G*", "costs", "worse", "at least", "noise", "noise at least", "share")
SIZE = 8
# A lower bound on the noise is printed only if it exceeds this share of a step of 256 rollouts.
MIN_SHARE, STEP = 0.05, 256


def judged(truth: ScalingLaw, study: ScalingLaw) -> Iterator[tuple[str, bool]]:
    """Yield each statement that the study prints, with True if the statement is wrong."""
    size, tolerance = study.decide(USUAL_SIZES)
    if tolerance is not None:
        yield from judged_decision(truth, study)
    elif study.gstar().low > MIN_GSTAR:
        yield "at least", truth.best_size() < study.gstar().low
    extra = {other: study.extra_error(other, size) for other in USUAL_SIZES if other <= 64}
    worse = [other for other, (_, low, _) in extra.items() if low > 0]
    if worse:
        yield "worse", any(truth.n_mse(other) <= truth.n_mse(size) for other in worse)
    scale, true_scale = study.noise_scale(SIZE), truth.noise_scale(SIZE).estimate
    if math.isfinite(scale.high):
        yield "noise", not scale.low <= true_scale <= scale.high
    elif scale.low / (scale.low + STEP) > MIN_SHARE:
        yield "noise at least", true_scale < scale.low
    share = study.prompt_share(SIZE)
    if math.isfinite(share.low):
        yield "share", not share.low <= truth.prompt_share(SIZE).estimate <= share.high


def judged_decision(truth: ScalingLaw, study: ScalingLaw) -> Iterator[tuple[str, bool]]:
    """Yield "G", "G*" and "costs" of a study that decides, with True if the statement is wrong."""
    errors = {size: truth.n_mse(size) for size in USUAL_SIZES}
    size, tolerance = study.decide(USUAL_SIZES)
    assert tolerance is not None
    interval, place = study.gstar(), USUAL_SIZES.index(size)
    yield "G", errors[size] / min(errors.values()) - 1 > tolerance
    yield "G*", not interval.low <= truth.best_size() <= interval.high
    wrong = False
    for step in NEIGHBOUR_OFFSETS:
        if 0 <= place + step < len(USUAL_SIZES) and USUAL_SIZES[place + step] <= 64:
            near = USUAL_SIZES[place + step]
            extra = study.extra_error(near, size)
            wrong |= not extra.low <= errors[near] / errors[size] - 1 <= extra.high
    yield "costs", wrong


def stopping(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge "G", "G*" and "costs" of studies that draw questions until the data decide.

    The first number of a cell is the largest number of questions. A study stops at the first look
    that decides. If none decides, `rollouts` is infinite. The column `fixed` has the smallest
    number of rollouts at which 80 % of studies decide if they look only once.
    """
    population, rng = POPULATIONS[name](), np.random.default_rng([0, 31])
    facts = {"fitted": name in FITTED, "gstar": round(population.law.best_size(), 2)}
    most = max(questions for questions, _ in asked.cells)
    studies = [
        (chosen[first : first + most], outcomes[first : first + most])
        for chosen, outcomes in population.draw_studies(most, MAX_COMPLETIONS, asked.studies, rng)
        for first in range(0, len(chosen), most)
    ]
    for questions, completions in asked.cells:
        counts = looks(questions)
        laws_SL = [
            [population.scored(chosen, outcomes[:, :completions]).law(m) for m in counts]
            for chosen, outcomes in studies
        ]
        for prior in PRIORS.values():
            stops, decided_SL = zip(
                *(stopped(population.law, laws, counts, completions, prior) for laws in laws_SL),
                strict=True,
            )
            shares = zip(counts, np.mean(decided_SL, axis=0), strict=True)
            fixed = next((count for count, share in shares if share >= 0.8), math.inf)
            more = {"prior": prior.name, "completions": completions, "fixed": fixed * completions}
            yield Cell(facts | more, stops, statements=("G", "G*", "costs"))


# Number of simulated completions per question, whatever the cells are.
MAX_COMPLETIONS = 64


def looks(most: int) -> list[int]:
    """Return the numbers of questions at which a study of at most `most` questions looks."""
    counts = [next_count(0, most)]
    while counts[-1] < most:
        counts.append(next_count(counts[-1], most))
    return counts


def stopped(
    truth: ScalingLaw, laws: Sequence[ScalingLaw], counts: list[int], completions: int, prior: Prior
) -> tuple[Statements, list[bool]]:
    """Return a study's statements and rollouts at its first look that decides; and which decide."""
    laws = [replace(law, prior=prior) for law in laws]
    decided = [law.decide(USUAL_SIZES).tolerance is not None for law in laws]
    if not any(decided):
        return {"rollouts": math.inf}, decided
    look = decided.index(True)
    said = dict(judged_decision(truth, laws[look]))
    return {"rollouts": float(counts[look] * completions), **said}, decided


STD = {"epsilon": 1e-4}
LOSSES = [
    Loss("none, sum", "none", {}, "sum", MAX_LENGTH),
    Loss("group_std, sum", "group_std", STD, "sum", MAX_LENGTH),
    Loss("leave_one_out, grpo", "leave_one_out", {}, "grpo", MAX_LENGTH),
    Loss("group_std, grpo", "group_std", STD, "grpo", MAX_LENGTH),
    Loss("group_std, dapo", "group_std", STD, "dapo", MAX_LENGTH),
    Loss("group_std, bnpo", "group_std", STD, "bnpo", MAX_LENGTH, micro_batch_size=8),
    Loss("batch_std, sum", "batch_std", STD, "sum", MAX_LENGTH),
]
BY_TOKENS = [Loss("by tokens", "leave_one_out", {}, "grpo", MAX_LENGTH)]


def losses(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge intervals of losses' relative efficiency.

    The statements are the fields of `RelativeEfficiency` of each loss and G, and "best G": the best
    measured G of the loss is called worse. True values come from a large pool.
    """
    yield from judged_losses(POPULATIONS[name](), asked, LOSSES, (2, 4, 8, 16))


def turned(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge efficiency and direction of a mean over tokens, which turns with the lengths."""
    yield from judged_losses(POPULATIONS[name](), asked, BY_TOKENS, (SIZE,))


def judged_losses(
    population: Population, asked: Asked, judged: list[Loss], sizes: Sequence[int]
) -> Iterator[Cell]:
    """Judge the efficiencies of losses at some group sizes."""
    rows = loss_efficiencies(large_pool(population), judged, sizes, ROLLOUTS, TRUE_DRAWS, seed=1)
    best = {row.loss.name: row.group_size for row in rows if row.best}
    truth = {x: y.estimate for x, y in intervals_of(rows).items() if math.isfinite(y.estimate)}

    def statements(pool: ScorePool, number: int) -> Iterator[tuple[str, bool]]:
        """Yield a study's statements."""
        rows = loss_efficiencies(pool, judged, sizes, ROLLOUTS, asked.draws, seed=number)
        for what, interval in intervals_of(rows).items():
            if what in truth and math.isfinite(interval.estimate):
                yield what, not covers(interval, truth[what])
        for row in rows:
            if decides(row) and row.group_size == best.get(row.loss.name):
                yield f"{place_of(row)}: best G", not row.may_be_best

    for prompts, completions in asked.cells:
        pools = pools_of(population, prompts, completions, asked.studies)
        yield Cell(
            {"prompts": prompts, "completions": completions},
            (dict(statements(pool, number)) for number, pool in enumerate(pools)),
            truth,
            statements=tuple(truth),
        )


def place_of(row: LossRow) -> str:
    """Return a row's loss and G as a name."""
    return f"{row.loss.name}, G = {row.group_size}"


def decides(row: LossRow) -> bool:
    """Return True if the efficiency at the same G has both ends."""
    return row.efficiency is not None and math.isfinite(row.efficiency.efficiency_same_g.high)


def intervals_of(rows: list[LossRow]) -> dict[str, Interval]:
    """Return the decided relative efficiencies, named by loss, G and field."""
    return {
        f"{place_of(row)}: {field.name}": getattr(row.efficiency, field.name)
        for row in rows if row.efficiency is not None
        for field in fields(RelativeEfficiency)
        if decides(row) or "efficiency_same_g" not in field.name
    }  # fmt: skip


def claims(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge verdicts on published claims, and "any" for a study with any wrong verdict.

    A claim counts as true or false according to its number in a large pool. The populations
    "opposed" and "few loud" were not used to choose the rules for verdicts.
    """
    population, truth, numbers = POPULATIONS[name](), {}, {}
    for row in verdicts(large_pool(population), TRUE_DRAWS, 1):
        if row.number is not None and row.least is not None and row.most is not None:
            numbers[row.claim] = row.number[0]
            truth[row.claim] = HOLDS if row.least < row.number[0] < row.most else FAILS

    def statements(pool: ScorePool, number: int) -> dict[str, bool]:
        """Return a study's verdicts on claims whose truth is known, with True if wrong."""
        wrong = {
            row.claim: row.verdict != truth[row.claim]
            for row in verdicts(pool, asked.draws, number)
            if row.verdict in (HOLDS, FAILS) and row.claim in truth
        }
        return wrong | {"any": any(wrong.values())}

    for prompts, completions in asked.cells:
        pools = pools_of(population, prompts, completions, asked.studies)
        yield Cell(
            {"prompts": prompts, "completions": completions},
            (statements(pool, number) for number, pool in enumerate(pools)),
            numbers,
            statements=(*truth, "any"),
        )


def verdicts(pool: ScorePool, draws: int, seed: int) -> list[ClaimVerdict]:
    """Return the verdicts of a study with this pool."""
    request = Request([], {}, {})
    population = closed_form(pool, request)
    return claim_verdicts(PoolStudy(
        pool, [SIZE], ROLLOUTS, draws, seed, max_completion_length=1, population=population,
        request=request,
    ))  # fmt: skip


KINDS = {
    "group_size": Kind(
        group_size, [*FITTED, *UNSEEN],
        ((16, 16), (20, 32), (40, 16), (40, 32), (60, 32), (100, 16), (100, 32), (200, 16)), 1000,
    ),
    "stopping": Kind(stopping, [*FITTED, *UNSEEN], ((400, 16), (400, 32)), 400),
    "losses": Kind(losses, list(LIGHT), ((20, 16), (40, 16), (100, 16), (200, 32))),
    "turned": Kind(turned, list(TURNED), ((20, 16), (40, 16), (100, 16), (200, 32))),
    "claims": Kind(claims, [*LIGHT, *UNSEEN], ((100, 18), (200, 32)), 100),
}  # fmt: skip
