"""Definition of a baseline, and arithmetic that several baselines share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np

from grpo_ustat.records import Array

Value = TypeVar("Value")

# `BaselineContext` fields that can be filled without sampling completions beyond the batch.
OF_THE_BATCH = frozenset({"lengths_PG", "history", "rewards_PGF", "reward_weights_F"})


class UnfitRewards(ValueError):
    """Error for rewards outside the range for which a baseline is defined.

    The message is one line that names the baseline, the rewards and the fix.
    """


@dataclass(frozen=True)
class Baseline:
    """Declaration of a baseline.

    As groups grow, the expected value of the gradient estimate for a prompt converges to a limit,
    the baseline's `target`. In the formulas below, V is the prompt's expected reward, sigma the
    std of its rewards, g the gradient of V, and epsilon the option of the baseline:

        expected_reward      g
        g_over_sigma         g / (sigma + epsilon); for 0/1 rewards and a small epsilon the gradient
                             of E[2 arcsin sqrt V]
        g_over_v             g / (V + epsilon); for a small epsilon the gradient of E[log V]
        kept_part            for 0/1 rewards g / (V (1-V)) sigma_m^2 / (sigma_m + epsilon), where
                             sigma_m is the std of the rewards that `pods` keeps

    For the following targets, the limit is a multiple of the formula. The factor depends on the
    baseline or the batch and is the same for all prompts:

        multiple_of_g        g
        g_over_density       g / f(V), where f is a density fitted to the batch
        weighted_by_length   E[L^-power (z - V) s] / (sigma + epsilon), where L, z and s are the
                             length, reward and score of a completion
        sum_g_over_sigma     sum_f w_f g_f / (sigma_f + epsilon) over reward functions f, where w_f
                             is the weight of f
    """

    # Name in configurations and tables.
    name: str
    # Function `baseline(rewards_PG, context, **options) -> advantage_PG`, with a default for each
    # option.
    advantage: Callable[..., Array]
    # True if E[estimate], conditional on past batches, is the gradient of the expected reward.
    unbiased: bool
    # Smallest group size for which the baseline is defined.
    min_group_size: int
    # Names of the `BaselineContext` fields that the baseline reads.
    needs: frozenset[str] = frozenset()
    # Options for the memory of a baseline that is learned from past batches, with their defaults.
    # They are not parameters of the function, because `train.baseline_state` updates the memory.
    memory: Mapping[str, float] = field(default_factory=dict[str, float])
    # Limit of the estimate's expected value as groups grow: one of the names listed above.
    target: str = "expected_reward"
    # True if a prompt's advantages depend on other prompts' rewards or lengths.
    couples_prompts: bool = False
    # True if `A_i = r_i - b(x)`, where b does not depend on the group's completions.
    prompt_only: bool = False
    # Smallest number of prompts for which the baseline is defined.
    min_prompts: int = 1
    # Description in `--help`.
    words: str = ""

    @cached_property
    def options(self) -> dict[str, float]:
        """Options and their defaults.

        The function's options are its parameters after `rewards_PG` and `context`. The options of
        the memory follow them.
        """
        _, _, *parameters = inspect.signature(self.advantage).parameters.values()
        return {each.name: each.default for each in parameters} | dict(self.memory)

    @property
    def needs_value(self) -> bool:
        """True if the baseline reads `context.value_P`."""
        return "value_P" in self.needs

    @property
    def only_trains(self) -> bool:
        """True if the baseline needs a critic, which exists only during training."""
        return "critic_P" in self.needs


def require(value: Value | None, name: str, baseline: str) -> Value:
    """Return the value of a `BaselineContext` field that a baseline needs.

    Args:
        value: value of the field.
        name: field name for the error message.
        baseline: baseline name for the error message.

    Raises:
        ValueError: the value is None.
    """
    if value is None:
        raise ValueError(
            f"baseline {baseline} needs BaselineContext.{name}, got None: pass {name}=..."
        )
    return value


def quotient(numerator: Array, denominator: Array | float) -> Array:
    """Divide elementwise; the result is 0 where the numerator is 0, even for a denominator of 0.

    >>> quotient(np.array([0.0, 1.0]), np.array([0.0, 2.0])).tolist()
    [0.0, 0.5]
    """
    result = np.zeros_like(numerator)
    np.divide(numerator, denominator, out=result, where=numerator != 0)
    return result
