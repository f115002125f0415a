"""What the relative efficiency is: by the definition, on all joint batches of three prompts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from grpo_ustat.estimators.efficiency import (
    UNKNOWN,
    LossError,
    UpdateMoments,
    best_sizes,
    direction,
    loss_error,
    mean_over_prompts,
    product_of_means,
    ratio,
    relative,
    relative_efficiency,
    update_moments,
)
from grpo_ustat.estimators.group_terms import GroupTerms
from grpo_ustat.estimators.row_weights import Loss, RowFilter, mixed_groups, row_weights
from grpo_ustat.records import BaselineContext

CHANCES = np.array([[0.5, 0.3, 0.2], [0.7, 0.3, 0.0], [0.2, 0.4, 0.4]])
REWARDS = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.5, 0.0]])
LENGTHS = np.array([[1, 4, 2], [3, 5, 1], [6, 2, 1]])
SCORES = np.random.default_rng(2).normal(size=(3, 3, 4))
SCORES -= np.einsum("py,pyr->pr", CHANCES, SCORES)[:, None]  # E s = 0
GRADIENTS = np.einsum("py,py,pyr->pr", CHANCES, REWARDS, SCORES)
TRUE = GRADIENTS.mean(axis=0)
LOSSES = [
    Loss("own", "leave_one_out", {}, "sum", 9),
    Loss("own", "group_mean", {}, "dr_grpo", 9),
    Loss("own", "group_std", {"epsilon": 0.1}, "grpo", 9),
    Loss("own", "group_std", {"epsilon": 0.1}, "dapo", 9),
    Loss("own", "batch_std", {"epsilon": 0.1}, "bnpo", 9, micro_batch_size=2),
    Loss("drop", "leave_one_out", {}, "sum", 9, rows=RowFilter("drop")),
    Loss("drop", "group_std", {"epsilon": 0.1}, "dapo", 9, rows=RowFilter("drop")),
    Loss("share", "group_mean", {}, "sum", 9, rows=RowFilter(reward_variance_share=0.7)),
]


def joint_batches(loss, prompts, size=2):
    """Updates of all joint batches and their chances: prompts and completions drawn anew."""
    rows = itertools.product(itertools.product(range(3), repeat=size), repeat=prompts)
    updates, chances = [], []
    for questions, outcomes in itertools.product(
        itertools.product(range(3), repeat=prompts), list(rows)
    ):
        x, y = np.array(questions)[:, None], np.array(outcomes)
        context = BaselineContext(lengths_PG=LENGTHS[x, y])
        weights = row_weights(loss, REWARDS[x, y], context)[0]
        updates.append(np.einsum("pg,pgr->r", weights, SCORES[x, y]))
        chances.append(CHANCES[x, y].prod() / 3**prompts)
    return np.array(updates), np.array(chances)


def exact(value):
    """Of a sample that says the same without any of its prompts."""
    return np.full(5, float(value))


@pytest.mark.parametrize(
    "loss", LOSSES, ids=lambda loss: f"{loss.name}-{loss.baseline}-{loss.loss_type}"
)
def test_the_error_is_that_of_all_joint_batches(loss):
    updates, chances = joint_batches(loss, prompts=2)
    mean, energy = chances @ updates, chances @ np.square(updates).sum(axis=1)
    signal = TRUE @ TRUE
    moments = UpdateMoments(*map(exact, (energy, mean @ mean, mean @ TRUE)), scale=None)
    found = loss_error(moments, exact(signal))
    assert found.kappa_known
    kappa = mean @ TRUE / signal
    by_definition = chances @ np.square(updates / kappa - TRUE).sum(axis=1)
    assert found.error_D[0] == pytest.approx(by_definition, rel=1e-12)
    efficiency = (mean @ TRUE) ** 2 / (signal * energy)
    assert signal / (signal + found.error_D[0]) == pytest.approx(efficiency, rel=1e-12)
    if loss.scale(2) is not None:
        np.testing.assert_allclose(mean, loss.scale(2) * TRUE, rtol=1e-12)


@pytest.mark.parametrize("loss", LOSSES[:3], ids=lambda loss: f"{loss.baseline}-{loss.loss_type}")
def test_an_additive_update_is_the_mean_of_terms(loss):
    """From exact terms of three prompts: what pairs of different prompts say of the population."""
    terms = []
    for prompt in range(3):
        vectors, chances = [], []
        for outcomes in itertools.product(range(3), repeat=2):
            y = list(outcomes)
            context = BaselineContext(lengths_PG=LENGTHS[None, prompt, y])
            weights = row_weights(loss, REWARDS[None, prompt, y], context)[0][0]
            vectors.append(weights @ SCORES[prompt, y])
            chances.append(CHANCES[prompt, y].prod())
        vectors, chances = np.array(vectors), np.array(chances)
        terms.append((chances @ np.square(vectors).sum(axis=1), chances @ vectors))
    energy, mean = (np.array(x) for x in zip(*terms, strict=True))
    moments = update_moments(GroupTerms(energy, mean), GRADIENTS, 2.0, scale=None)
    pairs = list(itertools.permutations(range(3), 2))  # a batch of two different prompts
    assert moments.mean_sq_D[0] == pytest.approx(np.mean([mean[i] @ mean[j] for i, j in pairs]))
    cross = np.mean([mean[i] @ GRADIENTS[j] for i, j in pairs])
    assert moments.cross_D[0] == pytest.approx(cross, rel=1e-12)
    of_pair = np.mean([(energy[i] + energy[j] + 2 * mean[i] @ mean[j]) / 4 for i, j in pairs])
    assert moments.energy_D[0] == pytest.approx(of_pair, rel=1e-12)


@pytest.mark.parametrize("baseline", ["leave_one_out", "none"])
def test_an_update_of_replaced_groups_has_the_moments_of_mixed_ones(baseline):
    """All joint batches given that the rewards of each group differ; the terms are those of a
    population of the three prompts, copied so that pairs of different ones are nearly all pairs.
    """
    loss = Loss("own", baseline, {}, "sum", 9, rows=RowFilter("replace"))
    prompts = 2
    rows = itertools.product(itertools.product(range(3), repeat=2), repeat=prompts)
    updates, chances = [], []
    for questions, outcomes in itertools.product(
        itertools.product(range(3), repeat=prompts), list(rows)
    ):
        x, y = np.array(questions)[:, None], np.array(outcomes)
        if not mixed_groups(REWARDS[x, y]).all():
            continue
        context = BaselineContext(lengths_PG=LENGTHS[x, y])
        weights = row_weights(loss, REWARDS[x, y], context)[0]
        updates.append(np.einsum("pg,pgr->r", weights, SCORES[x, y]))
        chances.append(CHANCES[x, y].prod())
    updates, chances = np.array(updates), np.array(chances) / sum(chances)
    mean, energy = chances @ updates, chances @ np.square(updates).sum(axis=1)
    terms = []
    for prompt in range(3):
        vectors, weights = [], []
        for y in map(list, itertools.product(range(3), repeat=2)):
            context = BaselineContext(lengths_PG=LENGTHS[None, prompt, y])
            weight = row_weights(loss, REWARDS[None, prompt, y], context)[0][0]
            mixed = len(set(REWARDS[prompt, y])) > 1
            vectors.append(weight @ SCORES[prompt, y])
            weights.append(CHANCES[prompt, y].prod() * mixed)
        vectors, weights = np.array(vectors), np.array(weights)
        energy_x = weights @ np.square(vectors).sum(axis=1)
        terms.append((energy_x, weights @ vectors, weights.sum()))
    copies = 4000
    energies, means, kept = (
        np.tile(np.array(x), (copies, 1)[: np.ndim(x)]) for x in zip(*terms, strict=True)
    )
    population = GroupTerms(energies, means, kept)
    gradient = np.tile(GRADIENTS, (copies, 1))
    found = update_moments(population, gradient, prompts, loss.scale(2))
    assert found.energy_D[0] == pytest.approx(energy, rel=1e-3)
    assert found.mean_sq_D[0] == pytest.approx(mean @ mean, rel=1e-3)
    assert found.cross_D[0] == pytest.approx(mean @ TRUE, rel=1e-3)
    if baseline == "leave_one_out":  # 0 on groups of equal rewards: E ghat = grad J / K
        np.testing.assert_allclose(mean, TRUE / np.mean(kept), rtol=1e-12)
        error = loss_error(found, product_of_means(gradient, gradient)).error_D[0]
        by_definition = chances @ np.square(updates * np.mean(kept) - TRUE).sum(axis=1)
        assert error == pytest.approx(by_definition, rel=1e-3)
    else:
        assert loss.scale(2) is None


def test_without_a_prompt_is_the_sample_without_it():
    rng = np.random.default_rng(3)
    left, right = rng.normal(size=(2, 8, 3))
    mean_D, product_D = mean_over_prompts(left[:, 0]), product_of_means(left, right)
    for place, missed in enumerate([None, *range(8)]):
        kept = [x for x in range(8) if x != missed]
        product = np.mean([left[x] @ right[y] for x, y in itertools.permutations(kept, 2)])
        assert mean_D[place] == pytest.approx(left[kept, 0].mean(), rel=1e-12)
        assert product_D[place] == pytest.approx(product, rel=1e-12)


def sample_of(prompts, completions, seed, signal=1.0):
    """Exact-score pools of a population of Gaussian prompts with a common gradient."""
    rng = np.random.default_rng(seed)
    mean = rng.normal(size=(prompts, 5)) * 0.3
    mean[:, 0] += signal
    return GroupTerms(np.square(mean).sum(axis=1) + 20 / completions, mean), mean


def test_the_unbiased_estimate_is_worth_itself_and_half_as_noisy_a_one_twice():
    terms, gradient = sample_of(40, 4, 0)
    signal = product_of_means(gradient, gradient)
    error = loss_error(update_moments(terms, gradient, 16, scale=1.0), signal)
    itself = relative_efficiency(error, 4, {4: error.error_D})
    assert itself.efficiency_same_g == pytest.approx((1, 1, 1)) and itself.direction == (1, 1, 1)
    better = relative_efficiency(error, 4, {4: 2 * error.error_D, 8: error.error_D})
    assert better.efficiency_same_g == pytest.approx((2, 2, 2))
    assert better.efficiency_best_g == pytest.approx((1, 1, 1))
    assert 0 < itself.noise.low < itself.noise.estimate < itself.noise.high < 1


def test_where_the_best_size_may_be_another_the_interval_reaches_down_to_it():
    """The estimate is against the G that came out best, which judges itself."""
    terms, gradient = sample_of(40, 4, 0)
    signal = product_of_means(gradient, gradient)
    error = loss_error(update_moments(terms, gradient, 16, scale=1.0), signal)
    noisy = np.concatenate([[1.01], 1.01 + 0.02 * np.random.default_rng(1).normal(size=40)])
    found = relative_efficiency(error, 4, {4: error.error_D, 8: noisy * error.error_D})
    assert found.efficiency_same_g == pytest.approx((1, 1, 1))
    assert (
        found.efficiency_best_g.estimate == pytest.approx(1) and found.efficiency_best_g.low < 0.95
    )
    assert found.efficiency_best_g.high == pytest.approx(1)


def test_a_scaled_loss_is_worth_the_same_and_needs_no_signal():
    terms, gradient = sample_of(40, 4, 1, signal=0.0)
    tripled = GroupTerms(9 * terms.energy_P, 3 * terms.mean_PR)
    signal = product_of_means(gradient, gradient)
    one = loss_error(update_moments(terms, gradient, 16, scale=1.0), signal)
    three = loss_error(update_moments(tripled, gradient, 16, scale=3.0), signal)
    np.testing.assert_allclose(three.error_D, one.error_D, rtol=1e-9)
    assert three.kappa_known
    unknown = loss_error(update_moments(terms, gradient, 16, scale=None), signal)
    assert not unknown.kappa_known
    said = relative_efficiency(unknown, 4, {4: one.error_D})
    assert np.isnan(said.efficiency_same_g.estimate) and said.efficiency_same_g[1:] == (0, np.inf)


def test_sizes_that_are_not_worse_are_named_with_the_best():
    noise = np.random.default_rng(4).normal(size=(3, 100)) * 1e-3
    errors = {
        size: np.concatenate([[value], value + noise[number]])
        for number, (size, value) in enumerate({2: 2.0, 4: 1.0, 8: 1.01}.items())
    }
    assert best_sizes(errors) == (4, [4, 8])


def turned_sample(prompts, seed):
    """Means over tokens of prompts of 10 and 100 tokens with orthogonal gradients."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(2, size=prompts)
    gradient = np.eye(2)[kind] * rng.normal(1.0, 0.35, size=(prompts, 1))
    mean = gradient / np.array([10, 100])[kind, None]
    moments = UpdateMoments(
        product_of_means(mean, mean), product_of_means(mean, mean),
        product_of_means(mean, gradient), None,
    )  # fmt: skip
    return loss_error(moments, product_of_means(gradient, gradient))


