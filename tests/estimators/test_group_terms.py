"""Terms of a prompt: all groups of a pool by levels, by enumeration, and without bias."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from grpo_ustat.estimators.baselines import BASELINES, advantages
from grpo_ustat.estimators.group_terms import (
    BY_LEVELS,
    LINEAR,
    LevelSums,
    drawn_terms,
    has_levels,
    is_linear,
    linear_terms,
    with_control,
)
from grpo_ustat.estimators.moments import centred
from grpo_ustat.estimators.row_weights import Loss, RowFilter
from grpo_ustat.estimators.token_weights import TokenWeights
from grpo_ustat.records import BaselineContext, ScorePool

OPTIONS = {"epsilon": 0.3, "value": 0.4}
LENGTHS = np.array([[1, 4, 2, 7, 3], [5, 1, 6, 2, 2], [3, 3, 1, 8, 4]])
REWARDS = {
    "0 and 1": np.array([[1.0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]),
    "three levels": np.array([[1.0, 0, 0.5, 1, 1], [0, 0.5, 0, 0.5, 1], [0, 0, 0, 0, 0]]),
}


def pool_of(rewards_PN, lengths_PN, scores_PNR):
    return ScorePool(
        rewards_PN=rewards_PN,
        gram_PNN=scores_PNR @ scores_PNR.transpose(0, 2, 1),
        lengths_PN=lengths_PN,
        features_PNR=scores_PNR,
        centred_sums_PR=(centred(rewards_PN)[..., None] * scores_PNR).sum(axis=1),
    )


def a_pool(kind, seed=0):
    scores = np.random.default_rng(seed).normal(size=(3, 5, 4))
    return pool_of(REWARDS[kind], LENGTHS, scores)


def loss_of(baseline, loss_type):
    defaults = BASELINES[baseline].options
    options = {name: OPTIONS.get(name, value) for name, value in defaults.items()}
    return Loss("own", baseline, options, loss_type, 9)


def term(loss, rewards_G, lengths_G, scores_GR):
    """T of one group, row by row."""
    factor = {"sum": lambda _: 1.0, "dr_grpo": lambda _: 1 / 9, "grpo": lambda length: 1 / length}
    context = BaselineContext(lengths_PG=lengths_G[None])
    advantage_G = advantages(loss.baseline, rewards_G[None], context, loss.options)[0]
    rows = zip(advantage_G, lengths_G, scores_GR, strict=True)
    return sum(a * factor[loss.loss_type](n) * s for a, n, s in rows) / len(rewards_G)


def of_groups(loss, pool, size):
    """Mean of ||T||^2 and of T over all groups of every prompt's pool."""
    energies, means = [], []
    for z, lengths, scores in zip(pool.rewards_PN, pool.lengths_PN, pool.features_PNR, strict=True):
        groups = map(list, itertools.combinations(range(len(z)), size))
        terms = np.array([term(loss, z[g], lengths[g], scores[g]) for g in groups])
        energies.append(np.square(terms).sum(axis=1).mean())
        means.append(terms.mean(axis=0))
    return np.array(energies), np.array(means)


