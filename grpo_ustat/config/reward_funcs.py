"""Which reward functions judge a completion, with which weights, and the checks of both."""

from __future__ import annotations

import math

from grpo_ustat.config.data import REWARDS, check_entry_point, check_reward_file, reward_file
from grpo_ustat.config.schema import ConfigError, check_distinct
from grpo_ustat.estimators.baselines import BASELINES

TASK = "task"  # the data set's own reward, or what `dataset.reward` puts in its place
OF_ANY_DATASET = ("format", "termination", "brevity")  # they need no expected answer


def check_reward_funcs(reward_funcs: list[str], reward_weights: list[float] | None) -> None:
    """Refuse functions that there are not, and weights that make no sum of them.

    Raises:
        ConfigError: naming the values and the fix.
    """
    if not reward_funcs or reward_funcs[0] != TASK:
        raise ConfigError(
            f"reward_funcs={reward_funcs} must begin with {TASK}, the data set's own reward, which "
            f"accuracy is read from: use [{','.join([TASK, *reward_funcs])}], and reward_weights "
            "with a 0 for it if it is not to count"
        )
    for name in reward_funcs[1:]:
        if reward_file(name):
            check_reward_file(name, "reward_funcs")
        elif name not in (TASK, *OF_ANY_DATASET):
            check_entry_point(REWARDS, name, "reward_funcs", (TASK, *OF_ANY_DATASET))
    check_distinct("reward_funcs", reward_names(reward_funcs))
    if reward_weights is None:
        return
    if len(reward_weights) != len(reward_funcs):
        raise ConfigError(
            f"reward_weights={reward_weights} has {len(reward_weights)} weights for the "
            f"{len(reward_funcs)} functions of reward_funcs={reward_funcs}: give one for each, in "
            "their order, or null for 1 each"
        )
    if not all(map(math.isfinite, reward_weights)) or not any(reward_weights):
        raise ConfigError(
            f"reward_weights={reward_weights} of reward_funcs={reward_funcs}: weights must be "
            "finite, and one at least other than 0"
        )


def check_several(baseline: str, key: str, reward_funcs: list[str]) -> None:
    """Refuse a rule that weighs several reward functions where there is one.

    Args:
        baseline: name of the rule.
        key: of the configuration, which names it.
        reward_funcs: the functions.

    Raises:
        ConfigError: naming the values and the fix.
    """
    if "rewards_PGF" in BASELINES[baseline].needs and len(reward_funcs) < 2:
        raise ConfigError(
            f"{key} names {baseline}, which normalises several reward functions apart, but "
            f"reward_funcs={reward_funcs}: use reward_funcs=[{TASK},{OF_ANY_DATASET[-1]}] or "
            "others, or group_std"
        )


def reward_names(reward_funcs: list[str]) -> list[str]:
    """The functions' names in metrics and tables; of FILE.py:FUNCTION that of the function.

    >>> reward_names(["task", "brevity", "rewards/my.py:polite"])
    ['task', 'brevity', 'polite']
    """
    return [own[1] if (own := reward_file(name)) else name for name in reward_funcs]


def summed_weights(reward_funcs: list[str], reward_weights: list[float] | None) -> list[float]:
    """The functions' weights in the sum; 1 each where none are given."""
    return reward_weights or [1.0] * len(reward_funcs)
