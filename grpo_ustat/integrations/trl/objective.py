"""Relative efficiency of the loss that a TRL run's arguments define, and sentences about it.

At the first update on a generation batch, the gradient of TRL 1.16 is a weighted sum of the
completions' scores. `estimators.row_weights` computes the weights. If an argument changes the
gradient in another way, `unmeasured` returns the reason why the loss is not measured, or
`described` names the term that is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from grpo_ustat.estimators.efficiency import RelativeEfficiency, relative_efficiency
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.losses import UNBIASED, Refusal, loss_errors, refusal
from grpo_ustat.estimators.row_weights import LOSS_TYPES, Loss
from grpo_ustat.records import Array, ScorePool

# Constant that TRL adds to a standard deviation before it divides by it.
EPSILON = 1e-4
EACH_REWARD = "normalize_then_sum"
# Number of random pairs of batches for a loss in which a row's weight depends on all rows.
DRAWS = 100
# Name of the baseline for each value of `scale_rewards`.
BASELINE_NAMES = {"none": "group_mean", "group": "group_std", "batch": "batch_std"}
WORDS = {
    "group_mean": "no std", "group_std": "std of the group", "batch_std": "std of the batch",
    "gdpo": "std of each reward",
}  # fmt: skip


def loss_of(trainer: Any) -> Loss:
    """Return the loss that a trainer's arguments declare, at the first update on a batch.

    At this update every importance ratio is 1, so `importance_sampling_level`, `epsilon` and a
    `delta` of 1 or more have no effect. With `loss_type="cispo"` and no `epsilon_high`, TRL's
    gradient is the documented gradient times a constant.

    Args:
        trainer: `trl.GRPOTrainer` for which `unmeasured` returns None.
    """
    args = trainer.args
    each = args.multi_objective_aggregation == EACH_REWARD
    baseline = "gdpo" if each else BASELINE_NAMES[args.scale_rewards]
    return Loss(
        name=args.loss_type,
        baseline=baseline,
        options={} if baseline == "group_mean" else {"epsilon": EPSILON},
        loss_type=args.loss_type,
        max_completion_length=args.max_completion_length,
        micro_batch_size=args.per_device_train_batch_size if args.loss_type == "bnpo" else None,
        mask_truncated_completions=args.mask_truncated_completions,
    )


def unmeasured(trainer: Any) -> str | None:
    """Return the reason why a trainer's loss cannot be measured, or None if it can be measured."""
    args = trainer.args
    for method in ("_compute_loss", "_generate_and_score_completions"):
        owners = [kind.__name__ for kind in type(trainer).__mro__ if method in vars(kind)]
        if owners and owners[0] != "GRPOTrainer":
            return f"{owners[0]} overrides {method}"
    if args.loss_type not in LOSS_TYPES:
        return f"loss_type={args.loss_type} is not a loss of TRL 1.16"
    if args.scale_rewards not in BASELINE_NAMES:
        return f"scale_rewards={args.scale_rewards} is not one of {', '.join(BASELINE_NAMES)}"
    if args.top_entropy_quantile < 1:
        return f"top_entropy_quantile={args.top_entropy_quantile} excludes tokens by their entropy"
    if args.entropy_coef or args.use_adaptive_entropy:
        return "the entropy bonus is not part of the scores"
    if args.delta is not None and args.delta < 1:
        return f"delta={args.delta} clips every ratio of a positive advantage"
    return None


def rollouts_of(trainer: Any) -> int:
    """Return n, the number of completions per optimizer update on all ranks together."""
    args = trainer.args
    ranks = trainer.accelerator.num_processes
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks


def described(trainer: Any) -> str:
    """Describe the loss in a few words, including terms that are not measured.

    >>> from types import SimpleNamespace as Some
    >>> args = Some(loss_type="dapo", scale_rewards="group", mask_truncated_completions=True,
    ...     multi_objective_aggregation="sum_then_normalize", max_completion_length=64, beta=0.04)
    >>> described(Some(args=args))
    'dapo, std of the group, truncated completions masked, without its penalty of beta = 0.04'
    """
    loss, args = loss_of(trainer), trainer.args
    words = [loss.loss_type, WORDS[loss.baseline]]
    if loss.mask_truncated_completions:
        words.append("truncated completions masked")
    if args.beta:
        words.append(f"without its penalty of beta = {args.beta:g}")
    if getattr(trainer, "aux_loss_enabled", False):
        words.append("without its load-balancing loss")
    return ", ".join(words)


