"""What the entrypoints share: finding conf/, composing and checking, one-line errors."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_ustat.checks import ConfigError
from grpo_ustat.config import TrainConfig, typed
from grpo_ustat.data_config import DATASETS
from grpo_ustat.identity import folder_name
from grpo_ustat.ranks import RefusedByRank, barrier, is_main, world
from grpo_ustat.runs.folder import NotSaved, RunFolder
from grpo_ustat.runs.points import Point

PACKAGE = Path(__file__).resolve().parent
CONF = next(c for c in (PACKAGE / "conf", PACKAGE.parent / "conf") if (c / "mse.yaml").is_file())

ELSEWHERE = {  # what other trainers call it
    "num_generations": "group_size",
    "lr": "learning_rate",
    "gradient_accumulation_steps": "micro_batch_tokens, the padded tokens of a backward pass",
    "per_device_train_batch_size": "budget.rollouts, completions a step on all devices",
    "num_train_epochs": "max_steps",
    "loss_type": "objective=dapo and the like, or objective.loss_type",
    "beta": "objective.beta",
    "use_vllm": "rollout=vllm",
}


OF_ENTRY = {  # what only one entry knows and is easily asked of the other
    "mse": ("study", "policy", "baselines", "group_sizes", "rules", "pool", "target_halfwidth"),
    "train": ("baseline", "group_size", "objective", "learning_rate", "max_steps", "lora"),
}


def main(entry: str, schema: type, work: Callable[[Any, RunFolder], float | None]) -> None:
    """Compose `conf/<entry>.yaml`, check it, and hand it to `work` with its run folder.

    Everything that can be refused is refused before the first job starts, in one line and with
    exit code 2; in a sweep, for all of its points. A point that fails later does not end its sweep.
    """
    _register(entry, schema)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))
    try:
        points = _points(entry, schema, sys.argv[1:])
        if _shown(entry, points):
            return
    except ConfigError as error:
        _refuse(error)
    sweep = bool(points and points[0].sweep)
    failures = _run(entry, schema, work, sweep)
    if sweep:
        _end_sweep(entry, points, failures)


def _run(entry: str, schema: type, work: Callable, sweep: bool) -> list[str]:
    """Let Hydra run the job or the sweep's jobs; what failed of a sweep."""
    failures: list[str] = []

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name=entry)
    def job(node: DictConfig) -> float | None:
        """One point."""
        return _job(typed(node, schema), work, failures)

    try:
        job()
    except KeyboardInterrupt:
        if is_main():
            print("interrupted; the same command goes on from there", file=sys.stderr)
        raise SystemExit(130) from None
    except SystemExit as end:
        if end.code != 1 or not sweep:
            raise  # a refusal or a signal; Hydra ends with 1 after a sweep with a failed point
        failures.append("see above")
    return failures


def _job(config: Any, work: Callable, failures: list[str]) -> float | None:
    """One point's work in its run folder; in a sweep a failure is told and noted."""
    folder = RunFolder(Path(HydraConfig.get().runtime.output_dir), config)
    try:
        _check_trust(config, get_args_parser().parse_args(sys.argv[1:]).overrides)
        return work(config, folder)
    except (ConfigError, FloatingPointError, NotSaved) as error:
        folder.leave()
        if HydraConfig.get().mode is not RunMode.MULTIRUN:
            _refuse(error)
        failures.append(f"{folder.path}: {error}")
        print(f"error: {failures[-1]}", file=sys.stderr)
    return None


def _end_sweep(entry: str, points: list[Point], failures: list[str]) -> None:
    """Draw what the sweep found together, name the points that did not finish."""
    if points[0].config.report.name:
        from grpo_ustat.runs.joint import report

        report(entry, points)
    unfinished = [point for point in points if point.folder and point.result() is None]
    for point in unfinished:
        print(f"error: did not finish: {point.name} ({point.folder.path})", file=sys.stderr)
    if unfinished or failures:
        raise SystemExit(1)


def composed(entry: str, schema: type, overrides: list[str]) -> Any:
    """The checked configuration that a command line would run with.

    Args:
        entry: `train` or `mse`.
        schema: its schema, see `grpo_ustat.config`.
        overrides: as on the command line.

    Raises:
        ConfigError: it cannot be run.
    """
    _register(entry, schema)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3", job_name=entry):
        config, _ = _composed(entry, schema, overrides)
    _check_trust(config, overrides)
    return config


def _register(entry: str, schema: type) -> None:
    """What `conf/` refers to: the schema and the run folder's name."""
    ConfigStore.instance().store(name=f"{entry}_schema", node=schema)
    OmegaConf.register_new_resolver("folder_name", _resolver(schema), replace=True)


def _composed(name: str, schema: type, overrides: list[str]) -> tuple[Any, DictConfig]:
    """The checked configuration, and Hydra's own node."""
    try:
        node = hydra.compose(name, overrides, return_hydra_config=True)
        return typed(_job_part(node), schema), node.hydra
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error, schema)) from error


def _refuse(error: Exception) -> None:
    everywhere = isinstance(error, RefusedByRank)
    if is_main() or not everywhere:
        print(f"error: {error}", file=sys.stderr)
    if everywhere:
        barrier()  # a rank that ends earlier makes the launcher end rank 0 before it has printed
    raise SystemExit(2)


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


