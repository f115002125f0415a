r"""Baselines: how a group's rewards become advantages.

One signature for the whole family, so that adding one changes no caller:

    advantage(rewards_PG, context) -> advantage_PG

The gradient estimate of a prompt is always `1/G sum_i s_i advantage_i`, linear in the scores s_i,
so a baseline never sees the model. It owns centring and scale; nothing downstream normalises again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from grpo_ustat.records import BaselineContext


@dataclass(frozen=True)
class Baseline:
    """A named rule.

    Attributes:
        name: the word used in configurations and tables.
        advantage: the rule itself, see the module's signature.
        unbiased: whether E[estimate] is the gradient of the expected reward.
        min_group_size: the smallest group it is defined for.
        needs_value: whether it reads `context.value_P`.
    """

    name: str
    advantage: Callable[[np.ndarray, BaselineContext], np.ndarray]
    unbiased: bool
    min_group_size: int
    needs_value: bool = False


def none(rewards_PG: np.ndarray, context: BaselineContext) -> np.ndarray:
    """REINFORCE (Williams 1992), "vanilla" in the paper: `A_i = Z_i`.

    Unbiased: E[S Z | x] is the gradient by definition.

    >>> none(np.array([[1.0, 0.0, 0.0]]), BaselineContext()).tolist()
    [[1.0, 0.0, 0.0]]
    """
    return rewards_PG.copy()


def leave_one_out(rewards_PG: np.ndarray, context: BaselineContext) -> np.ndarray:
    """The paper's GRPO (Lemma 1): `A_i = Z_i - sum_{j != i} Z_j / (G-1)`.

    Unbiased: the baseline of completion i is independent of its score, which has mean zero.

    >>> leave_one_out(np.array([[1.0, 0.0, 0.0]]), BaselineContext()).tolist()
    [[1.0, -0.5, -0.5]]
    """
    group_size = rewards_PG.shape[-1]
    others = rewards_PG.sum(axis=-1, keepdims=True) - rewards_PG
    return rewards_PG - others / (group_size - 1)


def group_mean(rewards_PG: np.ndarray, context: BaselineContext) -> np.ndarray:
    """Dr. GRPO (Liu et al. 2025): `A_i = Z_i - mean_j Z_j`, the group's own mean.

    Biased by shrinking: it is (G-1)/G times leave_one_out on every sample, so its direction is
    right and its length short; it can beat unbiased rules on raw MSE for that reason alone.

    >>> group_mean(np.array([[1.0, 0.0, 0.0, 0.0]]), BaselineContext()).tolist()
    [[0.75, -0.25, -0.25, -0.25]]
    """
    return rewards_PG - rewards_PG.mean(axis=-1, keepdims=True)


def oracle(rewards_PG: np.ndarray, context: BaselineContext) -> np.ndarray:
    """The paper's oracle: `A_i = Z_i - V(x)`, V from completions outside the group.

    Unbiased for every V that is independent of the group, exact or estimated; K completions behind
    V add `M_0 sigma^2 / K` to A_V and with it variance, never bias.

    >>> oracle(np.array([[1.0, 0.0]]), BaselineContext(value_P=np.array([0.25]))).tolist()
    [[0.75, -0.25]]
    """
    if context.value_P is None:
        raise ValueError("the oracle baseline needs value_P, one V(x) per prompt; got None")
    return rewards_PG - context.value_P[:, None]


BASELINES = {
    rule.name: rule
    for rule in (
        Baseline("none", none, unbiased=True, min_group_size=1),
        Baseline("leave_one_out", leave_one_out, unbiased=True, min_group_size=2),
        Baseline("group_mean", group_mean, unbiased=False, min_group_size=2),
        Baseline("oracle", oracle, unbiased=True, min_group_size=1, needs_value=True),
    )
}


def advantages(name: str, rewards_PG: np.ndarray, context: BaselineContext) -> np.ndarray:
    """Advantages of a baseline by name, shape [P, G], float64.

    Raises:
        ValueError: the group is smaller than the baseline allows.
    """
    rule = BASELINES[name]
    assert rewards_PG.ndim == 2 and rewards_PG.dtype == np.float64
    if rewards_PG.shape[1] < rule.min_group_size:
        raise ValueError(
            f"baseline {name} needs groups of at least {rule.min_group_size} completions, "
            f"got group_size={rewards_PG.shape[1]}"
        )
    return rule.advantage(rewards_PG, context)
