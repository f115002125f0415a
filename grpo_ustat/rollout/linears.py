"""Faster linear layers without gradients: packed weights on CPUs, narrow copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeGuard

import psutil
import torch
from torch import nn

from grpo_ustat.policy.memory import free_bytes

LEAST_PACKED_ENTRIES = 2**16  # entries of a weight; smaller ones lose more by the longer call
LARGEST_PACKED_SHARE = 1 / 8  # weights beyond this share of the machine's memory are not packed


@contextmanager
def packed_linears(model: nn.Module, rows: int) -> Iterator[None]:
    """Compute plain float32 linear layers on CPUs with packed copies of their weights.

    The products are the same in float32, summed in another order. It is for use without gradients,
    and the weights must not change meanwhile. Other layers, devices and types are left alone.

    Args:
        rows: rows of a typical product; any number works.
    """
    layers = [module for module in model.modules() if _packable(module)]
    size = sum(layer.weight.nbytes for layer in layers)
    if size > LARGEST_PACKED_SHARE * psutil.virtual_memory().total:
        layers = []
    try:
        for layer in layers:
            layer.__dict__["forward"] = _packed_forward(layer, rows)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


@contextmanager
def cast_linears(model: nn.Module) -> Iterator[None]:
    """Compute plain linear layers under autocast with copies of their weights in its type.

    The numbers are the same to the bit: autocast makes the same copies, at every call if nothing is
    differentiated. Made once, they cost half the bytes of float32 weights. If that is more than
    half of the free memory, and for other layers, autocast works as usual.
    """
    device = next(model.parameters()).device
    layers = []
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        layers = [
            module
            for module in model.modules()
            if type(module) is nn.Linear
            and "forward" not in vars(module)
            and type(module.weight) is nn.Parameter
            and module.weight.dtype != dtype
        ]
        if sum(x.weight.numel() * dtype.itemsize for x in layers) > free_bytes(device) / 2:
            layers = []
    try:
        for layer in layers:
            bias = None if layer.bias is None else layer.bias.detach().to(dtype)
            weight = layer.weight.detach().to(dtype)
            layer.__dict__["forward"] = partial(nn.functional.linear, weight=weight, bias=bias)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True if a module is a plain layer: no subclass, not hooked, sharded or quantized."""
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and type(module.weight) is nn.Parameter
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
        and module.weight.numel() >= LEAST_PACKED_ENTRIES
        and torch.backends.mkldnn.is_available()
        and not torch.is_autocast_enabled("cpu")  # sampling and scoring in the same precision
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _packed_forward(layer: nn.Linear, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward pass of the layer with a packed copy of its weight."""
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows)
    bias = layer.bias

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    return forward
