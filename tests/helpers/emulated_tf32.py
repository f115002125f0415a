"""What a GPU's TF32 makes of float32 products, on a CPU."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = {
    aten.mm.default, aten.bmm.default, aten.bmm.out, aten.addmm.default, aten.baddbmm.default
}  # fmt: skip
DROPPED = 13  # of float32's 23 bits after the point


def rounded(values):
    """Float32 values to the nearest TF32."""
    bits = values.contiguous().view(torch.int32) + (1 << (DROPPED - 1))
    return (bits & (-1 << DROPPED)).view(torch.float32)


class EmulatedTF32(TorchDispatchMode):
    """Within, products of float32 matrices round their factors where
    `torch.backends.cuda.matmul.allow_tf32` is set. A model's attention must be `eager`, whose
    products are seen.

    Attributes:
        products: how many were rounded.
    """

    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "attention" not in str(function), "attn_implementation=eager"
        allowed = torch.backends.cuda.matmul.allow_tf32
        if allowed and function in PRODUCTS and args[-1].dtype == torch.float32:
            self.products += 1
            *rest, left, right = args
            args = (*rest, rounded(left), rounded(right))
        return function(*args, **(kwargs or {}))
