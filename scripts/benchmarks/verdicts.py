"""How often a verdict on a published claim is wrong, given that it is said, by simulation.

Populations are those of populations.py, with the lengths of worth.py. The truth of a claim is where
its number lies that all prompts with 64 completions each give. "opposed" and "few loud" served no
choice. Of every study, m prompts with
N completions each:

    truth    the number
    said     share of the studies in which a verdict is said
    wrong    of these, those in which it is not the truth's, with its 95 % interval (Clopper &
             Pearson 1934)
    any      share of all studies in which any verdict is wrong

Claims on stale rollouts are judged by the same rule; worth.py --lag has their intervals.

    python scripts/benchmarks/verdicts.py --studies 100
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import replace

import numpy as np
from populations import LIGHT, UNSEEN, clopper_pearson
from worth import ROLLOUTS, cell, lengths_of, study

from grpo_ustat.estimators.moments import centred
from grpo_ustat.mse.closed_form import Request, closed_form
from grpo_ustat.mse.verdicts import claim_verdicts
from grpo_ustat.records import ScorePool
from grpo_ustat.runs.study_parts import FAILS, HOLDS, ClaimVerdict

POPULATIONS = {**LIGHT, **UNSEEN}
CELLS = ((100, 18), (200, 32))
SIZE = 8


def whole_sketches(pool: ScorePool) -> ScorePool:
    """The pool with the sums that closed forms read."""
    return replace(
        pool,
        centred_sums_PR=np.einsum("pn,pnd->pd", centred(pool.rewards_PN), pool.features_PNR),
    )


def verdicts(pool: ScorePool, draws: int, seed: int) -> list[ClaimVerdict]:
    """What a study of this pool says."""
    pool = whole_sketches(pool)
    request = Request([], {}, len(pool.rewards_PN), True, {})
    population = closed_form(pool, request, "questions")
    return claim_verdicts(pool, population, [SIZE], ROLLOUTS, draws, seed)


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
        population = POPULATIONS[name]()
        prompts_in_all = len(population.p_PY)
        lengths_PY = lengths_of(population)
        large = study(
            population, lengths_PY, np.arange(prompts_in_all), 64, np.random.default_rng(9)
        )
        truth = {row.claim: row for row in verdicts(large, 2000, 1)}
        for prompts, completions in asked.cells:
            rng, said = np.random.default_rng(10), defaultdict(list)
            wrong_studies = 0
            for number in range(asked.studies):
                chosen = rng.integers(prompts_in_all, size=prompts)
                pool = study(population, lengths_PY, chosen, completions, rng)
                wrong = False
                for row in verdicts(pool, asked.draws, number):
                    if row.verdict not in (HOLDS, FAILS) or row.claim not in truth:
                        continue
                    known = truth[row.claim]
                    assert (
                        known.number is not None
                        and known.least is not None
                        and known.most is not None
                    )
                    inside = known.least < known.number[0] < known.most
                    said[row.claim].append(inside != (row.verdict == HOLDS))
                    wrong |= said[row.claim][-1]
                wrong_studies += wrong
            for claim, known in truth.items():
                value = f"{known.number[0]:.3g}" if known.number is not None else "-"
                shares = said[claim]
                text = "      -"
                if shares:
                    low, high = clopper_pearson(sum(shares), len(shares))
                    text = f"{np.mean(shares):7.3f} [{low:.3f}, {high:.3f}]"
                print(f"{name:12}{f'{prompts} x {completions}':>10}  {claim:58}{value:>8}"
                      f"{len(shares) / asked.studies:7.2f}{text}", flush=True)  # fmt: skip
            print(f"{name:12}{f'{prompts} x {completions}':>10}  any: "
                  f"{wrong_studies / asked.studies:.3f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
