"""Runs of a command line: composed, checked, each with its folder."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_ustat.cli.errors import check_words, in_one_line
from grpo_ustat.cli.hydra_api import (
    MULTIRUN,
    hydra_overrides,
    hydra_session,
    model_place,
    parse_arguments,
    quote_plain,
    split_sweep,
    sweep_node,
)
from grpo_ustat.config.baseline import baseline_choice
from grpo_ustat.config.command_line import command_line, install_line
from grpo_ustat.config.identity import folder_name
from grpo_ustat.config.load import SCHEMAS, build_config
from grpo_ustat.config.model import EMBEDDED
from grpo_ustat.config.presets import PRESETS, Preset
from grpo_ustat.config.run import Shared
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed.ranks import RefusedByRank, world
from grpo_ustat.estimators.baselines import BASELINES, own_rules
from grpo_ustat.launch.run import check_ranks
from grpo_ustat.logs.pairing import model_to_name
from grpo_ustat.logs.rows import check_columns
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.status import PlannedRun

# Messages that are shown of a sweep whose runs are refused.
MOST_MESSAGES = 5


@dataclass(frozen=True)
class Invocation:
    """The content of a command line."""

    # Name of the main configuration file, the command's unless `--config-name` gives another.
    name: str
    # Overrides of the command line, with the search path of `--config-dir`.
    overrides: list[str]
    # True for a sweep, whose runs Hydra's launcher starts.
    sweep: bool
    # Empty for a command that makes no runs.
    planned_runs: list[PlannedRun]
    # The folder of `--config-dir`.
    config_dir: str | None
    # The composed configuration with Hydra's own node, of a sweep before any run is chosen.
    node: DictConfig


def parse(entry: str, arguments: list[str]) -> Invocation:
    """Compose every run that a command line asks for and refuse what cannot run.

    Args:
        entry: the command, a key of `SCHEMAS`.
        arguments: the command line after the command.
    """
    schema, words = SCHEMAS[entry], parse_arguments(arguments)
    name, overrides = words.config_name or entry, words.overrides
    if name in SCHEMAS and name != entry:
        raise ConfigError(f"--config-name={name} is a command of its own: {command_line(name)}")
    check_words(words.typed, schema)

    with composing(entry, words.config_dir):
        node = _one_or_several(name, overrides, words.multirun)
        sweep = words.multirun or node.hydra.mode is MULTIRUN
        if not issubclass(schema, Shared):
            if sweep:
                raise ConfigError(f"-m: {entry} is no sweep, leave it out")
            build_config(_job_part(node), schema)
            return Invocation(name, overrides, False, [], words.config_dir, node)
        _check_launcher(node.hydra, sweep)
        runs = [overrides]
        if sweep:  # values of an overlay come first, so that the command line's replace them
            params = node.hydra.sweeper.get("params") or {}
            runs = split_sweep(
                [*(quote_plain(f"{key}={x}") for key, x in params.items()), *overrides]
            )
        if not runs:
            swept = " ".join(word for word in overrides if re.search(r"=\w+\(", word))
            raise ConfigError(f"{swept}: this sweep has no run, give it a value")
        shared = set(runs[0]).intersection(*runs)
        launcher = node.hydra.launcher
        tasks = (launcher.get("nodes") or 1) * (launcher.get("tasks_per_node") or 1)
        planned_runs, errors = [], []
        for run in runs:
            label = " ".join(override for override in run if override not in shared)
            try:
                places = [word for x in run for word in model_place(x, words.config_dir)]
                with in_one_line(schema):
                    composed = _compose(name, places) if sweep else node
                    planned = _plan_run(_checked(composed, schema), composed, label, places, sweep)
                check_trust(planned.config, overrides)
                _check_log(planned.config, run)
                _check_packages(planned.config)
                check_ranks(planned.config, tasks)
                if "SlurmLauncher" in launcher["_target_"] and not planned.config.only_shows:
                    _check_slurm(launcher.signal_delay_s, planned.config.launch.grace_seconds)
                planned_runs.append(planned)
            except ConfigError as error:
                errors.append(error)

    messages = list(dict.fromkeys(map(str, errors)))
    if len(messages) == 1:
        raise errors[0]
    if messages:
        more = len(messages) - MOST_MESSAGES
        lines = messages[:MOST_MESSAGES] + ([f"and {more} more"] if more > 0 else [])
        refused = f"{len(errors)} of the sweep's {len(runs)} runs cannot start:"
        raise ConfigError("\n  ".join([refused, *lines]))
    if sweep:
        _check_folders(planned_runs)
    return Invocation(name, overrides, sweep, planned_runs, words.config_dir, node)


def compose_config(entry: str, overrides: list[str]) -> Any:
    """Return the checked configuration that a command line would run with.

    Args:
        entry: `train`, `mse` or `gap`.
        overrides: as on the command line.
    """
    check_words(overrides, SCHEMAS[entry])
    with composing(entry):
        config = _checked(_compose(entry, hydra_overrides(overrides)), SCHEMAS[entry])
    check_trust(config, overrides)
    return config


def whole_node(entry: str, words: Namespace, *, sweep: bool = True) -> DictConfig:
    """Return a command line's unchecked configuration with Hydra's own node, to show, not to run.

    Args:
        words: its command line.
        sweep: True if keys may have several values, as before the runs of a sweep are chosen.
    """
    name = words.config_name or entry
    with composing(entry, words.config_dir):
        return (sweep_node if sweep else _compose)(name, words.overrides)


@contextmanager
def composing(entry: str, config_dir: str | None = None) -> Iterator[None]:
    """Let Hydra read all that `conf/` refers to; a refusal is a ConfigError in one line."""
    register(entry)
    with hydra_session(entry, config_dir), in_one_line(SCHEMAS[entry]):
        yield


def register(entry: str) -> None:
    """Give Hydra what `conf/` refers to: the schema, our rules and objectives, and two resolvers.

    `${folder_name:}` is the run folder's name, which is a function of the whole configuration;
    `${learning_rate:}` is the model's.
    """
    schema = SCHEMAS[entry]

    def resolve(*, _root_: DictConfig) -> str:
        known = OmegaConf.get_cache(_root_)["folder_name"].get("checked")
        return known or folder_name(build_config(_job_part(_root_), schema))

    def learning_rate(*, _root_: DictConfig) -> float | None:
        return _root_.model.get("lora_learning_rate" if _root_.lora.r else "learning_rate")

    ConfigStore.instance().store(name=f"{entry}_schema", node=schema)
    if entry in ("mse", "train"):
        _store_choices()
    if entry == "mse":  # one node: as many files in a list take 0.2 s
        rules = {name: asdict(baseline_choice(name)) for name in BASELINES}
        rules |= {name: {"name": name, "options": {}} for name in own_rules()}  # not loaded yet
        ConfigStore.instance().store("mse_rules", {"rules": rules})
    OmegaConf.register_new_resolver("learning_rate", learning_rate, replace=True)
    OmegaConf.register_new_resolver("folder_name", resolve, replace=True)


@cache
def _store_choices() -> None:
    """Give Hydra the choices of `baseline=` and `objective=`, once in a process."""
    for name in BASELINES:
        ConfigStore.instance().store(name, asdict(baseline_choice(name)), group="baseline")
    for name, preset in PRESETS.items():
        _store_objective(name, preset)


def _store_objective(name: str, preset: Preset) -> None:
    """Give Hydra a choice of `objective=`, which also chooses its rule where no other is typed."""
    store, rule, defaults = ConfigStore.instance(), preset.baseline, list[dict[str, str]]()
    if rule is not None:
        choice = rule.name
        if rule != baseline_choice(rule.name):  # with options of its own
            choice = f"objective/{name}"
            store.store(name, asdict(rule), group="baseline/objective")
        defaults.append({"override /baseline@_global_.baseline": choice})
    store.store(name, {"defaults": [*defaults, "_self_"], **asdict(preset.objective)}, "objective")


def check_trust(config: Any, overrides: list[str]) -> None:
    """Refuse a model's own code unless the command line itself allows it; no file can."""
    named = any(re.match(r"\+{0,2}model\.trust_remote_code=", override) for override in overrides)
    if config.model is not None and config.model.trust_remote_code and not named:
        raise ConfigError(
            "model.trust_remote_code=true in a configuration file: it runs code that comes with "
            "the model, so give it on the command line, or set it to false"
        )


