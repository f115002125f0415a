"""Requested plans: their names, and sentences on those that were not measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from commands import compose

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.plans import PLANS
from grpo_ustat.measurements.plans import PlanEfficiency, sentences


def absent(plan, size, reason):
    return PlanEfficiency(plan=plan, mean_size=size, most=4 * size, weights=[], reason=reason)


def test_sentences_name_every_plan_that_was_not_measured():
    rows = [absent("vip", 40, "few"), absent("refill", 40, "few"), absent("vip", 16, "fewer")]
    lines = sentences(rows, None)
    assert len(lines) == 2
    assert all(word in lines[0] for word in ("vip", "refill", "40", "few"))
    assert all(word in lines[1] for word in ("vip", "16", "fewer")) and "refill" not in lines[1]


def test_all_keeps_the_plans_of_installed_packages():
    study = compose("mse").study
    assert replace(study, plans=["all"]).plan_names == list(PLANS)
    assert replace(study, plans=["theirs", "all", "vip"]).plan_names == [*PLANS, "theirs"]
    assert replace(study, plans=["vip"]).plan_names == ["vip"]


def test_plans_without_sizes_are_refused():
    with pytest.raises(ConfigError, match="study.plan_sizes") as refused:
        compose("mse", "study.plans=[vip]", "study.plan_sizes=[]")
    assert "vip" in str(refused.value) and "\n" not in str(refused.value)
    compose("mse", "study.plan_sizes=[]")