@dataclass(frozen=True)
class OwnLoss:
    """Relative efficiency of a run's loss, estimated from groups on which the run trained."""

    # Description of the loss; see `described`.
    words: str
    # n of the run.
    rollouts: int
    # Number of groups that were measured.
    groups: int
    # Reason why the efficiency is unknown, in words.
    reason: str | None = None
    # True if the expected update provably has the direction of the gradient of the mean reward.
    unbiased: bool = False
    # Text that names the objective of the unbiased gradient. It is empty unless the loss normalises
    # the rewards of each function separately.
    compared: str = ""
    # Relative efficiency at G; None if it is unknown, and `reason` then says why.
    efficiency: RelativeEfficiency | None = None

    @property
    def decided(self) -> bool:
        """True if the relative efficiency has a finite estimate."""
        return self.efficiency is not None and math.isfinite(
            self.efficiency.efficiency_same_g.estimate
        )

    @property
    def cosine(self) -> Interval:
        """Cosine of the expected update and the gradient; NaN unless the efficiency is decided."""
        if self.efficiency is None or not self.decided:
            return Interval(math.nan, 0.0, 1.0)
        return Interval(*(math.sqrt(max(0.0, square)) for square in self.efficiency.direction))

    def line(self) -> str:
        """Return a sentence with the efficiency and the direction, or with the reason for none."""
        loss = f"Your loss ({self.words})"
        if self.efficiency is None:
            return f"{loss}: {self.reason}."
        if not self.decided:
            return (
                f"{loss}: {self.groups} groups do not determine the relative efficiency"
                f"{self._noise()}."
            )
        direction = "Its direction is unbiased"
        if not self.unbiased:
            direction = (
                "The cosine between its expected update and this gradient is "
                f"{_two_digits(self.cosine)}"
            )
        return (
            f"{loss} has relative efficiency {_two_digits(self.efficiency.efficiency_same_g)} "
            f"against the unbiased gradient{self.compared}. {direction}."
        )

    def numbers(self) -> dict[str, float]:
        """Return the estimates that are known, keyed by their name in TRL's metrics."""
        if self.efficiency is None:
            return {}
        values = {
            "loss/relative_efficiency": self.efficiency.efficiency_same_g.estimate,
            "loss/cosine": self.cosine.estimate,
            "loss/noise": self.efficiency.noise.estimate,
        }
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def _noise(self) -> str:
        """Return a clause on the noise as a share of an update; empty if the share is unknown."""
        assert self.efficiency is not None
        share, low, high = (100 * x for x in self.efficiency.noise)
        if not math.isfinite(share):
            return ""
        ends = f"[{low:.0f}, {high:.0f}]"
        return f"; an update of {self.rollouts} rollouts is {share:.0f} {ends} % noise"


def own_loss(pool: ScorePool, loss: Loss, rollouts: int, words: str, draws: int = DRAWS) -> OwnLoss:
    """Estimate the efficiency of a loss at the group size of a pool.

    Args:
        pool: groups on which a run trained; the N completions of a prompt are its group. Scores may
            be 0 for groups whose rewards are equal for every reward function. If the loss
            normalises each function's rewards (`EACH_REWARD`), pass a result of `with_functions`.
        loss: loss of the run; see `loss_of`.
        rollouts: number of rollouts per update, n.
        words: description of the loss; see `described`.
        draws: number of random pairs of batches for a loss in which a row's weight depends on all
            rows of its batch.
    """
    groups, size = pool.rewards_PN.shape
    fault = refusal(pool, loss, size, rollouts)
    if fault is not None:
        return OwnLoss(words, rollouts, groups, _reason(fault, size, rollouts))
    errors = loss_errors(pool, {UNBIASED: [size], loss: [size]}, rollouts, draws, seed=0)
    unbiased = {size: errors[UNBIASED, size].error_D}
    return OwnLoss(
        words, rollouts, groups,
        unbiased=loss.scale(size) is not None,
        compared=" of the rewards' weighted sum" if loss.baseline == "gdpo" else "",
        efficiency=relative_efficiency(errors[loss, size], size, unbiased),
    )  # fmt: skip


