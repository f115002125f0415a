"""Losses of several studies in one report: panels of a pool, the table, the figure, a sentence."""

from __future__ import annotations

import csv
import re

import pytest
from folders import loss_row, refused_loss, studied

from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.loss_efficiencies import WORSE_SIZE_NOTE
from grpo_ustat.measurements.losses import LOSSES, answer, joint_tables, loss_panels
from grpo_ustat.report.aggregate import report_runs
from grpo_ustat.report.collect import entries_in, read_runs

ERRORS = {("none", 2): 1.0, ("none", 4): 0.5}
UNDECIDED = {"efficiency_same_g": (None, 0.0, None), "direction": (None, 0.0, None)}
OF_A = [loss_row("a", 4, may_be_best=True), loss_row("a", 8)]
OF_B = [loss_row("b", 4, (1.2, 1.1, 1.3)), loss_row("b", 8, (1.3, 1.2, 1.4))]


def of_sweep(path, **studies):
    """Losses of a sweep over `objective`, by the folder's name: model, objective and losses."""
    for name, (model, objective, losses) in studies.items():
        changes = {"objective.name": objective}
        studied(path / name, model, ERRORS, changes=changes, losses=losses)
    return measured_in(path)


def measured_in(path):
    """Losses of all studies of a folder."""
    return LOSSES.of(map(Study, read_runs(entries_in([str(path)])).runs))


def test_studies_that_differ_in_the_loss_alone_are_one_panel(tmp_path):
    """A loss that both measured, with sums in another order, is one line."""
    again = [row | {"efficiency_same_g": row["efficiency_same_g"] * (1 + 1e-9)} for row in OF_A]
    runs = of_sweep(tmp_path, x=("tiny", "grpo", OF_A), y=("tiny", "dapo", [*OF_B, *again]),
                    z=("tiny_direct", "grpo", OF_A))  # fmt: skip
    panels = loss_panels(runs)
    assert [panel.study.run.policy for panel in panels] == ["tiny, bare", "tiny_direct, bare"]
    assert [list(panel.lines) for panel in panels] == [["a", "b"], ["a"]]
    assert panels[0].lines["b"][0].run.config["objective"]["name"] == "dapo"


def test_losses_of_one_name_that_differ_are_named_by_what_differs(tmp_path):
    for baseline, rows in (
        ("group_std", OF_A),
        ("opo", [row | {"baseline": "opo"} for row in OF_A]),
    ):
        studied(
            tmp_path / baseline, "tiny", ERRORS, changes={"baseline.name": baseline}, losses=rows
        )
    (panel,) = loss_panels(measured_in(tmp_path))
    assert list(panel.lines) == ["a baseline=group_std", "a baseline=opo"]


def test_a_pool_without_a_measured_loss_has_no_panel(tmp_path):
    refused = [refused_loss("a", 4, "too few")]
    found = of_sweep(tmp_path, x=("tiny", "grpo", refused), y=("t", "grpo", ()))
    assert len(found) == 1 and loss_panels(found) == joint_tables(found) == []


def test_the_table_has_a_row_per_policy_loss_and_size(tmp_path):
    losses = [*OF_A, loss_row("a", 16, may_be_best=False), loss_row("b", 8, **UNDECIDED)]
    losses.append(refused_loss("b", 16, "too few"))
    (table,) = joint_tables(of_sweep(tmp_path, x=("tiny", "grpo", losses)))
    policy, numbers = "tiny, bare\narithmetic\nn = 256", "0.900\n[0.800, 0.950]"
    efficiencies, noise = ("0.90\n[0.80, 1.00]", "0.45\n[0.40, 0.50]"), "0.80\n[0.70, 0.90]"
    assert table.rows == [
        [policy, "a", "4", *efficiencies, numbers, noise],
        [policy, "a", "8", *efficiencies, numbers, noise],
        [policy, "a", "16", efficiencies[0], "0.45*\n[0.40, 0.50]", numbers, noise],
        [policy, "b", "8", "not decided", "not decided", "not known", noise],
    ]
    assert [row["group_size"] for row in table.data] == [4, 8, 16, 8, 16]
    assert {"x: Not measured at G = 16: too few.", WORSE_SIZE_NOTE} < set(table.notes)
    (table,) = joint_tables(of_sweep(tmp_path / "alike", x=("tiny", "grpo", OF_A)))
    assert WORSE_SIZE_NOTE not in table.notes


SENTENCES = {
    "several": (
        {"x": ("tiny", "grpo", OF_A), "y": ("tiny", "dapo", [*OF_B, loss_row("c", 8, **UNDECIDED)]),
         "z": ("tiny_direct", "grpo", OF_A[:1])},
        "At G = 4 or 8 the relative efficiency against the unbiased gradient at the same G is 0.90 "
        "[0.80, 1.00] (a on tiny, bare) to 1.30 [1.20, 1.40] (b on tiny, bare). 1 of 4 "
        "efficiencies are not decided.",
    ),
    "one": (
        {"x": ("tiny", "grpo", OF_A)},
        "At G = 8 the relative efficiency against the unbiased gradient at the same G is 0.90 "
        "[0.80, 1.00] (a).",
    ),
    "none": (
        {"x": ("tiny", "grpo", [loss_row("c", 8, **UNDECIDED), loss_row("d", 8, **UNDECIDED)])},
        "At G = 8 the relative efficiency of c or d is not decided.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("studies, sentence", SENTENCES.values(), ids=SENTENCES)
def test_one_sentence_is_of_all_losses(studies, sentence, tmp_path):
    assert answer(of_sweep(tmp_path, **studies)) == sentence


@pytest.mark.slow
def test_a_report_of_a_sweep_over_losses(tmp_path, capsys):
    """Errors of a pool once, its losses in one panel; without losses nothing is left of them."""
    of_sweep(tmp_path / "runs", x=("tiny", "grpo", OF_A), y=("tiny", "dapo", OF_B))
    studied(tmp_path / "plain", "tiny", ERRORS)
    home = tmp_path / "report"
    report_runs([str(tmp_path / "runs")], home, None)
    said = capsys.readouterr().out
    assert said.count("At G = 8 the relative efficiency against") == 1
    with (home / "losses.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["loss"], row["group_size"]) for row in rows] == [
        (run, loss, size) for run, loss in (("x", "a"), ("y", "b")) for size in ("4", "8")
    ]
    with (home / "mse.csv").open() as file:
        assert [row["run"] for row in csv.DictReader(file)] == ["x", "x"]
    drawn = (home / "losses.svg").read_text()
    assert len(re.findall(">tiny, bare<", drawn)) == 1 and ">a<" in drawn and ">b<" in drawn
    assert "Relative efficiency of each loss" in (home / "report.html").read_text()
    report_runs([str(tmp_path / "plain")], home, None)
    assert "rollout of a loss" not in capsys.readouterr().out
    assert not list(home.glob("losses.*"))
