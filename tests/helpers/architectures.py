"""Small random causal language models of many architectures, built from their config classes."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 29
BEFORE_5 = transformers.__version__ < "5"  # experts are always eager

_SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)
_GATED = dict(intermediate_size=24)
_GROUPED = dict(intermediate_size=24, num_key_value_heads=2)
_SLIDING = ["sliding_attention", "full_attention"]

# name: (model_type, options)
ARCHITECTURES = {
    "llama": ("llama", _GROUPED),
    "llama-biases": ("llama", dict(_GROUPED, attention_bias=True, mlp_bias=True)),
    "llama-eager": ("llama", dict(_GROUPED, attn_implementation="eager")),
    "qwen2": ("qwen2", _GROUPED),
    "qwen3": ("qwen3", dict(_GROUPED, head_dim=6)),
    "mistral": ("mistral", dict(_GROUPED, sliding_window=3)),
    "gemma": ("gemma", dict(_GROUPED, head_dim=6)),
    "gemma2": (
        "gemma2",
        dict(
            _GROUPED,
            head_dim=6,
            sliding_window=3,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            attn_implementation="eager",
        ),
    ),
    "gemma3": ("gemma3_text", dict(_GROUPED, head_dim=6, sliding_window=3, layer_types=_SLIDING)),
    "gemma3n": (
        "gemma3n_text",
        dict(
            _GROUPED,
            head_dim=6,
            sliding_window=3,
            layer_types=_SLIDING,
            hidden_size_per_layer_input=6,
            vocab_size_per_layer_input=VOCAB,
            num_kv_shared_layers=0,
            laurel_rank=4,
            altup_num_inputs=2,
            activation_sparsity_pattern=[0.0, 0.0],
        ),
    ),
    "gemma4": (
        "gemma4_text",
        dict(
            _GROUPED,
            head_dim=6,
            global_head_dim=6,
            sliding_window=3,
            layer_types=_SLIDING,
            hidden_size_per_layer_input=6,
            vocab_size_per_layer_input=VOCAB,
            num_kv_shared_layers=0,
        ),
    ),
    "granite": (
        "granite",
        dict(
            _GROUPED,
            embedding_multiplier=1.7,
            attention_multiplier=0.4,
            residual_multiplier=0.6,
            logits_scaling=1.3,
        ),
    ),
    "cohere": ("cohere", dict(_GROUPED, logit_scale=0.5, use_qk_norm=True)),
    "olmo2": ("olmo2", _GROUPED),
    "starcoder2": ("starcoder2", _GROUPED),
    "starcoder2-no-biases": ("starcoder2", dict(_GROUPED, use_bias=False)),
    "stablelm": ("stablelm", dict(_GROUPED, use_qkv_bias=True)),
    "stablelm-qk-norms": ("stablelm", dict(_GROUPED, qk_layernorm=True)),
    "nemotron": ("nemotron", _GROUPED),
    "phi": ("phi", dict(_GATED, qk_layernorm=True)),
    "phi3": ("phi3", _GROUPED),
    "gpt2": ("gpt2", {}),
    "gpt_neo": (
        "gpt_neo",
        dict(attention_types=[[["global", "local"], 1]], window_size=3, intermediate_size=24),
    ),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gptj": ("gptj", dict(rotary_dim=2)),
    "gpt_neox": ("gpt_neox", _GATED),
    "gpt_neox-sequential": (
        "gpt_neox",
        dict(_GATED, use_parallel_residual=False, attention_bias=False),
    ),
    "opt": ("opt", dict(ffn_dim=24)),
    "opt-projected": ("opt", dict(ffn_dim=24, word_embed_proj_dim=12)),
    "opt-no-biases": (
        "opt",
        dict(ffn_dim=24, enable_bias=False, layer_norm_elementwise_affine=False),
    ),
    "falcon": ("falcon", {}),
    "falcon-alibi": (
        "falcon",
        dict(alibi=True, bias=True, multi_query=False, parallel_attn=False),
    ),
    "falcon-grouped": ("falcon", dict(new_decoder_architecture=True, num_kv_heads=2)),
    "bloom": ("bloom", {}),
    "mpt": ("mpt", dict(expansion_ratio=2)),
    "mixtral": ("mixtral", dict(_GROUPED, num_local_experts=4, num_experts_per_tok=2)),
    "qwen2_moe": (
        "qwen2_moe",
        dict(
            _GROUPED,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=12,
        ),
    ),
    "olmoe": ("olmoe", dict(_GROUPED, num_experts=4, num_experts_per_tok=2)),
    "gpt_oss": (
        "gpt_oss",
        dict(
            _GROUPED,
            head_dim=6,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=3,
            layer_types=_SLIDING,
        ),
    ),
    "deepseek_v3": (
        "deepseek_v3",
        dict(
            _GATED,
            num_key_value_heads=4,
            moe_intermediate_size=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=6,
            kv_lora_rank=5,
            qk_nope_head_dim=4,
            qk_rope_head_dim=4,
            v_head_dim=6,
        ),
    ),
    "qwen3_moe": (
        "qwen3_moe",
        dict(_GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
    ),
    "llama4_text": (
        "llama4_text",
        dict(
            _GROUPED,
            head_dim=4,
            intermediate_size_mlp=24,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
    ),
    "biogpt": ("biogpt", _GATED),
    "codegen": ("codegen", dict(rotary_dim=2)),
    "ctrl": ("ctrl", dict(dff=24)),
    "openai-gpt": ("openai-gpt", {}),
    "persimmon": ("persimmon", _GATED),
    "apertus": ("apertus", _GROUPED),
    "lfm2": ("lfm2", dict(_GROUPED, layer_types=["conv", "full_attention"])),
    "mamba": ("mamba", dict(state_size=3, time_step_rank=2)),
    "mamba2": ("mamba2", dict(num_heads=4, head_dim=8, state_size=4, n_groups=2, chunk_size=4)),
    "zamba": (  # tied: two layers share the weights of one attention block, too
        "zamba",
        dict(
            _GROUPED,
            num_hidden_layers=3,
            layers_block_type=["hybrid", "mamba", "hybrid"],
            n_mamba_heads=2,
            mamba_d_state=3,
            mamba_dt_rank=2,
            use_mamba_kernels=False,
        ),
    ),
    "qwen3_next": (
        "qwen3_next",
        dict(
            _GROUPED,
            head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=4,
            linear_value_head_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
        ),
    ),
    "recurrent_gemma": ("recurrent_gemma", dict(_GROUPED, lru_width=16, attention_window_size=8)),
    "rwkv": ("rwkv", dict(context_length=64, attention_hidden_size=16)),
}

# Their recurrent state passes through padding: prompts of one length only.
UNPADDED = {"recurrent_gemma", "rwkv"}

# The most usual ones are fast, their embedding and output weights shared (True) or separate.
# One of each mechanism runs at every push, and the other case of the usual ones; the rest at night.
USUAL = {"llama": True, "gpt2": False}
AT_EVERY_PUSH = {
    "qwen2": True,  # biases of some layers
    "gemma2": True,  # capped logits, sliding windows, norms by 1 + w
    "gemma3n": False,  # an embedding for each layer, several streams, float32 within
    "gpt_oss": True,  # experts that are one parameter, attention sinks
    "deepseek_v3": False,  # latent attention, shared experts
    "opt-projected": False,  # learned positions, projections around the layers
    "bloom": True,  # biases of distance, keys and values in one matrix
    "zamba": True,  # states, and weights that two layers share
    "qwen3_next": False,  # linear attention
    "rwkv": False,  # a state that padding would change
    "ctrl": True,  # not made of transformers' layers
}


def _mark(name, tied):
    """The mark of an architecture's test by its cost and by what it shows."""
    if USUAL.get(name) is tied:
        return ()
    often = name in USUAL or AT_EVERY_PUSH.get(name) is tied
    return (pytest.mark.slow if often else pytest.mark.nightly)(minutes=0.01)


