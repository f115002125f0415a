"""Models that compute in float64 from end to end, for comparisons to 1e-10.

`python precision.py grpo_ustat.train OVERRIDES` runs an entry with them, as `python -m` does.
"""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class _KeepDouble(TorchFunctionMode):
    """Where a float64 tensor is asked for in float32, it stays float64; integers, which are
    positions, become float64, or rotations would be rounded as each device rounds float32.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.float and not args[0].is_floating_point():
            return args[0].double()
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            kwargs = {k: torch.float64 if x is torch.float32 else x for k, x in kwargs.items()}
        if func in PRODUCTS and any(x.dtype == torch.float64 for x in args):
            args = tuple(x.double() for x in args)  # frequencies and positions
        return func(*args, **kwargs)


def compute_in_double(monkeypatch):
    """transformers computes norms, softmaxes and routers in float32 even in a float64 model.

    From here on they compute in float64. This holds only while a module runs: code outside modules,
    as the package's own, is not shielded from its own casts. Narrower models are as they were, and
    as fast: the mode costs a third of a small model's time.
    """
    original, running = nn.Module.__call__, False

    def call(module, *args, **kwargs):
        nonlocal running
        if running or not _in_double([next(module.parameters(), None), *args, *kwargs.values()]):
            return original(module, *args, **kwargs)
        running = True
        try:
            with _KeepDouble():
                return original(module, *args, **kwargs)
        finally:
            running = False

    monkeypatch.setattr(nn.Module, "__call__", call)


def _in_double(values):
    return any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in values)


if __name__ == "__main__":
    compute_in_double(SimpleNamespace(setattr=setattr))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
