"""A step's row against numbers worked by hand and against enumeration."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from fakes import random_rollouts

from grpo_ustat.estimators.ustatistic import zero_variance_share_if_equal
from grpo_ustat.train import metrics
from grpo_ustat.train.context import Batch
from grpo_ustat.train.metrics import batch_metrics, num_tokens, update_metrics
from grpo_ustat.train.update import FixedLogprobs, UpdateStats


def batch_of(rewards_PG, lengths_PG=None, ended_PG=None, answered_PG=None):
    shape = np.shape(rewards_PG)
    return Batch(
        prompts=[None] * shape[0],
        rollouts=None,
        rewards_PGF=np.array(rewards_PG, dtype=float)[..., None],
        lengths_PG=np.ones(shape, int) if lengths_PG is None else np.array(lengths_PG),
        ended_PG=np.ones(shape, bool) if ended_PG is None else np.array(ended_PG),
        answered_PG=np.ones(shape, bool) if answered_PG is None else np.array(answered_PG),
        prompt_lengths_P=np.array([3, 5][: shape[0]] + [4] * (shape[0] - 2)),
        reward_weights_F=np.ones(1),
    )


def test_a_row_worked_by_hand():
    yes, no = True, False
    batch = batch_of(
        [[1, 1, 1], [0, 1, 0]], [[2, 4, 9], [9, 1, 5]],
        [[yes, yes, no], [no, yes, yes]], [[yes, yes, yes], [no, yes, no]],
    )  # fmt: skip
    row = batch_metrics(batch)
    expected = {
        "reward": 4 / 6, "reward_std": (2 * 4 / 6 / 5) ** 0.5, "frac_reward_zero_std": 0.5,
        "completions/mean_length": 5, "completions/min_length": 1, "completions/max_length": 9,
        "completions/mean_terminated_length": 3, "completions/min_terminated_length": 1,
        "completions/max_terminated_length": 5, "completions/clipped_ratio": 2 / 6,
        "completions/extraction_failure_ratio": 2 / 6, "tokens": 30,
    }  # fmt: skip
    expected["frac_reward_zero_std_expected"] = zero_variance_share_if_equal(np.array([3, 1]), 3)
    assert row == pytest.approx(expected)
    assert num_tokens(batch) == 3 * (3 + 5) + 30


def test_several_reward_functions_worked_by_hand():
    """Rewards 1, 0, 1, 1 of weight 1 and 0, 1, 0, 0.5 of weight 1/2: sums 1, 1/2, 1, 5/4."""
    batch = dataclasses.replace(
        batch_of([[1, 0], [1, 1]]),
        rewards_PGF=np.array([[[1, 0], [0, 1]], [[1, 0], [1, 0.5]]]),
        reward_weights_F=np.array([1, 0.5]),
    )
    row = batch_metrics(batch, ["task", "brevity"])
    expected = {
        "reward": 15 / 16, "reward_std": np.std([1, 0.5, 1, 1.25], ddof=1),
        "frac_reward_zero_std": 0, "rewards/task/mean": 3 / 4, "rewards/task/std": 1 / 2,
        "rewards/brevity/mean": 3 / 8, "rewards/brevity/std": np.std([0, 1, 0, 0.5], ddof=1),
    }  # fmt: skip
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    assert "frac_reward_zero_std_expected" not in row


def test_without_a_terminated_completion_its_lengths_are_zero():
    row = batch_metrics(batch_of([[0, 1]], [[4, 4]], [[False, False]]))
    assert row["completions/mean_terminated_length"] == 0
    assert row["completions/clipped_ratio"] == 1


def test_a_silent_group_is_one_of_exactly_equal_rewards():
    """Not of a small standard deviation; and no expectation for rewards other than 0 and 1."""
    row = batch_metrics(batch_of([[0.5, 0.5 + 1e-12], [0.1, 0.1]]))
    assert row["frac_reward_zero_std"] == 0.5
    assert "frac_reward_zero_std_expected" not in row


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_expected_silent_share_is_unbiased(size):
    """Exact enumeration of what three unequal prompts' groups may show; the plug-in is biased."""
    chances = np.array([0.9, 0.35, 0.05])
    mean, plug_in, sure = 0.0, 0.0, 0.0
    for drawn in itertools.product(itertools.product((0, 1), repeat=size), repeat=3):
        rewards = np.array(drawn)
        p = chances[:, None] ** rewards * (1 - chances[:, None]) ** (1 - rewards)
        successes = rewards.sum(axis=1)
        mean += p.prod() * zero_variance_share_if_equal(successes, size)
        pooled = successes.mean() / size
        plug_in += p.prod() * (pooled**size + (1 - pooled) ** size)
        sure += p.prod() * ((successes == 0) | (successes == size)).mean()
    p = chances.mean()
    truth = p**size + (1 - p) ** size
    assert mean == pytest.approx(truth, abs=1e-12)
    if size > 1:
        assert plug_in > truth + 1e-3
        assert sure > truth + 0.1  # unequal prompts have zero-variance groups more often