def _points(entry: str, schema: type, arguments: list[str]) -> list[Point]:
    """Compose every run the command line asks for and refuse what cannot run."""
    asked = get_args_parser().parse_args(arguments)
    if asked.help or asked.hydra_help or asked.cfg or asked.info or asked.shell_completion:
        return []
    name, overrides = asked.config_name or entry, list(asked.overrides)
    if asked.config_dir:
        overrides.append(f"hydra.searchpath=[file://{Path(asked.config_dir).resolve()}]")
    with hydra.initialize_config_dir(str(CONF), version_base="1.3", job_name=entry):
        try:
            node = _hydra_node(name, overrides)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_one_line(error, schema)) from error
        sweep = asked.multirun or node.mode is RunMode.MULTIRUN
        _refuse_ranks(sweep)
        lists = _swept(node.sweeper.get("params") or {}, overrides) if sweep else [overrides]
        points = [_point(name, schema, words, point, sweep) for words, point in _named(lists)]
    for point in points:
        _check_trust(point.config, asked.overrides)
    return points


def _check_trust(config: Any, given: list[str]) -> None:
    """A model's own code runs only where the command line itself says so, no file for it."""
    named = any(re.match(r"\+{0,2}model\.trust_remote_code=", override) for override in given)
    if config.model.trust_remote_code and not named:
        raise ConfigError(
            "model.trust_remote_code=true in a configuration file: it runs code that comes with "
            "the model, so give it on the command line, or set it to false"
        )


def _shown(entry: str, points: list[Point]) -> bool:
    """Whether prompts or costs were asked for instead of runs; prints them."""
    asked = [point.config for point in points if point.config.show_prompts]
    costs = any(point.config.dry_run for point in points)
    if asked and is_main():
        from grpo_ustat.runs.prompts import show_prompts

        for config in asked:
            show_prompts(config, {"train": "train", "mse": "study"}[entry])
    elif costs and is_main():
        from grpo_ustat.runs.cost_table import show_costs

        show_costs(points)
    return bool(asked) or costs


def _hydra_node(name: str, overrides: list[str]) -> DictConfig:
    """Hydra's own node as a sweep has it, before any point is chosen."""
    return (
        GlobalHydra.instance()
        .hydra.compose_config(
            name, overrides, RunMode.MULTIRUN, from_shell=False, validate_sweep_overrides=False
        )
        .hydra
    )


def _refuse_ranks(sweep: bool) -> None:
    if sweep and world() > 1:
        raise RefusedByRank(
            f"a sweep on {world()} processes: run one point at a time with hydra.mode=RUN and its "
            "values, such as group_size=8 seed=0"
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


def _point(name: str, schema: type, words: str, overrides: list[str], sweep: bool) -> Point:
    config, node = _composed(name, schema, overrides)
    path = _output_folder(node, sweep)
    folder = RunFolder(path, config) if path else None
    if folder and not config.show_prompts:
        folder.check()
    return Point(words, config, folder, Path(node.sweep.dir) if sweep else None)


def _output_folder(hydra_node: DictConfig, sweep: bool) -> Path | None:
    """Where Hydra will put the job; None where it depends on what only a running job knows."""
    try:
        if sweep:
            return Path(hydra_node.sweep.dir) / hydra_node.sweep.subdir
        return Path(hydra_node.run.dir)
    except OmegaConfBaseException:
        return None


def _one_line(error: Exception, schema: type) -> str:
    """Hydra's message in one line, with what is known where something is unknown."""
    text = " ".join(f"{error} {error.__cause__ or ''}".split())
    choice = re.search(
        r"Could not find '([^/']+)/([^']+)' Available options in '[^']+': (.*?) Conf", text
    )
    if choice:
        group, asked, known = choice.groups()
        return f"unknown {group} {asked!r}: choose from {', '.join(known.split())}"
    if re.search("ConfigKeyError raised while composing config: Key .* not in", text):
        other = "mse" if schema is TrainConfig else "train"
        return f"an overlay of the other entry? Try python -m grpo_ustat.{other} ({text})"
    missing = re.search(r"Missing mandatory value: (\S+)", text)
    if missing:
        return f"{missing.group(1)} has no value: set {missing.group(1)}=..."
    unknown = re.match(r"Could not override '([^']+)'", text)
    if not unknown:
        return text.removesuffix(" None")
    key = unknown.group(1)
    if key in ELSEWHERE:
        return f"unknown key {key}: here it is {ELSEWHERE[key]}"
    other = "mse" if schema is TrainConfig else "train"
    if key.split(".")[0] in OF_ENTRY[other]:
        return f"unknown key {key}: it is one of {other}'s, python -m grpo_ustat.{other}"
    if key.startswith("dataset.options"):
        return f"unknown key {key}: options of a task of your own are added, +{key}=..."
    known = [*_keys(OmegaConf.structured(schema)), *_dataset_keys()]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "see --help for the known keys"
    return f"unknown key {key}: {hint}"


def _dataset_keys() -> list[str]:
    """Of all kinds of data sets."""
    return [f"dataset.{field.name}" for kind in DATASETS.values() for field in fields(kind)]


def _keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in node:
        yield prefix + key
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            yield from _keys(child, f"{prefix}{key}.")
