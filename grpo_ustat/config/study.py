"""Parts of the schema of `mse`: the budget, measurements and processes of a study."""

from __future__ import annotations

import re
from dataclasses import dataclass

from grpo_ustat.config.common import LaunchConfig
from grpo_ustat.config.schema import ConfigError, check_positive, field
from grpo_ustat.estimators.group_size import PRIORS
from grpo_ustat.estimators.token_weights import CORRECTIONS

METHODS = ("closed_form", "monte_carlo")
DECIDED = "decided"


@dataclass
class StudyBudget:
    """Numbers of completions and random draws, and how many numbers of each gradient are kept."""

    pool_completions: int = field(
        "to sample for each question, N; closed_form uses them and their gradients", "completions"
    )
    loss_draws: int = field(
        "of two random batches each; from them, the error is estimated for losses and baselines in "
        "which a completion's weight depends on the whole batch",
        "draws",
        at_least=2,
    )
    feature_sketch: int = field(
        "to which the gradient of each completion's log-probability is compressed (kept in full if "
        "the model has fewer parameters)",
        "numbers",
        positive=True,
    )
    gradient_sketch: int = field(
        "to which each question's gradient is compressed (kept in full if the model has fewer "
        "parameters)",
        "numbers",
        positive=True,
    )
    replicates: int = field(
        "of the largest size G that monte_carlo draws for each question", "groups"
    )
    reference_completions: int = field(
        "of each question from which monte_carlo computes its reference gradient", "completions"
    )
    reference_blocks: int = field(
        "of equal size into which the reference completions are split, so that noise in the "
        "reference gradient does not bias the error",
        "blocks",
    )
    value_completions: int = field(
        "of each question, K, from which monte_carlo computes the inputs of three baselines: the "
        "question's value V for oracle, the best baseline b* for optimal, and the running mean",
        "completions",
    )

    def check_monte_carlo(self) -> None:
        """Refuse counts that are too small for monte_carlo's intervals or reference gradients."""
        check_positive(self, "value_completions", prefix="budget.")
        if self.replicates < 2:
            raise ConfigError(
                f"budget.replicates={self.replicates}: an interval needs at least 2 groups per "
                "question"
            )
        completions, blocks = self.reference_completions, self.reference_blocks
        per_block, rest = divmod(completions, max(1, blocks))
        if blocks < 3 or rest or per_block < 3:
            raise ConfigError(
                f"budget.reference_completions={completions} in "
                f"budget.reference_blocks={blocks}: use at least 3 equal blocks of at least 3 "
                "completions"
            )


@dataclass
class StudyConfig:
    """Measurements of a study."""

    methods: list[str] = field(
        "closed_form: exact formulas applied to the stored completions, or an average over all "
        "groups of stored completions for a baseline without a formula; monte_carlo: gradients of "
        "new rollouts, as in the paper",
        choices=METHODS,
        distinct=True,
    )
    rollouts: int = field(
        "per training step, n; the printed recommendation and the comparisons of losses and of "
        "baselines without a closed form are for this n",
        "rollouts",
        at_least=2,
    )
    prior: str = field(
        "prior of C1/C3, the ratio that determines the best G; weak: G is recommended only if two "
        "weak priors both support it; none: G is recommended only if the data alone support it",
        choices=tuple(PRIORS),
    )
    verdicts: bool = field(
        "test published claims on this policy; each claim gets numbers with intervals and a verdict"
    )
    parameters: str | None = field(
        "regular expression for the names of the parameters to measure; null: all trainable "
        "parameters"
    )
    merge_adapters: bool = field(
        "for a model=FOLDER with LoRA adapters; true: add the adapters to the weights and "
        "measure the gradient of all weights; false: measure the gradient of the adapters, as in "
        "LoRA training"
    )
    scored_by: str | None = field(
        "later checkpoint of model (embedded:NAME, a folder or org/name); the losses estimate its "
        "gradient from completions that model sampled; null: model itself"
    )
    reference: str | None = field(
        "reference model of the KL penalty (objective.beta); null: model itself"
    )
    corrections: list[str] = field(
        "corrections for the mismatch between model and the program that sampled pool=FILE; each "
        "is compared with no correction; named as in TRL's vllm_importance_sampling_mode",
        choices=CORRECTIONS,
        distinct=True,
    )
    correction_cap: float = field(
        "largest ratio that a correction leaves unchanged; larger ratios are truncated or masked",
        positive=True,
    )
    questions: int | None = field(
        "to use, from the start of the study split; null: all", "questions", positive=True
    )
    until: str | None = field(
        "decided: draw questions in batches until the data decide on a group size, with at most "
        "study.questions questions and budget.pool_completions completions of each; null: draw "
        "all of them",
        choices=(DECIDED,),
    )
    part: str | None = field(
        "k/n, such as 3/8: sample only the k-th of n parts of the questions, into the common "
        "pool=DIR; null: the whole study"
    )
    cut_at: int | None = field(
        "at or above which a completion of pool=FILE.parquet counts as truncated; null: the file's "
        "column ended decides",
        "tokens",
        positive=True,
    )

    @property
    def share(self) -> tuple[int, int]:
        """Numbers (k, n) in `part`; (1, 1) if `part` is null, (0, 0) if `part` is not like k/n."""
        match = re.fullmatch(r"(\d+)/(\d+)", "1/1" if self.part is None else self.part)
        return (int(match[1]), int(match[2])) if match else (0, 0)


@dataclass
class StudyLaunch(LaunchConfig):
    """Processes and devices of studies."""

    workers: int = field(
        "that share the questions, without affecting results; under torchrun the ranks share the "
        "questions",
        "processes",
        positive=True,
    )
