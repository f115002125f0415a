"""What an update makes a GPU launch and wait for, and the counter of both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from launches import Launches
from training_runs import first_batch

from grpo_ustat.train.update import FixedLogprobs, UpdateStats, accumulate_gradient, minibatches


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


def counted(tmp_path, *overrides):
    """Kernels and waits of one gradient, and the passes that it took."""
    run, batch = first_batch(tmp_path, "max_completion_length=24", *overrides)
    advantage_PG = np.linspace(-1, 1, 16).reshape(4, 4)
    (whole,) = minibatches(run, batch.lengths_PG, 0)
    stats = UpdateStats()
    with Launches() as seen:
        accumulate_gradient(run, batch.own_rollouts, advantage_PG, whole, FixedLogprobs(), stats)
    return seen, len(stats.gap)


@pytest.mark.slow
def test_a_pass_of_an_update_waits_only_where_it_is_known(tmp_path):
    """Once for the places that count, twice for the gap from the sampler's log-probabilities; two
    more in a whole gradient are of prompts' masks.
    """
    for most_kernels, *overrides in (
        (1250,),
        (950, "micro_batch_tokens=150"),
        (550, "share_prompts=false"),
    ):
        seen, passes = counted(tmp_path, *overrides)
        assert seen.waits.pop("_local_scalar_dense") <= 2
        assert seen.waits == {"nonzero": passes, "cpu": 2 * passes}
        assert sum(seen.kernels.values()) <= most_kernels * passes
