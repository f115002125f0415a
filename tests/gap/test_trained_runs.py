"""Run folders of a comparison of G: what is refused, in one line, and what is named."""

from __future__ import annotations

import shutil
from dataclasses import asdict

import pytest
from beside import ALIKE, CLOSE, WORSE, study, sweep

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.gap.best_group_size import best_group_size
from grpo_ustat.gap.trained_runs import POLICY_KEYS, STUDY, TRAIN, trained_runs
from grpo_ustat.runs.record import identity_keys

TOLD = {2: WORSE, 8: ALIKE, 32: CLOSE}


def refused(trained, measured):
    with pytest.raises(ConfigError) as caught:
        best_group_size(trained, measured)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.slow
def test_without_runs_the_command_that_makes_them_is_named(tmp_path):
    nothing, runs = [str(tmp_path / "nothing")], sweep(tmp_path / "runs", TOLD)
    measured = study(tmp_path / "study")
    assert refused(nothing, measured).endswith(f"holds no run: {TRAIN}")
    assert refused(measured, measured).endswith(f"holds no finished training run: {TRAIN}")
    assert refused(runs, nothing).endswith(f"holds no run: {STUDY}")
    assert refused(runs, runs).endswith(f"holds 0 finished studies, one is needed: {STUDY}")
    begun = sweep(tmp_path / "begun", TOLD, done=False)
    assert refused(begun, measured).endswith(f"holds no finished training run: {TRAIN}")


def test_a_missing_run_is_named_and_its_seed_left_out_at_its_budget_alone(tmp_path):
    sweep(tmp_path / "runs", TOLD, rollouts=32)
    runs = sweep(tmp_path / "runs", TOLD, rollouts=64)
    shutil.rmtree(tmp_path / "runs/G-2-n-64/seed-3")
    found = best_group_size(runs, study(tmp_path / "study"))
    assert {row["n"]: row["seeds"] for row in found.rows} == {32: 4, 64: 3}
    assert any("n=64 G=2 seed=3" in note for note in found.notes)


def test_an_unfinished_run_is_named_as_it_is(tmp_path):
    runs = sweep(tmp_path / "runs", {size: found[:3] for size, found in TOLD.items()})
    sweep(tmp_path / "runs/later", {2: [0.3] * 4}, rollouts=32, done=False)
    for seed in range(3):
        shutil.rmtree(tmp_path / f"runs/later/G-2-n-32/seed-{seed}")
    notes = best_group_size(runs, study(tmp_path / "study")).notes
    assert any(note.startswith("unfinished:") and "stopped" in note for note in notes)


def test_too_few_whole_seeds_are_refused_with_what_is_missing(tmp_path):
    runs = sweep(tmp_path / "runs", TOLD)
    for seed in (0, 3):
        shutil.rmtree(tmp_path / f"runs/G-8-n-32/seed-{seed}")
    message = refused(runs, study(tmp_path / "study"))
    assert "n=32 has 2 seeds with every G of [2, 8, 32], 3 are needed" in message
    assert "missing: n=32 G=8 seed=0, n=32 G=8 seed=3" in message and TRAIN in message


@pytest.mark.slow
def test_a_group_size_that_one_budget_lacks_is_missing_there(tmp_path):
    sweep(tmp_path / "runs", TOLD, rollouts=64)
    runs = sweep(tmp_path / "runs", {2: WORSE, 8: ALIKE}, rollouts=32)
    trained = trained_runs(runs)
    assert trained.missing == [(32, 32, seed) for seed in range(4)]
    assert trained.seeds(64) == [0, 1, 2, 3]
    assert "n=32 has 0 seeds" in refused(runs, study(tmp_path / "study"))


@pytest.mark.slow
def test_many_missing_runs_are_named_in_part(tmp_path):
    runs = sweep(tmp_path / "runs", {2: ALIKE * 5, 8: ALIKE[:2]})
    assert "G=8 seed=9 and 10 more" in refused(runs, study(tmp_path / "study"))


SERIES = {
    "a learning rate": ({"learning_rate": 0.5}, "differ in learning_rate too"),
    "an optimizer": ({"optimizer.name": "sgd"}, "differ in optimizer.name too"),
}


@pytest.mark.parametrize("changes, message", SERIES.values(), ids=SERIES)
def test_runs_that_differ_in_more_are_refused(changes, message, tmp_path):
    sweep(tmp_path / "runs", {2: WORSE, 8: ALIKE})
    runs = sweep(tmp_path / "runs", {32: CLOSE}, changes=changes)
    assert message in refused(runs, study(tmp_path / "study"))


@pytest.mark.slow
def test_runs_of_one_group_size_or_another_baseline_are_refused(tmp_path):
    measured = study(tmp_path / "study")
    assert "G=[8] alone" in refused(sweep(tmp_path / "one", {8: ALIKE}), measured)
    other = sweep(tmp_path / "other", TOLD, changes={"baseline.name": "group_mean"})
    assert "baseline=group_mean: G* is that of leave_one_out" in refused(other, measured)


@pytest.mark.slow
def test_a_study_of_another_policy_is_refused(tmp_path):
    runs = sweep(tmp_path / "runs", TOLD)
    warm = study(tmp_path / "warm", changes={"temperature": 0.7})
    assert "temperature is 1.0 in training and 0.7 in the study" in refused(runs, warm)
    other = study(tmp_path / "other", changes={"dataset.seed": 7})
    assert "dataset.seed is 0 in training and 7 in the study" in refused(runs, other)


def test_studies_that_give_no_one_answer_are_refused(tmp_path):
    runs = sweep(tmp_path / "runs", TOLD)
    study(tmp_path / "two/a")
    both = study(tmp_path / "two/b", changes={"seed": 1})
    both = [str(tmp_path / "two")]
    assert "holds 2 finished studies, one is needed" in refused(runs, both)
    message = refused(runs, study(tmp_path / "open", ends=None))
    assert "has no G* with an interval" in message and "budget.pool_completions" in message


@pytest.mark.slow
def test_the_commands_that_are_named_are_of_one_policy():
    """Their overlays, whose runs are compared with each other."""
    training, measuring = (
        identity_keys(asdict(compose_config(entry, [command.split()[-1]])))
        for entry, command in (("train", TRAIN), ("mse", STUDY))
    )
    asked = [key for key in training if key.startswith(POLICY_KEYS)]
    assert [training[key] for key in asked] == [measuring[key] for key in asked]
    assert training["model.name"] == "tiny_base" and training["optimizer.name"] == "sgd"
    assert measuring["study.interval"] == "questions"
