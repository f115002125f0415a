"""What an update makes a GPU launch and wait for, and the counter of both."""

from __future__ import annotations

import numpy as np
import pytest
from launches import Launches
from training_runs import first_batch

from grpo_ustat.train.update import FixedLogprobs, UpdateStats, accumulate_gradient, minibatches


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
