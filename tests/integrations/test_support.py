"""What cannot be measured is refused before training, by its name and in one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from trl_room import GRPOTrainer, changed

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.integrations.trl.support import check_trainer


def zero(stage, changes=None):
    trainer = GRPOTrainer()
    config = {"zero_optimization": {"offload_param": {"device": "none"}} | (changes or {})}
    plugin = SimpleNamespace(zero_stage=stage, deepspeed_config=config)
    trainer.accelerator.state.deepspeed_plugin = plugin
    return trainer


def fsdp(cpu_offload=False):
    trainer = GRPOTrainer()
    plugin = SimpleNamespace(fsdp_version=2, cpu_offload=cpu_offload)
    trainer.accelerator.state.fsdp_plugin = plugin
    return trainer


REFUSED = {
    "offload_param.device=cpu": zero(3, {"offload_param": {"device": "cpu"}}),
    "fsdp_offload_params=True": fsdp(cpu_offload=True),
    "cannot be identified": changed(mask_truncated_completions=True, tools=[print]),
    "not SimpleNamespace": SimpleNamespace(),
}


@pytest.mark.parametrize("message", REFUSED)
def test_it_is_refused(message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_trainer(REFUSED[message])
    assert "\n" not in str(caught.value)


def test_another_version_of_trl_is_refused():
    trainer = GRPOTrainer()
    del trainer._logs
    with pytest.raises(ConfigError, match="has no _logs: install TRL 1.16"):
        check_trainer(trainer)


@pytest.mark.parametrize(
    "trainer", [GRPOTrainer(), zero(2), zero(3), fsdp(), changed(top_k=None, top_p=1)]
)
def test_it_is_taken(trainer):
    check_trainer(trainer)
    check_trainer(changed(mask_truncated_completions=True))
    check_trainer(changed(_is_vlm=True, top_k=5))
