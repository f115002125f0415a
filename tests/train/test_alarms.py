"""Each alarm on an injected case, told once and counted; none on a healthy run."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from test_metrics import batch_of
from training_runs import config_of, fit

from grpo_ustat.pages.symbols import ALARM_WORDS
from grpo_ustat.train import trainer
from grpo_ustat.train.alarms import ALARMS, MAX_LOGPROB_GAP, check_alarms
from grpo_ustat.train.metrics import batch_metrics

HEALTHY = {
    "completions/clipped_ratio": 0.09,
    "completions/extraction_failure_ratio": 0.2,
    "frac_reward_zero_std": 0.9,
    "reward": 0.3,
    "reward_std": 0.46,
    "learning_rate": 1e-3,
    "sampling/sampling_logp_difference/mean": 1e-6,
    "judge/timeouts": 0,
    "judge/failures": 0,
}
INJECTED = {  # the rows of a trap, and from which on it is told
    "truncated": ({"completions/clipped_ratio": 0.1}, 1, "10 % .*max_completion_length=140"),
    "extraction_failed": ({"completions/extraction_failure_ratio": 0.6}, 1, "60 % .*prompt.templ"),
    "unjudged": ({"judge/timeouts": 2, "judge/failures": 1}, 1, "2 timed out, 1 failed"),
    "zero_variance": ({"frac_reward_zero_std": 1.0}, 3, "group_size=4"),
    "constant_reward": ({"reward_std": 0.0}, 5, r"same reward \(0.3 in this step"),
    "logprob_gap": ({"sampling/sampling_logp_difference/mean": 0.01}, 1, "0.01 nats .* float32"),
    "zero_learning_rate": ({"learning_rate": 0.0}, 2, "warmup_steps=0"),
}


def heard(rows, *overrides):
    """(step, line) of what is told, and the counts."""
    config, streaks, alarms, lines = config_of(*overrides), {}, {}, []
    for step, row in enumerate(rows, start=1):
        lines += [
            (step, line) for line in check_alarms(config, row | {"step": step}, streaks, alarms)
        ]
    return lines, alarms


@pytest.mark.parametrize("name", ALARMS)
def test_each_trap_is_told_once_and_counted(name):
    injected, after, pattern = INJECTED[name]
    lines, alarms = heard([HEALTHY, *[HEALTHY | injected] * 7])
    ((step, line),) = lines
    assert (
        step == 1 + after
        and line.startswith(f"{ALARM_WORDS.get(name, name)}, step {step}: ")
        and "\n" not in line
    )
    assert re.search(pattern, line), line
    assert alarms == {name: 7}


@pytest.mark.parametrize("name", ALARMS)
def test_a_streak_that_breaks_starts_again(name):
    injected, after, _ = INJECTED[name]
    rows = ([HEALTHY | injected] * (after - 1) + [HEALTHY]) * 3
    assert heard(rows) == ([], {})


@pytest.mark.slow
def test_a_gap_is_judged_by_the_type_computed_in():
    """Ten times the limit rings and a tenth does not; NaN rings; without a sampler nothing."""
    key = "sampling/sampling_logp_difference/mean"
    asked = {name: (f"model.dtype={name}",) for name in ("float64", "float32", "bfloat16")}
    asked["bfloat16"] = ("bf16=true",)
    for name, overrides in asked.items():
        for factor, count in ((10, 1), (0.1, 0)):
            row = HEALTHY | {key: factor * MAX_LOGPROB_GAP[name]}
            assert len(heard([row], *overrides)[0]) == count
    assert len(heard([HEALTHY | {key: float("nan")}])[0]) == 1
    assert heard([{k: v for k, v in HEALTHY.items() if k != key}]) == ([], {})


def give_no_rewards(monkeypatch):
    """Batches of the trainer whose rewards are all 0."""
    whole = trainer.sample_batch

    def broken(*arguments):
        batch = whole(*arguments)
        batch.rewards_PGF[:] = 0
        return batch

    monkeypatch.setattr(trainer, "sample_batch", broken)


@pytest.mark.slow
def test_alarms_of_a_run_without_rewards(tmp_path, capsys, monkeypatch):
    quiet = fit(tmp_path / "quiet", "max_completion_length=96")
    assert "ALARM" not in capsys.readouterr().err
    assert json.loads((quiet / "result.json").read_text())["alarms"] == {}
    give_no_rewards(monkeypatch)
    sick = fit(tmp_path / "sick", "max_completion_length=5")
    err = capsys.readouterr().err
    for name in ("truncated", "extraction_failed", "zero-variance groups"):
        assert err.count(f"ALARM {name}, ") == 1
    result = json.loads((sick / "result.json").read_text())
    assert result["alarms"] == {"truncated": 4, "extraction_failed": 4, "zero_variance": 4}
    assert "truncated in 4 steps, extraction_failed in 4 steps" in result["summary"]


@pytest.mark.slow
def test_alarms_survive_a_resume(tmp_path, capsys, monkeypatch):
    """Told before the interruption, not again after it, and counted through; a streak goes on."""
    give_no_rewards(monkeypatch)
    fit(tmp_path, "max_completion_length=5", "max_steps=2")
    assert capsys.readouterr().err.count("ALARM truncated") == 1
    path = fit(tmp_path, "max_completion_length=5")
    assert "ALARM truncated" not in capsys.readouterr().err
    counted = json.loads((path / "result.json").read_text())["alarms"]
    assert (counted["truncated"], counted["zero_variance"]) == (4, 4)


def test_rewards_of_equal_tenths_have_no_spread():
    """The mean of equal floats may differ from them; equality does not."""
    rewards = np.full((3, 7), 0.1)
    assert rewards.std() > 0  # what a plain standard deviation would say
    assert batch_metrics(batch_of(rewards))["reward_std"] == 0
