"""Noise scale and bounds of G* from the gradient norms of several steps; see `watch`.

G* is the group size with the smallest gradient error. Two things decide which quantities the norms
determine: how groups are divided into micro-batches, and how ranks combine their gradients.
`estimators.micro_batch_norms` derives the formulas for each case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.groups import gstar_bounds
from grpo_ustat.estimators.intervals import MIN_UNITS, UNDETERMINED, Interval
from grpo_ustat.estimators.micro_batch_norms import (
    Layout,
    law_of_blocks,
    law_of_norms,
    signal_and_noise_of_ranks,
)
from grpo_ustat.estimators.scaling import C2, GRAD_SQ, ScalingLaw, noise_share
from grpo_ustat.records import Array

# Ways in which ranks combine gradients. DDP: ranks average whole gradients at the end of a backward
# pass. SHARDED: ranks average gradients, and each rank keeps a part of the average. SEPARATE: each
# rank keeps its own gradient until the optimizer step.
DDP, SHARDED, SEPARATE = "DDP", "sharded", "separate"
# Indices of the six numbers that describe a step on a rank: number of micro-batches; squared norm
# of the accumulated gradient; sum of the squared norms of the micro-batches' own gradients (NaN if
# unknown); then three numbers that `norm_weights` computes, of which SIGNAL is the first.
COUNT, SQ_NORM, OWN_SUM, SIGNAL = range(4)
NUMBERS = 6
# The estimates use the second half of the steps, but at least the last 8.
MIN_STEPS = 8
# If the squared norms of ranks differ by less than this relative amount, they count as equal.
EQUAL = 1e-6


@dataclass(frozen=True)
class NormEstimate:
    """Estimates from the recent steps."""

    # Intervals by name. `noise_scale` is the noise scale in rollouts at the group size in use.
    # `grad_sq` is the squared length of the expected gradient. `noise_share` is the share of the
    # squared gradient norm that is noise. If `no_gstar` is empty, `gstar_least`, `gstar_most` and
    # `gstar` are bounds of G*.
    intervals: dict[str, Interval]
    # Number of steps from which the estimates were computed.
    steps: int
    # Reason why nothing could be measured; empty if the measurement succeeded.
    problem: str = ""
    # Reason why the noise scale is only bounded from below; empty if it is estimated.
    only_bound: str = ""
    # Reason why G* is unknown; empty if it is bounded.
    no_gstar: str = ""


@dataclass(frozen=True)
class StepRows:
    """Number and order of an optimizer step's rollouts, and their division over ranks.

    Raises:
        ConfigError: if the numbers do not divide each other as they must.
    """

    # Number of rollouts per step, n, summed over ranks.
    rollouts: int
    # Group size, G; None if every row has its own prompt.
    group_size: int | None
    # True if the rows of a group are consecutive.
    together: bool
    # Way in which ranks combine gradients: DDP, SHARDED or SEPARATE.
    way: str
    # Number of ranks.
    world: int
    # Number of ranks with different rollouts; the other ranks hold copies of these rollouts.
    data_ranks: int

    def __post_init__(self):
        size = self.group_size
        if self.rollouts < 1 or (size is not None and (size < 2 or self.rollouts % size)):
            raise ConfigError(
                f"rollouts={self.rollouts}, group_size={size}: use a group size of at least 2 that "
                "divides the number of rollouts per optimizer step"
            )
        if self.data_ranks < 1 or self.world % self.data_ranks or self.rollouts % self.data_ranks:
            raise ConfigError(
                f"data_ranks={self.data_ranks}: it must divide rollouts={self.rollouts} and the "
                f"number of ranks, {self.world}"
            )
        if self.way != SHARDED and self.data_ranks != self.world:
            raise ConfigError(
                f"data_ranks={self.data_ranks} of {self.world} ranks: ranks may have the same "
                "rollouts only if the gradients are sharded (FSDP2)"
            )

    def per_micro_batch(self, count: int) -> float:
        """Return the number of rows in a rank's micro-batch if a step has `count` micro-batches."""
        return self.rollouts / (count * self.data_ranks)

    def has_parts(self, count: int) -> bool:
        """Return True if each micro-batch contains only a part of a group.

        Args:
            count: number of micro-batches per step and rank.
        """
        in_order = self.group_size is not None and self.together
        return in_order and self.per_micro_batch(count) < (self.group_size or 0)

    def layout(self, count: int) -> Layout:
        """Return the division of groups over micro-batches, with `count` micro-batches per rank."""
        if self.group_size is None or self.way == DDP or not self.has_parts(count):
            return Layout(count)
        return Layout(count, round(self.group_size / self.per_micro_batch(count)))

    def estimate(self, steps_SRN: Sequence[Array]) -> NormEstimate:
        """Estimate the noise scale and the bounds of G* from the numbers of all steps.

        Args:
            steps_SRN: for each of S steps, an array [R, N] with the N = 6 numbers of each of R
                ranks. The first two numbers are finite.
        """
        if len(steps_SRN) < MIN_UNITS:
            needed = f"at least {MIN_UNITS} are needed"
            return NormEstimate(
                {}, 0, f"{len(steps_SRN)} steps so far have finite gradients, but {needed}"
            )
        count = int(steps_SRN[-1][0, COUNT])
        if problem := self._problem(steps_SRN[-1]):
            return NormEstimate({}, 0, problem)
        alike = [step for step in steps_SRN if self._is_usable(step, self.has_parts(count))]
        recent = alike[-max(MIN_STEPS, len(alike) - len(alike) // 2) :]
        if len(recent) < MIN_UNITS:
            return NormEstimate(
                {}, 0,
                f"{len(recent)} steps have two micro-batches to compare, but at least {MIN_UNITS} "
                "are needed",
            )  # fmt: skip
        return self._estimate(self._law(np.stack(recent)), count, len(recent))

    def _estimate(self, law: ScalingLaw, count: int, steps: int) -> NormEstimate:
        """Return the quantities that the division of groups over micro-batches determines.

        Args:
            law: scaling law of the gradient error.
            count: number of micro-batches per step and rank.
            steps: number of steps from which the law was estimated.
        """
        size, only_bound, no_gstar = self.group_size, self._only_bound(count), self._no_gstar(count)
        # Without groups, `_law` puts the whole noise into C2, and any group size gives this result.
        scale = law.noise_scale(size or 2)
        intervals = {"noise_scale": scale, "grad_sq": law.linear(GRAD_SQ)}
        if only_bound:
            intervals["noise_scale"] = Interval(math.nan, scale.low, math.inf)
            intervals["grad_sq"] = UNDETERMINED
        intervals["noise_share"] = noise_share(intervals["noise_scale"], self.rollouts)
        if size is not None and not no_gstar:
            intervals |= gstar_bounds(law, (size - 1) * C2)
        return NormEstimate(intervals, steps, "", only_bound, no_gstar)

    def _law(self, steps_SRN: Array) -> ScalingLaw:
        """Estimate the constants of the scaling law that the steps determine."""
        size, count = self.group_size or 1, int(steps_SRN[0, 0, COUNT])
        if self.way == DDP:
            sums_SN = steps_SRN.sum(axis=1)
            signal_S, noise_S = signal_and_noise_of_ranks(
                steps_SRN[:, 0, SQ_NORM], sums_SN[:, OWN_SUM], self.world, sums_SN[:, COUNT]
            )
            return law_of_norms(signal_S, noise_S, self.rollouts, size)
        rollouts, ranks = float(self.rollouts), self.data_ranks
        # Sharded gradients: the numbers of all ranks add up to those of the whole gradient.
        # Separate gradients: the numbers of the ranks are averaged.
        values_3S = steps_SRN[:, :, SIGNAL:].sum(axis=1).T
        if self.way == SEPARATE:
            values_3S, rollouts, ranks = values_3S / self.world, rollouts / self.world, 1
        if self.has_parts(count):
            return law_of_blocks(values_3S, rollouts, size, ranks)
        return law_of_norms(values_3S[0], values_3S[1], rollouts, size)

    def _is_usable(self, step_RN: Array, has_parts: bool) -> bool:
        """Return True if a step has micro-batches to compare and matches `has_parts`.

        Args:
            step_RN: six numbers of each rank.
            has_parts: True to require micro-batches with parts of groups, False to require
                micro-batches with whole groups.
        """
        if self.way == DDP:
            is_known = np.isfinite(step_RN[:, OWN_SUM]).all() and step_RN[:, COUNT].sum() >= 2
        else:
            is_known = np.isfinite(step_RN[:, SIGNAL:]).all()
        return bool(is_known) and self.has_parts(int(step_RN[0, COUNT])) == has_parts

    def _problem(self, step_RN: Array) -> str:
        """Return the reason why the noise of a step cannot be measured, or an empty text."""
        count = int(step_RN[0, COUNT])
        rows, norms_R = self.per_micro_batch(count), step_RN[:, SQ_NORM]
        if self.way == SEPARATE and self.world > 1 and np.ptp(norms_R) < EQUAL * norms_R[0]:
            return (
                f"the {self.world} ranks have equal gradients, but the model is not wrapped by DDP "
                "or FSDP: pass the wrapped model, which the loop calls"
            )
        if self.together and self.group_size is not None and not _divide(rows, self.group_size):
            return (
                f"micro-batches of {rows:g} rows cut groups of {self.group_size}: use a multiple "
                "or a divisor of the group size, or prompts_together=False"
            )
        if self._is_usable(step_RN, self.has_parts(count)):
            return ""
        if self.way == DDP and step_RN[:, COUNT].sum() >= 2:
            return "several backward passes for one call of the model are not supported in DDP"
        if self.has_parts(count):
            return (
                f"a step has {count} micro-batches of {rows:g} rows per rank, so there are not two "
                f"groups of {self.group_size} per rank to compare"
            )
        where = "of all ranks together" if self.way == SHARDED and self.world > 1 else "per rank"
        return (
            f"a step has {count} micro-batch {where}, so there is nothing to compare: use at least "
            "two micro-batches per step"
        )

    def _only_bound(self, count: int) -> str:
        """Return the reason why the noise scale is only a lower bound, or an empty text."""
        if self.group_size is None:
            return ""
        if not self.together:
            return (
                "micro-batches may share prompts, so the noise from drawing prompts is not visible;"
                " if the rows of a prompt are consecutive, use prompts_together=True"
            )
        if self.way == DDP and self.has_parts(count):
            return (
                f"a micro-batch of {self.per_micro_batch(count):g} rows contains only a part of a "
                f"group of {self.group_size}, and parts of groups are not compared in DDP"
            )
        return ""

    def _no_gstar(self, count: int) -> str:
        """Return the reason why G* is not known, or an empty text."""
        if self.group_size is None:
            return "group_size is not given"
        if only_bound := self._only_bound(count):
            return only_bound
        if not self.has_parts(count):
            return (
                "micro-batches with whole groups do not separate the noise from prompts and the "
                "noise from completions; use micro-batches that contain only a part of a group of "
                f"{self.group_size}"
            )
        return ""


def _divide(rows: float, size: int) -> bool:
    """Return True if micro-batches consist of whole groups or of equal parts of a group."""
    return rows == round(rows) and (rows % size == 0 or size % rows == 0)
