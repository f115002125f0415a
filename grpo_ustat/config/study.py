"""The parts of the schema of `mse`: a study's budget, its measurements, its processes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from grpo_ustat.config.common import LaunchConfig
from grpo_ustat.config.own_functions import installed_measurements
from grpo_ustat.config.schema import ConfigError, check_positive, field
from grpo_ustat.estimators.token_weights import CORRECTIONS

METHODS = ("closed_form", "monte_carlo")
METRICS = ("euclidean", "adam")


@dataclass
class StudyBudget:
    """Numbers of completions behind each result."""

    pool_completions: int = field("of each question, N, scored: behind closed_form", "completions")
    loss_draws: int = field(
        "of two batches each, behind losses and baselines that weigh rows by the whole batch",
        "draws",
        at_least=2,
    )
    feature_sketch: int = field(
        "kept of each completion's score; models with no more parameters are kept in full",
        "numbers",
        positive=True,
    )
    gradient_sketch: int = field(
        "kept of each question's gradient; models with no more parameters are kept in full",
        "numbers",
        positive=True,
    )
    replicates: int = field("of the largest size that monte_carlo draws of each question", "groups")
    reference_completions: int = field(
        "of each question behind monte_carlo's reference gradient", "completions"
    )
    reference_blocks: int = field("that are independent, into which those are cut", "blocks")
    value_completions: int = field(
        "of each question, K, behind monte_carlo's V (oracle), b* (optimal) and running mean",
        "completions",
    )

    def check_monte_carlo(self) -> None:
        """Refuse counts from which monte_carlo makes no interval or no reference gradient."""
        check_positive(self, "value_completions", prefix="budget.")
        if self.replicates < 2:
            raise ConfigError(f"budget.replicates={self.replicates}: an interval needs at least 2")
        completions, blocks = self.reference_completions, self.reference_blocks
        per_block, rest = divmod(completions, max(1, blocks))
        if blocks < 3 or rest or per_block < 3:
            raise ConfigError(
                f"budget.reference_completions={completions} in budget.reference_blocks={blocks}: "
                "use 3 or more equal blocks of 3 or more completions"
            )


@dataclass
class StudyConfig:
    """Measurements of a study."""

    methods: list[str] = field(
        "closed_form: the pool alone, by exact formulas, and all its groups for baselines that "
        "have none; monte_carlo: fresh rollouts and real gradients, as the paper",
        choices=METHODS,
        distinct=True,
    )
    rollouts: int = field(
        "of a training step, n, of which the answer speaks, and at which losses are compared, as "
        "are baselines without a closed form",
        "rollouts",
        at_least=2,
    )
    metric: str = field(
        "of errors; euclidean: of the gradient; adam: of AdamW's step, each entry in units of its "
        "own root mean square in steps of adam_rollouts",
        choices=METRICS,
    )
    adam_rollouts: int = field(
        "of a step, n, whose squared gradients AdamW's second moments average; the same for every "
        "G of the study",
        "rollouts",
        positive=True,
    )
    adam_group_size: int = field("of that step, its G", "completions", at_least=2)
    verdicts: bool = field(
        "judge published claims on this policy: their numbers with intervals and verdicts"
    )
    measurements: list[str] = field(
        "that installed packages offer as entry points of grpo_ustat.measurements, beside ours",
        plugins=installed_measurements,
    )
    parameters: str | None = field(
        "regular expression of the names of those whose entries count; null: all trainable ones"
    )
    merge_adapters: bool = field(
        "whether LoRA adapters of model=FOLDER are added to its weights, of which errors are then; "
        "false: errors are those of the adapters, which their run trains"
    )
    scored_by: str | None = field(
        "a later checkpoint of model, whose gradient the losses are to estimate from the "
        "completions that model wrote (embedded:NAME, a folder or org/name); null: model itself"
    )
    reference: str | None = field(
        "the model that a penalty (objective.beta) is measured from; null: model itself"
    )
    corrections: list[str] = field(
        "of the gap between model and the sampler of pool=FILE, beside none at all, as TRL's "
        "vllm_importance_sampling_mode",
        choices=CORRECTIONS,
        distinct=True,
    )
    correction_cap: float = field(
        "ratio beyond which a correction truncates or masks", positive=True
    )
    questions: int | None = field(
        "of the study, the first so many; null: all", "questions", positive=True
    )
    part: str | None = field(
        "such as 3/8: fill the 3rd of 8 parts of pool=DIR and end; null: the study"
    )
    cut_at: int | None = field(
        "from which a completion of pool=FILE.parquet counts as cut, below as ended; null: the "
        "file's column ended says it",
        "tokens",
        positive=True,
    )

    @property
    def interval(self) -> str:
        """The units of the intervals of closed forms: `completions` or `questions`.

        Intervals over completions are conditional on the questions. AdamW's metric needs those over
        questions, since each half of the questions is measured in the metric of the other.
        """
        return "questions" if self.metric == "adam" else "completions"

    @property
    def adam_prompts(self) -> int:
        """B of the step of `adam_rollouts`."""
        return self.adam_rollouts // self.adam_group_size

    @property
    def share(self) -> tuple[int, int]:
        """(k, n) of `part`, (1, 1) without; (0, 0) if it is not of the form k/n."""
        match = re.fullmatch(r"(\d+)/(\d+)", "1/1" if self.part is None else self.part)
        return (int(match[1]), int(match[2])) if match else (0, 0)


@dataclass
class StudyLaunch(LaunchConfig):
    """`LaunchConfig` of studies."""

    workers: int = field(
        "that share the questions, with the same results; under torchrun its ranks do",
        "processes",
        positive=True,
    )
