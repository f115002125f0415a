"""Identity of a run: its result-determining keys, its fingerprints and its folder name."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_ustat.config.data import FILE_SUFFIXES
from grpo_ustat.config.model import adapter_base, model_folder, tf32_in_use
from grpo_ustat.config.own_functions import REWARDS, TASKS, module_file, reward_file
from grpo_ustat.config.reward_funcs import DATASET_FREE_REWARDS, TASK
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.config.train import ENDING_SCHEDULES
from grpo_ustat.estimators.baselines import PLUGIN_GROUP, plugin_baselines

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py")
# Fields of a model that do not change results.
NEUTRAL_MODEL_FIELDS = ("size", "learning_rate", "lora_learning_rate")
# File systems limit names to 255 bytes.
MAX_NAME_BYTES = 200
# Keys that can differ between two starts of the same run.
OPERATIONAL_KEYS = (
    "output_root",
    "on_existing",
    "dry_run",
    "show_prompts",
    "report",
    "logger",
    "project",
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


def operational_keys(keys: dict[str, Any]) -> set[str]:
    """Return the keys that can differ between two starts of the same run.

    If the learning rate decays to 0 at `max_steps`, `max_steps` changes results and is not one of
    these keys.

    >>> "max_steps" in operational_keys({"schedule": {"lr_scheduler_type": "linear"}})
    False
    """
    kind = keys.get("schedule", {}).get("lr_scheduler_type")
    return {
        key for key in OPERATIONAL_KEYS if not (key == "max_steps" and kind in ENDING_SCHEDULES)
    }


def identity(config: Any) -> dict[str, Any]:
    """Return a run's identity: the configuration keys that determine results, and hashes of files.

    The hashed files are the weights, the data, and the modules of the user's baselines and rewards.
    """
    keys = drop_unused_baselines(drop_neutral_keys(asdict(config)))
    keys = {key: value for key, value in keys.items() if key not in operational_keys(keys)}
    if getattr(config, "imports_pool", False):
        # An imported file is input data, whereas a pool folder is only a cache.
        keys["pool"] = file_digest(config.pool)
    # Without a model, the configuration alone determines the results.
    if config.model is None:
        return keys | {"weights": None}
    keys |= {"weights": weights_fingerprint(config.model.model_name_or_path)}
    hashes = {
        "data": data_fingerprint(config.dataset),
        "plugin_baselines": baselines_fingerprint(config),
        "own_reward_funcs": reward_funcs_fingerprint(config.reward_funcs),
    }
    return keys | {key: digest for key, digest in hashes.items() if digest is not None}


def drop_neutral_keys(keys: dict[str, Any]) -> dict[str, Any]:
    """Remove the keys that do not change results, and add `tf32` to a study.

    The following keys are removed or replaced by a neutral value:

    - the model's size, which only affects cost estimates
    - values in a model's or data set's node that only provide defaults for other fields
    - empty options of a chat template
    - paths of local data, whose content is hashed instead
    - `study.part`, which only selects the questions that a job adds to the pool
    - the number of minibatches, if the size of a minibatch is set
    - settings of corrections, verdicts and `study.until`, if the study does not use them
    - reward weights that are all 1

    The entry `tf32` is True if matrix products of the study use TF32.

    >>> keys = {"model": {"name": "x", "size": {}}, "dataset": {"path": "/"}}
    >>> drop_neutral_keys(keys)
    {'model': {'name': 'x'}, 'dataset': {'path': 'local'}}
    """
    if "theorem" in keys:
        return keys
    keys = dict(keys)
    if "model" in keys:
        keys["model"] = {k: v for k, v in keys["model"].items() if k not in NEUTRAL_MODEL_FIELDS}
    if "prompt" in keys and not keys["prompt"].get("template_options"):
        keys["prompt"] = {k: v for k, v in keys["prompt"].items() if k != "template_options"}
    if "dataset" in keys:
        dataset = keys["dataset"] = dict(keys["dataset"])
        dataset.pop("max_completion_length", None)
        for name in ("path", "test_path", "test_ids"):
            place = dataset.get(name)
            if place is not None and Path(place).expanduser().exists():
                dataset[name] = "local"
        reward = reward_file(dataset.get("reward") or "")
        if reward and reward[0].exists():
            dataset["reward"] = f"local:{reward[1]}"
    if "reward_funcs" in keys:
        if keys.get("reward_weights") == [1.0] * len(keys["reward_funcs"]):
            keys["reward_weights"] = None
        keys["reward_funcs"] = local_reward_funcs(keys["reward_funcs"])
    if "study" in keys:
        study = keys["study"] = {k: v for k, v in keys["study"].items() if k != "part"}
        if not study.get("merge_adapters"):
            study.pop("merge_adapters", None)
        if not study.get("corrections"):
            study = {k: v for k, v in study.items() if k != "correction_cap"}
        if study.get("until") is None:
            study.pop("until", None)
        # Verdicts do not change any other result.
        if not study.get("verdicts"):
            study.pop("verdicts", None)
        keys["study"] = study
    if "study" in keys:
        # Both entries may be missing if the keys were read from a file.
        device = str(keys.get("launch", {}).get("device"))
        dtype = str(keys.get("model", {}).get("dtype"))
        keys["tf32"] = tf32_in_use(device, dtype)
    return keys


def local_reward_funcs(reward_funcs: list[str]) -> list[str]:
    """Remove the paths of local files from reward functions, because the files are hashed."""
    names: list[str] = []
    for name in reward_funcs:
        place = reward_file(name)
        names.append(f"local:{place[1]}" if place and place[0].exists() else name)
    return names


def drop_unused_baselines(keys: dict[str, Any]) -> dict[str, Any]:
    """Keep only options of the compared baselines.

    Otherwise, a new baseline in this package would change the names of all run folders.

    >>> keys = {"baselines": ["none"], "baseline_options": {"none": {}, "opo": {}}}
    >>> drop_unused_baselines(keys)["baseline_options"]
    {'none': {}}
    """
    if not keys.get("baseline_options"):
        return keys
    options, used = keys["baseline_options"], keys.get("baselines", ())
    return keys | {"baseline_options": {name: options[name] for name in used if name in options}}


def weights_fingerprint(model_name_or_path: str) -> str | None:
    """Hash the files of a local model; return None for a hub id.

    The files are weights, configuration, tokenizer, chat format and code. For adapters, the hash
    also covers the adapter configuration and the base model. The hash depends only on the content
    of the files; see `_hash_of`.
    """
    folder = model_folder(model_name_or_path)
    files = sorted(file for kind in MODEL_FILES for file in folder.glob(kind))
    if not any(folder.glob("*.safetensors")):
        return None
    total = _hash_of(files)
    adapters = adapter_base(folder)
    if adapters is not None:
        total.update(str(weights_fingerprint(adapters[0])).encode())
    return total.hexdigest()[:12]


def data_fingerprint(dataset: Any) -> str | None:
    """Hash the local files with questions and the modules of the user's task or reward.

    Return None if there are no such files; a data set on the hub is identified by its name and
    revision. The hash depends only on the content of the files; see `_hash_of`.
    """
    files: list[Path] = []
    for place in (Path(path).expanduser() for path in getattr(dataset, "sources", ())):
        if place.is_file():
            files.append(place)
        else:
            # The data set card, README.md, can define the splits.
            data = (file for file in place.rglob("*") if file.name.endswith(FILE_SUFFIXES))
            files += sorted([*data, *place.glob("README.md")])
    if dataset.kind == "own":
        files.append(_module(TASKS, dataset.name))
    if dataset.reward:
        files.append(_reward_module(dataset.reward))
    return _hash_of(files).hexdigest()[:12] if files else None


def reward_funcs_fingerprint(reward_funcs: list[str]) -> str | None:
    """Hash the modules of the user's reward functions; return None if there are none."""
    names = [name for name in reward_funcs if name not in (TASK, *DATASET_FREE_REWARDS)]
    files = [_reward_module(name) for name in names]
    return _hash_of(files).hexdigest()[:12] if files else None


