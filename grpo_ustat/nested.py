"""Nested dictionaries by path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(content: Mapping[str, Any], between: str = ".", prefix: str = "") -> dict[str, Any]:
    """The values of nested dictionaries by path; an empty dictionary has none.

    >>> flat({"seed": 0, "model": {"name": "tiny", "size": {}}, "sizes": [2, 4]})
    {'seed': 0, 'model.name': 'tiny', 'sizes': [2, 4]}
    """
    found: dict[str, Any] = {}
    for key, value in content.items():
        path = f"{prefix}{key}"
        nested = isinstance(value, Mapping)
        found |= flat(value, between, f"{path}{between}") if nested else {path: value}
    return found
