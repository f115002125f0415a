"""Verdicts on published claims, as printed by a study.

A claim counts as true or false according to its number over all prompts with 64 completions each.
For two findings about Assumption 2 the number's sign decides. The populations "opposed" and "few
loud" were not used to choose the rules for verdicts. The statement "any" is wrong if any answer of
a study is wrong. Claims about stale rollouts use the same rule for verdicts and are not simulated
here; the kind "stale" tests their intervals.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from counting import Asked, Cell, Kind
from populations import LIGHT, POPULATIONS, UNSEEN

from grpo_ustat.estimators.closed_form import ClosedForm, Request, closed_form
from grpo_ustat.estimators.moments import is_correlated
from grpo_ustat.measurements.base import PoolStudy
from grpo_ustat.measurements.verdicts import FAILS, HOLDS, ClaimVerdict, claim_verdicts
from grpo_ustat.records import ScorePool

ROLLOUTS, SIZE = 64, 8
# Findings that depend on the sign of a number in the study.
SIGNS = {
    "right answers have the longer gradients": "corr",
    "vanilla beats GRPO": "av_minus_a0",
}


def verdicts(pool: ScorePool, draws: int, seed: int) -> tuple[list[ClaimVerdict], ClosedForm]:
    """Return the verdicts of a study with this pool, and its statistics for new questions."""
    request = Request([], {}, {})
    population = closed_form(pool, request)
    study = PoolStudy(
        pool, [SIZE], ROLLOUTS, draws, seed, max_completion_length=1,
        population=population, request=request,
    )  # fmt: skip
    return claim_verdicts(study), population


def truths_of(pool: ScorePool) -> tuple[dict[str, str], dict[str, float]]:
    """Return each claim's true answer and number, computed from a large pool."""
    rows, population = verdicts(pool, 2000, 1)
    answers: dict[str, str] = {}
    numbers: dict[str, float] = {}
    for row in rows:
        if row.number is None or row.least is None or row.most is None:
            continue
        numbers[row.claim] = row.number[0]
        answers[row.claim] = HOLDS if row.least < row.number[0] < row.most else FAILS
    for claim, name in SIGNS.items():
        numbers[claim] = population[name].estimate
        answers[claim] = HOLDS if numbers[claim] > 0 else FAILS
    return answers, numbers


def answers_of(pool: ScorePool, draws: int, seed: int) -> dict[str, str]:
    """Return the answers of a study with this pool, by claim."""
    rows, population = verdicts(pool, draws, seed)
    answers = {row.claim: row.verdict for row in rows if row.verdict in (HOLDS, FAILS)}
    for claim, name in SIGNS.items():
        number = population[name]
        is_decided = is_correlated(number) if name == "corr" else number.low > 0 or number.high < 0
        if is_decided:
            answers[claim] = HOLDS if number.estimate > 0 else FAILS
    return answers


def claims(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge verdicts on published claims, and "any" for a study with any wrong answer."""
    population = POPULATIONS[name]()
    indices = np.arange(len(population.p_PY))
    truth, numbers = truths_of(population.pool(indices, 64, np.random.default_rng(9)))

    def studies(prompts: int, completions: int) -> Iterator[dict[str, bool]]:
        """Yield each study's answers, with True for wrong answers."""
        rng = np.random.default_rng(10)
        for number in range(asked.studies):
            pool = population.pool(rng.choice(indices, prompts), completions, rng)
            answers = answers_of(pool, asked.draws, number)
            wrong = {claim: answers[claim] != truth[claim] for claim in answers if claim in truth}
            yield wrong | {"any": any(wrong.values())}

    for prompts, completions in asked.cells:
        facts = {"prompts": prompts, "completions": completions}
        yield Cell(facts, studies(prompts, completions), numbers, statements=(*truth, "any"))


KINDS = {"claims": Kind(claims, [*LIGHT, *UNSEEN], ((100, 18), (200, 32)), 100)}
