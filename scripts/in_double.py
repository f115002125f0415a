"""Compute in float64 from end to end, to compare formulas rather than rounding."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class InDouble(TorchDispatchMode):
    """Whatever is asked for in float32, or in no type by name, is made in float64.

    transformers computes norms and softmaxes, TRL rewards and log-probabilities, in float32 even
    for a float64 model. Values rounded to float32 before this mode begins stay as they were.
    """

    def __enter__(self):
        """Begin."""
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error):
        """Leave everything as it was."""
        torch.set_default_dtype(self.before)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run one operator with float64 in place of float32 among its arguments."""
        wide = {name: _double(value) for name, value in (kwargs or {}).items()}
        return func(*map(_double, args), **wide)


def _double(value):
    return torch.float64 if value is torch.float32 else value
