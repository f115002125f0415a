"""Trained group sizes beside the predicted one: numbers by hand; when which verdict is given."""

from __future__ import annotations

import numpy as np
import pytest
from beside import ALIKE, CLOSE, GAIN, POLICY, WORSE, compare, study, sweep
from folders import trained
from scipy import stats
from scipy.stats import spearmanr

from grpo_ustat.draws import generator
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.report.best_group_size import LAST, MEAN, nearest
from grpo_ustat.report.rank_correlation import RESAMPLES, rank_correlation

TOLD = {2: WORSE, 8: ALIKE, 32: CLOSE}


@pytest.fixture
def found(tmp_path):
    return compare(sweep(tmp_path / "runs", TOLD), study(tmp_path / "study"))


def test_means_and_differences_are_those_worked_by_hand(found):
    """G = 8: mean 0.53, less half the gain of the last evaluation; s = 0.025820, t_3 = 3.182446.
    G = 2: -0.20 -0.16 -0.20 -0.16, s = 0.023094; two differences at 97.5 %, t_3 = 4.176535.
    """
    two, eight, thirty_two = (row for row in found.rows if row["outcome"] == MEAN)
    half = 3.182446 * 0.0258199 / 2
    mean = 0.53 - GAIN / 2
    assert eight["mean_reward"] == pytest.approx(mean) and eight["best"]
    assert (eight["low"], eight["high"]) == pytest.approx((mean - half, mean + half), abs=1e-6)
    assert two["difference"] == pytest.approx(-0.18)
    assert two["difference_high"] == pytest.approx(-0.18 + 4.176535 * 0.0230940 / 2, abs=1e-6)
    assert two["distinct"] and not thirty_two["distinct"]
    assert thirty_two["difference"] == pytest.approx(-0.02)


def test_the_last_evaluation_stands_beside_the_mean(found):
    by = {(row["outcome"], row["group_size"]): row["mean_reward"] for row in found.rows}
    for size in TOLD:
        assert by[LAST, size] - by[MEAN, size] == pytest.approx(GAIN / 2)
    (note,) = [line for line in found.notes if LAST in line]
    assert "best G: 8" in note and '"agrees"' in note


def test_the_predicted_error_is_that_of_the_law(found):
    """C1, C2, C3 = 1, 10, 49: 2 + 10 + 49 = 61, 8 + 10 + 7 = 25, 32 + 10 + 49/31."""
    two, eight, thirty_two = (row for row in found.rows if row["outcome"] == MEAN)
    assert two["predicted_n_mse"] == pytest.approx(61)
    assert two["predicted_error_ratio"] == pytest.approx(61 / 25)
    assert eight["predicted_error_ratio"] == 1
    assert thirty_two["predicted_n_mse"] == pytest.approx(42 + 49 / 31)


def test_claims_and_severity_of_the_comparison(found):
    (best, order) = found.claims
    assert (best.predicted, best.measured, best.low, best.high) == (8.0, 8.0, 8.0, 32.0)
    assert best.verdict == order.verdict == found.verdict == "agrees"
    assert order.measured == pytest.approx(1)
    assert best.severity.startswith("2 of 3 ") and best.severity.endswith("8, 32")
    assert "8.0 [7.5, 8.5]" in found.answer and "n = 32" in found.answer


def test_a_group_size_is_told_from_the_best_where_its_p_value_is_at_most_5_percent(tmp_path):
    """G = 2 and 8: by hand t_3 of -0.18 with s = 0.023094 over 4 seeds, two-sided."""
    found = compare(sweep(tmp_path / "a", {2: WORSE, 8: ALIKE}), study(tmp_path / "s"))
    wrong = study(tmp_path / "t", c3=1.0, ends=(1.5, 2.5))  # predicts G = 2
    other = compare([str(tmp_path / "a")], wrong)
    assert found.claims[0].p_value == 1.0 and found.claims[0].verdict == "agrees"
    expected = 2 * stats.t.sf(0.18 / (0.0230940 / 2), 3)
    assert other.claims[0].p_value == pytest.approx(expected, rel=1e-4)
    assert other.claims[0].holm_p == pytest.approx(2 * expected, rel=1e-4)  # of two claims
    assert other.claims[1].p_value == 1 / 16  # four seeds, each of the opposite order
    assert other.claims[0].verdict == other.verdict == "disagrees"


VERDICTS = {
    "the predicted G is the best": ({2: WORSE, 8: ALIKE}, "agrees"),
    "the predicted G is not significantly different": ({2: ALIKE, 8: CLOSE, 32: WORSE}, "agrees"),
    "the predicted G is significantly different": ({2: ALIKE, 8: WORSE}, "disagrees"),
    "no G is significantly different": ({2: ALIKE, 8: CLOSE}, "not decided"),
    "no G is, and the predicted one is the best": ({2: CLOSE, 8: ALIKE}, "not decided"),
}


@pytest.mark.parametrize("accuracies, verdict", VERDICTS.values(), ids=VERDICTS)
@pytest.mark.slow(minutes=0.02)
def test_a_verdict_needs_a_group_size_that_is_told_from_the_best(accuracies, verdict, tmp_path):
    found = compare(sweep(tmp_path / "runs", accuracies), study(tmp_path / "study"))
    assert found.claims[0].verdict == verdict


