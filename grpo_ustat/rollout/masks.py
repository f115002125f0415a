"""Attention masks of padded rows on accelerators, made without reading their values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import masking_utils

PATCHED_FUNCTION = "_ignore_causal_mask_sdpa"


@contextmanager
def masks_without_waits(device: torch.device) -> Iterator[None]:
    """Make transformers write out every mask of padded rows on an accelerator.

    It would read if a mask hides anything, to leave it out if not, and wait for the device at every
    token. The sampler passes a mask only if it hides something. A version of transformers that asks
    elsewhere is left as it is: the tokens are the same, with waits.
    """
    ask = getattr(masking_utils, PATCHED_FUNCTION, None)
    if device.type == "cpu" or ask is None:
        yield
        return

    def leave_out(padding_mask: torch.Tensor | None, *args: Any, **options: Any) -> bool:
        return padding_mask is None and ask(padding_mask, *args, **options)

    setattr(masking_utils, PATCHED_FUNCTION, leave_out)
    try:
        yield
    finally:
        setattr(masking_utils, PATCHED_FUNCTION, ask)