def _check_log(config: Any, overrides: list[str]) -> None:
    """Refuse a file of rollouts that cannot be studied.

    It has no columns of a study, or an embedded model would score it that the command line does not
    name: the file is another model's.
    """
    if not getattr(config, "imports_pool", False):
        return
    path = Path(config.pool)
    check_columns(path)
    names = r"\+{0,2}(model|model\.model_name_or_path)="
    is_named = any(re.match(names, override) for override in overrides)
    if not is_named and config.model.model_name_or_path.startswith(EMBEDDED):
        raise ConfigError(
            f"pool={config.pool}: rollouts are scored by the model that wrote them, and none is "
            f"named (the default is {config.model.name}): write {model_to_name(path)}"
        )


def _one_or_several(name: str, overrides: list[str], multirun: bool) -> DictConfig:
    """Return the configuration of a single run; for a sweep the one without the swept values.

    A line is a sweep if `-m` is typed or if a file that it names sets `hydra.mode=MULTIRUN`.
    """
    if multirun:
        return sweep_node(name, overrides)
    try:
        return _compose(name, overrides)
    except HydraException as error:
        if not re.match("Ambiguous value|Sweep parameters", str(error)):
            raise
        node = sweep_node(name, overrides)
        if node.hydra.mode is not MULTIRUN:
            raise
        return node


