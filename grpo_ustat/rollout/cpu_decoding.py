"""Faster decoding on CPUs: a key-value cache that grows in place, and packed linear layers.

`DynamicCache` copies all it holds for every token. Here long keys and values stand in buffers with
room for more tokens, so a token costs its own entry; what attention reads is the same. Short ones
are copied all the same: reading them from where they do not lie side by side costs more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import psutil
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

ROOM = 64  # tokens of room in a new buffer: what it copies is little beside what attention reads
IN_PLACE_FROM = 12 * 1024  # bytes of one row's head, where a copy costs more than reading with gaps

PACK_FROM = 2**16  # entries of a weight; smaller ones lose more by the longer call
SHARE_OF_MEMORY = 1 / 8  # weights beyond this share of the machine's memory are not packed


def growing_cache(config: PreTrainedConfig) -> DynamicCache:
    """`DynamicCache(config=config)` whose attention layers grow in place.

    Layers of other kinds (recurrent states, hybrids) stay as transformers made them.
    """
    cache = DynamicCache(config=config)
    for place, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[place] = GrowingLayer()
        elif type(layer) is DynamicSlidingWindowLayer:
            cache.layers[place] = GrowingSlidingWindowLayer(layer.sliding_window)
    return cache


class GrowingLayer(DynamicLayer):
    """Keys and values [B, H, T, D] of all tokens so far."""

    def __init__(self) -> None:
        super().__init__()
        self._keys, self._values = GrowingTensor(), GrowingTensor()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DynamicLayer`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self.keys = self._keys.append(self.keys, key_states)
        self.values = self._values.append(self.values, value_states)
        return self.keys, self.values


class GrowingSlidingWindowLayer(DynamicSlidingWindowLayer):
    """Keys and values [B, H, min(T, window - 1), D] of the last tokens."""

    def __init__(self, sliding_window: int):
        super().__init__(sliding_window)
        self._keys, self._values = GrowingTensor(), GrowingTensor()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DynamicSlidingWindowLayer`; returns the keys and values that the new tokens read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self.cumulative_length += key_states.shape[-2]
        keys = self._keys.append(self.keys, key_states)
        values = self._values.append(self.values, value_states)
        self.keys = self._keys.crop(1 - self.sliding_window)
        self.values = self._values.crop(1 - self.sliding_window)
        return keys, values


class GrowingTensor:
    """A tensor [B, H, T, D] that grows along T within a buffer.

    The view that it returned last is extended in place. Any other tensor, such as that view with
    fewer rows, moves into a new buffer first.

    Attributes:
        view: the tensor returned last, at the end of the used part of the buffer.
        buffer: [B, H, T + room, D]; None where tensors are short and copied instead.
        length: columns of the buffer in use.
    """

    def __init__(self) -> None:
        self.view: torch.Tensor | None = None
        self.buffer: torch.Tensor | None = None
        self.length = 0

    def append(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """`old` followed by `new` along T, as a view of the buffer where it has room."""
        count = new.shape[-2]
        if not old.numel() or old[0, 0].nbytes < IN_PLACE_FROM:
            self.buffer, self.view = None, torch.cat([old, new], dim=-2) if old.numel() else new
            return self.view
        buffer = self.buffer
        if buffer is None or old is not self.view or buffer.shape[-2] - self.length < count:
            *rows, self.length, width = old.shape
            buffer = old.new_empty((*rows, self.length + count + ROOM, width))
            buffer[..., : self.length, :] = old
        start, self.length = self.length - old.shape[-2], self.length + count
        buffer[..., self.length - count : self.length, :] = new
        self.buffer, self.view = buffer, buffer[..., start : self.length, :]
        return self.view

    def crop(self, start: int) -> torch.Tensor:
        """The tensor that was returned last, without the tokens before `start`."""
        assert self.view is not None
        self.view = self.view[..., start:, :]
        return self.view


@contextmanager
def packed_linears(model: nn.Module, rows: int) -> Iterator[None]:
    """Within, plain float32 linear layers on CPUs compute with packed copies of their weights.

    The same products in float32, summed in another order. Without gradients only, and the weights
    must not change meanwhile. Other layers, devices and types are left alone.

    Args:
        model: the model.
        rows: rows of a usual product; any number works.
    """
    layers = [module for module in model.modules() if _packable(module)]
    size = sum(layer.weight.nbytes for layer in layers)
    if size > SHARE_OF_MEMORY * psutil.virtual_memory().total:
        layers = []
    try:
        for layer in layers:
            layer.__dict__["forward"] = _packed_forward(layer, rows)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a plain layer: no subclass, and not hooked, sharded or quantized."""
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and type(module.weight) is nn.Parameter
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
        and module.weight.numel() >= PACK_FROM
        and torch.backends.mkldnn.is_available()
        and not torch.is_autocast_enabled("cpu")  # sampling and scoring in the same precision
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _packed_forward(layer: nn.Linear, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A forward pass of the layer with a packed copy of its weight."""
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows)
    bias = layer.bias

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    return forward
