"""The command to type next: overrides of a loss, and the G that is best for it."""

from __future__ import annotations

import shlex
from dataclasses import asdict

import numpy as np
import pytest
from folders import unsaved_study
from readme import ROOT
from slow_cases import slow_after

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.next_step import next_step, objective_overrides
from grpo_ustat.runs.library import load_run


@pytest.mark.parametrize(
    "words",
    [
        (), ("objective=trl_dapo",), ("objective=trl_dapo", "baseline=group_mean"),
        ("objective=verl_token_mean",), ("objective=grpo", "objective.beta=0.0"),
        ("objective=dapo", "baseline=group_std", "baseline.options.epsilon=0.01"),
        ("objective=trl_dr_grpo", "baseline=group_std"),
        ("objective=trl_dapo", "objective.zero_variance_groups=drop"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("verb", slow_after(1, ["train", "mse"]))
def test_the_overrides_of_a_loss_choose_it_again(verb, words):
    config = asdict(compose_config(verb, words))
    again = objective_overrides(config)
    assert len(again) <= len(words)
    found = asdict(compose_config(verb, again))
    for name in ("objective", "baseline"):
        assert found[name] == config[name]


def test_the_next_step_trains_with_the_loss_and_its_own_best_size():
    config = asdict(compose_config("mse", ["objective=trl_dapo"]))
    scaling = {
        "c1": 1.0, "c1_low": 0.9, "c1_high": 1.1, "c2": 2.0, "c3": 9.0, "gstar": 4.0,
        "gstar_low": 3.5, "gstar_high": 4.6, "covariance": (1e-4 * np.eye(3)).tolist(), "dof": 99.0,
    }  # fmt: skip
    result = {"scaling": scaling, "assumption2": {"corr": 0.1, "corr_low": 0.0, "corr_high": 0.2}}

    def following(config, losses=()):
        return next_step(unsaved_study(result | {"losses": list(losses)}, config))

    assert following(config).endswith("objective=trl_dapo budget.rollouts=256 group_size=4")
    row = {
        "loss": "trl_dapo",
        "efficiency_same_g": 1.0,
        "efficiency_same_g_low": 0.9,
        "efficiency_same_g_high": 1.1,
    }
    for alike, size in ((True, 4), (False, 16)):
        losses = [
            row | {"group_size": 4, "best": False, "may_be_best": alike},
            row | {"group_size": 16, "best": True, "may_be_best": True},
        ]
        assert following(config, losses).endswith(f"group_size={size}")
    replaced = ["objective=trl_dapo", "objective.zero_variance_groups=replace"]
    step = following(asdict(compose_config("mse", replaced)))
    assert "objective.zero_variance_groups=drop" in step and "replace" not in step


@pytest.mark.parametrize("folder", sorted((ROOT / "docs/examples/mse").iterdir()), ids=str)
def test_a_study_of_an_earlier_version_goes_on_in_fields_of_today(folder):
    command = next_step(Study(load_run(folder)))
    verb, *words = shlex.split(command)[1:]
    assert compose_config(verb, [word for word in words if not word.startswith("pool=")])
