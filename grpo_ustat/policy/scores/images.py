"""Images of a prompt: the model's additional inputs, and the modules that read images.

All completions of a prompt have the same images. Vision towers and projectors are computed without
a graph, because the scores of the language part do not need their graph. `one_by_one` scores the
trainable parameters of vision towers and projectors.
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
    """Return the model's additional inputs, other than token ids, for B rows of one prompt.

    Args:
        images: output of the processor for the prompt without completions. `pixel_values`,
            `image_grid_thw`, `image_sizes` and other inputs are repeated along the first axis.
            `*token_type_ids` has an entry for each token of the prompt; completion tokens get 0.
        attention_mask_BT: 1 on real tokens of prompts and completions.
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
    """Return the modules below the output layer that do not belong to the language part.

    These modules are vision towers and projectors. Their submodules are not listed.
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
    """Compute these modules without a graph within the block; yield the set of called modules."""
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
    """Restore the position offsets after the block; some models store them when reading images."""
    base: Any = body(causal(model))
    before = getattr(base, "rope_deltas", None)
    try:
        yield
    finally:
        if hasattr(base, "rope_deltas"):
            base.rope_deltas = before
