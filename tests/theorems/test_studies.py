"""Studies of theorems on small beds: right theory agrees, wrong theory is found out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from beds import coins, softmax, unequal

from grpo_ustat.policy.beds import Coins
from grpo_ustat.theorems import corollaries as both
from grpo_ustat.theorems import lemma6 as lemma
from grpo_ustat.theorems import theorem7 as seven
from grpo_ustat.theorems import theorem8 as eight
from grpo_ustat.theorems.algorithm1 import Estimator
from grpo_ustat.theorems.corollaries import corollaries
from grpo_ustat.theorems.finding import AGREES, DISAGREES, OPEN
from grpo_ustat.theorems.jobs import Rate, mean_interval, simulated
from grpo_ustat.theorems.lemma6 import lemma6
from grpo_ustat.theorems.proposition13 import field, proposition13, root, weight
from grpo_ustat.theorems.theorem7 import theorem7
from grpo_ustat.theorems.theorem8 import ks_distance, theorem8
from grpo_ustat.theorems.truth import assumption2, limit_weighting, noise, scaling_at

CONSTANT, FALLING = Rate("constant", 0.2), Rate("decaying", 2.5, 20)
GRPO = Estimator("leave_one_out", 4, 4)


def verdicts(finding, word=""):
    return [claim.verdict for claim in finding.claims if word in claim.what]


# Lemma 6


def small_lemma6(bed):
    return lemma6(bed, [GRPO], [CONSTANT, FALLING], 60, 400, 0, 1)


def test_lemma6_agrees_on_both_beds():
    on_coins = small_lemma6(coins())
    assert set(verdicts(on_coins)) == {AGREES} and len(on_coins.claims) == 5
    slow = lemma6(
        softmax(), [GRPO], [Rate("constant", 0.5), Rate("decaying", 8.0, 40)], 60, 400, 0, 1
    )
    assert set(verdicts(slow)) == {AGREES} and len(slow.claims) == 3


def test_lemma6_holds_nothing_against_a_bound_whose_time_has_not_come():
    """After 12 steps of a falling rate the recursion itself is above its limit of order 1/T."""
    early = lemma6(coins(), [GRPO], [FALLING], 12, 400, 0, 1)
    (claim,) = [claim for claim in early.claims if "order 1/T" in claim.what]
    assert claim.low > 1 and claim.verdict == OPEN and "T is too small" in claim.how


def test_lemma6_finds_a_bound_that_is_too_low(monkeypatch):
    real = lemma.recursion
    monkeypatch.setattr(lemma, "recursion", lambda *given: 0.5 * real(*given))
    assert DISAGREES in verdicts(small_lemma6(coins()), "recursion, largest")


def test_lemma6_finds_noise_that_is_not_as_predicted(monkeypatch):
    """A tenth less of it is seen by 400 replicates at some of 12 steps."""
    real = lemma.noise_everywhere
    monkeypatch.setattr(lemma, "noise_everywhere", lambda *given: 0.7 * real(*given))
    assert verdicts(small_lemma6(coins()), "next step") == [DISAGREES, DISAGREES]


def test_rows_name_what_stands_behind_them():
    rows = small_lemma6(coins()).rows
    assert {row["replicates"] for row in rows} == {400} and {row["left"] for row in rows} == {0}
    assert all(row["low"] <= row["gap"] <= row["high"] <= row["bound"] for row in rows)


# Theorem 7


@pytest.mark.slow
def test_theorem7_finds_the_best_group_size_where_noise_decides():
    finding = theorem7(coins(), [16], [2, 4, 16], [CONSTANT], [150], 1500, 0, 1)
    assert seven.predicted(coins(), (CONSTANT, 16, 150), [2, 4, 16])["recursion"] == 4
    assert verdicts(finding) == [AGREES, AGREES, AGREES]
    best = [row["group_size"] for row in finding.rows if row["best"]]
    assert 4 in best and len(best) < 3


@pytest.mark.slow
def test_theorem7_finds_a_wrong_prediction(monkeypatch):
    monkeypatch.setattr(seven, "predicted", lambda *given: {"bounds": 2, "recursion": 16})
    finding = theorem7(coins(), [16], [2, 4, 16], [CONSTANT], [150], 1500, 0, 1)
    assert DISAGREES in verdicts(finding)


def test_theorem7_decides_nothing_without_power():
    finding = theorem7(coins(), [16], [2, 4], [CONSTANT], [1], 20, 1, 1)  # 5 % of seeds err
    assert set(verdicts(finding)) == {OPEN}


def test_the_best_are_those_not_distinguishable_from_the_lowest(rng):
    gaps = {2: rng.normal(1.0, 1, 2000), 4: rng.normal(1.0, 1, 2000), 8: rng.normal(2, 1, 2000)}
    assert seven._best(gaps) == {2, 4}


# Theorem 8 and its corollaries


@pytest.mark.slow
def test_theorem8_agrees_and_its_distance_is_scipys(rng):
    finding = theorem8(coins(), [GRPO], FALLING, [50, 400], 600, 0, 1)
    assert set(verdicts(finding)) <= {AGREES, OPEN} and len(finding.claims) == 2
    values = rng.exponential(2 * 0.7, 3000)  # two equal weights: chi2_2 times w is exponential
    from scipy.stats import expon, kstest

    expected = kstest(values, expon(scale=2 * 0.7).cdf).statistic
    assert ks_distance(values, np.array([0.7, 0.7])) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_theorem8_finds_wrong_weights(monkeypatch):
    real = eight.limit_weights
    monkeypatch.setattr(eight, "limit_weights", lambda *given: 0.6 * real(*given))
    assert verdicts(theorem8(coins(), [GRPO], FALLING, [100, 400], 600, 0, 1)) == [DISAGREES] * 2


def test_weights_sum_to_the_weighted_noise():
    """What theorem 7 weighs directions by is what theorem 8 adds up."""
    bed, c = softmax(), 4.0
    sigma = noise(bed, bed.best_K, GRPO)
    total = np.trace(limit_weighting(bed.curvature_KK, c) @ sigma)
    assert eight.limit_weights(bed.curvature_KK, sigma, c).sum() == pytest.approx(total, rel=1e-12)
    law = scaling_at(bed, bed.best_K, limit_weighting(bed.curvature_KK, c))
    assert law.mse(4, 4) == pytest.approx(total, rel=1e-12)


def test_corollaries_agree_where_assumption_2_holds():
    finding = corollaries(coins(), 8, [2, 4], FALLING, 100, 600, 0, 1)
    assert set(verdicts(finding)) <= {AGREES, OPEN}
    exact = [c for c in finding.claims if c.low is None]
    assert len(exact) == 5 and {c.verdict for c in exact} == {AGREES}


def test_corollary_10_is_not_asked_where_assumption_2_fails():
    bed = coins(value_P=np.array([0.4, 0.45, 0.5, 0.5]))
    assert assumption2(coins(), np.zeros(2)) < 1e-15 < assumption2(bed, np.zeros(2))
    claims = both._baselines(bed, 2.5)
    assert {claim.verdict for claim in claims} == {OPEN}
    assert claims[2].measured < -1e-6  # b* really has smaller noise than V in some direction


def test_a_shifted_baseline_has_the_noise_of_a_constant():
    """V = 1/2 everywhere, so V + 0.1 is the constant 0.6, by hand: E[s s' (z - 0.6)^2] - g g'."""
    bed = coins()
    law = bed.law(np.zeros((2, 1)))
    probability, score = law[0][..., 0], law[1][..., 0]
    squared = np.square(bed.rewards_PY - 0.6)
    second = np.einsum("py,pyk,pyl->kl", probability * squared, score, score) / 4
    expected = np.trace(limit_weighting(bed.curvature_KK, 2.5) @ second)
    assert both.shifted_sum(bed, 2.5, 0.1) == pytest.approx(expected, rel=1e-12)


# Proposition 13


def test_the_field_of_a_finite_group_is_the_mean_of_the_estimator(rng):
    """100 000 batches, within 4 standard errors; and the closed forms of G = 2 and G = oo."""
    from grpo_ustat.theorems.algorithm1 import gradient

    bed, one = unequal(), Estimator("group_std", 2, 4, epsilon=0.01)
    u_KR = np.full((1, 100_000), 0.1)
    drawn = gradient(bed, one, bed.law(u_KR), rng.random((10, 100_000), dtype=np.float32))[0]
    expected = field(bed, np.vectorize(lambda p: weight(4, 0.01, p)), 0.1)
    assert abs(drawn.mean() - expected) < 4 * drawn.std() / np.sqrt(drawn.size)
    assert weight(2, 0.0, 0.3) == pytest.approx(np.sqrt(0.5), rel=1e-12)
    assert weight(20_000, 0.0, 0.3) == pytest.approx(1 / np.sqrt(0.21), rel=1e-3)


def test_roots_are_maximisers():
    bed = unequal()
    arcsin = root(bed, lambda p: 1 / np.sqrt(p * (1 - p)))
    u = np.linspace(-0.2, 0.2, 4001)
    value_PR = bed.value(bed.law(u[None])[0])
    best = u[(2 * np.arcsin(np.sqrt(value_PR))).mean(axis=0).argmax()]
    assert arcsin == pytest.approx(best, abs=1e-4) and arcsin < -0.02
    assert root(bed, np.ones_like) == pytest.approx(0, abs=1e-12)


@pytest.mark.slow
def test_proposition13_tells_the_two_maximisers_apart():
    given = ([4, 16], 4, 0.0, Rate("decaying", 4.0, 20), 600, 800, 0, 1)
    finding = proposition13(unequal(), *given)
    assert set(verdicts(finding, "mean end")) == {AGREES}
    plain, small, large = (row["measured"] for row in finding.rows)
    assert large < small < plain and abs(plain) < 0.002


# Beds and intervals


def test_a_mean_among_many_has_a_wider_interval(rng):
    values = rng.normal(size=50)
    alone, one_of_ten = mean_interval(values), mean_interval(values, among=10)
    assert alone.estimate == one_of_ten.estimate == pytest.approx(values.mean())
    assert one_of_ten.high > alone.high > alone.estimate


def test_a_study_says_what_it_stands_on():
    paths, drawn = simulated([], coins(), 10, 0, 1)
    assert (paths, drawn) == ([], 0)
    fields = {f.name for f in dataclasses.fields(Coins)}
    assert {"value_P", "slope_PK", "style_PK", "lambda_K"} <= fields
