"""What a model's own files name is not loaded, and what they hold is checked, in one line."""

from __future__ import annotations

import json

import pytest

from grpo_ustat.config.model import ASSETS, check_model, check_stored_config
from grpo_ustat.config.schema import ConfigError

KERNEL = "kernels-community/flash-attn3"
REFUSED = {
    "a kernel": {"attn_implementation": KERNEL},
    "a kernel of transformers' own key": {"_attn_implementation": f"{KERNEL}:main"},
    "a kernel of the experts": {"experts_implementation": KERNEL},
    "a kernel of a part": {"text_config": {"attn_implementation": KERNEL}},
    "a kernel by part": {"attn_implementation": {"text_config": KERNEL}},
    "a kernel beside": {"attn_implementation": f"paged|{KERNEL}"},
    "no mapping": [1],
}


def model(folder, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text)
    return str(folder)


@pytest.mark.parametrize("stored", REFUSED.values(), ids=REFUSED)
def test_a_config_json_that_no_model_has_is_one_line(stored, tmp_path):
    with pytest.raises(ConfigError) as refused:
        check_model(model(tmp_path / "m", json.dumps(stored)))
    assert len(str(refused.value).splitlines()) == 1 and str(tmp_path) in str(refused.value)
    if "kernel" in json.dumps(stored):
        assert "model.trust_remote_code=true" in str(refused.value)
        check_model(model(tmp_path / "m", json.dumps(stored)), trusted=True)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", ""])
def test_a_damaged_config_json_is_one_line(text, tmp_path):
    with pytest.raises(ConfigError, match="is damaged"):
        check_model(model(tmp_path / "m", text))


def test_models_as_they_are_pass():
    for file in ASSETS.glob("*/config.json"):
        check_stored_config(json.loads(file.read_text()), "x")
    usual = {
        "attn_implementation": "flash_attention_2",
        "num_hidden_layers": 126,
        "pad_token_id": 9,
    }
    usual |= {"sliding_window_size": None, "num_labels": 2, "hidden_size": 16384}
    check_stored_config(usual | {"text_config": {"attn_implementation": None}}, "x")


def adapters(folder, base, **changes):
    folder.mkdir(exist_ok=True)
    stored = {"peft_type": "LORA", "base_model_name_or_path": base} | changes
    (folder / "adapter_config.json").write_text(json.dumps(stored))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return str(folder)


def test_adapters_whose_base_is_themselves_are_one_line(tmp_path):
    own = tmp_path / "a"
    for base in (str(own), f"{own}/../a"):
        with pytest.raises(ConfigError, match="is the folder of the adapters"):
            check_model(adapters(own, base))
    adapters(own, str(tmp_path / "b"))
    with pytest.raises(ConfigError, match="the same adapters"):
        check_model(adapters(tmp_path / "b", str(own)))


@pytest.mark.parametrize("base, changes", [(7, {}), (["x"], {}), ("x/y", {"revision": 3})])
def test_adapters_that_name_no_text_are_one_line(base, changes, tmp_path):
    with pytest.raises(ConfigError, match="must be strings"):
        check_model(adapters(tmp_path / "a", base, **changes))


def test_adapters_without_safetensors_are_refused_whatever_else_is_there(tmp_path):
    folder = adapters(tmp_path / "a", "x/y")
    (tmp_path / "a/adapter_model.safetensors").rename(tmp_path / "a/adapter_model.bin")
    with pytest.raises(ConfigError, match=r"no adapter_model.safetensors"):
        check_model(folder)
