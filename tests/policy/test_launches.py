"""The counter of kernels and waits, on operations counted by hand."""

from __future__ import annotations

import torch
from launches import Launches


def test_kernels_and_waits_are_those_counted_by_hand():
    weight = torch.ones(3, 2, requires_grad=True)
    cpu = torch.Tensor.cpu
    with Launches() as seen:
        hidden = torch.ones(4, 3)  # one kernel
        logits = hidden @ weight  # one
        logits.t().reshape(2, 4)[:, :2].sum().backward()  # sum; then the way back
        logits.detach()[torch.tensor([True, False, True, False])].cpu()
        assert bool(logits.max() > 0)
        (logits > 1).nonzero()
        assert hidden[0].tolist() == [1, 1, 1]
    assert seen.waits == {
        "index by a mask": 1, "cpu": 1, "_local_scalar_dense": 1, "nonzero": 1, "tolist": 1
    }  # fmt: skip
    assert seen.kernels["mm"] == 2 and seen.kernels["sum"] == 1  # `hidden` needs no gradient
    assert not set(seen.kernels) & {"t", "view", "detach", "slice", "select"}
    assert torch.Tensor.cpu is cpu
