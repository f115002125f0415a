"""The likely cause of a difference between an applied and a declared gradient, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grpo_ustat.estimators.applied_gradient import (
    FULL,
    NOT_OF_ROWS,
    REDUCED,
    Fault,
    advantages_by_baseline,
    divided,
    judged,
    other_losses,
    rounding,
    rows_text,
)
from grpo_ustat.estimators.row_weights import Loss, row_weights, token_weights
from grpo_ustat.records import BaselineContext

RNG = np.random.default_rng(0)
DECLARED, OTHER = RNG.normal(size=(2, 300))
FAULTS = [*divided(4, "K"), *divided(2, "ranks")]


@pytest.mark.parametrize(
    "factor, says",
    [
        (1 / 4, "divided once more by K = 4"),
        (2.0, "not divided by ranks = 2"),
        (-1.0, "the sign is reversed"),
        (-4.0, "the sign is reversed; not divided by K = 4"),
        (1 / 3, "1/3, as if it were divided once more by 3"),
        (0.37, "the direction is right, but the factor has no known cause"),
    ],
)
def test_a_factor_is_named(factor, says):
    found = judged(factor * DECLARED, DECLARED, {"others": OTHER}, FULL, FAULTS)
    assert (found.agrees, found.cause) == (False, says)
    assert found.ratio == pytest.approx(factor)
    assert found.difference == pytest.approx(abs(factor - 1))


def test_faults_of_one_factor_are_both_named():
    found = judged(DECLARED / 4, DECLARED, {}, FULL, [*FAULTS, *divided(4, "ranks")])
    assert "K = 4" in found.cause and "ranks = 4" in found.cause


def test_other_weights_are_named_and_the_earlier_first():
    others = {"first": OTHER, "second": OTHER, "halved": 0.5 * RNG.normal(size=300)}
    assert judged(OTHER, DECLARED, others, FULL).cause == "it is the gradient of first"
    found = judged(others["halved"] / 4, DECLARED, others, FULL, FAULTS)
    for words in ("0.25 x", "halved", "K = 4"):
        assert words in found.cause
    found = judged(0.37 * OTHER, DECLARED, others, FULL)
    assert found.cause == "it is 0.37 x the gradient of first"


def test_a_difference_without_a_known_cause():
    assert judged(OTHER, DECLARED, {}, FULL).cause == NOT_OF_ROWS


@pytest.mark.parametrize("tolerance", [FULL, REDUCED])
def test_rounding_is_none(tolerance):
    """A factor, and a direction, by little less and little more than what rounding explains."""
    across = OTHER - DECLARED * (OTHER @ DECLARED) / (DECLARED @ DECLARED)
    across *= math.sqrt(DECLARED @ DECLARED / (across @ across))
    for share in (-0.99, 0.0, 0.99):
        for direction in (DECLARED, across):
            found = judged(DECLARED + share * tolerance * direction, DECLARED, {}, tolerance)
            assert found.agrees and found.difference == pytest.approx(abs(share) * tolerance)
            assert "(ratio " in found.sentence()
    for share in (-1.01, 1.01):
        for direction in (DECLARED, across):
            assert not judged(
                DECLARED + share * tolerance * direction, DECLARED, {}, tolerance
            ).agrees


def test_what_cancels_in_the_gradient_does_not_in_its_rounding():
    assert rounding(0.1, 4.0, 0.0) == pytest.approx(0.1)
    assert rounding(0.1, 1.0, 8.0) == pytest.approx(0.3)
    assert (rounding(0.1, 0.0, 1.0), rounding(0.1, 0.0, 0.0)) == (math.inf, 0.1)
    for declared in (DECLARED, np.zeros(300)):
        found = judged(30 * OTHER, declared, {}, rounding(0.1, float(declared @ declared), 1e5))
        assert "declared gradient is 0" in found.sentence()


def test_gradients_of_length_zero_or_without_numbers():
    zero = np.zeros(300)
    assert judged(zero, zero, {}, FULL).sentence().endswith("are both 0")
    found = judged(zero, DECLARED, {}, FULL)
    assert (found.agrees, found.ratio) == (False, 0)
    assert "applied gradient is 0" in found.sentence()
    for applied, declared in ((DECLARED, zero), (DECLARED * math.nan, DECLARED)):
        says = "The declared gradient is 0 or not finite, or the applied gradient is not finite"
        assert judged(applied, declared, {}, FULL).sentence() == says


def test_a_number_of_parts_is_named_where_it_is_clear():
    assert judged(DECLARED / 3, DECLARED, {}, 0.1).cause.startswith("1/3, as if")
    assert judged(DECLARED / 9, DECLARED, {}, 0.1).cause.endswith("the factor has no known cause")


def test_other_losses_have_the_weights_of_those_losses():
    rewards, lengths = RNG.normal(size=(3, 4)), RNG.integers(1, 9, size=(3, 4))
    context = BaselineContext(lengths_PG=lengths)
    loss = Loss("own", "group_std", {"epsilon": 1e-4}, "dapo", 9)
    advantage_N = {
        baseline: values.ravel()
        for baseline, values in advantages_by_baseline(loss, rewards, context).items()
    }
    weight_N = token_weights("dapo", lengths.ravel(), 9)
    others = other_losses(loss, advantage_N, weight_N, lengths.ravel())
    assert list(others)[:3] == ["loss_type=sum", "loss_type=dr_grpo", "loss_type=grpo"]
    expected = Loss("other", "batch_std", {"epsilon": 1e-4}, "grpo", 9)
    np.testing.assert_allclose(
        others["loss_type=grpo with advantages batch_std"],
        row_weights(expected, rewards, context)[0].ravel(),
    )
    declared = row_weights(loss, rewards, context)[0].ravel()
    assert not any(np.allclose(weights, declared) for weights in others.values())


def test_rows_that_are_missing_and_added():
    scores, weights = RNG.normal(size=(20, 300)), np.where(np.arange(20) < 4, 0.0, 1.0)
    weights *= RNG.choice([-1.0, 1.0], size=20)
    kept = np.where((np.arange(20) >= 8) & (np.arange(20) < 12), 0.0, weights)
    assert rows_text(kept @ scores, scores, weights, FULL) == "4 of 20 rows are missing (8 to 11)"
    added = kept + np.where(np.arange(20) == 2, 1.0, 0.0)
    text = rows_text(added @ scores, scores, weights, FULL)
    assert text.startswith("4 of 20 rows") and "(8 to 11)" in text and text.endswith("(2)")
    mixed = weights * RNG.uniform(0.5, 2, size=20)
    assert "a sum of the same scores with other weights" in rows_text(
        mixed @ scores, scores, weights, FULL
    )
    assert rows_text(OTHER, scores, weights, FULL) == NOT_OF_ROWS
    assert rows_text(OTHER[:40], scores[:, :40], weights, FULL) == ""


def test_equal_rows_count_together():
    scores, weights = RNG.normal(size=(20, 300)), np.ones(20)
    scores[7] = scores[3]
    kept = np.where(np.isin(np.arange(20), (3, 7, 11)), 0.0, 1.0)
    assert rows_text(kept @ scores, scores, weights, FULL) == "2 of 20 rows are missing (3, 11)"


def test_a_fault_of_its_own_comes_before_a_division():
    found = judged(DECLARED / 5, DECLARED, {}, FULL, [Fault(0.2, "weights are capped at 0.2")])
    assert "0.200 x declared, cosine 1.000" in found.sentence() and "0.2" in found.cause
