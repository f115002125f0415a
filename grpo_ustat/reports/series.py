"""By what runs differ: the series of a report, which never mix.

Runs of one series differ in group size, seed and budget alone; everything else that makes a run
another run splits them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from grpo_ustat.identity import choices, named, operational
from grpo_ustat.nested import flat

SWEPT = ("group_size", "seed", "budget.rollouts")  # a series holds several values of these


def identity_keys(config: dict[str, Any]) -> dict[str, Any]:
    """What makes a run this run, of a configuration as its folder holds it, by dotted key."""
    left_out = operational(config)
    whole = choices(named(config))
    return flat({key: value for key, value in whole.items() if key not in left_out})


def telling(runs: Sequence[dict[str, Any]], but: Sequence[str] = SWEPT) -> list[str]:
    """Keys by which runs can be told apart, each only if those before it leave some together.

    Names come first: of two models that differ in name, path and weights the name is enough.

    >>> one, two = {"seed": 0, "model.name": "a", "path": 1}, {"seed": 1, "model.name": "b"}
    >>> telling([one, two]), telling([one, one | {"seed": 1}]), telling([one, one | {"path": 2}])
    (['model.name'], [], ['path'])
    """
    known = {key for keys in runs for key in keys if key not in but}
    chosen: list[str] = []
    parts = 1
    for key in sorted(known, key=lambda key: (not key.endswith("name"), key)):
        found = len({_values(keys, [*chosen, key]) for keys in runs})
        if found > parts:
            chosen, parts = [*chosen, key], found
    return chosen


def _values(keys: dict[str, Any], asked: Sequence[str]) -> str:
    return json.dumps([keys.get(key) for key in asked], default=str)


def label(keys: dict[str, Any], asked: Sequence[str]) -> str:
    """A run's values of the keys that tell it from others, as on a command line.

    >>> label({"baseline.name": "opo", "learning_rate": 0.1}, ["baseline.name", "learning_rate"])
    'baseline=opo learning_rate=0.1'
    """
    shown = {key.removesuffix(".name"): _shown(keys.get(key)) for key in asked}
    return " ".join(f"{key}={value}" for key, value in shown.items())


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_shown, value))}]"
    return "null" if value is None else str(value)
