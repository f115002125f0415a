"""Bias and efficiency of plans, computed from a scored pool without running the model.

Every plan is compared with `leave_one_out` at its best fixed G. There are two comparisons: with the
same number of generated rollouts, and with the same number of rollouts that are used for training.
An update of n rollouts consists of `n / E[rollouts of a prompt]` prompts. A trainer that averages
over all rollouts of a batch divides by their actual number. Here the divisor is the mean number,
which changes results only by O(1 / prompts).

The price and the prior of a valued plan are fitted to one half of the prompts, and the plan is
measured on the other half. Then the halves change places, so that every prompt is measured once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_ustat.draws import generator
from grpo_ustat.estimators.efficiency import (
    LossError,
    at_best_size,
    direction,
    loss_error,
    mean_over_prompts,
    product_of_means,
    ratio,
    update_moments,
)
from grpo_ustat.estimators.group_terms import GroupTerms, LevelSums, linear_terms
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.losses import UNBIASED
from grpo_ustat.estimators.moments import pool_gradient_weights
from grpo_ustat.estimators.plan_terms import (
    ALL_ORDERS,
    Paths,
    PlanTerms,
    TooManyPaths,
    Weights,
    constant_weight,
    distinct_weights,
    drawn_plan_terms,
    estimates_of,
    paths_of,
    plan_terms,
    prompt_weight,
    weights_of,
)
from grpo_ustat.estimators.plans import (
    PLANS,
    Plan,
    Setting,
    all_of,
    fitted_prior,
    mixed_only,
    price_of,
)
from grpo_ustat.records import MIN_QUESTIONS, Array, Integers, Mask, ScorePool

# Mean numbers of completions per prompt at which plans are compared.
MEAN_SIZES = (4, 8, 16)
# A plan may draw at most this many times the mean number of completions for one prompt.
MOST_TIMES_MEAN = 4
# If a plan has too many paths to list, DRAWN_ORDERS random orders of the pool are used, in BLOCKS
# blocks, whose spread gives the Monte Carlo error.
DRAWN_ORDERS, BLOCKS = 128, 8
# Success rates p for which a table shows the weight kappa(p) of a prompt. The weights are divided
# by the weight at p = 1/2, whose index is MIDDLE.
RATES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
MIDDLE = RATES.index(0.5)


@dataclass(frozen=True)
class PlanRow:
    """Bias and efficiency of one plan, with one estimate, at one size."""

    plan: Plan
    # Name of the estimate; see `plan_terms.ESTIMATES`.
    estimate: str
    # Options of the plan: the size, and the largest number of completions of a prompt.
    setting: Setting
    # Reason why the plan was not measured; the fields below then have their defaults.
    reason: str | None = None
    # Mean number of completions per prompt of an update: generated, and used for training.
    generated: Interval | None = None
    trained: Interval | None = None
    # True if the expected update is a multiple of the gradient for every policy.
    unbiased: bool = False
    # cos^2 of the angle between the expected update and the gradient.
    direction: Interval | None = None
    # Share of the expected squared norm of an update of n generated rollouts that is noise.
    noise: Interval | None = None
    # Efficiency relative to `leave_one_out` with the same number of generated rollouts.
    at_generated: Interval | None = None
    # Efficiency relative to `leave_one_out` with the same number of rollouts for training.
    at_trained: Interval | None = None
    # Weights of prompts with the success rates `RATES`, divided by the weight at success rate 1/2;
    # None if rewards are not 0 or 1.
    weights: list[float] | None = None
    # Standard error of `at_generated` due to the choice of random orders of the pool; None if the
    # result is exact over all orders.
    monte_carlo_error: float | None = None


@dataclass(frozen=True)
class _Judged:
    """Result of measuring a plan with one estimate, before it is compared with `leave_one_out`."""

    # Terms of all prompts.
    whole: PlanTerms
    # Factor kappa if the expected update is kappa times the gradient for every policy; else None.
    scale: float | None = None
    # See `PlanRow.weights`.
    weights: list[float] | None = None
    # Terms from blocks of random orders of the pool; empty if the result is exact over all orders.
    blocks: Sequence[PlanTerms] = ()


def plan_efficiencies(
    pool: ScorePool,
    plans: Sequence[str],
    sizes: Sequence[int],
    group_sizes: Sequence[int],
    rollouts: int,
    seed: int,
) -> list[PlanRow]:
    """Measure every plan with every estimate at every size; intervals apply to new questions.

    Args:
        pool: N scored completions for each question. With fewer than 8 questions, no plan is
            measured, and each row gives the reason.
        plans: keys of `PLANS`, or names of plans of installed packages.
        sizes: values of `Setting.size`.
        group_sizes: group sizes of `leave_one_out` among which the best is selected.
        rollouts: number of rollouts per update, n.
        seed: seed of the random orders of the pool.
    """
    questions, completions = pool.rewards_PN.shape
    unbiased_sizes = [size for size in group_sizes if 2 <= size <= completions]
    sums = LevelSums(pool, np.ones(pool.rewards_PN.shape))
    gradient_PR = np.einsum(
        "pn,pnr->pr", pool_gradient_weights(pool.rewards_PN), pool.features_PNR, optimize=True
    )
    signal_D = product_of_means(gradient_PR, gradient_PR, pool.metrics)

    def error(terms: GroupTerms, used_P: Array, scale: float | None) -> LossError:
        """Return the error of an update of n rollouts, if a prompt uses `used_P` of them."""
        used_D = mean_over_prompts(used_P, pool.metrics)
        kept_D = 1.0 if terms.kept_P is None else mean_over_prompts(terms.kept_P, pool.metrics)
        of_update = update_moments(
            terms, gradient_PR, rollouts * kept_D / used_D, scale, pool.metrics
        )
        return loss_error(of_update, signal_D, pool.metrics)

    unbiased: dict[int, Array] = {}
    if questions >= 2 * MIN_QUESTIONS:
        for group_size in unbiased_sizes:
            terms = linear_terms(pool, UNBIASED, group_size)
            used_P = np.full(questions, float(group_size))
            unbiased[group_size] = error(terms, used_P, 1.0).error_D
    rows: list[PlanRow] = []
    for size in sizes:
        judged: list[tuple[Plan, str, Setting, _Judged]] = []
        for each in map(PLANS.__getitem__, plans):
            setting = Setting(size, most=MOST_TIMES_MEAN * size)
            if reason := refusal(pool, each, setting, unbiased_sizes):
                rows.append(PlanRow(each, "", setting, reason))
                continue
            most = completions - each.has_history * setting.history
            setting = replace(setting, most=min(setting.most, most))
            of_plan = _judge(pool, sums, each, setting, seed)
            judged += [(each, estimate, setting, x) for estimate, x in of_plan.items()]
        for each, estimate, setting, of_estimate in judged:
            whole, metrics = of_estimate.whole, pool.metrics
            generated = error(whole.terms, whole.generated_P, of_estimate.scale)
            trained = error(whole.terms, whole.trained_P, of_estimate.scale)
            blocks = [
                at_best_size(
                    error(x.terms, x.generated_P, of_estimate.scale), unbiased, metrics
                ).estimate
                for x in of_estimate.blocks
            ]
            noise = ratio(generated.energy_D - generated.mean_sq_D, generated.energy_D, metrics)
            rows.append(
                PlanRow(
                    each,
                    estimate,
                    setting,
                    generated=_per_prompt(whole.generated_P, whole.terms.kept_P, metrics),
                    trained=_per_prompt(whole.trained_P, whole.terms.kept_P, metrics),
                    unbiased=of_estimate.scale is not None,
                    direction=direction(generated, metrics),
                    noise=Interval(*(min(x, 1.0) for x in noise)),
                    at_generated=at_best_size(generated, unbiased, metrics),
                    at_trained=at_best_size(trained, unbiased, metrics),
                    weights=of_estimate.weights,
                    monte_carlo_error=_standard_error(blocks),
                )
            )
    return rows


def _standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of a mean; None if there are no values or one is unknown."""
    if not (values and np.isfinite(values).all()):
        return None
    return float(np.std(values, ddof=1) / len(values) ** 0.5)


