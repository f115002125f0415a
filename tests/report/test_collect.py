"""Which runs a report finds, and what it says of those that it cannot show."""

from __future__ import annotations

import json
import shutil

import pytest
from folders import studied, trained

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.report.accuracy_answer import missing_cells
from grpo_ustat.report.collect import entries_in, read_runs
from grpo_ustat.runs.record import distinguishing_keys, key_label

ACCURACIES = {0: 0.2, 4: 0.3, 8: 0.4}


def found(*patterns):
    return read_runs(entries_in([str(pattern) for pattern in patterns]))


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("none", "matches nothing in"),
        ("a,b", r"use runs=\[.*a,b\] for several patterns"),
        ("a.log", "matches a file"),
        ("empty", "contains no run"),
    ],
)
def test_patterns_without_a_run_are_one_line(pattern, message, tmp_path):
    (tmp_path / "a.log").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=message) as refused:
        entries_in([str(tmp_path / pattern)])
    assert "\n" not in str(refused.value)


def test_runs_are_found_below_any_pattern_once_and_in_the_order_of_their_numbers(tmp_path):
    for size in (16, 4, 8):
        trained(tmp_path / f"train/G-{size}/seed-0", size, 0, ACCURACIES)
    patterns = [str(tmp_path / "train"), str(tmp_path / "*" / "G-*")]
    labels = [entry.label for entry in entries_in(patterns)]
    assert labels == ["G-4/seed-0", "G-8/seed-0", "G-16/seed-0"]


def test_every_folder_is_shown_or_named(tmp_path):
    """A finished run, one killed at step 4, a study, and seven folders that are not whole."""
    whole = trained(tmp_path / "whole", 4, 0, ACCURACIES)
    studied(tmp_path / "study", "tiny", {("none", 2): 1.0})
    trained(tmp_path / "killed", 8, 0, {0: 0.2, 4: 0.3}, done=False)
    torn = trained(tmp_path / "torn", 16, 0, ACCURACIES)
    (torn / "result.json").write_text('{"final')
    shutil.copytree(whole, tmp_path / "whole-again")
    lost = trained(tmp_path / "lost", 4, 1, ACCURACIES)
    (lost / ".hydra/config.yaml").unlink()
    (trained(tmp_path / "garbled", 4, 2, ACCURACIES) / ".hydra/config.yaml").write_text("x: [")
    (trained(tmp_path / "foreign", 4, 3, ACCURACIES) / ".hydra/config.yaml").write_text("lr: 1")
    old = studied(tmp_path / "old", "tiny_base", {("none", 4): 1.0}) / "result.json"
    old.write_text(old.read_text().replace('"scaling"', '"law"'))
    got = found(tmp_path)
    states = {run.label: run.state.name for run in got.runs}
    assert states == {
        "killed": "stopped",
        "study": "done",
        "torn": "stopped",
        "whole": "done",
    }
    assert {line.split(":")[0] for line in got.damaged} == {"lost", "garbled", "foreign", "old"}
    (twin,) = got.twins
    assert twin.startswith("whole-again: ") and " whole," in twin
    by_label = {run.label: run for run in got.runs}
    assert "step 4 of 8 (killed)" in by_label["killed"].unfinished
    assert [row["mean_reward"] for row in by_label["killed"].evals] == [0.2, 0.3]
    assert any("result.json" in note for note in by_label["torn"].notes)
    assert any(line.startswith("old: scaling ") for line in got.damaged)
    assert [row["mean_reward"] for row in by_label["torn"].evals] == [0.2, 0.3, 0.4]


def test_a_twin_that_went_further_is_the_one_kept(tmp_path):
    trained(tmp_path / "a", 4, 0, {0: 0.2, 4: 0.3}, done=False)
    trained(tmp_path / "b", 4, 0, ACCURACIES)
    got = found(tmp_path)
    assert [run.label for run in got.runs] == ["b"] and got.twins[0].startswith("a: the same run")


def test_rows_of_eval_csv_that_are_damaged_are_named(tmp_path):
    folder = trained(tmp_path / "run", 4, 0, {0: 0.2, 4: 0.3}, done=False)
    text = (folder / "eval.csv").read_text().replace("0.3,", "what,")
    (folder / "eval.csv").write_text(text)
    (run,) = found(tmp_path).runs
    assert [row["step"] for row in run.evals] == [0] and "eval.csv" in run.notes[0]


def test_runs_that_differ_in_more_than_swept_keys_are_of_other_series(tmp_path):
    """Operational keys split nothing; what makes another run does, by the fewest keys."""
    trained(tmp_path / "a", 4, 0, ACCURACIES)
    trained(tmp_path / "b", 8, 1, ACCURACIES, rollouts=64, changes={"micro_batch_tokens": 9})
    faster = {"learning_rate": 1.0}
    oracle = {"baseline.name": "oracle", "baseline.options": {"x": 1}}
    trained(tmp_path / "c", 4, 0, ACCURACIES, changes=faster | oracle)
    trained(tmp_path / "d", 4, 0, ACCURACIES, changes=faster)
    runs = found(tmp_path).runs
    asked = distinguishing_keys([run.keys for run in runs])
    assert asked == ["baseline.name", "learning_rate"]
    labels = [key_label(run.keys, asked) for run in runs]
    assert labels == [
        "baseline=leave_one_out learning_rate=0.0001",
        "baseline=leave_one_out learning_rate=0.0001",
        "baseline=oracle learning_rate=1.0",
        "baseline=leave_one_out learning_rate=1.0",
    ]


def test_other_weights_under_one_name_are_another_series(tmp_path):
    trained(tmp_path / "a", 4, 0, ACCURACIES)
    other = trained(tmp_path / "b", 4, 1, ACCURACIES)
    (other / "code.json").write_text(json.dumps({"commit": None, "weights": "other"}))
    assert distinguishing_keys([run.keys for run in found(tmp_path).runs]) == ["weights"]


def test_cells_without_a_run_are_listed(tmp_path):
    for size, rollouts, seed in ((4, 32, 0), (4, 32, 1), (8, 32, 0), (4, 64, 1)):
        trained(tmp_path / f"{size}-{rollouts}-{seed}", size, seed, ACCURACIES, rollouts=rollouts)
    assert missing_cells(found(tmp_path).runs, []) == [
        "missing: n=32 G=8: no run of seed 1",
        "missing: n=64 G=4: no run of seed 0",
        "missing: n=64 G=8: no run of seed 0, 1",
    ]


def test_studies_of_two_files_of_rollouts_are_two_studies(tmp_path):
    """Of one configuration but for the file, named by it; a copy of one is a twin of it."""
    for name, digest in (("a", "1" * 12), ("b", "2" * 12), ("copy", "1" * 12)):
        place = "elsewhere/a" if name == "copy" else name
        changes = {"pool": f"{place}.parquet"}
        folder = studied(tmp_path / name, "x", {("none", 2): 1.0}, changes=changes)
        code = json.loads((folder / "code.json").read_text())
        (folder / "code.json").write_text(json.dumps(code | {"data": digest}))
    got = found(tmp_path)
    assert [run.label for run in got.runs] == ["a", "b"]
    assert [line.split(":")[0] for line in got.twins] == ["copy"]
    assert [(run.policy, run.dataset) for run in got.runs] == [
        ("x", "a.parquet"),
        ("x", "b.parquet"),
    ]
