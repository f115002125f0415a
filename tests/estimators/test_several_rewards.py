"""Several reward functions: against loops, and by enumeration of what their order changes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from reference import gdpo_rows, joint_mean, softmax_policy, standardised, true_gradient

from grpo_ustat.estimators.baselines import advantages, group_std, weighted_sum
from grpo_ustat.estimators.baselines.several import normalise_then_sum
from grpo_ustat.records import BaselineContext

EPSILON = 1e-4


def sum_then_normalise(rewards_PGF, weights_F, *, epsilon):
    """`group_std` of the weighted sum of F rewards, [P, G]: TRL's `sum_then_normalize`.

    A function of small spread beside another of large spread hardly counts: completions with the
    same sum get the same advantage, whatever the sum is made of.

    Args:
        rewards_PGF: of every reward function, float64.
        weights_F: of the functions.
        epsilon: added to the std (TRL: 1e-4).
    """
    total_PG = weighted_sum(rewards_PGF, weights_F)
    return group_std(total_PG, BaselineContext(), epsilon=epsilon)


def slow(order, rewards, weights):
    """Advantages of a batch, written out."""
    if order == "each":
        return gdpo_rows(rewards, weights, EPSILON)
    totals = [[sum(w * z for w, z in zip(weights, row, strict=True)) for row in g] for g in rewards]
    return [standardised(group, EPSILON) for group in totals]


@pytest.mark.parametrize(
    "order, baseline", [("sum", sum_then_normalise), ("each", normalise_then_sum)]
)
def test_both_orders_are_those_written_out(order, baseline, rng):
    for trial in range(20):
        z = rng.random((3, 4, 2))
        z = np.round(z) if trial % 2 else z
        weights = rng.random(2) + 0.1
        found = baseline(z, weights, epsilon=EPSILON)
        np.testing.assert_allclose(found, slow(order, z.tolist(), weights.tolist()), atol=1e-10)


def test_equal_rewards_give_no_advantage():
    z = np.full((2, 3, 2), 0.1)
    for baseline in (sum_then_normalise, normalise_then_sum):
        np.testing.assert_allclose(baseline(z, np.ones(2), epsilon=0.0), 0, atol=1e-12)


def mean_direction(baseline, scale):
    """By enumeration of one prompt's groups of 4 over three outcomes, direction of the mean.

    The first function rewards outcome 0; the second, of that scale, outcome 1, and counts half:
    with equal weights a group of both would cancel but for epsilon, which the last std magnifies.
    """
    p, scores = softmax_policy([0.2, -0.3, 0.1])
    z = np.array([[1.0, 0.0], [0.0, scale], [0.0, 0.0]])
    total = np.zeros(3)
    for outcome in itertools.product(range(3), repeat=4):
        index = list(outcome)
        advantage = baseline(z[index][None], np.array([1.0, 0.5]), epsilon=1e-9)[0]
        total += np.prod([p[y] for y in index]) * advantage @ np.array(scores)[index] / 4
    return total / np.linalg.norm(total)


def test_normalising_each_function_makes_the_scale_of_a_reward_harmless():
    """GDPO's mean is the same whatever the scale of one function; TRL's sum leans to the larger."""
    np.testing.assert_allclose(
        mean_direction(normalise_then_sum, 1.0), mean_direction(normalise_then_sum, 20.0), atol=1e-6
    )
    leaning = [mean_direction(sum_then_normalise, scale) for scale in (1.0, 20.0)]
    assert leaning[1][1] > leaning[0][1] + 0.3


def gdpo_of(rewards_PGF, weights):
    context = BaselineContext(rewards_PGF=rewards_PGF, reward_weights_F=np.array(weights))
    total_PG = weighted_sum(rewards_PGF, np.array(weights))
    return advantages("gdpo", total_PG, context, {"epsilon": 1e-9})


def test_the_rule_worked_by_hand():
    """Two groups of two. The first function has advantages +-1/sqrt 2 in group 0 and 0 in group 1,
    the second 0 and +-1/sqrt 2; with weights 1 and 1/2 the batch's squares are 1/2, 1/2, 1/8, 1/8,
    its std with divisor 3 is sqrt(5/12)."""
    z = np.array([[[1.0, 0.3], [0.0, 0.3]], [[1.0, 0.0], [1.0, 0.2]]])
    top = np.sqrt(0.5) / np.sqrt(5 / 12)
    found = gdpo_of(z, [1.0, 0.5])
    np.testing.assert_allclose(found, [[top, -top], [-top / 2, top / 2]], rtol=1e-6)


def test_a_scale_of_a_function_changes_no_advantage_and_a_silent_group_has_none(rng):
    z = rng.random((3, 4, 2))
    z[1] = z[1, 0]
    found = gdpo_of(z, [1.0, 0.3])
    assert (found[1] == 0).all()
    assert np.abs(found[[0, 2]]).min() > 0
    np.testing.assert_allclose(gdpo_of(z * [1.0, 50.0], [1.0, 0.3]), found, rtol=1e-6)


def test_the_mean_of_the_rule_is_no_multiple_of_the_gradient_of_the_sum():
    """By enumeration of two prompts, groups of two: biased in direction, where leave_one_out's mean
    is the gradient of the weighted sum."""
    functions = {1: (1.0, 0.4), 2: (0.0, 1.0), 3: (0.5, 0.0)}  # by the length of the completion
    weights = np.array([1.0, 0.5])
    sums = [float(weights @ functions[length]) for length in (1, 2, 3)]
    prompts = [([0.2, -0.3, 0.1], sums, [1, 2, 3]), ([1.0, 0.0, -0.5], sums, [1, 2, 3])]
    gradient = sum(true_gradient(logits, sums) for logits, _, _ in prompts) / 2

    def unbiased(rewards, lengths):
        return advantages("leave_one_out", np.array(rewards), BaselineContext())

    def gdpo(rewards, lengths):
        return gdpo_of(np.array([[functions[x] for x in row] for row in lengths]), weights)

    np.testing.assert_allclose(joint_mean(prompts, 2, unbiased), gradient, atol=1e-12)
    mean = joint_mean(prompts, 2, gdpo)
    cosine = mean @ gradient / np.linalg.norm(mean) / np.linalg.norm(gradient)
    assert 0 < cosine < 0.99


def test_the_mean_of_the_rule_goes_to_the_sum_of_normalised_gradients():
    """By enumeration of one prompt: the angle to sum_f w_f g_f/sigma_f falls as groups grow."""
    logits, weights = [0.2, -0.3, 0.1], np.array([1.0, 0.5])
    z = np.array([[1.0, 0.0], [0.0, 4.0], [0.3, 1.0]])
    p, scores = (np.array(x) for x in softmax_policy(logits))
    limit = sum(
        w * true_gradient(logits, list(r)) / np.sqrt(p @ r**2 - (p @ r) ** 2)
        for w, r in zip(weights, z.T, strict=True)
    )
    angles = []
    for size in (2, 4, 7):
        mean = np.zeros(3)
        for outcome in itertools.product(range(3), repeat=size):
            index = list(outcome)
            mean += p[index].prod() * gdpo_of(z[index][None], weights)[0] @ scores[index]
        angles.append(np.arccos(mean @ limit / np.linalg.norm(mean) / np.linalg.norm(limit)))
    assert angles[0] > angles[1] > angles[2]
    assert angles[2] < 0.1


def test_sums_of_equal_rewards_are_equal():
    z = np.tile(np.array([0.1, 0.7, 0.3]), (3, 5, 1))
    total = weighted_sum(z, np.array([0.3, 1.1, -0.7]))
    assert (total == total[0, 0]).all()
    np.testing.assert_array_equal(weighted_sum(z[..., :1], np.ones(1)), z[..., 0])
