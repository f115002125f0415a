"""What of the paper's models and data sets is here, for machines without a network."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import yaml
from huggingface_hub import constants, try_to_load_from_cache

from grpo_ustat.checks import cache_folder
from grpo_ustat.checkup.findings import Finding, ok, warning
from grpo_ustat.checkup.reaching import reach
from grpo_ustat.composing import CONF

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def cache(_: Path) -> Finding:
    """Models and data sets of `conf/` in the hub's caches; without a network they must be there."""
    models, datasets = _named("model", ("model_name_or_path",)), _named("dataset", DATA)
    there = [x for x in models if _has_model(x)] + [x for x in datasets if _has_dataset(x)]
    missing = [x for x in models if x not in there], [x for x in datasets if x not in there]
    offline = constants.HF_HUB_OFFLINE
    said = f"HF_HOME={constants.HF_HOME}, HF_HUB_OFFLINE {'' if offline else 'not '}set; "
    said += f"here: {_list(there)}{_own()}"
    if not any(missing):
        return ok(said)
    said += f"; not here: {_list([*missing[0], *missing[1]])}"
    why = None if offline else reach(constants.ENDPOINT)
    if not offline and why is None:
        return ok(f"{said}, fetched when first used")
    return warning(
        f"{said}{f'; {why}' if why else ''}: embedded models and generated arithmetic run",
        f"where there is a network: {_fetch(*missing)}; then copy HF_HOME, or set "
        "model.model_name_or_path and dataset.path to folders",
    )


DATA = ("path", "test_path")


def _named(group: str, keys: tuple[str, ...]) -> list[str]:
    """Hub ids that the files of a group name."""
    found = []
    for file in sorted((CONF / group).glob("*.yaml")):
        content = yaml.safe_load(file.read_text()) or {}
        values = [content.get(key) for key in keys]
        found += [value for value in values if value and HUB_ID.fullmatch(str(value))]
    return list(dict.fromkeys(found))


def _has_model(name: str) -> bool:
    """Its configuration, tokenizer and every file of its weights."""
    config = _cached(name, "config.json")
    if config is None or _cached(name, "tokenizer_config.json") is None:
        return False
    if (config.parent / "model.safetensors").is_file():
        return True
    index = config.parent / "model.safetensors.index.json"
    if not index.is_file():
        return False
    parts = set(json.loads(index.read_text())["weight_map"].values())
    return all((config.parent / part).is_file() for part in parts)


def _cached(name: str, file: str) -> Path | None:
    found = try_to_load_from_cache(name, file)
    return Path(found) if isinstance(found, str) else None


def _has_dataset(name: str) -> bool:
    """As the library `datasets` keeps it once it was loaded."""
    home = os.environ.get("HF_DATASETS_CACHE", os.path.join(constants.HF_HOME, "datasets"))
    known = {_plain(path.name): path for path in Path(home).glob("*") if path.is_dir()}
    place = known.get(_plain(name.replace("/", "___")))
    return place is not None and any(place.rglob("*.arrow"))


def _plain(name: str) -> str:
    """Its folder's name has other cases and dashes than the data set's."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _own() -> str:
    """Models that scripts have put into the project's own cache."""
    found = sorted(path.parent.name for path in cache_folder().glob("*/config.json"))
    return "".join(f", cached:{name}" for name in found)


def _list(names: list[str]) -> str:
    return ", ".join(names) or "none"


def _fetch(models: list[str], datasets: list[str]) -> str:
    """The command for the first that is missing."""
    if models:
        return f"hf download {models[0]}"
    return f'python -c "import datasets; datasets.load_dataset({datasets[0]!r})"'
