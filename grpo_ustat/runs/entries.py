"""Which entry a run folder is of, told by its configuration alone."""

from __future__ import annotations

from typing import Any


def entry_of(config: dict[str, Any]) -> str:
    """Whose configuration it is: `train`, `mse` or `gap`.

    >>> entry_of({"max_steps": 80}), entry_of({"bed": {}, "study": {}}), entry_of({"study": {}})
    ('train', 'gap', 'mse')
    """
    return "train" if "max_steps" in config else "gap" if "bed" in config else "mse"
