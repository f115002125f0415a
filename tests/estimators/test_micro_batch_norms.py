"""Signal and noise from norms of accumulated gradients: enumeration, closed forms, simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from reference import plain_advantages, softmax_policy
from tabular import TabularPolicy

from grpo_ustat.estimators.micro_batch_norms import (
    law_of_norms,
    signal_of_increments,
    signal_of_ranks,
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
    """Expected ||A_k||^2 of micro-batches, each a list of rows."""
    members = np.zeros((len(parts), len(gram)))
    for k, rows in enumerate(parts):
        members[k, rows] = 1
    grown = members.cumsum(axis=0)
    return np.diag(grown @ gram @ grown.T)


def signal_and_noise(norms_K, shares_K=None):
    shares_K = np.full(len(norms_K), 1 / len(norms_K)) if shares_K is None else shares_K
    signal = signal_of_increments(norms_K, shares_K)
    return signal, norms_K[-1] - signal


@pytest.mark.parametrize(
    ("size", "parts"),
    [(2, [1, 1]), (2, [2, 2, 2]), (3, [1, 1, 1, 1]), (2, [1, 3, 2]), (4, [2, 1])],
)
def test_whole_groups_are_unbiased(size, parts):
    """Equal and unequal micro-batches."""
    law, grad_sq = truth()
    groups = sum(parts)
    rows = np.split(np.arange(size * groups), np.cumsum(parts)[:-1] * size)
    signal, noise = signal_and_noise(
        sq_norms(expected_gram(size, groups), rows), np.array(parts) / groups
    )
    assert signal == pytest.approx(grad_sq, rel=1e-10)
    assert noise == pytest.approx(law.mse(groups, size), rel=1e-10)


@pytest.mark.parametrize(("size", "groups", "count"), [(2, 2, 2), (2, 2, 4), (2, 3, 3), (3, 2, 2)])
def test_random_rows_have_the_stated_bias(size, groups, count):
    """Every order of the rows; the noise scale is too small."""
    law, grad_sq = truth()
    gram, n = expected_gram(size, groups), size * groups
    orders = list(itertools.permutations(range(n)))
    norms = sum(sq_norms(gram, np.reshape(order, (count, -1))) for order in orders) / len(orders)
    signal, noise = signal_and_noise(norms)
    bias = (size - 1) / (n - 1) * (law.c1 + (law.c1 + grad_sq) / (size - 1) ** 2)
    assert signal == pytest.approx(grad_sq + bias, rel=1e-10)
    assert noise == pytest.approx(law.mse(groups, size) - bias, rel=1e-10)
    assert n * noise / signal < law.n_mse(size) / grad_sq


@pytest.mark.parametrize(("ranks", "parts"), [(2, [1, 1]), (3, [1, 1, 1]), (2, [1, 2])])
def test_ranks_before_their_last_micro_batch_and_after(ranks, parts):
    law, grad_sq = truth()
    size, groups = 3, ranks * sum(parts)
    gram = expected_gram(size, groups)
    first, own = sum(parts[:-1]), sum(parts)
    members = np.zeros((ranks, size * groups))
    for r in range(ranks):
        members[r, size * own * r : size * (own * r + first)] = 1
    # A rank's loss is a mean over its own rows.
    before_R = ranks**2 * np.diag(members @ gram @ members.T)
    signal = signal_of_ranks(gram.sum(), before_R, first / own)
    assert signal == pytest.approx(grad_sq, rel=1e-10)
    assert gram.sum() - signal == pytest.approx(law.mse(groups, size), rel=1e-10)


def gaussian_norms(rng, shares_K, steps, grad_sq, noise, dimensions=200):
    """Norms of S steps' sums of micro-batches with share w: mean w g, variance w times noise."""
    mean = np.zeros(dimensions)
    mean[0] = np.sqrt(grad_sq)
    shares = shares_K[:, None]
    deviates = rng.normal(size=(steps, len(shares_K), dimensions))
    g = shares * mean + np.sqrt(shares * noise / dimensions) * deviates
    return np.square(g.cumsum(axis=1)).sum(axis=2)


def test_the_noise_scale_is_in_its_interval(rng):
    """400 runs of 30 steps with n_c = 4 n; both sides of the interval miss it equally rarely."""
    inside, ends = 0, 0
    for _ in range(400):
        norms_SK = gaussian_norms(rng, np.full(8, 1 / 8), 30, grad_sq=1.0, noise=4.0)
        values_2S = np.array([signal_and_noise(norms_K) for norms_K in norms_SK]).T
        _, low, high = law_of_norms(*values_2S, 256, 8).noise_scale(8)
        inside += low <= 1024 <= high
        ends += np.isfinite(high)
    assert inside >= 0.93 * 400
    assert ends >= 0.5 * 400


def test_variance_of_the_signal(rng):
    """2 tr(Sigma^2) K^2 times H/(K^2 (H-1))."""
    count, dimensions = 4, 50
    norms_SK = gaussian_norms(rng, np.full(count, 1 / count), 20000, 0.0, 1.0, dimensions)
    signal_S = np.array([signal_and_noise(norms_K)[0] for norms_K in norms_SK])
    harmonic = sum(1 / (2 * k + 1) for k in range(count))
    assert signal_S.var() == pytest.approx(2 / dimensions * harmonic / (harmonic - 1), rel=0.05)
