"""Published group sizes on a policy whose scaling law is worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_ustat.pages.recipes import RECIPES, recipe_table, recipes, recipes_figure

# n MSE = G + 2 + 9/(G-1): 9 at G* = 4, and 13, 11.286, 66.143, 514.018 at 2, 8, 64, 512
SCALING = {
    "c1": 1.0, "c2": 2.0, "c3": 9.0, "gstar": 4.0, "gstar_low": 3.5, "gstar_high": 4.6,
    "covariance": (1e-4 * np.eye(3)).tolist(), "dof": 99.0,
}  # fmt: skip


def test_errors_of_recipes_are_those_of_the_law():
    rows = {row.group_size: row for row in recipes(SCALING, 100)}
    assert sorted(rows) == [2, 4, 8, 64, 512]
    for size, n_mse in ((2, 13), (4, 9), (8, 8 + 2 + 9 / 7), (64, 66 + 9 / 63)):
        assert rows[size].error.estimate == pytest.approx(n_mse / 100)
        assert rows[size].extra.estimate == pytest.approx(n_mse / 9 - 1)
        assert rows[size].error.low < n_mse / 100 < rows[size].error.high
    assert rows[4].extra == (0, 0, 0)


def test_the_table_says_which_recipes_cost_how_much():
    table = recipe_table(SCALING)
    assert table is not None
    by_size = {row[1]: row for row in table.rows}
    assert by_size["4"][5] == "the best" and by_size["4"][2] == "64"
    assert by_size["2"][5] == "takes 44 % more rollouts for the same error"
    assert by_size["512"][2] == "takes n >= 512"
    wide = SCALING | {"covariance": np.diag([0.5, 0.01, 0.01]).tolist()}
    unsure = recipe_table(wide)
    assert unsure is not None
    assert {row[1]: row for row in unsure.rows}["8"][5] == (
        "not significantly different from the best"
    )


def test_without_a_best_size_there_is_no_table(tmp_path):
    assert recipe_table(SCALING | {"gstar_high": None}) is None
    early = {key: value for key, value in SCALING.items() if key != "covariance"}
    assert recipe_table(early) is None


@pytest.mark.slow
@pytest.mark.parametrize("high", [4.6, None])
def test_the_figure_is_drawn(tmp_path, high):
    policy = {"name": "tiny", "quantity": "accuracy", "mean_reward": 0.5}
    recipes_figure(tmp_path, {"scaling": SCALING | {"gstar_high": high}, "policy": policy})
    drawn = (tmp_path / "recipes.svg").read_text()
    assert ("not enough data" in drawn) == (high is None)
    assert all((name in drawn) == (high is not None) for name in RECIPES)
