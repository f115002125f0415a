"""Alarms that explain well-known failures of a run and their remedies.

An alarm is raised if a condition on the metrics row has held for a number of consecutive steps. It
is printed once per run, and result.json counts the steps at which the condition held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_ustat.config.train import TrainConfig
from grpo_ustat.pages.caveats import cut_text, often_cut
from grpo_ustat.pages.symbols import ALARM_WORDS
from grpo_ustat.terminal.streams import percentage

# Share of completions above which a failure counts as affecting most of them.
MAJORITY = 0.5
# Share of unjudged completions in a step above which rewards are no longer reliable.
MAX_UNJUDGED = 0.01
# Largest mean difference between sampler and trainer in nats per token, by computing type.
MAX_LOGPROB_GAP = {
    "float64": 1e-8,
    "float32": 1e-3,
    "bfloat16": 1e-1,
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Alarm:
    """Failure that is detected in a step's metrics row."""

    # Number of consecutive steps with the condition until the alarm is printed.
    steps: int
    # Condition on a step's row.
    holds: Callable[[TrainConfig, Row], bool]
    # Text with the meaning and the remedy.
    text: Callable[[TrainConfig, Row], str]


def check_alarms(
    config: TrainConfig, row: Row, streaks: dict[str, int], alarms: dict[str, int]
) -> list[str]:
    """Return the lines of the alarms to print at this step.

    Args:
        row: metrics of the step.
        streaks: numbers of consecutive steps at which each condition has held; updated in place.
        alarms: numbers of steps at which each alarm has held; updated in place.
    """
    lines = []
    for name, alarm in ALARMS.items():
        streaks[name] = streaks.get(name, 0) + 1 if alarm.holds(config, row) else 0
        if streaks[name] < alarm.steps:
            continue
        if name not in alarms:
            lines.append(
                f"{ALARM_WORDS.get(name, name)}, step {row['step']}: {alarm.text(config, row)}"
            )
            alarms[name] = alarm.steps - 1
        alarms[name] += 1
    return lines


def computing_type(config: TrainConfig) -> str:
    """Return the number type of forward passes."""
    return "bfloat16" if config.bf16 else config.model.dtype


def _unjudged(row: Row) -> int:
    """Count the completions of the step that the judge could not judge."""
    return row.get("judge/timeouts", 0) + row.get("judge/failures", 0)


ALARMS = {
    "truncated": Alarm(
        1,
        lambda config, row: often_cut(row["completions/clipped_ratio"]),
        lambda config, row: cut_text(
            row["completions/clipped_ratio"], "the step's", config.max_completion_length
        ),
    ),
    "extraction_failed": Alarm(
        1,
        lambda config, row: row["completions/extraction_failure_ratio"] > MAJORITY,
        lambda config, row: (
            f"no answer was found in {percentage(row['completions/extraction_failure_ratio'])} of "
            "the completions, which get reward 0: read some in "
            "completions.parquet, and ask for the expected format in prompt.template"
        ),
    ),
    "unjudged": Alarm(
        1,
        lambda config, row: _unjudged(row) > MAX_UNJUDGED * config.budget.rollouts,
        lambda config, row: (
            f"{_unjudged(row)} answers of a step with {config.budget.rollouts} could not be judged "
            f"({row['judge/timeouts']} timed out, {row['judge/failures']} failed) and got "
            "reward 0: read them in completions.parquet; on a busy machine lower "
            "launch.judge_workers or raise dataset.judge_seconds"
        ),
    ),
    "zero_variance": Alarm(
        3,
        lambda config, row: row["frac_reward_zero_std"] == 1,
        lambda config, row: (
            "every group of 3 steps was a zero-variance group (frac_reward_zero_std = 1, mean "
            f"reward {row['reward']:.3g}), so there is no gradient: use questions "
            f"that the policy solves sometimes, or raise group_size={config.group_size}"
        ),
    ),
    "constant_reward": Alarm(
        5,
        lambda config, row: row["reward_std"] == 0,
        lambda config, row: (
            f"every completion of 5 steps had the same reward, now {row['reward']:.3g}: check the "
            "reward on completions.parquet; if it is right, the questions are too hard or solved"
        ),
    ),
    "logprob_gap": Alarm(
        1,
        lambda config, row: (
            not row.get("sampling/sampling_logp_difference/mean", 0.0)
            <= MAX_LOGPROB_GAP[computing_type(config)]
        ),
        lambda config, row: (
            "the sampler's log-probabilities are "
            f"{row['sampling/sampling_logp_difference/mean']:.3g} nats a token away from the "
            f"trainer's, above {MAX_LOGPROB_GAP[computing_type(config)]:.0e} for "
            f"{computing_type(config)}: what is sampled is not what is trained; check the "
            "sampler's weights, temperature and type, or use rollout=local"
        ),
    ),
    "zero_learning_rate": Alarm(
        # Two steps are required, since a warm-up may begin at 0.
        2,
        lambda config, row: row["learning_rate"] == 0,
        lambda config, row: (
            "the learning rate was 0 in 2 steps, which do not change the policy: check schedule="
            f"{config.schedule.lr_scheduler_type} and its warmup_steps="
            f"{config.schedule.warmup_steps} against max_steps={config.max_steps}"
        ),
    ),
}
