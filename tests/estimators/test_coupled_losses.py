"""Losses that couple their rows: all draws of a small pool give the very moments."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from grpo_ustat.estimators.coupled_losses import (
    Batch,
    additive_part,
    coupled_moments,
    drawn_batches,
    drawn_mixed_batches,
    prompts_needed,
)
from grpo_ustat.estimators.efficiency import mean_over_prompts, update_moments
from grpo_ustat.estimators.group_terms import LevelSums
from grpo_ustat.estimators.losses import loss_efficiencies
from grpo_ustat.estimators.moments import pool_gradient_weights
from grpo_ustat.estimators.row_weights import Loss, RowFilter, mixed_groups, row_weights
from grpo_ustat.estimators.token_weights import TokenWeights
from grpo_ustat.records import BaselineContext, ScorePool

QUESTIONS, SIZE = 6, 2
PLACES = np.tile(np.arange(SIZE), (2, 1))  # of the pools' only groups
LOSSES = [
    Loss("own", "group_std", {"epsilon": 0.1}, "dapo", 9),
    Loss("own", "batch_std", {"epsilon": 0.1}, "grpo", 9),
    Loss("own", "leave_one_out", {}, "bnpo", 9, micro_batch_size=2),
    Loss("functions", "gdpo", {"epsilon": 0.1}, "dapo", 9),
    Loss("drop", "group_std", {"epsilon": 0.1}, "dapo", 9, rows=RowFilter("drop")),
    Loss("drop all", "none", {}, "sum", 9, rows=RowFilter("drop")),
    Loss("share", "leave_one_out", {}, "grpo", 9, rows=RowFilter(reward_variance_share=0.6)),
    Loss("clipped", "group_std", {"epsilon": 0.1}, "dapo", 9,
         tokens=TokenWeights("token", "clip", 0.2, 0.2)),
    Loss("penalised", "group_std", {"epsilon": 0.1}, "dapo", 9, rows=RowFilter("drop"),
         tokens=TokenWeights("token", beta=0.3, kl_estimator="k3", kl_in="loss")),
]  # fmt: skip


def a_pool(kinds=("all",)):
    rng = np.random.default_rng(5)
    rewards = rng.integers(0, 2, size=(QUESTIONS, SIZE)).astype(float)
    rewards[:3] = [[1, 1], [0, 1], [0.5, 0]]
    scores = rng.normal(size=(QUESTIONS, SIZE * len(kinds), 4)).astype(np.float32).astype(float)
    second, weights = rng.integers(0, 4, size=(QUESTIONS, SIZE)) / 4, np.array([1.0, 0.5])
    return ScorePool(
        rewards_PN=rewards,
        gram_PNN=scores @ scores.transpose(0, 2, 1),
        lengths_PN=rng.integers(1, 9, size=(QUESTIONS, SIZE)),
        features_PNR=scores,
        centred_sums_PR=np.zeros((QUESTIONS, 4)),
        kinds=kinds,
        rewards_PNF=np.stack([rewards - weights[1] * second, second], axis=-1),
        reward_weights_F=weights,
    )


def all_draws():
    """All ordered pairs of disjoint batches of two prompts, whose pools are one group each."""
    for prompts in itertools.permutations(range(QUESTIONS), 4):
        if prompts[0] > prompts[1] or prompts[2] > prompts[3]:
            continue
        yield tuple(
            Batch(np.array(prompts[half]), PLACES, np.arange(4), np.array(prompts[half]))
            for half in (slice(2), slice(2, 4))
        )


def update(pool, loss, batch):
    """Row by row: of the vectors of a row that of its sign, and its penalty's."""
    rows = batch.prompt_B[:, None], batch.place_BG
    lengths, rewards = pool.lengths_PN[rows], pool.rewards_PN[rows]
    of_functions = pool.rewards_PNF[rows]
    context = BaselineContext(
        lengths_PG=lengths, rewards_PGF=of_functions, reward_weights_F=pool.reward_weights_F
    )
    weights = row_weights(loss, rewards, context)[: 1 + (loss.name == "clipped")].sum(axis=0)
    counts = (rewards != rewards[:, :1]).any(axis=1)[:, None] | (loss.name != "penalised")
    total = np.zeros(4)
    for place, prompt in enumerate(batch.prompt_B):
        for member, weight in zip(batch.place_BG[place], weights[place], strict=True):
            vectors = pool.features_PNR[prompt, member::SIZE]
            total += weight * vectors[int(loss.name == "clipped" and weight < 0)]
            if loss.name == "penalised" and counts[place]:
                total -= 0.3 / (lengths * counts).sum() * vectors[1]
    return total


