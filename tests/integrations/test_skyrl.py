"""SkyRL's registry: a stand-in of its decorator and call; where it is installed, SkyRL itself.

`python -m grpo_ustat.integrations.skyrl` is the registration and then SkyRL's own `main`.
"""

from __future__ import annotations

import importlib
import sys
from functools import wraps
from types import ModuleType

import pytest
import torch
from readme import PAGES, commands

from grpo_ustat.integrations.rows import REWARD_ONLY, estimator

NAMES = [f"grpo_ustat_{rule}" for rule in REWARD_ONLY]
REWARDS_BT = torch.tensor([
    [0.0, 1.0], [0.0, 0.0], [0.5, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0],
    [0.0, 0.0],
])  # fmt: skip
MASK_BT = torch.tensor([
    [1, 1], [1, 1], [1, 0], [1, 1], [1, 0], [1, 1], [1, 0], [1, 1], [1, 1],
])  # fmt: skip
UIDS = ["7", "8", "8", "7", "9", "9", "7", "8", "9"]
HOME = "skyrl.backends.skyrl_train.utils.ppo_utils"


def called(function):
    """As `compute_advantages_and_returns` of SkyRL 0.3.0 calls an estimator."""
    return function(
        token_level_rewards=REWARDS_BT, response_mask=MASK_BT, index=UIDS, values=None,
        grpo_norm_by_std=True, gamma=1.0, lambd=1.0, config=None,
    )  # fmt: skip


@pytest.fixture
def registry(monkeypatch):
    """What SkyRL 0.3.0 has: a registry that refuses a name twice, filled by a decorator."""

    class AdvantageEstimatorRegistry:
        functions = {"grpo_ustat_none": "of another process"}

        @classmethod
        def list_available(cls):
            return list(cls.functions)

    def register_advantage_estimator(name):
        def decorator(function):
            @wraps(function)
            def wrapper(*args, **kwargs):
                return function(*args, **kwargs)

            assert name not in AdvantageEstimatorRegistry.functions, "already registered"
            AdvantageEstimatorRegistry.functions[name] = wrapper
            return wrapper

        return decorator

    parts = HOME.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[HOME].AdvantageEstimatorRegistry = AdvantageEstimatorRegistry
    sys.modules[HOME].register_advantage_estimator = register_advantage_estimator
    monkeypatch.delitem(sys.modules, "grpo_ustat.integrations.skyrl", raising=False)
    importlib.import_module("grpo_ustat.integrations.skyrl")
    yield AdvantageEstimatorRegistry.functions
    del sys.modules["grpo_ustat.integrations.skyrl"]


def test_every_rule_that_reads_rewards_alone_is_an_estimator_of_skyrl(registry):
    """A rule that reads more has no name: SkyRL refuses it at once, and lists the names."""
    assert set(registry) == set(NAMES)
    for rule in REWARD_ONLY[1:]:
        expected, _ = estimator(rule)(REWARDS_BT, MASK_BT, UIDS)
        for tokens in called(registry[f"grpo_ustat_{rule}"]):
            assert torch.equal(tokens, expected)


def test_a_name_that_came_from_another_process_stays(registry):
    assert registry["grpo_ustat_none"] == "of another process"


@pytest.mark.nightly(minutes=0.5)
def test_skyrl_itself_calls_them_in_another_process():
    """Ray carries the functions to a process that imports our module later, or never."""
    pytest.importorskip("skyrl", reason="SkyRL is not installed")
    import ray

    utils = importlib.import_module(HOME)
    importlib.import_module("grpo_ustat.integrations.skyrl")
    paths = {"env_vars": {"PYTHONPATH": ":".join(sys.path)}}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=paths)
    try:
        utils.sync_registries()
        results, names = ray.get(ray.remote(_in_another_process).remote())
    finally:
        ray.shutdown()
    assert set(NAMES) <= set(names)
    for rule, result in zip(REWARD_ONLY, results, strict=True):
        expected, _ = estimator(rule)(REWARDS_BT, MASK_BT, UIDS)
        assert all(torch.equal(tokens, expected) for tokens in result)


@pytest.mark.nightly(minutes=0.5)
def test_the_settings_of_the_page_make_the_update_ours():
    pytest.importorskip("skyrl", reason="SkyRL is not installed")
    from skyrl.train.config import SkyRLTrainConfig

    words = next(
        w for w in commands(PAGES["docs/skyrl.md"]) if "grpo_ustat.integrations.skyrl" in w
    )
    trainer = SkyRLTrainConfig.from_cli_overrides(words[3:]).trainer
    algorithm = trainer.algorithm
    assert not (algorithm.use_kl_loss or algorithm.use_kl_in_reward or algorithm.use_entropy_loss)
    assert not algorithm.advantage_batch_normalize and trainer.update_epochs_per_batch == 1
    assert trainer.policy_mini_batch_size == trainer.train_batch_size
    utils = importlib.import_module(HOME)
    advantage_BT, _ = estimator("leave_one_out")(REWARDS_BT, MASK_BT, UIDS)
    scaled_BT = utils.apply_loss_reduction_to_advantages_minibatch(
        advantage_BT, MASK_BT, algorithm.loss_reduction, 1, algorithm.max_seq_len
    )
    assert torch.allclose(scaled_BT * algorithm.max_seq_len, advantage_BT / len(UIDS))


def _in_another_process():
    utils = importlib.import_module(HOME)
    assert "grpo_ustat.integrations.skyrl" not in sys.modules
    results = [
        utils.compute_advantages_and_returns(REWARDS_BT, MASK_BT, UIDS, name, config=None)
        for name in NAMES
    ]
    importlib.import_module("grpo_ustat.integrations.skyrl")
    return results, utils.AdvantageEstimatorRegistry.list_available()
