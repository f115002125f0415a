"""Signal and noise from norms of accumulated gradients: enumeration, closed forms, simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from reference import plain_advantages, softmax_policy
from tabular import TabularPolicy

from grpo_ustat.estimators.micro_batch_norms import (
    Layout,
    law_of_blocks,
    law_of_norms,
    norm_weights,
    signal_and_noise_of_ranks,
)
from grpo_ustat.estimators.scaling import ScalingLaw

LOGITS, REWARDS = [0.3, -0.8, 0.5], [[1.0, 0.0, 0.25], [0.0, 1.0, 0.7]]


def truth():
    """The two prompts' scaling law, and E||g_x||^2."""
    policy = TabularPolicy(
        np.tile(np.eye(3), (2, 1, 1)), np.array(LOGITS), np.array(REWARDS, dtype=float)
    )
    grad_sq = float(np.square(policy.gradient_PD.mean(axis=0)).sum())
    return ScalingLaw.of_moments(policy.moments(), grad_sq), grad_sq


def expected_gram(size, groups):
    """E <c_i, c_j> / n^2 of all rows, by all outcomes of a group; groups draw their prompts."""
    p, scores = softmax_policy(LOGITS)
    inside, mean = np.zeros((size, size)), np.zeros((size, len(p)))
    for rewards in REWARDS:
        for actions in itertools.product(range(len(p)), repeat=size):
            chance = np.prod([p[a] for a in actions]) / len(REWARDS)
            advantages = plain_advantages("leave_one_out", [rewards[a] for a in actions], None)
            rows = np.array(
                [a * np.array(scores[y]) for a, y in zip(advantages, actions, strict=True)]
            )
            inside += chance * rows @ rows.T
            mean += chance * rows
    gram = np.tile(mean @ mean.T, (groups, groups))
    for k in range(groups):
        gram[k * size : (k + 1) * size, k * size : (k + 1) * size] = inside
    return gram / (size * groups) ** 2


def sq_norms(gram, parts):
    """Expected ||A_k||^2 and ||g_k||^2 of micro-batches, each a list of rows."""
    members = np.zeros((len(parts), len(gram)))
    for k, rows in enumerate(parts):
        members[k, rows] = 1
    grown = members.cumsum(axis=0)
    return np.concatenate([np.diag(m @ gram @ m.T) for m in (grown, members)])


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("size", "groups", "count"), [(2, 2, 2), (2, 6, 3), (3, 4, 4), (4, 4, 2)])
def test_whole_groups_are_unbiased(size, groups, count, own):
    law, grad_sq = truth()
    rows = np.arange(size * groups).reshape(count, -1)
    signal, noise, _ = norm_weights(Layout(count), own) @ sq_norms(
        expected_gram(size, groups), rows
    )
    assert signal == pytest.approx(grad_sq, rel=1e-10)
    assert noise == pytest.approx(law.mse(groups, size), rel=1e-10)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("size", "groups", "count"), [(2, 2, 2), (2, 2, 4), (2, 3, 3), (3, 2, 2)])
def test_random_rows_have_the_stated_bias(size, groups, count, own):
    """Every order of the rows; the noise scale is too small."""
    law, grad_sq = truth()
    gram, n = expected_gram(size, groups), size * groups
    orders = list(itertools.permutations(range(n)))
    norms = sum(sq_norms(gram, np.reshape(order, (count, -1))) for order in orders) / len(orders)
    signal, noise, _ = norm_weights(Layout(count), own) @ norms
    bias = (size - 1) / (n - 1) * (law.c1 + (law.c1 + grad_sq) / (size - 1) ** 2)
    assert signal == pytest.approx(grad_sq + bias, rel=1e-10)
    assert noise == pytest.approx(law.mse(groups, size) - bias, rel=1e-10)
    assert n * noise / signal < law.n_mse(size) / grad_sq


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    ("size", "parts", "ranks", "groups"), [(4, 2, 1, 3), (4, 4, 1, 2), (4, 2, 2, 4), (3, 3, 3, 6)]
)
def test_parts_of_groups_tell_c1_from_the_rest(size, parts, ranks, groups, own):
    """Ranks hold consecutive groups; micro-batch k is what all have in their k-th part."""
    law, grad_sq = truth()
    rows = np.arange(size * groups).reshape(ranks, -1, size // parts)
    rows = rows.transpose(1, 0, 2).reshape(groups // ranks * parts, -1)
    values = norm_weights(Layout(len(rows), parts), own) @ sq_norms(
        expected_gram(size, groups), rows
    )
    found = law_of_blocks(np.tile(values[:, None], 4), size * groups, size, ranks)
    assert found.constants_4[3] == pytest.approx(grad_sq, rel=1e-10)
    assert found.c1 == pytest.approx(law.c1, rel=1e-9)
    assert found.c2 == pytest.approx(law.c2 + law.c3 / (size - 1), rel=1e-9)
    exact = law.n_mse(size) / grad_sq
    assert found.noise_scale(size).estimate == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (3, 1), (2, 2)])
