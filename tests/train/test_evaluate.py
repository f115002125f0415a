"""Held-out accuracy, pass@k and mean reward: exact values, coverage, draws and ranks."""

from __future__ import annotations

import csv
import itertools
import json
import math

import numpy as np
import pytest
from commands import run
from simulated import on_ranks
from test_metrics import batch_of
from training_runs import config_of, fit

from grpo_ustat.estimators.intervals import (
    clustered_mean,
    clustered_wilson,
    matched_difference,
    wilson,
)
from grpo_ustat.estimators.ustatistic import pass_at_k
from grpo_ustat.rollout.local import Sampling, sample
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.tasks.base import summed_rewards
from grpo_ustat.train.context import TrainProgress
from grpo_ustat.train.evaluate import eval_row, held_out_gain, name_jointly, sample_eval
from grpo_ustat.train.setup import set_up

COUNT = 6


@pytest.mark.parametrize("k", [1, 2, 4, 6])
def test_pass_at_k_is_the_share_of_all_subsets(k):
    for right in range(COUNT + 1):
        outcomes = [1] * right + [0] * (COUNT - right)
        subsets = [max(chosen) for chosen in itertools.combinations(outcomes, k)]
        assert pass_at_k(np.array([right]), COUNT, k)[0] == pytest.approx(np.mean(subsets))


def test_pass_at_k_is_unbiased_where_the_plug_in_is_not():
    """Exact enumeration of 6 completions at p = 0.3."""
    p, right = 0.3, np.arange(COUNT + 1)
    chance = np.array([math.comb(COUNT, c) * p**c * (1 - p) ** (COUNT - c) for c in right])
    for k in (1, 2, 4):
        truth = 1 - (1 - p) ** k
        assert chance @ pass_at_k(right, COUNT, k) == pytest.approx(truth, abs=1e-12)
        if k > 1:
            assert chance @ (1 - (1 - right / COUNT) ** k) < truth - 0.01


def test_with_one_completion_a_question_the_interval_is_wilsons(rng):
    for values in (rng.random(40) < 0.3, np.zeros(25), np.ones(25)):
        one = values.astype(float)
        found = clustered_wilson(one, most=1)
        np.testing.assert_allclose(found, wilson(one.sum(), len(one)), atol=1e-12)


@pytest.mark.slow
def test_intervals_cover_over_questions():
    """Unequal questions, eight completions each; counted as independent they cover far less."""
    rng, size, hits = np.random.default_rng(4), 8, np.zeros(4)
    truth, both = 0.2, 0.2 * 0.8 / 1.3 + 0.04  # E p, E p^2 of Beta(0.06, 0.24)
    for _ in range(1500):
        right = rng.binomial(size, rng.beta(0.06, 0.24, size=60))
        found = clustered_wilson(right / size, most=size)
        naive = wilson(right.sum(), 60 * size)
        two = clustered_wilson(pass_at_k(right, size, 2), most=size // 2)
        equal = clustered_wilson(rng.binomial(size, 0.2, size=60) / size, most=size)
        cases = ((found, truth), (naive, truth), (two, 2 * truth - both), (equal, truth))
        hits += [interval.low <= value <= interval.high for interval, value in cases]
    coverage = hits / 1500
    print(coverage)
    assert (coverage[[0, 2, 3]] > 0.93).all() and (coverage[[0, 2, 3]] < 0.98).all()
    assert coverage[1] < 0.65


def test_a_row_worked_by_hand():
    """Two of three questions, four completions each."""
    batch = batch_of(
        [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]],
        ended_PG=np.arange(12).reshape(3, 4) > 2,
        answered_PG=np.arange(12).reshape(3, 4) > 0,
    )
    row = eval_row(7, "sampled", batch, 4)
    assert (
        (row["quantity"], row["mean_reward"]) == ("accuracy", 0.5)
        and row["n"] == 3
        and row["num_generations"] == 4
    )
    assert row["clipped_ratio"] == 0.25 and row["extraction_failure_ratio"] == 1 / 12
    assert row["pass@2"] == pytest.approx((5 / 6 + 0 + 1) / 3) and row["pass@4"] == 2 / 3
    assert (row["pass@4_low"], row["pass@4_high"]) == wilson(2, 3)[1:]
    greedy = eval_row(7, "greedy", batch_of([[1], [0]]), 4)
    assert list(greedy) == list(row) and greedy["pass@2"] is None
    assert (greedy["low"], greedy["high"]) == wilson(1, 2)[1:]