@pytest.mark.parametrize("kind", REWARDS)
@pytest.mark.parametrize("loss_type", ["sum", "dr_grpo", "grpo"])
@pytest.mark.parametrize("baseline", BY_LEVELS)
def test_all_groups_of_a_pool_count(baseline, loss_type, kind):
    pool, loss = a_pool(kind), loss_of(baseline, loss_type)
    sums = LevelSums(pool, loss.length_factors(pool.lengths_PN))
    for size in range(BASELINES[baseline].min_group_size, 6):
        assert has_levels(pool, baseline, size)
        found = sums.terms(baseline, loss.options, size)
        energy, mean = of_groups(loss, pool, size)
        np.testing.assert_allclose(found.energy_P, energy, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(found.mean_PR, mean, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss_type", ["sum", "dr_grpo", "grpo"])
@pytest.mark.parametrize("baseline", LINEAR)
def test_all_groups_count_where_rewards_are_continuous(baseline, loss_type):
    rng = np.random.default_rng(4)
    pool = pool_of(10 + rng.normal(size=(3, 5)), LENGTHS, rng.normal(size=(3, 5, 4)))
    loss = loss_of(baseline, loss_type)
    for size in range(BASELINES[baseline].min_group_size, 6):
        terms = linear_terms(pool, loss, size)
        energy, mean = of_groups(loss, pool, size)
        np.testing.assert_allclose(terms.energy_P, energy, rtol=1e-11)
        np.testing.assert_allclose(terms.mean_PR, mean, rtol=1e-11, atol=1e-13)


def test_linear_terms_of_replaced_groups():
    """A prompt with equal rewards beside a continuous one; `none` needs the mixed groups alone."""
    pool = a_pool("three levels")
    rows = RowFilter("replace")
    loss = replace(loss_of("group_mean", "grpo"), rows=rows)
    levels = LevelSums(pool, loss.length_factors(pool.lengths_PN))
    for size in (2, 3, 5):
        terms = linear_terms(pool, loss, size)
        listed = levels.terms(loss.baseline, loss.options, size, replaced=True)
        np.testing.assert_allclose(terms.energy_P, listed.energy_P, atol=1e-14)
        np.testing.assert_allclose(terms.mean_PR, listed.mean_PR, atol=1e-14)
        np.testing.assert_allclose(terms.kept_P, listed.kept_P, atol=1e-14)
    assert is_linear(loss) and not is_linear(replace(loss, baseline="none"))
    assert not is_linear(replace(loss, tokens=TokenWeights("token", "clip", 0.2, 0.2)))


def test_a_control_takes_off_all_noise_of_its_own_multiple_and_none_where_it_is_0():
    rng = np.random.default_rng(5)
    pool = pool_of(rng.normal(size=(3, 5)), LENGTHS, rng.normal(size=(3, 5, 4)))
    plain, few = loss_of("leave_one_out", "sum"), np.tile([[0, 2, 4], [1, 2, 3]], (3, 1, 1))
    exact, control = linear_terms(pool, plain, 3), drawn_terms(pool, plain, few)
    other = with_control(drawn_terms(pool, loss_of("group_mean", "sum"), few), control, exact)
    np.testing.assert_allclose(other.energy_P, exact.energy_P * 4 / 9, rtol=1e-12)
    np.testing.assert_allclose(other.mean_PR, exact.mean_PR * 2 / 3, rtol=1e-12)
    still = drawn_terms(replace(pool, rewards_PN=np.ones((3, 5))), plain, few)
    np.testing.assert_array_equal(with_control(control, still, still).energy_P, control.energy_P)


@pytest.mark.parametrize("kind", REWARDS)
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("baseline", ["none", "group_mean", "group_std"])
@pytest.mark.parametrize("tokens", [
    TokenWeights("token", "clip", 0.2, 0.3),
    TokenWeights("token", "clip", 0.2, 0.3, beta=0.2, kl_estimator="k3", kl_in="loss"),
    TokenWeights("token", beta=0.2, kl_estimator="k2", kl_in="loss"),
], ids=lambda tokens: "-".join(tokens.kinds))  # fmt: skip
def test_rows_with_vectors_of_several_kinds(tokens, baseline, replaced, kind):
    """A vector for each sign of the advantage and one for the penalty, row by row: over all groups
    by levels, and over all that are listed.
    """
    size, kinds = 3, tokens.kinds
    vectors = np.random.default_rng(1).normal(size=(3, len(kinds), 5, 4))
    pool = replace(
        pool_of(REWARDS[kind], LENGTHS, vectors.reshape(3, -1, 4)[:, :5]), kinds=kinds,
        features_PNR=vectors.reshape(3, -1, 4),
        gram_PNN=vectors.reshape(3, -1, 4) @ vectors.reshape(3, -1, 4).transpose(0, 2, 1),
    )  # fmt: skip
    rows = RowFilter("replace") if replaced else RowFilter()
    loss = replace(loss_of(baseline, "grpo"), tokens=tokens, rows=rows)
    energies, means = [], []
    for z, lengths, own in zip(REWARDS[kind], LENGTHS, vectors, strict=True):
        terms = []
        for group in map(list, itertools.combinations(range(5), size)):
            advantage = advantages(baseline, z[group][None], BaselineContext(), loss.options)[0]
            total = np.zeros(4)
            for a, i in zip(advantage, group, strict=True):
                place = 0 if a >= 0 or "negative" not in kinds else 1
                row = a * own[place, i] - (0.2 * own[-1, i] if "penalty" in kinds else 0)
                total += row / lengths[i] / size
            terms.append(total * (not replaced or len(set(z[group])) > 1))
        energies.append(np.square(terms).sum(axis=1).mean())
        means.append(np.mean(terms, axis=0))
    sums = LevelSums(pool, loss.length_factors(LENGTHS))
    by_levels = sums.terms(baseline, loss.options, size, replaced, loss.beta)
    groups = np.array(list(itertools.combinations(range(5), size)))
    listed = drawn_terms(pool, loss, np.tile(groups, (3, 1, 1)))
    for found in (by_levels, listed):
        np.testing.assert_allclose(found.energy_P, energies, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(found.mean_PR, means, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", REWARDS)
@pytest.mark.parametrize("baseline", ["none", "leave_one_out", "group_std"])
def test_replaced_groups_are_the_mixed_ones_of_a_pool(baseline, kind):
    """Sums over all groups whose rewards differ, by levels and drawn."""
    pool = a_pool(kind)
    loss = replace(loss_of(baseline, "grpo"), rows=RowFilter("replace"))
    energies, means, kept = [], [], []
    for z, lengths, scores in zip(pool.rewards_PN, pool.lengths_PN, pool.features_PNR, strict=True):
        groups = list(map(list, itertools.combinations(range(5), 3)))
        mixed = [g for g in groups if len(set(z[g])) > 1]
        terms = np.array([term(loss, z[g], lengths[g], scores[g]) for g in mixed]).reshape(-1, 4)
        energies.append(np.square(terms).sum() / len(groups))
        means.append(terms.sum(axis=0) / len(groups))
        kept.append(len(mixed) / len(groups))
    assert kept[2] == 0 < kept[0] < 1
    sums = LevelSums(pool, loss.length_factors(pool.lengths_PN))
    drawn = np.tile(np.array(list(itertools.combinations(range(5), 3))), (3, 1, 1))
    for found in (
        sums.terms(baseline, loss.options, 3, replaced=True),
        drawn_terms(pool, loss, drawn),
    ):
        np.testing.assert_allclose(found.energy_P, energies, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(found.mean_PR, means, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(found.kept_P, kept, rtol=1e-12)


@pytest.mark.parametrize("baseline", ["group_std", "opo", "quantile", "pods"])
def test_drawn_groups_are_averaged_as_they_are(baseline):
    """All orders of all groups drawn once are all groups."""
    pool = a_pool("three levels")
    options = dict.fromkeys(BASELINES[baseline].options, 0.5)
    loss = Loss("own", baseline, options, "grpo", 9)
    groups = np.array(list(itertools.combinations(range(5), 3)))
    found = drawn_terms(pool, loss, np.tile(groups, (3, 1, 1)), rows=2)
    energy, mean = of_groups(loss, pool, 3)
    np.testing.assert_allclose(found.energy_P, energy, rtol=1e-12)
    np.testing.assert_allclose(found.mean_PR, mean, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("loss_type", ["sum", "grpo"])
@pytest.mark.parametrize("baseline", ["group_std", "leave_one_out", "maxrl"])
def test_the_means_over_pools_are_those_of_fresh_groups(baseline, loss_type):
    """All 81 pools of four completions of a policy of three outcomes, all 9 groups of two."""
    chances, lengths = np.array([0.5, 0.3, 0.2]), np.array([1, 4, 2])
    rewards, scores = np.array([1.0, 0.0, 1.0]), np.random.default_rng(1).normal(size=(3, 4))
    loss = loss_of(baseline, loss_type)
    energy, mean = 0.0, 0.0
    for pair in map(list, itertools.product(range(3), repeat=2)):
        vector = term(loss, rewards[pair], lengths[pair], scores[pair])
        energy += chances[pair].prod() * vector @ vector
        mean += chances[pair].prod() * vector
    drawn = np.array(list(itertools.product(range(3), repeat=4)))
    pools = pool_of(rewards[drawn], lengths[drawn], scores[drawn])
    weights = chances[drawn].prod(axis=1)
    sums = LevelSums(pools, loss.length_factors(pools.lengths_PN))
    found = sums.terms(baseline, loss.options, 2)
    assert weights @ found.energy_P == pytest.approx(energy, rel=1e-12)
    np.testing.assert_allclose(weights @ found.mean_PR, mean, rtol=1e-12)


def test_many_levels_are_not_listed():
    pool = a_pool("0 and 1")
    many = pool_of(np.arange(15.0).reshape(3, 5), LENGTHS, np.ones((3, 5, 4)))
    assert has_levels(pool, "group_std", 64) and not has_levels(many, "group_std", 8)
    assert not has_levels(pool, "opo", 2)
