"""Advice from logged rollouts or rewards.

If the user names the model that wrote the rollouts, the gradients of the rollouts are computed in a
study, and the advice is from this study. Otherwise it is only from the rewards.
"""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from grpo_ustat.advise.kinds import Kind, as_rollouts, completions_in
from grpo_ustat.advise.request import Request
from grpo_ustat.config.command_line import command_line, install_line, is_installed, new_rollouts
from grpo_ustat.config.model import checkpoints_of
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.convert import Conversion, convert
from grpo_ustat.logs.formats import Format
from grpo_ustat.logs.pairing import (
    TRAINER_STATE,
    Pairing,
    checkpoint_step,
    last_paired,
    logged_policy_step,
    other_policy_sentence,
    pairing_of_file,
    run_folder_of,
)
from grpo_ustat.logs.rewards import (
    RewardGroups,
    expected_zero_variance,
    read_rewards,
    reward_lines,
    share_text,
)
from grpo_ustat.logs.rows import MIN_COMPLETIONS, MIN_PROMPTS, TOKEN_COLUMNS, Options, step_rollouts
from grpo_ustat.logs.tables import is_parquet
from grpo_ustat.pages.advice import UNKNOWN, Advice
from grpo_ustat.runs.files import natural_order

MORE_LOGS = "also log completions, as TRL does with log_completions=True, and use that file"


@dataclass(frozen=True)
class RewardLog:
    """Rewards of a source, and further facts that the source contains."""

    rewards: RewardGroups
    # Number of rollouts per step in the run that wrote the source; None if unknown.
    rollouts: int | None = None
    # Printed lines that say what was read and what was left out.
    details: list[str] = field(default_factory=list)
    # Result of the conversion; None if the source is a table of rewards.
    conversion: Conversion | None = None


def read_log(request: Request, kind: Kind) -> RewardLog:
    """Read the rewards of a source; a log of rollouts is first converted to a Parquet file."""
    source = request.source
    if kind is Kind.COMPLETIONS:
        chosen, line = _chosen_log(request)
        log = read_log(replace(request, source=chosen), Kind.REWARDS)
        return replace(log, details=[line, *log.details])
    if kind is Kind.REWARDS:
        rewards = read_rewards(source, request.reward, request.cluster)
        return RewardLog(rewards, step_rollouts(source) if is_parquet(source) else None)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "rollouts.parquet")
        conversion, framework = _converted(request, target)
        rewards = read_rewards(target, cluster=request.cluster)
    lines = [line.strip() for line in conversion.lines()]
    if framework.note and (conversion.pairing is None or not conversion.exact):
        lines.append(f"Note: {framework.note}")
    lines = [_as_typed(line) for line in lines]
    return RewardLog(
        replace(rewards, column=request.reward or "the log"), conversion.step_rollouts,
        [line if line.endswith(".") else f"{line}." for line in lines], conversion,
    )  # fmt: skip


def _converted(request: Request, target: Path) -> tuple[Conversion, Format]:
    """Convert the rollouts of a source to a Parquet file.

    Error messages of `convert` are reworded, so that they name options of `advise`.
    """
    source = request.source
    with as_rollouts(source) as rollouts:
        assert rollouts is not None
        path, framework = rollouts
        try:
            return convert(path, framework, target, Options(reward=request.reward)), framework
        except ConfigError as error:
            message = _as_typed(str(error).replace(str(path), str(source)))
            if "--" in message:
                again = command_line("convert", str(source), "rollouts.parquet")
                message += f"; these are options of {again}"
            raise ConfigError(message) from error


def _as_typed(text: str) -> str:
    """Replace the option `--reward X` of `convert` with `reward=X`, the option of `advise`."""
    return text.replace("--reward ", "reward=")


def reward_advice(request: Request, kind: Kind) -> Advice:
    """Return advice from rollouts or rewards.

    If the user names a model, a study with this model is run; see `_scored_advice`.
    """
    if request.model is not None:
        return _scored_advice(request, kind)
    log = read_log(request, kind)
    source, group_size, rewards = request.source, request.num_generations, log.rewards
    if kind is Kind.COMPLETIONS:
        source, _ = _chosen_log(request)
    details = log.details + reward_lines(rewards, group_size)
    if log.rollouts is not None:
        details.append(
            f"The run that wrote this log has n = {log.rollouts} rollouts per training step."
        )
    details.append(
        "The best group size is G* = 1 + sqrt(C3/C1). C1 measures how much the gradients of "
        "different prompts differ, and C3 measures how noisy the gradient of one prompt is. "
        "Rewards do not determine C1 and C3"
        + (", nor the relative efficiency of your loss." if request.objective else ".")
    )
    if group_size is None:
        sentence = "Rewards alone do not show which num_generations is best."
    else:
        sentence = f"Rewards alone do not show whether num_generations = {group_size} is good."
        share = expected_zero_variance(rewards, group_size)
        if share is not None:
            sentence += (
                f" At this size, {share_text(share)} of the groups have equal rewards and give no "
                "gradient."
            )
    following, remarks = _next_of_log(request, source, log)
    numbers = {"num_generations": group_size, "rollouts": request.rollouts or log.rollouts}
    return Advice(UNKNOWN, sentence, details + remarks, following, numbers)


