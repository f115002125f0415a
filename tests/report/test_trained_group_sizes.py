"""Run folders of a comparison of G: what is refused, in one line, and what is named."""

from __future__ import annotations

import shutil
from dataclasses import asdict

import pytest
from beside import ALIKE, CLOSE, WORSE, compare, study, sweep

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.report.aggregate import report_runs
from grpo_ustat.report.best_group_size import POLICY_KEYS
from grpo_ustat.runs.record import identity_keys

TOLD = {2: WORSE, 8: ALIKE, 32: CLOSE}


def refused(trained, measured):
    with pytest.raises(ConfigError) as caught:
        compare(trained, measured)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.slow
def test_report_with_and_without_a_study_of_the_policy(tmp_path, capsys):
    runs, measured = sweep(tmp_path / "runs", TOLD), study(tmp_path / "study")
    report_runs([*runs, *measured], tmp_path / "both", None)
    said = " ".join(capsys.readouterr().out.split())
    assert "8.0 [7.5, 8.5]" in said
    files = {file.name for file in (tmp_path / "both").iterdir()}
    assert files >= {"best_group_size.csv", "best_group_size_claims.tex"}
    warm = study(tmp_path / "warm", changes={"temperature": 0.7})
    report_runs([*runs, *warm], tmp_path / "both", None)
    said = " ".join(capsys.readouterr().out.split())
    assert "temperature is 1.0 in training and 0.7" in said
    assert not list((tmp_path / "both").glob("best_group_size*"))


@pytest.mark.slow(minutes=0.02)
def test_unfinished_runs_and_other_studies_do_not_count(tmp_path):
    measured = study(tmp_path / "study")
    begun = sweep(tmp_path / "begun", TOLD, done=False)
    assert "finished" in refused(begun, measured)
    runs = sweep(tmp_path / "runs", {size: found[:3] for size, found in TOLD.items()})
    sweep(tmp_path / "runs/later", {2: [0.3] * 4}, rollouts=32, done=False)
    for seed in range(3):
        shutil.rmtree(tmp_path / f"runs/later/G-2-n-32/seed-{seed}")
    other = study(tmp_path / "other", changes={"temperature": 0.7})
    assert {row["seeds"] for row in compare(runs, [*other, *measured]).rows} == {3}


@pytest.mark.slow(minutes=0.02)
def test_a_seed_with_a_missing_run_is_left_out_at_its_budget_alone(tmp_path):
    sweep(tmp_path / "runs", TOLD, rollouts=32)
    runs = sweep(tmp_path / "runs", TOLD, rollouts=64)
    shutil.rmtree(tmp_path / "runs/G-2-n-64/seed-3")
    found = compare(runs, study(tmp_path / "study"))
    assert {row["n"]: row["seeds"] for row in found.rows} == {32: 4, 64: 3}


def test_too_few_whole_seeds_are_refused(tmp_path):
    runs = sweep(tmp_path / "runs", TOLD)
    for seed in (0, 3):
        shutil.rmtree(tmp_path / f"runs/G-8-n-32/seed-{seed}")
    message = refused(runs, study(tmp_path / "study"))
    assert "n=32 has 2 seeds" in message and "[2, 8, 32]" in message and "3" in message


@pytest.mark.slow
def test_a_group_size_that_one_budget_lacks_is_missing_there(tmp_path):
    sweep(tmp_path / "runs", TOLD, rollouts=64)
    runs = sweep(tmp_path / "runs", {2: WORSE, 8: ALIKE}, rollouts=32)
    assert "n=32 has 0 seeds" in refused(runs, study(tmp_path / "study"))


SERIES = {
    "a learning rate": ({"learning_rate": 0.5}, "also in learning_rate"),
    "an optimizer": ({"optimizer.name": "sgd"}, "also in optimizer.name"),
}


@pytest.mark.parametrize("changes, message", SERIES.values(), ids=SERIES)
def test_runs_that_differ_in_more_are_refused(changes, message, tmp_path):
    sweep(tmp_path / "runs", {2: WORSE, 8: ALIKE})
    runs = sweep(tmp_path / "runs", {32: CLOSE}, changes=changes)
    assert message in refused(runs, study(tmp_path / "study"))


@pytest.mark.slow
def test_runs_of_one_group_size_or_another_baseline_are_refused(tmp_path):
    measured = study(tmp_path / "study")
    assert "G=[8]" in refused(sweep(tmp_path / "one", {8: ALIKE}), measured)
    other = sweep(tmp_path / "other", TOLD, changes={"baseline.name": "group_mean"})
    assert "baseline=group_mean" in refused(other, measured)


@pytest.mark.slow
def test_a_study_of_another_policy_is_refused(tmp_path):
    runs = sweep(tmp_path / "runs", TOLD)
    warm = study(tmp_path / "warm", changes={"temperature": 0.7})
    assert "temperature is 1.0 in training and 0.7" in refused(runs, warm)
    other = study(tmp_path / "other", changes={"dataset.seed": 7})
    assert "dataset.seed is 0 in training and 7" in refused(runs, other)


@pytest.mark.slow(minutes=0.02)
def test_studies_that_give_no_one_answer_are_refused(tmp_path):
    runs = sweep(tmp_path / "runs", TOLD)
    study(tmp_path / "two/a")
    both = study(tmp_path / "two/b", changes={"seed": 1})
    both = [str(tmp_path / "two")]
    assert "2 finished studies" in refused(runs, both)
    message = refused(runs, study(tmp_path / "open", ends=None))
    assert "G*" in message and "budget.pool_completions" in message


@pytest.mark.slow
def test_the_presets_that_are_compared_are_of_one_policy():
    """Their overlays, whose runs are compared with each other."""
    training, measuring = (
        identity_keys(asdict(compose_config(entry, [word])))
        for entry, word in (
            ("train", "experiment=best_group_size"),
            ("mse", "experiment=best_group_size_start"),
        )
    )
    asked = [key for key in training if key.startswith(POLICY_KEYS)]
    assert [training[key] for key in asked] == [measuring[key] for key in asked]
    assert training["model.name"] == "tiny_base" and training["optimizer.name"] == "sgd"
