"""Images of a prompt: the model's additional inputs, and the modules that read images.

All completions of a prompt have the same images. Vision towers and projectors are computed without
autograd's graph, because gradients of the language part do not need it. If vision towers and
projectors have trainable parameters, `one_by_one` computes the gradients of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from grpo_ustat.policy.output_layer import body, causal, replaced_forward

# Name suffix of inputs that contain one number for each token, such as `mm_token_type_ids`.
TOKEN_TYPES = "token_type_ids"


def row_inputs(
    images: Mapping[str, torch.Tensor], attention_mask_BT: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the model inputs other than token ids for B rows that have the same prompt.

    Inputs such as `pixel_values`, `image_grid_thw` and `image_sizes` are repeated B times along the
    first axis. Inputs whose names end in `token_type_ids` have an entry for each prompt token and
    are extended with 0 for each completion token.

    Args:
        images: output of the model's processor for the prompt without completions.
        attention_mask_BT: 1 on real tokens of prompts and completions, 0 on padding.
        dtype: data type of the model.
    """
    inputs, (batch, length) = {}, attention_mask_BT.shape
    for name, value in images.items():
        value = value.to(attention_mask_BT.device)
        if name.endswith(TOKEN_TYPES):
            types_L = value.flatten()
            first_B1 = attention_mask_BT.argmax(dim=1, keepdim=True)
            places_BL = first_B1 + torch.arange(len(types_L), device=value.device)
            types_BT = types_L.new_zeros((batch, length))
            inputs[name] = types_BT.scatter_(1, places_BL, types_L.expand(batch, -1))
        else:
            value = value.to(dtype) if value.is_floating_point() else value
            inputs[name] = torch.cat([value] * batch)
    return inputs


def outside_language(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that do not belong to the language part: vision towers and projectors.

    Submodules of these modules are not listed.
    """
    base = body(causal(model))
    decoder, embedding = causal(model).get_decoder(), causal(model).get_input_embeddings()
    outside: list[nn.Module] = []
    ways = [base] if decoder is not base and decoder in set(base.modules()) else []
    while ways:
        for child in ways.pop().children():
            if child is decoder:
                continue
            inside = set(child.modules())
            (ways if decoder in inside or embedding in inside else outside).append(child)
    return [module for module in outside if module is not embedding]


@contextmanager
def without_graph(modules: list[nn.Module]) -> Iterator[set[nn.Module]]:
    """Compute these modules without autograd's graph within the block.

    The block receives a set, which will contain the modules that were called.
    """
    called: set[nn.Module] = set()

    def plain(module: nn.Module, forward: Any):
        """Return a replacement for `forward` that builds no graph and records each call."""

        def compute(*args: Any, **kwargs: Any) -> Any:
            called.add(module)
            with torch.no_grad():
                return forward(*args, **kwargs)

        return compute

    with ExitStack() as patched:
        for module in modules:
            patched.enter_context(replaced_forward(module, plain(module, module.forward)))
        yield called


@contextmanager
def same_positions(model: PreTrainedModel) -> Iterator[None]:
    """Restore the model's position offsets after the block.

    Some models store an offset (`rope_deltas`) when they read images, and use it in later passes.
    """
    base: Any = body(causal(model))
    before = getattr(base, "rope_deltas", None)
    try:
        yield
    finally:
        if hasattr(base, "rope_deltas"):
            base.rope_deltas = before
