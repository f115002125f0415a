"""What the entrypoints share: finding conf/, composing and checking, one-line errors."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_ustat.checks import ConfigError
from grpo_ustat.config import typed
from grpo_ustat.identity import folder_name
from grpo_ustat.ranks import RefusedByRank, barrier, is_main
from grpo_ustat.runs.folder import NotSaved, RunFolder

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


def main(entry: str, schema: type, work: Callable[[Any, RunFolder], float | None]) -> None:
    """Compose `conf/<entry>.yaml`, check it, and hand it to `work` with its run folder.

    Everything that can be refused is refused before the first job starts, in one line and with
    exit code 2; in a sweep, for all of its points.
    """
    _register(entry, schema)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    given = get_args_parser().parse_args(sys.argv[1:]).overrides
    try:
        configs = _check(entry, schema, sys.argv[1:])
        if _shown(entry, configs):
            return
    except ConfigError as error:
        _refuse(error)

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name=entry)
    def job(node: DictConfig) -> float | None:
        """One point's work in its run folder."""
        config = typed(node, schema)
        folder = RunFolder(Path(HydraConfig.get().runtime.output_dir), config)
        try:
            _check_trust(config, given)
            return work(config, folder)
        except ConfigError as error:
            _refuse(error)
        except (FloatingPointError, NotSaved) as error:
            if HydraConfig.get().mode is RunMode.MULTIRUN:
                raise  # a run that diverges or finds no room does not end its sweep
            _refuse(error)

    try:
        job()
    except KeyboardInterrupt:
        if is_main():
            print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


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


def _check(entry: str, schema: type, arguments: list[str]) -> list[Any]:
    """Compose every job the command line asks for and refuse what cannot run."""
    asked = get_args_parser().parse_args(arguments)
    if asked.help or asked.hydra_help or asked.cfg or asked.info or asked.shell_completion:
        return []
    extra, configs = [], []
    if asked.config_dir:
        extra = [f"hydra.searchpath=[file://{Path(asked.config_dir).resolve()}]"]
    with hydra.initialize_config_dir(str(CONF), version_base="1.3", job_name=entry):
        for overrides in _points(asked.overrides, asked.multirun):
            config, hydra_node = _composed(asked.config_name or entry, schema, [*overrides, *extra])
            _check_trust(config, asked.overrides)
            path = _output_folder(hydra_node, asked.multirun)
            if path is not None and not config.show_prompts:
                RunFolder(path, config).check()
            configs.append(config)
    return configs


def _check_trust(config: Any, given: list[str]) -> None:
    """A model's own code runs only where the command line itself says so, no file for it."""
    named = any(re.match(r"\+{0,2}model\.trust_remote_code=", override) for override in given)
    if config.model.trust_remote_code and not named:
        raise ConfigError(
            "model.trust_remote_code=true in a configuration file: it runs code that comes with "
            "the model, so give it on the command line, or set it to false"
        )


def _shown(entry: str, configs: list[Any]) -> bool:
    """Whether prompts were asked for instead of runs; prints them."""
    asked = [config for config in configs if config.show_prompts]
    if asked and is_main():
        from grpo_ustat.runs.prompts import show_prompts

        for config in asked:
            show_prompts(config, {"train": "train", "mse": "study"}[entry])
    return bool(asked)


def _output_folder(hydra_node: DictConfig, multirun: bool) -> Path | None:
    """Where Hydra will put the job; None where it depends on what only a running job knows."""
    try:
        if multirun:
            return Path(hydra_node.sweep.dir) / hydra_node.sweep.subdir
        return Path(hydra_node.run.dir)
    except OmegaConfBaseException:
        return None


def _points(overrides: list[str], multirun: bool) -> Iterator[list[str]]:
    """The override lists of a sweep's jobs; one list without a sweep."""
    if not multirun:
        return iter([overrides])
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(" ".join(str(error).split())) from error
    batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return iter([list(point) for batch in batches for point in batch])


def _one_line(error: Exception, schema: type) -> str:
    """Hydra's message in one line, with what is known where something is unknown."""
    text = " ".join(f"{error} {error.__cause__ or ''}".split())
    choice = re.search(
        r"Could not find '([^/']+)/([^']+)' Available options in '[^']+': (.*?) Conf", text
    )
    if choice:
        group, asked, known = choice.groups()
        return f"unknown {group} {asked!r}: choose from {', '.join(known.split())}"
    missing = re.search(r"Missing mandatory value: (\S+)", text)
    if missing:
        return f"{missing.group(1)} has no value: set {missing.group(1)}=..."
    unknown = re.match(r"Could not override '([^']+)'", text)
    if not unknown:
        return text.removesuffix(" None")
    key = unknown.group(1)
    if key in ELSEWHERE:
        return f"unknown key {key}: here it is {ELSEWHERE[key]}"
    if key.startswith("dataset.options"):
        return f"unknown key {key}: options of a task of your own are added, +{key}=..."
    near = difflib.get_close_matches(
        key, list(_keys(OmegaConf.structured(schema))), n=1, cutoff=0.5
    )
    hint = f"did you mean {near[0]}?" if near else "see --help for the known keys"
    return f"unknown key {key}: {hint}"


def _keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in node:
        yield prefix + key
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            yield from _keys(child, f"{prefix}{key}.")
