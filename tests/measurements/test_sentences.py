"""Sentences of measurements, from the record that a study wrote."""

from __future__ import annotations

import math

import pytest

from grpo_ustat.estimators.allocation import AllocationSaving
from grpo_ustat.estimators.intervals import UNDETERMINED, Interval
from grpo_ustat.measurements import dynamic_sampling, unequal_groups
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


@pytest.mark.parametrize(
    "change, sentence",
    [
        ((-0.1, -0.2, -0.05), "help (plan: p(1-p), -10 % error [-20 %, -5 %])."),
        ((0.02, -0.01, 0.05), "do not help (+2 % error [-1 %, +5 %])."),
        ((0.02, -0.2, 0.3), "are not shown to help (+2 % error [-20 %, +30 %])."),
    ],
)
def test_unequal_groups_are_said_with_a_verdict(change, sentence):
    rows = [
        AllocationSaving("measured noise", 4, Interval(-0.9, -0.95, -0.8), -0.9),
        AllocationSaving("measured noise", 8, Interval(0.2, 0.1, 0.3), -0.06),
        AllocationSaving("p(1-p)", 8, Interval(*change), None),
        AllocationSaving("unknown", 8, UNDETERMINED, None),
    ]
    assert unequal_groups.sentences(rows, None) == [f"Unequal group sizes {sentence}"]
    assert unequal_groups.sentences([], None) == unequal_groups.sentences(rows[:1], None) == []
