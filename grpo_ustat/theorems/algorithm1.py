"""Algorithm 1 on a bed, thousands of replicates at once, each a function of (seed, number) alone.

Replicates run side by side in blocks. Every one draws from its own keyed generator and no sum runs
over replicates, so one that is run again alone takes the very same path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from grpo_ustat.estimators.covariance import subtracted
from grpo_ustat.policy.beds import Bed
from grpo_ustat.rollout.draws import generator

BLOCK = 500  # replicates side by side: their arrays stay in a core's cache
STRETCH = 50  # steps whose uniforms are drawn at once
STREAM = "algorithm1"


@dataclass(frozen=True)
class Estimator:
    """A gradient estimator of B prompts with G completions each.

    Attributes:
        baseline: none, oracle, optimal, leave_one_out, group_mean or group_std.
        epsilon: of group_std, added to the standard deviation.
    """

    baseline: str
    num_prompts: int
    group_size: int
    epsilon: float = 0.0

    @property
    def name(self) -> str:
        """For legends and rows."""
        known = {"none": "vanilla", "leave_one_out": "GRPO"}
        return known.get(self.baseline, self.baseline)

    @property
    def rollouts(self) -> int:
        """Of a step, n = B G."""
        return self.num_prompts * self.group_size


@dataclass(frozen=True)
class Paths:
    """What replicates R left at the recorded steps S.

    Attributes:
        steps_S: after how many updates; 0 is the start.
        u_SKR: where the policy was.
        gap_SR: J* - J there.
        left_R: the update after which a replicate was first outside the sublevel set, 0: never.
    """

    steps_S: np.ndarray
    u_SKR: np.ndarray
    gap_SR: np.ndarray
    left_R: np.ndarray

    @staticmethod
    def joined(parts: list[Paths]) -> Paths:
        """Blocks of replicates as one."""
        joined = (np.concatenate([getattr(p, name) for p in parts], axis=-1) for name in PER_R)
        return Paths(parts[0].steps_S, *joined)


PER_R = ("u_SKR", "gap_SR", "left_R")


def simulate(
    bed: Bed,
    estimator: Estimator,
    rates_T: np.ndarray,
    replicates: range,
    seed: int,
    steps: list[int],
) -> Paths:
    """Run Algorithm 1 from the bed's start, `theta <- theta + eta_t g_hat`.

    In u the update is the same as in theta: the score is Q's and Q Q' = 1.

    Args:
        bed: what the policy is.
        estimator: of the gradient.
        rates_T: eta_1 ... eta_T.
        replicates: their numbers.
        seed: with a replicate's number, all that its path depends on.
        steps: to record, ascending, 0 to T.
    """
    blocks = (replicates[i : i + BLOCK] for i in range(0, len(replicates), BLOCK))
    return Paths.joined([_block(bed, estimator, rates_T, block, seed, steps) for block in blocks])


def _block(bed: Bed, one: Estimator, rates_T, block: range, seed: int, steps: list[int]) -> Paths:
    u_KR = np.repeat(bed.start_K[:, None], len(block), axis=1)
    left_R, kept = np.zeros(len(block), dtype=int), {}
    low_K1, high_K1 = (bed.best_K + s * bed.box_K for s in (-1, 1))
    bounded, wanted = np.isfinite(bed.box_K).all(), set(steps)
    for t, uniform in enumerate(_uniforms(block, seed, one, len(rates_T))):
        law = bed.law(u_KR)
        gap_R = bed.highest - bed.value(law[0]).mean(axis=0)
        left_R[(gap_R > bed.reach) & (left_R == 0)] = t
        if t in wanted:
            kept[t] = u_KR, gap_R
        if t == len(rates_T):
            break
        u_KR = u_KR + rates_T[t] * gradient(bed, one, law, uniform)
        if bounded:
            u_KR = np.clip(u_KR, low_K1[:, None], high_K1[:, None])
    u_SKR, gap_SR = (np.stack([kept[t][i] for t in steps]) for i in (0, 1))
    return Paths(np.array(steps), u_SKR, gap_SR, left_R)


def _uniforms(block: range, seed: int, one: Estimator, count: int) -> Iterator[np.ndarray]:
    """For each step [B + B G, R] float32 uniforms, then once more, for the step after the last."""
    own = [generator(seed, STREAM, number) for number in block]
    width = one.num_prompts + one.rollouts
    for first in range(0, count, STRETCH):
        size = min(STRETCH, count - first)
        drawn = np.empty((len(block), size, width), dtype=np.float32)
        for row, source in zip(drawn, own, strict=True):
            source.random(dtype=np.float32, out=row)
        yield from np.ascontiguousarray(drawn.transpose(1, 2, 0))
    yield drawn[:0]


def gradient(bed: Bed, one: Estimator, law: tuple, uniform: np.ndarray) -> np.ndarray:
    """One gradient estimate of each replicate, in u: [K, R].

    Args:
        bed: whose rewards count.
        one: the estimator.
        law: of `bed.law`.
        uniform: [B + B G, R] in [0, 1): which prompts, then which completions.
    """
    probability_PYR, score_PYKR = law
    prompts, outcomes = probability_PYR.shape[:2]
    b = one.num_prompts
    prompt_BR = (uniform[:b] * np.float32(prompts)).astype(np.intp)
    counts_YBR = _counts(probability_PYR, prompt_BR, uniform[b:], one.group_size)
    rewards_YBR = bed.rewards_PY.T[:, prompt_BR]
    value_BR = None
    if one.baseline in ("oracle", "optimal"):
        value_PR = subtracted(probability_PYR, score_PYKR, bed.rewards_PY, one.baseline)
        value_BR = np.take_along_axis(value_PR, prompt_BR, axis=0)
    weight_YBR = counts_YBR * advantage(one, counts_YBR, rewards_YBR, value_BR)
    total_KR = np.zeros(score_PYKR.shape[2:])
    for x in range(prompts):
        own_YR = np.where(prompt_BR == x, weight_YBR, 0.0).sum(axis=1)
        for y in range(outcomes):
            total_KR += own_YR[y] * score_PYKR[x, y]
    return total_KR / one.rollouts


def _counts(probability_PYR, prompt_BR, uniform, group_size: int) -> np.ndarray:
    """How often each outcome occurs in each group, float64 [Y, B, R], by inverting the law."""
    uniform_GBR = uniform.reshape(group_size, *prompt_BR.shape)
    edge_PYR = probability_PYR.cumsum(axis=1)[:, :-1].astype(np.float32)
    beyond = [np.full(prompt_BR.shape, group_size, dtype=np.float32)]
    for y in range(edge_PYR.shape[1]):
        edge_BR = np.take_along_axis(edge_PYR[:, y], prompt_BR, axis=0)
        beyond.append((uniform_GBR >= edge_BR).sum(axis=0, dtype=np.float32))
    beyond.append(np.zeros(prompt_BR.shape, dtype=np.float32))
    return -np.diff(np.stack(beyond), axis=0).astype(float)


def advantage(one: Estimator, counts_YBR, rewards_YBR, value_BR=None) -> np.ndarray:
    """The advantage of each outcome, [Y, B, R]; rules are those of `estimators.baselines`.

    Raises:
        ValueError: a baseline that is not known here.
    """
    size, name = one.group_size, one.baseline
    if name == "none":
        return rewards_YBR
    if name in ("oracle", "optimal"):
        return rewards_YBR - value_BR
    mean_BR = (counts_YBR * rewards_YBR).sum(axis=0) / size
    centred_YBR = rewards_YBR - mean_BR
    if name == "leave_one_out":
        return centred_YBR * (size / (size - 1))
    if name == "group_mean":
        return centred_YBR
    if name == "group_std":
        variance_BR = (counts_YBR * np.square(centred_YBR)).sum(axis=0) / (size - 1)
        divisor_BR = np.sqrt(variance_BR) + one.epsilon
        silent_BR = variance_BR <= 1e-12  # all alike: no advantage
        return np.where(silent_BR, 0.0, centred_YBR / np.where(silent_BR, 1.0, divisor_BR))
    raise ValueError(f"baseline {name!r} cannot be simulated here")
