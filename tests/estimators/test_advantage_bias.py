"""Mixed groups against every outcome of a group, and estimates against every pool."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import binom
from tabular import TabularPolicy

from grpo_ustat.estimators.advantage_bias import mean_shift, mixed_groups_after
from grpo_ustat.estimators.baselines import advantages
from grpo_ustat.records import BaselineContext


def groups_of(chance, size):
    """Every group of 0/1 rewards with its chance."""
    for group in itertools.product((0.0, 1.0), repeat=size):
        rewards = np.array(group)
        yield rewards, chance ** rewards.sum() * (1 - chance) ** (size - rewards.sum())


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("size", [2, 3, 6])
def test_the_mean_of_mixed_groups_is_shifted_towards_one_half(chance, size):
    mixed = [(z, law) for z, law in groups_of(chance, size) if 0 < z.mean() < 1]
    shift = sum(law * (z.mean() - chance) for z, law in mixed)
    wrong = 1 - chance
    assert shift == pytest.approx(chance * wrong**size - wrong * chance**size, abs=1e-12)
    assert np.sign(round(shift, 9)) == np.sign(0.5 - chance)
    # unbiased over all pools of 8 completions
    every = np.arange(9)
    pools = (np.arange(8) < every[:, None]).astype(float)
    assert binom.pmf(every, 8, chance) @ mean_shift(pools, size) == pytest.approx(shift, abs=1e-12)


@pytest.mark.parametrize(("baseline", "factor"), [("leave_one_out", 1.0), ("group_mean", 2 / 3)])
def test_the_gradient_of_mixed_groups_is_longer_exactly_as_they_are_rarer(baseline, factor):
    rng = np.random.default_rng(3)
    rewards = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    problem = TabularPolicy(rng.normal(size=(3, 3, 4)), 1.5 * rng.normal(size=4), rewards)
    for p in range(3):
        mean, mixed_mean, mixed = np.zeros(4), np.zeros(4), 0.0
        for group in itertools.product(range(3), repeat=3):
            index = list(group)
            z = problem.rewards_PY[p, index]
            law = np.prod(problem.probabilities_PY[p, index])
            weights = advantages(baseline, z[None], BaselineContext())[0]
            estimate = weights @ problem.scores_PYD[p, index] / 3
            mean += law * estimate
            if 0 < z.mean() < 1:
                mixed += law
                mixed_mean += law * estimate
        np.testing.assert_allclose(mean, factor * problem.gradient_PD[p], atol=1e-12)
        np.testing.assert_allclose(mixed_mean / mixed, mean / mixed, atol=1e-12)


@pytest.mark.parametrize(("name", "right"), [("hard", 0), ("easy", 3)])
def test_what_follows_a_group_of_equal_rewards_is_unbiased(name, right):
    """Over all pools of 8 completions, of two chances."""
    pools = [np.array(bits, float) for bits in itertools.product((0, 1), repeat=8)]
    pool_PN = np.array(pools)
    counts = pool_PN.sum(axis=1)
    found = mixed_groups_after(pool_PN, 3)[name]
    for chance in (0.2, 0.6):
        law = chance**counts * (1 - chance) ** (8 - counts)
        weight = chance**right * (1 - chance) ** (3 - right)
        mixed = 1 - chance**3 - (1 - chance) ** 3
        shift = chance * (1 - chance) ** 3 - (1 - chance) * chance**3
        assert law @ found.weight_P == pytest.approx(weight, abs=1e-12)
        assert law @ found.mixed_P == pytest.approx(weight * mixed, abs=1e-12)
        assert law @ found.shift_P == pytest.approx(weight * shift, abs=1e-12)


def test_intervals_cover_what_follows_such_a_group():
    rng = np.random.default_rng(4)
    chances = rng.beta(1, 1.5, size=4000)
    rewards = (rng.random((4000, 20)) < chances[:, None]).astype(float)
    weight, mixed = (1 - chances) ** 4, 1 - chances**4 - (1 - chances) ** 4
    shift = chances * (1 - chances) ** 4 - (1 - chances) * chances**4
    found = mixed_groups_after(rewards, 4)["hard"]
    low, high = found.shift()[1:]
    assert low < (weight @ shift) / (weight @ mixed) < high < low + 0.03
    low, high = found.longer()[1:]
    assert low < weight.sum() / (weight @ mixed) < high < low + 0.2


def test_what_too_few_prompts_say_is_left_out():
    rewards = np.zeros((30, 12))
    rewards[:20, ::3] = 1  # halves of four wrong ones and two right ones; others all wrong
    assert list(mixed_groups_after(rewards, 3)) == ["hard"]
    assert mixed_groups_after(rewards[13:], 3) == {}  # seven prompts
    assert mixed_groups_after(rewards, 5) == {}  # no group of 5 is all wrong beside a mixed one
