"""Measurements of other packages that cannot be used are refused by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.measurements import registry
from grpo_ustat.measurements.base import Measurement

LENGTHS = Measurement("lengths", float, lambda study: 1.0)


def fail():
    raise AttributeError("no LENGTHS")


@pytest.mark.parametrize(
    "name, load, reason",
    [
        ("lengths", lambda: LENGTHS, None),
        ("widths", lambda: LENGTHS, "must be a Measurement with the name 'widths'"),
        ("lengths", lambda: 3, "is 3: it must be a Measurement"),
        ("lengths", fail, "cannot be loaded: AttributeError: no LENGTHS"),
        ("scaling", lambda: LENGTHS, "result.json already has a key scaling"),
        ("policy", lambda: LENGTHS, "result.json already has a key policy"),
    ],
)
def test_an_entry_point_is_loaded_or_refused(monkeypatch, name, load, reason):
    offered = {name: SimpleNamespace(load=load)}
    monkeypatch.setattr(registry, "entry_points", lambda group: offered)
    if reason is None:
        assert registry.measurements([name]) == [*registry.OURS, LENGTHS]
        return
    with pytest.raises(ConfigError, match=f"study.measurements={name}") as caught:
        registry.measurements([name])
    assert reason in str(caught.value)
