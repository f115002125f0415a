"""Advice from the scalars that a trainer logged."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_ustat.advise.compare import NAME_WIDTH
from grpo_ustat.advise.scalar_bounds import (
    MIN_ROWS,
    ZeroVariance,
    recent_rows,
    zero_variance,
)
from grpo_ustat.config.command_line import command_line
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.intervals import (
    Interval,
    steps_mean,
    t_interval,
)
from grpo_ustat.estimators.run_differences import units_to_show
from grpo_ustat.logs.rewards import share_text
from grpo_ustat.logs.scalar_names import NEMO_RL, OURS, PRIME_RL, TRL, VERL
from grpo_ustat.logs.scalars import ScalarRun, with_num_generations
from grpo_ustat.pages.advice import DIFFERENT, UNKNOWN, Advice
from grpo_ustat.records import Array
from grpo_ustat.terminal.streams import aligned, excerpt

# The output says how many seeds are needed to show this difference of mean rewards.
POINT = 0.01
NOISE_UNKNOWN = (
    "The noise scale is unknown, because scalars of one batch size do not show it. To get it, call "
    "grpo_ustat.watch(model, optimizer) in any PyTorch trainer."
)
SEED = re.compile(r"[-_. ]?seed[-_=. ]?(\d+)", re.IGNORECASE)
# For each trainer: the setting with which it writes its rollouts, and the path to give to `advise`.
DUMPS = {
    TRL: ("log_completions=True", "OUTPUT_DIR/completions"),
    VERL: ("trainer.rollout_data_dir=DIR", "DIR"),
    PRIME_RL: ("the file monitor, which is on by default", "OUTPUT_DIR/rollouts"),
    NEMO_RL: ("its logger, which is on by default", "LOG_DIR/train_data_step100.jsonl"),
}


def scalar_advice(
    runs: Sequence[ScalarRun], num_generations: int | None = None, rollouts: int | None = None
) -> Advice:
    """Return the advice that scalars of one or several runs support.

    Args:
        runs: scalars of the runs.
        num_generations: group size that the user typed, for logs that do not contain it.
        rollouts: number of rollouts per step that the user typed.
    """
    if not runs:
        raise ConfigError("no run was given: name a log of scalars")
    runs = [_with_typed(run, num_generations) for run in runs]
    if len(runs) == 1:
        return _single_advice(runs[0], rollouts)
    return _joint_advice(runs, rollouts)


def _with_typed(run: ScalarRun, num_generations: int | None) -> ScalarRun:
    """Add the group size that the user typed; refuse it if the log contains another size."""
    logged = run.num_generations
    if num_generations is not None and logged not in (None, num_generations):
        raise ConfigError(
            f"num_generations={num_generations}, but {run.source} was trained with {logged}: leave "
            "num_generations out"
        )
    return with_num_generations(run, num_generations)


def _single_advice(run: ScalarRun, rollouts: int | None) -> Advice:
    """Return the advice for one run."""
    share = zero_variance(run, rollouts)
    details = [_origin(run)]
    numbers: dict[str, Any] = {
        "num_generations": run.num_generations, "rollouts": rollouts or run.rollouts
    }  # fmt: skip
    sentence = "Scalars alone do not show which num_generations is best."
    if run.num_generations:
        sentence = (
            f"Scalars alone do not show whether num_generations = {run.num_generations} is good."
        )
    if share is not None:
        sentence += f" {_share_sentence(run, share)}"
        numbers |= _share_numbers(share)
        details += _bound_lines(run, share)
    details += _useful_lines(run)
    details += _scalar_lines(run)
    details.append(NOISE_UNKNOWN)
    details += run.notes
    return Advice(UNKNOWN, sentence, details, _next_command(run), numbers)


def _origin(run: ScalarRun) -> str:
    """Describe the log: trainer, steps and fields."""
    trainer = run.trainer or "a trainer that its scalar names do not identify"
    averaged = ""
    if (run.steps_per_row or 1) > 1:
        averaged = f", each an average of {run.steps_per_row} steps"
    return (
        f"The log has {len(run.steps)} rows of {trainer}, steps {run.steps[0]:g} to "
        f"{run.steps[-1]:g}{averaged}. These scalars were read: "
        f"{', '.join(run.logged_names.values())}."
    )


def _share_sentence(run: ScalarRun, share: ZeroVariance) -> str:
    """State the zero-variance share of the recent steps, and the rollouts that it wastes."""
    steps = f"steps {share.steps[0]} to {share.steps[1]}"
    size = f" of {run.num_generations}" if run.num_generations else ""
    if run.num_generations and share.size != run.num_generations:
        # A leave-one-out baseline is the mean of the other G - 1 rewards of the group. It is 0 or 1
        # if all of them are 0 or all are 1.
        return (
            f"In {steps}, {share_text(share.share)} of the leave-one-out baselines were 0 or 1. If "
            f"every reward is 0 or 1, this is the share of groups of {share.size} whose rewards "
            "are equal."
        )
    if share.conditional:
        return (
            f"In {steps}, all rewards were 0 or all were 1 in {share_text(share.share)} of the "
            f"groups{size}, which gave no gradient."
        )
    estimate, low, high = share.share
    cost = ""
    if estimate < 1:
        ends = f"[{1 / (1 - low):.1f}, {_generated(high)}]"
        cost = (
            f". The run generated {1 / (1 - estimate):.1f} {ends} rollouts for each rollout in a "
            "group with a gradient"
        )
    return (
        f"In {steps}, {share_text(share.share)} of the groups{size} had equal rewards and gave no "
        f"gradient{cost}."
    )


def _generated(share: float) -> str:
    """Format the number of generated rollouts per rollout in a group with a gradient."""
    return f"{1 / (1 - share):.1f}" if share < 1 else "no upper end"


def _share_numbers(share: ZeroVariance) -> dict[str, Any]:
    """Return the share and its bounds as entries of the JSON output."""
    estimate, low, high = share.share
    return {
        "zero_variance_share": estimate, "zero_variance_share_low": low,
        "zero_variance_share_high": high, "zero_variance_size": share.size,
        "zero_variance_bounds": {str(size): list(ends) for size, ends in share.bounds.items()},
        "zero_variance_assumes_binary": share.conditional,
    }  # fmt: skip


def _bound_lines(run: ScalarRun, share: ZeroVariance) -> list[str]:
    """State the bounds at other group sizes, with their assumptions."""
    if share.size is None:
        return [
            "The log does not contain the group size, so nothing follows for other sizes. Add the "
            "group size to the command, for example num_generations=8."
        ]
    if not share.bounds:
        return share.reasons
    parts = [
        f"G = {size}: {100 * low:.0f} % to {100 * high:.0f} %"
        for size, (low, high) in share.bounds.items()
    ]
    useful = [
        f"G = {size}: {1 / (1 - low):.1f} to {_generated(high)}"
        for size, (low, high) in share.bounds.items()
        if low < 1
    ]
    return [
        "Bounds on the share of groups with equal rewards at other group sizes: "
        f"{', '.join(parts)}. The bounds cover every mixture of prompt difficulties that agrees "
        "with the logged averages, and hold jointly with 95 % confidence.",
        f"Generated rollouts per rollout in a group with a gradient: {', '.join(useful)}.",
        *share.reasons,
    ]


def _useful_lines(run: ScalarRun) -> list[str]:
    """State how many batches dynamic sampling generated per trained batch."""
    batches = run.values("generated_batches")
    if not len(batches):
        return []
    recent = batches[-max(MIN_ROWS, len(batches) // 2) :]
    return [
        f"In the last {len(recent)} steps, dynamic sampling generated {recent.mean():.2g} batches "
        f"per trained batch ({run.logged_names['generated_batches']})."
    ]


def _scalar_lines(run: ScalarRun) -> list[str]:
    """State the recent mean rewards, truncation, clipping, KL divergences and gradient norms."""
    lines = []
    if reward := _mean_text(run, "reward"):
        lines.append(f"Mean reward: {reward}.")
    functions = [name for name in run.fields if name.startswith("reward/")]
    if len(functions) > 1:
        parts = [
            f"{name.removeprefix('reward/')} {run.fields[name][rows].mean():.3g}"
            for name in functions
            if len(rows := recent_rows(run, name))
        ]
        lines.append(f"Mean of each reward function: {', '.join(parts)}.")
    if truncated := _mean_text(run, "truncated", percent=True):
        lines.append(f"Completions cut by length: {truncated}.")
    norms = run.values("grad_norm")
    if len(norms):
        zero = int((norms == 0).sum())
        lines.append(
            f"The gradient norm is 0 in {zero} of {len(norms)} rows"
            + (". At these steps the policy did not change." if zero else ".")
        )
    if clipped := _mean_text(run, "clip_ratio", percent=True):
        lines.append(f"Clipped tokens: {clipped}.")
    if kl := _mean_text(run, "kl"):
        lines.append(f"KL divergence from the reference model: {kl}.")
    if mismatch := _mean_text(run, "mismatch_kl"):
        lines.append(f"KL divergence between sampler and trainer: {mismatch}.")
    return lines


def _mean_text(run: ScalarRun, name: str, percent: bool = False) -> str:
    """Format the mean of a field over the recent steps; empty if the field is not logged."""
    rows = recent_rows(run, name)
    if not len(rows):
        return ""
    values = run.fields[name][rows]
    interval = Interval(float(values.mean()), math.nan, math.nan)
    if len(rows) >= MIN_ROWS:
        is_share = name == "truncated" or (
            name == "reward" and 0 <= values.min() <= values.max() <= 1
        )
        draws = len(rows) * run.rollouts if run.rollouts else None
        interval = steps_mean(values, share=is_share, most=draws)
    estimate, low, high = (_percent(x) if percent else f"{x:.3g}" for x in interval)
    text = f"{estimate} [{low}, {high}]" if math.isfinite(interval.low) else estimate
    return f"{text} in steps {run.steps[rows[0]]:g} to {run.steps[rows[-1]]:g}"


def _percent(share: float) -> str:
    """Format a share in percent, with a decimal below 10 %."""
    value = 100 * share
    return f"{value:.1f} %" if 0 < abs(value) < 10 else f"{value:.0f} %"


def _next_command(run: ScalarRun) -> str:
    """Return the command that gives an answer which scalars cannot give."""
    folder = Path(run.source) if "://" not in run.source else None
    if folder is not None:
        near = [folder, folder.parent, folder.parent.parent]
        logged = [place for place in near if any(place.glob("completions/completions*.parquet"))]
        if logged:
            return command_line("advise", str(logged[0]))
        if run.trainer == OURS and (place := next((x for x in near if x.is_dir()), None)):
            return command_line("advise", str(place))
    if run.trainer not in DUMPS:
        return f"{command_line('mse', 'model=CHECKPOINT')}  # measures the gradient of a checkpoint"
    switch, place = DUMPS[run.trainer]
    return f"{command_line('advise', place)}  # {run.trainer} writes these rollouts with {switch}"


def _joint_advice(runs: Sequence[ScalarRun], rollouts: int | None) -> Advice:
    """Return the advice for several runs: their differences."""
    details, decided = _difference_lines(runs)
    for run in runs:
        share = zero_variance(run, rollouts)
        if share is not None:
            details.append(f"{run.name}: {_share_sentence(run, share)}")
        details += [f"{run.name}: {note}" for note in run.notes]
    numbers = [_row_numbers(run, rollouts) for run in runs]
    sentence = details.pop(0) if details else "The runs have no common scalar of the mean reward."
    following = "train further seeds of both settings and name all of their logs"
    if decided:
        following = _next_command(runs[0])
    lines = [*_rows(runs, numbers), *details]
    return Advice(DIFFERENT if decided else UNKNOWN, sentence, lines, following, {"runs": numbers})


def _rows(runs: Sequence[ScalarRun], numbers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table with a row per run, over its recent steps."""
    table = [["run", "steps", "mean reward", "zero variance", "cut"]]
    for run, row in zip(runs, numbers, strict=True):
        cut = "" if row["truncated"] is None else _percent(row["truncated"])
        reward, share = _cell(row["reward"], "{:.3g}"), _cell(row["zero_variance"], "{:.2f}")
        table.append([excerpt(run.name, NAME_WIDTH), row["steps"], reward, share, cut])
    return [
        *aligned(table),
        "Each row has means over the last half of the run's steps, with 95 % intervals over steps. "
        "`zero variance` is the share of groups with equal rewards; `cut` is the share of "
        "completions cut by length.",
    ]


