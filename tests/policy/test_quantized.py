"""Adapters on a 4-bit base: scores are those of plain differentiation, and the base stays."""

from __future__ import annotations

import pytest
import torch
from fakes import LetterTokenizer, random_rollouts
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from scored import agree, all_at_once, one_by_one
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from grpo_ustat.config.model import model_folder
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.prompt_sharing import can_read_contiguous
from grpo_ustat.policy.quantized import unpacked

bitsandbytes = pytest.importorskip("bitsandbytes")


def quantised(dtype=torch.float32, prepare=True):
    """An embedded policy in NF4 with adapters, in evaluation mode, as TRL makes it."""
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
    )  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(
        model_folder("embedded:tiny"), dtype=dtype, quantization_config=config, device_map="cpu"
    )
    if prepare:
        base = prepare_model_for_kbit_training(base)
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear")).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype).normal_(std=0.05)
    kinds = {type(module).__name__ for module in model.modules()}
    assert "Linear4bit" in kinds and sum(p.dtype == torch.uint8 for p in model.parameters()) > 4
    return model


def plain(model):
    with unpacked(model):
        return one_by_one(model, ROLLOUTS).double()


ROLLOUTS = random_rollouts([2, 6, 4], group_size=3, longest=12, vocab=90)


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by_layer"])
@pytest.mark.parametrize("prepare", [True, False], ids=["prepared", "as it is"])
def test_scores_of_adapters_equal_autograd(prepare, by_layer):
    """In float32: layers that are dequantised for each product have no wider type."""
    model = quantised(prepare=prepare)
    policy = Policy(model, LetterTokenizer(), frozenset({1}), 0)
    way = {"by_layer": by_layer, "contiguous": can_read_contiguous(policy)}
    agree(model, ROLLOUTS, plain(model), 1e-4, **way)


def test_bfloat16_adapters_as_trl_casts_them():
    """Norms are near those of the same weights computed in float32."""
    model = quantised(torch.bfloat16)
    rounded = all_at_once(model, ROLLOUTS).sq_norm_B
    error = (rounded / plain(model).square().sum(dim=1)).sqrt() - 1
    assert error.abs().max() < 0.1


def test_the_base_is_neither_packed_nor_changed():
    """On a CPU that can, an evaluation without gradients would pack it for inference."""
    model = quantised()
    layers = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    before = [layer.weight.data.clone() for layer in layers]
    able = [layer.support_avx512bf16_for_cpu for layer in layers]
    can_read_contiguous(Policy(model, LetterTokenizer(), frozenset({1}), 0))
    all_at_once(model, ROLLOUTS, by_layer=True)
    for layer, weight in zip(layers, before, strict=True):
        assert torch.equal(layer.weight.data, weight)
        assert not getattr(layer.weight.quant_state, "packing_format_for_cpu", False)
    assert [layer.support_avx512bf16_for_cpu for layer in layers] == able


def test_packed_weights_are_refused():
    model = quantised()
    layer = next(m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit))
    layer.support_avx512bf16_for_cpu = True
    layer.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ConfigError, match="4-bit"):
        all_at_once(model, ROLLOUTS)