def _per_prompt(number_P: Array, kept_P: Array | None, metrics: int) -> Interval:
    """Return the mean number of completions per prompt of an update, with its interval.

    Completions of replaced prompts count, because they were generated, but the prompts do not.
    """
    kept_P = np.ones_like(number_P) if kept_P is None else kept_P
    return ratio(mean_over_prompts(number_P, metrics), mean_over_prompts(kept_P, metrics), metrics)


def refusal(
    pool: ScorePool, plan: Plan, setting: Setting, unbiased_sizes: Sequence[int]
) -> str | None:
    """Return the reason why a plan cannot be measured on a pool; None if it can be."""
    questions, completions = pool.rewards_PN.shape
    if questions < 2 * MIN_QUESTIONS:
        return (
            f"{questions} questions are too few, because plans are fitted to half of them: use "
            f"at least study.questions={2 * MIN_QUESTIONS}"
        )
    if not unbiased_sizes:
        return f"no group size fits the pool's {completions} completions per question"
    needed = plan.has_history * setting.history + 2 * setting.size
    if completions < needed:
        return (
            f"a mean of {setting.size} completions per prompt needs {needed} stored completions "
            f"per question, but the pool has {completions}: use budget.pool_completions={needed}"
        )
    return None


def _judge(
    pool: ScorePool, sums: LevelSums, plan: Plan, setting: Setting, seed: int
) -> dict[str, _Judged]:
    """Measure a plan with every distinct estimate, by name of the estimate.

    The prices and priors for one half of the prompts are fitted to the other half.
    """
    half_P = np.arange(len(pool.rewards_PN)) // pool.metrics % 2
    settings = [fitted_setting(pool, plan, setting, half_P != judged, seed) for judged in (0, 1)]
    levels = [float(level) for level in sums.level_L]
    try:
        paths_2 = [paths_of(plan, each, levels) for each in settings]
    except TooManyPaths:
        return _judge_orders(pool, plan, [settings[h] for h in half_P], seed)
    judged: dict[str, _Judged] = {}
    # The weights of two estimates can be equal (up to a factor) with the price of one half, but not
    # with the price of the other half. An estimate that differs in either half is kept.
    names = [name for paths in paths_2 for name in distinct_weights(paths)]
    for name in dict.fromkeys(names):
        weights_2 = [weights_of(paths, name) for paths in paths_2]
        pairs = list(zip(paths_2, weights_2, strict=True))
        first, second = (plan_terms(sums, *pair) for pair in pairs)
        judged[name] = _Judged(
            _by_half(half_P, first, second),
            _common([constant_weight(*pair) for pair in pairs]),
            _rate_weights(pairs) if levels == [0.0, 1.0] else None,
        )
    return judged


