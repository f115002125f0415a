"""Sentences of measurements, from the record that a study wrote."""

from __future__ import annotations

import math

import pytest

from grpo_ustat.estimators.intervals import UNDETERMINED, Interval
from grpo_ustat.measurements import dynamic_sampling, plans
from grpo_ustat.measurements.dynamic_sampling import DynamicSampling
from grpo_ustat.measurements.plans import PlanEfficiency, PromptWeight


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
    "efficiency, other, finding",
    [
        ((1.1, 1.04, 1.2), UNDETERMINED, "Unequal group sizes help"),
        ((0.9, 0.8, 0.98), Interval(0.5, 0.4, 0.6), "Unequal group sizes do not help"),
        ((0.9, 0.8, 0.98), UNDETERMINED, "The data do not show that unequal group sizes help"),
        ((1.0, 0.8, 1.3), UNDETERMINED, "The data do not show that unequal group sizes help"),
    ],
)
def test_unequal_groups_are_said_with_a_verdict(efficiency, other, finding):
    """The best plan at the mean size nearest to 8 decides, and biased plans are named.

    A plan whose efficiency is not decided may help, so "do not help" needs all plans.
    """
    rows = [
        efficiency_of("vip", 4, Interval(3.0, 2.5, 3.5)),
        efficiency_of("vip", 8, Interval(0.7, 0.6, 0.8), weight=1.05),
        efficiency_of("until_mixed", 8, Interval(*efficiency), weight=2.44),
        efficiency_of("knapsack", 8, other, weight=0.5),
        PlanEfficiency(plan="refill", mean_size=8, most=32, weights=[], reason="too few"),
    ]
    first, second, absent = plans.sentences(rows, None)
    assert "refill" in absent and "too few" in absent
    assert first.startswith(f"{finding}: ") and "until_mixed" in first
    assert f"{efficiency[0]:.2f} [" in first
    assert "10 %" in second and "vip" not in second
    assert second.endswith("2.4 times under until_mixed and 0.5 times under knapsack.")
    assert plans.sentences([], None) == [] and plans.sentences(rows[-1:], None) == [absent]


def efficiency_of(plan, size, efficiency, weight=2.0):
    count = Interval(8.0, 7.5, 8.5)
    return PlanEfficiency(
        plan=plan, estimate="per_rollout", mean_size=size, most=4 * size, generated=count,
        trained=count, direction=Interval(0.99, 0.9, 1.0), noise=Interval(0.9, 0.8, 0.95),
        efficiency_generated=efficiency, efficiency_trained=efficiency,
        weights=[PromptWeight(success_rate=0.1, weight=weight)],
    )  # fmt: skip
