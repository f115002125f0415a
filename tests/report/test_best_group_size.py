"""Trained group sizes beside the predicted one: numbers by hand, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import asdict

import pytest
from beside import ALIKE, CLOSE, GAIN, POLICY, WORSE, compare, study, sweep
from folders import trained

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


def test_means_differences_and_errors_are_those_worked_by_hand(tmp_path):
    """G = 8: mean 0.53, less half the gain of the last evaluation; s = 0.025820, t_3 = 3.182446.
    G = 2: -0.20 -0.16 -0.20 -0.16, s = 0.023094; two differences at 97.5 %, t_3 = 4.176535.
    C1, C2, C3 = 1, 10, 49: 2 + 10 + 49 = 61, 8 + 10 + 7 = 25, 32 + 10 + 49/31.
    """
    table, _ = compare(sweep(tmp_path / "runs", TOLD), study(tmp_path / "study"))
    two, eight, thirty_two = table.data
    half = 3.182446 * 0.0258199 / 2
    mean = 0.53 - GAIN / 2
    assert eight["mean_reward"] == pytest.approx(mean) and eight["best"]
    assert (eight["low"], eight["high"]) == pytest.approx((mean - half, mean + half), abs=1e-6)
    assert two["difference"] == pytest.approx(-0.18)
    assert two["difference_high"] == pytest.approx(-0.18 + 4.176535 * 0.0230940 / 2, abs=1e-6)
    assert two["distinct"] and not thirty_two["distinct"]
    assert thirty_two["difference"] == pytest.approx(-0.02)
    assert two["predicted_n_mse"] == pytest.approx(61)
    assert two["predicted_error_ratio"] == pytest.approx(61 / 25)
    assert eight["predicted_error_ratio"] == 1
    assert thirty_two["predicted_n_mse"] == pytest.approx(42 + 49 / 31)


def test_the_mean_of_the_evaluations_counts_and_the_last_one_does_not(tmp_path):
    """At the end both are alike, before it G = 2 is worse by 0.2: the mean differs by 0.1."""
    for size, before in ((2, 0.2), (8, 0.4)):
        for seed in range(4):
            evals = {0: 0.1, 4: before + 0.01 * seed, 8: 0.5 + 0.01 * seed}
            folder = tmp_path / f"runs/G-{size}/seed-{seed}"
            trained(folder, size, seed, evals, changes=POLICY)
    table, answer = compare([str(tmp_path / "runs")], study(tmp_path / "study"))
    assert table.data[0]["difference"] == pytest.approx(-0.1)
    assert "largest at G = 8 (not significantly less: no other G; significantly less: 2)" in answer


@pytest.mark.slow
def test_report_with_a_study_of_another_policy(tmp_path, capsys):
    """The table of an earlier report goes. tests/test_wording.py has a report with the table."""
    runs, (place,) = sweep(tmp_path / "runs", TOLD), study(tmp_path / "warm")
    report_runs([*runs, place], tmp_path / "both", None)
    assert (tmp_path / "both/best_group_size.csv").is_file()
    shutil.rmtree(place)
    study(tmp_path / "warm", changes={"temperature": 0.7})
    report_runs([*runs, place], tmp_path / "both", None)
    said = " ".join(capsys.readouterr().out.split())
    assert "temperature is 1.0 in training and 0.7" in said
    assert not list((tmp_path / "both").glob("best_group_size*"))


@pytest.mark.slow(minutes=0.02)
def test_runs_that_do_not_count(tmp_path):
    """Unfinished runs, studies of other policies, and at one n a seed with a missing run."""
    measured = study(tmp_path / "study") + study(tmp_path / "other", changes={"temperature": 0.7})
    assert "finished" in refused(sweep(tmp_path / "begun", TOLD, done=False), measured)
    sweep(tmp_path / "runs", TOLD, rollouts=32)
    runs = sweep(tmp_path / "runs", TOLD, rollouts=64)
    sweep(tmp_path / "runs/later", {2: [0.3] * 5}, rollouts=32, done=False)
    for seed in range(4):
        shutil.rmtree(tmp_path / f"runs/later/G-2-n-32/seed-{seed}")
    shutil.rmtree(tmp_path / "runs/G-2-n-64/seed-3")
    table, _ = compare(runs, measured)
    assert {row["n"]: row["seeds"] for row in table.data} == {32: 4, 64: 3}


def test_too_few_seeds_are_refused(tmp_path):
    runs = sweep(tmp_path / "runs", TOLD)
    for seed in (0, 3):
        shutil.rmtree(tmp_path / f"runs/G-8-n-32/seed-{seed}")
    message = refused(runs, study(tmp_path / "study"))
    assert "n=32 has 2 seeds" in message and "[2, 8, 32]" in message and "3" in message


@pytest.mark.parametrize("changes, sizes, message", [
    ({"learning_rate": 0.5}, {32: CLOSE}, "also in learning_rate"),
    ({}, {}, "G=[8]"),
])  # fmt: skip
def test_runs_that_cannot_be_compared_are_refused(changes, sizes, message, tmp_path):
    sweep(tmp_path / "runs", {8: ALIKE})
    runs = sweep(tmp_path / "runs", sizes, changes=changes)
    assert message in refused(runs, study(tmp_path / "study"))


@pytest.mark.slow
def test_runs_of_another_baseline_are_refused(tmp_path):
    other = sweep(tmp_path / "other", TOLD, changes={"baseline.name": "group_mean"})
    assert "baseline=group_mean" in refused(other, study(tmp_path / "study"))


@pytest.mark.slow(minutes=0.02)
def test_studies_that_give_no_one_answer_are_refused(tmp_path):
    runs = sweep(tmp_path / "runs", TOLD)
    study(tmp_path / "two/a")
    study(tmp_path / "two/b", changes={"seed": 1})
    assert "2 finished studies" in refused(runs, [str(tmp_path / "two")])
    message = refused(runs, study(tmp_path / "open", ends=None))
    assert "G*" in message and "budget.pool_completions" in message
    other = study(tmp_path / "other", changes={"dataset.seed": 7})
    assert "dataset.seed is 0 in training and 7" in refused(runs, other)


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
