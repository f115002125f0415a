"""Published recipes: each is a loss that can be typed, measured at its own G; table and figure.

The scaling law of the policy is worked by hand.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import compose
from folders import efficiencies, loss_row, refused_loss, study_of
from prompt_pools import whole_pool
from slow_cases import slow_after

from grpo_ustat.config.presets import CHANCE, RECIPES
from grpo_ustat.estimators.efficiency import relative
from grpo_ustat.estimators.losses import UNBIASED, loss_efficiencies, loss_errors
from grpo_ustat.estimators.scaling import CONSTANTS, ScalingLaw
from grpo_ustat.measurements.recipes import draw, judged_recipes, recipe_efficiencies, tables

# n MSE = G + 2 + 9/(G-1): 9 at G* = 4, and 13, 11.286, 66.143, 514.018 at 2, 8, 64, 512
SCALING = {
    "c1": 1.0, "c2": 2.0, "c3": 9.0, "gstar": 4.0, "gstar_low": 3.5, "gstar_high": 4.6,
    "covariance": (1e-4 * np.eye(3)).tolist(), "dof": 99.0,
}  # fmt: skip
UNKNOWN = {"efficiency_best_g": None, "efficiency_best_g_low": 0.0, "efficiency_best_g_high": None}
POLICY = {"name": "tiny", "quantity": "accuracy", "mean_reward": 0.5}


def judged(name, size, low, efficiency, high, **changes):
    """The row of a recipe with its efficiency against the best."""
    ends = {
        "efficiency_best_g": efficiency,
        "efficiency_best_g_low": low,
        "efficiency_best_g_high": high,
    }
    return loss_row(name, size, **ends) | changes


MEASURED = [
    judged("2-GRPO (arXiv 2510.00977)", 2, 0.7, 0.8, 0.9),
    judged("verl's GRPO examples", 5, 1.1, 1.25, 1.5, rollouts=255),
    judged("TRL's default", 8, 0.8, 0.95, 1.1),
    judged("Dr. GRPO (arXiv 2503.20783)", 8, 1.0, 1.0, 1.0 + 1e-12, unbiased_direction=True,
           baseline="group_mean", loss_type="dr_grpo"),
    judged("DAPO (arXiv 2503.14476)", 16, 0.8, 1.0, 1.2, zero_variance_groups="replace",
           kept=0.5, kept_low=0.4, kept_high=0.6),
    refused_loss("DeepSeekMath (arXiv 2402.03300)", 64, "groups of 64 are too large"),
    loss_row("BroRL (arXiv 2510.01180)", 512, **UNKNOWN, baseline="reinforce_pp_baseline"),
]  # fmt: skip
LAW = ScalingLaw.stored(*(SCALING[x] for x in CONSTANTS), SCALING["covariance"], SCALING["dof"])
REFUSED = [refused_loss(name, recipe.group_size, "few") for name, recipe in RECIPES.items()]


def judged_of(scaling=SCALING, rows=MEASURED):
    study = study_of(Path("none"), scaling=scaling, policy=POLICY)
    return judged_recipes(efficiencies(*rows), study)


def table_of(scaling=SCALING, rows=MEASURED):
    """The table of a study; None where nothing is known."""
    found = tables({study_of(Path("none"), scaling=scaling, policy=POLICY): efficiencies(*rows)})
    return found[0] if found else None


def drawn(folder, scaling=SCALING, rows=MEASURED):
    draw(folder, {study_of(folder, scaling=scaling, policy=POLICY): efficiencies(*rows)}, [])


def test_recipes_that_are_not_measured_are_judged_by_the_law_of_their_group_sizes():
    recipes = judged_of(rows=REFUSED)
    assert [recipe.row.loss for recipe in recipes] == list(RECIPES)
    for recipe in recipes:
        size = recipe.row.group_size
        assert recipe.is_by_size and size == RECIPES[recipe.row.loss].group_size
        extra = LAW.extra_error(size, 4)
        assert recipe.efficiency == recipe.by_size
        assert 1 / recipe.by_size.estimate - 1 == pytest.approx(extra.estimate)
        assert 1 / recipe.by_size.low - 1 == pytest.approx(extra.high)
        assert 1 / recipe.by_size.high - 1 == pytest.approx(extra.low)
    for place, n_mse in ((0, 13), (2, 8 + 2 + 9 / 7), (5, 66 + 9 / 63)):
        assert recipes[place].by_size.estimate == pytest.approx(9 / n_mse)
    table = table_of(rows=REFUSED)
    assert table is not None
    assert {(row[3], row[5]) for row in table.rows} == {("not measured", "-")}
    assert [table.rows[place][4][:4] for place in (0, 6)] == ["0.69", "0.02"]
    assert not any("on a batch of" in text for text in table.notes)


def test_the_table_has_the_efficiency_of_the_whole_loss_and_of_its_group_size():
    table = table_of()
    assert table is not None and table.columns == [
        "recipe",
        "loss",
        "G",
        "efficiency",
        "efficiency of the group size only",
        "verdict",
    ]
    assert table.rows[0] == [
        "2-GRPO (arXiv 2510.00977)",
        "advantage divided by the group std, mean over the update's tokens", "2",
        "0.80 [0.70, 0.90]", "0.69 [0.64, 0.81]", "25 % more rollouts",
    ]  # fmt: skip
    different = "not significantly different"
    assert [row[5] for row in table.rows[1:]] == [
        "20 % fewer rollouts", different, "the best", different, "-", "-"
    ]  # fmt: skip
    assert [row[3] for row in table.rows[5:]] == ["not measured", "not decided"]
    assert "update of DAPO (arXiv 2503.14476) uses a share of 0.50 [0.40, 0.60]" in table.notes[3]
    assert table.rows[3][1] == (
        "reward minus the group mean, sum over tokens divided by the maximum length"
    )
    assert "at the first update on a batch of 255 or 256 rollouts" in table.notes[0]
    assert "95 % intervals are for new questions and hold simultaneously" in table.notes[2]
    assert "Not measured at G = 64: groups of 64 are too large." in table.notes
    overrides = tables(
        {study_of(Path("none"), scaling=SCALING, policy=POLICY): efficiencies(*MEASURED)}
    )[1]
    typed = dict(overrides.rows)["DAPO (arXiv 2503.14476)"]
    assert typed == "objective=dapo baseline=group_std objective.zero_variance_groups=replace"


def test_half_of_the_chance_to_miss_is_left_to_the_group_sizes():
    """A law's interval beside measured relative efficiencies, which take the other half."""
    (recipe,) = [recipe for recipe in judged_of() if recipe.row.group_size == 64]
    extra = LAW.extra_error(64, 4, 1 - CHANCE)
    assert 1 / recipe.by_size.low - 1 == pytest.approx(extra.high)
    narrow = judged_of(rows=REFUSED)[5].by_size
    assert recipe.by_size.low < narrow.low < narrow.high < recipe.by_size.high


