"""The embedded policies as shipped: how often they are right, and that training improves one."""

from __future__ import annotations

import json

import pytest
from commands import compose, run
from slow_cases import nightly_but

from grpo_ustat.estimators.intervals import clustered_mean
from grpo_ustat.policy.configured import configured_policy, configured_task
from grpo_ustat.policy.loading import load_policy
from grpo_ustat.rollout.local import Sampling, sample
from grpo_ustat.tasks.base import summed_rewards

BANDS = {"tiny_base": (0.2, 0.4), "tiny": (0.6, 0.85), "tiny_direct": (0.6, 0.85)}


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but(["tiny_base"], BANDS))
def test_accuracy_on_the_study_questions(name):
    """At temperature 1, 3 completions of each of the 500 questions."""
    config = compose("mse", f"model={name}")
    policy, task = (
        configured_policy(config.policy_options),
        configured_task(config.task_options, config.model),
    )
    rollouts = sample(
        policy, task.prompts("study"), 3, Sampling.of(config.sampler_options, "accuracy")
    )
    accuracy = clustered_mean(summed_rewards(task, rollouts))
    low, high = BANDS[name]
    assert low <= accuracy.low and accuracy.high <= high, accuracy
    assert rollouts.ended_PG.mean() > 0.99


@pytest.mark.nightly(minutes=3)
@pytest.mark.timeout(1800)
def test_the_default_training_gains_ten_points(tmp_path):
    """With the seed that a user gets; evaluated before and after alone."""
    code, _, err = run("train", "eval_steps=80", cwd=tmp_path)
    assert code == 0, err
    (file,) = tmp_path.glob("outputs/train/*/seed-0/result.json")
    result = json.loads(file.read_text())
    assert result["gain"] >= 0.10 and result["gain_low"] > 0, result["summary"]
    assert result["seconds"] < 1800


@pytest.mark.nightly(minutes=0.3)
@pytest.mark.parametrize("name, sign, questions", [("tiny", -1, 100), ("tiny_direct", 1, 50)])
def test_one_policy_of_each_regime_is_shipped(name, sign, questions, tmp_path):
    """A_V - A_0 is surely negative (the paper's ordering) or positive."""
    code, _, err = run("mse", f"model={name}", f"study.questions={questions}", cwd=tmp_path)
    assert code == 0, err
    (file,) = tmp_path.glob("outputs/mse/*/seed-0/result.json")
    found = json.loads(file.read_text())["assumption2"]
    assert sign * found["av_minus_a0_low"] > 0 and sign * found["av_minus_a0_high"] > 0


def test_the_tokenizer_reads_back_what_the_policy_writes(tmp_path):
    """Spaces and words included, from the package and from a saved checkpoint."""
    policy = load_policy("embedded:tiny_base")
    policy.tokenizer.save_pretrained(tmp_path)
    policy.model.save_pretrained(tmp_path)
    text = "so 35+ 47 =82; What is it? #### 82"
    for loaded in (policy, load_policy(str(tmp_path))):
        ids = loaded.tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert loaded.tokenizer.decode(ids) == text
