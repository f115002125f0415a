"""Reward functions beside the task's own: worked by hand, a user's file, errors."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import letter_prompts

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.records import Rollouts
from grpo_ustat.tasks.base import NumberJudge, Task, rewards, summed_rewards
from grpo_ustat.tasks.reward_funcs import answer_format, brevity, own_reward, termination

LENGTHS = np.array([[2, 4], [1, 3]])


def written(texts=(("7", "no"), ("8", ""))):
    """Two completions of each of two prompts, with lengths and one of them cut."""
    return Rollouts(
        prompts=letter_prompts("a", "b"),
        prompt_tokens=[[1], [1]],
        tokens_PGT=np.ones((2, 2, 4), dtype=np.int64),
        mask_PGT=np.arange(4) < LENGTHS[..., None],
        ended_PG=np.array([[True, False], [True, True]]),
        texts_PG=[list(row) for row in texts],
    )


def task_of(functions, weights):
    class Length(NumberJudge):
        def rewards(self, prompts, completions):
            return [float(len(text)) for text in completions]

    return Task(None, None, Length(), functions, weights)


def test_those_of_any_data_set_worked_by_hand():
    rollouts = written()
    assert answer_format(rollouts, NumberJudge()).tolist() == [[1, 0], [1, 0]]
    assert termination(rollouts).tolist() == [[1, 0], [1, 1]]
    assert brevity(rollouts, 8).tolist() == [[0.75, 0.5], [0.875, 0.625]]


def test_rewards_are_kept_apart_and_summed_with_their_weights():
    task = task_of({"termination": termination}, [1.0, 0.5])
    found = rewards(task, written())
    assert found[..., 0].tolist() == [[1, 2], [1, 0]]
    assert found[..., 1].tolist() == [[1, 0], [1, 1]]
    assert summed_rewards(task, written()).tolist() == [[1.5, 2], [1.5, 0.5]]


def test_a_function_of_a_file_judges_prompt_by_prompt(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def mine(prompt, completion): return (completion == '7') - 0.5 * (prompt.text == 'b')\n"
        "def large(prompt, completion): return float('inf')\n"
    )
    assert own_reward(f"{file}:mine")(written()).tolist() == [[1, 0], [-0.5, -0.5]]
    with pytest.raises(ConfigError, match="large, prompt .*: the reward is inf"):
        own_reward(f"{file}:large")(written())


def test_a_reward_that_is_not_finite_names_prompt_and_function():
    def broken(rollouts):
        return np.where(rollouts.ended_PG, 1.0, np.nan)

    with pytest.raises(FloatingPointError, match="completion 1 .*broken is nan"):
        rewards(task_of({"broken": broken}, [1.0, 1.0]), written())