@pytest.mark.slow
def test_large_groups_keep_their_digits():
    """Against exact rationals, one factorial at a time."""
    size, successes = 200, np.array([190, 60, 200, 120])

    def exact(counts):
        total = [Fraction(1)] + [Fraction(0)] * size
        for count in counts.tolist():
            own = [
                Fraction(math.perm(count, m), math.perm(size, m) * 4**m) for m in range(size + 1)
            ]
            own = [value / math.factorial(m) for m, value in enumerate(own)]
            total = [sum(total[n - m] * own[m] for m in range(n + 1)) for n in range(size + 1)]
        return total[-1] * math.factorial(size)

    expected = float(exact(successes) + exact(size - successes))
    assert 0 < expected < 1e-20
    assert zero_variance_share_if_equal(successes, size) == pytest.approx(expected, rel=1e-10)
    assert zero_variance_share_if_equal(np.array([1000] * 5), 1000) == pytest.approx(1)


def test_entropy_and_gap_are_over_tokens():
    """Padding counts for nothing, wherever the trainer's own log-probabilities come from."""
    plain = random_rollouts([2, 3], 2, 4)
    rng, mask = np.random.default_rng(1), plain.mask_PGT
    entropy, theirs, ours = (rng.random(mask.shape) for _ in range(3))
    rollouts = type(plain)(**vars(plain) | {"entropy_PGT": entropy, "logprobs_PGT": theirs})
    gaps = np.abs(theirs - ours)[mask]
    counted = Counter(rows=4, skipped=1)
    old = FixedLogprobs(old_NT=torch.from_numpy(ours.reshape(4, -1)))
    for found, constants in (
        (UpdateStats(counted, np.split(gaps, [3])), FixedLogprobs()),
        (UpdateStats(counted), old),
    ):
        row = update_metrics(found, rollouts, constants)
        assert row["entropy"] == pytest.approx(entropy[mask].mean())
        assert row["sampling/sampling_logp_difference/mean"] == pytest.approx(gaps.mean())
        assert row["sampling/sampling_logp_difference/max"] == gaps.max()
        assert row["frac_completions_skipped"] == 0.25
    assert update_metrics(UpdateStats(counted), plain, FixedLogprobs()) == {
        "frac_completions_skipped": 0.25
    }


def test_ranks_count_by_their_tokens(monkeypatch):
    """Means are over all tokens, not over ranks; a negative sum is not lost on the way."""
    own, others = (
        UpdateStats(Counter(rows=2, kl_sum=-1.0, kl_count=4), [np.array([0.5])]),
        [(0.1, Counter(rows=2, kl_sum=-3.0, kl_count=1, gap_sum=0.9, gap_count=9))],
    )
    monkeypatch.setattr(metrics, "gather_object", lambda mine: [*mine, *others])
    row = update_metrics(own, random_rollouts([2], 2, 4), FixedLogprobs())
    assert row["kl"] == pytest.approx(-0.8)
    assert row["sampling/sampling_logp_difference/mean"] == pytest.approx(0.14)
    assert row["sampling/sampling_logp_difference/max"] == 0.5
