"""Attention: SDPA, the usual choice, gives what the plain formula gives, also with left padding."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from grpo_ustat.checkup.findings import Finding, failed, ok

MOST = 1e-3  # of the largest logit; float32 on a CPU differs by 1e-6
PADDING, LENGTH = 5, 12


def attention(_: Path) -> Finding:
    """A random model of two layers on every kind of device, both ways, padded and not."""
    logging.set_verbosity_error()
    said, torch_ = [], torch.cuda.is_available()
    for device in ("cpu", *(["cuda"] if torch_ else [])):
        plain, fused = (_model(kind).to(device) for kind in ("eager", "sdpa"))
        apart, shifted = _differences(plain, fused, device)
        if not apart < MOST:
            return failed(
                f"sdpa and eager differ by {apart:.1e} of the largest logit on {device}",
                "model.attn_implementation=eager",
            )
        if not shifted < MOST:
            return failed(
                f"left padding moves sdpa's logits by {shifted:.1e} of the largest on {device}",
                "model.attn_implementation=eager, rollout_batch_size=1 if that is wrong too",
            )
        said.append(f"{device}: sdpa = eager within {apart:.0e}, left padding within {shifted:.0e}")
    flash = importlib.util.find_spec("flash_attn") is not None
    return ok("; ".join(said) + f"; flash_attn {'is' if flash else 'not'} installed")


def _model(attn_implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.5,
    )  # fmt: skip
    config._attn_implementation = attn_implementation
    return Qwen2ForCausalLM(config).eval()


@torch.no_grad()
def _differences(
    plain: PreTrainedModel, fused: PreTrainedModel, device: str
) -> tuple[float, float]:
    """Between both ways in a padded batch, and of the fused one between padded and not."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(1, 50, (1, LENGTH), generator=generator).to(device)
    short = whole[:, PADDING:]
    batch = torch.cat([whole, torch.cat([whole.new_zeros(1, PADDING), short], dim=1)])
    mask = torch.ones_like(batch)
    mask[1, :PADDING] = 0
    places = (mask.cumsum(dim=1) - 1).clamp(min=0)
    options = dict(input_ids=batch, attention_mask=mask, position_ids=places)
    one, other = plain(**options).logits, fused(**options).logits
    alone = fused(input_ids=short).logits[0]
    scale = float(alone.abs().max())
    apart = float(((one - other) * mask[..., None]).abs().max()) / scale
    return apart, float((other[1, PADDING:] - alone).abs().max()) / scale
