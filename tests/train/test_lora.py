"""A checkpoint of LoRA adapters is a policy like any other, for a study or for more training."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from commands import compose
from fakes import random_rollouts
from golden import naming
from safetensors.torch import load_file, save_file
from training_runs import config_of

from grpo_ustat.config.identity import weights_fingerprint
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.adapters import with_adapters
from grpo_ustat.policy.loading import load_policy
from grpo_ustat.policy.logprobs import pack, token_logprobs
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.train import checkpoint
from grpo_ustat.train.setup import set_up

ROLLOUTS = random_rollouts([5, 3, 8], group_size=2, longest=6)


def logprobs(policy):
    rows = pack(ROLLOUTS, np.arange(6), policy.pad_token, policy.model.device)
    with torch.no_grad():
        return token_logprobs(policy.model, rows)


def saved(folder, *overrides):
    """Adapters as after training, none of them zero, and their checkpoint."""
    folder.mkdir(exist_ok=True)
    config = config_of("lora=r16", *overrides)
    policy = set_up(config, RunFolder(folder, config)).policy
    torch.manual_seed(1)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.02)
    card = {"README.md": "the run's own card"}
    return policy, checkpoint.write_checkpoint(folder, 1, policy, {}, {}, {}, card)


def told(folder, **changes):
    """Change what adapters say of themselves."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def assert_same_policy(loaded, trained):
    torch.testing.assert_close(logprobs(loaded), logprobs(trained), rtol=0, atol=2e-5)
    assert loaded.end_tokens == trained.end_tokens
    assert not any("lora" in name for name, _ in loaded.model.named_parameters())
    assert all(p.requires_grad for p in loaded.model.parameters())


@pytest.mark.slow
def test_a_checkpoint_of_adapters_loads_as_the_policy_that_was_trained(tmp_path):
    trained, folder = saved(tmp_path)
    assert (folder / "README.md").read_text() == "the run's own card"  # in the place of PEFT's
    start = load_policy("embedded:tiny_base")
    assert (logprobs(trained) - logprobs(start)).abs().max() > 0.01
    assert_same_policy(load_policy(str(folder)), trained)
    told(folder, base_model_name_or_path="embedded:tiny_base")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert_same_policy(load_policy(str(folder)), trained)


@pytest.mark.slow
def test_adapters_on_merged_adapters_name_them_as_their_base(tmp_path):
    trained, folder = saved(tmp_path / "one")
    model = ("model=hub", f"model.model_name_or_path={folder}")
    again, above = saved(tmp_path / "two", *model)
    with again.model.disable_adapter():
        torch.testing.assert_close(logprobs(again), logprobs(trained), rtol=0, atol=2e-5)
    assert (logprobs(again) - logprobs(trained)).abs().max() > 0.01
    assert_same_policy(load_policy(str(above)), again)


def test_adapters_on_a_tied_embedding_are_not_sampled_by_vllm(tmp_path):
    """vLLM ties the weights anew, and would sample from another policy."""
    config = config_of("lora=r16", "lora.target_modules=embed_tokens")
    model = load_policy("embedded:tiny").model
    with pytest.raises(ConfigError, match=naming("embed_tokens", "rollout=local")):
        with_adapters(config.lora, model, seed=0, revision=None, rollout="vllm")


def test_a_checkpoint_names_the_revision_of_its_base(tmp_path):
    _, folder = saved(tmp_path, "model.revision=abc")
    stored = json.loads((folder / "adapter_config.json").read_text())
    assert stored["revision"] == "abc" and stored["base_model_name_or_path"].endswith("/tiny_base")


@pytest.mark.slow
def test_what_adapters_are_and_what_they_are_added_to_is_another_run(tmp_path):
    _, folder = saved(tmp_path)
    found = [weights_fingerprint(str(folder))]
    told(folder, lora_alpha=16)
    found.append(weights_fingerprint(str(folder)))
    base = tmp_path / "base"
    load_policy("embedded:tiny_base").model.save_pretrained(base)
    told(folder, base_model_name_or_path=str(base))
    found.append(weights_fingerprint(str(folder)))
    weights = load_file(base / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, base / "model.safetensors")
    found.append(weights_fingerprint(str(folder)))
    weights = load_file(folder / checkpoint.ADAPTERS_FILE)
    save_file(
        {name: value + 1 for name, value in weights.items()}, folder / checkpoint.ADAPTERS_FILE
    )
    found.append(weights_fingerprint(str(folder)))
    assert len(set(found)) == 5


WRONG = {
    "base": (dict(base_model_name_or_path="/not/there"), "base model of the LoRA adapters"),
    "embedded": (dict(base_model_name_or_path="embedded:x"), "choose from embedded:tiny"),
    "no base": (dict(base_model_name_or_path=None), "base_model_name_or_path is missing"),
    "kind": (dict(peft_type="IA3"), "peft_type=IA3 cannot be loaded: use LORA"),
}


@pytest.mark.slow
def test_adapters_that_cannot_be_loaded_are_refused_in_one_line(tmp_path, monkeypatch):
    _, folder = saved(tmp_path)
    model = ("model=hub", f"model.model_name_or_path={folder}")
    assert compose("mse", *model).model.model_name_or_path == str(folder)
    right = (folder / "adapter_config.json").read_text()
    for changes, message in WRONG.values():
        told(folder, **changes)
        with pytest.raises(ConfigError, match=message):
            compose("mse", *model)
        (folder / "adapter_config.json").write_text(right)
    weights = load_file(folder / checkpoint.ADAPTERS_FILE)
    first = next(iter(weights))
    for fewer in (
        {k: v for k, v in weights.items() if k != first},
        weights | {"more": torch.ones(1)},
    ):
        save_file(fewer, folder / checkpoint.ADAPTERS_FILE)
        with pytest.raises(ConfigError, match="do not fit their base model"):
            load_policy(str(folder))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="with LoRA adapters needs peft: pip install"):
        load_policy(str(folder))
