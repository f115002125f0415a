"""Published recipes on a policy whose scaling law is worked by hand, with worths and without."""

from __future__ import annotations

import numpy as np
import pytest
from folders import loss_row, refused_loss

from grpo_ustat.config.recipes import CHANCE, RECIPES
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.pages.recipes import recipe_table, recipes, recipes_figure

# n MSE = G + 2 + 9/(G-1): 9 at G* = 4, and 13, 11.286, 66.143, 514.018 at 2, 8, 64, 512
SCALING = {
    "c1": 1.0, "c2": 2.0, "c3": 9.0, "gstar": 4.0, "gstar_low": 3.5, "gstar_high": 4.6,
    "covariance": (1e-4 * np.eye(3)).tolist(), "dof": 99.0,
}  # fmt: skip
UNKNOWN = {"worth_best": None, "worth_best_low": 0.0, "worth_best_high": None}
POLICY = {"name": "tiny", "quantity": "accuracy", "mean_reward": 0.5}


def judged(name, size, low, worth, high, **changes):
    """The row of a recipe with its worth against the best."""
    ends = {"worth_best": worth, "worth_best_low": low, "worth_best_high": high}
    return loss_row(name, size, **ends) | changes


LAW = ScalingLaw.stored(1.0, 2.0, 9.0, SCALING["covariance"], SCALING["dof"])
MEASURED = {
    "scaling": SCALING,
    "policy": POLICY,
    "recipes": [
        judged("2-GRPO (arXiv 2510.00977)", 2, 0.7, 0.8, 0.9),
        judged("verl's GRPO examples", 5, 1.1, 1.25, 1.5, rollouts=255),
        judged("TRL's default", 8, 0.8, 0.95, 1.1),
        judged("Dr. GRPO (arXiv 2503.20783)", 8, 1.0, 1.0, 1.0 + 1e-12, unbiased_direction=True,
               baseline="group_mean", loss_type="dr_grpo"),
        judged("DAPO (arXiv 2503.14476)", 16, 0.8, 1.0, 1.2, zero_variance_groups="replace",
               kept=0.5, kept_low=0.4, kept_high=0.6),
        refused_loss("DeepSeekMath (arXiv 2402.03300)", 64, "groups of 64 are too large"),
        loss_row("BroRL (arXiv 2510.01180)", 512, **UNKNOWN, baseline="reinforce_pp_baseline"),
    ],
}  # fmt: skip


def test_a_study_without_recipes_is_judged_by_the_law_of_its_group_sizes():
    rows = recipes({"scaling": SCALING})
    assert [one.row["loss"] for one in rows] == list(RECIPES)
    for one in rows:
        size = one.row["group_size"]
        assert one.alone and size == RECIPES[one.row["loss"]].group_size
        extra = LAW.extra_error(size, 4)
        assert 1 / one.worth.estimate - 1 == pytest.approx(extra.estimate)
        assert 1 / one.worth.low - 1 == pytest.approx(extra.high)
        assert 1 / one.worth.high - 1 == pytest.approx(extra.low)
    for place, n_mse in ((0, 13), (2, 8 + 2 + 9 / 7), (5, 66 + 9 / 63)):
        assert rows[place].worth.estimate == pytest.approx(9 / n_mse)
    table = recipe_table({"scaling": SCALING})
    assert table is not None
    verdicts = [row[4] for row in table.rows]
    assert all(text.startswith("group size alone: takes ") for text in verdicts)
    assert verdicts[0] == "group size alone: takes 44 % more rollouts for the same error"
    assert verdicts[6] == "group size alone: takes 57 times the rollouts for the same error"
    assert not any("rollouts in whole groups" in text for text in table.notes)


