"""The schema of an objective: how advantages and log-probabilities become a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from grpo_ustat.config.baseline import BaselineConfig
from grpo_ustat.config.folders import CONF
from grpo_ustat.config.schema import ConfigError, field
from grpo_ustat.estimators.row_weights import Loss

OBJECTIVES = (
    "algorithm1", "grpo", "grpo_original", "dr_grpo", "dapo", "gspo", "whole_sequence"
)  # fmt: skip
LEVELS = ("none", "token", "sequence", "whole_sequence")
KL_ESTIMATORS, KL_PLACES = ("k1", "k2", "k3"), ("loss", "reward")
ALGORITHM1 = {  # what the paper's Algorithm 1 has none of
    "importance_sampling_level": "none",
    "loss_type": "sum",
    "num_iterations": 1,
    "num_minibatches": 1,
    "minibatch_size": None,
    "epsilon": None,
    "epsilon_high": None,
    "beta": 0.0,
    "kl_estimator": None,
    "kl_in": None,
    "entropy_coef": 0.0,
}


@dataclass
class ObjectiveConfig:
    """How advantages and log-probabilities become a gradient; formulas in train/objective.py."""

    name: str = field("in the run folder's name; choose by objective=NAME", choices=OBJECTIVES)
    importance_sampling_level: str = field(
        "what the ratio to the sampling policy is of: none, each token, sequence (the geometric "
        "mean of its tokens' ratios), whole_sequence (their product)",
        choices=LEVELS,
    )
    loss_type: str = field(
        "what divides the sum over tokens: sum, the n completions of the update; dr_grpo, n x "
        "max_completion_length; dapo, all tokens of the update; grpo, n x each completion's own",
        choices=("sum", "dr_grpo", "dapo", "grpo"),
    )
    num_iterations: int = field("over each batch", "passes", positive=True)
    num_minibatches: int = field(
        "of equally many prompts that a batch is split into, an update for each; where "
        "minibatch_size is given, that counts instead",
        "minibatches",
        positive=True,
    )
    minibatch_size: int | None = field(
        "of an update; null: n / num_minibatches", "completions", positive=True
    )
    epsilon: float | None = field(
        "ratios are clipped below at 1 - epsilon; null: not", positive=True, below=1
    )
    epsilon_high: float | None = field(
        "ratios are clipped above at 1 + epsilon_high; null: not", positive=True
    )
    beta: float = field("coefficient of the penalty for leaving the reference model", at_least=0)
    kl_estimator: str | None = field("of that penalty; null: none", choices=KL_ESTIMATORS)
    kl_in: str | None = field("where that penalty counts; null: nowhere", choices=KL_PLACES)
    entropy_coef: float = field("coefficient of the bonus for entropy", at_least=0)

    def loss(self, rule: BaselineConfig, max_completion_length: int) -> Loss:
        """The loss at a batch's first update, with the advantages of a rule."""
        return Loss(
            name=self.name,
            rule=rule.name,
            options=rule.options,
            loss_type=self.loss_type,
            max_completion_length=max_completion_length,
        )

    def update_size(self, rollouts: int) -> int:
        """Completions of one update, of a batch of `rollouts`."""
        return self.minibatch_size or rollouts // self.num_minibatches

    def check(self) -> None:
        """Refuse what is no objective; the formulas are in train/objective.py.

        Raises:
            ConfigError: naming the values and the fix.
        """
        level, passes = self.importance_sampling_level, self.num_iterations
        if self.name == "algorithm1":
            for name, neutral in ALGORITHM1.items():
                if getattr(self, name) != neutral:
                    raise ConfigError(
                        "objective=algorithm1 is a sum over tokens with one update, no ratio and "
                        f"no penalty, but objective.{name}={getattr(self, name)}: use "
                        "objective=grpo with it"
                    )
        if self.name == "whole_sequence" and passes > 1:
            raise ConfigError(
                "objective=whole_sequence is the unbiased reference, but "
                f"objective.num_iterations={passes}: a second pass over the same completions is "
                "biased whatever the ratio; use objective.num_minibatches for more updates, or "
                "objective=grpo objective.importance_sampling_level=whole_sequence for such passes"
            )
        divisor = {"sequence": "grpo", "whole_sequence": "sum"}.get(level, self.loss_type)
        if self.loss_type != divisor:  # the others would weigh a sequence by its length as well
            raise ConfigError(
                f"objective.importance_sampling_level={level} with loss_type={self.loss_type} "
                f"would count a sequence's ratio once per token: use loss_type={divisor}"
            )
        low, high = self.epsilon, self.epsilon_high
        if (low is None) != (high is None):
            raise ConfigError(
                f"objective.epsilon={low} epsilon_high={high}: give both (equal ones are PPO's) or "
                "none"
            )
        if low is not None and level == "none":
            raise ConfigError(
                f"objective.epsilon={low} clips a ratio, and importance_sampling_level=none has "
                "none: use token, or epsilon=null epsilon_high=null"
            )
        kind, place = self.kl_estimator, self.kl_in
        if (kind is None) != (place is None):
            raise ConfigError(
                f"objective.kl_estimator={kind} kl_in={place}: give both or none, such as "
                "kl_estimator=k3 kl_in=loss"
            )
        if self.beta and kind is None:
            raise ConfigError(
                f"objective.beta={self.beta} without a penalty: set kl_estimator=k3 kl_in=loss"
            )
        if (kind, place) == ("k1", "loss"):
            raise ConfigError(
                "objective.kl_estimator=k1 in the loss has a gradient of mean zero on-policy "
                "(E grad log pi = 0): use kl_in=reward, or k2 or k3 in the loss"
            )
        if place == "reward" and kind != "k1":
            raise ConfigError(
                f"objective.kl_estimator={kind} in the reward: only the mean of k1, times the "
                "score, has the gradient of the divergence: use k1, or kl_in=loss"
            )

    def check_updates(self, group_size: int, rollouts: int) -> None:
        """Refuse updates that break groups, or that need a ratio and have none.

        Args:
            group_size: completions of a prompt.
            rollouts: completions of a step.

        Raises:
            ConfigError: naming the values and the fix.
        """
        count, size, prompts = self.num_minibatches, self.minibatch_size, rollouts // group_size
        if size is not None and (size % group_size or rollouts % size):
            raise ConfigError(
                f"objective.minibatch_size={size} must be a multiple of group_size={group_size} "
                f"that divides budget.rollouts={rollouts}"
            )
        if size is None and prompts % count:
            fitting = max(d for d in range(1, count + 1) if prompts % d == 0)
            raise ConfigError(
                f"objective.num_minibatches={count} does not divide the {prompts} prompts of a "
                f"step (budget.rollouts={rollouts} / group_size={group_size}): use "
                f"objective.num_minibatches={fitting}, or another budget.rollouts"
            )
        update_size = self.update_size(rollouts)
        several = self.num_iterations > 1 or update_size < rollouts
        if several and self.importance_sampling_level == "none":
            raise ConfigError(
                f"objective.num_iterations={self.num_iterations} with updates of {update_size} of "
                f"budget.rollouts={rollouts} completions: all but the first are on completions of "
                "an older policy, which needs a ratio: use "
                "objective.importance_sampling_level=token, or one update"
            )


def preset(name: str) -> tuple[ObjectiveConfig, BaselineConfig | None]:
    """A preset as `conf/objective/NAME.yaml` has it, and the rule that it sets; None where it sets
    none.
    """
    fields, rule = _fields(name), None
    if chosen := fields.pop("baseline", None):
        rule = BaselineConfig(**yaml.safe_load((CONF / "baseline" / f"{chosen}.yaml").read_text()))
    return ObjectiveConfig(**fields), rule


def _fields(name: str) -> dict[str, Any]:
    """Fields of a preset and of those that it is based on, and the `baseline` that they choose."""
    own = yaml.safe_load((CONF / "objective" / f"{name}.yaml").read_text())
    fields: dict[str, Any] = {}
    for default in own.pop("defaults", ()):
        if isinstance(default, str):
            fields |= _fields(default)
        else:
            fields["baseline"] = default["override /baseline"]
    return fields | own
