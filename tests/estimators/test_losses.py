"""Relative efficiency of losses by a scored pool: order of rows, invariances."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from prompt_pools import whole_pool

from grpo_ustat.estimators import losses
from grpo_ustat.estimators.losses import UNBIASED, loss_efficiencies
from grpo_ustat.estimators.row_weights import Loss, RowFilter
from grpo_ustat.records import ScorePool

COMPLETIONS = 8
NORMED = {"epsilon": 1e-4}
ADDITIVE = Loss("std", "group_std", NORMED, "grpo", 9)
COUPLED = Loss("tokens", "group_std", NORMED, "dapo", 9)
SCALED = Loss("scaled", "group_mean", {}, "dr_grpo", 9)


def a_pool(questions):
    """Scores along a common gradient, of which right answers have more."""
    rng = np.random.default_rng(8)
    shape = questions, COMPLETIONS
    rewards = rng.integers(0, 2, size=shape).astype(float)
    rewards[:, :2] = 0, 1
    scores = rng.normal(size=(*shape, 4)) + 2 * (rewards[..., None] - 0.5) * np.eye(4)[0]
    scores = scores.astype(np.float32)
    return ScorePool(
        rewards_PN=rewards,
        gram_PNN=scores.astype(float) @ scores.astype(float).transpose(0, 2, 1),
        lengths_PN=rng.integers(1, 9, size=shape),
        features_PNR=scores,
        centred_sums_PR=np.zeros((questions, 4)),
    )


def test_rows_are_by_loss_as_given_then_by_size_with_those_that_are_refused():
    losses = [COUPLED, ADDITIVE]
    rows = loss_efficiencies(a_pool(14), losses, [8, 4, 16, 2], 32, 40, 0)
    order = [(row.loss.name, row.group_size) for row in rows]
    assert order == [(loss.name, size) for loss in losses for size in (2, 4, 8, 16)]
    measured = {(row.loss.name, row.group_size) for row in rows if row.efficiency is not None}
    assert measured == {("tokens", 8), *(("std", size) for size in (2, 4, 8))}
    for loss in losses:
        best = [row for row in rows if row.loss == loss and row.best]
        assert len(best) == 1 and best[0].may_be_best


def test_a_loss_alone_has_the_numbers_that_it_has_among_others():
    """Up to the rounding of sums over more losses."""
    pool, others = (
        a_pool(24),
        [COUPLED, replace(COUPLED, name="mean", baseline="group_mean", options={}), ADDITIVE],
    )
    together = loss_efficiencies(pool, [SCALED, *others], [2, 4], 16, 20, 3)
    for loss in (SCALED, *others):
        alone = loss_efficiencies(pool, [loss], [2, 4], 16, 20, 3)
        of_loss = [row for row in together if row.loss == loss]
        for one, other in zip(alone, of_loss, strict=True):
            assert (one.group_size, one.best, one.may_be_best) == (
                other.group_size, other.best, other.may_be_best
            )  # fmt: skip
            assert one.efficiency is not None and other.efficiency is not None
            np.testing.assert_allclose(
                list(vars(one.efficiency).values()),
                list(vars(other.efficiency).values()),
                rtol=1e-6,
            )


def test_group_mean_over_a_constant_is_worth_the_unbiased_one():
    """Its update is (G-1)/G of leave-one-out's, over the longest length."""
    for row in loss_efficiencies(a_pool(12), [SCALED, UNBIASED], [2, 4, 8], 16, 4, 0):
        assert row.efficiency is not None
        assert row.efficiency.efficiency_same_g == pytest.approx((1, 1, 1))
        assert row.efficiency.direction == (1, 1, 1)
        assert (row.efficiency.efficiency_best_g.estimate == pytest.approx(1)) == row.best


def graded(levels):
    """A pool whose rewards have many levels, or are continuous; some go with the gradient."""
    pool, rng = a_pool(24), np.random.default_rng(2)
    noise = rng.normal(size=pool.rewards_PN.shape) + pool.features_PNR[..., 0]
    rewards = noise if levels is None else np.clip(np.round(noise * levels / 6), 0, levels - 1)
    return replace(pool, rewards_PN=rewards.astype(float))


@pytest.mark.parametrize("levels", [9, 16, None])
def test_a_multiple_of_the_unbiased_estimate_is_worth_it_where_groups_are_drawn(levels):
    """By its baseline, and by a std that a large epsilon makes constant, with drawn groups."""
    flat = Loss("flat", "group_std", {"epsilon": 1e9}, "sum", 9)
    for row in loss_efficiencies(graded(levels), [SCALED, UNBIASED, flat], [2, 4, 8], 16, 4, 0):
        assert row.efficiency is not None
        # a std of 1 beside an epsilon of 1e9
        assert row.efficiency.efficiency_same_g == pytest.approx(
            (1, 1, 1), abs=1e-6 if row.loss == flat else 1e-12
        )


