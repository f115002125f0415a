"""Two processes do what one does: replicas (DDP) and shards (FSDP2)."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from forks import FSDP2, in_ranks  # noqa: E402
from test_trainer import config_of, first_batch, fit, rows, weights  # noqa: E402

from grpo_ustat.training import trainer  # noqa: E402
from grpo_ustat.training.update import (  # noqa: E402
    Found,
    accumulate_gradient,
    fixed_logprobs,
    judged_rewards,
    minibatches,
    sum_over_ranks,
    trainable,
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="processes that have seen a GPU cannot be forked"
)
SMALL = (
    "model.dtype=float64", "budget.rollouts=36", "group_size=4", "dataset.test_size=7",
    "max_completion_length=8", "model=tiny_direct", "prompt=bare", "max_steps=3", "eval_steps=3", "save_steps=3",
)  # fmt: skip
ALGORITHM1 = ()
GRPO = ("objective=grpo_original", "objective.num_iterations=2", "objective.minibatch_size=12",
        "objective.beta=0.1", "max_grad_norm=0.05")  # fmt: skip
LAUNCHES = {"replicas": {}, "shards": FSDP2}


def first_gradient(path, *overrides):
    """The first update's gradient and what led to it."""
    run, batch = first_batch(path, *SMALL, *overrides)
    context, _ = trainer.baseline_context(run, batch, 0)
    constants = fixed_logprobs(run, batch.rollouts)
    judged_PG = judged_rewards(run, batch, constants)
    advantage_PG = trainer.advantages(run.config.baseline.name, judged_PG, context, {})
    mine_PG = trainer.own_rows(run, advantage_PG)
    with trainer.sharded.updating(run):
        minibatch = next(iter(minibatches(run, batch.rollouts, 0)))
        accumulate_gradient(run, batch.rollouts, mine_PG, minibatch, constants, Found())
        sum_over_ranks(run)
    grads = [trainer.sharded.whole(p.grad) for p in trainable(run.trained)]
    return {
        "ids": [prompt.id for prompt in batch.prompts],
        "texts": batch.rollouts.texts_PG,
        "rewards": batch.rewards_PG,
        "lengths": batch.lengths_PG,
        "advantages": advantage_PG,
        "gradient": torch.cat([g.flatten() for g in grads]).numpy(),
    }


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("overrides", [ALGORITHM1, GRPO])
def test_two_ranks_form_the_gradient_of_one(tmp_path, launch, overrides):
    one = first_gradient(tmp_path, *overrides)
    two = in_ranks(2, lambda rank: first_gradient(tmp_path, *overrides), LAUNCHES[launch])
    assert one["rewards"].std() > 0
    for rank, found in enumerate(two):
        assert isinstance(found, dict), found
        assert found["ids"] == one["ids"]
        assert found["texts"] == one["texts"][rank::2]
        for name in ("rewards", "lengths", "advantages"):
            assert np.array_equal(found[name], one[name])
        scale = np.abs(one["gradient"]).max()
        print(launch, np.abs(found["gradient"] - one["gradient"]).max() / scale)
        np.testing.assert_allclose(found["gradient"], one["gradient"], rtol=0, atol=1e-12 * scale)
