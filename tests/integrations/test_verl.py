"""verl's registry: a stand-in of its decorator and its call; where verl is installed, verl itself.

`VERL_USE_EXTERNAL_MODULES=grpo_ustat.integrations.verl python -m verl.trainer.main_ppo` begins as the slow test
does: verl imports the module while it is imported itself.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from grpo_ustat.estimators.baselines import OURS, advantages
from grpo_ustat.integrations.rows import REWARDS_ALONE, rule_options
from grpo_ustat.records import BaselineContext

REWARDS_PG = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
ORDER = [4, 0, 8, 3, 1, 7, 6, 2, 5]
REAL = """
import numpy as np, torch, verl
from verl import DataProto
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.ray_trainer import compute_advantage
from test_verl import UIDS, batch, expected
from grpo_ustat.integrations.rows import REWARDS_ALONE

rewards, mask = batch()
for rule in REWARDS_ALONE:
    tensors = {"token_level_rewards": rewards, "response_mask": mask}
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": UIDS})
    data = compute_advantage(data, adv_estimator=f"grpo_ustat_{rule}", num_repeat=3, config=None)
    torch.testing.assert_close(data.batch["advantages"], expected(rule) * mask)
    assert torch.equal(data.batch["returns"], data.batch["advantages"])
print("as verl calls them:", len(REWARDS_ALONE))

from hydra import compose, initialize_config_module
from readme import PAGES, commands
from verl.trainer.ppo.core_algos import agg_loss

words = next(w for w in commands(PAGES["docs/verl.md"]) if "verl.trainer.main_ppo" in w)
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", words[words.index("verl.trainer.main_ppo") + 1 :])
actor = config.actor_rollout_ref.actor
assert not (actor.use_kl_loss or actor.entropy_coeff or config.algorithm.use_kl_in_reward)
assert actor.ppo_mini_batch_size == config.data.train_batch_size and actor.ppo_epochs == 1
get_adv_estimator_fn(config.algorithm.adv_estimator)
logprobs = torch.zeros(9, 4, requires_grad=True)
advantage = expected("leave_one_out")
agg_loss(-advantage * logprobs, mask, actor.loss_agg_mode, global_batch_size=9).backward()
torch.testing.assert_close(-logprobs.grad, advantage * mask / 9)
print("the update is ours")
"""
UIDS = np.array([f"uid {row // 3}" for row in ORDER], dtype=object)
LENGTHS = np.array([1, 4, 2, 3, 4, 1, 2, 4, 3])


def batch():
    """Token rewards with the reward on the last token, and the mask, as verl pads them."""
    mask = torch.tensor((np.arange(4) < LENGTHS[:, None]).astype(np.int64))
    rewards = torch.zeros(9, 4)
    rewards[np.arange(9), LENGTHS - 1] = torch.tensor(REWARDS_PG.ravel()[ORDER], dtype=torch.float)
    return rewards, mask


def expected(rule):
    options = rule_options(rule, {})
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
    for rule in REWARDS_ALONE:
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
    names = ", ".join(f"grpo_ustat_{rule}" for rule in REWARDS_ALONE)
    message = f"baseline critic reads critic_P besides rewards; the names are {names}"
    assert str(refused.value) == message


@pytest.mark.slow(minutes=0.5)
def test_verl_itself_calls_them(monkeypatch):
    pytest.importorskip("verl", reason="verl is not installed")
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "grpo_ustat.integrations.verl")
    monkeypatch.setenv("PYTHONPATH", ":".join([*sys.path]))
    run = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True)
    assert f"as verl calls them: {len(REWARDS_ALONE)}" in run.stdout, run.stderr[-2000:]
    assert "the update is ours" in run.stdout, run.stderr[-2000:]