def evaluated(*rewards_by_step):
    """A run whose test completions got these rewards, [step, P, K], sampled."""
    progress = TrainProgress()
    for step, rewards_PK in enumerate(rewards_by_step):
        progress.evals.append(eval_row(step, "sampled", batch_of(rewards_PK), len(rewards_PK[0])))
        name_jointly(progress.evals)
        progress.rewards_last = np.mean(rewards_PK, axis=1).tolist()
        progress.rewards_first = progress.rewards_first or progress.rewards_last
    return progress


def test_a_graded_reward_shows_its_progress():
    """Worked by hand: rewards of questions that rise by .1, .2 and .6, none of them ever 1: mean
    .3, standard deviation sqrt(.07), t_2 = 4.303.
    """
    before, after = [[0.2, 0.2], [-0.5, -0.3], [0.0, 0.0]], [[0.3, 0.3], [-0.2, -0.2], [0.5, 0.7]]
    progress = evaluated(before, after)
    assert [row["quantity"] for row in progress.evals] == ["mean reward", "mean reward"]
    assert [row["mean_reward"] for row in progress.evals] == pytest.approx([-0.2 / 3, 0.7 / 3])
    half = 4.302653 * np.sqrt(0.07 / 3)
    assert held_out_gain(progress) == pytest.approx((0.3, 0.3 - half, 0.3 + half), abs=1e-6)
    first = progress.evals[0]
    assert (first["mean_reward"], first["low"], first["high"]) == clustered_mean(np.array(before))
    assert first["low"] < -0.5 and first["pass@2"] is None  # no question's reward bounds the mean


def test_rewards_of_minus_one_and_one_show_twice_the_progress_of_accuracy(rng):
    """The same answers, rewarded 0 and 1 or -1 and 1."""
    right = rng.integers(0, 2, size=(2, 40, 4))
    accuracy, signed = evaluated(*right), evaluated(*(2 * right - 1))
    for one, two in zip(accuracy.evals, signed.evals, strict=True):
        assert (one["quantity"], two["quantity"]) == ("accuracy", "mean reward")
        assert two["mean_reward"] == pytest.approx(2 * one["mean_reward"] - 1)
    gain = held_out_gain(accuracy)
    assert gain == matched_difference(*(right[i].mean(axis=1) for i in (1, 0)))
    assert held_out_gain(signed).estimate == pytest.approx(2 * gain.estimate)


def test_a_run_has_one_name_once_any_reward_is_graded():
    """Nothing but zeros at first, then a half: it was never an accuracy."""
    progress = evaluated([[0, 0], [0, 0]], [[0, 0], [0, 0.5]])
    assert {row["quantity"] for row in progress.evals} == {"mean reward"}
    assert all(row["pass@2"] is None for row in progress.evals)


SIGNED = """
def score(prompt, completion):
    last = completion.replace("####", " ").replace("=", " ").split()[-1:]
    return 1 if last == [prompt.answer] else -1
"""


