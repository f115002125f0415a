"""Compose and check the configurations of the runs that a command line requests."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_ustat.cli.errors import check_names, check_overrides, in_one_line, several_values
from grpo_ustat.cli.hydra_api import (
    hydra_overrides,
    hydra_session,
    model_place,
    parse_arguments,
    parse_overrides,
    quote_plain,
    split_sweep,
    store_group,
)
from grpo_ustat.config.baseline import baseline_choice
from grpo_ustat.config.command_line import install_line, is_installed
from grpo_ustat.config.gap import THEOREMS
from grpo_ustat.config.identity import folder_name
from grpo_ustat.config.load import SCHEMAS, build_config
from grpo_ustat.config.model import EMBEDDED
from grpo_ustat.config.presets import PRESETS
from grpo_ustat.config.run import Shared
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed.ranks import RefusedByRank, check_ranks, world
from grpo_ustat.estimators.baselines import BASELINES, plugin_baselines

# Imports that are not needed for the help or for refused command lines are local.
if TYPE_CHECKING:
    from grpo_ustat.runs.status import PlannedRun

# Largest number of messages about refused runs of a sweep.
MAX_MESSAGES = 5


@dataclass(frozen=True)
class Invocation:
    """Runs or configuration that a command line requests."""

    sweep: bool
    # Planned runs; empty for a command without runs.
    planned_runs: list[PlannedRun]
    # Checked configuration of a command without runs.
    config: Any
    # Composed configuration with Hydra's node; for a sweep, that of the first run.
    node: DictConfig


def parse(entry: str, arguments: list[str]) -> Invocation:
    """Compose all runs of a command line; refuse the command line if a run cannot start.

    Args:
        entry: command, a key of `SCHEMAS`.
        arguments: command line after the command.
    """
    schema, words = SCHEMAS[entry], parse_arguments(arguments)
    refuse_early(entry, words)
    with composing(entry, words.config_dir):
        if words.multirun and not issubclass(schema, Shared):
            raise ConfigError(f"-m: {entry} does not support sweeps: remove -m")
        runs, node, sweep = _runs(entry, words)
        if not issubclass(schema, Shared):
            assert node is not None, "only one of several runs can have no node"
            return Invocation(False, [], build_config(_job_part(node), schema), node)
        if node is not None:
            _refuse_unused(node.hydra)
            _check_launcher(node.hydra, sweep)
        shared = set(runs[0]).intersection(*runs)
        planned_runs, errors = [], []
        for run in runs:
            label = " ".join(override for override in run if override not in shared)
            try:
                composed = node if run is runs[0] else None
                if composed is None:
                    composed = compose_node(entry, run, schema, words.config_dir)
                if node is not None:
                    # Resolvers reuse cached values, so that all folder names of a sweep contain
                    # the same time.
                    OmegaConf.copy_cache(node, composed)
                with in_one_line(schema):
                    planned = _plan_run(_checked(composed, schema), composed.hydra, label, sweep)
                check_trust(planned.config, words.overrides)
                _check_log(planned.config, run)
                _check_packages(planned.config)
                launcher = composed.hydra.launcher
                tasks = (launcher.get("nodes") or 1) * (launcher.get("tasks_per_node") or 1)
                check_ranks(planned.config, tasks)
                if "SlurmLauncher" in launcher["_target_"] and not planned.config.only_shows:
                    _check_slurm()
                planned_runs.append(planned)
            except ConfigError as error:
                errors.append(error)

    messages = list(dict.fromkeys(map(str, errors)))
    if len(messages) == 1:
        raise errors[0]
    if messages:
        more = len(messages) - MAX_MESSAGES
        lines = messages[:MAX_MESSAGES] + ([f"and {more} more"] if more > 0 else [])
        refused = f"{len(errors)} of the sweep's {len(runs)} runs cannot start:"
        raise ConfigError("\n  ".join([refused, *lines]))
    if sweep:
        _check_folders(planned_runs)
    assert node is not None, "a run that cannot be composed is refused"
    return Invocation(sweep, planned_runs, None, node)


def _runs(entry: str, words: Namespace) -> tuple[list[list[str]], DictConfig | None, bool]:
    """Return the overrides of each run, the node of the first run, and True for a sweep.

    A command line is a sweep if `-m` is typed or if a file that it uses sets `hydra.mode=MULTIRUN`.
    The file can sweep over values, too; a value that is typed replaces the values of the file.

    Returns:
        The node is None if the first of several runs cannot be composed.
    """
    schema, typed = SCHEMAS[entry], words.overrides
    swept = [x for x in parse_overrides(typed) if x.is_sweep_override()]
    if swept and not words.multirun:
        check_overrides(swept, schema)
    runs = split_sweep(typed) if swept else [typed]
    try:
        node = compose_node(entry, runs[0], schema, words.config_dir)
    except ConfigError:
        if len(runs) == 1:
            raise
        node = None
    sweep = words.multirun or (node is not None and node.hydra.mode is RunMode.MULTIRUN)
    if swept and not sweep:
        raise ConfigError(several_values(swept[0], schema))
    params = node.hydra.sweeper.get("params") if sweep and node is not None else None
    if params:
        of_file = [quote_plain(f"{key}={x}") for key, x in params.items()]
        runs = split_sweep([*of_file, *typed])
        node = compose_node(entry, runs[0], schema, words.config_dir)
    return runs, node, sweep


def compose_config(entry: str, overrides: list[str]) -> Any:
    """Return the checked configuration for a command line.

    Args:
        entry: `train`, `mse` or `gap`.
        overrides: overrides as typed on the command line.
    """
    with composing(entry):
        node = compose_node(entry, hydra_overrides(overrides), SCHEMAS[entry])
        config = _checked(node, SCHEMAS[entry])
    check_trust(config, overrides)
    return config


def whole_node(entry: str, words: Namespace) -> DictConfig:
    """Return the unchecked configuration of a command line with Hydra's node, for display.

    Of a sweep, it is the configuration of the first run.
    """
    refuse_early(entry, words)
    with composing(entry, words.config_dir):
        runs, node, _ = _runs(entry, words)
        return compose_node(entry, runs[0], SCHEMAS[entry]) if node is None else node


def refuse_early(entry: str, words: Namespace) -> None:
    """Refuse errors that can be detected before composition, which is slow.

    Args:
        entry: command, a key of `SCHEMAS`.
        words: parsed command line. Names are not checked if it uses the user's own configuration
            files, because these can add config groups.
    """
    own_files = any(word.startswith("hydra.searchpath") for word in words.overrides)
    own_files = own_files or words.config_dir
    with in_one_line(SCHEMAS[entry]):
        parsed = parse_overrides(words.overrides)
    check_overrides(parsed, SCHEMAS[entry])
    if not own_files:
        check_names(parsed, SCHEMAS[entry])


@contextmanager
def composing(entry: str, config_dir: str | None = None) -> Iterator[None]:
    """Open a Hydra session with all objects that `conf/` uses; errors become ConfigErrors."""
    register(entry)
    with hydra_session(entry, config_dir), in_one_line(SCHEMAS[entry]):
        yield


def register(entry: str) -> None:
    """Register the schema, baselines, objectives and resolvers that files in `conf/` use by name.

    `${folder_name:}` is the name of the run folder, which depends on the whole configuration.
    `${learning_rate:}` is the default learning rate of the model or of its adapters.
    """
    schema = SCHEMAS[entry]

    def resolve(*, _root_: DictConfig) -> str:
        checked_name = OmegaConf.get_cache(_root_)["folder_name"].get("checked")
        return checked_name or folder_name(build_config(_job_part(_root_), schema))

    def learning_rate(*, _root_: DictConfig) -> float | None:
        return _root_.model.get("lora_learning_rate" if _root_.lora.r else "learning_rate")

    ConfigStore.instance().store(name=f"{entry}_schema", node=schema)
    if entry in ("mse", "train"):
        _store_choices()
    if entry == "gap":
        store_group("theorem", {name: partial(asdict, x) for name, x in THEOREMS.items()})
    if entry == "mse":
        # The options form a single node, because a defaults list with one file per baseline would
        # take 0.2 s.
        options = {name: dict(baseline.options) for name, baseline in BASELINES.items()}
        # Baselines of installed packages are not loaded at this point.
        options |= {name: {} for name in plugin_baselines()}
        ConfigStore.instance().store("baseline_options", {"baseline_options": options})
    OmegaConf.register_new_resolver("learning_rate", learning_rate, replace=True)
    OmegaConf.register_new_resolver("folder_name", resolve, replace=True)


@cache
def _store_choices() -> None:
    """Register the choices of `baseline=` and `objective=` with Hydra, once per process."""
    with_options = {
        name: preset.baseline
        for name, preset in PRESETS.items()
        if preset.baseline and preset.baseline != baseline_choice(preset.baseline.name)
    }
    store_group("baseline", {name: partial(_baseline_node, name) for name in BASELINES})
    store_group(
        "baseline/objective", {name: partial(asdict, x) for name, x in with_options.items()}
    )
    store_group(
        "objective",
        {name: partial(_objective_node, name, name in with_options) for name in PRESETS},
    )


def _baseline_node(name: str) -> dict[str, Any]:
    return asdict(baseline_choice(name))


def _objective_node(name: str, has_options: bool) -> dict[str, Any]:
    """Return a choice of `objective=`, with the preset's baseline; a typed baseline replaces it.

    Args:
        has_options: True if the preset changes options of its baseline, which is then registered
            in `baseline/objective`.
    """
    preset, defaults = PRESETS[name], list[Any]()
    if preset.baseline is not None:
        choice = f"objective/{name}" if has_options else preset.baseline.name
        defaults.append({"override /baseline@_global_.baseline": choice})
    return {"defaults": [*defaults, "_self_"], **asdict(preset.objective)}


def check_trust(config: Any, overrides: list[str]) -> None:
    """Refuse code that comes with a model unless the command line itself allows it."""
    named = any(re.match(r"\+{0,2}model\.trust_remote_code=", override) for override in overrides)
    if config.model is not None and config.model.trust_remote_code and not named:
        raise ConfigError(
            "model.trust_remote_code=true in a configuration file would run code that comes with "
            "the model: set it on the command line, or set it to false"
        )


def _check_log(config: Any, overrides: list[str]) -> None:
    """Refuse imported rollouts without the required columns or without a typed model.

    Without a typed model, gradients would come from the default embedded model, which did not write
    the rollouts.
    """
    if not getattr(config, "imports_pool", False):
        return
    from grpo_ustat.logs.pairing import model_to_name
    from grpo_ustat.logs.rows import check_columns

    path = Path(config.pool)
    check_columns(path)
    names = r"\+{0,2}(model|model\.model_name_or_path)="
    is_named = any(re.match(names, override) for override in overrides)
    if not is_named and config.model.model_name_or_path.startswith(EMBEDDED):
        raise ConfigError(
            f"pool={config.pool}: gradients need the model that wrote the rollouts, but no model "
            f"is set (the default is {config.model.name}): add {model_to_name(path)}"
        )


def compose_node(
    entry: str, overrides: list[str], schema: type, config_dir: str | None = None
) -> DictConfig:
    """Return the unchecked configuration of a run with Hydra's node.

    Args:
        entry: command, a key of `SCHEMAS`.
        overrides: overrides in Hydra's syntax, with a single value each.
        schema: schema of the command.
        config_dir: folder with the user's own configuration files.
    """
    overrides = [word for x in overrides for word in model_place(x, config_dir)]
    with in_one_line(schema):
        check_overrides(parse_overrides(overrides), schema)
        node = hydra.compose(entry, overrides, return_hydra_config=True)
    # The resolver `${hydra:...}` reads this instance.
    HydraConfig.instance().set_config(node)
    return node


def _checked(node: DictConfig, schema: type) -> Any:
    """Return the checked configuration of a node, and store the folder name in the node's cache."""
    config = build_config(_job_part(node), schema)
    OmegaConf.get_cache(node)["folder_name"]["checked"] = folder_name(config)
    return config