def _by_half(half_P: Integers, first: PlanTerms, second: PlanTerms) -> PlanTerms:
    """Combine two results: `first` for the prompts of half 0, `second` for those of half 1."""

    def pick(left: Array, right: Array) -> Array:
        """Take the row of each prompt from `left` (prompts of half 0) or `right` (half 1)."""
        return np.where((half_P == 0).reshape(-1, *(1,) * (left.ndim - 1)), left, right)

    kept_P = None
    if first.terms.kept_P is not None and second.terms.kept_P is not None:
        kept_P = pick(first.terms.kept_P, second.terms.kept_P)
    return PlanTerms(
        GroupTerms(
            pick(first.terms.energy_P, second.terms.energy_P),
            pick(first.terms.mean_PR, second.terms.mean_PR),
            kept_P,
        ),
        pick(first.generated_P, second.generated_P),
        pick(first.trained_P, second.trained_P),
        max(first.stages, second.stages),
    )


def _common(scales: Sequence[float | None]) -> float | None:
    """Return kappa if it is known and equal for both halves; otherwise return None."""
    first, second = scales
    if first is None or second is None or not np.isclose(first, second, rtol=1e-9):
        return None
    return first


def _rate_weights(pairs: Sequence[tuple[Paths, Weights]]) -> list[float]:
    """Return the weights of prompts with success rates `RATES`, averaged over both halves."""
    rates = np.array(RATES)
    weights_2U = np.array([prompt_weight(*pair, rates) for pair in pairs])
    mean_U = weights_2U.mean(axis=0)
    return [float(x) for x in mean_U / mean_U[MIDDLE]]