@pytest.mark.slow
def test_a_graded_reward_is_named_wherever_a_run_is_shown(tmp_path):
    """Rewards of -1 and 1, all in one sweep: terminal, files, pages, model card and report."""
    rows = [{"question": f"{i + 3}+{i % 7}-2", "answer": i + 1 + i % 7} for i in range(40)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my.py").write_text(SIGNED)
    data = ("dataset=jsonl", "dataset.path=q.jsonl", "dataset.reward=my.py:score")
    small = ("dataset.study_size=4", "dataset.test_size=12", "budget.rollouts=32", "max_steps=2")
    code, out, err = run("train", "-m", "seed=0,1", "report.name=r", *data, *small, cwd=tmp_path)
    assert code == 0, err
    assert "mean reward" in out
    assert "accuracy" not in out + err
    home = tmp_path / "outputs/train"
    first = next(home.glob("*/seed-0"))
    result = json.loads((first / "result.json").read_text())
    assert result["quantity"] == "mean reward"
    rises = f"{result['evals'][0]['mean_reward']:.3f} to {result['final_mean_reward']:.3f}"
    assert rises in result["summary"]
    with (first / "eval.csv").open() as file:
        assert {row["quantity"] for row in csv.DictReader(file)} == {"mean reward"}
    texts = [(first / "report.html").read_text(), (first / "learning.svg").read_text()]
    texts += [next(first.glob("checkpoint-*/README.md")).read_text()]
    texts += [next(home.rglob("mean_reward.tex")).read_text()]
    for text in texts:
        assert "mean reward" in text and "accuracy" not in text
    assert not list(home.rglob("accuracy.*"))

    code, out, err = run("train", *data, *small, "baseline=maxrl", cwd=tmp_path)
    assert code == 2 and "Traceback" not in err
    assert "maxrl" in err and "-1" in err


@pytest.mark.slow
def test_every_decoding_has_its_rows(tmp_path):
    """Of greedy and four sampled completions; the first decoding is the run's accuracy."""
    asked = ("eval.decoding=[greedy,sampled]", "eval.num_generations=4", "max_steps=2")
    path = fit(tmp_path, *asked)
    rows = list(csv.DictReader((path / "eval.csv").open()))
    assert [(row["step"], row["decoding"]) for row in rows] == [
        ("0", "greedy"), ("0", "sampled"), ("2", "greedy"), ("2", "sampled"),
    ]  # fmt: skip
    run = set_up(config_of(*asked), RunFolder(tmp_path, config_of(*asked)))
    for row, greedy, count in ((rows[0], True, 1), (rows[1], False, 4)):
        sampling = Sampling.of(run.config.sampler_options, "eval", greedy=greedy)
        right_PK = summed_rewards(run.task, sample(run.policy, run.test_prompts, count, sampling))
        assert float(row["mean_reward"]) == right_PK.mean()
    solved = pass_at_k(right_PK.sum(axis=1), 4, 2).mean()
    assert float(rows[1]["pass@2"]) == pytest.approx(solved) and rows[0]["pass@2"] == ""
    result = json.loads((path / "result.json").read_text())
    assert result["final_mean_reward"] == float(rows[2]["mean_reward"])
    assert result["gain"] == pytest.approx(
        float(rows[2]["mean_reward"]) - float(rows[0]["mean_reward"]), abs=1e-12
    )
    assert "greedy" in result["summary"]


@pytest.mark.slow
def test_evaluations_at_two_steps_share_their_draws(tmp_path):
    """The same policy gives the same completions, so that a difference is the policy's."""
    config = config_of("eval.num_generations=2")
    run = set_up(config, RunFolder(tmp_path, config))
    one, two = (sample_eval(run, "sampled") for _ in range(2))
    np.testing.assert_array_equal(one.lengths_PG, two.lengths_PG)
    assert one.rollouts.texts_PG == two.rollouts.texts_PG
    assert one.rollouts.texts_PG[0][0] != one.rollouts.texts_PG[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 5])
def test_any_number_of_ranks_evaluates_the_same(tmp_path, monkeypatch, world):
    """Four questions on three ranks, unequally, and on five, of which one has none."""
    config = config_of("dataset.test_size=4", "eval.num_generations=2")
    run = set_up(config, RunFolder(tmp_path, config))
    alone = sample_eval(run, "sampled")
    for found in on_ranks(monkeypatch, run, world, lambda own: sample_eval(own, "sampled")):
        for name in ("rewards_PG", "lengths_PG", "ended_PG", "answered_PG", "prompt_lengths_P"):
            np.testing.assert_array_equal(getattr(found, name), getattr(alone, name), name)
        assert eval_row(0, "sampled", found, 2) == eval_row(0, "sampled", alone, 2)
