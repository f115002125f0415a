"""Relative efficiency of losses in a study: sentences, tables and the figure, and a whole study."""

from __future__ import annotations

import json
import re

import matplotlib.pyplot as plt
import pytest
from commands import run
from folders import efficiencies, loss_row, refused_loss, study_of

from grpo_ustat.measurements.loss_efficiencies import (
    BARS_NOTE,
    efficiency_panel,
    efficiency_sentences,
    efficiency_tables,
)
from grpo_ustat.measurements.losses import LOSSES, draw
from grpo_ustat.runs.library import load_run
from grpo_ustat.terminal.console import Console

NOT_DECIDED = {"efficiency_same_g": (None, 0.0, None), "direction": (None, 0.0, None)}
DECIDED = [
    loss_row("decided", 4, may_be_best=True),
    loss_row("decided", 8),
    loss_row("decided", 16, may_be_best=True),
]
ANSWERS = {
    "decided": (
        DECIDED,
        ["n = 256 and G = 8", "0.90 [0.80, 1.00]", "is 0.900 [0.800, 0.950]", "G is 8 (4 and 16"],
    ),
    "no upper end": (
        [loss_row("open", 8, (0.9, 0.8, None)), loss_row("open", 16)],
        ["0.90 [0.80, no upper end]", "its best measured G is 8"],
    ),
    "the largest measured, of a pool of 32, where 64 is the best": (
        [loss_row("long", 8, best=False, may_be_best=False), loss_row("long", 32, best=True),
         refused_loss("long", 64, "the pool has 32")],
        ["G = 8", "its best measured G is 32"],
    ),
    "undecided": (
        [loss_row("undecided", 8, **NOT_DECIDED)], ["not decided", "80 % noise [70 %, 90 %]"],
    ),
    "a smaller size is missing": (
        [refused_loss("some", 4, "few"), loss_row("some", 8)], ["no other G was measured"],
    ),
    "the smallest is missing": (
        [refused_loss("some", 4, "few"), loss_row("some", 8), loss_row("some", 16)],
        ["its best measured G is 8"],
    ),
    "unbiased": (
        [loss_row("sum", 4, unbiased_direction=True, best=True, loss_type="sum",
                  baseline="leave_one_out")],
        ["G = 4", "reward minus the mean of the rest of the group, sum over tokens", "is unbiased"],
    ),
    "replaced groups": (
        [loss_row("dapo", 8, zero_variance_groups="replace", kept=0.5, kept_low=0.4,
                  kept_high=0.6)],
        ["zero-variance groups replaced", "0.50 [0.40, 0.60] of the sampled groups"],
    ),
    "not measured": (
        [refused_loss("absent", 8, "study.rollouts=20 is no multiple of 8")],
        ["not measured: study.rollouts=20 is no multiple of 8."],
    ),
    "the nearest size": (
        [loss_row("far", 16, best=True, baseline="own_baseline"), loss_row("far", 64)],
        ["G = 16", "own_baseline", "its best measured G is 16"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("rows, said", ANSWERS.values(), ids=ANSWERS)
def test_a_sentence_says_what_was_found(rows, said):
    (sentence,) = efficiency_sentences(efficiencies(*rows))
    assert all(text in sentence for text in said), sentence


def test_nothing_is_said_of_noise_that_is_not_known():
    row = loss_row("unknown", 8, **NOT_DECIDED, noise=None, noise_low=0.0, noise_high=None)
    assert "noise" not in efficiency_sentences(efficiencies(row))[0]


def test_losses_of_which_the_same_is_said_share_a_sentence():
    losses = [loss_row(name, 8) for name in ("a", "b", "c")]
    losses[1] = losses[1] | {"loss_type": "grpo"}
    one, other = efficiency_sentences(efficiencies(*losses))
    assert (
        "the relative efficiency of a or c (advantage divided by the group std, mean over the"
        in one
    )
    assert (
        "the relative efficiency of b (advantage divided by the group std, mean over each" in other
    )


def test_a_study_without_losses_shows_nothing(tmp_path):
    study = study_of(tmp_path)
    assert study.of(LOSSES) is None
    rows = efficiencies(refused_loss("absent", 8, "why"))
    assert LOSSES.tables({study: rows}) == []
    draw(tmp_path, {study: rows}, [])
    assert not list(tmp_path.iterdir())


def test_a_table_has_a_column_a_loss_and_says_what_is_not_measured():
    undecided = loss_row("undecided", 8, **NOT_DECIDED), refused_loss("undecided", 16, "too few")
    losses = [*DECIDED, *undecided, refused_loss("absent", 8, "no")]
    losses += [loss_row("partly", 4, **NOT_DECIDED), loss_row("partly", 8, may_be_best=False)]
    table, _ = efficiency_tables(efficiencies(*losses))
    assert table.columns == ["G", "decided", "partly"] and "n = 256" in table.title
    assert table.rows == [
        ["4", "0.45\n[0.40, 0.50]", "-"],
        ["8", "0.45\n[0.40, 0.50]", "0.45*\n[0.40, 0.50]"],
        ["16", "0.45\n[0.40, 0.50]", "-"],
    ]
    reason = "because these questions do not determine the direction."
    assert table.notes[1:] == [
        "* marks an efficiency significantly lower than the efficiency of the same loss at its "
        "best G.",
        f"Not decided at any G: undecided, {reason}",
        f"Not decided at G = 4: partly, {reason}",
        "Not measured at G = 16: too few.",
    ]


def test_losses_without_any_decided_efficiency_are_a_line_and_no_figure(tmp_path, capsys):
    rows = efficiencies(*(loss_row(name, 8, **NOT_DECIDED) for name in "ab"))
    table, details = efficiency_tables(rows)
    assert not table.rows and table.notes[0].startswith("Not decided at any G: a and b, ")
    assert details.columns == ["loss", "advantage and tokens", "G", "share of noise"]
    Console(width=80).print(table)
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("Relative efficiency at n = 256") and "any G: a and b" in printed
    draw(tmp_path, {study_of(tmp_path): rows}, [])
    assert not list(tmp_path.iterdir())


def test_many_losses_are_tables_side_by_side_of_four():
    losses = [loss_row(f"loss{number}", 8) for number in range(6)]
    *tables, details = efficiency_tables(efficiencies(*losses))
    assert details.page_only and not any(table.page_only for table in tables)
    assert [table.columns for table in tables] == [
        ["G", "loss0", "loss1", "loss2", "loss3"], ["G", "loss4", "loss5"]
    ]  # fmt: skip


def test_details_have_both_worths_direction_and_noise_of_each_loss_at_each_size():
    losses = [DECIDED[1], loss_row("undecided", 8, **NOT_DECIDED),
              loss_row("known", 8, direction=(None, 0.25, None)),
              loss_row("sum", 8, unbiased_direction=True),
              refused_loss("absent", 8, "no")]  # fmt: skip
    *_, table = efficiency_tables(efficiencies(*losses))
    words = "advantage divided by the group std, mean over the update's tokens"
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
    study = study_of(tmp_path, policy=policy)
    draw(tmp_path, {study: efficiencies(*losses)}, [])
    drawn = (tmp_path / "losses.svg").read_text()
    for text in (">decided<", "> _open<", "tiny: accuracy 0.50, n = 256", BARS_NOTE):
        assert text in drawn
    assert "Not decided or not measured: undecided and absent." in drawn


def test_bars_are_the_intervals_and_leave_the_picture_where_they_are_wide_or_have_no_end():
    rows = [loss_row("a", 4), loss_row("a", 8, (0.9, 0.8, None)), loss_row("a", 16, (0.9, 0.8, 50))]
    figure, axes = plt.subplots()
    efficiency_panel(axes, {"a": efficiencies(*rows)}, ["a"])
    (bars,) = axes.collections
    known, endless, wide = ([y for _, y in bar] for bar in bars.get_segments())
    assert known == [0.4, 0.5] and [endless[0], wide[0]] == [0.4, 0.4]
    assert min(endless[1], wide[1]) > axes.get_ylim()[1]
    plt.close(figure)


@pytest.mark.slow(minutes=0.5)
def test_a_study_says_and_shows_what_a_rollout_of_its_losses_is_worth(tmp_path):
    """As a command, with batches of two questions and groups that the pool does not have."""
    words = ("debug=mse", "objectives=[trl_dapo,verl_token_mean]", "objective=grpo_original",
             "baseline=group_std", "study.rollouts=16")  # fmt: skip
    code, said, errors = run("mse", *words, cwd=tmp_path)
    assert code == 0, errors
    (file,) = tmp_path.rglob("result.json")
    rows = json.loads(file.read_text())["losses"]
    names = ("grpo_original", "trl_dapo", "verl_token_mean")
    assert [row["loss"] for row in rows] == [name for name in names for _ in range(6)]
    measured = [(row["loss"], row["group_size"]) for row in rows if "noise" in row]
    assert measured == [
        *((names[0], size) for size in (2, 4, 8)), *((name, 8) for name in names[1:])
    ]  # fmt: skip
    assert all(("reason" in row) != ("noise" in row) for row in rows)
    assert load_run(file.parent).final_result["losses"] == rows
    page = (file.parent / "report.html").read_text()
    said = " ".join(said.split())
    for name in names:
        assert re.search(rf"relative efficiency of [^(]*\b{name}\b", said)
        assert name in page
    assert "Relative efficiency at n = 16" in said and "Losses at every" in page
    decided = any(row.get("efficiency_same_g") is not None for row in rows)
    assert (file.parent / "losses.svg").is_file() == decided
