"""From a command line to the runs that it asks for: composed, checked, each with its folder."""

from __future__ import annotations

import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_ustat.checks import ConfigError
from grpo_ustat.config import SCHEMAS, typed
from grpo_ustat.identity import folder_name
from grpo_ustat.launch.job import check_ranks
from grpo_ustat.messages import one_line
from grpo_ustat.ranks import RefusedByRank, world
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.points import Point

PACKAGE = Path(__file__).resolve().parent
CONF = next(c for c in (PACKAGE / "conf", PACKAGE.parent / "conf") if (c / "mse.yaml").is_file())


def composed(entry: str, overrides: list[str]) -> Any:
    """The checked configuration that a command line would run with.

    Args:
        entry: `train`, `mse` or `gap`.
        overrides: as on the command line.

    Raises:
        ConfigError: it cannot be run.
    """
    register(entry)
    with initialized(entry):
        config, _ = _composed(entry, SCHEMAS[entry], overrides)
    check_trust(config, overrides)
    return config


def composed_alone(entry: str, arguments: list[str]) -> Any | None:
    """The checked configuration of an entry that has no sweeps; None where it is to be shown.

    Raises:
        ConfigError: in one line.
    """
    register(entry)
    words = get_args_parser().parse_args(arguments)
    if words.hydra_help or words.cfg or words.info:
        return None
    if words.multirun:
        raise ConfigError(f"-m: {entry} is no sweep, leave it out")
    with initialized(entry):
        return _composed(words.config_name or entry, SCHEMAS[entry], list(words.overrides))[0]


def register(entry: str) -> None:
    """What `conf/` refers to: the schema and the run folder's name."""
    schema = SCHEMAS[entry]
    ConfigStore.instance().store(name=f"{entry}_schema", node=schema)
    OmegaConf.register_new_resolver("folder_name", _resolver(schema), replace=True)


@contextmanager
def initialized(entry: str, config_dir: str | None = None) -> Iterator[None]:
    """Hydra at work on `conf/`, and on `--config-dir`, which may hold the main file too."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3", job_name=entry):
        if config_dir:
            path = create_config_search_path(str(CONF))
            place = f"file://{Path(config_dir).resolve()}"
            path.prepend("command-line", place, anchor="schema")
            GlobalHydra.instance().clear()
            Hydra.create_main_hydra2(task_name=entry, config_search_path=path)
        yield


def _composed(name: str, schema: type, overrides: list[str]) -> tuple[Any, DictConfig]:
    """The checked configuration, and Hydra's own node."""
    try:
        node = hydra.compose(name, overrides, return_hydra_config=True)
        return typed(_job_part(node), schema), node.hydra
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_line(error, schema, CONF)) from error


def _resolver(schema: type) -> Callable[..., str]:
    """`${folder_name:}`: the run folder's name, a function of the whole configuration."""

    def resolve(*, _root_: DictConfig) -> str:
        return folder_name(typed(_job_part(_root_), schema))

    return resolve


def _job_part(node: DictConfig) -> dict[str, Any]:
    """The configuration without Hydra's own node."""
    return {
        key: OmegaConf.to_container(part, resolve=True) if OmegaConf.is_config(part) else part
        for key, part in node.items()
        if key != "hydra"
    }


@dataclass(frozen=True)
class Asked:
    """What a command line asks for.

    Attributes:
        name: of the configuration, the entry's unless `--config-name` was given.
        overrides: with the search path of `--config-dir`.
        sweep: whether it is a sweep, whose runs Hydra's launcher starts.
        points: its runs; none where only help or a configuration is to be shown.
        config_dir: as given.
    """

    name: str
    overrides: list[str]
    sweep: bool
    points: list[Point]
    config_dir: str | None = None


def asked_for(entry: str, arguments: list[str]) -> Asked:
    """Compose every run the command line asks for and refuse what cannot run.

    Raises:
        ConfigError: in one line.
    """
    register(entry)
    words = get_args_parser().parse_args(arguments)
    name, overrides, schema = words.config_name or entry, _overrides(words), SCHEMAS[entry]
    if words.hydra_help or words.cfg or words.info:
        return Asked(name, overrides, False, [])
    with initialized(entry, words.config_dir):
        try:
            node = hydra_node(name, overrides).hydra
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(one_line(error, schema, CONF)) from error
        sweep = words.multirun or node.mode is RunMode.MULTIRUN
        _check_way(node, sweep)
        lists = _swept(node.sweeper.get("params") or {}, overrides) if sweep else [overrides]
        points = [_point(name, schema, label, one, sweep) for label, one in _named(lists)]
    for point in points:
        check_trust(point.config, words.overrides)
        _check_tasks(node, point.config)
    if sweep:
        _check_folders(points)
    return Asked(name, overrides, sweep, points, words.config_dir)


