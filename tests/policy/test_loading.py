"""Models by name: embedded, cached, folders, hub ids; and code that comes with a model."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toys
from architectures import ARCHITECTURES, build
from commands import CONF, compose, run
from fakes import random_policy
from golden import naming
from launching import finished
from safetensors.torch import load_file, save_file
from slow_cases import slow_after
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from grpo_ustat.config.identity import folder_name, weights_fingerprint
from grpo_ustat.config.load import values_of
from grpo_ustat.config.model import cache_folder, check_weights, model_folder, weight_files
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.mse.pool_store import draws_of
from grpo_ustat.policy.configured import check_parameters, train_only
from grpo_ustat.policy.loading import _model, load_policy
from grpo_ustat.policy.source import resolve

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


@pytest.mark.slow(minutes=0.02)
def test_a_cached_model_is_made_by_its_script_first(cache):
    with pytest.raises(ConfigError) as caught:
        compose("train", "model=smollm2_135m")
    assert "python scripts/tools/fetch_smollm2.py" in str(caught.value)
    assert str(cache) in str(caught.value) and "\n" not in str(caught.value)


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


WIDTHS = {  # hidden, intermediate, heads, tokens, of the public config.json files
    "qwen2_5_0_5b": (896, 4864, 14, 151936),
    "qwen2_5_0_5b_instruct": (896, 4864, 14, 151936),
    "qwen2_5_1_5b_instruct": (1536, 8960, 12, 151936),
    "qwen2_5_math_7b": (3584, 18944, 28, 152064),
}


@pytest.mark.parametrize("name", WIDTHS)
def test_sizes_are_those_of_the_architecture(name):
    hidden, intermediate, heads, tokens = WIDTHS[name]
    model = values_of("model", name)
    size, width = model["size"], hidden // heads
    config = Qwen2Config(
        hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads,
        num_hidden_layers=size["layers"], num_key_value_heads=size["kv_width"] // width,
        vocab_size=tokens, tie_word_embeddings="7b" not in name,
    )  # fmt: skip
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in built.parameters()) == size["parameters"]
    keys = built.model.layers[0].self_attn.k_proj
    assert keys.out_features == size["kv_width"] and size["kv_width"] % width == 0


def test_no_shipped_file_trusts_code():
    files = [values_of("model", file.stem) for file in (CONF / "model").glob("*.yaml")]
    assert len(files) >= 9 and all(file["trust_remote_code"] is False for file in files)


def test_attention_is_chosen_by_name(tmp_path):
    path = str(toys.folder(tmp_path / "m"))
    for name in ("eager", "sdpa"):
        policy = load_policy(path, attn_implementation=name)
        assert policy.model.config._attn_implementation == name
    if not importlib.util.find_spec("flash_attn"):
        with pytest.raises(ConfigError) as caught:
            load_policy(path, attn_implementation="flash_attention_2")
        assert "flash" in str(caught.value).lower() and "\n" not in str(caught.value)


def test_code_of_a_model_runs_only_where_it_is_trusted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    path = str(toys.with_own_code(tmp_path / "m"))
    with pytest.raises(ConfigError, match="model.trust_remote_code=true"):
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
    assert code == 2 and "trust_remote_code=true" in err and not out
    code, out, _ = run(
        "train", *given, "experiment=own", "model.trust_remote_code=true", cwd=tmp_path
    )
    assert code == 0 and "prompt 1" in out
    (tmp_path / "conf" / "experiment" / "own.yaml").write_text(SWEEP)
    code, _, err = run("train", *given[:2], "-m", "experiment=own", cwd=tmp_path)
    assert code == 2 and "trust_remote_code=true" in err
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
    assert code == 2 and "trust_remote_code=true" in said
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

    def convert_model(file, out):
        out.mkdir()
        (out / "config.json").write_text("{}")
        shutil.copy(model_folder("embedded:tiny") / "model.safetensors", out)
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
    assert len(fetch.made) == 1 and "model=smollm2_135m" in capsys.readouterr().out
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m"]
    assert compose("train", "model=smollm2_135m").model.name == "smollm2_135m"
    fetch.main([str(cache / "other")])
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


def altered(folder, change_weights=None, **config):
    """A copy of the embedded `tiny`, its weights or config.json changed."""
    shutil.copytree(model_folder("embedded:tiny"), folder)
    if change_weights:
        weights = load_file(folder / "model.safetensors")
        change_weights(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | config))
    return str(folder)


def spoil(weights):
    weights["model.norm.weight"][3] = torch.nan


def shorten(weights):
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:-2].clone()


NORM, UP = "model.layers.2.input_layernorm.weight", "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    "change_weights, config, message",
    [
        (lambda w: w.pop(NORM), {}, f"the checkpoint lacks {NORM}, which config.json needs"),
        (lambda w: w.pop("model.embed_tokens.weight"), {},
         "lacks model.embed_tokens.weight and 1 more"),
        (None, {"tie_word_embeddings": False}, "lacks lm_head.weight, .*tie_word_embeddings=true"),
        (None, {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5},
         r"lacks model\.layers\.4\..* and 11 more"),
        (lambda w: w.update({f"{UP}.bias": torch.ones(192)}), {},
         f"the checkpoint contains {UP}.bias, but the model of config.json has no such weight"),
        (None, {"intermediate_size": 96},
         r"proj.weight has shape \[64, 192\] in the checkpoint, but \[64, 96\] by config.json"),
        (None, {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
         r"contains model\.layers\.3\..* and 11 more, but the"),
        (lambda w: w.update({NORM: torch.ones(64, dtype=torch.int8)}), {}, f"{NORM} has type I8"),
        (None, {"num_attention_heads": 0}, "no model could be loaded from"),
        (None, {"num_hidden_layers": 5}, "`num_hidden_layers` .5. must be equal"),
        (spoil, {}, "model.norm.weight is not finite"),
        (shorten, {"vocab_size": 97}, "its tokenizer has 99 tokens and its embedding 97 rows"),
    ],
)  # fmt: skip
def test_weights_that_are_not_the_models_are_refused(change_weights, config, message, tmp_path):
    """transformers draws a missing one at random, in each process anew, and leaves others out."""
    with pytest.raises(ConfigError, match=message) as caught:
        load_policy(altered(tmp_path / "model", change_weights, **config))
    assert "\n" not in str(caught.value)


def test_weights_beside_the_model_are_named(tmp_path):
    """As value heads are, and layers of another kind."""
    beside = {"v_head.summary.weight": torch.ones(1, 64), "model.layers.4.a.weight": torch.ones(2)}
    with pytest.warns(UserWarning, match="model.layers.4.a.weight and 1 more"):
        policy = load_policy(altered(tmp_path / "model", lambda w: w.update(beside)))
    weights, others = (x.model.state_dict() for x in (policy, load_policy("embedded:tiny")))
    assert all(torch.equal(weights[name], others[name]) for name in others)


def test_buffers_that_a_checkpoint_keeps_are_no_weights(tmp_path, recwarn):
    """Masks of bytes in checkpoints of GPT-NeoX, and frequencies of positions in old ones."""
    kept = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
            "model.rotary_emb.inv_freq": torch.ones(8)}  # fmt: skip
    load_policy(altered(tmp_path / "model", lambda w: w.update(kept)))
    assert not [one for one in recwarn if "checkpoint" in str(one.message)]
    mask = {"model.layers.0.self_attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8)}
    with pytest.warns(UserWarning, match="model.layers.0.self_attn"):
        load_policy(altered(tmp_path / "masks", lambda w: w.update(mask)))
    torch.manual_seed(0)
    config = GPTNeoXConfig(vocab_size=99, hidden_size=16, intermediate_size=32,
                           num_hidden_layers=2, num_attention_heads=2, eos_token_id=1)  # fmt: skip
    folder = Path(altered(tmp_path / "neox"))
    GPTNeoXForCausalLM(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load_policy(str(folder))


@pytest.mark.parametrize("name", ["model.safetensors", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("kept", [0, 4, 0.5])
def test_a_cut_file_is_one_line(name, kept, tmp_path):
    folder = altered(tmp_path / "model")
    whole = Path(folder, name).read_bytes()
    Path(folder, name).write_bytes(whole[: int(kept * len(whole)) if kept < 1 else kept])
    with pytest.raises(ConfigError, match="is incomplete or damaged") as caught:
        load_policy(folder)
    assert "\n" not in str(caught.value)


DAMAGES = {
    "empty": lambda whole: b"",
    "cut in the header": lambda whole: whole[:100],
    "cut": lambda whole: whole[: len(whole) // 2],
    "longer": lambda whole: whole + b"0",
    "a pointer": lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
    "a page": lambda whole: b"<!DOCTYPE html><html>404</html>" * 9,
}


def sharded(folder):
    """`tiny` in several files."""
    altered(folder)
    model = load_policy(str(folder)).model
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="200KB")
    return sorted(folder.glob("model-*-of-*.safetensors"))


def with_adapters_of(base, folder):
    """A folder of LoRA adapters, of which only what is read first is there."""
    folder.mkdir()
    stored = {"peft_type": "LORA", "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(stored))
    save_file({"x": torch.ones(99)}, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("damage", slow_after(1, DAMAGES))
@pytest.mark.parametrize("place", ["whole", "shard", "adapters", "base of adapters"])
def test_weights_that_cannot_be_read_are_one_line_of_every_command(place, damage, tmp_path):
    """Before anything is loaded, in dry runs too, and in the same words as loading has."""
    folder = tmp_path / "model"
    file = sharded(folder)[1] if place == "shard" else Path(altered(folder), "model.safetensors")
    typed = folder
    if "adapters" in place:
        typed = with_adapters_of(folder, tmp_path / "adapters")
        file = file if place == "base of adapters" else typed / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(DAMAGES[damage](whole))
    lines = set()
    for entry in ("mse", "train"):
        for dry_run in ("true", "false"):
            with pytest.raises(ConfigError, match="incomplete or damaged") as caught:
                compose(entry, "model=hub", f"model.model_name_or_path={typed}",
                        f"dry_run={dry_run}")  # fmt: skip
            lines.add(str(caught.value))
    assert len(lines) == 1 and "\n" not in (line := lines.pop()) and file.name in line
    if place != "base of adapters":
        with pytest.raises(ConfigError, match=f"study.scored_by={typed}: .*{file.name}"):
            compose("mse", "model=tiny", f"study.scored_by={typed}")
    file.write_bytes(whole)
    check_weights(str(typed))


def test_weights_that_are_there_twice_are_refused(tmp_path):
    """transformers reads an old model.safetensors and passes over newer shards."""
    folder = tmp_path / "model"
    shards = sharded(folder)
    assert weight_files(folder) == shards
    index = folder / "model.safetensors.index.json"
    listed = index.read_text()
    for text in ("", listed[: len(listed) // 2], "[]", "{}", '{"weight_map": []}'):
        index.write_text(text)
        with pytest.raises(ConfigError, match="index.json"):
            weight_files(folder)
    index.write_text(listed)
    shutil.copy(model_folder("embedded:tiny_base") / "model.safetensors", folder)
    for remove in ((), (index,)):
        for file in remove:
            file.unlink()
        for read in (lambda: compose("mse", "model=hub", f"model.model_name_or_path={folder}"),
                     lambda: load_policy(str(folder))):  # fmt: skip
            with pytest.raises(ConfigError, match=f"model.safetensors.*{shards[0].name}"):
                read()
    for shard in shards:
        shard.unlink()
    index.write_text(listed)
    assert weight_files(folder) == [folder / "model.safetensors"]
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=naming(shards[0].name, "index.json")):
        check_weights(str(folder))
    index.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=naming("model.safetensors", "pytorch_model.bin")):
        check_weights(str(folder))


def test_a_padding_token_without_a_row_is_never_read(tmp_path):
    """Trainers of base models add one to the tokenizer alone."""
    folder = altered(tmp_path / "model")
    tokenizer = load_policy(folder).tokenizer
    tokenizer.add_special_tokens({"pad_token": "<added>"})
    tokenizer.save_pretrained(folder)
    policy = load_policy(folder)
    assert policy.tokenizer.pad_token_id == 99 and policy.pad_token in policy.end_tokens


def test_outputs_that_config_json_asks_for_do_not_reach_a_forward_pass(tmp_path):
    flags = {"output_hidden_states": True, "output_attentions": True, "return_dict": False}
    policy = load_policy(altered(tmp_path / "model", **flags))
    output = policy.model(torch.tensor([[5, 6]]), attention_mask=torch.ones(1, 2))
    assert output.hidden_states is None and output.attentions is None
    assert torch.equal(
        output.logits, load_policy("embedded:tiny").model(torch.tensor([[5, 6]])).logits
    )


@pytest.mark.parametrize(
    "config_class, model_class, sizes",
    [
        (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4}),
        (Qwen3MoeConfig, Qwen3MoeForCausalLM,
         {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}),
    ],
)  # fmt: skip
def test_experts_read_a_token_after_cached_ones_where_a_trainer_left_the_routers_loss_on(
    config_class, model_class, sizes, tmp_path
):
    """transformers computes that loss from the mask of all tokens, cached ones too."""
    folder = altered(tmp_path / "model")
    config = config_class(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=1, pad_token_id=0,
        output_router_logits=True, **sizes,
    )  # fmt: skip
    model_class(config).save_pretrained(folder)
    policy = load_policy(folder)
    tokens, mask = torch.tensor([[5, 6, 7]]), torch.ones(1, 3)
    cache = policy.model(tokens[:, :2], attention_mask=mask[:, :2]).past_key_values
    last = policy.model(tokens[:, 2:], attention_mask=mask, past_key_values=cache).logits[0, -1]
    torch.testing.assert_close(last, policy.model(tokens, attention_mask=mask).logits[0, -1])


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_no_architecture_as_it_is_saved_is_refused(tied, tmp_path, recwarn):
    for kind in ARCHITECTURES:
        build(kind, tied=tied).save_pretrained(tmp_path / kind)
        checkpoint = _model(str(tmp_path / kind), revision=None, merge=True)
        shutil.rmtree(tmp_path / kind)
        assert list(checkpoint.parameters()), kind
    assert not [one for one in recwarn if "checkpoint" in str(one.message)]


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
    with pytest.raises(ConfigError, match=naming("study.parameters=atn", "model.embed_tokens")):
        train_only(random_policy(tied=True).model, "atn")


@pytest.mark.parametrize("pattern", ["mlp", "^model.layers.[01].*norm"])
def test_an_expression_is_checked_before_the_weights_are_loaded(pattern, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    options = compose("mse", f"study.parameters='{pattern}'").policy_options
    check_parameters(options)
    with pytest.raises(ConfigError, match=naming("study.parameters=nrom", "norm")):
        check_parameters(replace(options, parameters="nrom"))
