"""Rollouts of earlier policies in several studies: order, table and sentence."""

from __future__ import annotations

import csv

import pytest
from folders import loss_row, studied

from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.losses import LOSSES, loss_panels
from grpo_ustat.measurements.off_policy import OFF_POLICY, answer, by_distance, joint_tables
from grpo_ustat.report.aggregate import report_runs
from grpo_ustat.report.collect import entries_in, read_runs

ERRORS = {("none", 2): 1.0, ("none", 4): 0.5}


def at(policy, kl, *efficiencies, written_by="tiny_base"):
    """Efficiency of rollouts of tiny_base at a later policy, of losses a, b ... at G = 8."""
    drift = {"kl": kl, "effective_tokens": 1 - kl, "effective_completions": 1 - 10 * kl}
    ends = {f"{key}{end}": x for key, x in drift.items() for end in ("_low", "_high")}
    rows = [
        loss_row(name, 8, efficiency) for name, efficiency in zip("ab", efficiencies, strict=False)
    ]
    return drift | ends | {
        "written_by": written_by, "policy": policy, "reference": "tiny_base", "question": "lag",
        "penalised": False, "losses": rows,
    }  # fmt: skip


def write(path):
    far = at("step-40", 0.04, (0.5, 0.4, 0.6), (None, 0.0, None))
    near = at("step-5", 0.005, (0.9, 0.8, 1.0), (1.2, 1.1, 1.3))
    for name, found in (("far", far), ("near", near)):
        changes = {"study.scored_by": found["policy"]}
        own = [loss_row("a", 8)]
        studied(path / name, "tiny_base", ERRORS, changes=changes, losses=own, off_policy=found)
    return list(map(Study, read_runs(entries_in([str(path)])).runs))


def test_studies_are_by_the_distance_of_the_policies(tmp_path):
    found = OFF_POLICY.of(write(tmp_path))
    assert [one.policy for one in by_distance(found).values()] == ["step-5", "step-40"]
    (table,) = joint_tables(found)
    rows = table.rows
    assert [row[3] for row in rows] == ["a", "b", "a", "b"]
    assert rows[0][:3] == [
        "tiny_base\nstep-5", "0.0050\n[0.0050, 0.0050]",
        "100 % [100 %, 100 %]\n95 % [95 %, 95 %]",
    ]  # fmt: skip
    assert rows[3][5] == "not decided"
    assert answer(found) == (
        "Relative efficiency of rollouts that tiny_base wrote: a 0.90 [0.80, 1.00] at step-5, "
        "0.50 [0.40, 0.60] at step-40; b 1.20 [1.10, 1.30] at step-5, not decided at step-40."
    )


def test_the_first_update_is_one_panel_whatever_the_lag(tmp_path):
    (panel,) = loss_panels(LOSSES.of(write(tmp_path)))
    assert list(panel.lines) == ["a"]


@pytest.mark.slow(minutes=0.1)
def test_the_report_has_a_table_and_all_numbers(tmp_path):
    write(tmp_path / "runs")
    report_runs([str(tmp_path / "runs")], tmp_path / "report", None)
    assert {p.name for p in (tmp_path / "report").glob("lag.*")} >= {
        "lag.csv",
        "lag.tex",
    }
    with (tmp_path / "report/lag.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["at"], row["loss"]) for row in rows] == [
        ("step-5", "a"), ("step-5", "b"), ("step-40", "a"), ("step-40", "b"),
    ]  # fmt: skip
    assert float(rows[2]["efficiency_same_g"]) == 0.5 and float(rows[2]["kl"]) == 0.04
    assert "that another policy wrote" in (tmp_path / "report/report.html").read_text()
