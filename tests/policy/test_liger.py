"""Kernels as Liger's, which TRL patches into a model's modules (`use_liger_kernel`): norms and
gates whose backward pass overwrites the gradient it gets, or what it has saved.

Liger's own need a GPU; these do the same in PyTorch.
"""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch
from architectures import VOCAB, build
from fakes import random_rollouts
from scored import agree, one_by_one


class Norm(torch.autograd.Function):
    """An RMSNorm whose gradient is written over the one at its output."""

    @staticmethod
    def forward(ctx, inputs, weight, eps):
        rstd = (inputs.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(inputs, weight, rstd)
        return inputs * rstd * weight

    @staticmethod
    def backward(ctx, *grads):
        (grad,), (inputs, weight, rstd) = grads, ctx.saved_tensors
        normal = inputs * rstd
        of_weight = (grad * normal).flatten(0, -2).sum(dim=0)
        scaled = grad * weight
        mean = (scaled * normal).mean(dim=-1, keepdim=True)
        grad.copy_(rstd * (scaled - normal * mean))
        return grad, of_weight, None


class Gate(torch.autograd.Function):
    """SiLU(gate) * up, whose gradients are written over the two."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx, *grads):
        (grad,), (gate, up) = grads, (x.detach() for x in ctx.saved_tensors)
        chance = gate.sigmoid()
        silu = gate * chance
        of_gate = grad * up * (chance + silu * (1 - chance))
        up.copy_(grad * silu)
        gate.copy_(of_gate)
        return gate, up


def patched(model):
    """A copy whose modules compute with the kernels above, as Liger patches instances."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = MethodType(
                lambda own, x: Norm.apply(x, own.weight, own.variance_epsilon), module
            )
        if type(module).__name__ == "LlamaMLP":
            module.forward = MethodType(
                lambda own, x: own.down_proj(Gate.apply(own.gate_proj(x), own.up_proj(x))), module
            )
    return model


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by_layer"])
def test_scores_are_those_of_the_plain_model(by_layer):
    model = build("llama", tied=True)
    rollouts = random_rollouts([2, 6, 4], group_size=4, longest=7, vocab=VOCAB)
    agree(patched(model), rollouts, one_by_one(model, rollouts), by_layer=by_layer)
