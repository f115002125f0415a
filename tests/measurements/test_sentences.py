"""Sentences of measurements, from the record that a study wrote."""

from __future__ import annotations

import math

import pytest

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.measurements import dynamic_sampling
from grpo_ustat.measurements.dynamic_sampling import DynamicSampling


def costs(break_even, group_size=8):
    share, groups = Interval(0.5, 0.4, 0.6), Interval(2.0, 1.67, 2.5)
    return DynamicSampling(
        group_size=group_size, kept=share, generated=groups, break_even=break_even
    )


@pytest.mark.parametrize("high, said", [(0.02, ["less than 2 %"]), (0.06, []), (math.nan, [])])
def test_dynamic_sampling_does_not_pay_where_it_saves_next_to_nothing(high, said):
    other = costs(Interval(0.2, 0.1, 0.3), group_size=2)
    lines = dynamic_sampling.sentences([other, costs(Interval(0.01, 0.005, high))], None)
    assert len(lines) == len(said) and all(x in line for x, line in zip(said, lines, strict=True))