def test_the_table_says_what_a_rollout_of_each_whole_loss_is_worth():
    table = recipe_table(MEASURED)
    assert table is not None and table.columns == ["recipe", "its loss", "G", "worth", "verdict"]
    assert table.rows[0] == [
        "2-GRPO (arXiv 2510.00977)", "std of the group, mean over the update's tokens", "2",
        "0.80 [0.70, 0.90]", "takes 25 % more rollouts for the same error",
    ]  # fmt: skip
    assert [row[4] for row in table.rows[1:5]] == [
        "takes 20 % fewer rollouts for the same error",
        "not significantly different from the best, at most 25 % more rollouts",
        "the best",
        "not significantly different from the best, at most 25 % more rollouts; 0.50 of the groups "
        "drawn count, so a rollout drawn is worth 0.50",
    ]
    alone = "group size alone: takes {} times the rollouts for the same error"
    assert [row[4] for row in table.rows[5:]] == [
        alone.format("7.3"), f"whole loss not decided; {alone.format('57')}"
    ]  # fmt: skip
    assert table.rows[3][1] == "less the group's mean, sum over tokens by the longest length"
    assert "at a batch's first update, of 255 or 256 rollouts in whole groups" in table.notes[0]
    assert "hold together in 95 % of studies" in table.notes[0]
    assert "Not at G = 64: groups of 64 are too large." in table.notes
    assert (
        "DAPO: objective=dapo baseline=group_std objective.zero_variance_groups=replace; "
        in (table.notes[-1])
    )


def test_half_of_the_chance_to_miss_is_left_to_the_group_sizes():
    """A law's interval beside measured worths, which take the other half."""
    (one,) = [one for one in recipes(MEASURED) if one.row["group_size"] == 64]
    extra = ScalingLaw.stored(1.0, 2.0, 9.0, SCALING["covariance"], SCALING["dof"]).extra_error(
        64, 4, 1 - CHANCE
    )
    assert 1 / one.worth.low - 1 == pytest.approx(extra.high)
    wider = recipes({"scaling": SCALING})[5].worth
    assert one.worth.low < wider.low < wider.high < one.worth.high


def test_where_the_best_size_is_not_decided_measured_recipes_stand_alone():
    undecided = SCALING | {"gstar_high": None}
    assert recipe_table({"scaling": undecided}) is None
    early = {key: value for key, value in SCALING.items() if key != "covariance"}
    assert recipe_table({"scaling": early}) is None
    table = recipe_table(MEASURED | {"scaling": undecided})
    assert table is not None
    assert [row[3] for row in table.rows[4:]] == ["1.00 [0.80, 1.20]", *["not decided"] * 2]
    assert table.rows[5][4] == "group size alone: not decided"


def test_a_group_size_that_may_be_as_good_is_not_said_to_take_more():
    wide = SCALING | {"covariance": np.diag([0.5, 0.01, 0.01]).tolist()}
    table = recipe_table({"scaling": wide})
    assert table is not None
    assert table.rows[2][4].startswith(
        "group size alone: not significantly different from the best, at most "
    )


@pytest.mark.slow
def test_the_numbers_along_its_axis_are_apart(tmp_path, monkeypatch):
    """Beside the 1 that is always there: 0.85 would be read with it where the worst is .01."""
    ticks = []
    monkeypatch.setattr(
        "grpo_ustat.pages.recipes.save",
        lambda figure, *_: ticks.extend(figure.axes[0].get_xticks()),
    )
    recipes_figure(tmp_path, {"scaling": SCALING, "policy": POLICY})
    assert 1.0 in ticks and 0.85 not in ticks and len(ticks) > 3


@pytest.mark.slow
@pytest.mark.parametrize("high", [4.6, None])
def test_the_figure_is_drawn(tmp_path, high):
    scaling = SCALING | {"gstar_high": high}
    recipes_figure(tmp_path, {"scaling": scaling, "policy": POLICY})
    drawn = (tmp_path / "recipes.svg").read_text()
    assert ("not enough data" in drawn) == (high is None)
    assert all((name in drawn) == (high is not None) for name in RECIPES)
    assert ("Open circles" in drawn) == (high is not None)


@pytest.mark.slow
def test_the_figure_tells_whole_losses_from_group_sizes(tmp_path):
    measured = MEASURED | {"recipes": MEASURED["recipes"][:5]}
    recipes_figure(tmp_path, measured)
    drawn = (tmp_path / "recipes.svg").read_text()
    assert "Open circles" not in drawn and "DAPO (arXiv 2503.14476): G = 16" in drawn
    recipes_figure(tmp_path, MEASURED)
    assert "Open circles" in (tmp_path / "recipes.svg").read_text()