def test_where_the_best_size_is_not_decided_measured_recipes_stand_alone():
    undecided = SCALING | {"gstar_high": None}
    assert table_of(undecided, REFUSED) is None
    early = {key: value for key, value in SCALING.items() if key != "covariance"}
    assert table_of(early, REFUSED) is None
    table = table_of(undecided)
    assert table is not None
    assert [row[3] for row in table.rows[4:]] == [
        "1.00 [0.80, 1.20]", "not measured", "not decided"
    ]  # fmt: skip
    assert {row[4] for row in table.rows} == {"not decided"}


@pytest.mark.slow
def test_the_numbers_along_its_axis_are_apart(tmp_path, monkeypatch):
    """Beside the 1 that is always there: 0.85 would be read with it where the worst is .01."""
    ticks = []
    monkeypatch.setattr(
        "grpo_ustat.measurements.recipes.save",
        lambda figure, *_: ticks.extend(figure.axes[0].get_xticks()),
    )
    drawn(tmp_path, rows=REFUSED)
    assert 1.0 in ticks and 0.85 not in ticks and len(ticks) > 3


@pytest.mark.slow
@pytest.mark.parametrize("high", [4.6, None])
def test_the_figure_is_drawn(tmp_path, high):
    scaling = SCALING | {"gstar_high": high}
    drawn(tmp_path, scaling, REFUSED)
    svg = (tmp_path / "recipes.svg").read_text()
    assert ("not enough data" in svg) == (high is None)
    assert all((name in svg) == (high is not None) for name in RECIPES)
    assert ("Open circles" in svg) == (high is not None)


@pytest.mark.slow
def test_the_figure_tells_whole_losses_from_group_sizes(tmp_path):
    drawn(tmp_path, rows=MEASURED[:5])
    svg = (tmp_path / "recipes.svg").read_text()
    assert "Open circles" not in svg and "DAPO (arXiv 2503.14476): G = 16" in svg
    drawn(tmp_path)
    assert "Open circles" in (tmp_path / "recipes.svg").read_text()


LONGEST, DRAWS, SEED = 9, 20, 3


def a_pool(questions, completions):
    """Scores along a common gradient, of which right answers have more."""
    rng = np.random.default_rng(8)
    shape = questions, completions
    rewards = rng.integers(0, 2, size=shape).astype(float)
    rewards[:, :2] = 0, 1
    scores = rng.normal(size=(*shape, 4)) + 1.5 * (rewards[..., None] - 0.5) * np.eye(4)[0]
    return whole_pool(scores, rewards, rng.integers(1, LONGEST, size=shape))


