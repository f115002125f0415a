"""Curves over steps: means over seeds, only where all of them are."""

from __future__ import annotations

import json

import numpy as np
import pytest
from folders import completed
from matplotlib.axes import Axes

from grpo_ustat.estimators.intervals import ratio_interval
from grpo_ustat.pages.learning import (
    ERROR,
    GSTAR,
    Learning,
    draw_learning,
    learning_figure,
    learning_rows,
    notes,
    seed_rows,
)
from grpo_ustat.pages.tables import csv_text
from grpo_ustat.runs.result import Evaluation

HELD_OUT = "held-out accuracy"


def eval_row(step, mean, quantity="accuracy"):
    row = {"step": step, "quantity": quantity, "mean_reward": mean}
    return row | {"low": mean - 0.1, "high": mean + 0.1}


def metrics_row(step, reward):
    row = {"step": step, "reward": reward, "frac_reward_zero_std": 0.25}
    return row | {"completions/mean_length": 20.0, "completions/clipped_ratio": 0.0}


def of(rows, quantity):
    return [row for row in rows if row["quantity"] == quantity]


def test_means_over_seeds_stop_where_one_of_them_does():
    """Rewards 0.2 and 0.4 at step 1: mean 0.3, its standard error 0.1, t_1 = 12.7062."""
    first = Learning("G=4", [metrics_row(1, 0.2), metrics_row(2, 0.5)], [eval_row(0, 0.2)])
    second = Learning("G=4", [metrics_row(1, 0.4)], [eval_row(0, 0.3), eval_row(4, 0.9)])
    rows = learning_rows([first, second])
    (reward,), (accuracy,) = of(rows, "reward"), of(rows, HELD_OUT)
    assert (reward["step"], reward["mean"], reward["seeds"]) == (1, pytest.approx(0.3), 2)
    assert reward["high"] == pytest.approx(0.3 + 12.7062 * 0.1, abs=1e-4)
    assert (accuracy["step"], accuracy["mean"]) == (0, pytest.approx(0.25))


def test_of_long_runs_points_are_means_of_as_many_steps_in_every_run():
    """81 steps in blocks of 3: rewards 1, 2, 3 have mean 2, 4, 5, 6 have 5."""
    run = Learning("", [metrics_row(step, float(step)) for step in range(1, 82)], [])
    rows = of(learning_rows([run]), "reward")
    assert [(x["step"], x["mean"], x["steps"]) for x in rows[:2]] == [(3, 2.0, 3), (6, 5.0, 3)]
    assert len(rows) == 27


@pytest.mark.slow
def test_a_mean_reward_is_named_and_not_cut_off_at_zero(tmp_path, monkeypatch):
    """Rewards of -1 and 1: the band of -0.6 [-0.7, -0.5] is drawn as it is."""
    run = Learning("", [metrics_row(1, -0.6)], [eval_row(0, -0.6, "mean reward")])
    (row,) = of(learning_rows([run]), "held-out mean reward")
    assert (row["mean"], row["low"], row["high"]) == pytest.approx((-0.6, -0.7, -0.5))
    bands, labels = [], []
    draw = Axes.fill_between
    monkeypatch.setattr(
        Axes,
        "fill_between",
        lambda *args, **kw: bands.append([*args[2], *args[3]]) or draw(*args, **kw),
    )
    label = Axes.set_ylabel
    monkeypatch.setattr(
        Axes, "set_ylabel", lambda axes, name: labels.append(name) or label(axes, name)
    )
    learning_figure(tmp_path, "learning", [run])
    assert bands[0] == pytest.approx([-0.7, -0.5]) and labels[0] == "held-out mean reward"
    assert "accuracy" not in " ".join(notes([row])) and "held-out mean reward" in notes([row])[0]


