"""Models by name: embedded, cached, folders, hub ids; and code that comes with a model."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import toys
import yaml
from commands import CONF, compose, run
from fakes import random_policy
from launching import finished
from transformers import AutoModelForCausalLM, Qwen2Config

from grpo_ustat.config.identity import folder_name, weights_fingerprint
from grpo_ustat.config.model import cache_folder, model_folder
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.mse.pool_store import draws_of
from grpo_ustat.policy.loading import load_policy, resolve, train_only

TOOLS = Path(__file__).parents[2] / "scripts/tools"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_USTAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_is_where_it_was_asked_for(monkeypatch):
    for name in ("GRPO_USTAT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_folder() == Path.home() / ".cache" / "grpo_ustat"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/grpo_ustat")
    monkeypatch.setenv("GRPO_USTAT_CACHE", "~/models")
    assert cache_folder() == Path.home() / "models"


def test_a_cached_model_is_made_by_its_script_first(cache):
    with pytest.raises(ConfigError) as caught:
        compose("train", "model=smollm2_135m")
    assert "python scripts/tools/fetch_smollm2.py" in str(caught.value)
    assert str(cache) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="choose from cached:smollm2-135m"):
        compose("train", "model.model_name_or_path=cached:../secrets")


def test_a_cached_model_is_read_from_there(cache):
    toys.folder(cache / "smollm2-135m")
    config = compose("train", "model=smollm2_135m")
    name = config.model.model_name_or_path
    assert resolve(name) == str(model_folder(name)) == str(cache / "smollm2-135m")
    assert weights_fingerprint(name) == weights_fingerprint(str(cache / "smollm2-135m"))
    one, other = load_policy(name), load_policy(str(cache / "smollm2-135m"))
    assert all(
        torch.equal(a, b)
        for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True)
    )
    (cache / "smollm2-135m" / "model.safetensors").write_bytes(b"other")
    assert weights_fingerprint(name) != weights_fingerprint("embedded:tiny")


WIDTHS = {  # hidden, intermediate, heads, of the public config.json files
    "qwen2_5_0_5b": (896, 4864, 14),
    "qwen2_5_0_5b_instruct": (896, 4864, 14),
    "qwen2_5_1_5b_instruct": (1536, 8960, 12),
    "qwen2_5_math_7b": (3584, 18944, 28),
}


@pytest.mark.parametrize("name", WIDTHS)
def test_sizes_are_those_of_the_architecture(name):
    hidden, intermediate, heads = WIDTHS[name]
    model = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
    size, width = model["size"], hidden // heads
    config = Qwen2Config(
        hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads,
        num_hidden_layers=size["layers"], num_key_value_heads=size["kv_width"] // width,
        vocab_size=size["vocabulary"], tie_word_embeddings="7b" not in name,
    )  # fmt: skip
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in built.parameters()) == size["parameters"]
    keys = built.model.layers[0].self_attn.k_proj
    assert keys.out_features == size["kv_width"] and size["kv_width"] % width == 0


def test_no_shipped_file_trusts_code():
    files = [yaml.safe_load(file.read_text()) for file in (CONF / "model").glob("*.yaml")]
    assert len(files) >= 9 and all(file["trust_remote_code"] is False for file in files)


def test_attention_is_chosen_by_name(tmp_path):
    path = str(toys.folder(tmp_path / "m"))
    for name in ("eager", "sdpa"):
        policy = load_policy(path, attn_implementation=name)
        assert policy.model.config._attn_implementation == name
    with pytest.raises(ConfigError, match="unknown model.attn_implementation 'org/kernel'"):
        compose("train", "model.attn_implementation=org/kernel")
    if not importlib.util.find_spec("flash_attn"):
        with pytest.raises(ConfigError) as caught:
            load_policy(path, attn_implementation="flash_attention_2")
        assert "flash" in str(caught.value).lower() and "\n" not in str(caught.value)


def test_code_of_a_model_runs_only_where_it_is_trusted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    path = str(toys.with_own_code(tmp_path / "m"))
    with pytest.raises(ConfigError, match="add model.trust_remote_code=true to the command line"):
        load_policy(path)
    assert "code of the model runs" not in capsys.readouterr().out
    policy = load_policy(path, trust_remote_code=True)
    assert "code of the model runs" in capsys.readouterr().out
    assert type(policy.model).__name__ == "OwnForCausalLM"


OVERLAY = """
# @package _global_
model:
  trust_remote_code: true
"""
SWEEP = """
# @package _global_
hydra:
  sweeper:
    params:
      model.trust_remote_code: true
