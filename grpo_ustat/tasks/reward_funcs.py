"""Additional reward functions: functions for any data set, and user-defined functions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from grpo_ustat.config.own_functions import REWARDS, reward_file
from grpo_ustat.config.reward_funcs import reward_names
from grpo_ustat.records import Array, Rollouts
from grpo_ustat.tasks.base import Judge, answered
from grpo_ustat.tasks.plugins import OwnJudge, describe, entry_point, file_function, user_errors

# Function that returns the rewards of completions, [P, G].
RewardFunction = Callable[[Rollouts], Array]


def make_reward_funcs(
    reward_funcs: list[str], max_completion_length: int, judge: Judge
) -> dict[str, RewardFunction]:
    """Return the configured functions other than the judge, by their names in metrics.

    Args:
        reward_funcs: configured names, of which the first is the data set's judge.
        max_completion_length: maximum length of a completion in tokens, the scale of `brevity`.
        judge: judge of the data set, which extracts answers.
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
    """Return 1 for each completion that states an answer, right or wrong, else 0, [P, G]."""
    return answered(judge, rollouts).astype(np.float64)


def termination(rollouts: Rollouts) -> Array:
    """Return 1 for each completion that the policy ended, 0 for truncated ones, [P, G]."""
    return rollouts.ended_PG.astype(np.float64)


def brevity(rollouts: Rollouts, max_completion_length: int) -> Array:
    """Compute 1 - length / max_completion_length, [P, G].

    Lengths are in tokens and include the end-of-sequence token.
    """
    return 1 - rollouts.lengths_PG / max_completion_length


def own_reward(name: str) -> RewardFunction:
    """Load a user's function of prompt and completion; see `OwnJudge`.

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