def found_in(pool, sizes=(2, 4), rollouts=32):
    rows = recipe_efficiencies(pool, LONGEST, sizes, rollouts, DRAWS, SEED)
    return {row.loss.name: row for row in rows}


@pytest.mark.parametrize("name", slow_after(1, RECIPES))
def test_a_recipe_is_a_loss_that_can_be_typed(name):
    recipe = RECIPES[name]
    (typed,) = compose("mse", *recipe.overrides).measured.first_update
    assert recipe.loss(typed.max_completion_length) == typed
    assert typed.options == recipe.loss(1).options  # which are not compared


def test_the_numbers_of_a_recipe_are_those_of_its_loss_at_its_group_size():
    pool = a_pool(40, 16)
    found = found_in(pool)
    sizes = [2, 4, 5, 8, 16]  # of the study and of the recipes that are measured
    for name, row in found.items():
        loss, size = RECIPES[name].loss(LONGEST), RECIPES[name].group_size
        if size > 16:
            continue
        assert (row.loss, row.group_size) == (replace(loss, name=name), size)
        assert row.rollouts == (30 if size == 5 else 32)
        # of verl's five n = 30 is no multiple of the other sizes: there by the errors alone
        wanted = {UNBIASED: sizes, loss: [size]}
        errors = loss_errors(pool, wanted, row.rollouts, DRAWS, SEED)
        best = min(sizes, key=lambda other: errors[UNBIASED, other].error_D[0])
        for value, other in (
            (row.efficiency.efficiency_same_g, size),
            (row.efficiency.efficiency_best_g, best),
        ):
            if math.isnan(value.estimate):
                continue
            ratio_D = errors[UNBIASED, other].error_D / errors[loss, size].error_D
            assert value.estimate == pytest.approx(ratio_D[0], rel=1e-6)
        together = 1 - CHANCE / 5
        wide = relative(errors[UNBIASED, size].error_D, errors[loss, size], level=together)
        assert row.efficiency.efficiency_same_g == pytest.approx(wide, rel=1e-6, nan_ok=True)
        if size == 5:
            continue
        (alone,) = loss_efficiencies(pool, [loss], [size], 32, DRAWS, SEED)
        assert row.efficiency.efficiency_same_g.estimate == pytest.approx(
            alone.efficiency.efficiency_same_g.estimate, rel=1e-6
        )
        if name != "Dr. GRPO (arXiv 2503.20783)":  # which is the unbiased one
            assert row.efficiency.efficiency_same_g.low < alone.efficiency.efficiency_same_g.low
        assert (row.best, row.may_be_best, row.kept) == (alone.best, alone.may_be_best, alone.kept)


def test_a_loss_of_two_recipes_is_measured_at_both_sizes():
    """That of 2-GRPO and of DeepSeekMath."""
    found = found_in(a_pool(6, 64), rollouts=64)
    two, many = found["2-GRPO (arXiv 2510.00977)"], found["DeepSeekMath (arXiv 2402.03300)"]
    assert replace(two.loss, name="") == replace(many.loss, name="")
    assert (two.group_size, many.group_size) == (2, 64)
    assert two.efficiency is not None and many.efficiency is not None
    assert two.efficiency.efficiency_best_g.estimate != many.efficiency.efficiency_best_g.estimate


def test_a_pool_too_small_says_why_of_each_recipe():
    for row in found_in(a_pool(3, 4)).values():
        assert row.efficiency is None and (row.best, row.may_be_best) == (False, False)
        assert "3 questions are too few" in row.reason.line
    found = found_in(a_pool(40, 4), rollouts=32)
    measured = [name for name, row in found.items() if row.efficiency is not None]
    assert measured == ["2-GRPO (arXiv 2510.00977)"]
    assert "groups of 8 need 8 completions" in found["TRL's default"].reason.line
    assert found["DAPO (arXiv 2503.14476)"].rollouts == 32


def test_an_update_smaller_than_a_group_is_said():
    found = found_in(a_pool(40, 16), rollouts=8)
    assert (
        found["DAPO (arXiv 2503.14476)"].reason.line
        == "study.rollouts=8 is not a multiple of the group size 16"
    )
    assert found["Dr. GRPO (arXiv 2503.20783)"].efficiency is not None


def test_two_questions_with_a_signal_decide_no_direction():
    """Without either of them the estimate of ||grad J||^2 is 0, and what it divides infinite."""
    pool = a_pool(8, 8)
    pool.rewards_PN[2:] = 1
    found = found_in(pool, rollouts=16)
    row = found["2-GRPO (arXiv 2510.00977)"]
    assert row.efficiency is not None
    assert math.isnan(row.efficiency.efficiency_same_g.estimate) and math.isnan(
        row.efficiency.direction.estimate
    )
    assert row.efficiency.direction[1:] == (0.0, 1.0)
