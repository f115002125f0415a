"""Worth of a rollout of each published recipe, a whole loss at its own group size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from grpo_ustat.config.presets import CHANCE, RECIPES
from grpo_ustat.estimators.losses import UNBIASED, LossRow, kept_share, loss_errors, refusal
from grpo_ustat.estimators.row_weights import Loss
from grpo_ustat.estimators.worth import worth
from grpo_ustat.records import ScorePool


def recipe_worths(
    pool: ScorePool,
    max_completion_length: int,
    group_sizes: Sequence[int],
    rollouts: int,
    draws: int,
    seed: int,
) -> list[LossRow]:
    """Measure the worth of a rollout of each recipe, for new questions, by the recipe's name.

    An update holds whole groups: its n is the largest multiple of the recipe's G up to `rollouts`.
    The unbiased estimate that it is judged against has the same n; its error is n's alone, so that
    its best G, of `group_sizes` and those of the recipes, need not divide n. The m recipes that are
    measured have intervals of 1 - .025/m each (Bonferroni), so that all hold together in 97.5 %.

    Args:
        max_completion_length: tokens after which a completion is cut.
        rollouts: n of the study.
        draws, seed: see `loss_worths`.
    """
    rows: dict[str, LossRow] = {}
    # Recipes by n.
    updates: dict[int, dict[str, Loss]] = {}
    for name, recipe in RECIPES.items():
        loss, size = recipe.loss(max_completion_length), recipe.group_size
        count = rollouts // size * size or rollouts
        reason = refusal(pool, loss, size, count)
        rows[name] = LossRow(replace(loss, name=name), size, count, None, reason=reason)
        if reason is None:
            updates.setdefault(count, {})[name] = loss
    measured = sum(map(len, updates.values()))
    own_sizes = {RECIPES[name].group_size for of_count in updates.values() for name in of_count}
    completions = pool.rewards_PN.shape[1]
    sizes = sorted({size for size in {*group_sizes, *own_sizes} if 2 <= size <= completions})
    for count, losses in updates.items():
        wanted: dict[Loss, list[int]] = {UNBIASED: sizes}
        for name, loss in losses.items():
            wanted.setdefault(loss, []).append(RECIPES[name].group_size)
        errors = loss_errors(pool, wanted, count, draws, seed)
        unbiased = {size: errors[UNBIASED, size].error_D for size in sizes}
        for name, loss in losses.items():
            size = RECIPES[name].group_size
            found = worth(errors[loss, size], size, unbiased, pool.metrics, 1 - CHANCE / measured)
            kept = kept_share(pool, size) if loss.rows.replaces else None
            rows[name] = replace(rows[name], worth=found, best=True, alike=True, kept=kept)
    return list(rows.values())