@pytest.mark.parametrize(
    "loss", LOSSES, ids=lambda loss: f"{loss.name}-{loss.baseline}-{loss.loss_type}"
)
def test_all_draws_give_the_moments_of_all_batches(loss, monkeypatch):
    """Whole and without each prompt, where nothing is taken off for drawing."""
    monkeypatch.setattr(
        "grpo_ustat.estimators.coupled_losses._without_drawing_noise",
        lambda values_D, sums_P, lacks_DP: np.concatenate(
            [[values_D.mean()], sums_P / lacks_DP.sum(axis=0)]
        ),
    )
    pool, draws = a_pool(loss.kinds), list(all_draws())
    assert 1 < mixed_groups(pool.rewards_PN).sum() < QUESTIONS - 1
    weights = pool_gradient_weights(pool.rewards_PN)
    gradient = np.einsum("pn,pnr->pr", weights, pool.features_PNR[:, :SIZE])
    part = additive_part(loss, SIZE)
    sums = LevelSums(pool, part.length_factors(pool.lengths_PN))
    terms = sums.terms(part.baseline, part.options, SIZE, beta=part.beta)
    plain = update_moments(terms, gradient, 2, scale=None)
    (found,) = coupled_moments(pool, gradient, [loss], [plain], draws)

    def by_hand(missed):
        numbers = []
        for first, second in draws:
            inside = {*first.prompt_B, *second.prompt_B}
            if missed in inside:
                continue
            one, two = update(pool, loss, first), update(pool, loss, second)
            rest = [x for x in range(QUESTIONS) if x not in {*inside, missed}]
            toward = (one + two) / 2 @ gradient[rest].mean(axis=0)
            numbers.append(((one @ one + two @ two) / 2, one @ two, toward))
        return np.mean(numbers, axis=0)

    right = np.array([by_hand(missed) for missed in (None, *range(QUESTIONS))]).T
    for found_D, right_D in zip(
        (found.energy_D, found.mean_sq_D, found.cross_D), right, strict=True
    ):
        np.testing.assert_allclose(found_D, right_D, rtol=1e-5, atol=1e-7)  # float32 sketches


def test_what_drawing_adds_to_the_jackknife_is_taken_off():
    """Values that do not depend on the prompts: only the variance of their mean remains."""
    from grpo_ustat.estimators import coupled_losses

    rng = np.random.default_rng(6)
    inside = rng.random((4000, 200)).argsort(axis=1) < 20
    values = rng.normal(size=4000)
    found = coupled_losses._mean_and_without(values, ~inside)
    plain = values @ ~inside / (~inside).sum(axis=0)
    of_mean = values.var(ddof=1) / 4000
    assert np.square(plain - values.mean()).sum() > 15 * of_mean
    assert np.square(found[1:] - found[0]).sum() < 8 * of_mean
    # values of the prompts: the mean over draws that lack one is nearly the mean of the others
    efficiencies = rng.normal(size=200)
    of_draws = (inside * efficiencies).sum(axis=1) / 20
    found = coupled_losses._mean_and_without(of_draws, ~inside)
    exact = mean_over_prompts(efficiencies)
    ratio = np.square(found[1:] - found[0]).sum() / np.square(exact[1:] - exact[0]).sum()
    assert ratio == pytest.approx(1, abs=0.15)


