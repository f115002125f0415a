"""Rows of other trainers: the advantages are those of the same groups, wherever the rows stand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import zoo_advantages

from grpo_ustat.config.folders import CONF
from grpo_ustat.estimators.baselines import OURS, advantages
from grpo_ustat.integrations.rows import REWARD_ONLY, estimator, row_advantages, rule_options
from grpo_ustat.records import BaselineContext

EVERY_RULE = pytest.mark.parametrize("rule", REWARD_ONLY)
OF_THREE = ("group_std_jackknife", "leave_one_out_std")  # completions at least
UNEQUAL = {"a": [1.0, 0.0, 0.0], "b": [1.0, 0.0], "c": [0.0, 0.0, 1.0], "d": [0.5, 1.0]}


@pytest.fixture
def shuffled(rng):
    """Rewards of five groups of four, their rows in another order, and each row's group."""
    rewards_PG = rng.integers(0, 2, (5, 4)).astype(float)
    order = rng.permutation(20)
    return rewards_PG, rewards_PG.ravel()[order], [f"uid {row // 4}" for row in order], order


@EVERY_RULE
def test_rows_in_any_order_have_the_advantages_of_their_groups(rule, shuffled):
    rewards_PG, reward_B, group_B, order = shuffled
    options = rule_options(rule, {})
    ours = advantages(rule, rewards_PG, BaselineContext(), options).ravel()[order]
    found = row_advantages(rule, reward_B, group_B, options)
    # the batch's prompts come in another order, which moves the last bits of a batch's mean
    np.testing.assert_allclose(found, ours, atol=1e-15)
    loops = zoo_advantages(rule, rewards_PG.tolist(), None, {}, options)
    np.testing.assert_allclose(ours, np.ravel(loops)[order], atol=1e-12)


@EVERY_RULE
def test_groups_of_several_sizes(rule):
    """Each as if it were alone; a rule of the whole batch refuses them, with both sizes."""
    group_B = ["a", "b", "c", "d", "a", "b", "c", "d", "a", "c"]
    reward_B = np.array([UNEQUAL[g][group_B[:i].count(g)] for i, g in enumerate(group_B)])
    options = rule_options(rule, {})
    if rule in ("batch_std", "james_stein", "jspo", "beta"):
        with pytest.raises(ValueError, match="groups of one size, got groups of 2 to 3 comp"):
            row_advantages(rule, reward_B, group_B, options)
        return
    if rule in OF_THREE:
        with pytest.raises(ValueError, match="at least 3 completions, group b has 2: sample more"):
            row_advantages(rule, reward_B, group_B, options)
        return
    result = row_advantages(rule, reward_B, group_B, options)
    for group, rewards in UNEQUAL.items():
        alone = advantages(rule, np.array([rewards]), BaselineContext(), options)[0]
        mine = [row for row, other in enumerate(group_B) if other == group]
        assert result[mine].tolist() == alone.tolist()


@EVERY_RULE
def test_a_group_of_one(rule):
    """Refused by its name; a rule that subtracts no mean takes it."""
    reward_B, group_B = np.array([1.0, 0.0, 1.0]), ["a", "b", "a"]
    if rule in ("none", "constant"):
        shift = {"none": 0.0, "constant": 0.25}[rule]
        options = {"value": 0.25} if rule == "constant" else {}
        assert row_advantages(rule, reward_B, group_B, options).tolist() == [
            reward - shift for reward in reward_B
        ]
        return
    least, group = (3, "a has 2") if rule in OF_THREE else (2, "b has 1")
    refusal = f"at least {least} completions, group {group}: sample more"
    with pytest.raises(ValueError, match=refusal):
        row_advantages(rule, reward_B, group_B, rule_options(rule, {}))


def test_tokens_have_the_advantage_of_their_completion():
    """A reward is the sum of its token rewards, and nothing stands outside the mask."""
    rewards = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0], [0.0, 0.25, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 1]])
    both = estimator("leave_one_out")(
        token_level_rewards=rewards, response_mask=mask, index=np.array(list("xxx"), dtype=object),
        config=None, gamma=1.0, values=None,
    )  # fmt: skip
    expected = torch.tensor([[0.875, 0.875, 0.0], [-0.625, -0.625, -0.625], [-0.25, 0.0, -0.25]])
    for tokens in both:
        assert tokens.dtype == torch.float32 and torch.equal(tokens, expected)
    halves = estimator("leave_one_out")(rewards.bfloat16(), mask.bool(), list("xxx"))[0]
    assert torch.equal(halves, expected)


@pytest.mark.parametrize("padding", [["pad0", "pad1"], ["pad" + "0f" * 16] * 2, ["pad7"]])
@EVERY_RULE
def test_rows_that_fill_a_batch_have_no_part(rule, padding, shuffled):
    """SkyRL's copy the first row under groups of their own, verl's are zeros under one group."""
    _, reward_B, group_B, _ = shuffled
    rewards_BT = torch.tensor(reward_B, dtype=torch.float32)[:, None]
    filled_BT = torch.cat([rewards_BT, torch.ones(len(padding), 1)])
    plain, _ = estimator(rule)(rewards_BT, torch.ones(20, 1), group_B)
    filled, _ = estimator(rule)(filled_BT, torch.ones(len(filled_BT), 1), group_B + padding)
    assert torch.equal(filled[:20], plain) and not filled[20:].any()


def test_a_group_called_like_padding_only_at_its_beginning_is_one():
    rewards = torch.tensor([[1.0], [0.0]])
    tokens, _ = estimator("group_mean")(rewards, torch.ones(2, 1), ["paddle", "paddle"])
    assert tokens.tolist() == [[0.5], [-0.5]]


def test_rows_without_groups_are_refused():
    with pytest.raises(ValueError, match="group_mean needs the group of each row, got no index"):
        estimator("group_mean")(torch.zeros(2, 1), torch.ones(2, 1))


def test_options_are_those_of_the_configurations_or_the_users():
    assert rule_options("group_std", {}) == {"epsilon": 1e-4}
    assert rule_options("group_std", {"epsilon": 1.0}) == {"epsilon": 1.0}
    rewards = torch.tensor([[2.0], [0.0], [1.0]])
    tokens, _ = estimator("group_std", epsilon=1.0)(rewards, torch.ones(3, 1), list("aaa"))
    assert tokens.ravel().tolist() == [0.5, -0.5, 0.0]
    with pytest.raises(ValueError, match="unknown eps"):
        estimator("group_std", eps=1.0)


@pytest.mark.parametrize("rule", sorted({*OURS} - {*REWARD_ONLY}))
def test_a_rule_that_reads_more_than_rewards_is_refused_with_the_names(rule):
    with pytest.raises(ValueError, match=f"^baseline {rule} reads .*; the names are none, leave"):
        estimator(rule)


def test_every_rule_that_reads_rewards_alone_is_offered():
    assert set(REWARD_ONLY) == {
        "none", "constant", "leave_one_out", "group_mean", "group_std", "maxrl",
        "batch_std", "james_stein", "jspo", "beta",
        "group_std_jackknife", "leave_one_out_std", "quantile",
    }  # fmt: skip
    assert all((CONF / "baseline" / f"{rule}.yaml").is_file() for rule in REWARD_ONLY)