def whole_node(entry: str, words: Namespace) -> DictConfig:
    """What a command line stands for, unchecked and with Hydra's own node, where nothing is run.

    Raises:
        ConfigError: it names what is not there.
    """
    register(entry)
    name, overrides = words.config_name or entry, _overrides(words)
    with initialized(entry, words.config_dir):
        try:
            return hydra_node(name, overrides)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(one_line(error, SCHEMAS[entry], CONF)) from error


def _overrides(words: Namespace) -> list[str]:
    """With the search path of `--config-dir`."""
    place = words.config_dir and f"hydra.searchpath=[file://{Path(words.config_dir).resolve()}]"
    return [*words.overrides, *([place] if place else [])]


def _check_way(node: DictConfig, sweep: bool) -> None:
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


def _check_tasks(node: DictConfig, config: Any) -> None:
    """As many ranks as there can be, as tasks of a scheduler or processes of our own."""
    asked = node.launcher
    check_ranks(config, (asked.get("nodes") or 1) * (asked.get("tasks_per_node") or 1))
    if "SlurmLauncher" in asked["_target_"] and not config.only_shows:
        _check_slurm(asked.signal_delay_s, config.launch.grace_seconds)


def _check_slurm(warned: int, grace: int) -> None:
    if warned < grace:
        raise ConfigError(
            f"a job warned {warned} s before its time limit (hydra.launcher.signal_delay_s) has "
            f"less than launch.grace_seconds={grace} to save: use "
            f"hydra.launcher.signal_delay_s={grace + 60}, or a shorter grace"
        )
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "this machine has no sbatch: submit where SLURM is, or leave out hydra/launcher"
        )


def _check_folders(points: list[Point]) -> None:
    """Every run has a folder, and a folder of its own: by it a sweep knows what is done."""
    known: dict[Path, Point] = {}
    for point in points:
        _check_place(point)
        other = known.setdefault(point.folder.path, point)
        if other is not point:
            named = f"{other.name} and {point.name} differ" if point.name else "they differ"
            raise ConfigError(
                f"two runs of the sweep share the folder {point.folder.path}: {named} in nothing "
                "that makes a run another run; sweep over other keys or values"
            )


def _check_place(point: Point) -> None:
    if point.folder is None:
        raise ConfigError(
            "hydra.sweep.subdir depends on what only a running job knows, so the same sweep could "
            "not go on: leave hydra.sweep.subdir out"
        )
    path = Path(os.path.normpath(point.folder.path))
    if not path.is_relative_to(os.path.normpath(point.sweep)):
        raise ConfigError(
            f"hydra.sweep.subdir leads to {point.folder.path}, out of hydra.sweep.dir="
            f"{point.sweep}: choose another hydra.sweep.dir"
        )


def check_trust(config: Any, given: list[str]) -> None:
    """A model's own code runs only where the command line itself says so, no file for it."""
    named = any(re.match(r"\+{0,2}model\.trust_remote_code=", override) for override in given)
    if config.model is not None and config.model.trust_remote_code and not named:
        raise ConfigError(
            "model.trust_remote_code=true in a configuration file: it runs code that comes with "
            "the model, so give it on the command line, or set it to false"
        )


def hydra_node(name: str, overrides: list[str]) -> DictConfig:
    """The configuration with Hydra's own node as a sweep has it, before any point is chosen."""
    return GlobalHydra.instance().hydra.compose_config(
        name, overrides, RunMode.MULTIRUN, from_shell=False, validate_sweep_overrides=False
    )


def _swept(params: dict[str, str], overrides: list[str]) -> list[list[str]]:
    """The override lists of a sweep's jobs: the overlay's values, unless the command line's."""
    texts = [f"{key}={value}" for key, value in params.items()] + overrides
    try:
        parsed = OverridesParser.create().parse_overrides(texts)
    except HydraException as error:
        raise ConfigError(" ".join(str(error).split())) from error
    batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return [list(point) for batch in batches for point in batch]


def _named(lists: list[list[str]]) -> list[tuple[str, list[str]]]:
    """Each point's overrides with its name: those that not all points share."""
    shared = set(lists[0]).intersection(*lists)
    return [(" ".join(x for x in point if x not in shared), point) for point in lists]


def _point(name: str, schema: type, label: str, overrides: list[str], sweep: bool) -> Point:
    config, node = _composed(name, schema, overrides)
    path = _output_folder(node, sweep)
    folder = RunFolder(path, config) if path else None
    if folder and not config.show_prompts:
        folder.check()
    looks = config.only_shows or getattr(config, "fills_part", False)
    if folder and world() == 1 and not (sweep or looks):
        folder.check_free()
    of_sweep = Path(node.sweep.dir) if sweep else None
    return Point(label, config, folder, of_sweep, tuple(overrides))


def _output_folder(hydra_node: DictConfig, sweep: bool) -> Path | None:
    """Where Hydra will put the job; None where it depends on what only a running job knows."""
    try:
        if sweep:
            return Path(hydra_node.sweep.dir) / hydra_node.sweep.subdir
        return Path(hydra_node.run.dir)
    except OmegaConfBaseException:
        return None