def _next_of_log(request: Request, source: Path, log: RewardLog) -> tuple[str, list[str]]:
    """Return the next step for a log, usually a command, and remarks on the checkpoint in it.

    The command computes the gradients of the log with the model that wrote it.
    """
    conversion, names = log.conversion, set(log.rewards.columns)
    if conversion is not None:
        model = "CHECKPOINT" if conversion.pairing is None else str(conversion.pairing.checkpoint)
        if not conversion.is_for_mse:
            return (
                f"log groups of {MIN_COMPLETIONS} or more completions per prompt, and use that log",
                [],
            )
        if conversion.groups < MIN_PROMPTS:
            return new_rollouts([f"model={model}"]), []
        return _scoring_command(request, source, conversion.pairing, None, conversion.exact), []
    if not is_parquet(source) or not names & {"completion", "completion_ids"}:
        return MORE_LOGS, []
    pairing, step = pairing_of_file(source), logged_policy_step(source)
    remarks = [f"{pairing.line()}."] if pairing is not None and not pairing.is_exact else []
    is_exact = "ended" in names or names >= set(TOKEN_COLUMNS)
    return _scoring_command(request, source, pairing, step, is_exact), remarks


def _scoring_command(
    request: Request, source: Path, pairing: Pairing | None, step: int | None, is_exact: bool
) -> str:
    """Return the command that computes gradients of rollouts with the model that wrote them.

    Args:
        request: command line of the user, whose options are repeated.
        source: log with the rollouts.
        pairing: checkpoint that sampled the rollouts, or the one nearest in steps; None if unknown.
        step: number of updates before the rollouts were written; shown if no checkpoint is known.
        is_exact: True if the source shows which completions were cut by length.
    """
    size = [f"num_generations={request.num_generations}"] * (request.num_generations is not None)
    reward = [f"reward={request.reward}"] * (request.reward is not None)
    cut = [] if is_exact else ["study.cut_at=LENGTH"]
    model = "CHECKPOINT" if pairing is None else str(pairing.checkpoint)
    theirs = "these completions" + " (of at most LENGTH tokens)" * bool(cut)
    wrote = f"the model that wrote {theirs}"
    if pairing is None and step is not None:
        wrote += f"; it had received {step} updates"
    elif pairing is not None and not pairing.is_exact:
        wrote = f"the nearest checkpoint; {theirs} were written {pairing.between} it"
    words = [*size, *reward, f"model={model}", *request.objective, *cut]
    return f"{command_line('advise', str(source), *words)}  # {wrote}"


def _chosen_log(request: Request) -> tuple[Path, str]:
    """Choose one of the logs in a folder; return it with a line that names it.

    If the user named a model, the chosen log is the one written the fewest updates away from it. If
    not, it is the log that is nearest to a checkpoint of the run. If several logs are equally near,
    the last of them is chosen.
    """
    logs = completions_in(request.source)
    steps = list(checkpoints_of(run_folder_of(logs[-1])))
    if request.model is not None:
        typed = checkpoint_step(request.model)
        steps = [] if typed is None else [typed]
    chosen = last_paired(logs, steps)
    place = f"the last log in {request.source} (logs there: {len(logs)})"
    if chosen != logs[-1]:
        place = f"the log nearest to a checkpoint in {request.source} (logs there: {len(logs)})"
    line = f"This advice is from {chosen.name}, {place}."
    states = sorted(request.source.glob(f"checkpoint-*/{TRAINER_STATE}"), key=natural_order)
    if states and request.model is None:
        line += f" For advice from the scalars of all steps, name {states[-1]} instead."
    return chosen, line


def _scored_advice(request: Request, kind: Kind) -> Advice:
    """Run `mse` on the rollouts of a source, with gradients under the model that the user names."""
    if lacking := [name for name in ("torch", "hydra") if not is_installed(name)]:
        raise ConfigError(
            f"computing gradients with model={request.model} needs {lacking[0]}: "
            f"{install_line('cli')}"
        )
    from grpo_ustat.advise.runs import study_now

    assert request.model is not None
    source, details = request.source, list[str]()
    if kind is Kind.COMPLETIONS:
        source, line = _chosen_log(request)
        details.append(line)
    elif kind is Kind.ROLLOUTS:
        source, details = _stored_rollouts(request)
    if source.suffix != ".parquet":
        raise ConfigError(
            f"{source}: model= needs a Parquet log with prompts and completions; leave out model= "
            "for advice from rewards only"
        )
    words = [f"model={request.model}", f"pool={source}", *request.objective, *request.overrides]
    advice = study_now(words, replace(request, source=source))
    if stale := other_policy_sentence(source, request.model):
        details.append(stale)
    advice.details[:0] = details
    return advice


def _stored_rollouts(request: Request) -> tuple[Path, list[str]]:
    """Convert the rollouts of a source to a file for a study; return its path and printed lines.

    The file name contains a digest of the content. If the log grows, a new file is written.
    """
    folder = Path(request.output_root) / "advise"
    with tempfile.TemporaryDirectory() as temporary:
        converted = Path(temporary, "rollouts.parquet")
        conversion, _ = _converted(request, converted)
        content = converted.read_bytes()
    digest = hashlib.blake2b(content, digest_size=5).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{request.source.stem}-{digest}.parquet"
    target.write_bytes(content)
    lines = [_as_typed(line.strip()) for line in conversion.lines()]
    return target, [*lines, f"The rollouts are in {target}."]