def _job_part(node: DictConfig) -> dict[str, Any]:
    """Return the configuration without Hydra's node."""
    return {
        str(key): OmegaConf.to_container(part, resolve=True) if OmegaConf.is_config(part) else part
        for key, part in node.items()
        if key != "hydra"
    }


def _refuse_unused(node: DictConfig) -> None:
    """Refuse settings of Hydra's job runner, because this program uses Hydra only to compose."""
    unused = {
        "hydra.callbacks": node.callbacks,
        "hydra.job.chdir": node.job.chdir,
        "hydra.job.env_set": node.job.env_set,
    }
    for key, value in unused.items():
        if value:
            raise ConfigError(f"{key} has no effect on runs of this program: remove it")
    if not (isinstance(node.verbose, bool | str) or OmegaConf.is_list(node.verbose)):
        raise ConfigError(f"hydra.verbose={node.verbose}: use true or false")


def _check_launcher(node: DictConfig, sweep: bool) -> None:
    launcher = node.runtime.choices["hydra/launcher"]
    if not sweep and launcher != "basic":
        raise ConfigError(f"hydra/launcher={launcher} is only for sweeps: add -m")
    sweeper, batch = node.runtime.choices["hydra/sweeper"], node.sweeper.get("max_batch_size")
    if sweep and (sweeper != "basic" or batch is not None):
        raise ConfigError(
            f"hydra/sweeper={sweeper} hydra.sweeper.max_batch_size={batch}: a sweep always submits "
            "all combinations of its values at once: remove both settings"
        )
    if sweep and world() > 1:
        raise RefusedByRank(
            f"a sweep cannot run on {world()} processes: start one run at a time with "
            "hydra.mode=RUN and its values, such as group_size=8 seed=0, or set "
            "launch.num_processes so that the sweep starts the processes of each run"
        )