CASES = [
    pytest.param(
        name, tied, id=f"{name}-{'tied' if tied else 'untied'}", marks=_mark(name, tied)
    )
    for name in ARCHITECTURES
    for tied in (True, False)
]  # fmt: skip
every_architecture = pytest.mark.parametrize("name, tied", CASES)


def takes_cache_as(name, forward):
    """A forward pass that takes what was read before by this name, whatever transformers calls it;
    by no other.
    """
    own = "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"

    def by_new_name(input_ids, attention_mask=None, position_ids=None, cache=None, **others):
        return forward(input_ids, attention_mask, position_ids, **{own: cache}, **others)

    def by_old_name(
        input_ids, attention_mask=None, position_ids=None, past_key_values=None, **others
    ):
        return by_new_name(input_ids, attention_mask, position_ids, past_key_values, **others)

    return by_new_name if name == "cache" else by_old_name


def build(name, tied, dtype=torch.float64, seed=0):
    """A model in evaluation mode, every parameter moved away from its initial value."""
    kind, options = ARCHITECTURES[name]
    options = dict(options)
    attention = options.pop("attn_implementation", None)
    config = AutoConfig.for_model(kind, **{**_SIZES, **options}, tie_word_embeddings=tied)
    torch.manual_seed(seed)
    eager = {} if BEFORE_5 else {"experts_implementation": "eager"}  # the default has no float64
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, **eager)
    model = model.to(dtype).eval()
    shared = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert shared == tied, name
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model
