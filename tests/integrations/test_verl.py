"""verl's registry: a stand-in of its decorator and call, and gradients that verl once made; where
verl is installed, verl itself.

`VERL_USE_EXTERNAL_MODULES=grpo_ustat.integrations.verl python -m verl.trainer.main_ppo` begins as
the nightly test does: verl imports the module while it is imported itself.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from verl_run import ORDER, REWARDS_PG, THEIRS, UIDS, batch

from grpo_ustat.estimators.baselines import OURS, advantages
from grpo_ustat.integrations.rows import REWARD_ONLY, rule_options
from grpo_ustat.records import BaselineContext

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests/data/verl_gradients.json"
RECORD = json.loads(FILE.read_text())


def expected(rule, changed=None):
    options = rule_options(rule, changed or {})
    rows = advantages(rule, REWARDS_PG, BaselineContext(), options).ravel()[ORDER]
    return torch.tensor(rows[:, None], dtype=torch.float32)


@pytest.fixture
def registry(monkeypatch):
    """What verl 0.9.1 has: a dictionary, and a decorator that refuses a name a second time."""
    estimators = {}

    def register_adv_est(name):
        def decorator(function):
            assert estimators.get(name, function) == function
            estimators[name] = function
            return function

        return decorator

    core_algos = ModuleType("verl.trainer.ppo.core_algos")
    core_algos.register_adv_est = register_adv_est
    for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, core_algos.__name__, core_algos)
    monkeypatch.delitem(sys.modules, "grpo_ustat.integrations.verl", raising=False)
    importlib.import_module("grpo_ustat.integrations.verl")
    yield estimators
    del sys.modules["grpo_ustat.integrations.verl"]


def test_every_rule_that_reads_rewards_alone_is_an_estimator_of_verl(registry):
    rewards, mask = batch()
    for rule in REWARD_ONLY:
        result = registry[f"grpo_ustat_{rule}"](
            token_level_rewards=rewards, response_mask=mask, config=None, index=UIDS
        )
        for tokens in result:
            assert torch.allclose(tokens, expected(rule) * mask, rtol=0, atol=1e-7)


def test_verl_names_the_estimators_where_a_rule_reads_more(registry):
    """A name of verl's registry, since verl's own message names none."""
    assert set(registry) == {f"grpo_ustat_{rule}" for rule in OURS}
    rewards, mask = batch()
    with pytest.raises(ValueError) as refused:
        registry["grpo_ustat_critic"](
            token_level_rewards=rewards, response_mask=mask, config=None, index=UIDS
        )
    names = ", ".join(f"grpo_ustat_{rule}" for rule in REWARD_ONLY)
    message = f"baseline critic reads critic_P besides rewards; the names are {names}"
    assert str(refused.value) == message


def test_recorded_gradients_of_verl_are_our_advantages():
    """By verl 0.9.1's `compute_advantage` and `agg_loss`, with the settings of docs/verl.md: of
    every rule that reads rewards alone, and of verl's own estimators that are rules of ours.
    """
    _, mask = batch()
    rules = {f"grpo_ustat_{rule}": (rule, {}) for rule in REWARD_ONLY} | THEIRS
    assert RECORD["gradients"].keys() == rules.keys()
    for name, rule in rules.items():
        recorded = torch.tensor(RECORD["gradients"][name])
        torch.testing.assert_close(recorded, expected(*rule) * mask / 9, rtol=1e-5, atol=1e-7)
    assert len({str(gradient) for gradient in RECORD["gradients"].values()}) > 10


@pytest.mark.nightly(minutes=0.3)
def test_the_living_verl_makes_the_recorded_gradients(monkeypatch):
    pytest.importorskip("verl", reason="verl is not installed")
    monkeypatch.setenv("PYTHONPATH", ":".join([str(ROOT), *sys.path]))
    command = [sys.executable, ROOT / "tests/helpers/verl_run.py", FILE]
    run = subprocess.run(command, capture_output=True, text=True)
    assert "recorded gradients" in run.stdout, run.stderr[-2000:]
