"""slime's advantage function and reducer, under stand-ins for megatron's groups and slime's slices.

`python train.py` of slime calls them on every rank. slime itself needs Megatron-LM and a GPU; its
batches are those of its `rollout.py`: lists of a rank's samples, `sample_indices` numbered through,
the samples of a prompt on several ranks.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forks import in_ranks

from grpo_ustat.estimators.baselines import advantages
from grpo_ustat.integrations import slime
from grpo_ustat.integrations.rows import REWARD_ONLY, rule_options
from grpo_ustat.records import BaselineContext

REWARDS_PG = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
PROMPTS = [4, 9, 2]  # of the data source, others were filtered out
DEALT = [[3, 8, 0, 1], [7, 2, 5, 4, 6]]  # rows of each of two ranks
LENGTHS = [2, 1, 3, 4, 2, 0, 1, 3, 2]  # tokens of each row on this context-parallel rank
ARGS = Namespace(rewards_normalization=False, n_samples_per_prompt=3)


def rank_data(rows):
    return {
        "rewards": [float(REWARDS_PG.ravel()[row]) for row in rows],
        "sample_indices": [3 * PROMPTS[row // 3] + row % 3 for row in rows],
        "kl": [torch.zeros(LENGTHS[row]) for row in rows],
        "raw_reward": REWARDS_PG.ravel().tolist(),  # of all ranks
    }


def expected(rule, rows):
    options = rule_options(rule, {})
    flat = advantages(rule, REWARDS_PG, BaselineContext(), options).ravel()
    return [torch.full((LENGTHS[row],), float(flat[row])) for row in rows]


def with_parallel_state(monkeypatch, group):
    """megatron.core.mpu, which slime has set up when it calls."""
    core = ModuleType("megatron.core")
    core.mpu = Namespace(get_data_parallel_group=lambda: group)
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", core)


@pytest.fixture
def two_ranks(monkeypatch):
    """One process that sees what both ranks would bring."""

    def all_gather_object(parts, rows, group):
        assert group == "data parallel"
        both = [rank_data(dealt) for dealt in DEALT]
        parts[:] = [list(zip(d["sample_indices"], d["rewards"], strict=True)) for d in both]
        assert rows in parts

    with_parallel_state(monkeypatch, "data parallel")
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)


@pytest.mark.parametrize("rule", REWARD_ONLY)
def test_every_rank_has_the_advantages_of_whole_groups(rule, two_ranks):
    for rows in DEALT:
        data = rank_data(rows)
        assert getattr(slime, rule)(ARGS, data) is None
        for mine, right in zip(data["advantages"], expected(rule, rows), strict=True):
            assert torch.allclose(mine, right, rtol=0, atol=1e-7)
        assert data["returns"] is data["advantages"]


def test_options_of_ones_own(two_ranks):
    data = rank_data(DEALT[0])
    slime.advantage_function("constant", value=0.25)(ARGS, data)
    assert [float(x[0]) for x in data["advantages"]] == [r - 0.25 for r in data["rewards"]]


def test_rewards_that_slime_has_normalised_are_refused():
    """Its default: a rule would centre them a second time."""
    args = Namespace(rewards_normalization=True, n_samples_per_prompt=3)
    with pytest.raises(ValueError, match="=True.*add --disable-rewards-normalization"):
        slime.leave_one_out(args, rank_data(DEALT[0]))


def test_several_samples_of_one_rollout_are_refused(monkeypatch):
    data = rank_data([0, 1, 2, 2])
    monkeypatch.setattr(slime, "_of_all_ranks", lambda rows: [rows])
    with pytest.raises(ValueError, match="one sample of each rollout, got 4 of 3"):
        slime.leave_one_out(ARGS, data)


def test_a_rule_that_reads_more_than_rewards_has_no_name():
    with pytest.raises(
        AttributeError, match="grpo_ustat.integrations.slime has no opo: .*the names are none,"
    ):
        _ = slime.opo
    assert not hasattr(slime, "grpo")


def test_the_reducer_sums_over_tokens(monkeypatch):
    """Context-parallel ranks hold parts of each completion; together they have the whole sum."""
    utils = ModuleType("slime.backends.megatron_utils.cp_utils")
    for name in ("slime", "slime.backends", "slime.backends.megatron_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    masks = [torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, 1.0])]
    loss = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    utils.slice_log_prob_with_cp = lambda mask, total_length, response_length: mask
    assert slime.token_sum([9, 9], [3, 2], masks)(loss) == 1 + 4 + 8 + 16
    parts = []
    for mine in (slice(0, 1), slice(1, None)):
        utils.slice_log_prob_with_cp = lambda mask, total, response, mine=mine: mask[mine]
        local = torch.cat([loss[:3][mine], loss[3:][mine]])
        parts.append(slime.token_sum([9, 9], [3, 2], masks)(local))
    assert sum(parts) == 1 + 4 + 8 + 16
    with pytest.raises(ValueError, match="leave out --calculate-per-token-loss"):
        slime.token_sum([9, 9], [3, 2], masks, calculate_per_token_loss=True)


@pytest.mark.slow
def test_two_processes_bring_their_rewards_together():
    def work(rank):
        dist.init_process_group("gloo")
        with pytest.MonkeyPatch.context() as patch:
            with_parallel_state(patch, dist.group.WORLD)
            data = rank_data(DEALT[rank])
            slime.james_stein(ARGS, data)
        dist.destroy_process_group()
        return [tokens.numpy() for tokens in data["advantages"]]

    for rows, found in zip(DEALT, in_ranks(2, work), strict=True):
        assert isinstance(found, list), found
        for mine, right in zip(found, expected("james_stein", rows), strict=True):
            np.testing.assert_allclose(mine, right.numpy(), atol=1e-7)
