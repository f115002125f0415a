"""Mixed groups against every outcome of a group, and estimates against every pool."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import binom
from tabular import TabularPolicy

from grpo_ustat.estimators.advantage_bias import mean_shift, mixed_groups_by_chance
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


@pytest.mark.parametrize(("rule", "factor"), [("leave_one_out", 1.0), ("group_mean", 2 / 3)])
def test_the_gradient_of_mixed_groups_is_longer_exactly_as_they_are_rarer(rule, factor):
    rng = np.random.default_rng(3)
    rewards = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    bed = TabularPolicy(rng.normal(size=(3, 3, 4)), 1.5 * rng.normal(size=4), rewards)
    for p in range(3):
        mean, mixed_mean, mixed = np.zeros(4), np.zeros(4), 0.0
        for group in itertools.product(range(3), repeat=3):
            index = list(group)
            z = bed.rewards_PY[p, index]
            law = np.prod(bed.probabilities_PY[p, index])
            weights = advantages(rule, z[None], BaselineContext())[0]
            estimate = weights @ bed.scores_PYD[p, index] / 3
            mean += law * estimate
            if 0 < z.mean() < 1:
                mixed += law
                mixed_mean += law * estimate
        np.testing.assert_allclose(mean, factor * bed.gradient_PD[p], atol=1e-12)
        np.testing.assert_allclose(mixed_mean / mixed, mean / mixed, atol=1e-12)


def test_bins_are_chosen_by_other_completions():
    rng = np.random.default_rng(4)
    chances = np.repeat([0.1, 0.5, 0.9], 4000)
    rewards = (rng.random((12000, 20)) < chances[:, None]).astype(float)
    bins = mixed_groups_by_chance(rewards, 4)
    kinds = np.array([0.1, 0.5, 0.9])
    mixed = 1 - kinds**4 - (1 - kinds) ** 4
    shift = kinds * (1 - kinds) ** 4 - (1 - kinds) * kinds**4
    for name, members in (("hard", range(3)), ("middle", range(3, 8)), ("easy", range(8, 11))):
        law = binom.pmf(np.array(members)[:, None], 10, kinds).sum(axis=0)
        found = bins[name].shift()
        assert found.low < (law @ shift) / (law @ mixed) < found.high
        assert bins[name].longer().estimate == pytest.approx(law.sum() / (law @ mixed), rel=0.02)
    own = (rewards[:, :10].mean(axis=1) < 0.25) & (chances == 0.5)
    assert own.sum() > 50
    assert rewards[own, 10:].mean() == pytest.approx(0.5, abs=0.03)  # the other half is as ever


def test_bins_with_too_little_are_left_out():
    rewards = np.zeros((30, 12))
    rewards[:20, ::2] = 1  # those of the middle are all mixed, of the others none is
    assert list(mixed_groups_by_chance(rewards, 4)) == ["middle"]
    assert mixed_groups_by_chance(rewards[:7], 4) == {}
