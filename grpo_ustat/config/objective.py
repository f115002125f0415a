"""Schema of an objective, which turns advantages and log-probabilities into a gradient."""

from __future__ import annotations

from dataclasses import dataclass, fields

from grpo_ustat.config.baseline import BaselineConfig
from grpo_ustat.config.schema import ConfigError, field
from grpo_ustat.estimators.row_weights import (
    DROP,
    KEEP,
    LOSS_TYPES,
    REPLACE,
    ZERO_VARIANCE,
    Loss,
    RowFilter,
)
from grpo_ustat.estimators.token_weights import TokenWeights

OBJECTIVES = (
    "algorithm1", "grpo", "grpo_original", "dr_grpo", "dapo", "gspo", "whole_sequence",
    "trl_dapo", "trl_grpo", "trl_dr_grpo", "trl_bnpo", "trl_gspo", "trl_cispo", "trl_luspo",
    "trl_sapo", "trl_vespo", "verl_token_mean", "verl_seq_mean_token_sum",
    "verl_seq_mean_token_mean", "verl_seq_mean_token_sum_norm",
)  # fmt: skip
LEVELS = ("none", "token", "sequence", "whole_sequence")
# `LOSS_TYPES_OF`: loss types that a level with one ratio per completion allows. `LEVEL_OF`: the
# only level that a loss type allows. Other combinations would apply a sequence's ratio once for
# each token.
LOSS_TYPES_OF = {"sequence": ("grpo", "luspo"), "whole_sequence": ("sum", "vespo")}
LEVEL_OF = {"luspo": "sequence", "vespo": "whole_sequence", "cispo": "token", "sapo": "token"}
# Loss types with a smooth weight instead of clipping.
UNCLIPPED = ("sapo", "vespo")
KL_ESTIMATORS, KL_PLACES = ("k1", "k2", "k3"), ("loss", "reward")


