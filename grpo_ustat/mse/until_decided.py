"""Pools that grow, question by question, until the data decide on a group size.

The data are analysed after each batch of questions (a look). Repeated looks do not invalidate the
decision, because its probability is a posterior probability; `scripts/benchmarks` measures how
often studies that stop in this way are wrong. The questions drawn so far must be a random sample of
the study's questions. The study split of every built-in data set is in random order; see
`study_order` for other data sets.
"""

from __future__ import annotations

import math
from pathlib import Path

from grpo_ustat.config.mse import MseConfig
from grpo_ustat.distributed.ranks import is_main, main_only
from grpo_ustat.distributed.workers import WorkCost
from grpo_ustat.estimators.group_size import (
    PRIORS,
    PROBABILITY,
    TOLERANCES,
    WEAK_PRIOR,
    Prior,
)
from grpo_ustat.estimators.looks import (
    FIRST_COMPLETIONS,
    next_count,
    next_look,
    population_law,
)
from grpo_ustat.estimators.scaling import divisible_rollouts, divisors
from grpo_ustat.mse.pool import EqualRewards, counting_stop, fill_pool, read_pool
from grpo_ustat.mse.pool_store import PoolStore, draws_of
from grpo_ustat.mse.sampler import kept_policy
from grpo_ustat.records import Prompt, ScorePool
from grpo_ustat.runs.study_parts import Look
from grpo_ustat.tasks.splits import in_random_order
from grpo_ustat.terminal.console import Console
from grpo_ustat.terminal.streams import percentage, wrapped


def study_order(config: MseConfig, prompts: list[Prompt]) -> list[Prompt]:
    """Return the prompts in the order in which they are drawn.

    A user's own task may list its questions by level or subject, so they are put in a random order
    that depends only on the seed.
    """
    if config.dataset.kind != "own":
        return prompts
    return in_random_order(prompts, f"study/{config.seed}")


def pool_until_decided(
    config: MseConfig, prompts: list[Prompt], folder: Path
) -> tuple[ScorePool, WorkCost, list[Look]]:
    """Draw questions in batches until the data decide or the budget is spent.

    If an interrupted study is continued, it repeats the same looks on the stored completions.

    Args:
        prompts: All questions that may be drawn; the pool consists of the first ones.

    Returns:
        The pool of the questions drawn, its cost, and the looks at it.

    Raises:
        EqualRewards: The whole budget is spent and all rewards are equal.
    """
    store, most = PoolStore(folder, draws_of(config)), config.budget.pool_completions
    console = Console(quiet=not is_main())
    ends, looks = list[int](), list[Look]()
    size = main_only(_first_size, store, prompts, most)
    if size < FIRST_COMPLETIONS:
        text = (
            f"WARNING: with budget.pool_completions={most}, the recommended G is wrong more often; "
            f"use {FIRST_COMPLETIONS} or more"
        )
        console.print(wrapped(text), soft_wrap=True)
    step = next_look(0, size, len(prompts), most)
    with kept_policy():
        while step is not None:
            count, size = step
            ends = sorted({*ends, count})
            step = next_look(count, size, len(prompts), most)
            try:
                pool, cost = _drawn_pool(config, prompts, ends, store, size)
            except EqualRewards:
                if step is None:
                    raise
                console.print(
                    f"{_drawn_text(count, size)} all rewards are equal, so more questions follow."
                )
                continue
            look = main_only(look_at, pool, config.study.rollouts, PRIORS[config.study.prior])
            looks.append(look)
            console.print(wrapped(look_sentence(look)), soft_wrap=True)
            if look.tolerance is not None:
                break
    return pool, cost, looks


def _first_size(store: PoolStore, prompts: list[Prompt], most: int) -> int:
    """Return the number of completions per question of the first look, from 16 to `most`.

    It is 16, doubled until no stored part of the pool has to be split.
    """
    size = FIRST_COMPLETIONS
    while size < most and not store.divides_at(prompts, size):
        size *= 2
    return min(size, most)


def _drawn_pool(
    config: MseConfig, prompts: list[Prompt], ends: list[int], store: PoolStore, size: int
) -> tuple[ScorePool, WorkCost]:
    """Return the pool of all batches, with N = `size`, and its cost.

    Each batch is sampled separately, so that no completion is drawn again when the pool grows.

    Args:
        ends: Number of questions after each batch.
    """
    drawn = prompts[: ends[-1]]
    with counting_stop(store, drawn, size):
        for first, end in zip([0, *ends], ends, strict=False):
            fill_pool(config, prompts[first:end], store, size)
    return read_pool(store, drawn, size, config.weights)


def look_at(pool: ScorePool, rollouts: int, prior: Prior = WEAK_PRIOR) -> Look:
    """Return what the pool says about the best G at `rollouts` rollouts per training step."""
    law, count = population_law(pool, prior), len(pool.rewards_PN)
    best, probability, tolerance, half = None, None, None, math.inf
    if law.has_errors and law.c3 > 0:
        divisible = divisible_rollouts(rollouts)
        best, probability = law.support(divisors(divisible))
        tolerance = law.costs(divisible).tolerance
        if tolerance is None:
            half, _ = law.prompts_to_decide(divisors(divisible))
    return Look(
        questions=count,
        completions=pool.rewards_PN.shape[1],
        group_size=best,
        # Without a prior there is only a confidence set, which gives no probability.
        probability=probability if prior.exponents else None,
        tolerance=tolerance,
        more_questions=_rounded(max(half, next_count(count, 10**9)) - count)
        if math.isfinite(half)
        else None,
    )


def _rounded(count: float) -> int:
    """Round a positive number to two significant digits.

    >>> _rounded(4.8), _rounded(1234.0)
    (5, 1200)
    """
    return round(float(f"{count:.2g}"))


def look_sentence(look: Look) -> str:
    r"""Describe a look in a sentence.

    >>> look = Look(questions=40, completions=32, group_size=8, probability=0.81, tolerance=None,
    ...             more_questions=25)
    >>> print(look_sentence(look).replace(": ", ":\n").replace(". ", ".\n"))
    40 questions with 32 completions each:
    the error at G = 8 is within 5 % of the minimum with probability 0.81.
    About 25 more questions are expected to decide.
    """
    drawn = _drawn_text(look.questions, look.completions)
    if look.group_size is None:
        return f"{drawn} too few rewards differ for a best G."
    within = look.tolerance or TOLERANCES[0]
    size = f"G = {look.group_size}"
    text = f"{drawn} the error at {size} is within {percentage(within)} of the minimum"
    if look.tolerance is not None:
        return f"{text}. This is decided, so the study stops."
    if look.probability is None:
        text = f"{drawn} the data alone do not yet decide the best G"
    else:
        text += f" with probability {look.probability:.2f}"
        if look.probability >= PROBABILITY:
            text += ", but these are too few questions for a decision"
    if look.more_questions is None:
        return f"{text}. The number of questions needed is not known yet."
    return f"{text}. About {look.more_questions} more questions are expected to decide."


def _drawn_text(questions: int, completions: int) -> str:
    """Describe the rollouts drawn so far.

    >>> _drawn_text(40, 32)
    '40 questions with 32 completions each:'
    """
    return f"{questions} questions with {completions} completions each:"
