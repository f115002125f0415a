"""Advice from the folder of a study or training run, or from a pool.

A pool is a folder with the completions of a study and their scores (gradients).
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from grpo_ustat.advise.request import Request
from grpo_ustat.config.command_line import command_line
from grpo_ustat.config.reward_funcs import TASK, as_typed
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.scaling import CONSTANTS, ScalingLaw, divisible_rollouts
from grpo_ustat.logs.rows import step_rollouts
from grpo_ustat.measurements.assumption2 import rewards_vary
from grpo_ustat.measurements.group_size import (
    SCALING,
    best_size_sentence,
    interval_note,
    noise_sentence,
)
from grpo_ustat.measurements.losses import LOSSES
from grpo_ustat.measurements.next_step import next_step, objective_overrides, policy_overrides
from grpo_ustat.measurements.registry import finished_study
from grpo_ustat.pages.advice import (
    UNKNOWN,
    Advice,
    group_size_advice,
    other_sizes,
    rollouts_in_groups,
)
from grpo_ustat.pages.learning import monitored_constants, training_noise_sentence
from grpo_ustat.runs.contents import DAMAGE, read_mapping
from grpo_ustat.runs.files import CONFIG, RESULT
from grpo_ustat.runs.record import RunRecord

OF_THE_UNBIASED = (
    "This advice is for the unbiased leave-one-out gradient. The following command measures the "
    "best G for your loss:"
)
# Loss settings that `mse` refuses, because stored scores do not contain their effect.
NOT_IN_A_POOL = ("objective.entropy_coef", "objective.top_entropy_quantile")
# Minimum number of measured steps for an interval.
MIN_STEPS = 4
POOL = "pool.json"


def run_advice(request: Request) -> Advice:
    """Return advice from a run folder of `mse` or `train`."""
    source = request.source
    run = RunRecord(source)
    if not run.config:
        raise ConfigError(f"{source}: {'; '.join(run.notes) or f'{CONFIG} is empty'}")
    if run.command == "train":
        return training_advice(run, request)
    if run.command == "mse":
        return study_advice(run, request)
    raise ConfigError(
        f"{source} is a run of gap, which has no group size to assess: name a run of mse or train"
    )


def study_advice(run: RunRecord, request: Request) -> Advice:
    """Return advice from the `result.json` of a study."""
    study = finished_study(run)
    if study is None:
        again = command_line("mse", *policy_overrides(run.config))
        raise ConfigError(
            f"{run.folder} is not finished: run the same command again to continue, e.g. {again}"
        )
    group_size = request.num_generations
    pool = request.source if request.source.is_file() else run.config.get("pool")
    theirs = step_rollouts(Path(pool)) if pool and Path(pool).is_file() else None
    if theirs is not None and group_size is not None:
        # An update consists of whole groups, so n is rounded down to a multiple of the size.
        theirs = theirs // group_size * group_size or None
    asked = request.rollouts or theirs or rollouts_in_groups(group_size, study.rollouts)
    rollouts = divisible_rollouts(asked) if group_size is None else asked
    _check_sizes(group_size, rollouts)
    if not rewards_vary(study):
        return Advice(UNKNOWN, best_size_sentence(study), [], next_step(study, rollouts))
    scaling = study.need(SCALING)
    verdict, sentence, numbers = group_size_advice(scaling.law, scaling.gstar, group_size, rollouts)
    details = [best_size_sentence(study)]
    if rollouts != asked:
        details.append(
            f"The advice is for another n, because only num_generations = {asked} divides n = "
            f"{asked}."
        )
    if verdict != UNKNOWN:
        details.append(other_sizes(scaling.law.costs(rollouts)))
    details += filter(None, [noise_sentence(study, rollouts, group_size)])
    losses = study.of(LOSSES)
    details += LOSSES.sentences(losses or [], study)
    if request.objective and losses is None:
        again = [*policy_overrides(run.config), *request.objective, f"pool={run.folder / 'pool'}"]
        details.append(f"{OF_THE_UNBIASED} {command_line('mse', *again)}")
    if request.rollouts is None and theirs is not None:
        details.append(
            f"n = {theirs} is the number of rollouts per step of the training run that wrote "
            f"{pool}."
        )
    details.append(interval_note(study))
    following = next_step(study, rollouts)
    if verdict == "keep" and group_size is not None:
        following = f"continue with num_generations={group_size}"
    return Advice(verdict, sentence, details, following, numbers)


def training_advice(run: RunRecord, request: Request) -> Advice:
    """Return advice from the constants C1, C2 and C3 that a training run measured.

    The advice uses the steps in the second half of training, so that it describes late policies.
    If the run did not measure the constants, or at too few steps, the advice reports only the share
    of zero-variance groups.
    """
    group_size = request.num_generations or run.config["group_size"]
    rollouts = request.rollouts or run.config["budget"]["rollouts"]
    _check_sizes(group_size, rollouts)
    measured = [
        row
        for row in run.metrics
        if all(row.get(f"monitor/{name}") is not None for name in CONSTANTS)
    ]
    recent = [row for row in measured if 2 * row["step"] >= measured[-1]["step"]]
    if len(recent) < MIN_STEPS:
        return _without_monitor(run, group_size, len(measured), len(recent))
    prompts = run.config["budget"]["rollouts"] // run.config["group_size"]
    law = ScalingLaw.of_steps(monitored_constants(recent), prompts)
    gstar = law.gstar()
    verdict, sentence, numbers = group_size_advice(law, gstar, group_size, rollouts)
    best, low, high = (numbers[name] for name in ("gstar", "gstar_low", "gstar_high"))
    ends = f"[{low or 1:.1f}, {'no upper end' if high is None else f'{high:.1f}'}]"
    about = "unknown (not enough data)" if best is None else f"about {best:.1f}"
    details = [
        f"The best G is {about} {ends}. The run measured its gradient at {len(recent)} of the "
        f"steps from {recent[0]['step']} to {recent[-1]['step']}.",
        *filter(None, [training_noise_sentence(run.metrics, group_size, rollouts)]),
        "All estimates are averages over the policies at these steps; their 95 % intervals reflect "
        "the variation between steps.",
    ]
    if request.objective or _measurable_loss(run):
        details.append(f"{OF_THE_UNBIASED} {_measure_checkpoint(run, request.objective)}")
    if verdict != UNKNOWN:
        details.insert(1, other_sizes(law.costs(rollouts)))
        used = numbers["best_num_generations"]
        changed = command_line(
            "train", *policy_overrides(run.config), f"budget.rollouts={rollouts}",
            f"group_size={used}",
        )  # fmt: skip
        following = "continue training unchanged" if verdict == "keep" else changed
    else:
        following = _measure_checkpoint(run)
    return Advice(verdict, sentence, details, following, numbers)


def _without_monitor(run: RunRecord, group_size: int, steps: int, recent_steps: int) -> Advice:
    """Return advice for a training run that measured the constants at too few steps, or never.

    Args:
        run: training run.
        group_size: group size to assess.
        steps: number of steps at which the constants were measured.
        recent_steps: number of these steps in the second half of training.
    """
    shares = [row["frac_reward_zero_std"] for row in run.metrics if "frac_reward_zero_std" in row]
    reason = "this run did not measure its gradient"
    details = [
        "To measure the gradient, train with monitor.gradient_mse_every=10, or run the command "
        "below."
    ]
    if steps:
        reason = "this run measured its gradient in too few steps"
        details = [
            f"The run measured its gradient at {steps} steps. {recent_steps} of them are in the "
            f"second half of training, where {MIN_STEPS} are needed. Train longer, measure more "
            "often (monitor.gradient_mse_every), or run the command below."
        ]
    if shares:
        recent = shares[-10:]
        details.append(
            f"In the last {len(recent)} steps, {100 * np.mean(recent):.0f} % of the groups of "
            f"{group_size} had equal rewards (frac_reward_zero_std). Such groups give no gradient, "
            "but their share does not show how much larger groups would help."
        )
    sentence = (
        "There is not enough data to advise keeping or changing num_generations = "
        f"{group_size}: {reason}."
    )
    return Advice(UNKNOWN, sentence, details, _measure_checkpoint(run))


def _measurable_loss(run: RunRecord) -> list[str]:
    """Return `mse` overrides for the loss of a training run; empty if it cannot be measured."""
    words = objective_overrides(run.config)
    return [] if any(word.startswith(NOT_IN_A_POOL) for word in words) else words


def _measure_checkpoint(run: RunRecord, loss: Sequence[str] = ()) -> str:
    """Return the `mse` command for the newest checkpoint of a run.

    If there is no checkpoint, the command is for the model from which the run starts.

    Args:
        run: training run.
        loss: configuration overrides of the loss to measure; empty for the run's own loss.
    """
    overrides = [*policy_overrides(run.config), *(loss or _measurable_loss(run))]
    checkpoints = sorted(
        run.folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2] or 0)
    )
    if checkpoints:
        overrides = [override for override in overrides if not override.startswith("model")]
        overrides = [f"model={checkpoints[-1]}", *overrides]
    note = "" if checkpoints else "  # the initial model of the run, which has no checkpoint here"
    return command_line("mse", *overrides) + note


def pool_advice(request: Request) -> Advice:
    """Return advice from a pool folder.

    If a finished study belongs to the pool, its result is used. If not, a new study is run.
    """
    folder = request.source
    for near in (folder.parent, folder):
        if (near / CONFIG).is_file() and (near / RESULT).is_file():
            return study_advice(RunRecord(near), request)
    try:
        draws = read_mapping(folder / POOL)
        files = [*folder.glob("*.safetensors")] or [*folder.glob("*.unscored")]
        parts = [path.stem.split("-") for path in files]
        ends: dict[str, int] = {}
        for stem, first, count in parts:
            ends[stem] = max(ends.get(stem, 0), int(first) + int(count))
        overrides = policy_overrides(draws)
    except (*DAMAGE, AttributeError) as error:
        raise ConfigError(f"the pool {folder} cannot be read: {error!r:.120}") from error
    if not ends:
        raise ConfigError(f"the pool {folder} contains no completions yet")
    if "file" in draws:
        raise ConfigError(
            f"{folder} was made from a log of rollouts: name the log and model=CHECKPOINT"
        )
    functions = draws.get("reward_funcs") or [TASK]
    if any(name.startswith("local:") for name in functions):
        raise ConfigError(
            f"{folder} has rewards of {as_typed(functions)}, but the files of these functions are "
            f"not in the pool: run mse with the same reward_funcs and pool={folder}"
        )
    sizes = [
        f"pool={folder}", f"study.questions={len(ends)}", f"seed={draws['seed']}",
        f"budget.pool_completions={min(ends.values())}",
        *(f"budget.{key}={draws[key]}" for key in ("feature_sketch", "gradient_sketch")),
    ]  # fmt: skip
    advice = study_now([*overrides, *request.objective, *sizes], request)
    if functions != [TASK]:
        advice.details.insert(
            0,
            f"This advice is for reward_funcs={as_typed(functions)}, each with weight 1. For other "
            f"weights, run mse with pool={folder} and reward_weights.",
        )
    return advice


def study_now(overrides: Sequence[str], request: Request) -> Advice:
    """Run `mse` in a separate process, and return the advice from its result.

    The process prints its progress to standard error.
    """
    digest = hashlib.blake2b("\n".join(overrides).encode(), digest_size=5).hexdigest()
    folder = Path(request.output_root) / "advise" / f"{request.source.stem}-{digest}"
    words = [*overrides, f"hydra.run.dir={folder}"]
    command = [sys.executable, "-m", "grpo_ustat", "mse", *words]
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if code:
        raise ConfigError(f"no advice, because the study failed: {command_line('mse', *words)}")
    return study_advice(RunRecord(folder), request)


def _check_sizes(group_size: int | None, rollouts: int) -> None:
    """Refuse a group size that is larger than the number of rollouts per step."""
    if group_size is not None and group_size > rollouts:
        raise ConfigError(
            f"num_generations={group_size} is larger than rollouts={rollouts}: a step needs at "
            "least one group"
        )