def test_mixed_groups_are_drawn_as_if_others_were_drawn_anew():
    """Their prompts and members have the law of groups given mixed rewards, both batches alike; the
    prompts beside a draw have that of all, whatever was tried.
    """
    rewards = np.array([[1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 1, 1]] * 60).astype(float)
    chance = {  # of each group of two, by prompt mod 3
        1: {(0, 1): 1 / 2 * 1 / 2, (1, 0): 1 / 2 * 1 / 2},
        2: {(0, 1): 2 / 3 * 1 / 2, (1, 0): 2 / 3 * 1 / 2},
    }
    kept = sum(p for groups in chance.values() for p in groups.values())
    seen, beside, draws = [{}, {}], np.zeros(3), 2000
    for batches in drawn_mixed_batches(rewards, 2, 2, draws, 0):
        tried = np.concatenate([batch.tried for batch in batches])
        assert len(set(tried)) == len(tried) <= 176
        rest = np.setdiff1d(np.arange(180), tried)
        beside += np.bincount(rest % 3, minlength=3) / len(rest)
        for which, batch in enumerate(batches):
            assert set(batch.prompt_B) <= set(batch.tried) and len(batch.prompt_B) == 2
            for prompt, places in zip(batch.prompt_B, batch.place_BG, strict=True):
                group = int(prompt) % 3, tuple(rewards[prompt, places])
                seen[which][group] = seen[which].get(group, 0) + 1
    for counts in seen:
        assert counts.keys() == {(x, g) for x, groups in chance.items() for g in groups}
        for (prompt, group), count in counts.items():
            p = chance[prompt][group] / kept
            assert abs(count / (2 * draws) - p) < 4 * math.sqrt(p * (1 - p) / (2 * draws))
    np.testing.assert_allclose(beside / draws, 1 / 3, atol=0.003)


def test_draws_are_a_function_of_their_seed_and_disjoint():
    arguments = (20, 6, 3, 4, 5)
    once, again, other = (list(drawn_batches(*arguments, seed)) for seed in (0, 0, 1))
    for (a, b), (c, d) in zip(once, again, strict=True):
        np.testing.assert_array_equal(a.prompt_B, c.prompt_B)
        np.testing.assert_array_equal(b.place_BG, d.place_BG)
        assert not set(a.prompt_B) & set(b.prompt_B)
        assert all(len(set(row)) == 4 for row in a.place_BG)
    assert any((a[0].prompt_B != b[0].prompt_B).any() for a, b in zip(once, other, strict=True))
    assert prompts_needed(6) == 18


def test_replaced_groups_of_one_length_weigh_by_tokens_as_by_rows():
    """Drawn mixed batches and all mixed groups say the same where tokens couple nothing."""
    rng = np.random.default_rng(7)
    scores = rng.normal(size=(80, 4, 3)) + np.array([0.5, 0, 0])
    rewards = (rng.random((80, 4)) < 0.4).astype(float)
    pool = ScorePool(
        rewards_PN=rewards,
        gram_PNN=scores @ scores.transpose(0, 2, 1),
        lengths_PN=np.full((80, 4), 5),
        features_PNR=scores,
        centred_sums_PR=np.zeros((80, 3)),
    )
    losses = [
        Loss(kind, "none", {}, kind, 9, rows=RowFilter("replace")) for kind in ("sum", "dapo")
    ]
    by_rows, by_tokens = loss_efficiencies(pool, losses, [2], 16, draws=50, seed=0)
    for name in ("efficiency_same_g", "direction", "noise"):
        numbers = getattr(by_tokens.efficiency, name), getattr(by_rows.efficiency, name)
        np.testing.assert_allclose(*numbers, rtol=1e-5)  # float32 sketches
    mixed = rewards.sum(axis=1) * (4 - rewards.sum(axis=1)) / 6
    assert by_rows.kept.estimate == by_tokens.kept.estimate == pytest.approx(mixed.mean())
    rewards[4:] = 1
    reasons = [row.reason for row in loss_efficiencies(pool, losses, [2], 16, draws=5, seed=0)]
    assert reasons[0] is None and reasons[1] is not None
    assert (reasons[1].kind, reasons[1].available) == ("coupled questions", 80)
    rewards[1:] = 1
    reasons = [row.reason for row in loss_efficiencies(pool, losses, [2], 16, draws=5, seed=0)]
    assert [(x.kind, x.needed, x.available) for x in reasons] == [("mixed questions", 4, 1)] * 2
