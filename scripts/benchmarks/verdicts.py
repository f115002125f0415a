"""How often a verdict on a published claim is wrong, given that it is said, by simulation.

Populations are those of populations.py, with the lengths of worth.py. The truth of a claim is where
its number lies that all prompts with 64 completions each give; of two findings on Assumption 2 it
is the sign. "opposed" and "few loud" served no choice. Of every study, m prompts with N completions
each:

    truth    the number
    said     share of the studies in which a verdict is said
    wrong    of these, those in which it is not the truth's, with its 95 % interval (Clopper &
             Pearson 1934)
    any      share of all studies in which any answer is wrong

Claims on stale rollouts are judged by the same rule; worth.py --lag has their intervals.

    python scripts/benchmarks/verdicts.py --studies 100
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from populations import LIGHT, UNSEEN, clopper_pearson
from worth import ROLLOUTS, cell, lengths_of, study

from grpo_ustat.estimators.closed_form import ClosedForm, Request, closed_form
from grpo_ustat.estimators.moments import centred, is_correlated
from grpo_ustat.measurements.base import PoolStudy
from grpo_ustat.measurements.verdicts import FAILS, HOLDS, ClaimVerdict, claim_verdicts
from grpo_ustat.records import ScorePool

POPULATIONS = {**LIGHT, **UNSEEN}
CELLS = ((100, 18), (200, 32))
SIZE = 8
# Findings of a study that say the sign of a number.
SIGNS = {
    "right answers have the longer gradients": "corr",
    "vanilla beats GRPO": "av_minus_a0",
}


def whole_sketches(pool: ScorePool) -> ScorePool:
    """The pool with the sums that closed forms read."""
    return replace(
        pool,
        centred_sums_PR=np.einsum("pn,pnd->pd", centred(pool.rewards_PN), pool.features_PNR),
    )


def verdicts(pool: ScorePool, draws: int, seed: int) -> tuple[list[ClaimVerdict], ClosedForm]:
    """What a study of this pool says, and its statistics for new questions."""
    pool = whole_sketches(pool)
    request = Request([], {}, len(pool.rewards_PN), True, {})
    population = closed_form(pool, request, "questions")
    asked = PoolStudy(
        pool, [SIZE], ROLLOUTS, draws, seed, losses=[], max_completion_length=1, reward_names=[],
        asked=frozenset(), at_hand=population, population=population, request=request,
    )  # fmt: skip
    return claim_verdicts(asked), population


def truths_of(pool: ScorePool) -> tuple[dict[str, str], dict[str, float]]:
    """The true answer to every claim, and its number, by a large pool."""
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


def said_of(pool: ScorePool, draws: int, seed: int) -> dict[str, str]:
    """The answers that a study of this pool gives, by claim."""
    rows, population = verdicts(pool, draws, seed)
    answers = {row.claim: row.verdict for row in rows if row.verdict in (HOLDS, FAILS)}
    for claim, name in SIGNS.items():
        number = population[name]
        is_said = is_correlated(number) if name == "corr" else number.low > 0 or number.high < 0
        if is_said:
            answers[claim] = HOLDS if number.estimate > 0 else FAILS
    return answers


def rows_of(
    name: str, cells: Sequence[tuple[int, int]], studies: int, draws: int
) -> Iterator[dict[str, Any]]:
    """How often each claim is answered and wrongly, a row for each of a cell, "any" the last."""
    population = POPULATIONS[name]()
    lengths_PY = lengths_of(population)
    every = np.arange(len(population.p_PY))
    truth, numbers = truths_of(study(population, lengths_PY, every, 64, np.random.default_rng(9)))
    for prompts, completions in cells:
        rng = np.random.default_rng(10)
        wrong: dict[str, list[bool]] = {claim: [] for claim in [*truth, "any"]}
        for number in range(studies):
            pool = study(population, lengths_PY, rng.choice(every, prompts), completions, rng)
            said = said_of(pool, draws, number)
            of_study = {claim: said[claim] != truth[claim] for claim in said if claim in truth}
            for claim, is_wrong in of_study.items():
                wrong[claim].append(is_wrong)
            wrong["any"].append(any(of_study.values()))
        for claim, found in wrong.items():
            yield {
                "population": name, "cell": f"{prompts} x {completions}", "claim": claim,
                "truth": numbers.get(claim), "said": len(found), "wrong": sum(found),
            }  # fmt: skip


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=100, help="of each cell")
    parser.add_argument("--draws", type=int, default=100, help="of batches, of coupled losses")
    parser.add_argument("--populations", nargs="+", default=list(POPULATIONS))
    parser.add_argument("--cells", nargs="+", type=cell, default=CELLS, help="such as 64x18")
    asked = parser.parse_args()
    print(f"n = {ROLLOUTS}, G = {SIZE}, {asked.studies} studies a cell")
    for name in asked.populations:
        for row in rows_of(name, asked.cells, asked.studies, asked.draws):
            value = "-" if row["truth"] is None else f"{row['truth']:.3g}"
            text = "      -"
            if row["said"]:
                low, high = clopper_pearson(row["wrong"], row["said"])
                text = f"{row['wrong'] / row['said']:7.3f} [{low:.3f}, {high:.3f}]"
            print(f"{name:15}{row['cell']:>9}  {row['claim']:58}{value:>9}"
                  f"{row['said'] / asked.studies:7.2f}{text}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