def baselines_fingerprint(config: Any) -> str | None:
    """Hash the modules of baselines from installed packages; return None without such baselines."""
    used = getattr(config, "baselines", None) or [config.baseline.name]
    files = [_module(PLUGIN_GROUP, name) for name in sorted(plugin_baselines(used))]
    return _hash_of(files).hexdigest()[:12] if files else None


def _reward_module(reward: str) -> Path:
    """Return the file of a reward given as FILE:FUNCTION or as an entry point."""
    place = reward_file(reward)
    return place[0] if place else _module(REWARDS, reward)


def _module(group: str, name: str) -> Path:
    """Return the file of an entry point's module."""
    file = module_file(group, name)
    if file is None:
        raise ConfigError(f"{name}: the module of this {group} entry point has no file")
    return file


def _hash_of(files: list[Path]) -> hashlib._Hash:  # pyright: ignore[reportPrivateUsage]
    """Compute the SHA-256 hash of the concatenated files.

    Weights can take hundreds of GB. For safetensors files above 64 MiB, only the size and 256
    evenly spaced blocks of 64 KiB are hashed, including the first and the last block.
    """
    total = hashlib.sha256()
    for path in files:
        size, blocks = path.stat().st_size, 256
        with path.open("rb") as file:
            if size <= 2**26 or path.suffix != ".safetensors":
                while block := file.read(2**24):
                    total.update(block)
                continue
            total.update(str(size).encode())
            for number in range(blocks):
                file.seek(number * (size - 2**16) // (blocks - 1))
                total.update(file.read(2**16))
    return total


def file_digest(path: str | Path) -> str:
    """Return a short hash of a file's content."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def fingerprint(identity_keys: dict[str, Any]) -> str:
    """Return a hash of the identity keys with 12 hexadecimal digits.

    >>> fingerprint({"seed": 0, "group_size": 4}) == fingerprint({"group_size": 4, "seed": 0})
    True
    """
    text = json.dumps(identity_keys, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def folder_name(config: Any) -> str:
    """Return the run folder's name without the seed: readable words and a hash of the identity.

    The words can contain the path of a model's folder. If the words are too long, only their end is
    kept. Names never begin with a dot. A `=` in the words becomes a `-`, so that a path can be
    typed in an override without quotes.
    """
    keys = identity(config)
    del keys["seed"]
    words = re.sub(r"[^\w.-]+", "_", config.run_name.replace("=", "-"))
    words = words.encode()[-MAX_NAME_BYTES:].decode(errors="ignore")
    words = words.lstrip("._") if words.startswith(".") else words
    return f"{words}-{fingerprint(keys)[:8]}"