def _judge_orders(
    pool: ScorePool, plan: Plan, setting_P: Sequence[Setting], seed: int
) -> dict[str, _Judged]:
    """Measure a plan with random orders of the pool, by name of the estimate.

    The orders are the same for all plans. If all completions of a prompt are drawn in one stage,
    the estimate `per_prompt` is unbiased, because the size of the stage does not depend on its
    rewards.
    """
    estimates = [name for name in estimates_of(plan) if name != ALL_ORDERS]
    blocks = drawn_plan_terms(pool, plan, setting_P, estimates, _orders(pool, seed), BLOCKS)
    judged = {name: _Judged(_mean(terms), blocks=terms) for name, terms in blocks.items()}
    if judged["per_prompt"].whole.stages == 1 and plan.trains in (all_of, mixed_only):
        judged["per_prompt"] = replace(judged["per_prompt"], scale=1.0)
        if not plan.has_history:
            return {"per_prompt": judged["per_prompt"]}
    return judged


def _orders(pool: ScorePool, seed: int) -> Integers:
    """Draw D random orders of the N completions of every prompt, [P, D, N]."""
    prompts, completions = pool.rewards_PN.shape
    place_N = np.arange(completions, dtype=np.int64)
    places_PDN = np.tile(place_N, (prompts, DRAWN_ORDERS, 1))
    return generator(seed, "plans").permuted(places_PDN, axis=2)


def _mean(blocks: Sequence[PlanTerms]) -> PlanTerms:
    """Return the mean of the terms from equal blocks."""
    kept = [x.terms.kept_P for x in blocks if x.terms.kept_P is not None]
    return PlanTerms(
        GroupTerms(
            np.mean([x.terms.energy_P for x in blocks], axis=0),
            np.mean([x.terms.mean_PR for x in blocks], axis=0),
            np.mean(kept, axis=0) if kept else None,
        ),
        np.mean([x.generated_P for x in blocks], axis=0),
        np.mean([x.trained_P for x in blocks], axis=0),
        blocks[0].stages,
    )


def fitted_setting(
    pool: ScorePool, plan: Plan, setting: Setting, planned_P: Mask, seed: int
) -> Setting:
    """Return the setting with a prior and a price for a valued plan; other plans need neither.

    Args:
        pool: scored pool.
        plan: plan.
        setting: options of the plan.
        planned_P: True for the prompts to which the prior and the price are fitted.
        seed: seed of the random orders of the pool.
    """
    if plan.saving is None:
        return setting
    rewards_PN = pool.rewards_PN[planned_P]
    setting = replace(setting, prior=fitted_prior(rewards_PN))
    first = plan.first_size(setting)
    order_PDN = _orders(pool, seed)[planned_P][..., :first]
    drawn = np.sort(np.take_along_axis(rewards_PN[:, None], order_PDN, axis=2), axis=2)
    state_SF, count_S = np.unique(drawn.reshape(-1, first), axis=0, return_counts=True)
    least, most = plan.least_size(setting), plan.most_size(setting)
    sizes_K = np.arange(least, most, dtype=float)
    saving_SK = np.array(
        [plan.saving(tuple(map(float, state_F)), sizes_K, setting) for state_F in state_SF]
    )
    price = price_of(saving_SK, count_S / count_S.sum(), setting.size - least)
    return replace(setting, price=price)
