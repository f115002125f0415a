"""Published recipes: a whole loss at the group size that its authors or its framework use."""

from __future__ import annotations

from dataclasses import dataclass, replace

from grpo_ustat.config.baseline import baseline_choice
from grpo_ustat.config.objective import preset
from grpo_ustat.estimators.row_weights import KEEP, REPLACE, Loss

CHANCE = 0.025  # that any worth misses its interval, and as much that a group size alone does


@dataclass(frozen=True)
class Recipe:
    """A loss that can be typed, and G."""

    # Author or framework, and place of publication.
    name: str
    # G.
    group_size: int
    # A preset of `conf/objective`.
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
        objective, rule = preset(self.objective)
        if self.baseline is not None:
            rule = baseline_choice(self.baseline)
        assert rule is not None
        objective = replace(objective, zero_variance_groups=self.zero_variance_groups)
        return objective.loss(rule, max_completion_length)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        # with the objective of DeepSeekMath
        Recipe("2-GRPO (arXiv 2510.00977)", 2, "grpo_original", "group_std"),
        # rollout.n=5 of run_qwen2-7b.sh and most of examples/grpo_trainer; rollout.yaml has 1,
        # which is no group
        Recipe("verl's GRPO examples", 5, "verl_token_mean"),
        Recipe("TRL's default", 8, "trl_dapo"),  # GRPOConfig.num_generations
        # num_samples of its examples/qwen2.5-math-7b.sh
        Recipe("Dr. GRPO (arXiv 2503.20783)", 8, "dr_grpo", "group_mean"),
        # its section 4.1; its penalty for overlong answers belongs to the reward
        Recipe("DAPO (arXiv 2503.14476)", 16, "dapo", "group_std", REPLACE),
        Recipe("DeepSeekMath (arXiv 2402.03300)", 64, "grpo_original", "group_std"),  # section 4.2
        # its loss is taken to be that of ProRL v2, as NeMo RL's prorlv2 example has it
        Recipe("BroRL (arXiv 2510.01180)", 512, "dapo", "reinforce_pp_baseline", REPLACE),
    )
}
