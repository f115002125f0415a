"""Rows of a generation batch, as TRL pads and masks them, become whole groups with rewards."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from trl_room import PAD, output_of

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.integrations.trl.generation import (
    Completion,
    completions_of,
    logged_rewards,
    sampler_difference,
    whole_groups,
)

PROMPTS = [[3, 4], [3, 4], [5], [5]]
COMPLETIONS = [[7, 8, 9], [7, 1], [6, 6, 6, 1], [1]]


def rewards(values):
    """Of one function, as `logged_rewards` returns them."""
    sums = np.array(values, dtype=float)
    return sums, sums[:, None]


def test_padding_is_taken_off():
    rows = completions_of(output_of(PROMPTS, COMPLETIONS), PAD)
    assert [row.prompt_ids for row in rows] == PROMPTS
    assert [row.completion_ids for row in rows] == COMPLETIONS
    assert all(row.written is None for row in rows)


def test_a_truncated_completion_that_is_masked_is_taken_as_written():
    """mask_truncated_completions sets its whole mask to 0; row 0 ends without an end token."""
    output = output_of(PROMPTS, COMPLETIONS)
    output["completion_mask"][0] = 0
    assert [row.completion_ids for row in completions_of(output, PAD)] == COMPLETIONS


def test_tokens_of_tools_are_not_the_policys():
    output = output_of(PROMPTS, COMPLETIONS)
    output["tool_mask"] = torch.ones_like(output["completion_mask"])
    output["tool_mask"][2, 1:3] = 0
    rows = completions_of(output, PAD)
    assert rows[2].written == [True, False, False, True] and rows[3].written == [True]
    (group, _), _unknown = whole_groups(rows, *rewards([0.0, 1.0, 0.0, 1.0]), 2)
    rollouts = whole_groups(rows, *rewards([0.0, 1.0, 0.0, 1.0]), 2)[0][1].rollouts()
    assert rollouts.scored_PGT[0].tolist() == [[True, False, False, True], [True] + [False] * 3]
    assert rollouts.mask_PGT.sum(axis=-1).tolist() == [[4, 1]]
    assert rollouts.prompt_tokens == [[5]]


def test_rewards_are_added_by_their_weights():
    """As TRL's: None counts 0 beside others, and is unknown where all are None."""
    logged = {"right": [9.0, 1.0, 0.0, math.nan, 1.0], "form": [9.0, 0.5, math.nan, None, 1.0]}
    sums, _ = logged_rewards(logged, torch.tensor([2.0, -1.0]), 4)
    np.testing.assert_array_equal(sums, [1.5, 0.0, math.nan, 1.0])
    with pytest.raises(ConfigError, match="5 rewards of right are logged for 6 completions"):
        logged_rewards(logged, torch.tensor([2.0, -1.0]), 6)


def test_the_sampler_is_compared_on_tokens_of_the_policy():
    """Padding, tokens of tools and tokens that vLLM could not score are left out."""
    output = output_of(PROMPTS, COMPLETIONS)
    assert sampler_difference(output) == (0.0, 0)
    own = torch.zeros(4, 4)
    sampled = torch.tensor(
        [[0.1, -0.2, 0.3, 9.0], [0.0, 0.1, 9.0, 9.0], [0.0] * 4, [math.nan, 9.0, 9.0, 9.0]]
    )
    output |= {"sampling_per_token_logps": sampled, "old_per_token_logps": own}
    assert sampler_difference(output) == (pytest.approx(0.7, abs=1e-6), 9)
    output["tool_mask"] = torch.ones(4, 4)
    output["tool_mask"][0, 1] = 0
    assert sampler_difference(output) == (pytest.approx(0.5, abs=1e-6), 8)


@pytest.mark.parametrize("share", [1, 2, 3, 6])
def test_groups_that_straddle_ranks_are_whole(share):
    """Twelve rows of three groups, on ranks of `share` rows each."""
    rows = [Completion([p], [7, i]) for p in range(3) for i in range(4)]
    ranks = [rows[start : start + share] for start in range(0, 12, share)]
    gathered = [row for rank in ranks for row in rank]
    groups, unknown = whole_groups(gathered, *rewards(range(12)), 4)
    assert unknown == 0 and [group.completions[0].prompt_ids for group in groups] == [[0], [1], [2]]
    assert [group.rewards_G.tolist() for group in groups] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]


def test_a_group_with_an_unknown_reward_is_left_out():
    rows = [Completion([p], [7, i]) for p in range(2) for i in range(3)]
    groups, unknown = whole_groups(rows, *rewards([1.0, math.nan, 0.0, 1.0, 1.0, 1.0]), 3)
    assert unknown == 1 and [group.varies for group in groups] == [False]


@pytest.mark.parametrize(
    "rows, message",
    [
        ([Completion([1], [2])] * 5, "5 completions are not a multiple of num_generations=2"),
        ([Completion([1], [2]), Completion([3], [2])], "one group but have several prompts"),
        ([Completion([1], [2]), Completion([1], [])], "has no token"),
    ],
)
def test_what_is_no_group_is_refused(rows, message):
    with pytest.raises(ConfigError, match=message):
        whole_groups(rows, *rewards([0.0] * len(rows)), 2)