def test_a_truly_turned_direction_lies_in_its_interval():
    """cos^2 = (1/10 + 1/100)^2 / (2 (1/100 + 1/10000)); Fieller's set alone misses 11 %."""
    square = 0.11**2 / 2 / 0.0101
    found = [direction(turned_sample(100, seed)) for seed in range(300)]
    said = [x for x in found if np.isfinite(x.estimate)]
    assert len(said) >= 285
    assert np.mean([not x.low <= square <= x.high for x in said]) <= 0.05
    assert np.median([x.high - x.low for x in said]) < 0.8


def test_a_right_direction_stays_known():
    """Lengths that go with nothing: the interval reaches 1 and is short."""
    rng = np.random.default_rng(5)
    gradient = rng.normal(size=(200, 5)) * 0.5 + np.eye(5)[0]
    mean = gradient * np.exp(0.3 * rng.normal(size=(200, 1)))
    moments = UpdateMoments(
        product_of_means(mean, mean), product_of_means(mean, mean),
        product_of_means(mean, gradient), None,
    )  # fmt: skip
    found = direction(loss_error(moments, product_of_means(gradient, gradient)))
    assert 0.97 < found.low < found.estimate <= found.high == 1


def test_few_prompts_tell_no_direction():
    """Of four prompts of one kind nothing is known of a kind that was not drawn."""
    found = direction(turned_sample(4, 11))
    assert np.isnan(found.estimate) and found[1:] == (0.0, 1.0)


