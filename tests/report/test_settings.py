"""What runs were swept over: the axis of their figure, and how settings are compared."""

from __future__ import annotations

import csv

import pytest
from folders import studied, trained

from grpo_ustat.pages.learning import learning_rows
from grpo_ustat.report import aggregate
from grpo_ustat.report.aggregate import report_runs
from grpo_ustat.report.settings import Axis, setting_labels, swept_axis
from grpo_ustat.runs.record import RunRecord, distinguishing_keys

NO_BASELINE = ("baseline.name", "none")


def runs_of(folder, *points):
    """Runs of (G, seed, changes)."""
    return [
        RunRecord(trained(folder / str(i), size, seed, {0: 0.2, 8: 0.3}, changes=changes))
        for i, (size, seed, changes) in enumerate(points)
    ]


def axis_of(runs):
    return swept_axis(runs, distinguishing_keys([run.keys for run in runs]))


def test_what_was_swept_is_the_axis(tmp_path):
    sizes = runs_of(tmp_path / "a", (16, 0, ()), (4, 0, ()), (4, 0, [NO_BASELINE]))
    assert axis_of(sizes) == Axis("group_size", (4, 16))
    baselines = runs_of(tmp_path / "b", (4, 0, [NO_BASELINE]), (4, 0, ()), (4, 1, ()))
    assert axis_of(baselines) == Axis("baseline.name", ("none", "leave_one_out"))
    rates = [(4, 0, [("learning_rate", rate)]) for rate in (1e-3, 1e-5)]
    rates = runs_of(tmp_path / "c", *rates, (4, 0, [NO_BASELINE, ("learning_rate", 1e-3)]))
    assert axis_of(rates) == Axis("learning_rate", (1e-5, 1e-3))
    budgets = runs_of(tmp_path / "d", (4, 0, ()), (4, 0, [("budget.rollouts", 64)]))
    assert axis_of(budgets) == Axis("budget.rollouts", (32, 64))
    assert axis_of(budgets[:1]) == Axis("group_size", (4,))


def test_other_questions_are_never_an_axis(tmp_path):
    runs = runs_of(tmp_path, (4, 0, ()), (4, 0, [("dataset.name", "gsm8k"), NO_BASELINE]))
    keys = ["dataset.name", "baseline.name"]
    axis = swept_axis(runs, keys)
    assert axis.key == "baseline.name"
    label = setting_labels(runs[1], keys, axis)
    assert (label["test"], label["setting"]) == ("dataset=gsm8k", "baseline=none")
    assert label["line"] == "n=32 G=4 dataset=gsm8k" and label["x"] == "none"


def test_axes_name_their_values():
    rates = Axis("learning_rate", (1e-5, 1e-3))
    assert rates.is_logarithmic and rates.text(1e-5) == "learning rate = 1e-05"
    assert not Axis("temperature", (0.7, 1.0)).is_logarithmic
    assert Axis("baseline.name", ("none", "opo")).position("opo") == 1.0


@pytest.fixture
def undrawn(monkeypatch):
    """Reports without pictures; the arguments of each are kept by name."""
    kept = {}

    def accuracy_figure(folder, name, *arguments):
        kept[name] = arguments

    def learning_figure(folder, name, runs):
        kept[name] = sorted({run.series for run in runs})
        return learning_rows(runs)

    monkeypatch.setattr(aggregate, "accuracy_figure", accuracy_figure)
    monkeypatch.setattr(aggregate, "learning_figure", learning_figure)
    monkeypatch.setattr(aggregate, "page", lambda report: None)
    monkeypatch.setattr(aggregate, "render", lambda page: "")
    return kept


def test_a_sweep_over_baselines_is_compared(tmp_path, undrawn, capsys):
    """Paired on three seeds: none is less by 0.1, 0.1 and 0.11."""
    for seed in range(3):
        for name in ("none", "leave_one_out"):
            less = 0.1 + 0.01 * (seed == 2) if name == "none" else 0.0
            final = {0: 0.2, 8: 0.6 + 0.1 * seed - less}
            changes = [("baseline.name", name)]
            trained(tmp_path / f"runs/{name}/{seed}", 4, seed, final, changes=changes)
    report_runs([str(tmp_path / "runs")], tmp_path / "joint", None)
    printed = " ".join(capsys.readouterr().out.split())
    answer = printed[printed.index("n=32 G=4, step 8: ") :]
    assert answer.index("baseline=leave_one_out") < answer.index("baseline=none.")
    with (tmp_path / "joint/settings.csv").open() as file:
        less, largest = sorted(csv.DictReader(file), key=lambda row: row["mean_reward"])
    assert float(less["difference"]) == pytest.approx(-0.31 / 3)
    assert (less["distinct"], largest["best"]) == ("True", "True")
    assert not (tmp_path / "joint/budget.csv").exists()
    assert undrawn["learning"] == ["baseline=leave_one_out", "baseline=none"]
    assert undrawn["accuracy"][2].key == "baseline.name"


def test_where_nothing_differs_nothing_is_best(tmp_path, undrawn, capsys):
    for seed in range(3):
        for name in ("none", "leave_one_out"):
            sign = 1 if name == "none" else -1
            final = {0: 0.2, 8: 0.5 + 0.02 * sign * (-1) ** seed}
            changes = [("baseline.name", name)]
            trained(tmp_path / f"runs/{name}/{seed}", 4, seed, final, changes=changes)
    report_runs([str(tmp_path / "runs")], tmp_path / "joint", None)
    printed = " ".join(capsys.readouterr().out.split())
    assert "does not differ significantly" in printed
    assert "largest at" not in printed and "*" not in printed.split("The means at")[0]


def test_of_several_sizes_and_settings_each_has_a_line_of_learning(tmp_path, undrawn):
    for size in (4, 8):
        for name in ("none", "leave_one_out"):
            changes = [("baseline.name", name)]
            trained(tmp_path / f"runs/{name}/{size}", size, 0, {0: 0.2, 8: 0.5}, changes=changes)
    trained(tmp_path / "runs/64", 8, 0, {0: 0.2, 8: 0.5}, rollouts=64)
    report_runs([str(tmp_path / "runs")], tmp_path / "joint", None)
    names = [f"G={size} baseline={name}" for size in (4, 8) for name in ("leave_one_out", "none")]
    assert undrawn["learning-n=32"] == names and undrawn["learning-n=64"] == ["G=8"]


@pytest.mark.slow
def test_the_measured_group_size_is_that_of_the_same_policy(tmp_path, undrawn):
    for size in (4, 8):
        trained(tmp_path / f"runs/{size}", size, 0, {0: 0.2, 8: 0.5})
    config = RunRecord(tmp_path / "runs/4").config
    errors = {("none", 2): 1.0, ("none", 4): 0.5}
    same = {f"{key}.name": config[key]["name"] for key in ("model", "prompt", "dataset")}
    studied(tmp_path / "runs/other", "another", errors)
    report_runs([str(tmp_path / "runs")], tmp_path / "joint", None)
    assert undrawn["accuracy"][-1] is None
    studied(tmp_path / "runs/same", config["model"]["name"], errors, changes=same.items())
    report_runs([str(tmp_path / "runs")], tmp_path / "joint", None)
    assert undrawn["accuracy"][-1] == (2.0, 2.0, 2.0)