def test_drawn_groups_are_the_same_for_every_loss_and_nest_over_sizes(monkeypatch):
    drawn = []

    drawn_terms = losses.drawn_terms

    def listed(pool, loss, place_PDG):
        drawn.append((loss.baseline, place_PDG))
        return drawn_terms(pool, loss, place_PDG)

    monkeypatch.setattr(losses, "drawn_terms", listed)
    baselines = [
        Loss(baseline, baseline, NORMED, "sum", 9)
        for baseline in ("group_std", "leave_one_out_std")
    ]
    loss_efficiencies(graded(None), baselines, [3, 4, 8], 16, 4, 0)
    largest = max((place for _, place in drawn), key=lambda place: place.shape[2])
    assert {baseline for baseline, _ in drawn} == {
        "group_std",
        "leave_one_out_std",
        "leave_one_out",
    }
    for _, place in drawn:
        np.testing.assert_array_equal(place, largest[..., : place.shape[2]])


def test_worth_by_drawn_groups_hardly_depends_on_the_seed():
    """The std of a group over continuous rewards: seeds differ by the drawing alone."""
    pool, loss = graded(None), Loss("std", "group_std", NORMED, "grpo", 9)
    rows = [loss_efficiencies(pool, [loss], [4], 16, 4, seed)[0] for seed in range(4)]
    efficiencies = [
        row.efficiency.efficiency_same_g.estimate for row in rows if row.efficiency is not None
    ]
    assert np.std(efficiencies) < 0.02 * np.mean(efficiencies)


MICRO = Loss("micro", "leave_one_out", {}, "bnpo", 9, micro_batch_size=6)
REPLACED = Loss("replaced", "none", {}, "sum", 9, rows=RowFilter("replace"))


def baseline_of(name):
    return Loss("own", name, {}, "sum", 9)


REFUSED = {
    "one question": (1, ADDITIVE, 2, 16,
                     "1 question is too few for an interval: use at least study.questions=4"),
    "two questions": (2, ADDITIVE, 2, 16,
                     "2 questions are too few for an interval: use at least study.questions=4"),
    "few questions": (3, ADDITIVE, 2, 16,
                     "3 questions are too few for an interval: use at least study.questions=4"),
    "no value": (30, baseline_of("oracle"), 2, 16,
                 "baseline oracle reads value_P, which a pool of one policy lacks"),
    "several functions": (30, baseline_of("gdpo"), 2, 16,
                          "baseline gdpo reads reward_weights_F, rewards_PGF, which a pool of one "
                          "policy lacks"),
    "past batches": (30, baseline_of("running_mean"), 2, 16,
                     "baseline running_mean reads running, which a pool of one policy lacks"),
    "a small group": (30, baseline_of("leave_one_out_std"), 2, 16,
                      "baseline leave_one_out_std needs groups of 3 or more"),
    "a large group": (30, ADDITIVE, 16, 16,
                      "groups of 16 need 16 completions per question, but the pool has 8: use "
                      "budget.pool_completions=16, or log larger groups"),
    "no multiple": (30, ADDITIVE, 8, 20, "study.rollouts=20 is not a multiple of the group size 8"),
    "a micro-batch": (30, MICRO, 2, 16, "16 rollouts cannot be split into micro-batches of 6"),
    "a large batch": (23, COUPLED, 2, 16,
                      "row weights depend on all 8 questions of an update, and a measurement "
                      "with such updates needs 24 questions, got 23: use study.questions=24"),
    "no groups": (30, REPLACED, 2, 16,
                  "0 questions can have groups of 2 with unequal rewards, but at least 4 such "
                  "questions are needed"),
    "a small batch": (30, baseline_of("james_stein"), 8, 16,
                      "baseline james_stein needs 3 prompts in an update, but study.rollouts=16 in "
                      "groups of 8 gives 2"),
}  # fmt: skip


@pytest.mark.parametrize("questions, loss, size, rollouts, line", REFUSED.values(), ids=REFUSED)
def test_what_a_pool_does_not_tell_is_a_line(questions, loss, size, rollouts, line):
    rewards = np.zeros((questions, 8))
    rewards[:, 0] = 1
    rewards[:, 1:] += loss == REPLACED
    pool = whole_pool(np.ones((questions, 8, 4)), rewards, np.ones((questions, 8), dtype=int))
    (row,) = loss_efficiencies(pool, [loss], [size], rollouts, 4, 0)
    assert row.reason.line == line
    assert (row.efficiency, row.best, row.may_be_best) == (None, False, False)
