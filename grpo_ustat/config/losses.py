"""Losses that a study measures, both at the first update of a batch and off-policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from grpo_ustat.config.baseline import BaselineConfig
from grpo_ustat.config.objective import ObjectiveConfig
from grpo_ustat.config.presets import PRESETS
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.config.study import StudyConfig
from grpo_ustat.estimators.row_weights import Loss
from grpo_ustat.estimators.token_weights import TokenWeights

# Losses that `study.verdicts` compares; they differ only in the level of the ratio.
LAGGED = {
    level: Loss(f"ratio: {level}", "leave_one_out", {}, "sum", 1, tokens=TokenWeights(level))
    for level in ("none", "token", "sequence", "whole_sequence")
}
# Corrections that `study.verdicts` compares, because published claims are about them; keyed by the
# level of the ratio.
TRUNCATED = {"token": "token_truncate", "sequence": "sequence_truncate"}


@dataclass(frozen=True)
class MeasuredLosses:
    """Settings of a study that define which losses are measured."""

    # Main loss, and the baseline of its advantages.
    objective: ObjectiveConfig
    baseline: BaselineConfig
    # Names of further presets.
    objectives: list[str]
    # Settings of the study, which include the later policy, the reference model and the
    # corrections.
    study: StudyConfig
    # Folder or file of the rollouts (`MseConfig.pool`); `imports_pool` is True for a file.
    pool: str | None
    imports_pool: bool
    # Number of tokens after which a completion is truncated.
    max_completion_length: int

    @property
    def chosen(self) -> list[tuple[ObjectiveConfig, Loss]]:
        """Each objective with its loss at the first update of a batch."""
        pairs = [(self.objective, self.baseline)]
        for name in self.objectives:
            preset = PRESETS[name]
            pairs.append((preset.objective, preset.baseline or self.baseline))
        length = self.max_completion_length
        return [(objective, objective.loss(baseline, length)) for objective, baseline in pairs]

    @property
    def first_update(self) -> list[Loss]:
        """Losses at the first update of a batch, without the unbiased loss used as reference."""
        losses = [loss for _, loss in self.chosen]
        unbiased = (self.objective.name, self.baseline.name) == ("algorithm1", "leave_one_out")
        return losses[1:] if unbiased else losses

    @property
    def is_off_policy(self) -> bool:
        """True if losses are also measured off-policy, that is, with unequal weights of tokens."""
        return bool(self.study.scored_by or self.study.reference or self.study.corrections)

    @property
    def off_policy(self) -> list[Loss]:
        """Losses to measure off-policy.

        Token weights are computed under the policy `study.scored_by`, and the KL penalty is
        relative to `study.reference`. Each loss is listed once without a correction and once with
        each of `study.corrections`.
        """
        losses: list[Loss] = []
        for objective, loss in self.chosen:
            tokens = objective.token_weights()
            # Without a later policy, all importance ratios are 1.
            if self.study.scored_by is None:
                tokens = replace(tokens, level="none", form="clip", epsilon=None, epsilon_high=None)
            on_policy = self.study.scored_by is None and not self.imports_pool
            plain = on_policy and tokens == TokenWeights()
            losses.append(replace(loss, tokens=None if plain else tokens))
            for name in self.study.corrections:
                corrected = replace(
                    tokens, correction=name, cap=self.study.correction_cap,
                    shared=objective.importance_sampling_level == "sequence",
                )  # fmt: skip
                losses.append(replace(loss, name=f"{loss.name} {name}", tokens=corrected))
        if self.study.scored_by is not None:
            losses += self.judged.values()
        return losses

    @property
    def judged(self) -> dict[str, Loss]:
        """Losses that `study.verdicts` compares, keyed by the level of the ratio.

        The losses differ only in this level. The ratio is either the importance ratio to a later
        policy or a correction for the mismatch between sampler and model.
        """
        study = self.study
        if study.verdicts and study.scored_by is not None:
            return LAGGED
        if not (study.verdicts and study.corrections):
            return {}
        weights = {"none": TokenWeights()} | {
            level: TokenWeights(correction=name, cap=study.correction_cap)
            for level, name in TRUNCATED.items()
        }
        return {level: replace(LAGGED["none"], tokens=tokens) for level, tokens in weights.items()}

    def check(self) -> None:
        """Refuse invalid losses, and losses that cannot be measured on this pool."""
        self.objective.check()
        if self.objective.name in self.objectives:
            raise ConfigError(
                f"objectives={self.objectives} repeats objective={self.objective.name}: name it "
                "only once"
            )
        if self.objective.top_entropy_quantile < 1:
            raise ConfigError(
                f"objective.top_entropy_quantile={self.objective.top_entropy_quantile}: mse does "
                "not store the entropies of tokens, use objective.top_entropy_quantile=1"
            )
        if self.objective.entropy_coef:
            raise ConfigError(
                f"objective.entropy_coef={self.objective.entropy_coef}: the gradient of the "
                "entropy cannot be computed from the stored gradients, use "
                "objective.entropy_coef=0"
            )
        if self.is_off_policy:
            self._check_off_policy()

    def _check_off_policy(self) -> None:
        """Refuse a later policy, a reference or corrections that the study cannot use."""
        study, losses = self.study, self.off_policy
        if study.scored_by is not None and self.imports_pool:
            raise ConfigError(
                f"study.scored_by={study.scored_by} with pool={self.pool}: the later policy must "
                "also sample completions, and a file provides no reward for these; set "
                "dataset=NAME and remove pool"
            )
        if study.corrections and not self.imports_pool:
            raise ConfigError(
                f"study.corrections={study.corrections} with pool={self.pool}: corrections need "
                "log-probabilities from the sampler, use pool=FILE.parquet with a column logprobs"
            )
        missing = [name for name in TRUNCATED.values() if name not in study.corrections]
        if study.verdicts and study.corrections and missing:
            needed = ",".join(study.corrections + missing)
            raise ConfigError(
                f"study.verdicts=true with study.corrections={study.corrections}: the published "
                "claims compare truncated token-level and sequence-level ratios, use "
                f"study.corrections=[{needed}]"
            )
        if study.reference is not None and not any(x.tokens and x.tokens.beta for x in losses):
            raise ConfigError(
                f"study.reference={study.reference}, but no loss has a KL penalty: use "
                "objective.beta=0.04 objective.kl_estimator=k3 objective.kl_in=loss"
            )
        if study.corrections and any(loss.loss_type == "vespo" for loss in losses):
            raise ConfigError(
                f"study.corrections={study.corrections} with loss_type=vespo, whose weight "
                "already contains the sampler's ratio: remove the vespo preset from objectives"
            )