def _compose(name: str, overrides: list[str]) -> DictConfig:
    """Return the unchecked configuration with Hydra's own node."""
    return hydra.compose(name, overrides, return_hydra_config=True)


def _checked(node: DictConfig, schema: type) -> Any:
    """Return the checked configuration of a composed one, with the name that follows from it."""
    config = build_config(_job_part(node), schema)
    OmegaConf.get_cache(node)["folder_name"]["checked"] = folder_name(config)
    return config


def _job_part(node: DictConfig) -> dict[str, Any]:
    """Return the configuration without Hydra's own node."""
    return {
        str(key): OmegaConf.to_container(part, resolve=True) if OmegaConf.is_config(part) else part
        for key, part in node.items()
        if key != "hydra"
    }


def _check_launcher(node: DictConfig, sweep: bool) -> None:
    launcher = node.runtime.choices["hydra/launcher"]
    if not sweep and launcher != "basic":
        raise ConfigError(f"hydra/launcher={launcher} starts the runs of sweeps: add -m")
    sweeper, batch = node.runtime.choices["hydra/sweeper"], node.sweeper.get("max_batch_size")
    if sweep and (sweeper != "basic" or batch is not None):
        raise ConfigError(
            f"hydra/sweeper={sweeper} hydra.sweeper.max_batch_size={batch}: a sweep here is the "
            "product of its values, all submitted at once; leave both out"
        )
    if sweep and world() > 1:
        raise RefusedByRank(
            f"a sweep on {world()} processes: run one point at a time with hydra.mode=RUN and its "
            "values, such as group_size=8 seed=0; or let the sweep start the processes of each run "
            "with launch.num_processes"
        )


def _plan_run(
    config: Any, composed: DictConfig, label: str, overrides: list[str], sweep: bool
) -> PlannedRun:
    node = composed.hydra
    try:
        path = Path(node.sweep.dir) / node.sweep.subdir if sweep else Path(node.run.dir)
    except OmegaConfBaseException:  # it depends on what only a running job knows
        path = None
    folder = RunFolder(path, config) if path else None
    if folder and not config.show_prompts:
        folder.check()
    writes = not (config.only_shows or getattr(config, "fills_part", False))
    if folder and world() == 1 and writes and not sweep:
        folder.check_free()
    return PlannedRun(
        label, config, folder, Path(node.sweep.dir) if sweep else None, tuple(overrides)
    )