"""


@pytest.mark.slow
def test_trust_is_not_taken_from_a_file(tmp_path):
    """Neither from an experiment nor from a sweep's own parameters in one."""
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    given = ("--config-dir", str(tmp_path / "conf"), "debug=prompts")
    (tmp_path / "conf" / "experiment" / "own.yaml").write_text(OVERLAY)
    code, out, err = run("train", *given, "experiment=own", cwd=tmp_path)
    assert code == 2 and "trust_remote_code=true in a configuration file" in err and not out
    code, out, _ = run(
        "train", *given, "experiment=own", "model.trust_remote_code=true", cwd=tmp_path
    )
    assert code == 0 and "prompt 1" in out
    (tmp_path / "conf" / "experiment" / "own.yaml").write_text(SWEEP)
    code, _, err = run("train", *given[:2], "-m", "experiment=own", cwd=tmp_path)
    assert code == 2 and "trust_remote_code=true in a configuration file" in err
    assert not list(tmp_path.glob("outputs/**/code.json"))


@pytest.mark.slow
def test_a_model_with_code_trains_where_the_command_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    path = toys.with_own_code(tmp_path / "m")
    given = (
        "debug=train",
        "model=hub",
        f"model.model_name_or_path={path}",
        "max_completion_length=8",
    )
    code, said = finished("train", *given, cwd=tmp_path)
    assert code == 2 and "trust_remote_code=true to the command line" in said
    assert "Traceback" not in said
    code, out, err = run("train", *given, "model.trust_remote_code=true", cwd=tmp_path)
    assert code == 0 and "code of the model runs" in out, err


@pytest.fixture
def fetch(monkeypatch):
    """The script, with nothing to download and little to convert."""
    spec = importlib.util.spec_from_file_location("fetch_smollm2", TOOLS / "fetch_smollm2.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made = []

    def convert_model(file, out, dtype):
        out.mkdir()
        (out / "config.json").write_text(dtype)
        made.append(out)

    monkeypatch.setattr(script, "download", lambda folder: folder / "file.gguf")
    monkeypatch.setattr(script, "find_spec", lambda name: sys)
    monkeypatch.setattr(script, "convert_model", convert_model)
    monkeypatch.setattr(
        script, "convert_tokenizer", lambda file, out: (out / "tokenizer.json").write_text("")
    )
    script.made = made
    return script


def test_fetching_makes_the_cached_model_once(fetch, cache, capsys):
    fetch.main([])
    fetch.main([])
    assert len(fetch.made) == 1 and capsys.readouterr().out.count("model=smollm2_135m") == 2
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m"]
    assert compose("train", "model=smollm2_135m").model.name == "smollm2_135m"
    fetch.main([str(cache / "other"), "--dtype", "bfloat16"])
    assert (cache / "other" / "config.json").read_text() == "bfloat16"
    with pytest.raises(SystemExit, match="is not an empty folder"):
        fetch.main([str(cache / "other")])


def test_interrupted_fetching_leaves_no_half_made_model(fetch, cache, monkeypatch):
    def interrupted(file, out):
        assert (out / "config.json").is_file()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(fetch, "convert_tokenizer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch.main([])
    assert not list(cache.iterdir())
    fetch.main([])
    assert (cache / "smollm2-135m" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    "file, key",
    [
        ("config.json", "rope_theta"),
        ("generation_config.json", "eos_token_id"),
        ("tokenizer_config.json", "chat_template"),
    ],
)
def test_whatever_changes_prompts_or_draws_is_another_run(tmp_path, file, key):
    shutil.copytree(model_folder("embedded:tiny_base"), tmp_path / "model")
    path = tmp_path / "model" / file
    names = [folder_name(local(tmp_path / "model"))]
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {key: "other"}))
    names.append(folder_name(local(tmp_path / "model")))
    assert len(set(names)) == 2


@pytest.mark.slow
def test_a_size_that_only_costs_are_estimated_from_is_the_same_run_and_pool(tmp_path):
    given = ("model=tiny_base", "model.size.parameters=7")
    assert folder_name(compose("train", *given)) == folder_name(compose("train", given[0]))
    assert draws_of(compose("mse", *given)) == draws_of(compose("mse", given[0]))


def local(folder):
    return compose("train", "model=hub", f"model.model_name_or_path={folder}")


def test_a_part_of_a_policy_is_what_is_trained():
    model = random_policy(tied=True).model
    train_only(model, "self_attn|norm")
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("self_attn" in name or "norm" in name)
    train_only(model, "norm")  # of what was left
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert names and all("norm" in name for name in names)


def test_an_expression_that_fits_nothing_names_what_there_is():
    message = "study.parameters=atn fits none of the model's .* such as model.embed_tokens"
    with pytest.raises(ConfigError, match=message):
        train_only(random_policy(tied=True).model, "atn")