def with_functions(pool: ScorePool, weights_F: Array) -> ScorePool:
    """Return a pool without missing rewards, for a loss that normalises each function's rewards.

    A reward function can return None. If it returned None for all completions of a group, TRL lets
    it have no effect on the group; its rewards become 0 here, because equal rewards have no effect
    either. If it returned None for only some completions of a group, TRL normalises the function's
    remaining rewards among themselves. No baseline of this package does this, so the group is left
    out.

    Args:
        pool: pool with the rewards of each function; NaN if a function returned None.
        weights_F: weights of the reward functions.
    """
    assert pool.rewards_PNF is not None
    none_PF = np.isnan(pool.rewards_PNF).sum(axis=1)
    complete_P = np.isin(none_PF, (0, pool.rewards_PNF.shape[1])).all(axis=1)
    arrays = {
        name: value[complete_P]
        for name, value in vars(pool).items()
        if isinstance(value, np.ndarray) and name != "reward_weights_F"
    }
    arrays["rewards_PNF"] = np.nan_to_num(arrays["rewards_PNF"])
    return replace(pool, **arrays, reward_weights_F=weights_F)


def ratio_factors(
    trainer: Any, log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor, sign_B: torch.Tensor
) -> torch.Tensor | None:
    """Return the factor that TRL 1.16's loss applies to each token because of its ratio pi/pi_old.

    The factor multiplies the gradient of the token's log-probability, in addition to the weight
    from `row_weights`. All factors are 1 if every ratio pi/pi_old is 1.

    Args:
        trainer: `trl.GRPOTrainer` with the arguments of the loss.
        log_ratio_BT: log pi - log pi_old of each token.
        mask_BT: 1 for tokens that contribute to the loss.
        sign_B: sign of each row's advantage, -1 or 1, which determines the clipping of ratios.

    Returns:
        Factors, [B, T], or [B, 1] with `importance_sampling_level="sequence"`. None if the loss
        type is not covered.
    """
    args, loss_type = trainer.args, trainer.args.loss_type
    log_BT, sign_B1 = log_ratio_BT.detach(), sign_B.to(log_ratio_BT)[:, None]
    if trainer.importance_sampling_level == "sequence":
        log_BT = ((log_BT * mask_BT).sum(-1) / mask_BT.sum(-1).clamp(min=1.0))[:, None]
    if loss_type == "cispo":
        # The division removes a constant factor, which the audit reports as a fault.
        return log_BT.exp().clamp(max=trainer.epsilon_high) / min(1.0, trainer.epsilon_high)
    with torch.enable_grad():
        ratio_BT = log_BT.requires_grad_().exp()
        if loss_type == "sapo":
            pos, neg = args.sapo_temperature_pos, args.sapo_temperature_neg
            sharpness_B1 = torch.where(sign_B1 > 0, pos, neg)
            gain_BT = (sharpness_B1 * (ratio_BT - 1)).sigmoid() * 4 / sharpness_B1 * sign_B1
        elif loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
            near_BT = ratio_BT.clamp(1 - trainer.epsilon_low, 1 + trainer.epsilon_high)
            capped_BT = ratio_BT if args.delta is None else ratio_BT.clamp(max=args.delta)
            gain_BT = torch.min(capped_BT * sign_B1, near_BT * sign_B1)
        else:
            return None
        return torch.autograd.grad(gain_BT.sum(), log_BT)[0] * sign_B1


def _reason(fault: Refusal, size: int, rollouts: int) -> str:
    """Return the reason for a refusal in the words of a training run (groups, rollouts)."""
    if fault.kind in ("questions", "coupled questions"):
        return (
            f"not decided yet; {fault.needed} groups are needed, but only {fault.available} were "
            "measured"
        )
    if fault.kind == "no multiple":
        return f"an update of {rollouts} rollouts is not a multiple of num_generations={size}"
    return f"it cannot be measured here ({fault.kind})"


def _two_digits(value: Interval) -> str:
    return f"{value.estimate:.2f} [{value.low:.2f}, {value.high:.2f}]"