def _plan_run(config: Any, node: DictConfig, label: str, sweep: bool) -> PlannedRun:
    """Return a planned run with its folder; refuse a folder to which the run cannot write.

    Args:
        config: checked configuration.
        node: Hydra's node.
        label: overrides in which the run differs from the other runs of its sweep.
        sweep: True if the run belongs to a sweep.
    """
    from grpo_ustat.runs.folder import RunFolder
    from grpo_ustat.runs.status import PlannedRun

    try:
        path = Path(node.sweep.dir) / node.sweep.subdir if sweep else Path(node.run.dir)
    except OmegaConfBaseException as error:
        key = error.full_key
        raise ConfigError(
            f"{key} has a value only in a running job, so that the same command could not resume "
            f"the run: remove {key}"
        ) from None
    folder = RunFolder(path, config)
    if not config.show_prompts:
        folder.check()
    writes = not (config.only_shows or getattr(config, "fills_part", False))
    if world() == 1 and writes and not sweep:
        folder.check_free()
    return PlannedRun(label, config, folder, Path(node.sweep.dir) if sweep else None)


def _check_packages(config: Any) -> None:
    """Refuse a run that needs a package that is not installed.

    A command that only shows prompts or costs needs no package.
    """
    lora, rollout = getattr(config, "lora", None), getattr(config, "rollout", None)
    if config.only_shows:
        return
    if lora and lora.r and not is_installed("peft"):
        raise ConfigError(f"lora.r={lora.r} needs the package peft: {install_line('lora')}")
    if rollout and rollout.name != "local" and not is_installed("vllm"):
        raise ConfigError(
            f"rollout={rollout.name} needs the package vllm: {install_line('vllm')}, or use "
            "rollout=local"
        )


