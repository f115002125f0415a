"""Reward functions in addition to the judge: built-in ones for any data set, and users' own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from grpo_ustat.config.own_functions import REWARDS, reward_file
from grpo_ustat.config.reward_funcs import reward_names
from grpo_ustat.records import Array, Rollouts
from grpo_ustat.tasks.base import Judge, answered
from grpo_ustat.tasks.plugins import OwnJudge, describe, entry_point, file_function, user_errors

# Function that returns the reward of each completion, [P, G].
RewardFunction = Callable[[Rollouts], Array]


def make_reward_funcs(
    reward_funcs: list[str], max_completion_length: int, judge: Judge
) -> dict[str, RewardFunction]:
    """Return the configured reward functions except the judge, keyed by their metric names.

    Args:
        reward_funcs: configured names. The first one names the data set's judge and is skipped.
        max_completion_length: maximum length of a completion in tokens, used to scale `brevity`.
        judge: the data set's judge, which extracts answers.
    """
    of_any_dataset: dict[str, RewardFunction] = {
        "format": lambda rollouts: answer_format(rollouts, judge),
        "termination": termination,
        "brevity": lambda rollouts: brevity(rollouts, max_completion_length),
    }
    functions = [
        of_any_dataset[name] if name in of_any_dataset else own_reward(name)
        for name in reward_funcs[1:]
    ]
    return dict(zip(reward_names(reward_funcs)[1:], functions, strict=True))


def answer_format(rollouts: Rollouts, judge: Judge) -> Array:
    """Return 1 for completions that state an answer, right or wrong, and 0 for others, [P, G]."""
    return answered(judge, rollouts).astype(np.float64)


def termination(rollouts: Rollouts) -> Array:
    """Return 1 for completions that the policy ended and 0 for truncated completions, [P, G]."""
    return rollouts.ended_PG.astype(np.float64)


def brevity(rollouts: Rollouts, max_completion_length: int) -> Array:
    """Reward short completions with 1 - length / max_completion_length, [P, G].

    Lengths are in tokens and include the end-of-sequence token.
    """
    return 1 - rollouts.lengths_PG / max_completion_length


def own_reward(name: str) -> RewardFunction:
    """Load a user's reward function, which takes a prompt and a completion; see `OwnJudge`.

    Args:
        name: FILE.py:FUNCTION, or the name of an entry point.
    """
    if reward_file(name):
        source = f"reward_funcs={name}"
        function = file_function(name, "reward_funcs")
    else:
        source = describe(REWARDS, name)
        with user_errors(source):
            function = entry_point(REWARDS, name)
    judge = OwnJudge(function, None, source)

    def rewards(rollouts: Rollouts) -> Array:
        pairs = zip(rollouts.prompts, rollouts.texts_PG, strict=True)
        return np.array([judge.rewards([prompt] * len(texts), texts) for prompt, texts in pairs])

    return rewards