def test_a_worth_holds_those_at_both_ends_of_kappa():
    """Of an update whose noise is three times its mean; without a lower end nothing is said."""
    mean_alone = turned_sample(100, 3)
    energy_D = 4 * mean_alone.energy_D
    kappa_D = mean_alone.cross_D / mean_alone.signal_D
    loss = replace(
        mean_alone, energy_D=energy_D, error_D=energy_D / kappa_D**2 - mean_alone.signal_D
    )
    unbiased = 2 * loss.signal_D
    assert relative(unbiased, mean_alone) == UNKNOWN
    kappa = ratio(loss.cross_D, loss.signal_D, level=0.9)
    found = relative(unbiased, loss)
    for end in kappa[1:]:
        value = unbiased[0] / (loss.energy_D[0] / end**2 - loss.signal_D[0])
        assert found.low <= value * (1 + 1e-9) and value <= found.high * (1 + 1e-9)
    without_ends = relative(unbiased, replace(loss, cross_D=None, signal_D=None))
    assert found.low <= without_ends.low < without_ends.high <= found.high
    narrow = relative(unbiased, loss, level=0.5)
    assert found.low <= narrow.low < narrow.high <= found.high


def test_updates_that_are_all_0_are_worth_nothing_that_is_known():
    """Rewards equal within every prompt: no energy, no signal, no kappa."""
    zeros_D = np.zeros(6)
    nothing = LossError(zeros_D, zeros_D, zeros_D, zeros_D, False, zeros_D, zeros_D)
    assert relative(zeros_D, nothing) == UNKNOWN
