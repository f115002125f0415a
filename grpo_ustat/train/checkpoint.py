"""Checkpoints: the model in the format of `save_pretrained`, and all other state of a run.

No random state is stored, because the random draws of a step follow from the seed and the step
number. Files are safetensors, JSON and npz without pickle, so that loading a checkpoint runs no
code from it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed.ranks import RefusedByRank, is_main, main_only
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.tokenizer import save_tokenizer
from grpo_ustat.runs.log import RunLog, attempt
from grpo_ustat.terminal.console import warn
from grpo_ustat.terminal.streams import single_line
from grpo_ustat.train import fsdp2
from grpo_ustat.train.context import TrainContext, TrainProgress
from grpo_ustat.train.fsdp2 import load_moments
from grpo_ustat.train.model_card import card_files
from grpo_ustat.train.snapshots import STATE_FILE, checkpoints, prune, publish

OPTIMIZER_FILE = "optimizer.safetensors"
BASELINE_FILE = "memory.npz"
ADAPTERS_FILE = "adapter_model.safetensors"


def save_checkpoint(run: TrainContext, progress: TrainProgress, log: RunLog | None) -> bool:
    """Write all logged rows and `checkpoint-<step>/`; return True if the checkpoint was written.

    If writing fails, for example because the disk is full, a warning is printed, the failure is
    counted, and the run continues with the previous checkpoint kept.

    Raises:
        FloatingPointError: If a weight or optimizer state is not finite.
    """
    step, failed, texts = progress.step, 0, {}
    if log and step == run.config.max_steps:
        texts = card_files(run, progress)
    start = time.perf_counter()
    moments = fsdp2.moments(run.policy, run.optimizer)
    if log:
        attempt(f"the last rows of {run.folder.path}", log.sync)
        fields = {key: value for key, value in vars(progress).items() if key != "step"}
        state = {"progress": fields, "scheduler": run.scheduler.state_dict()}
        baseline_state = run.baseline_state.state_dict()
        write = partial(
            write_checkpoint,
            run.folder.path, step, run.policy, moments, state, baseline_state, texts,
        )  # fmt: skip
    with fsdp2.exact_full_copy(run):
        if log:
            with name_failed_step(run, step):
                failed = int(not attempt(f"checkpoint-{step} of {run.folder.path}", write))
    failed = int(run.all_ranks_sum(np.array([failed]))[0])
    progress.failed_saves += failed
    progress.seconds_save = time.perf_counter() - start
    return not failed


def write_checkpoint(
    folder: Path,
    step: int,
    policy: Policy,
    moments: dict[str, torch.Tensor],
    state: dict[str, Any],
    baseline_state: dict[str, Any],
    texts: dict[str, str] | None = None,
) -> Path:
    """Write `checkpoint-<step>/`, which appears under this name only when it is complete.

    A model with adapters is saved in PEFT's format, which contains only the adapters and the name
    of their base model.

    Args:
        folder: run folder.
        step: number of finished steps.
        policy: policy whose model and tokenizer are saved.
        moments: state of the optimizer, from `fsdp2.moments`.
        state: further state of the run, for a JSON file.
        baseline_state: state of the baseline.
        texts: contents of further files by file name.

    Raises:
        FloatingPointError: If a weight or optimizer state is not finite. No folder is written then.
    """
    check_finite(policy, moments)

    def write_files(staging: Path) -> None:
        """Write all files of the checkpoint into the staging folder."""
        policy.model.save_pretrained(staging)
        save_tokenizer(policy.tokenizer, staging)
        save_file(moments, staging / OPTIMIZER_FILE)
        np.savez(staging / BASELINE_FILE, **baseline_state)
        (staging / STATE_FILE).write_text(json.dumps(state | {"step": step}))
        for name, text in (texts or {}).items():
            (staging / name).write_text(text)
        # Safetensors makes files that only their owner can read. Give them the usual mode.
        for file in filter(Path.is_file, staging.rglob("*")):
            file.chmod((staging / STATE_FILE).stat().st_mode)

    return publish(folder, step, write_files)


def drop_old(run: TrainContext, step: int) -> None:
    """Remove old checkpoints, so that `save_total_limit` are left; see `snapshots.prune`."""
    path, limit = run.folder.path, run.config.save_total_limit
    attempt(f"removal of old checkpoints in {path}", lambda: prune(path, step, limit))


def check_finite(policy: Policy, moments: dict[str, torch.Tensor] | None = None) -> None:
    """Raise a FloatingPointError if a weight or optimizer state is not finite."""
    tensors = {f"weight {name}": p.detach() for name, p in policy.model.named_parameters()}
    tensors |= {f"optimizer state {name}": value for name, value in (moments or {}).items()}
    for name, value in tensors.items():
        # The smallest and largest entries suffice, because both are NaN if any entry is NaN.
        ends = value.aminmax() if value.numel() else ()
        if not all(map(torch.isfinite, ends)):
            raise FloatingPointError(f"{name} is not finite: lower learning_rate")


@contextmanager
def name_failed_step(run: TrainContext, step: int) -> Iterator[None]:
    """Add the run folder and the step to the message of a FloatingPointError in the block."""
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(f"{run.folder.path} stopped in step {step}: {error}") from error


def resume(run: TrainContext) -> TrainProgress:
    """Restore the newest checkpoint that can be loaded and return its progress.

    If there is no checkpoint, the progress is that of a new run. If a checkpoint cannot be loaded
    on some rank, a warning says why, and the checkpoint before it is tried.

    Raises:
        ConfigError: no checkpoint can be loaded, or one does not fit the model.
    """
    folder, progress = run.folder.path, None
    found = main_only(checkpoints, folder)
    for checkpoint in found:
        reason = ""
        try:
            progress = load(checkpoint, run)
        except ConfigError:
            raise
        # Each library reports a damaged file by another kind of error.
        except Exception as error:
            reason = f"{type(error).__name__}: {single_line(error, 300)}"
        if not run.all_ranks_sum(np.array([bool(reason)])).any():
            break
        progress = None
        if is_main():
            reason = reason or "an error on another rank"
            warn(f"{checkpoint.name} is not used, because it cannot be loaded: {reason}")
    if found and progress is None:
        names = ", ".join(checkpoint.name for checkpoint in found)
        raise RefusedByRank(
            f"no checkpoint in {folder} can be loaded ({names}; reasons above): restore one, use "
            "the version that wrote it, or start again with on_existing=overwrite"
        )
    if progress is None:
        return TrainProgress()
    if run.sharded_policy is not None:
        fsdp2.scatter_weights(run)
    run.engine.refresh()
    return progress


def load(checkpoint: Path, run: TrainContext) -> TrainProgress:
    """Restore a run's state from a checkpoint in place, and return its progress.

    The weights are read last, so that nothing has changed if another file cannot be read.
    """
    state = json.loads((checkpoint / STATE_FILE).read_text())
    progress = TrainProgress(step=state["step"], **state["progress"])
    with np.load(checkpoint / BASELINE_FILE, allow_pickle=False) as arrays:
        baseline_state = dict(arrays)
    entries = load_file(checkpoint / OPTIMIZER_FILE)
    parameters = {n: p for n, p in run.policy.model.named_parameters() if p.requires_grad}
    # Entries without dimensions are counts of updates.
    moments = {key: value for key, value in entries.items() if value.ndim}
    _check_fit(checkpoint, moments, {k: parameters.get(k.rpartition("/")[0]) for k in moments})
    fields: dict[str, set[str]] = {}
    for name, _, moment in (key.rpartition("/") for key in entries):
        fields.setdefault(name, set()).add(moment)
    if entries and (
        fields.keys() != parameters.keys() or len(set(map(frozenset, fields.values()))) > 1
    ):
        raise ConfigError(
            f"{checkpoint / OPTIMIZER_FILE} lacks state for some of the {len(parameters)} trained "
            "parameters: use the model of the run that wrote it, or on_existing=overwrite"
        )
    _load_weights(checkpoint, run.policy.model)
    load_moments(run.policy, run.optimizer, entries)
    run.baseline_state.load_state_dict(baseline_state)
    run.scheduler.load_state_dict(state["scheduler"])
    for group, rate in zip(run.optimizer.param_groups, run.scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
    return progress


def _load_weights(checkpoint: Path, model: Any) -> None:
    """Check that all stored tensors fit, then restore the model or its adapters in place."""
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        adapters = load_file(checkpoint / ADAPTERS_FILE)
        _check_fit(checkpoint, adapters, get_peft_model_state_dict(model))
        set_peft_model_state_dict(model, adapters)
        return
    # `save_pretrained` renames some weights, and `from_pretrained` of the class reverses this.
    options = dict(dtype="auto", use_safetensors=True, ignore_mismatched_sizes=True)
    loaded, info = type(model).from_pretrained(checkpoint, output_loading_info=True, **options)
    differences = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    if differences:
        raise ConfigError(
            f"{checkpoint}: {differences[0]} is missing, unexpected or of another shape: use the "
            "model of the run that wrote it, or on_existing=overwrite"
        )
    _check_fit(checkpoint, loaded.state_dict(), model.state_dict())
    model.load_state_dict(loaded.state_dict())


def _check_fit(checkpoint: Path, tensors: dict[str, Any], model_tensors: dict[str, Any]) -> None:
    """Raise an error if tensors' names, shapes or types differ from those of the model."""

    def description(tensor: torch.Tensor | None) -> str:
        return "absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"

    for name in dict.fromkeys([*model_tensors, *tensors]):
        in_file = description(tensors.get(name))
        in_model = description(model_tensors.get(name))
        if in_file != in_model:
            raise ConfigError(
                f"{checkpoint}: {name} is {in_file} there, {in_model} in this model: use the model "
                "and model.dtype of the run that wrote it, or on_existing=overwrite"
            )
