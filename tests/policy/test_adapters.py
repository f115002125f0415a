"""Adapters that others trained, of every kind that PEFT calls LoRA: kept or merged as PEFT reads
them, or refused in one line."""

from __future__ import annotations

import json

import pytest
import torch
from fakes import random_rollouts
from scored import agree
from slow_cases import slow_after
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from grpo_ustat.config.model import model_folder
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.adapters import with_stored_adapters
from grpo_ustat.policy.loading import load_policy
from grpo_ustat.policy.scores.backward import trainable
from grpo_ustat.policy.tokenizer import load_tokenizer

peft = pytest.importorskip("peft")

VARIANTS = {
    "plain": {},
    "rank-stabilised": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "biases": {"bias": "lora_only"},
    "all biases": {"bias": "all"},
    "a whole head": {"modules_to_save": ["lm_head"]},
    "ranks by name": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 32}},
    "some layers": {"layers_to_transform": [1]},
    "embeddings": {"target_modules": ["embed_tokens", "v_proj"]},
    "new tokens": {"trainable_token_indices": [3, 5]},
    "PiSSA": {"init_lora_weights": "pissa"},
    "OLoRA": {"init_lora_weights": "olora"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "a bias of B": {"lora_bias": True},
    "a parameter": {"target_modules": [], "target_parameters": ["0.self_attn.q_proj.weight"]},
}


@pytest.fixture
def base(tmp_path):
    """A folder with a Llama of two layers, its linear layers with biases."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def logits(model):
    with torch.no_grad():
        return model(torch.arange(16).view(2, 8)).logits


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_what_peft_reads(variant, base, tmp_path):
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"]} | VARIANTS[variant]
    trained = peft.get_peft_model(loaded(base), peft.LoraConfig(**options))
    for parameter in trained.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter.data, std=0.3)
    trained.save_pretrained(tmp_path / "adapters")
    read = peft.PeftModel.from_pretrained(loaded(base), tmp_path / "adapters").eval()
    ours = with_stored_adapters(loaded(base), str(tmp_path / "adapters"), merge=True)
    torch.testing.assert_close(logits(ours), logits(read), rtol=0, atol=1e-5)
    assert (logits(ours) - logits(loaded(base))).abs().max() > 1e-4
    assert all(parameter.requires_grad for parameter in ours.parameters())
    kept = with_stored_adapters(loaded(base), str(tmp_path / "adapters")).eval()
    torch.testing.assert_close(logits(kept), logits(read), rtol=0, atol=1e-6)
    assert dict(trainable(kept)).keys() == dict(trainable(trained.eval())).keys()


SCORED = {
    "an embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "new tokens": {"trainable_token_indices": [3, 5]},
    "new tokens of both ends": {"trainable_token_indices": {"embed_tokens": [3], "lm_head": [5]}},
    "an embedding and a head": {"target_modules": ["embed_tokens", "lm_head"]},
    "an embedding by DoRA": {"target_modules": ["embed_tokens"], "use_dora": True},
    "a rank-stabilised embedding": {"target_modules": ["embed_tokens"], "use_rslora": True},
    "tied adapters": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "whole ends": {"modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.mark.filterwarnings("ignore:.*tie")
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("variant", slow_after(2, SCORED))
def test_adapters_at_both_ends_have_the_scores_of_autograd(variant, tied, by_layer, tmp_path):
    """Kept as `mse` loads them, in float64, one completion at a time for comparison."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    options = {"r": 3, "target_modules": ["q_proj"]} | SCORED[variant]
    trained = peft.get_peft_model(loaded(tmp_path / "base"), peft.LoraConfig(**options))
    for parameter in trained.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter.data, std=0.3)
    trained.save_pretrained(tmp_path / "adapters")
    model = load_policy(
        str(tmp_path / "adapters"), dtype="float64", merge_adapters=False,
        tokenizer=load_tokenizer("embedded:tiny"),
    ).model  # fmt: skip
    rollouts = random_rollouts([4, 2], group_size=2, longest=5, vocab=16)
    rollouts.tokens_PGT[:, :, 0], rollouts.prompt_tokens[0][1] = 3, 5
    rollouts.tokens_PGT[0, 1, 1], rollouts.mask_PGT[0, 1, 1] = 5, True
    agree(model, rollouts, by_layer=by_layer)


TIED = {
    "the embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "the output layer": {"target_modules": ["lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "both by one adapter": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "DoRA": {"target_modules": ["embed_tokens"], "use_dora": True},
    "a whole embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "a whole head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "new tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    "new tokens of the output layer": {
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"lm_head": [3, 5]},
    },
    "new tokens of both": {
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": [3], "lm_head": [5]},
    },
    "other layers": {"target_modules": ["q_proj", "down_proj"]},
}


@pytest.mark.parametrize("variant", slow_after(3, TIED))
def test_adapters_on_a_tied_embedding_move_what_peft_moves(variant, tmp_path):
    torch.manual_seed(0)
    base, folder = model_folder("embedded:tiny"), str(tmp_path / "adapters")
    assert loaded(base).config.tie_word_embeddings
    trained = peft.get_peft_model(loaded(base), peft.LoraConfig(r=4, **TIED[variant]))
    for parameter in trained.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter.data, std=0.3)
    trained.eval().save_pretrained(folder)
    ours = with_stored_adapters(loaded(base), folder, merge=True)
    torch.testing.assert_close(logits(ours), logits(trained), rtol=1e-5, atol=1e-4)
    kept = with_stored_adapters(loaded(base), folder).eval()
    torch.testing.assert_close(logits(kept), logits(trained), rtol=1e-5, atol=1e-5)
    ours.save_pretrained(tmp_path / "whole")  # which ties weights anew by its config.json
    torch.testing.assert_close(logits(loaded(tmp_path / "whole")), logits(ours))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{"r": 5}, {"r": 0}, {"r": "four"}, {"target_modules": ["nowhere"]}, {"target_modules": 7},
     {"layers_to_transform": [9]}, {"rank_pattern": {"q_proj": 0}}, {"use_dora": True},
     {"modules_to_save": ["nowhere"]}, {"bias": "some"}, {"init_lora_weights": "nonsense"},
     {"runtime_config": 3}, {"unknown_option": 1}, {"lora_alpha": "x"},
     {"corda_config": {}, "init_lora_weights": "corda"}, {"eva_config": {}},
     {"alora_invocation_tokens": [1]}, {"megatron_config": {}}, {"loftq_config": {"x": 1}}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("merge", [False, True], ids=["kept", "merged"])
def test_settings_that_do_not_fit_are_one_line_or_change_nothing(change, merge, base, tmp_path):
    torch.manual_seed(0)
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    peft.get_peft_model(loaded(base), options).save_pretrained(tmp_path / "adapters")
    folder = str(tmp_path / "adapters")
    plain = logits(with_stored_adapters(loaded(base), folder, merge=merge).eval())
    file = tmp_path / "adapters/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    try:
        ours = with_stored_adapters(loaded(base), folder, merge=merge).eval()
    except ConfigError as error:
        assert str(error).startswith("the adapters do not fit") and "\n" not in str(error)
    else:
        torch.testing.assert_close(logits(ours), plain)
