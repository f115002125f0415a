"""Precision of matrix products: TF32 on or off, and sums in float32 of 16-bit factors.

In TF32, a GPU rounds the factors of float32 matrix products to 10 mantissa bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

NARROW_DTYPES = (torch.bfloat16, torch.float16)
# True if `bmm` of the installed PyTorch can return a type wider than the type of its factors.
HAS_WIDENING_BMM = "dtype" in torch.ops.aten.bmm.overloads()


def set_tf32(allowed: bool) -> None:
    """Switch TF32 on or off for float32 products on a GPU; a CPU has no TF32."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


@contextmanager
def full_products() -> Iterator[None]:
    """Switch TF32 off within the block."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def sums_wider(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return True if `wide_bmm` can sum in float32 without converting these 16-bit factors."""
    narrow = left.dtype == right.dtype and left.dtype in NARROW_DTYPES
    return HAS_WIDENING_BMM and narrow and left.device.type == "cuda"


def wide_bmm(
    left_BIK: torch.Tensor, right_BKJ: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute a batch of matrix products, [B, I, J], in float32 or a wider type.

    Factors of 16 bits are usually converted to float32 first. On a GPU, two factors of the same
    16-bit type are not converted: the GPU sums their products in float32, in which each product of
    two entries is exact.

    Args:
        left_BIK, right_BKJ: factors of the B products.
        out: tensor for the result; None for a new tensor.
    """
    if sums_wider(left_BIK, right_BKJ):
        return torch.bmm(left_BIK, right_BKJ, out_dtype=torch.float32, out=out)
    both = torch.promote_types(left_BIK.dtype, right_BKJ.dtype)
    wide = torch.promote_types(both, torch.float32)
    return torch.bmm(left_BIK.to(wide), right_BKJ.to(wide), out=out)
