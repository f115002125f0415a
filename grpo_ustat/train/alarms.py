"""One clear line for each well-known trap, with what to do about it.

A trap is a condition on a step's metrics row that has held for some steps in a row. Each is told
once a run; result.json counts the steps at which it held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_ustat.config import TrainConfig

MOST = 0.5  # above it a share is most of them
UNJUDGED = 0.01  # of a step's completions, from which on rewards are no longer what they say
LARGEST_GAP = {  # mean nats a token that sampler and trainer may differ, by the type computed in
    "float64": 1e-8,
    "float32": 1e-3,
    "bfloat16": 1e-1,
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Trap:
    """What goes wrong.

    Attributes:
        steps: in a row, after which it is told.
        holds: of a step's row.
        text: what it means and what to do.
    """

    steps: int
    holds: Callable[[TrainConfig, Row], bool]
    text: Callable[[TrainConfig, Row], str]


def ring(
    config: TrainConfig, row: Row, streaks: dict[str, int], alarms: dict[str, int]
) -> list[str]:
    """Lines of the traps that are to be told at this step.

    Args:
        config: the run's.
        row: the step's metrics.
        streaks: steps in a row that each condition has held; updated.
        alarms: steps at which each trap was there; updated.
    """
    lines = []
    for name, trap in TRAPS.items():
        streaks[name] = streaks.get(name, 0) + 1 if trap.holds(config, row) else 0
        if streaks[name] < trap.steps:
            continue
        if name not in alarms:
            lines.append(f"{name}, step {row['step']}: {trap.text(config, row)}")
            alarms[name] = trap.steps - 1
        alarms[name] += 1
    return lines


def computing_type(config: TrainConfig) -> str:
    """The type that forward passes compute in."""
    return "bfloat16" if config.bf16 else config.model.dtype


def _gap_is_large(config: TrainConfig, row: Row) -> bool:
    gap = row.get("sampling/sampling_logp_difference/mean", 0.0)
    return not gap <= LARGEST_GAP[computing_type(config)]


def _unjudged(row: Row) -> int:
    return row.get("judge/timeouts", 0) + row.get("judge/failures", 0)


TRAPS = {
    "truncated": Trap(
        1,
        lambda config, row: row["completions/clipped_ratio"] > MOST,
        lambda config, row: (
            f"{row['completions/clipped_ratio']:.0%} of the completions were cut at "
            f"max_completion_length={config.max_completion_length} and rarely hold an answer: "
            "raise it, or set prompt.stop to what ends an answer"
        ),
    ),
    "extraction_failed": Trap(
        1,
        lambda config, row: row["completions/extraction_failure_ratio"] > MOST,
        lambda config, row: (
            f"no answer was found in {row['completions/extraction_failure_ratio']:.0%} of the "
            "completions, which earn nothing whatever they say: read some in completions.parquet, "
            "and ask for the expected format in prompt.template"
        ),
    ),
    "unjudged": Trap(
        1,
        lambda config, row: _unjudged(row) > UNJUDGED * config.budget.rollouts,
        lambda config, row: (
            f"{_unjudged(row)} answers of a step with {config.budget.rollouts} could not be judged "
            f"({row['judge/timeouts']} timed out, {row['judge/failures']} failed) and earned "
            "nothing: read them in completions.parquet; on a busy machine lower "
            "launch.judge_workers or raise dataset.judge_seconds"
        ),
    ),
    "silent": Trap(
        3,
        lambda config, row: row["frac_reward_zero_std"] == 1,
        lambda config, row: (
            f"every group of 3 steps had equal rewards (mean {row['reward']:.3g}), which is no "
            "gradient: take questions that the policy solves sometimes, or raise group_size="
            f"{config.group_size}"
        ),
    ),
    "constant_reward": Trap(
        5,
        lambda config, row: row["reward_std"] == 0,
        lambda config, row: (
            f"every completion of 5 steps had the same reward, now {row['reward']:.3g}: check the "
            "reward on completions.parquet; if it is right, the questions are too hard or solved"
        ),
    ),
    "logprob_gap": Trap(
        1,
        _gap_is_large,
        lambda config, row: (
            "the sampler's log-probabilities are "
            f"{row['sampling/sampling_logp_difference/mean']:.3g} nats a token away from the "
            f"trainer's, above {LARGEST_GAP[computing_type(config)]:.0e} for "
            f"{computing_type(config)}: what is sampled is not what is trained; check the "
            "sampler's weights, temperature and type, or use rollout=local"
        ),
    ),
    "zero_learning_rate": Trap(
        2,  # a warm-up may begin at 0
        lambda config, row: row["learning_rate"] == 0,
        lambda config, row: (
            "the learning rate was 0 in 2 steps, which change nothing: check schedule="
            f"{config.schedule.lr_scheduler_type} and its warmup_steps="
            f"{config.schedule.warmup_steps} against max_steps={config.max_steps}"
        ),
    ),
}
