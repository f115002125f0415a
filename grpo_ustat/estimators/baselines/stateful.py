"""Rules whose baseline was learned from past batches, and how the past is weighed.

The memory itself lives where batches follow each other, in `train.baseline_state`; here is its
arithmetic. A memory is read before the batch at hand is added to it: given the past, b is then
independent of the batch's completions. Updated first, the same rule would be biased.
"""

from __future__ import annotations

import numpy as np

from grpo_ustat.estimators.baselines.base import quotient, require
from grpo_ustat.records import Array, BaselineContext


def running_mean(rewards_PG: Array, context: BaselineContext) -> Array:
    """Moving average of past rewards (Williams 1992; prime-rl's rae): `A_i = r_i - b`.

    Unbiased given the past: b is used before `running_update` sees the batch.

    >>> running_mean(np.array([[1.0, 0.0]]), BaselineContext(running=0.25)).tolist()
    [[0.75, -0.25]]
    """
    return rewards_PG - require(context.running, "running", "running_mean")


def running_update(running: float, rewards_PG: Array, decay: float) -> float:
    """`b <- decay b + (1 - decay) mean reward`.

    >>> running_update(0.5, np.array([[1.0, 1.0]]), decay=0.75)
    0.625
    """
    return decay * running + (1 - decay) * float(rewards_PG.mean())


def critic(rewards_PG: Array, context: BaselineContext) -> Array:
    """A learned value (A2C, Mnih et al. 2016): `A_i = r_i - v(x)`.

    Unbiased given the past: v was fitted on past batches only and reads the prompt alone.

    >>> critic(np.array([[1.0, 0.0]]), BaselineContext(critic_P=np.array([0.75]))).tolist()
    [[0.25, -0.75]]
    """
    return rewards_PG - require(context.critic_P, "critic_P", "critic")[:, None]


def spo(rewards_PG: Array, context: BaselineContext, *, epsilon: float) -> Array:
    """SPO (Xu and Ding 2025): `r_i - tracker(x)`, minus its batch mean, over (std + epsilon).

    Before the batch's mean and std it is unbiased given the past; these hold the completion's own
    reward, which makes it biased by a scale and by O(1/(P G)) in direction. The std has divisor
    P G - 1, as in the authors' code (epsilon 1e-8). Groups of one are enough.

    >>> context = BaselineContext(tracker_P=np.array([0.5, 0.5]))
    >>> spo(np.array([[1.0], [0.0]]), context, epsilon=0.0).round(4).tolist()
    [[0.7071], [-0.7071]]
    """
    surprise_PG = rewards_PG - require(context.tracker_P, "tracker_P", "spo")[:, None]
    surprise_PG -= surprise_PG[0, 0]
    deviation_PG = surprise_PG - surprise_PG.mean()
    return quotient(deviation_PG, deviation_PG.std(ddof=1) + epsilon)


def tracker_start(rewards_PK: Array, rho_min: float) -> tuple[Array, Array]:
    """(alpha, beta) from K draws before the first visit, worth 1/(1 - rho_min) observations.

    >>> [x.tolist() for x in tracker_start(np.array([[1.0, 1.0, 0.0]]), rho_min=0.75)]
    [[2.5], [1.5]]
    """
    right_P, count = rewards_PK.sum(axis=1), rewards_PK.shape[1]
    scale = 1 / ((1 - rho_min) * (count + 1))
    return scale * (right_P + 0.5), scale * (count - right_P + 0.5)


def tracker_discount(
    distance_P: Array, half_distance: float, rho_min: float, rho_max: float
) -> Array:
    """rho = 2^(-D / half_distance) within [rho_min, rho_max].

    D is the mean absolute change of a token's log-probability on the prompt's last answer.

    >>> tracker_discount(np.array([0.0, 0.06, 9.0]), 0.06, 0.25, 0.96).tolist()
    [0.96, 0.5, 0.25]
    """
    return np.clip(2.0 ** (-distance_P / half_distance), rho_min, rho_max)