def _cell(interval: Sequence[float] | None, layout: str) -> str:
    """Format an estimate with its interval; empty if there is none."""
    if interval is None:
        return ""
    estimate, low, high = (layout.format(value) for value in interval)
    return f"{estimate} [{low}, {high}]" if math.isfinite(interval[1]) else estimate


def _row_numbers(run: ScalarRun, rollouts: int | None) -> dict[str, Any]:
    """Return the numbers of a run for the table and for the JSON output."""
    rows = recent_rows(run, "reward") if "reward" in run.fields else np.zeros(0, dtype=np.int64)
    reward = None
    if len(rows):
        reward = [float(run.fields["reward"][rows].mean()), math.nan, math.nan]
        if len(rows) >= MIN_ROWS:
            reward = list(steps_mean(run.fields["reward"][rows], share=False))
    share = zero_variance(run, rollouts)
    cut = recent_rows(run, "truncated")
    span = run.steps[rows] if len(rows) else run.steps
    return {
        "run": run.name,
        "steps": f"{span[0]:g}-{span[-1]:g}",
        "reward": reward,
        "zero_variance": None if share is None else list(share.share),
        "truncated": float(run.fields["truncated"][cut].mean()) if len(cut) else None,
    }


def _difference_lines(runs: Sequence[ScalarRun]) -> tuple[list[str], bool]:
    """State the differences of mean rewards between settings, with their intervals.

    Runs whose names differ only in the seed belong to one setting.

    Returns:
        The sentences, and True if a difference between settings with several seeds is significant.
    """
    settings: dict[str, dict[str, ScalarRun]] = {}
    for place, run in enumerate(runs):
        setting, seed = _setting_and_seed(run.name, place)
        settings.setdefault(setting, {})[seed] = run
    names = list(settings)
    if len(names) == 1:
        return _spread_lines(runs), False
    first = settings[names[0]]
    lines, decided = [], False
    for name in names[1:]:
        other = settings[name]
        if len(first) > 1 and len(other) > 1:
            line, is_decided = _seed_difference(names[0], first, name, other)
            decided |= is_decided
            lines.append(line)
        else:
            pair = next(iter(first.values())), next(iter(other.values()))
            if line := _step_difference(*pair):
                lines.append(line)
    return lines, decided


