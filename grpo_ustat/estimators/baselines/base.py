"""Definition of a baseline, and the arithmetic that several baselines share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np

from grpo_ustat.records import Array

Value = TypeVar("Value")

# Fields that cost no further completion.
OF_THE_BATCH = frozenset({"lengths_PG", "history", "rewards_PGF", "reward_weights_F"})


class UnfitRewards(ValueError):
    """Rewards outside the range that a baseline is defined for.

    Its message is one line that names the baseline, the rewards and the fix.
    """


@dataclass(frozen=True)
class Baseline:
    """Declaration of a baseline.

    As groups grow a prompt's mean goes to its `target`, with epsilon the baseline's option:

        expected_reward      g
        g_over_sigma         g / (sigma + epsilon); for 0/1 rewards and a small epsilon the gradient
                             of E[2 arcsin sqrt V]
        g_over_v             g / (V + epsilon); for a small epsilon the gradient of E[log V]
        kept_part            0/1 rewards: g / (V (1-V)) sigma_m^2 / (sigma_m + epsilon), sigma_m
                             the std of the part of the group that is kept

    and, up to one number of the baseline or of the batch that is the same for all prompts, to

        multiple_of_g        g
        g_over_density       g / f(V), f a density fitted to the batch
        weighted_by_length   E[L^-power (z - V) s] / (sigma + epsilon)
        sum_g_over_sigma     sum_f w_f g_f / (sigma_f + epsilon) over reward functions
    """

    # Name in configurations and tables.
    name: str
    # The function `baseline(rewards_PG, context, **options) -> advantage_PG`, with a default for
    # each option.
    advantage: Callable[..., Array]
    # True if E[estimate] is the gradient of the expected reward, given the past.
    unbiased: bool
    # The smallest group that the baseline is defined for.
    min_group_size: int
    # Names of the `BaselineContext` fields that the baseline reads.
    needs: frozenset[str] = frozenset()
    # Options of the memory, with their defaults, which the function does not take, see
    # `train.baseline_state`.
    memory: Mapping[str, float] = field(default_factory=dict[str, float])
    # Limit of the baseline's mean for large groups, see above.
    target: str = "expected_reward"
    # True if a prompt's advantages depend on other prompts' rewards or lengths.
    couples_prompts: bool = False
    # True if `A_i = r_i - b(x)` with b independent of the group.
    prompt_only: bool = False
    # The fewest prompts that the baseline is defined for.
    min_prompts: int = 1
    # Description in `--help`.
    words: str = ""

    @cached_property
    def options(self) -> dict[str, float]:
        """Options and their defaults.

        They are the baseline's parameters behind the first two, then those of its memory.
        """
        _, _, *parameters = inspect.signature(self.advantage).parameters.values()
        return {each.name: each.default for each in parameters} | dict(self.memory)

    @property
    def needs_value(self) -> bool:
        """True if the baseline reads `context.value_P`."""
        return "value_P" in self.needs

    @property
    def only_trains(self) -> bool:
        """True if the baseline remembers past batches, which a study does not have."""
        return bool(self.needs & {"tracker_P", "critic_P"})


def require(value: Value | None, name: str, baseline: str) -> Value:
    """Return the value of a `BaselineContext` field that a baseline needs.

    Args:
        value: value of the field.
        name: name of the field, for the message.
        baseline: name of the baseline, for the message.

    Raises:
        ValueError: the value is None.
    """
    if value is None:
        raise ValueError(
            f"baseline {baseline} needs BaselineContext.{name}, got None: pass {name}=..."
        )
    return value


def quotient(numerator: Array, denominator: Array | float) -> Array:
    """Divide elementwise; 0 where the numerator is 0, for any denominator.

    >>> quotient(np.array([0.0, 1.0]), np.array([0.0, 2.0])).tolist()
    [0.0, 0.5]
    """
    result = np.zeros_like(numerator)
    np.divide(numerator, denominator, out=result, where=numerator != 0)
    return result
