"""What makes a run this run: identity keys, fingerprints and the folder's name."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_ustat.checks import adapter_base, model_folder
from grpo_ustat.data_config import FILES, REWARDS, TASKS, module_file
from grpo_ustat.estimators.baselines import OWN, own_rules
from grpo_ustat.train_checks import ENDING

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py")
OPERATIONAL = (
    "on_existing",
    "dry_run",
    "show_prompts",
    "report",
    "logger",
    "launch",
    "pool",
    "max_steps",
    "save_steps",
    "save_total_limit",
    "gradient_checkpointing",
    "share_prompts",
    "micro_batch_tokens",
    "rollout_batch_size",
)


def operational(keys: dict[str, Any]) -> set[str]:
    """Keys that may differ between two parts of one run.

    A learning rate that falls towards max_steps makes the number of steps part of what the run is.

    >>> "max_steps" in operational({"schedule": {"lr_scheduler_type": "linear"}})
    False
    """
    kind = keys.get("schedule", {}).get("lr_scheduler_type")
    return set(OPERATIONAL) - ({"max_steps"} if kind in ENDING else set())


def identity(config: Any) -> dict[str, Any]:
    """What makes the run this run: the configuration without operational keys, weights, data."""
    keys = named(choices(asdict(config)))
    keys = {key: value for key, value in keys.items() if key not in operational(keys)}
    if getattr(config, "imports_pool", False):
        keys["pool"] = file_digest(config.pool)  # data, where a folder of ours is only a cache
    if config.model is None:  # nothing is read but the configuration
        return keys | {"weights": None}
    keys |= {"weights": weights_fingerprint(config.model.model_name_or_path)}
    data, rules = data_fingerprint(config.dataset), rules_fingerprint(config)
    keys |= {} if data is None else {"data": data}
    return keys | ({} if rules is None else {"own_rules": rules})


def choices(keys: dict[str, Any]) -> dict[str, Any]:
    """A configuration's keys but those that change no result: the model's size, which costs are
    estimated from, where local data are, which count by content, and which part of a pool to fill.

    >>> keys = {"model": {"name": "x", "size": {}}, "dataset": {"path": "/"}}
    >>> choices(keys)
    {'model': {'name': 'x'}, 'dataset': {'path': 'local'}}
    """
    model = {key: value for key, value in keys.get("model", {}).items() if key != "size"}
    if "bed" in keys:
        return keys
    dataset = dict(keys.get("dataset", {}))
    for name in ("path", "test_path", "test_ids"):
        place = dataset.get(name)
        if place is not None and Path(place).expanduser().exists():
            dataset[name] = "local"
    study = {key: value for key, value in keys.get("study", {}).items() if key != "part"}
    return keys | {"model": model, "dataset": dataset} | ({"study": study} if study else {})


def named(keys: dict[str, Any]) -> dict[str, Any]:
    """A configuration's keys, of `rules` only those in `baselines`: adding one changes no folder.

    >>> named({"baselines": ["none"], "rules": {"none": {}, "opo": {}}})["rules"]
    {'none': {}}
    """
    if not keys.get("rules"):
        return keys
    asked = keys.get("baselines", ())
    return keys | {"rules": {name: keys["rules"][name] for name in asked if name in keys["rules"]}}


def weights_fingerprint(model_name_or_path: str) -> str | None:
    """A hash of a model's files in a folder, embedded or cached: weights, configuration, tokenizer,
    chat format, code; None for a hub id.

    Adapters count with how they are added and with the model that they are added to.

    Small files count by their content, files above 64 MiB by size and time of change.
    """
    folder = model_folder(model_name_or_path)
    files = sorted(file for kind in MODEL_FILES for file in folder.glob(kind))
    if not any(folder.glob("*.safetensors")):
        return None
    total = _content(files)
    adapters = adapter_base(folder)
    if adapters is not None:
        total.update(str(weights_fingerprint(adapters[0])).encode())
    return total.hexdigest()[:12]


def data_fingerprint(dataset: Any) -> str | None:
    """A hash of the local files that questions come from, and of the module of each own task or
    reward; None where there are none, as of a hub id, which counts by name and revision.

    Files count as those of `weights_fingerprint` do.
    """
    files = [file for path in getattr(dataset, "sources", ()) for file in _data_files(path)]
    for group, name in ((TASKS, dataset.kind == "own" and dataset.name), (REWARDS, dataset.reward)):
        if name:
            files.append(module_file(group, name))
    return _content(files).hexdigest()[:12] if files else None


def rules_fingerprint(config: Any) -> str | None:
    """A hash of the modules of baselines that installed packages offer; None where none is used."""
    used = getattr(config, "baselines", None) or [config.baseline.name]
    files = [module_file(OWN, name) for name in sorted(own_rules(used))]
    return _content(files).hexdigest()[:12] if files else None


def _data_files(path: str) -> list[Path]:
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    named = (file for file in place.rglob("*") if file.name.endswith(FILES))
    return sorted([*named, *place.glob("README.md")])  # whose card may say what is train and test


def _content(files: list[Path]) -> Any:
    """What hashlib makes of the files, in their order."""
    total = hashlib.sha256()
    for file in files:
        stat = file.stat()
        small = stat.st_size <= 2**26
        total.update(file.read_bytes() if small else f"{stat.st_size} {stat.st_mtime_ns}".encode())
    return total


def file_digest(path: str | Path) -> str:
    """A short hash of a file's content."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def fingerprint(identity_keys: dict[str, Any]) -> str:
    """A short hash of `identity`, 12 hexadecimal digits.

    >>> fingerprint({"seed": 0, "group_size": 4}) == fingerprint({"group_size": 4, "seed": 0})
    True
    """
    text = json.dumps(identity_keys, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def folder_name(config: Any) -> str:
    """The run folder's name without its seed: words, then a hash of the identity keys."""
    keys = identity(config)
    del keys["seed"]
    words = re.sub(r"[^\w.=-]+", "_", config.run_name)
    return f"{words}-{fingerprint(keys)[:8]}"
