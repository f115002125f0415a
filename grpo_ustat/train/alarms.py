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

# A failure counts as affecting most completions if it affects more than this share.
MAJORITY = 0.5
# Share of unjudged completions in a step above which rewards are no longer reliable.
MAX_UNJUDGED = 0.01
# Largest accepted mean difference between the log-probabilities of the sampler and the trainer, in
# nats per token, by the type in which forward passes compute.
MAX_LOGPROB_GAP = {
    "float64": 1e-8,
    "float32": 1e-3,
    "bfloat16": 1e-1,
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Alarm:
    """Failure that is detected in a step's metrics row."""

    # Number of consecutive steps for which the condition must hold before the alarm is printed.
    steps: int
    # Condition on a step's row.
    holds: Callable[[TrainConfig, Row], bool]
    # Text that explains the failure and its remedy.
    text: Callable[[TrainConfig, Row], str]


def check_alarms(
    config: TrainConfig, row: Row, streaks: dict[str, int], alarms: dict[str, int]
) -> list[str]:
    """Return the lines of the alarms to print at this step.

    Args:
        row: metrics of the step.
        streaks: for each alarm, the number of consecutive steps, up to this one, at which its
            condition held; updated in place.
        alarms: for each printed alarm, the number of steps at which it was active; updated in
            place.
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
    """Return the name of the type in which forward passes compute."""
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
            f"{_unjudged(row)} of the step's {config.budget.rollouts} answers could not be judged "
            f"({row['judge/timeouts']} timed out, {row['judge/failures']} failed) and got "
            "reward 0: read them in completions.parquet; on a busy machine, lower "
            "launch.judge_workers or raise dataset.judge_seconds"
        ),
    ),
    "zero_variance": Alarm(
        3,
        lambda config, row: row["frac_reward_zero_std"] == 1,
        lambda config, row: (
            "in 3 steps in a row, all groups had zero variance (frac_reward_zero_std = 1, mean "
            f"reward {row['reward']:.3g}), so there is no gradient: use questions "
            f"that the policy solves sometimes, or raise group_size={config.group_size}"
        ),
    ),
    "constant_reward": Alarm(
        5,
        lambda config, row: row["reward_std"] == 0,
        lambda config, row: (
            "in 5 steps in a row, all completions of a step had the same reward, now "
            f"{row['reward']:.3g}: check the rewards in completions.parquet; if they are right, "
            "all questions are too hard or all are solved"
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
            f"{computing_type(config)}: the sampled policy is not the trained policy; check the "
            "sampler's weights, temperature and type, or use rollout=local"
        ),
    ),
    "zero_learning_rate": Alarm(
        # Two steps are required, since a warm-up may begin at 0.
        2,
        lambda config, row: row["learning_rate"] == 0,
        lambda config, row: (
            "the learning rate was 0 in 2 steps, so the policy did not change: check schedule="
            f"{config.schedule.lr_scheduler_type} and its warmup_steps="
            f"{config.schedule.warmup_steps} against max_steps={config.max_steps}"
        ),
    ),
}