def check_cuda(config: Any, is_submitted: bool) -> None:
    """Refuse `cuda` if PyTorch is built without CUDA or this machine has no driver.

    PyTorch is not imported. The driver is not checked for submitted jobs, which run on another
    machine.
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
        import ctypes

        try:
            # PyTorch also loads this library.
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            reason = "this machine has no NVIDIA driver"
    if reason is not None:
        raise ConfigError(
            f"launch.device={device} cannot be used ({reason}): use launch.device=cpu"
        )


def _check_slurm() -> None:
    """Refuse a machine without SLURM."""
    import shutil

    if shutil.which("sbatch") is None:
        raise ConfigError(
            "this machine has no sbatch: submit from a SLURM machine or remove hydra/launcher"
        )


def _check_folders(planned_runs: list[PlannedRun]) -> None:
    """Refuse a sweep with two runs in one folder, since a folder records only one run."""
    first_of: dict[Path, PlannedRun] = {}
    for planned in planned_runs:
        assert planned.folder is not None and planned.sweep is not None
        path = planned.folder.path
        if not Path(os.path.normpath(path)).is_relative_to(os.path.normpath(planned.sweep)):
            raise ConfigError(
                f"hydra.sweep.subdir gives {path}, outside hydra.sweep.dir={planned.sweep}: "
                "choose another hydra.sweep.subdir or hydra.sweep.dir"
            )
        other = first_of.setdefault(path, planned)
        if other is not planned:
            pair = f"{other.name} and {planned.name} differ" if planned.name else "they differ"
            raise ConfigError(
                f"two runs of the sweep share the folder {path}: {pair} at most in settings that "
                "do not change results; sweep over other keys or values"
            )
