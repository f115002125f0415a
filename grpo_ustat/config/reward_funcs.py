"""Reward functions of a completion, their weights, and the checks of both."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_ustat.config.own_functions import check_reward, reward_file
from grpo_ustat.config.schema import ConfigError, check_distinct
from grpo_ustat.estimators.baselines import BASELINES

# The data set's own reward, or `dataset.reward` in its place.
TASK = "task"
# They need no expected answer.
DATASET_FREE_REWARDS = ("format", "termination", "brevity")


def check_reward_funcs(reward_funcs: list[str], reward_weights: list[float] | None) -> None:
    """Refuse functions that do not exist, and weights that do not fit them."""
    functions = as_typed(reward_funcs)
    if not reward_funcs:
        raise ConfigError(f"reward_funcs=[] names no function: use reward_funcs=[{TASK}]")
    if reward_funcs[0] != TASK:
        others = [name for name in reward_funcs if name != TASK]
        weights = "put reward_weights in the same order"
        if TASK not in reward_funcs:
            zeros = as_typed([0, *(1 for _ in others)])
            weights = f"reward_weights={zeros} if {TASK} is not to count"
        raise ConfigError(
            f"reward_funcs={functions} must begin with {TASK}, the data set's own reward, which "
            f"is evaluated: use reward_funcs={as_typed([TASK, *others])}, and {weights}"
        )
    for name in reward_funcs[1:]:
        if name not in (TASK, *DATASET_FREE_REWARDS):
            check_reward(name, "reward_funcs", (TASK, *DATASET_FREE_REWARDS))
    check_distinct("reward_funcs", reward_names(reward_funcs))
    if reward_weights is None:
        return
    if len(reward_weights) != len(reward_funcs):
        fix = "give one for each, in their order, or null for 1 each"
        if len(reward_funcs) == 1:
            fix = "name the other functions in reward_funcs, or leave reward_weights out"
        raise ConfigError(
            f"reward_weights={as_typed(reward_weights)} has {counted(reward_weights, 'weight')} "
            f"for {counted(reward_funcs, 'function')}, reward_funcs={functions}: {fix}"
        )
    if not all(map(math.isfinite, reward_weights)) or not any(reward_weights):
        raise ConfigError(
            f"reward_weights={as_typed(reward_weights)} of reward_funcs={functions}: weights must "
            "be finite, and one at least other than 0"
        )


def check_several(baseline: str, key: str, reward_funcs: list[str]) -> None:
    """Refuse a baseline that weighs several reward functions if there is only one.

    Args:
        baseline: name of the baseline.
        key: configuration key that names it.
        reward_funcs: the functions.
    """
    if "rewards_PGF" in BASELINES[baseline].needs and len(reward_funcs) < 2:
        raise ConfigError(
            f"{key}={baseline} normalises each of several reward functions by itself, but "
            f"reward_funcs={as_typed(reward_funcs)}: use reward_funcs="
            f"{as_typed([TASK, DATASET_FREE_REWARDS[-1]])} or others, or group_std"
        )


def as_typed(values: Sequence[str | float]) -> str:
    """Format a list as one types it.

    >>> as_typed(["task", "brevity"]), as_typed([1.0, 0.25])
    ('[task,brevity]', '[1,0.25]')
    """
    return f"[{','.join(f'{x:g}' if isinstance(x, int | float) else x for x in values)}]"


def counted(values: Sequence[str | float], noun: str) -> str:
    """Return the number of values with their noun, in words.

    >>> counted([1.0], "weight"), counted(["task", "format"], "function")
    ('1 weight', '2 functions')
    """
    return f"{len(values)} {noun}{'s' * (len(values) != 1)}"


def reward_names(reward_funcs: list[str]) -> list[str]:
    """Return the names in metrics and tables: FUNCTION for FILE.py:FUNCTION, else the typed name.

    >>> reward_names(["task", "brevity", "rewards/my.py:polite"])
    ['task', 'brevity', 'polite']
    """
    return [place[1] if (place := reward_file(name)) else name for name in reward_funcs]


def reward_text(reward_funcs: list[str], reward_weights: list[float] | None) -> str:
    """Return the sum that is the reward; "" if it is the data set's own.

    >>> reward_text(["task", "brevity"], [1.0, 0.5]), reward_text(["task"], None)
    ('1 task + 0.5 brevity', '')
    """
    weights, names = summed_weights(reward_funcs, reward_weights), reward_names(reward_funcs)
    if weights == [1.0]:
        return ""
    return " + ".join(f"{weight:g} {name}" for weight, name in zip(weights, names, strict=False))


def summed_weights(reward_funcs: list[str], reward_weights: list[float] | None) -> list[float]:
    """Return the weights of the functions in the sum; 1 each if none are given."""
    return reward_weights or [1.0] * len(reward_funcs)
