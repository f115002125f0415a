"""Dropout: detection of active modules, and reproduction of dropout masks.

Dropout masks are drawn from a device's random number generator. If two forward passes start from
the same generator state and have the same numbers of rows and columns, they draw the same masks.
Reproducing the state reproduces even the masks inside a fused attention kernel, which cannot be
read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

RandomStates = tuple[torch.Tensor, ...]
"""State of the CPU's generator, followed by that of the GPU's generator if there is a GPU."""


def active_dropout(model: nn.Module) -> tuple[str, float] | None:
    """Return the name and rate of the model's first dropout with a rate above 0, or None.

    Both kinds of dropout are found: dropout modules, and rates that a module stores as a number and
    passes to its attention function.
    """
    for path, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            return path or "dropout", module.p
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float) and value > 0:
                return f"{path}.{name}".strip("."), value
    return None


def random_states(device: torch.device) -> RandomStates:
    """Return the states of the generators from which a forward pass on this device draws masks."""
    if device.type == "cpu":
        return (torch.get_rng_state(),)
    backend: Any = getattr(torch, device.type)
    where = () if device.type == "mps" else (device,)
    return torch.get_rng_state(), backend.get_rng_state(*where)


def set_random_states(device: torch.device, states: RandomStates) -> None:
    """Set the generators to states returned by `random_states`."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        backend: Any = getattr(torch, device.type)
        backend.set_rng_state(state, *(() if device.type == "mps" else (device,)))


@contextmanager
def same_draws(device: torch.device, states: RandomStates | None = None) -> Iterator[None]:
    """Restore the generators after the block to the states that they had before it.

    If `states` is given, the block starts from these states.
    """
    before = random_states(device)
    try:
        if states is not None:
            set_random_states(device, states)
        yield
    finally:
        set_random_states(device, before)


def seeded_states(device: torch.device, seed: int) -> RandomStates:
    """Return the states of freshly seeded generators, without changing the current states."""
    with same_draws(device):
        torch.default_generator.manual_seed(seed)
        if device.type != "cpu":
            backend: Any = getattr(torch, device.type)
            with backend.device(device) if hasattr(backend, "device") else nullcontext():
                backend.manual_seed(seed)
        return random_states(device)


@contextmanager
def dropping(model: nn.Module, states: RandomStates) -> Iterator[None]:
    """Apply dropout within the block as in training, with masks drawn from these generator states.

    After the block, the modes of all modules and the generators are restored. Batch normalisation
    stays in evaluation mode, so its running statistics do not change. Gradient checkpointing is off
    within the block: if memory is short, `LayerByLayer` recomputes the layers instead.
    """
    modes = {module: module.training for module in model.modules()}
    checkpointed = [m for m in modes if getattr(m, "gradient_checkpointing", False) is True]
    try:
        model.train()
        for module in modes:
            if isinstance(module, _BatchNorm):
                module.eval()
        for module in checkpointed:
            module.gradient_checkpointing = False  # pyright: ignore[reportArgumentType]
        with same_draws(next(model.parameters()).device, states):
            yield
    finally:
        for module in checkpointed:
            module.gradient_checkpointing = True  # pyright: ignore[reportArgumentType]
        for module, mode in modes.items():
            module.training = mode