@dataclass
class ObjectiveConfig:
    """Loss that turns advantages and log-probabilities into a gradient; see train/objective.py.

    The defaults are those of the paper's Algorithm 1.
    """

    name: str = field(
        "name of the objective, part of the run folder's name; set by objective=NAME",
        choices=OBJECTIVES,
    )
    importance_sampling_level: str = field(
        "importance ratio to the sampling policy; none: no ratio; token: one ratio per token; "
        "sequence: geometric mean of a completion's token-level ratios; whole_sequence: product "
        "of a completion's token-level ratios",
        choices=LEVELS,
        default="none",
    )
    loss_type: str = field(
        "number by which the sum over tokens is divided; sum and luspo: n, the number of "
        "completions in the update; dr_grpo: n x max_completion_length; dapo, cispo and vespo: "
        "number of tokens in the update; grpo and sapo: n x number of tokens in the completion; "
        "bnpo: number of tokens in the micro-batch x number of micro-batches",
        choices=LOSS_TYPES,
        default="sum",
    )
    micro_batch_size: int | None = field(
        "in a micro-batch; sets the divisor of loss_type=bnpo; must be null with any other "
        "loss_type",
        "completions",
        positive=True,
        default=None,
    )
    mask_truncated_completions: bool = field(
        "exclude truncated completions (without an end token) from the gradient; they still "
        "count in n and in the baseline",
        default=False,
    )
    top_entropy_quantile: float = field(
        "share of the update's tokens that contribute to the gradient; those with the highest "
        "entropy are chosen; divisor and KL penalty still include all tokens",
        at_least=0,
        default=1.0,
    )
    zero_variance_groups: str = field(
        "what to do with groups whose rewards are all equal; keep: leave them in the update; "
        "drop: exclude them, also from the counts of completions and tokens; replace (only in "
        "mse): draw new groups until rewards differ, as in DAPO",
        choices=ZERO_VARIANCE,
        default=KEEP,
    )
    reward_variance_share: float = field(
        "keep the smallest number of groups that together have this share of the update's reward "
        "variance (RAGEN-2); 1: keep all groups",
        positive=True,
        default=1.0,
    )
    num_iterations: int = field("over each batch", "passes", positive=True, default=1)
    num_minibatches: int = field(
        "of equally many prompts into which a batch is split; each minibatch gives an update",
        "minibatches",
        positive=True,
        default=1,
    )
    epsilon: float | None = field(
        "ratios are clipped from below at 1 - epsilon; null: no clipping from below",
        positive=True,
        below=1,
        default=None,
    )
    epsilon_high: float | None = field(
        "ratios are clipped from above at 1 + epsilon_high, or with loss_type=cispo at "
        "epsilon_high; null: no clipping from above",
        positive=True,
        default=None,
    )
    beta: float = field(
        "coefficient of the KL penalty relative to the reference model", at_least=0, default=0.0
    )
    kl_estimator: str | None = field(
        "estimator of the KL penalty; null: no penalty", choices=KL_ESTIMATORS, default=None
    )
    kl_in: str | None = field(
        "quantity to which the KL penalty is added; null: no penalty",
        choices=KL_PLACES,
        default=None,
    )
    entropy_coef: float = field("coefficient of the entropy bonus", at_least=0, default=0.0)

    @property
    def rows(self) -> RowFilter:
        """Filter that selects the completions that contribute to an update."""
        return RowFilter(self.zero_variance_groups, self.reward_variance_share)

    def loss(self, baseline: BaselineConfig, max_completion_length: int) -> Loss:
        """Return the loss at a batch's first update, with advantages from `baseline`."""
        return Loss(
            name=self.name,
            baseline=baseline.name,
            options=baseline.options,
            loss_type=self.loss_type,
            max_completion_length=max_completion_length,
            micro_batch_size=self.micro_batch_size,
            mask_truncated_completions=self.mask_truncated_completions,
            rows=self.rows,
        )

    def token_weights(self) -> TokenWeights:
        """Return the token weights for a policy that differs from the sampling policy."""
        form = self.loss_type if self.loss_type in ("cispo", "sapo", "vespo") else "clip"
        return TokenWeights(
            level=self.importance_sampling_level,
            form=form,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
            beta=self.beta,
            kl_estimator=self.kl_estimator if self.beta else None,
            kl_in=self.kl_in if self.beta else None,
        )

    def update_size(self, rollouts: int) -> int:
        """Return the number of completions per update if the batch has `rollouts` completions."""
        return rollouts // self.num_minibatches

    def check(self) -> None:
        """Refuse an invalid objective."""
        level, passes = self.importance_sampling_level, self.num_iterations
        if self.name == "algorithm1":
            for declared in fields(self)[1:]:
                name = declared.name
                if getattr(self, name) != declared.default:
                    raise ConfigError(
                        "objective=algorithm1 is fixed (one update per batch, no importance ratio, "
                        f"no KL penalty), but objective.{name}={getattr(self, name)}: use "
                        "objective=grpo"
                    )
        if self.name == "whole_sequence" and passes > 1:
            raise ConfigError(
                "objective=whole_sequence is the unbiased reference, but "
                f"objective.num_iterations={passes}: a second pass over the same completions is "
                "biased with any ratio; use objective.num_minibatches for more updates, or "
                "objective=grpo objective.importance_sampling_level=whole_sequence for several "
                "passes"
            )
        self._check_loss_type()
        self._check_tokens()
        self._check_rows()
        low, high = self.epsilon, self.epsilon_high
        if (low is None) != (high is None) and self.loss_type != "cispo":
            raise ConfigError(
                f"objective.epsilon={low} epsilon_high={high}: set both (PPO uses equal values) or "
                "neither"
            )
        if low is not None and level == "none":
            raise ConfigError(
                f"objective.epsilon={low} clips a ratio, but importance_sampling_level=none has "
                "no ratio: use importance_sampling_level=token, or epsilon=null epsilon_high=null"
            )
        kind, place = self.kl_estimator, self.kl_in
        if (kind is None) != (place is None):
            raise ConfigError(
                f"objective.kl_estimator={kind} kl_in={place}: set both or neither, such as "
                "kl_estimator=k3 kl_in=loss"
            )
        if self.beta and kind is None:
            raise ConfigError(
                f"objective.beta={self.beta} weights a KL penalty, but kl_estimator=null: set "
                "kl_estimator=k3 kl_in=loss"
            )
        if (kind, place) == ("k1", "loss"):
            raise ConfigError(
                "objective.kl_estimator=k1 in the loss has a gradient of mean zero on-policy "
                "(E grad log pi = 0): use kl_in=reward, or k2 or k3 in the loss"
            )
        if place == "reward" and kind != "k1":
            raise ConfigError(
                f"objective.kl_estimator={kind} in the reward would give a wrong gradient: only "
                "for k1, E[estimator x grad log pi] is the gradient of the KL divergence; use k1 "
                "or kl_in=loss"
            )

    def _check_loss_type(self) -> None:
        """Refuse a ratio, clipping or micro-batches that the loss type does not support."""
        level, loss_type = self.importance_sampling_level, self.loss_type
        own_level = LEVEL_OF.get(loss_type, level)
        if level != own_level:
            raise ConfigError(
                f"objective.loss_type={loss_type} with importance_sampling_level={level}: this "
                f"loss type is defined only for level {own_level}, use "
                f"objective.importance_sampling_level={own_level}"
            )
        fitting = LOSS_TYPES_OF.get(level, (loss_type,))
        if loss_type not in fitting:
            raise ConfigError(
                f"objective.importance_sampling_level={level} with loss_type={loss_type} "
                "would count a sequence's ratio once per token: use "
                f"loss_type={' or '.join(fitting)}"
            )
        low, high = self.epsilon, self.epsilon_high
        if loss_type in UNCLIPPED and (low is not None or high is not None):
            raise ConfigError(
                f"objective.epsilon={low} epsilon_high={high} with loss_type={loss_type}, which "
                "has no clipping: use epsilon=null epsilon_high=null"
            )
        if loss_type == "cispo" and (low is not None or (high is not None and high < 1)):
            raise ConfigError(
                f"objective.epsilon={low} epsilon_high={high} with loss_type=cispo, which clips "
                "ratios only from above, at epsilon_high, and needs epsilon_high of at least 1: "
                "use epsilon=null epsilon_high=5"
            )
        if (loss_type == "bnpo") != (self.micro_batch_size is not None):
            reason, fix = (
                "only bnpo divides by the tokens of a micro-batch",
                "micro_batch_size=null",
            )
            if loss_type == "bnpo":
                reason = "bnpo divides by the tokens of a micro-batch"
                fix = "objective.micro_batch_size=8"
            raise ConfigError(
                f"objective.loss_type={loss_type} with micro_batch_size={self.micro_batch_size}, "
                f"but {reason}: use {fix}"
            )

    def _check_tokens(self) -> None:
        """Refuse an invalid `top_entropy_quantile`, the share of tokens that contribute."""
        share, level = self.top_entropy_quantile, self.importance_sampling_level
        if share > 1:
            raise ConfigError(
                f"objective.top_entropy_quantile={share} is not a share: use a number between 0 "
                "and 1"
            )
        if share < 1 and level in LOSS_TYPES_OF and self.loss_type != "vespo":
            raise ConfigError(
                f"objective.top_entropy_quantile={share} with importance_sampling_level={level}, "
                "which has one ratio for all tokens: use importance_sampling_level=token or "
                "top_entropy_quantile=1"
            )
        if share < 1 and self.entropy_coef:
            raise ConfigError(
                f"objective.top_entropy_quantile={share} with entropy_coef={self.entropy_coef}, "
                "but an entropy bonus for only some tokens is not supported: use entropy_coef=0 or "
                "top_entropy_quantile=1"
            )

    def _check_rows(self) -> None:
        """Refuse an invalid filter of completions."""
        share = self.reward_variance_share
        if share > 1:
            raise ConfigError(
                f"objective.reward_variance_share={share} is not a share of the update's reward "
                "variance: use a number above 0 and at most 1"
            )
        if self.loss_type == "bnpo" and self.rows.couples:
            raise ConfigError(
                f"objective.loss_type=bnpo with zero_variance_groups={self.zero_variance_groups} "
                f"reward_variance_share={share}, but bnpo does not support the exclusion of "
                "completions: use loss_type=dapo, or zero_variance_groups=keep "
                "reward_variance_share=1"
            )

    def check_updates(self, group_size: int, rollouts: int) -> None:
        """Refuse updates that split groups, and several updates per batch without a ratio.

        Args:
            group_size: number of completions per prompt.
            rollouts: number of completions per step.
        """
        kind, share = self.zero_variance_groups, self.reward_variance_share
        if kind == REPLACE:
            raise ConfigError(
                f"objective.zero_variance_groups={kind}, but train samples each batch once and "
                f"does not redraw groups: use objective.zero_variance_groups={DROP}"
            )
        if group_size == 1 and (kind == DROP or share < 1):
            raise ConfigError(
                f"objective.zero_variance_groups={kind} reward_variance_share={share} with "
                "group_size=1: one completion has no variance of rewards, use group_size=2 or more"
            )
        count, prompts = self.num_minibatches, rollouts // group_size
        if prompts % count:
            fitting = max(d for d in range(1, count + 1) if prompts % d == 0)
            raise ConfigError(
                f"objective.num_minibatches={count} does not divide the {prompts} prompts of a "
                f"step (budget.rollouts={rollouts} / group_size={group_size}): use "
                f"objective.num_minibatches={fitting}, or another budget.rollouts"
            )
        update_size, micro = self.update_size(rollouts), self.micro_batch_size
        if micro is not None and update_size % micro:
            fitting = max(d for d in range(1, micro + 1) if update_size % d == 0)
            raise ConfigError(
                f"objective.micro_batch_size={micro} does not divide the {update_size} completions "
                f"of an update: use objective.micro_batch_size={fitting}"
            )
        several = self.num_iterations > 1 or update_size < rollouts
        if several and self.importance_sampling_level == "none":
            raise ConfigError(
                f"objective.num_iterations={self.num_iterations} with {update_size} completions "
                f"per update of budget.rollouts={rollouts}: each update after the first uses "
                "completions that an older policy sampled, and therefore needs an importance "
                "ratio; use objective.importance_sampling_level=token, or one update per batch"
            )
