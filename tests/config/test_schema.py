"""The walker over a schema's fields refuses what their metadata do not allow."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import pytest

from grpo_ustat.config.schema import ConfigError, check_fields, field, node


@dataclass
class Inner:
    rates: list[float] = field("learning rates", positive=True)
    share: float | None = field("of them; null: all", at_least=0, below=1)


@dataclass
class Outer:
    name: str = field("of it", choices=("a", "b"), plugins=lambda: {"own"})
    steps: int = field("of it", at_least=3)
    inner: Inner = node(Inner, "what is in it")
    more: dict[str, Inner] = field("others")


FINE = {"name": "own", "steps": 3, "inner": Inner([0.5], None), "more": {"x": Inner([2.0], 0.0)}}


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"name": "c"}, "unknown name 'c': choose from a, b, own"),
        ({"steps": 2}, "steps=2 must be 3 or more"),
        ({"inner": Inner([], 1.0)}, "inner.share=1.0 must be in [0, 1)"),
        ({"inner": Inner([], math.nan)}, "inner.share=nan must be in [0, 1)"),
        (
            {"more": {"x": Inner([1.0, math.inf], 0.5)}},
            "more.x.rates=[1.0, inf] contains inf, which must be above 0 and finite",
        ),
    ],
)
def test_the_walker_refuses_what_a_field_does_not_allow(wrong, message):
    check_fields(Outer(**FINE))
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_fields(Outer(**FINE | wrong))
