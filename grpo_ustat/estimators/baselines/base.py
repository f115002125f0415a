"""What a rule is, and the arithmetic that several rules share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np

from grpo_ustat.records import Array

Value = TypeVar("Value")

OF_THE_BATCH = frozenset(  # fields that cost no further completion
    {"lengths_PG", "history", "rewards_PGF", "reward_weights_F"}
)


class UnfitRewards(ValueError):
    """Rewards outside the range that a rule is defined for; its message is one line that names the
    rule, the rewards and the fix.
    """


@dataclass(frozen=True)
class Baseline:
    """A named rule.

    Attributes:
        name: the word used in configurations and tables.
        advantage: the rule itself, `rule(rewards_PG, context, **options) -> advantage_PG`, each
            option with a default.
        unbiased: whether E[estimate] is the gradient of the expected reward, given the past.
        min_group_size: the smallest group it is defined for.
        needs: names of the `BaselineContext` fields that it reads.
        memory: options, with their defaults, that the rule itself does not take: those of the
            memory behind it, see `train.baseline_state`.
        target: where its mean goes as groups grow, see below.
        couples_prompts: whether a prompt's advantages depend on other prompts' rewards or lengths.
        prompt_only: whether `A_i = r_i - b(x)` with b independent of the group.
        min_prompts: the fewest prompts it is defined for.
        words: what `--help` says of it.

    A prompt's mean goes to, with epsilon the rule's option:

        expected_reward      g
        g_over_sigma         g / (sigma + epsilon); for 0/1 rewards and a small epsilon the gradient
                             of E[2 arcsin sqrt V]
        g_over_v             g / (V + epsilon); for a small epsilon the gradient of E[log V]
        kept_part            0/1 rewards: g / (V (1-V)) sigma_m^2 / (sigma_m + epsilon), sigma_m
                             the std of the part of the group that is kept

    and but for one number of the rule or of the batch, the same for all prompts, to

        multiple_of_g        g
        g_over_density       g / f(V), f a density fitted to the batch
        weighted_by_length   E[L^-power (z - V) s] / (sigma + epsilon)
        sum_g_over_sigma     sum_f w_f g_f / (sigma_f + epsilon) over reward functions
    """

    name: str
    advantage: Callable[..., Array]
    unbiased: bool
    min_group_size: int
    needs: frozenset[str] = frozenset()
    memory: Mapping[str, float] = field(default_factory=dict[str, float])
    target: str = "expected_reward"
    couples_prompts: bool = False
    prompt_only: bool = False
    min_prompts: int = 1
    words: str = ""

    @cached_property
    def options(self) -> dict[str, float]:
        """The options and their defaults: the rule's parameters behind the first two, then those of
        its memory.
        """
        _, _, *parameters = inspect.signature(self.advantage).parameters.values()
        return {each.name: each.default for each in parameters} | dict(self.memory)

    @property
    def needs_value(self) -> bool:
        """Whether it reads `context.value_P`."""
        return "value_P" in self.needs

    @property
    def only_trains(self) -> bool:
        """Whether it remembers each prompt or a fit of many batches: a study has no past."""
        return bool(self.needs & {"tracker_P", "critic_P"})


def require(value: Value | None, name: str, rule: str) -> Value:
    """The value of a `BaselineContext` field that a rule cannot do without.

    Args:
        value: of the field.
        name: of the field, for the message.
        rule: the baseline's name, for the message.

    Raises:
        ValueError: the value is None.
    """
    if value is None:
        raise ValueError(f"baseline {rule} needs BaselineContext.{name}, got None: pass {name}=...")
    return value


def centre(rewards_PG: Array) -> Array:
    """Rewards minus their group's mean, [P, G]; exactly 0 where a group's rewards are all equal.

    Shifting by the first reward beforehand keeps rounding of the mean out of equal groups, where a
    small divisor would magnify it.
    """
    shifted_PG = rewards_PG - rewards_PG[:, :1]
    return shifted_PG - shifted_PG.mean(axis=1, keepdims=True)


def quotient(numerator: Array, denominator: Array | float) -> Array:
    """`numerator / denominator`, elementwise; 0 where the numerator is 0, whatever the denominator.

    >>> quotient(np.array([0.0, 1.0]), np.array([0.0, 2.0])).tolist()
    [0.0, 0.5]
    """
    result = np.zeros_like(numerator)
    np.divide(numerator, denominator, out=result, where=numerator != 0)
    return result
