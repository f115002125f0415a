"""Parts of the schema of `mse`: budget, measurements and processes of a study."""

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
    """Numbers of completions from which results are computed."""

    pool_completions: int = field(
        "of each question that are sampled and scored, N; closed_form uses them", "completions"
    )
    loss_draws: int = field(
        "of two batches each, for losses and baselines in which a row's weight depends on the "
        "whole batch",
        "draws",
        at_least=2,
    )
    feature_sketch: int = field(
        "kept of each completion's score; all, if the model has no more parameters",
        "numbers",
        positive=True,
    )
    gradient_sketch: int = field(
        "kept of each question's gradient; all, if the model has no more parameters",
        "numbers",
        positive=True,
    )
    replicates: int = field("of the largest G that monte_carlo draws for each question", "groups")
    reference_completions: int = field(
        "of each question for monte_carlo's reference gradient", "completions"
    )
    reference_blocks: int = field(
        "of equal size into which reference_completions are split", "blocks"
    )
    value_completions: int = field(
        "of each question, K, for V (oracle), b* (optimal) and the running mean of monte_carlo",
        "completions",
    )

    def check_monte_carlo(self) -> None:
        """Refuse counts that are too small for intervals or reference gradients of monte_carlo."""
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
        "closed_form: exact formulas on the pool, and all groups of the pool for a baseline "
        "without a formula; monte_carlo: fresh rollouts and real gradients, as in the paper",
        choices=METHODS,
        distinct=True,
    )
    rollouts: int = field(
        "of a training step, n: the step size of the printed answer, and of the comparison of "
        "losses and of baselines without a closed form",
        "rollouts",
        at_least=2,
    )
    metric: str = field(
        "metric of errors; euclidean: of the gradient; adam: of AdamW's step, each entry in "
        "units of its root mean square in steps of adam_rollouts",
        choices=METRICS,
    )
    adam_rollouts: int = field(
        "of a step, n, from whose squared gradients AdamW's second moments are computed; the "
        "same at each G of the study",
        "rollouts",
        positive=True,
    )
    adam_group_size: int = field("in a group of that step, G", "completions", at_least=2)
    verdicts: bool = field(
        "judge published claims on this policy: numbers with intervals, and a verdict for each"
    )
    measurements: list[str] = field(
        "further measurements: entry points of grpo_ustat.measurements in installed packages",
        plugins=installed_measurements,
    )
    parameters: str | None = field(
        "regular expression: only parameters whose names match it are measured; null: all "
        "trainable parameters"
    )
    merge_adapters: bool = field(
        "of a model=FOLDER with LoRA adapters; true: add them to the weights and measure the "
        "gradient of all weights; false: measure the gradient of the adapters, as they are "
        "trained"
    )
    scored_by: str | None = field(
        "a later checkpoint of model (embedded:NAME, a folder or org/name): losses estimate its "
        "gradient from completions that model wrote; null: model itself"
    )
    reference: str | None = field(
        "the model from which a penalty (objective.beta) is measured; null: model itself"
    )
    corrections: list[str] = field(
        "corrections of the gap between model and the sampler of pool=FILE, compared with no "
        "correction; names as in TRL's vllm_importance_sampling_mode",
        choices=CORRECTIONS,
        distinct=True,
    )
    correction_cap: float = field(
        "largest ratio that a correction leaves as it is; larger ones are truncated or masked",
        positive=True,
    )
    questions: int | None = field(
        "of the study, the first ones; null: all", "questions", positive=True
    )
    part: str | None = field(
        "k/n, such as 3/8: only fill the k-th of n parts of pool=DIR; null: the whole study"
    )
    cut_at: int | None = field(
        "from which a completion of pool=FILE.parquet counts as cut, a shorter one as ended; "
        "null: the file's column ended decides",
        "tokens",
        positive=True,
    )

    @property
    def interval(self) -> str:
        """Sampling unit of the intervals of closed forms, `completions` or `questions`.

        Intervals over completions are conditional on the questions. AdamW's metric needs intervals
        over questions, since each half of the questions is measured in the metric of the other
        half.
        """
        return "questions" if self.metric == "adam" else "completions"

    @property
    def adam_prompts(self) -> int:
        """Number of prompts B in a step of `adam_rollouts`."""
        return self.adam_rollouts // self.adam_group_size

    @property
    def share(self) -> tuple[int, int]:
        """Pair (k, n) of `part`; (1, 1) if unset and (0, 0) if not of the form k/n."""
        match = re.fullmatch(r"(\d+)/(\d+)", "1/1" if self.part is None else self.part)
        return (int(match[1]), int(match[2])) if match else (0, 0)


@dataclass
class StudyLaunch(LaunchConfig):
    """Processes and devices of studies."""

    workers: int = field(
        "that share the questions, without a change of results; under torchrun its ranks share "
        "them",
        "processes",
        positive=True,
    )
