"""Scores of many architectures against one-at-a-time autograd in float64."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from architectures import UNPADDED, VOCAB, build, every_architecture
from fakes import LetterTokenizer, random_rollouts
from peft import LoraConfig, get_peft_model
from scored import agree, all_at_once, assert_close, trainable

from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.logprobs import completion_logprobs, pack
from grpo_ustat.policy.output_layer import body
from grpo_ustat.policy.prompt_sharing import can_read_contiguous
from grpo_ustat.policy.scores.by_layer import LayerByLayer

WHOLE = {"ctrl", "openai-gpt"}  # not made of transformers' layers
FLOAT32 = {"mamba": 1e-7, "mamba2": 1e-7, "gemma3n": 1e-6}  # their layers add in float32


def letters(name="llama"):
    """Three prompts of different lengths, four completions each, with token 0 among the others."""
    lengths = [5, 5, 5] if name in UNPADDED else [2, 6, 4]
    rollouts = random_rollouts(lengths, group_size=4, longest=7, vocab=VOCAB)
    rollouts.tokens_PGT[:, 0, 0] = 0
    rollouts.prompt_tokens[1][3] = 0
    return rollouts


@every_architecture
def test_norms_gradients_and_gram_equal_autograd(name, tied):
    agree(build(name, tied), letters(name), temperature=0.7)


def assert_same_as_whole(model, rollouts, rounding=1e-12, **way):
    """Norms, Gram matrix and pooled gradients are those of the whole graph in one pass."""
    weights = torch.randn(2, 12, dtype=torch.float64)
    for options in ({}, {"weights_KB": weights, "gram": True}):
        whole = all_at_once(model, rollouts, **options)
        other = all_at_once(model, rollouts, **way, **options)
        torch.testing.assert_close(other.sq_norm_B, whole.sq_norm_B, rtol=rounding, atol=0)
        if options:
            assert_close(other.gram_BB, whole.gram_BB, rounding)
            for one, two in zip(other.gradients_K, whole.gradients_K, strict=True):
                assert one.keys() == two.keys()
                for name, value in one.items():
                    assert_close(value, two[name], rounding)


@every_architecture
def test_layers_one_after_another_and_several_passes_give_the_same(name, tied):
    """Passes of 5, 3, 1 and 3 rows, whose longest are of different lengths."""
    model = build(name, tied)
    assert bool(LayerByLayer(model).layers) == (name not in WHOLE)
    assert_same_as_whole(model, letters(name), FLOAT32.get(name, 1e-12), by_layer=True)
    assert_same_as_whole(model, letters(name), 1e-10, passes=(5, 3, 1, 3))


@every_architecture
def test_a_pass_padded_at_the_end_alone_needs_no_mask(name, tied):
    """The first of four passes has rows of two prompts, one padded before it; the others not."""
    model = build(name, tied)
    if not can_read_contiguous(Policy(model, LetterTokenizer(), frozenset({1}), 0)):
        pytest.skip("reads no row without a mask")
    masks = []

    def note_mask(module, args, kwargs):
        masks.append(kwargs.get("attention_mask") is not None)

    body(model).register_forward_pre_hook(note_mask, with_kwargs=True)
    way = {"passes": (5, 3, 1, 3), "contiguous": True}
    assert_same_as_whole(model, letters(name), FLOAT32.get(name, 1e-10), **way)
    assert sum(masks) == 2 * (1 + (name not in UNPADDED))  # in one pass, and in the first of four


@every_architecture
def test_logprobs_do_not_depend_on_padding(name, tied):
    """Alone and unpadded, or with longer neighbours: the same log-probability."""
    model, rollouts = build(name, tied), letters(name)
    together = completion_logprobs(model, pack(rollouts, np.arange(12), 0, "cpu"))
    for i in range(12):
        alone = completion_logprobs(model, pack(rollouts, np.array([i]), 0, "cpu"))
        assert alone.item() == pytest.approx(together[i].item(), rel=1e-11)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_embedding_and_output_layer_alone_equal_autograd(name, tied):
    """Everything between them is frozen."""
    model = build(name, tied)
    model.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)
    model.get_output_embeddings().requires_grad_(True)
    assert len(trainable(model)) == (1 if tied else 2)
    agree(model, letters())


LORA = {
    "all-linear": ("llama", True, dict(target_modules="all-linear")),
    "output-layer": ("llama", False, dict(target_modules=["q_proj", "lm_head"])),
    "embedding": ("llama", False, dict(target_modules=["v_proj", "embed_tokens"])),
    "conv1d": ("gpt2", True, dict(target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)),
    "experts-frozen": ("mixtral", False, dict(target_modules=["q_proj", "o_proj"])),
}


def with_lora(name, tied, options):
    """Adapters of rank 3 on some layers, none of them zero; everything else is frozen."""
    config = LoraConfig(r=3, lora_alpha=5, lora_dropout=0.0, task_type="CAUSAL_LM", **options)
    model = get_peft_model(build(name, tied), config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn_like(parameter)
    assert trainable(model) and all("lora_" in name for name in trainable(model))
    return model


@pytest.mark.parametrize("name, tied, options", LORA.values(), ids=LORA)
def test_scores_of_lora_adapters_equal_autograd(name, tied, options):
    model = with_lora(name, tied, options)
    agree(model, letters(), temperature=0.7)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("adapters", [False, True])
def test_gradient_checkpointing_is_of_training_alone(adapters, reentrant):
    """As trainers switch it on: with adapters the embedding's output is made to need a gradient."""
    model = with_lora("llama", True, LORA["all-linear"][2]) if adapters else build("llama", True)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if adapters:
        model.enable_input_require_grads()
    model.eval()
    agree(model, letters(), temperature=0.7)
    assert_same_as_whole(model, letters(), by_layer=True)


def bfloat16_llama():
    return build("llama", tied=True, dtype=torch.bfloat16)


def bfloat16_llama_with_float32_adapters():
    """As peft makes it by default."""
    model = with_lora("llama", True, dict(target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if "lora_" in name else torch.bfloat16)
    return model


@pytest.mark.parametrize("make", [bfloat16_llama, bfloat16_llama_with_float32_adapters])
def test_bfloat16_norms_are_near_the_float64_ones_of_the_same_weights(make):
    model, rollouts = make(), letters()
    exact = all_at_once(copy.deepcopy(model).double(), rollouts)
    rounded = all_at_once(model, rollouts, weights_KB=torch.ones(1, 12))
    error = (rounded.sq_norm_B / exact.sq_norm_B).sqrt() - 1
    print(f"largest relative error of a norm: {error.abs().max():.4f}")
    assert error.abs().max() < 0.05
    assert {g.dtype for g in rounded.gradients_K[0].values()} == {torch.float32}
