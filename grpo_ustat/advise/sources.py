"""Advice from one source: the folder of a study or training run, a pool, or a log of rollouts."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_ustat.config.command_line import command_line
from grpo_ustat.config.model import checkpoints_of
from grpo_ustat.config.reward_funcs import TASK, as_typed
from grpo_ustat.config.schema import ConfigError, did_you_mean
from grpo_ustat.estimators.scaling import CONSTANTS, ScalingLaw, divisible_rollouts
from grpo_ustat.logs.formats import PACKED_SUFFIXES, format_of
from grpo_ustat.logs.pairing import (
    checkpoint_step,
    last_paired,
    logged_policy_step,
    other_policy_sentence,
    pairing_of_file,
    run_folder_of,
)
from grpo_ustat.logs.rewards import (
    LOG_SUFFIXES,
    expected_zero_variance,
    read_rewards,
    reward_lines,
    share_text,
)
from grpo_ustat.logs.rows import TOKEN_COLUMNS, step_rollouts
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
from grpo_ustat.runs.contents import parsed_json, text_of
from grpo_ustat.runs.files import natural_order
from grpo_ustat.runs.record import CODE, CONFIG, RESULT, RunRecord, run_around

OF_THE_UNBIASED = (
    "This advice is for the unbiased leave-one-out gradient. To measure the best G for your loss:"
)
# Settings that `mse` refuses.
NOT_IN_A_POOL = ("objective.entropy_coef", "objective.top_entropy_quantile")
# Minimum number of monitored steps for an interval.
MIN_STEPS = 4
POOL = "pool.json"


@dataclass(frozen=True)
class Request:
    """Parsed command line of `advise`."""

    # Run folder, pool folder, log of rollouts, or folder of logs.
    source: Path
    # Group size to assess; None for the group size of the run.
    num_generations: int | None = None
    # Number of rollouts per step, n; None for the n of the run, or of the run that wrote the log.
    rollouts: int | None = None
    # Column of a log that contains the rewards.
    reward: str | None = None
    # Checkpoint or model name that scores the rollouts of a log.
    model: str | None = None
    # Overrides for the loss to assess: preset, fields and baseline.
    objective: Sequence[str] = ()
    # Further overrides for `mse`.
    overrides: Sequence[str] = ()
    # Root folder for a study that this command starts.
    output_root: str = "outputs"


def advice_of(request: Request) -> Advice:
    """Return the advice that a source supports."""
    source, size, rollouts = request.source, request.num_generations, request.rollouts
    if size is not None and rollouts is not None and rollouts >= size and rollouts % size:
        fewer = rollouts // size * size
        raise ConfigError(
            f"num_generations={size} does not divide rollouts={rollouts}: use rollouts={fewer} or "
            f"rollouts={fewer + size}"
        )
    if not source.exists():
        raise ConfigError(
            f"{source} does not exist: name a run folder, a pool or a log of rollouts "
            f"({', '.join(LOG_SUFFIXES)})"
        )
    if source.is_file() and source.name == RESULT:
        return advice_of(replace(request, source=source.parent))
    if source.is_file():
        _refuse_dump(request)
        if source.suffix in PACKED_SUFFIXES:
            raise ConfigError(f"{source} is compressed: unpack it first, e.g. with gunzip")
        if source.suffix not in LOG_SUFFIXES:
            raise ConfigError(
                f"{source} is not {', '.join(LOG_SUFFIXES[:-1])} or {LOG_SUFFIXES[-1]}"
            )
        return _from_log(source, request)
    if (source / POOL).is_file():
        return _from_pool(request)
    if (source / CONFIG).is_file():
        run = RunRecord(source)
        if not run.config:
            raise ConfigError(f"{source}: {'; '.join(run.notes) or f'{CONFIG} is empty'}")
        # Other programs that use Hydra, such as verl, have no such key.
        if "launch" not in run.config:
            _refuse_dump(request)
        if run.command == "train":
            return _from_training(run, request)
        if run.command == "mse":
            return _from_study(run, request)
        raise ConfigError(
            f"{source} is a run of gap, without a group size to assess: name a run of mse or train"
        )
    if (source / CODE).is_file():
        raise ConfigError(f"{source} is a run folder without {CONFIG}: copy it with cp -r")
    inside = sorted(str(path.parent.parent) for path in source.glob(f"*/**/{CONFIG}"))
    if inside:
        raise ConfigError(f"{source} contains {len(inside)} runs: name one, e.g. {inside[0]}")
    if logs := _logs_in(source):
        return _from_logs(logs, request)
    _refuse_dump(request)
    if (run := run_around(source)) or _logs_in(run := source.parent):
        raise ConfigError(f"{source} is part of a run: name the run folder, {run}")
    raise ConfigError(
        f"{source} is neither a run folder of mse or train nor a pool, and it contains no "
        "completions*.parquet"
    )


def _refuse_dump(request: Request) -> None:
    """Refuse files written by another framework, except a single TRL log."""
    source = request.source
    framework = format_of(source)
    if framework is None or (framework.name == "trl" and source.is_file()):
        return
    size = [f"num_generations={request.num_generations}"] * (request.num_generations is not None)
    raise ConfigError(
        f"{source} was written by {framework.name}: run "
        f"{command_line('convert', str(source), 'rollouts.parquet')} and then "
        f"{command_line('advise', 'rollouts.parquet', *size)}"
    )


def _from_study(run: RunRecord, request: Request) -> Advice:
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
        # An update consists of whole groups.
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
        details.append(f"Only num_generations = {asked} divides n = {asked}.")
    if verdict != UNKNOWN:
        details.append(other_sizes(scaling.law.costs(rollouts)))
    details += filter(None, [noise_sentence(study, rollouts, group_size)])
    losses = study.of(LOSSES)
    details += LOSSES.sentences(losses or [], study)
    if request.objective and losses is None:
        again = [*policy_overrides(run.config), *request.objective, f"pool={run.folder / 'pool'}"]
        details.append(f"{OF_THE_UNBIASED} {command_line('mse', *again)}")
    if request.rollouts is None and theirs is not None:
        details.append(f"n = {theirs} is the step size of the training run that wrote {pool}.")
    details.append(interval_note(study))
    following = next_step(study, rollouts)
    if verdict == "keep" and group_size is not None:
        following = f"continue with num_generations={group_size}"
    return Advice(verdict, sentence, details, following, numbers)


def _from_training(run: RunRecord, request: Request) -> Advice:
    """Return advice from the constants that the gradient monitor measured late in training.

    Constants from the second half of the monitored steps are used. Without constants, the advice
    reports only the share of zero-variance groups.
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
    about = "not enough data" if best is None else f"{best:.1f}"
    details = [
        f"Best G is about {about} {ends}, from {len(recent)} monitored steps between "
        f"{recent[0]['step']} and {recent[-1]['step']}.",
        *filter(None, [training_noise_sentence(run.metrics, group_size, rollouts)]),
        "The 95 % intervals are over steps, for the average over the policies of these steps.",
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
    """Return advice for a training run without enough measured constants."""
    shares = [row["frac_reward_zero_std"] for row in run.metrics if "frac_reward_zero_std" in row]
    reason = "this run did not measure its gradient"
    details = [
        "Train with monitor.gradient_mse_every=10, or measure the model with the command below."
    ]
    if steps:
        reason = "this run measured its gradient in too few steps"
        details = [
            f"The run has {steps} monitored steps, {recent_steps} of them in the second half, but "
            f"{MIN_STEPS} are needed there. Train longer, monitor more often, or measure the model "
            "with the command below."
        ]
    if shares:
        recent = shares[-10:]
        details.append(
            f"Zero-variance groups (frac_reward_zero_std) in the last {len(recent)} steps: "
            f"{100 * np.mean(recent):.0f} % of groups of {group_size}. They give no gradient, but "
            "their share does not show how much larger groups would help."
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
    """Return the command that measures the newest checkpoint of a run, by default with its loss.

    Without a checkpoint, the command measures the model from which the run starts.
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


def _from_pool(request: Request) -> Advice:
    """Return advice from a pool folder: from its study, or from a new study of the pool."""
    folder = request.source
    for near in (folder.parent, folder):
        if (near / CONFIG).is_file() and (near / RESULT).is_file():
            return _from_study(RunRecord(near), request)
    try:
        draws = parsed_json(text_of(folder, POOL))
        files = [*folder.glob("*.safetensors")] or [*folder.glob("*.unscored")]
        parts = [path.stem.split("-") for path in files]
        ends: dict[str, int] = {}
        for stem, first, count in parts:
            ends[stem] = max(ends.get(stem, 0), int(first) + int(count))
        overrides = policy_overrides(draws)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"the pool {folder} cannot be read: {error!r:.120}") from error
    if not ends:
        raise ConfigError(f"the pool {folder} contains no completions yet")
    if "file" in draws:
        raise ConfigError(
            f"{folder} was scored from a log of rollouts: name the log and model=CHECKPOINT"
        )
    functions = draws.get("reward_funcs") or [TASK]
    if any(name.startswith("local:") for name in functions):
        raise ConfigError(
            f"{folder} has rewards of {as_typed(functions)}, whose files are not in the pool: run "
            f"mse with the same reward_funcs and pool={folder}"
        )
    sizes = [
        f"pool={folder}", f"study.questions={len(ends)}", f"seed={draws['seed']}",
        f"budget.pool_completions={min(ends.values())}",
        *(f"budget.{key}={draws[key]}" for key in ("feature_sketch", "gradient_sketch")),
    ]  # fmt: skip
    advice = _study_now([*overrides, *request.objective, *sizes], request)
    if functions != [TASK]:
        advice.details.insert(
            0,
            f"This advice is for reward_funcs={as_typed(functions)} with weight 1 each. For other "
            f"weights, run mse with pool={folder} and reward_weights.",
        )
    return advice


def _logs_in(folder: Path) -> list[Path]:
    """Return the TRL logs in a run folder or in its subfolder `completions`, ordered by step."""
    logs = list(folder.glob("completions*.parquet"))
    logs = logs or list(folder.glob("completions/completions*.parquet"))
    return sorted(logs, key=natural_order)


def _from_logs(logs: Sequence[Path], request: Request) -> Advice:
    """Return advice from one of the logs of a run, which are ordered by step.

    The log is the one written the fewest updates away from the requested model or, if no model is
    requested, from a checkpoint of the run. If several logs are equally near, it is the last one.
    """
    steps = list(checkpoints_of(run_folder_of(logs[-1])))
    if request.model is not None:
        typed = checkpoint_step(request.model)
        steps = [] if typed is None else [typed]
    chosen = last_paired(logs, steps)
    advice = _from_log(chosen, replace(request, source=chosen))
    place = f"the last of {len(logs)} logs in {request.source}"
    if chosen != logs[-1]:
        place = f"the log nearest to a checkpoint, of {len(logs)} logs in {request.source}"
    advice.details.insert(0, f"This advice is from {chosen.name}, {place}.")
    return advice


def _from_log(path: Path, request: Request) -> Advice:
    """Return advice from a log: from scores if a model is given, and otherwise from rewards."""
    if request.model is not None:
        if path.suffix != ".parquet":
            raise ConfigError(
                f"{path}: a model can score only Parquet logs with prompts and completions; leave "
                "out model= for advice from rewards only"
            )
        words = [f"model={request.model}", f"pool={path}", *request.objective, *request.overrides]
        advice = _study_now(words, request)
        if stale := other_policy_sentence(path, request.model):
            advice.details.insert(0, stale)
        return advice
    rewards = read_rewards(path, request.reward)
    group_size = request.num_generations
    details = reward_lines(rewards, group_size)
    theirs = step_rollouts(path) if path.suffix == ".parquet" else None
    if theirs is not None:
        details.append(f"The run that wrote this log has n = {theirs} rollouts per training step.")
    details.append(
        "The best group size G* = 1 + sqrt(C3/C1) depends on how much the gradients of different "
        "prompts differ (C1) and on how noisy the gradient of one prompt is (C3). Rewards do not "
        "determine C1 and C3"
        + (", nor the relative efficiency of your loss." if request.objective else ".")
    )
    if group_size is None:
        sentence = "Rewards alone do not show which num_generations is best."
    else:
        sentence = f"Rewards alone do not show whether num_generations = {group_size} is good."
        share = expected_zero_variance(rewards.groups, group_size)
        if share is not None:
            sentence += (
                f" At this size, {share_text(share)} of the groups have zero variance and give no "
                "gradient."
            )
    size = [f"num_generations={group_size}"] * (group_size is not None)
    names = set(rewards.columns)
    cut = [] if "ended" in names or names >= set(TOKEN_COLUMNS) else ["study.cut_at=LENGTH"]
    following = "also log completions, as TRL does with log_completions=True, and use that file"
    if path.suffix == ".parquet":
        pairing, step = pairing_of_file(path), logged_policy_step(path)
        model = "CHECKPOINT" if pairing is None else str(pairing.checkpoint)
        theirs = "these completions" + " of at most LENGTH tokens" * bool(cut)
        wrote = f"the model that wrote {theirs}"
        if pairing is None and step is not None:
            wrote += f", after {step} updates"
        elif pairing is not None and not pairing.is_exact:
            details.append(f"{pairing.line()}.")
            wrote = f"the nearest checkpoint: {theirs} were written {pairing.between} it"
        words = [*size, f"model={model}", *request.objective, *cut]
        following = f"{command_line('advise', str(path), *words)}  # {wrote}"
    numbers = {"num_generations": group_size, "rollouts": request.rollouts or theirs}
    return Advice(UNKNOWN, sentence, details, following, numbers)


def _study_now(overrides: Sequence[str], request: Request) -> Advice:
    """Run `mse` in a separate process, which prints progress to standard error; read its result."""
    digest = hashlib.blake2b("\n".join(overrides).encode(), digest_size=5).hexdigest()
    folder = Path(request.output_root) / "advise" / f"{request.source.stem}-{digest}"
    words = [*overrides, f"hydra.run.dir={folder}"]
    command = [sys.executable, "-m", "grpo_ustat", "mse", *words]
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if code:
        raise ConfigError(f"no advice, because the study failed: {command_line('mse', *words)}")
    return _from_study(RunRecord(folder), request)


def _check_sizes(group_size: int | None, rollouts: int) -> None:
    """Refuse a group size that is larger than the step."""
    if group_size is not None and group_size > rollouts:
        raise ConfigError(
            f"num_generations={group_size} is larger than rollouts={rollouts}: a step needs at "
            "least one group"
        )


OPTION_NAMES = ("num_generations", "rollouts", "reward", "model", "objective", "output_root")


def parse_request(words: Sequence[str]) -> Request:
    """Parse the words of the command line.

    The words are a source and options: `num_generations=`, `rollouts=`, `reward=`, `model=`,
    `output_root=`, and `objective=` and `baseline=` with their fields. If `model=` is given,
    overrides of `mse` are also allowed.
    """
    values: dict[str, Any] = {}
    sources, overrides, objective = [], [], []
    for word in words:
        key, equals, value = word.partition("=")
        if Path(word).exists() or not equals:
            sources.append(word)
        elif key in ("num_generations", "rollouts", "group_size", "budget.rollouts"):
            name = {"group_size": "num_generations", "budget.rollouts": "rollouts"}.get(key, key)
            if not value.isdigit() or int(value) < 2:
                raise ConfigError(
                    f"{word}: the value must be a whole number of at least 2, e.g. {key}=8"
                )
            values[name] = int(value)
        elif key in ("objective", "baseline") or key.startswith(("objective.", "baseline.")):
            objective.append(word)
        elif key in OPTION_NAMES:
            values[key] = value
        elif key.startswith(("model.", "study.", "prompt", "budget.", "launch.")):
            overrides.append(word)
        elif "/" in word:
            # A path may contain "=" and may not exist.
            sources.append(word)
        else:
            hint = did_you_mean(key, OPTION_NAMES)
            raise ConfigError(f"unknown {word}: {hint}choose from {', '.join(OPTION_NAMES)}")
    if len(sources) != 1:
        raise ConfigError(
            f"{'no source' if not sources else 'several sources: ' + ', '.join(sources)}: name one "
            f"run folder, pool or log, e.g. {command_line('advise', 'outputs/mse/NAME/seed-0')}"
        )
    if overrides and "model" not in values:
        raise ConfigError(f"{overrides[0]} applies only to scoring a log: add model=CHECKPOINT")
    return Request(Path(sources[0]), **values, objective=objective, overrides=overrides)