def test_one_seed_has_its_own_interval_of_accuracy_and_no_other():
    run = Learning("", [metrics_row(step, 0.1 * step) for step in (1, 2)], [eval_row(2, 0.5)])
    rows = learning_rows([run])
    assert [(x["mean"], x["low"]) for x in of(rows, "reward")] == [(0.1, None), (0.2, None)]
    (accuracy,) = of(rows, HELD_OUT)
    assert (accuracy["low"], accuracy["high"]) == (0.4, 0.6)


def test_series_are_never_mixed_and_a_run_without_rows_hides_none():
    runs = [Learning("G=4", [metrics_row(1, 0.2)], []), Learning("G=8", [metrics_row(1, 0.6)], [])]
    rows = of(learning_rows([*runs, Learning("G=4", [], [])]), "reward")
    assert [(row["series"], row["mean"], row["seeds"]) for row in rows] == [
        ("G=4", 0.2, 1),
        ("G=8", 0.6, 1),
    ]


def monitor_row(step, c1, c3, gstar=5.0):
    row = {"step": step, "monitor/c1": c1, "monitor/c2": 0.0, "monitor/c3": c3}
    row |= {"monitor/gstar": gstar, "monitor/gstar_low": 4.0, "monitor/gstar_high": None}
    return row | {"monitor/mse": c1}


def test_the_best_group_size_of_several_seeds_is_that_of_their_mean_constants():
    """C1 1, 3, 2 and C3 16, 20, 18: 1 + sqrt(54/6) = 4; never the
    mean of the seeds' own.
    """
    constants = [(1.0, 16.0), (3.0, 20.0), (2.0, 18.0)]
    runs = [Learning("", [monitor_row(4, *one)], []) for one in constants]
    (row,) = of(learning_rows(runs), GSTAR)
    (error,) = of(learning_rows(runs), ERROR)
    c1, c3 = np.array(constants).T
    ratio = ratio_interval(18.0, 2.0, (54 - c3)[None] / 2, (6 - c1)[None] / 2)
    assert row["mean"] == pytest.approx(4)
    assert row["low"] == pytest.approx(1 + ratio.low**0.5) and row["seeds"] == 3
    assert error["mean"] == pytest.approx(2.0)


def test_one_step_has_the_intervals_of_its_own_and_what_is_not_decided_is_a_gap():
    rows = [monitor_row(1, 1.0, 16.0), monitor_row(3, -1.0, 2.0, gstar=None)]
    row, gap = of(learning_rows([Learning("", rows, [])]), GSTAR)
    assert (gap["step"], gap["mean"]) == (3, None)
    assert (row["step"], row["mean"], row["low"], row["high"]) == (1, 5.0, 4.0, None)


def test_every_seed_of_several_has_a_line():
    runs = [Learning("a", [metrics_row(1, 0.2), metrics_row(2, 0.4)], []) for _ in range(2)]
    runs.append(Learning("b", [metrics_row(1, 0.9)], []))
    lines = of(seed_rows(runs), "reward")
    assert [(x["series"], x["steps"], x["values"]) for x in lines] == [
        ("a", [1, 2], [0.2, 0.4])
    ] * 2


@pytest.mark.slow
def test_a_run_folder_is_drawn_as_far_as_it_goes_and_never_raises(tmp_path, capsys, every_format):
    """Without evaluations, with them, and where nothing can be written."""
    rows = [json.dumps(metrics_row(step, 0.1 * step)) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n" + '{"step": 4, "rew')
    draw_learning(tmp_path)
    before = (tmp_path / "learning.svg").read_text()
    assert "share of zero-variance groups" in before
    assert b"/Type3" not in (tmp_path / "learning.pdf").read_bytes()
    row = eval_row(0, 0.2) | {"split": "test", "decoding": "sampled"}
    (tmp_path / "eval.csv").write_text(csv_text([completed(Evaluation, row)]))
    draw_learning(tmp_path)
    assert (tmp_path / "learning.svg").read_text() != before and not capsys.readouterr().err
    draw_learning(tmp_path / "gone")
    assert "could not be drawn" in capsys.readouterr().err
