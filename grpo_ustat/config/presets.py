"""Published losses and their sources, as presets for `objective=NAME` and as recipes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from grpo_ustat.config.baseline import BaselineConfig, baseline_choice
from grpo_ustat.config.objective import ObjectiveConfig
from grpo_ustat.estimators.row_weights import KEEP, REPLACE, Loss


@dataclass(frozen=True)
class Preset:
    """Choice of `objective=NAME`."""

    # Description for `--help`.
    words: str
    objective: ObjectiveConfig
    # Baseline that the preset sets unless the user types `baseline=`; None means that the command's
    # default is kept.
    baseline: BaselineConfig | None = None


PRESETS: dict[str, Preset] = {}


def _add(
    name: str,
    words: str,
    base: str | None,
    baseline: BaselineConfig | None = None,
    **changes: object,
) -> None:
    """Add a preset to `PRESETS`.

    Args:
        name: name of the preset.
        words: description of the preset.
        base: name of the preset whose fields and baseline are copied; None means that all fields
            have their defaults.
        baseline: baseline of the preset; None means the baseline of `base`.
        changes: fields that differ from `base`.
    """
    if base is None:
        objective = ObjectiveConfig(name=name)
    else:
        objective, baseline = PRESETS[base].objective, baseline or PRESETS[base].baseline
    PRESETS[name] = Preset(words, replace(objective, name=name, **changes), baseline)


# Presets from papers. These presets set no baseline; the baseline of each paper is given in the
# description or in a comment.
_add(
    "algorithm1",
    "The paper's Algorithm 1: sum over tokens divided by a constant, one update per batch, no "
    "importance ratio, no KL penalty.",
    None,
)
# The baseline of Algorithm 2 is group_std; experiment=algorithm2 sets both loss and baseline.
_add(
    "grpo",
    "The paper's Algorithm 2: token-level importance ratios to the policy that sampled the batch, "
    "one pass over its minibatches, KL penalty with estimator K3.",
    None,
    # Each token has a ratio rho_it. The sum over tokens is divided by n. K3 is part of the loss,
    # and clipping is optional.
    importance_sampling_level="token",
    kl_estimator="k3",
    kl_in="loss",
    # Our choice, as in GSPO. The paper splits a batch but does not give the number of minibatches.
    num_minibatches=4,
    # Our choice, as in Shao et al. 2024. The paper gives no value.
    beta=0.04,
)
# DeepSeekMath, arXiv 2402.03300. Its baseline is group_std.
_add(
    "grpo_original",
    "Shao et al. 2024 (GRPO as published): clipped token-level ratios, mean over each "
    "completion's tokens, KL penalty with estimator K3.",
    "grpo",
    # Equation 3 of the paper: 1/|o_i|.
    loss_type="grpo",
    # Section 4.2 of the paper: one update after each exploration stage. All ratios are therefore 1,
    # and clipping has no effect.
    num_minibatches=1,
    # Our choice; it is PPO's value (Schulman et al. 2017). The paper gives no value.
    epsilon=0.2,
    epsilon_high=0.2,
    # Section 4.2 of the paper.
    beta=0.04,
)
_add(
    "dr_grpo",
    "Zichen Liu et al. 2025: clipped token-level ratios, sum over tokens divided by a constant, no "
    'KL penalty. "Understanding R1-Zero-like training", arXiv 2503.20783; its baseline is '
    "group_mean.",
    "grpo",
    # Section 3.2 of the paper. The constant is max_completion_length in the authors' code.
    loss_type="dr_grpo",
    # 7B recipe in the authors' code: 128 prompts x 8 completions, 128 completions per update, no
    # penalty.
    num_minibatches=8,
    beta=0.0,
    # Value of PPO (Schulman et al. 2017) and default of the authors' code.
    epsilon=0.2,
    epsilon_high=0.2,
)
# DAPO's dynamic sampling is zero_variance_groups=replace. `mse` measures it; `train` refuses it,
# because `train` samples a batch only once. DAPO's penalty for overlong answers is part of the
# reward, not of the objective.
_add(
    "dapo",
    "Yu et al. 2025: token-level ratios with a wider clipping range above 1 than below 1, equal "
    "weight for all tokens of the update, no KL penalty. arXiv 2503.14476; its baseline is "
    "group_std.",
    "grpo",
    # Section 3.3 of the paper.
    loss_type="dapo",
    # Section 4.1 of the paper: 512 prompts x 16 completions in 16 updates of 512 completions.
    num_minibatches=16,
    epsilon=0.2,
    epsilon_high=0.28,
    # Section 2.3 of the paper.
    beta=0.0,
)
# The gradient of the ratio divides the gradient of a completion's log-probability by its length.
_add(
    "gspo",
    "Zheng et al. 2025: one clipped ratio per completion, the geometric mean of its token-level "
    "ratios. arXiv 2507.18071; its baseline is group_std.",
    "grpo",
    # Equations 7 and 10 of the paper: 1/|y_i|.
    importance_sampling_level="sequence",
    loss_type="grpo",
    # Section 5.1 of the paper.
    num_minibatches=4,
    epsilon=3e-4,
    epsilon_high=4e-4,
    # Equation 5 of the paper has no penalty.
    beta=0.0,
)
# With an unbiased baseline, this loss is unbiased during one pass over minibatches of independently
# drawn prompts. In a second pass over the same batch, a loss with any ratio would be biased.
_add(
    "whole_sequence",
    "Unbiased loss for completions of an older policy, used as reference: the ratio is the product "
    "of a completion's token-level ratios, no clipping, no KL penalty.",
    "grpo",
    importance_sampling_level="whole_sequence",
    beta=0.0,
)

# TRL presets use the defaults of GRPOConfig in trl 1.16.0 unless a comment says otherwise. If the
# user types `baseline=X`, this replaces the preset's baseline. With a KL penalty, TRL multiplies K3
# by the ratio (use_bias_correction_kl); we do not. If TRL splits a generation batch into several
# updates, it divides by the average number of tokens per update.
_add(
    "trl_dapo",
    "TRL's default loss: equal weight for all tokens of the update, clipped token-level ratios, "
    "no KL penalty.",
    "grpo",
    # TRL's scale_rewards=group, with epsilon 1e-4 as in TRL.
    baseline_choice("group_std"),
    loss_type="dapo",
    # TRL's steps_per_generation equals gradient_accumulation_steps.
    num_minibatches=1,
    epsilon=0.2,
    epsilon_high=0.2,
    beta=0.0,
)
_add(
    "trl_grpo",
    "TRL's loss_type=grpo: mean over each completion's tokens; all else as in trl_dapo.",
    "trl_dapo",
    loss_type="grpo",
)
_add(
    "trl_dr_grpo",
    "TRL's loss_type=dr_grpo: sum over tokens divided by a constant; all else as in trl_dapo.",
    "trl_dapo",
    # TRL's documentation recommends scale_rewards=none for this loss, as does Dr. GRPO (arXiv
    # 2503.20783). TRL's default for every loss is scale_rewards=group, which is baseline=group_std.
    baseline_choice("group_mean"),
    loss_type="dr_grpo",
)
# The rows are shuffled before they are split into micro-batches, as in TRL.
_add(
    "trl_bnpo",
    "TRL's loss_type=bnpo: mean over the tokens of each micro-batch; all else as in trl_dapo.",
    "trl_dapo",
    loss_type="bnpo",
    # Default of per_device_train_batch_size in transformers' TrainingArguments.
    micro_batch_size=8,
)
# The clipping bounds are TRL's defaults, which sequence-level ratios rarely reach. objective=gspo
# has the bounds of the GSPO paper, which TRL's paper index also lists.
_add(
    "trl_gspo",
    "TRL's loss_type=grpo with importance_sampling_level=sequence: one clipped ratio per "
    "completion.",
    "trl_grpo",
    importance_sampling_level="sequence",
)
# The loss is from MiniMax-M1, arXiv 2506.13585, and the bound from ScaleRL, arXiv 2510.13786. If
# epsilon_high is not set, TRL 1.16 uses epsilon, 0.2, as the upper bound. Nearly every token then
# has the weight 0.2, a fifth of the documented weight.
_add(
    "trl_cispo",
    "TRL's loss_type=cispo: each token's weight is its ratio, clipped from above and not "
    "differentiated.",
    "trl_dapo",
    loss_type="cispo",
    epsilon=None,
    # For this loss, TRL's documentation defines epsilon_high as the largest allowed ratio itself,
    # not as the distance of this ratio from 1.
    epsilon_high=5.0,
)
# arXiv 2602.05261. The bounds are TRL's defaults.
_add(
    "trl_luspo",
    "TRL's loss_type=luspo: one clipped ratio per completion, multiplied by the completion's "
    "length.",
    "trl_dapo",
    loss_type="luspo",
    # TRL's documentation of this loss_type requires level sequence.
    importance_sampling_level="sequence",
)
# arXiv 2511.20347. The temperatures in the paper equal TRL's defaults: 1 for positive advantages
# and 1.05 for all others.
_add(
    "trl_sapo",
    "TRL's loss_type=sapo: instead of clipping, a smooth function of each token's ratio is its "
    "weight.",
    "trl_dapo",
    loss_type="sapo",
    epsilon=None,
    epsilon_high=None,
)
# arXiv 2602.10693. The constants of the weight are TRL's defaults.
_add(
    "trl_vespo",
    "TRL's loss_type=vespo: a completion's weight is a smooth function of the whole sequence's "
    "ratio and is not differentiated.",
    "trl_dapo",
    loss_type="vespo",
    # For this loss TRL ignores importance_sampling_level.
    importance_sampling_level="whole_sequence",
    epsilon=None,
    epsilon_high=None,
)

# For negative advantages, verl also clips ratios at 3 (clip_ratio_c). This is not implemented,
# because it has no effect with one update per batch.
_add(
    "verl_token_mean",
    "verl's default loss, loss_agg_mode=token-mean, with adv_estimator=grpo: clipped token-level "
    "ratios, no KL penalty. verl 0.9.1, the defaults of its actor.yaml.",
    "grpo",
    # norm_adv_by_std_in_grpo=true, with the epsilon of compute_grpo_outcome_advantage.
    BaselineConfig("group_std", {"epsilon": 1e-6}),
    loss_type="dapo",
    # verl's default is 4: train_batch_size=1024 divided by ppo_mini_batch_size=256.
    num_minibatches=1,
    # verl's clip_ratio.
    epsilon=0.2,
    epsilon_high=0.2,
    # use_kl_loss=false, use_kl_in_reward=false
    beta=0.0,
)
_add(
    "verl_seq_mean_token_sum",
    "verl's loss_agg_mode=seq-mean-token-sum: sum over each completion's tokens; all else as in "
    "verl_token_mean. verl 0.9.1.",
    "verl_token_mean",
    loss_type="sum",
)
_add(
    "verl_seq_mean_token_mean",
    "verl's loss_agg_mode=seq-mean-token-mean: mean over each completion's tokens; all else as in "
    "verl_token_mean. verl 0.9.1.",
    "verl_token_mean",
    loss_type="grpo",
)
_add(
    "verl_seq_mean_token_sum_norm",
    "verl's loss_agg_mode=seq-mean-token-sum-norm: sum over tokens divided by a constant; all else "
    "as in verl_token_mean. verl 0.9.1.",
    "verl_token_mean",
    # norm_adv_by_std_in_grpo=false, which verl's page on GRPO recommends for Dr. GRPO.
    baseline_choice("group_mean"),
    # With verl's loss_scale_factor=null the constant is response_length, our max_completion_length.
    loss_type="dr_grpo",
)

# Error probability of the simultaneous intervals of all recipes: the probability that at least one
# relative efficiency lies outside its interval. The simultaneous intervals for group sizes have the
# same error probability.
CHANCE = 0.025


@dataclass(frozen=True)
class Recipe:
    """Published combination of a loss and a group size."""

    # Authors or framework, and where the recipe was published.
    name: str
    # Group size, G.
    group_size: int
    # Name of a preset in `PRESETS`.
    objective: str
    # Name of the baseline; None means the baseline of the objective.
    baseline: str | None = None
    # Treatment of zero-variance groups; see `RowFilter`.
    zero_variance_groups: str = KEEP

    @property
    def overrides(self) -> list[str]:
        """Command-line overrides that select the loss.

        >>> RECIPES["DAPO (arXiv 2503.14476)"].overrides[1:]
        ['baseline=group_std', 'objective.zero_variance_groups=replace']
        """
        words = [f"objective={self.objective}"]
        if self.baseline is not None:
            words.append(f"baseline={self.baseline}")
        if self.zero_variance_groups != KEEP:
            words.append(f"objective.zero_variance_groups={self.zero_variance_groups}")
        return words

    def loss(self, max_completion_length: int) -> Loss:
        """Return the loss at the first update of a batch.

        Args:
            max_completion_length: number of tokens after which a completion is truncated.
        """
        preset = PRESETS[self.objective]
        baseline = preset.baseline if self.baseline is None else baseline_choice(self.baseline)
        assert baseline is not None
        objective = replace(preset.objective, zero_variance_groups=self.zero_variance_groups)
        return objective.loss(baseline, max_completion_length)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        # This recipe uses the objective of DeepSeekMath.
        Recipe("2-GRPO (arXiv 2510.00977)", 2, "grpo_original", "group_std"),
        # Value of rollout.n in run_qwen2-7b.sh and in most other files of examples/grpo_trainer.
        # The default in rollout.yaml is 1, which means that there are no groups.
        Recipe("verl's GRPO examples", 5, "verl_token_mean"),
        # Default of GRPOConfig.num_generations.
        Recipe("TRL's default", 8, "trl_dapo"),
        # Value of num_samples in examples/qwen2.5-math-7b.sh of the authors' code.
        Recipe("Dr. GRPO (arXiv 2503.20783)", 8, "dr_grpo", "group_mean"),
        # Section 4.1 of the paper. The penalty for overlong answers is part of the reward.
        Recipe("DAPO (arXiv 2503.14476)", 16, "dapo", "group_std", REPLACE),
        # Section 4.2 of the paper.
        Recipe("DeepSeekMath (arXiv 2402.03300)", 64, "grpo_original", "group_std"),
        # We assume that BroRL uses the loss of ProRL v2, as implemented in NeMo RL's prorlv2
        # example.
        Recipe("BroRL (arXiv 2510.01180)", 512, "dapo", "reinforce_pp_baseline", REPLACE),
    )
}
