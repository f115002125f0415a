"""Reward functions and their weights, with checks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_ustat.config.own_functions import check_reward, reward_file
from grpo_ustat.config.schema import ConfigError, check_distinct
from grpo_ustat.estimators.baselines import BASELINES

# Name that stands for `dataset.reward` or, if this is not set, for the data set's built-in reward.
TASK = "task"
# Reward functions that need no expected answer.
DATASET_FREE_REWARDS = ("format", "termination", "brevity")


def check_reward_funcs(reward_funcs: list[str], reward_weights: list[float] | None) -> None:
    """Refuse functions that do not exist, and weights that do not match the functions."""
    functions = as_typed(reward_funcs)
    if not reward_funcs:
        raise ConfigError(f"reward_funcs=[] names no function: use reward_funcs=[{TASK}]")
    if reward_funcs[0] != TASK:
        others = [name for name in reward_funcs if name != TASK]
        weights = "put reward_weights in the same order"
        if TASK not in reward_funcs:
            zeros = as_typed([0, *(1 for _ in others)])
            weights = f"reward_weights={zeros} if {TASK} should not count"
        raise ConfigError(
            f"reward_funcs={functions} must begin with {TASK}, the data set's reward, which "
            f"evaluations use: use reward_funcs={as_typed([TASK, *others])} and {weights}"
        )
    for name in reward_funcs[1:]:
        if name not in (TASK, *DATASET_FREE_REWARDS):
            check_reward(name, "reward_funcs", (TASK, *DATASET_FREE_REWARDS))
    check_distinct("reward_funcs", reward_names(reward_funcs))
    if reward_weights is None:
        return
    if len(reward_weights) != len(reward_funcs):
        fix = "use one weight per function, in order, or null for equal weights of 1"
        if len(reward_funcs) == 1:
            fix = "add the other functions to reward_funcs or remove reward_weights"
        raise ConfigError(
            f"reward_weights={as_typed(reward_weights)} has {counted(reward_weights, 'weight')} "
            f"for {counted(reward_funcs, 'function')}, reward_funcs={functions}: {fix}"
        )
    if not all(map(math.isfinite, reward_weights)) or not any(reward_weights):
        raise ConfigError(
            f"reward_weights={as_typed(reward_weights)} for reward_funcs={functions}: weights must "
            "be finite, and at least one must not be 0"
        )


def check_several(baseline: str, key: str, reward_funcs: list[str]) -> None:
    """Refuse a baseline that needs several reward functions if only one is configured.

    Args:
        baseline: name of the baseline.
        key: configuration key with this baseline, for messages.
        reward_funcs: reward functions.
    """
    if "rewards_PGF" in BASELINES[baseline].needs and len(reward_funcs) < 2:
        raise ConfigError(
            f"{key}={baseline} needs several reward functions, which it normalises separately, but "
            f"reward_funcs={as_typed(reward_funcs)}: use "
            f"reward_funcs={as_typed([TASK, DATASET_FREE_REWARDS[-1]])} or other functions, or "
            "use group_std"
        )


def as_typed(values: Sequence[str | float]) -> str:
    """Format a list as it is typed on a command line.

    >>> as_typed(["task", "brevity"]), as_typed([1.0, 0.25])
    ('[task,brevity]', '[1,0.25]')
    """
    return f"[{','.join(f'{x:g}' if isinstance(x, int | float) else x for x in values)}]"


def counted(values: Sequence[str | float], noun: str) -> str:
    """Return the number of values followed by the noun in the singular or plural.

    >>> counted([1.0], "weight"), counted(["task", "format"], "function")
    ('1 weight', '2 functions')
    """
    return f"{len(values)} {noun}{'s' * (len(values) != 1)}"


def reward_names(reward_funcs: list[str]) -> list[str]:
    """Return the names for metrics and tables; FILE.py:FUNCTION is shortened to FUNCTION.

    >>> reward_names(["task", "brevity", "rewards/my.py:polite"])
    ['task', 'brevity', 'polite']
    """
    return [place[1] if (place := reward_file(name)) else name for name in reward_funcs]


def reward_text(reward_funcs: list[str], reward_weights: list[float] | None) -> str:
    """Return the weighted sum as text, or "" if only the task's reward is used, with weight 1.

    >>> reward_text(["task", "brevity"], [1.0, 0.5]), reward_text(["task"], None)
    ('1 task + 0.5 brevity', '')
    """
    weights, names = summed_weights(reward_funcs, reward_weights), reward_names(reward_funcs)
    if weights == [1.0]:
        return ""
    return " + ".join(f"{weight:g} {name}" for weight, name in zip(weights, names, strict=False))


def summed_weights(reward_funcs: list[str], reward_weights: list[float] | None) -> list[float]:
    """Return the weights of the functions, which are all 1 by default."""
    return reward_weights or [1.0] * len(reward_funcs)
