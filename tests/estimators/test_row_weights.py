"""Which rows of an update count, by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from grpo_ustat.estimators.row_weights import (
    LOSS_TYPES,
    Loss,
    RowFilter,
    row_weights,
    rows_that_count,
)
from grpo_ustat.records import BaselineContext

REWARDS = np.array([[1.0, 1, 1, 1], [0, 0, 0, 1], [0, 1, 0, 1], [1, 0, 1, 1], [0.1] * 4])
LENGTHS = np.array([[3, 1, 2, 5], [2, 2, 4, 1], [1, 7, 3, 2], [2, 6, 1, 1], [5, 1, 1, 2]])


@pytest.mark.parametrize(
    "share, groups",
    [  # variances 0, 3/16, 4/16, 3/16, 0: .3, .4, .3 of their sum, the earlier of equal ones first
        (0.01, [2]), (0.4, [2]), (0.41, [1, 2]), (0.7, [1, 2]), (0.71, [1, 2, 3]),
        (0.999, [1, 2, 3]), (1.0, [0, 1, 2, 3, 4]),
    ],
)  # fmt: skip
def test_the_fewest_groups_that_hold_the_share(share, groups):
    found = rows_that_count(RowFilter(reward_variance_share=share), REWARDS)
    assert np.flatnonzero(found.all(axis=1)).tolist() == groups
    assert not found[[x for x in range(5) if x not in groups]].any()


def test_rewards_alike_but_in_another_order_are_of_equal_variance():
    """Whatever the rounding: the earlier group comes first."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        group = rng.normal(size=7)
        rewards = np.array([rng.permutation(group) for _ in range(4)])
        found = rows_that_count(RowFilter(reward_variance_share=0.5), rewards)
        assert found[:, 0].tolist() == [True, True, False, False]


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "bnpo"])
@pytest.mark.parametrize(
    "rows", [RowFilter("drop"), RowFilter(reward_variance_share=0.7), RowFilter("drop", 0.7)]
)
def test_weights_are_those_of_an_update_of_the_rows_that_count(rows, loss_type):
    """Advantages are of all rows of the update, n and tokens of those that count; one of them is
    cut and stays in n.
    """
    loss = Loss("own", "group_std", {"epsilon": 0.1}, loss_type, 9, None, True, rows)
    ended = np.ones(REWARDS.shape, dtype=bool)
    ended[2, 1] = False
    found = row_weights(loss, REWARDS, BaselineContext(lengths_PG=LENGTHS), ended)[0]
    centred = REWARDS - REWARDS.mean(axis=1, keepdims=True)
    advantage = centred / (REWARDS.std(axis=1, ddof=1, keepdims=True) + 0.1)
    counts = rows_that_count(rows, REWARDS)
    n, tokens = counts.sum(), (LENGTHS * counts * ended).sum()
    divisor = {"sum": n, "luspo": n, "dr_grpo": n * 9, "grpo": n * LENGTHS, "sapo": n * LENGTHS}
    expected = advantage / divisor.get(loss_type, tokens) * counts * ended
    assert 0 < n < REWARDS.size
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "bnpo"])
@pytest.mark.parametrize("rows", [RowFilter("drop"), RowFilter("keep", 0.5)])
def test_an_update_in_which_no_row_counts_is_zero(rows, loss_type):
    loss = Loss("own", "none", {}, loss_type, 9, rows=rows)
    context = BaselineContext(lengths_PG=LENGTHS[:2])
    assert not row_weights(loss, np.ones((2, 4)), context).any()


def test_a_filter_couples_rows_and_replaced_groups_do_not():
    def loss(baseline, rows):
        return Loss("own", baseline, {}, "sum", 9, rows=rows)

    for rows in (RowFilter("drop"), RowFilter("keep", 0.9)):
        assert loss("leave_one_out", rows).couples_prompts
        assert loss("leave_one_out", rows).scale(4) is None
    replaced = RowFilter("replace")
    assert not loss("leave_one_out", replaced).couples_prompts
    linear = ("leave_one_out", "group_mean", "none")
    assert [loss(baseline, replaced).scale(4) for baseline in linear] == [1, 0.75, None]


def exact_update(lengths_PY, size, rollouts):
    """cos^2 and efficiency of the mean over each completion's tokens at an update of n rollouts,
    enumerated: two prompts of orthogonal gradients, two outcomes of equal chance each,
    the second of reward 1, groups of G.
    """
    outcomes = np.array(list(itertools.product((0, 1), repeat=size)))
    by_loss = {}
    for loss_type in ("sum", "grpo"):
        loss = Loss("own", "leave_one_out", {}, loss_type, 1)
        means, energies = [], []
        for axis, lengths_Y in zip(np.eye(2), lengths_PY, strict=True):
            # score of a Bernoulli variable by its logit, along the prompt's axis
            terms = [
                row_weights(loss, z[None].astype(float), BaselineContext(lengths_PG=length[None]))
                .ravel() @ ((z - 0.5)[:, None] * axis)
                for z, length in zip(outcomes, np.asarray(lengths_Y)[outcomes], strict=True)
            ]  # fmt: skip
            means.append(np.mean(terms, axis=0))
            energies.append(np.square(terms).sum(axis=1).mean())
        mean, prompts = np.mean(means, axis=0), rollouts / size
        by_loss[loss_type] = mean, (np.mean(energies) - mean @ mean) / prompts
    (gradient, mse), (mean, variance) = by_loss["sum"], by_loss["grpo"]
    kappa = mean @ gradient / (gradient @ gradient)
    apart = mean - kappa * gradient
    cos_sq = (mean @ gradient) ** 2 / (mean @ mean) / (gradient @ gradient)
    return cos_sq, mse / ((apart @ apart + variance) / kappa**2)


def test_the_mean_over_tokens_turns_where_lengths_vary_between_prompts():
    """10 and 100 tokens: E of leave-one-out's mean over tokens is E[g_x / L_x]."""
    cos_sq, efficiency = exact_update([[10, 10], [100, 100]], 8, 256)
    assert cos_sq == pytest.approx(0.11**2 / (2 * (0.1**2 + 0.01**2)), rel=1e-12)
    assert (round(cos_sq, 3), round(efficiency, 3)) == (0.599, 0.046)


@pytest.mark.parametrize("lengths", [[10, 10], [4, 40]], ids=["equal", "that go with rewards"])
def test_it_does_not_where_all_prompts_have_the_same_lengths(lengths):
    """Whether or not they go with rewards within a prompt; then only the noise changes."""
    cos_sq, efficiency = exact_update([lengths, lengths], 8, 256)
    assert cos_sq == pytest.approx(1, rel=1e-12)
    assert efficiency == pytest.approx(1, abs=0.6 if lengths[0] != lengths[1] else 1e-12)