def _setting_and_seed(name: str, place: int) -> tuple[str, str]:
    """Split the name of a run into its setting and its seed; without a seed, it is all setting."""
    found = SEED.search(name)
    if found is None:
        return f"{name}", f"run {place}"
    return (name[: found.start()] + name[found.end() :]).strip("-_./ "), found[1]


def _common_rewards(runs: Sequence[ScalarRun]) -> tuple[Array, list[Array]]:
    """Return the last half of the common steps, and the mean rewards of each run at these steps."""
    series = [
        {
            float(step): float(value)
            for step, value in zip(run.steps, run.fields["reward"], strict=True)
            if math.isfinite(value)
        }
        if "reward" in run.fields
        else {}
        for run in runs
    ]
    steps = sorted(set.intersection(*(set(values) for values in series)))
    steps = steps[-max(MIN_ROWS, (len(steps) + 1) // 2) :]
    return np.array(steps), [np.array([values[step] for step in steps]) for values in series]


def _step_difference(run: ScalarRun, other: ScalarRun) -> str:
    """Compare two runs, paired by step."""
    steps, (values, others) = _common_rewards([run, other])
    if len(steps) < MIN_ROWS:
        return (
            f"{run.name} and {other.name} have {len(steps)} common steps with a mean reward, but "
            f"{MIN_ROWS} are needed to compare them."
        )
    difference = steps_mean(values - others, share=False)
    low, high = difference.low, difference.high
    word = "more than" if low > 0 or high < 0 else "within"
    return (
        f"The mean reward of {run.name} minus that of {other.name} is {difference.estimate:+.3f} "
        f"[{low:+.3f}, {high:+.3f}] in steps {steps[0]:g} to {steps[-1]:g}, which is {word} the "
        "noise between steps. With one run of each setting, the variation between seeds is "
        "unknown, so this difference does not show which setting is better."
    )


def _seed_difference(
    name: str, first: dict[str, ScalarRun], other_name: str, other: dict[str, ScalarRun]
) -> tuple[str, bool]:
    """Compare two settings that have several seeds; paired by seed if they share two or more."""
    steps, values = _common_rewards([*first.values(), *other.values()])
    if not len(steps):
        return f"{name} and {other_name} have no common steps with a mean reward.", False
    means = [float(value.mean()) for value in values]
    firsts = dict(zip(first, means[: len(first)], strict=True))
    others = dict(zip(other, means[len(first) :], strict=True))
    shared = [seed for seed in firsts if seed in others]
    paired = len(shared) > 1
    if paired:
        differences = np.array([firsts[seed] - others[seed] for seed in shared])
        spread, dof, factor = float(differences.std(ddof=1)), len(shared) - 1, 1
        interval = t_interval(differences.mean(), spread**2 / len(shared), dof)
        seeds = f"{len(shared)} common seeds"
    else:
        a, b = np.array(list(firsts.values())), np.array(list(others.values()))
        dof, factor = len(a) + len(b) - 2, 2
        spread = float(np.sqrt((a.var(ddof=1) * (len(a) - 1) + b.var(ddof=1) * (len(b) - 1)) / dof))
        interval = t_interval(a.mean() - b.mean(), spread**2 * (1 / len(a) + 1 / len(b)), dof)
        seeds = f"{len(a)} and {len(b)} seeds"
    decided = interval.low > 0 or interval.high < 0
    line = (
        f"The mean reward of {name} minus that of {other_name} is {interval.estimate:+.3f} "
        f"[{interval.low:+.3f}, {interval.high:+.3f}] over {seeds} in steps {steps[0]:g} to "
        f"{steps[-1]:g}, which is {'more than' if decided else 'within'} the noise between seeds."
    )
    if not decided:
        line += f" {_seeds_sentence(spread, factor)}"
    return line, decided


def _seeds_sentence(spread: float, factor: int) -> str:
    """State the number of seeds that is needed to show a difference of one percentage point.

    With this number, 4 of 5 comparisons show the difference.

    Args:
        spread: standard deviation between seeds, or of the differences between paired seeds.
        factor: 2 for two independent sets of seeds, 1 for paired seeds.
    """
    seeds = units_to_show(spread, POINT, sets=factor)
    return (
        f"To detect a true difference of one percentage point ({POINT}) in 4 of 5 such "
        f"comparisons, train {seeds} seeds of each setting."
    )


def _spread_lines(runs: Sequence[ScalarRun]) -> list[str]:
    """State how much the seeds of one setting differ."""
    steps, values = _common_rewards(runs)
    if len(steps) == 0:
        return ["The runs have no common steps with a mean reward."]
    means = np.array([value.mean() for value in values])
    spread = float(means.std(ddof=1))
    return [
        f"In steps {steps[0]:g} to {steps[-1]:g}, the mean reward of the {len(runs)} seeds is "
        f"{means.mean():.3f}. The standard deviation between seeds is {spread:.3f}. "
        f"{_seeds_sentence(spread, 2)}"
    ]