def _check_packages(config: Any) -> None:
    """Refuse a run whose configuration needs a package that is not installed.

    A run that only shows prompts or costs needs none.
    """
    lora, rollout = getattr(config, "lora", None), getattr(config, "rollout", None)
    if config.only_shows:
        return
    if lora and lora.r and not _is_installed("peft"):
        raise ConfigError(f"lora.r={lora.r} needs the package peft: {install_line('lora')}")
    if rollout and rollout.name != "local" and not _is_installed("vllm"):
        raise ConfigError(
            f"rollout={rollout.name} needs the package vllm: {install_line('vllm')}, or use "
            "rollout=local"
        )


def check_cuda(config: Any, is_submitted: bool) -> None:
    """Refuse `cuda` if this PyTorch is built without it, or this machine has no driver.

    PyTorch is not imported. If jobs are submitted, another machine may have a driver.
    """
    device, spec = getattr(config.launch, "device", "cpu"), importlib.util.find_spec("torch")
    if not device.startswith("cuda") or spec is None or spec.origin is None:
        return
    version = Path(spec.origin).with_name("version.py")
    text = version.read_text() if version.is_file() else "hip = '?'"
    reason = None
    if not re.search(r"(?m)^(cuda|hip)\b.*= *['\"]", text):
        reason = "this PyTorch is built without CUDA"
    elif re.search(r"(?m)^cuda\b.*= *['\"]", text) and sys.platform == "linux" and not is_submitted:
        try:
            ctypes.CDLL("libcuda.so.1")  # which PyTorch loads too
        except OSError:
            reason = "this machine has no NVIDIA driver"
    if reason is not None:
        raise ConfigError(
            f"launch.device={device} cannot be used ({reason}): use launch.device=cpu"
        )


def _is_installed(name: str) -> bool:
    """Return True if a package can be imported, without importing it."""
    return name in sys.modules or importlib.util.find_spec(name) is not None


def _check_slurm(warning: int, grace: int) -> None:
    """Refuse a job that has no time to save, and a machine without SLURM.

    Args:
        warning: seconds between SLURM's signal and the time limit.
        grace: seconds that a run may need to save.
    """
    if warning < grace:
        raise ConfigError(
            f"a job warned {warning} s before its time limit (hydra.launcher.signal_delay_s) has "
            f"less than launch.grace_seconds={grace} to save: use "
            f"hydra.launcher.signal_delay_s={grace + 60}, or a shorter grace"
        )
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "this machine has no sbatch: submit where SLURM is, or leave out hydra/launcher"
        )


def _check_folders(planned_runs: list[PlannedRun]) -> None:
    """Refuse a sweep unless every run has a folder of its own: it tells whether its run is done."""
    first_of: dict[Path, PlannedRun] = {}
    for planned in planned_runs:
        if planned.folder is None or planned.sweep is None:
            raise ConfigError(
                "hydra.sweep.subdir depends on what only a running job knows, so the same sweep "
                "could not go on: leave hydra.sweep.subdir out"
            )
        path = planned.folder.path
        if not Path(os.path.normpath(path)).is_relative_to(os.path.normpath(planned.sweep)):
            raise ConfigError(
                f"hydra.sweep.subdir leads to {path}, out of hydra.sweep.dir={planned.sweep}: "
                "choose another hydra.sweep.dir"
            )
        other = first_of.setdefault(path, planned)
        if other is not planned:
            pair = f"{other.name} and {planned.name} differ" if planned.name else "they differ"
            raise ConfigError(
                f"two runs of the sweep share the folder {path}: {pair} in nothing that makes a "
                "run another run; sweep over other keys or values"
            )
