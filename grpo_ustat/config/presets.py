"""Published losses with their sources: presets of `objective=NAME`, and recipes of a loss and G."""

from __future__ import annotations

from dataclasses import dataclass, replace

from grpo_ustat.config.baseline import BaselineConfig, baseline_choice
from grpo_ustat.config.objective import ObjectiveConfig
from grpo_ustat.estimators.row_weights import KEEP, REPLACE, Loss


@dataclass(frozen=True)
class Preset:
    """A choice of `objective=NAME`."""

    # Meaning, for `--help`.
    words: str
    objective: ObjectiveConfig
    # The baseline that it sets, unless `baseline=` is typed; None: the command's.
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
        name: its name.
        words: its meaning.
        base: the preset from which it differs; its baseline, too. None: the fields' defaults.
        baseline: the baseline that it sets; None: the baseline of `base`.
        changes: the fields that differ.
    """
    if base is None:
        objective = ObjectiveConfig(name=name)
    else:
        objective, baseline = PRESETS[base].objective, baseline or PRESETS[base].baseline
    PRESETS[name] = Preset(words, replace(objective, name=name, **changes), baseline)


# Papers. They set no baseline; each paper's advantage is named here.
_add(
    "algorithm1",
    "The paper's Algorithm 1: sum over tokens, constant divisor, one update, no ratio, no penalty.",
    None,
)
# Its advantage is baseline=group_std; experiment=algorithm2 has both.
_add(
    "grpo",
    "The paper's Algorithm 2: ratios of tokens to the policy that sampled the batch, one pass over "
    "its minibatches, K3 penalty.",
    None,
    # rho_it of each token, their sum divided by n, K3 in the loss; clipping is an option
    importance_sampling_level="token",
    kl_estimator="k3",
    kl_in="loss",
    # ours, as GSPO's: the paper splits a batch, without a number
    num_minibatches=4,
    # ours, as in Shao et al. 2024: the paper leaves it open
    beta=0.04,
)
# DeepSeekMath, arXiv 2402.03300; its advantage is baseline=group_std.
_add(
    "grpo_original",
    "Shao et al. 2024 (GRPO as published): clipped ratios of tokens, each completion's tokens "
    "averaged, K3 penalty.",
    "grpo",
    # its equation 3: 1/|o_i|
    loss_type="grpo",
    # its section 4.2: a single update after each exploration stage, so that ratios are 1 and
    # clipping does nothing
    num_minibatches=1,
    # ours, PPO's (Schulman et al. 2017): it gives none
    epsilon=0.2,
    epsilon_high=0.2,
    # its section 4.2
    beta=0.04,
)
_add(
    "dr_grpo",
    "Zichen Liu et al. 2025: clipped ratios of tokens, tokens divided by a constant, no penalty. "
    '"Understanding R1-Zero-like training", arXiv 2503.20783; its advantage is '
    "baseline=group_mean.",
    "grpo",
    # its section 3.2; the constant is max_completion_length in its code
    loss_type="dr_grpo",
    # its code's 7B recipe: 128 prompts x 8 completions in updates of 128, no penalty
    num_minibatches=8,
    beta=0.0,
    # PPO's (Schulman et al. 2017), its code's default
    epsilon=0.2,
    epsilon_high=0.2,
)
# Its dynamic sampling is
# zero_variance_groups=replace, which mse measures and train, which samples once, refuses; its
# penalty for overlong answers is not part of an objective and not here.
_add(
    "dapo",
    "Yu et al. 2025: clipping wider above than below, all tokens of the update weigh the same, no "
    "penalty. arXiv 2503.14476; its advantage is baseline=group_std.",
    "grpo",
    # its section 3.3
    loss_type="dapo",
    # its section 4.1: 512 prompts x 16 completions in 16 updates of 512
    num_minibatches=16,
    epsilon=0.2,
    epsilon_high=0.28,
    # its section 2.3
    beta=0.0,
)
# The ratio's gradient divides a completion's score by its length.
_add(
    "gspo",
    "Zheng et al. 2025: one clipped ratio a completion, the geometric mean of its tokens' ratios. "
    "arXiv 2507.18071; its advantage is baseline=group_std.",
    "grpo",
    # its equations 7 and 10, 1/|y_i|
    importance_sampling_level="sequence",
    loss_type="grpo",
    # its section 5.1
    num_minibatches=4,
    epsilon=3e-4,
    epsilon_high=4e-4,
    # its equation 5 has no penalty
    beta=0.0,
)
# Unbiased in one pass over minibatches of prompts drawn independently, with an unbiased baseline; a
# second pass over a batch is biased with any ratio.
_add(
    "whole_sequence",
    "The unbiased off-policy reference: the product of a completion's ratios, no clipping, no "
    "penalty.",
    "grpo",
    importance_sampling_level="whole_sequence",
    beta=0.0,
)

# TRL: the defaults of GRPOConfig in trl 1.16.0, unless a comment says otherwise. A typed baseline=X
# replaces the baseline of a preset. With a penalty TRL multiplies K3 by the ratio
# (use_bias_correction_kl); we do not. Where TRL cuts a generation batch into several updates, it
# divides by the tokens of that batch's average update.
_add(
    "trl_dapo",
    "TRL's loss as it comes: all tokens of the update weigh the same, clipped ratios of tokens, no "
    "penalty.",
    "grpo",
    # scale_rewards=group; epsilon 1e-4, as TRL's
    baseline_choice("group_std"),
    loss_type="dapo",
    # steps_per_generation = gradient_accumulation_steps
    num_minibatches=1,
    epsilon=0.2,
    epsilon_high=0.2,
    beta=0.0,
)
_add(
    "trl_grpo",
    "TRL's loss_type=grpo: each completion's tokens averaged, otherwise as trl_dapo.",
    "trl_dapo",
    loss_type="grpo",
)
_add(
    "trl_dr_grpo",
    "TRL's loss_type=dr_grpo: tokens divided by a constant, otherwise as trl_dapo.",
    "trl_dapo",
    # scale_rewards=none: TRL's documentation of scale_rewards recommends it with this loss, as Dr.
    # GRPO (arXiv 2503.20783) does. With scale_rewards=group, its default for every loss, type
    # baseline=group_std.
    baseline_choice("group_mean"),
    loss_type="dr_grpo",
)
# The rows are shuffled before they are cut into micro-batches, as in TRL.
_add(
    "trl_bnpo",
    "TRL's loss_type=bnpo: tokens divided by those of their micro-batch, otherwise as trl_dapo.",
    "trl_dapo",
    loss_type="bnpo",
    # per_device_train_batch_size, of transformers' TrainingArguments
    micro_batch_size=8,
)
# The bounds are TRL's defaults, which a sequence's ratio hardly ever reaches; objective=gspo has
# those of the paper, which TRL's page of papers repeats.
_add(
    "trl_gspo",
    "TRL's loss_type=grpo with importance_sampling_level=sequence: one clipped ratio a completion.",
    "trl_grpo",
    importance_sampling_level="sequence",
)
# MiniMax-M1, arXiv 2506.13585; the cut of ScaleRL, arXiv 2510.13786. Where nothing is set, TRL 1.16
# cuts at its epsilon, 0.2, so that nearly every token weighs 0.2, a fifth of what is documented.
_add(
    "trl_cispo",
    "TRL's loss_type=cispo: a token's ratio, cut from above, is its weight and is not "
    "differentiated.",
    "trl_dapo",
    loss_type="cispo",
    epsilon=None,
    # TRL's documentation of epsilon_high: the largest ratio itself, not what is added to 1
    epsilon_high=5.0,
)
# arXiv 2602.05261. The bounds are TRL's defaults.
_add(
    "trl_luspo",
    "TRL's loss_type=luspo: one clipped ratio a completion, times its length.",
    "trl_dapo",
    loss_type="luspo",
    # which TRL's documentation of loss_type requires
    importance_sampling_level="sequence",
)
# arXiv 2511.20347. Temperatures are TRL's defaults, the paper's: 1 for positive advantages, 1.05
# for the others.
_add(
    "trl_sapo",
    "TRL's loss_type=sapo: a smooth gate on a token's ratio in place of clipping.",
    "trl_dapo",
    loss_type="sapo",
    epsilon=None,
    epsilon_high=None,
)
# arXiv 2602.10693. The weight's constants are TRL's defaults.
_add(
    "trl_vespo",
    "TRL's loss_type=vespo: a weight of the whole sequence's ratio, which is not differentiated.",
    "trl_dapo",
    loss_type="vespo",
    # TRL ignores other levels for this loss
    importance_sampling_level="whole_sequence",
    epsilon=None,
    epsilon_high=None,
)

# verl also bounds ratios above 3 where the advantage is
# negative (clip_ratio_c), which one update of a batch never meets; that is not here.
_add(
    "verl_token_mean",
    "verl's loss as it comes, loss_agg_mode=token-mean, with adv_estimator=grpo: clipped ratios of "
    "tokens, no penalty. verl 0.9.1, the defaults of its actor.yaml.",
    "grpo",
    # norm_adv_by_std_in_grpo=true, with the epsilon of compute_grpo_outcome_advantage
    BaselineConfig("group_std", {"epsilon": 1e-6}),
    loss_type="dapo",
    # verl's default is 4: train_batch_size=1024 over ppo_mini_batch_size=256
    num_minibatches=1,
    # clip_ratio
    epsilon=0.2,
    epsilon_high=0.2,
    # use_kl_loss=false, use_kl_in_reward=false
    beta=0.0,
)
_add(
    "verl_seq_mean_token_sum",
    "verl's loss_agg_mode=seq-mean-token-sum: tokens of a completion added up, otherwise as "
    "verl_token_mean. verl 0.9.1.",
    "verl_token_mean",
    loss_type="sum",
)
_add(
    "verl_seq_mean_token_mean",
    "verl's loss_agg_mode=seq-mean-token-mean: each completion's tokens averaged, otherwise as "
    "verl_token_mean. verl 0.9.1.",
    "verl_token_mean",
    loss_type="grpo",
)
_add(
    "verl_seq_mean_token_sum_norm",
    "verl's loss_agg_mode=seq-mean-token-sum-norm: tokens divided by a constant, otherwise as "
    "verl_token_mean. verl 0.9.1.",
    "verl_token_mean",
    # norm_adv_by_std_in_grpo=false, as verl's page on GRPO writes Dr. GRPO
    baseline_choice("group_mean"),
    # the constant, verl's loss_scale_factor=null, is its response_length, our max_completion_length
    loss_type="dr_grpo",
)

# Chance that any relative efficiency misses its interval; as large for a group size by itself.
CHANCE = 0.025


@dataclass(frozen=True)
class Recipe:
    """A loss that can be typed, and G."""

    # Author or framework, and place of publication.
    name: str
    # G.
    group_size: int
    # One of `PRESETS`.
    objective: str
    # As `baseline=NAME` chooses it; None: the one that the objective sets.
    baseline: str | None = None
    # See `RowFilter`.
    zero_variance_groups: str = KEEP

    @property
    def overrides(self) -> list[str]:
        """Overrides that choose the loss on a command line.

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
        """Return the loss at a batch's first update.

        Args:
            max_completion_length: tokens after which a completion is cut.
        """
        preset = PRESETS[self.objective]
        baseline = preset.baseline if self.baseline is None else baseline_choice(self.baseline)
        assert baseline is not None
        objective = replace(preset.objective, zero_variance_groups=self.zero_variance_groups)
        return objective.loss(baseline, max_completion_length)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        # with the objective of DeepSeekMath
        Recipe("2-GRPO (arXiv 2510.00977)", 2, "grpo_original", "group_std"),
        # rollout.n=5 of run_qwen2-7b.sh and most of examples/grpo_trainer; rollout.yaml has 1,
        # which is no group
        Recipe("verl's GRPO examples", 5, "verl_token_mean"),
        # GRPOConfig.num_generations
        Recipe("TRL's default", 8, "trl_dapo"),
        # num_samples of its examples/qwen2.5-math-7b.sh
        Recipe("Dr. GRPO (arXiv 2503.20783)", 8, "dr_grpo", "group_mean"),
        # its section 4.1; its penalty for overlong answers belongs to the reward
        Recipe("DAPO (arXiv 2503.14476)", 16, "dapo", "group_std", REPLACE),
        # its section 4.2
        Recipe("DeepSeekMath (arXiv 2402.03300)", 64, "grpo_original", "group_std"),
        # its loss is taken to be the one of ProRL v2, in the form of NeMo RL's prorlv2 example
        Recipe("BroRL (arXiv 2510.01180)", 512, "dapo", "reinforce_pp_baseline", REPLACE),
    )
}
