"""Alarms: printed explanations of well-known failures of a run, with remedies.

An alarm becomes active when its condition on a step's metrics has held for a number of consecutive
steps. It is printed once per run. result.json contains the number of steps of each alarm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_ustat.config.train import TrainConfig
from grpo_ustat.pages.caveats import cut_text, often_cut
from grpo_ustat.pages.symbols import ALARM_WORDS
from grpo_ustat.terminal.streams import percentage

# The alarm `extraction_failed` needs more than this share of completions without an answer.
MAJORITY = 0.5
# The alarm `unjudged` needs more than this share of a step's completions that were not judged.
MAX_UNJUDGED = 0.01
# The alarm `logprob_gap` needs a larger mean absolute difference between the log-probabilities of
# sampler and trainer, in nats per token. The limit depends on the type of forward passes.
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
    # Condition on the metrics row of a step.
    holds: Callable[[TrainConfig, Row], bool]
    # Function that returns a text on the failure and its remedy.
    text: Callable[[TrainConfig, Row], str]


def check_alarms(
    config: TrainConfig, row: Row, streaks: dict[str, int], alarms: dict[str, int]
) -> list[str]:
    """Return the lines of the alarms to print at this step.

    Args:
        config: configuration of the run.
        row: metrics of the step.
        streaks: for each alarm, the number of consecutive steps up to now with its condition;
            updated in place.
        alarms: for each alarm printed so far, the number of its steps; updated in place. The steps
            that led to the alarm are included.
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
            "in 5 steps in a row, all completions of a step had the same reward "
            f"({row['reward']:.3g} in this step): check the rewards in completions.parquet; if "
            "they are right, all questions are too hard, or all are solved"
        ),
    ),
    "logprob_gap": Alarm(
        1,
        lambda config, row: (
            not row.get("sampling/sampling_logp_difference/mean", 0.0)
            <= MAX_LOGPROB_GAP[computing_type(config)]
        ),
        lambda config, row: (
            "the sampler's and the trainer's log-probabilities differ by "
            f"{row['sampling/sampling_logp_difference/mean']:.3g} nats per token on average, more "
            f"than rounding explains ({MAX_LOGPROB_GAP[computing_type(config)]:.0e} in "
            f"{computing_type(config)}): the sampled policy is not the trained policy; check the "
            "sampler's weights, temperature and type, or use rollout=local"
        ),
    ),
    "zero_learning_rate": Alarm(
        # A warm-up may begin at 0, so one step with learning rate 0 is no failure.
        2,
        lambda config, row: row["learning_rate"] == 0,
        lambda config, row: (
            "the learning rate was 0 in 2 steps, so the policy did not change: check schedule="
            f"{config.schedule.lr_scheduler_type} and its warmup_steps="
            f"{config.schedule.warmup_steps} against max_steps={config.max_steps}"
        ),
    ),
}