BEST_AT = {
    "the same": ({2: WORSE, 8: ALIKE}, {2: WORSE, 8: ALIKE}, "agrees", (1.0, 1.0, 1.0)),
    "another": ({2: WORSE, 8: ALIKE}, {2: ALIKE, 8: WORSE}, "disagrees", (0.25, 0.25, 0.25)),
    "untold": ({2: WORSE, 8: ALIKE}, {2: ALIKE, 8: CLOSE}, "not decided", (0.25, 0.25, 1.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("first, last, verdict, ratio", BEST_AT.values(), ids=BEST_AT)
def test_whether_one_group_size_is_best_at_every_budget(first, last, verdict, ratio, tmp_path):
    sweep(tmp_path / "runs", first, rollouts=32)
    runs = sweep(tmp_path / "runs", last, rollouts=64)
    found = compare(runs, study(tmp_path / "study"))
    claim = found.claims[2]
    assert "n = 64" in claim.what and "n = 32" in claim.what
    assert (claim.measured, claim.low, claim.high) == ratio and claim.verdict == verdict


def test_the_mean_of_the_evaluations_decides_and_the_last_one_does_not(tmp_path):
    """At the end both are alike, before it G = 2 is worse by 0.2: the mean differs by 0.1."""
    for size, before in ((2, 0.2), (8, 0.4)):
        for seed in range(4):
            evals = {0: 0.1, 4: before + 0.01 * seed, 8: 0.5 + 0.01 * seed}
            folder = tmp_path / f"runs/G-{size}/seed-{seed}"
            trained(folder, size, seed, evals, changes=POLICY)
    found = compare([str(tmp_path / "runs")], study(tmp_path / "study"))
    assert found.rows[0]["difference"] == pytest.approx(-0.1)
    assert found.claims[0].verdict == "agrees"
    assert any("no G" in note and "not decided" in note for note in found.notes)


def test_tables_hold_every_group_size_and_every_claim(found):
    sizes, claims = found.tables()
    assert "8.0 [7.5, 8.5]" in sizes.title
    assert [row[:3] for row in sizes.rows] == [["n=32", 2, "2.44"], ["n=32", 8, "1"],
                                               ["n=32", 32, "1.74"]]  # fmt: skip
    assert [row[-1] for row in sizes.rows] == [
        "significantly less", "largest mean", "not significantly different",
    ]  # fmt: skip
    assert sizes.rows[1][4] == "-" and sizes.rows[2][4].startswith("-0.020 [")
    assert len(sizes.data) == 2 * len(TOLD)  # both outcomes
    assert [row[1:3] for row in claims.rows] == [["8", "8"], ["> 0", "1"]]
    assert [row["verdict"] for row in claims.data] == ["agrees", "agrees"]


@pytest.mark.slow
def test_notes_say_where_the_experiment_is_not_the_theorem(tmp_path):
    adam = compare(sweep(tmp_path / "runs", TOLD), study(tmp_path / "study")).notes
    assert any("adamw" in note for note in adam)
    assert any("at n = 32, from 16 (G = 2) to 1 (G = 32)" in note for note in adam)
    assert any("0.100 before" in note and "no group size has a mean" in note for note in adam)
    assert any(
        "(2, 8, 32), the" in note and "predict that G = 8 trains best" in note for note in adam
    )
    sgd = sweep(tmp_path / "sgd", TOLD, changes={"optimizer.name": "sgd"})
    notes = compare(sgd, study(tmp_path / "wide", ends=(3.0, 20.0))).notes
    assert not any("adamw" in note for note in notes)
    assert any("predict that G = 2, 8 or 32 trains best" in note for note in notes)


@pytest.mark.parametrize("gstar", [1.5, 2.5, 4.2, 8.9, 11.0, 40.0])
def test_the_nearest_group_size_has_the_least_error_of_the_law(gstar):
    sizes, law = [2, 4, 8, 16, 32, 64], ScalingLaw.exact(3.0, 7.0, 3.0 * (gstar - 1) ** 2)
    assert nearest(gstar, sizes) == law.least(sizes)


def test_the_rank_correlation_is_spearmans(rng):
    mean_SG, error_G = rng.random((10, 6)), rng.random(6)
    found = rank_correlation(mean_SG, error_G)
    assert found.estimate == pytest.approx(spearmanr(mean_SG.mean(axis=0), -error_G).statistic)
    assert found.low <= found.estimate <= found.high


def test_seeds_that_agree_leave_no_doubt_of_the_order_and_none_an_order(rng):
    clear_SG = np.array([[0.3, 0.5, 0.4]]) + 0.01 * rng.random((10, 1))
    assert rank_correlation(clear_SG, np.array([3.0, 1.0, 2.0])) == pytest.approx((1, 1, 1))
    assert rank_correlation(clear_SG, np.array([1.0, 3.0, 2.0])) == pytest.approx((-1, -1, -1))
    assert rank_correlation(np.full((10, 3), 0.5), np.array([1.0, 2.0, 3.0])) == (0, 0, 0)


@pytest.mark.slow
def test_the_bootstrap_is_over_seeds(rng):
    """The same seeds drawn again, one resample after the other."""
    mean_SG, error_G = rng.random((6, 5)), rng.random(5)
    drawn_RS = generator(0, "best_group_size", 6).integers(6, size=(RESAMPLES, 6))
    means_RG = [np.mean([mean_SG[seed] for seed in drawn_S], axis=0) for drawn_S in drawn_RS]
    slow = [spearmanr(mean_G, -error_G).statistic for mean_G in means_RG]
    found = rank_correlation(mean_SG, error_G)
    assert (found.low, found.high) == pytest.approx(np.quantile(slow, [0.025, 0.975]))
