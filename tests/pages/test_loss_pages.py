"""Sentences, tables and the figure on the worth of losses, from results written by hand."""

from __future__ import annotations

from dataclasses import asdict

import matplotlib.pyplot as plt
import numpy as np
import pytest
from folders import loss_row, refused_loss, unsaved_study
from slow_cases import slow_after

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.measurements.next_step import next_step, objective_overrides
from grpo_ustat.pages.losses import (
    BARS_NOTE,
    loss_details,
    losses_figure,
    losses_sentences,
    losses_tables,
    worth_panel,
)

NOT_DECIDED = {"worth": (None, 0.0, None), "direction": (None, 0.0, None)}
DECIDED = [
    loss_row("decided", 4, alike=True),
    loss_row("decided", 8),
    loss_row("decided", 16, alike=True),
]
ANSWERS = {
    "decided": (
        DECIDED,
        "At n = 256 and G = 8 a rollout of decided (std of the group, mean over the update's "
        "tokens) is worth 0.90 [0.80, 1.00] of an unbiased one; its direction is right to cos "
        "0.900 [0.800, 0.950]; its best G is 8 (4 and 16 may be as good).",
    ),
    "no upper end": (
        [loss_row("open", 8, (0.9, 0.8, None)), loss_row("open", 16)],
        "At n = 256 and G = 8 a rollout of open (std of the group, mean over the update's "
        "tokens) is worth 0.90 [0.80, no end] of an unbiased one; its direction is right to cos "
        "0.900 [0.800, 0.950]; of the measured G 8 is its best.",
    ),
    "the largest measured, of a pool of 32, where 64 is the best": (
        [loss_row("long", 8, best=False, alike=False), loss_row("long", 32, best=True),
         refused_loss("long", 64, "the pool has 32")],
        "At n = 256 and G = 8 a rollout of long (std of the group, mean over the update's "
        "tokens) is worth 0.90 [0.80, 1.00] of an unbiased one; its direction is right to cos "
        "0.900 [0.800, 0.950]; of the measured G 32 is its best.",
    ),
    "undecided": (
        [loss_row("undecided", 8, **NOT_DECIDED)],
        "At n = 256 and G = 8 it is not decided what a rollout of undecided (std of the group, "
        "mean over the update's tokens) is worth: its direction is not known from these questions; "
        "an update is 80 % noise [70 %, 90 %].",
    ),
    "nothing known": (
        [loss_row("unknown", 8, **NOT_DECIDED, noise=None, noise_low=0.0, noise_high=None)],
        "At n = 256 and G = 8 it is not decided what a rollout of unknown (std of the group, mean "
        "over the update's tokens) is worth: its direction is not known from these questions.",
    ),
    "a smaller size is missing": (
        [refused_loss("some", 4, "few"), loss_row("some", 8)],
        "At n = 256 and G = 8 a rollout of some (std of the group, mean over the update's tokens) "
        "is worth 0.90 [0.80, 1.00] of an unbiased one; its direction is right to cos 0.900 "
        "[0.800, 0.950]; no other G was measured.",
    ),
    "the smallest is missing": (
        [refused_loss("some", 4, "few"), loss_row("some", 8), loss_row("some", 16)],
        "At n = 256 and G = 8 a rollout of some (std of the group, mean over the update's tokens) "
        "is worth 0.90 [0.80, 1.00] of an unbiased one; its direction is right to cos 0.900 "
        "[0.800, 0.950]; of the measured G 8 is its best.",
    ),
    "unbiased": (
        [loss_row("sum", 4, unbiased_direction=True, best=True, loss_type="sum",
                  baseline="leave_one_out")],
        "At n = 256 and G = 4 a rollout of sum (less the mean of the group's others, sum over "
        "tokens) is worth 0.90 [0.80, 1.00] of an unbiased one; its direction is unbiased; no "
        "other G was measured.",
    ),
    "not measured": (
        [refused_loss("absent", 8, "study.rollouts=20 is no multiple of 8")],
        "What a rollout of absent (std of the group, mean over the update's tokens) is worth is "
        "not measured: study.rollouts=20 is no multiple of 8.",
    ),
    "the nearest size": (
        [loss_row("far", 16, best=True, baseline="own_rule"), loss_row("far", 64)],
        "At n = 256 and G = 16 a rollout of far (own_rule, mean over the update's tokens) is worth "
        "0.90 [0.80, 1.00] of an unbiased one; its direction is right to cos 0.900 [0.800, 0.950]; "
        "of the measured G 16 is its best.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("rows, sentence", ANSWERS.values(), ids=ANSWERS)
def test_a_sentence_says_what_was_found(rows, sentence):
    assert losses_sentences({"losses": rows}) == [sentence]


def test_losses_of_which_the_same_is_said_share_a_sentence():
    losses = [loss_row(name, 8) for name in ("a", "b", "c")]
    losses[1] = losses[1] | {"loss_type": "grpo"}
    one, other = losses_sentences({"losses": losses})
    assert "a rollout of a or c (std of the group, mean over the update's" in one
    assert "a rollout of b (std of the group, mean over each" in other


def test_a_study_without_losses_says_and_shows_nothing(tmp_path):
    for result in ({}, {"losses": [refused_loss("absent", 8, "why")]}):
        assert losses_tables(result) == loss_details(result) == []
        losses_figure(tmp_path, result)
    assert losses_sentences({}) == [] and not list(tmp_path.iterdir())


def test_a_table_has_a_column_a_loss_and_says_what_is_not_measured():
    undecided = loss_row("undecided", 8, **NOT_DECIDED), refused_loss("undecided", 16, "too few")
    losses = [*DECIDED, *undecided, refused_loss("absent", 8, "no")]
    (table,) = losses_tables({"losses": losses})
    assert table.columns == ["G", "decided", "undecided"] and "n = 256" in table.title
    assert table.rows == [
        ["4", "0.45\n[0.40, 0.50]", "-"],
        ["8", "0.45\n[0.40, 0.50]", "not decided"],
        ["16", "0.45\n[0.40, 0.50]", "-"],
    ]
    assert table.notes[1:] == ["Not at G = 16: too few."]
    assert table.marks[1, 1] is True and table.marks[0, 1] is False


def test_many_losses_are_tables_side_by_side_of_four():
    losses = [loss_row(f"loss{number}", 8) for number in range(6)]
    tables = losses_tables({"losses": losses})
    assert [table.columns for table in tables] == [
        ["G", "loss0", "loss1", "loss2", "loss3"], ["G", "loss4", "loss5"]
    ]  # fmt: skip


def test_details_have_both_worths_direction_and_noise_of_each_loss_at_each_size():
    losses = [DECIDED[1], loss_row("undecided", 8, **NOT_DECIDED),
              loss_row("known", 8, direction=(None, 0.25, None)),
              loss_row("sum", 8, unbiased_direction=True),
              refused_loss("absent", 8, "no")]  # fmt: skip
    (table,) = loss_details({"losses": losses})
    words = "std of the group, mean over the update's tokens"
    assert table.rows[0] == [
        "decided", words, "8", "0.90 [0.80, 1.00]", "0.45 [0.40, 0.50]", "0.900 [0.800, 0.950]",
        "0.80 [0.70, 0.90]",
    ]  # fmt: skip
    assert [cells[5] for cells in table.rows[1:]] == ["not known", "at least 0.50", "unbiased"]
    assert [cells[3] for cells in table.rows[1:]].count("not decided") == 1


@pytest.mark.slow
def test_the_figure_has_a_line_a_loss_that_is_decided_and_names_the_others(tmp_path):
    policy = {"name": "tiny", "quantity": "accuracy", "mean_reward": 0.5}
    open_end = loss_row("_open", 8, (0.9, 0.8, None))
    losses = [
        *DECIDED,
        open_end,
        loss_row("undecided", 8, **NOT_DECIDED),
        refused_loss("absent", 8, "no"),
    ]
    losses_figure(tmp_path, {"policy": policy, "losses": losses})
    drawn = (tmp_path / "losses.svg").read_text()
    for text in (">decided<", "> _open<", "tiny: accuracy 0.50, n = 256", BARS_NOTE):
        assert text in drawn
    assert "Not decided or not measured: undecided and absent." in drawn
    losses_figure(tmp_path, {"policy": policy, "losses": [loss_row("undecided", 8, **NOT_DECIDED)]})
    assert "not decided from these questions" in (tmp_path / "losses.svg").read_text()


@pytest.mark.parametrize(
    "words",
    [
        (), ("objective=trl_dapo",), ("objective=trl_dapo", "baseline=group_mean"),
        ("objective=verl_token_mean",), ("objective=grpo", "objective.beta=0.0"),
        ("objective=dapo", "baseline=group_std", "baseline.options.epsilon=0.01"),
        ("objective=trl_dr_grpo", "baseline=group_std"),
        ("objective=trl_dapo", "objective.zero_variance_groups=drop"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("verb", slow_after(1, ["train", "mse"]))
def test_the_overrides_of_a_loss_choose_it_again(verb, words):
    config = asdict(compose_config(verb, words))
    again = objective_overrides(config)
    assert len(again) <= len(words)
    found = asdict(compose_config(verb, again))
    for name in ("objective", "baseline"):
        assert found[name] == config[name]


def test_the_next_step_trains_with_the_loss_and_its_own_best_size():
    config = asdict(compose_config("mse", ["objective=trl_dapo"]))
    scaling = {
        "c1": 1.0, "c2": 2.0, "c3": 9.0, "gstar": 4.0, "gstar_low": 3.5, "gstar_high": 4.6,
        "covariance": (1e-4 * np.eye(3)).tolist(), "dof": 99.0,
    }  # fmt: skip
    result = {"scaling": scaling, "assumption2": {"corr": 0.1}, "losses": []}
    assert next_step(unsaved_study(result, config)).endswith(
        "objective=trl_dapo budget.rollouts=256 group_size=4"
    )
    row = {"loss": "trl_dapo", "worth": 1.0}
    for alike, size in ((True, 4), (False, 16)):
        result["losses"] = [
            row | {"group_size": 4, "best": False, "alike": alike},
            row | {"group_size": 16, "best": True, "alike": True},
        ]
        assert next_step(unsaved_study(result, config)).endswith(f"group_size={size}")
    replaced = ["objective=trl_dapo", "objective.zero_variance_groups=replace"]
    step = next_step(unsaved_study(result, asdict(compose_config("mse", replaced))))
    assert "objective.zero_variance_groups=drop" in step and "replace" not in step


def test_bars_are_the_intervals_and_leave_the_picture_where_they_are_wide_or_have_no_end():
    rows = [loss_row("a", 4), loss_row("a", 8, (0.9, 0.8, None)), loss_row("a", 16, (0.9, 0.8, 50))]
    figure, axes = plt.subplots()
    assert worth_panel(axes, {"a": rows}, ["a"]) == []
    (bars,) = axes.collections
    known, endless, wide = ([y for _, y in bar] for bar in bars.get_segments())
    assert known == [0.4, 0.5] and [endless[0], wide[0]] == [0.4, 0.4]
    assert min(endless[1], wide[1]) > axes.get_ylim()[1]
    plt.close(figure)