def test_ranks_are_micro_batches_too(ranks, count):
    law, grad_sq = truth()
    size, groups = 3, ranks * count
    norms = sq_norms(expected_gram(size, groups), np.arange(size * groups).reshape(groups, -1))
    # A rank's loss is a mean over its own rows.
    whole, own = norms[groups - 1], norms[groups:].sum() * ranks**2
    signal, noise = signal_and_noise_of_ranks(whole, own, ranks, np.array(groups))
    assert signal == pytest.approx(grad_sq, rel=1e-10)
    assert noise == pytest.approx(law.mse(groups, size), rel=1e-10)


def test_own_norms_give_the_mean_of_all_products(rng):
    g = rng.normal(size=(5, 7))
    products = g @ g.T
    mean = (products.sum() - products.trace()) / 20
    norms = [*np.square(g.cumsum(axis=0)).sum(axis=1), *np.square(g).sum(axis=1)]
    signal, noise, inside = norm_weights(Layout(5), True) @ norms
    assert signal == pytest.approx(25 * mean)
    assert signal + noise == pytest.approx(products.sum())
    assert inside == 0
    signal, noise, _ = norm_weights(Layout(5), False) @ norms
    assert signal + noise == pytest.approx(products.sum())


@pytest.mark.parametrize("layout", [Layout(0), Layout(1), Layout(2, 2), Layout(5, 2)])
def test_one_block_says_nothing(layout):
    assert not layout.is_measurable
    with pytest.raises(ValueError, match="two blocks"):
        norm_weights(layout, True)


def gaussian_norms(rng, shares_SK, steps, grad_sq, noise, dimensions=200):
    """Norms of S steps' micro-batches with shares w: mean w g, variance w times the noise."""
    mean = np.zeros(dimensions)
    mean[0] = np.sqrt(grad_sq)
    deviates = rng.normal(size=(steps, shares_SK.shape[-1], dimensions))
    shares = np.broadcast_to(shares_SK, deviates.shape[:2])[..., None]
    g = shares * mean + np.sqrt(shares * noise / dimensions) * deviates
    return np.concatenate([np.square(x).sum(axis=2) for x in (g.cumsum(axis=1), g)], axis=1)


@pytest.mark.parametrize("own", [True, False])
def test_the_noise_scale_is_in_its_interval(rng, own):
    """400 runs of 30 steps with n_c = 4 n; both sides of the interval miss it equally rarely."""
    weights = norm_weights(Layout(8), own)
    inside, ends = 0, 0
    for _ in range(400):
        norms_SN = gaussian_norms(rng, np.full(8, 1 / 8), 30, grad_sq=1.0, noise=4.0)
        signal_S, noise_S, _ = weights @ norms_SN.T
        _, low, high = law_of_norms(signal_S, noise_S, 256, 8).noise_scale(8)
        inside += low <= 1024 <= high
        ends += np.isfinite(high)
    assert inside >= 0.93 * 400
    assert ends >= 0.5 * 400


@pytest.mark.parametrize("own", [True, False])
def test_variance_of_the_signal(rng, own):
    """2 tr(Sigma^2) K^2 times 1/(K (K-1)) with own norms, H/(K^2 (H-1)) without."""
    count, dimensions = 4, 50
    norms_SN = gaussian_norms(rng, np.full(count, 1 / count), 20000, 0.0, 1.0, dimensions)
    signal_S = (norm_weights(Layout(count), own) @ norms_SN.T)[0]
    harmonic = sum(1 / (2 * k + 1) for k in range(count))
    factor = count / (count - 1) if own else harmonic / (harmonic - 1)
    assert signal_S.var() == pytest.approx(2 / dimensions * factor, rel=0.05)


@pytest.mark.parametrize(("own", "noise"), [(True, 30.0), (False, 0.01)])
def test_unequal_micro_batches(rng, own, noise):
    """The signal is multiplied by 1 - c^2/(K-1); with increments, if the order is random."""
    shares = np.array([0.1, 0.2, 0.3, 0.4])
    spread = shares.var() / shares.mean() ** 2
    orders = np.array([rng.permutation(shares) for _ in range(20000)])
    norms_SN = gaussian_norms(rng, orders, 20000, 1.0, noise, 400)
    signal, noise_found, _ = (norm_weights(Layout(4), own) @ norms_SN.T).mean(axis=1)
    assert signal == pytest.approx(1 - spread / 3, abs=0.04)
    assert signal + noise_found == pytest.approx(1 + noise, rel=0.02)


def test_a_smaller_last_micro_batch_misleads_increments_only():
    """Of 8, the last half as large: the noise 10 % too large from increments, exact from norms."""
    shares = np.array([2.0] * 7 + [1.0]) / 15
    norms = np.concatenate([shares.cumsum(), shares])
    assert (norm_weights(Layout(8), False) @ norms)[1] == pytest.approx(1.10, abs=0.005)
    assert (norm_weights(Layout(8), True) @ norms)[1] == pytest.approx(1.0)
