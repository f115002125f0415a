"""Verdicts on published claims: the numbers of the estimators, corrected together."""

from __future__ import annotations

import csv
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from commands import compose
from prompt_pools import study_of_pool, whole_pool

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.drift import Drift
from grpo_ustat.estimators.efficiency import mean_over_prompts, positive
from grpo_ustat.estimators.intervals import Interval, decide
from grpo_ustat.estimators.losses import loss_efficiencies
from grpo_ustat.estimators.token_weights import EXACT
from grpo_ustat.measurements.base import Rescored
from grpo_ustat.measurements.verdicts import (
    BY_MEAN,
    FILTERED,
    _over,
    claim_verdicts,
)
from grpo_ustat.runs.claims import holm_adjust

DRAWS, SEED, ROLLOUTS = 20, 3, 32
BOTH = "study.corrections=[token_truncate,sequence_truncate]"
SHARES_D = np.array([0.9, 0.89, 0.9, 0.91])
SHARE = "prompts' share of the noise"  # a curve beside the claims
GAP_CLAIMS = (
    "a mismatch between sampler and model must be corrected",
    "ratios of the sequence (truncated) beat ratios of tokens",
)


def a_pool(questions, completions, shared=1.5):
    """Chances of all sizes; scores along a common gradient, of which right answers have more."""
    rng = np.random.default_rng(8)
    shape = questions, completions
    chance = rng.beta(0.5, 0.8, size=(questions, 1))
    rewards = (rng.random(shape) < chance).astype(float)
    common = shared * (rewards - chance)[..., None] * np.eye(4)[0]
    return whole_pool(rng.normal(size=(*shape, 4)) + common, rewards, rng.integers(1, 9, shape))


def verdicts(pool, sizes=(2, 4, 8), rescored=None):
    return claim_verdicts(study_of_pool(pool, sizes, ROLLOUTS, DRAWS, SEED, rescored=rescored))


@pytest.fixture
def logged(tmp_path):
    """A pool's name, of which nothing is read."""
    path = tmp_path / "r.parquet"
    path.touch()
    return f"pool={path}"


def gap_verdicts(logged, pool, noises, sizes=(2, 4, 8)):
    """Verdicts on a sampler's gap of which each correction adds so much noise to the scores."""
    rng, scores = np.random.default_rng(4), pool.features_PNR
    judged = compose("mse", "study.verdicts=true", logged, BOTH).measured.judged
    weighted = {EXACT: pool} | {
        loss.tokens: whole_pool(
            scores + noises[level] * rng.normal(size=scores.shape), pool.rewards_PN, pool.lengths_PN
        )
        for level, loss in judged.items()
    }
    known = Interval(0.9, 0.8, 1.0)
    drift = Drift(known, known, SHARES_D)
    gap = Rescored("sampler", "tiny", "tiny", "gap", drift, [], judged, pool, weighted)
    rows = {row.claim: row for row in verdicts(pool, sizes, gap)}
    return [rows[claim] for claim in GAP_CLAIMS]


@pytest.mark.parametrize("noises, words", [
    ({"none": 0, "token": 0, "sequence": 3}, ("does not hold", "does not hold")),
    ({"none": 4, "token": 2, "sequence": 0}, ("holds", "holds")),
], ids=["no gap", "a gap"])  # fmt: skip
def test_a_samplers_gap_is_judged_by_what_its_corrections_are_worth(logged, noises, words):
    rows = gap_verdicts(logged, a_pool(120, 20), noises)
    assert tuple(row.verdict for row in rows) == words
    if noises["none"] == noises["token"]:
        assert rows[0].number == pytest.approx((1, 1, 1))


def test_a_gap_that_groups_are_too_large_for_has_a_reason(logged):
    rows = gap_verdicts(logged, a_pool(120, 6), {"none": 0, "token": 0, "sequence": 0}, sizes=(8,))
    assert all("the pool has 6: use" in row.reason for row in rows)


def test_losses_have_the_worth_that_they_have_anywhere():
    pool = a_pool(120, 20)
    rows = loss_efficiencies(pool, [FILTERED, BY_MEAN], [8], ROLLOUTS, DRAWS, SEED)
    efficiencies = [row.efficiency.efficiency_same_g for row in rows]
    found = [row for row in verdicts(pool) if row.measured.startswith("relative efficiency of a")]
    assert len(found) == 2
    for row, efficiency in zip(found, efficiencies, strict=True):
        assert row.number == pytest.approx(efficiency)


def test_every_verdict_is_that_of_its_interval_and_of_its_corrected_p_value():
    rows = verdicts(a_pool(120, 20))
    measured = [row for row in rows if row.number is not None]
    assert len(measured) >= 7
    for row in measured:
        value, low, high = row.number
        if row.holm_p > 0.05:
            assert row.verdict == "not decided"
            continue
        inside = row.least < value < row.most
        assert row.verdict == ("holds" if inside else "does not hold")
        if inside:  # 95 % intervals are shorter than the corrected ones
            assert row.least < low and high < row.most
        else:
            assert high <= row.least or low >= row.most


def test_a_study_has_the_words_of_the_records():
    """Each is in docs/examples/verdicts.csv, which also has claims that are no longer tested."""
    pool, share = a_pool(24, 20), Interval(0.9, 0.8, 1.0)
    judged = compose("mse", "experiment=verdicts", "study.scored_by=embedded:tiny").measured.judged
    weighted = {loss.tokens: pool for loss in judged.values()}
    lag = Rescored(
        "5 updates old", "tiny", "tiny", "lag", Drift(share, share, SHARES_D), [], judged, pool,
        {EXACT: pool} | weighted,
    )  # fmt: skip
    study = study_of_pool(pool, (8,), 256, DRAWS, SEED, rescored=lag)
    words = {(row.claim, row.measured) for row in claim_verdicts(study)}
    path = Path(__file__).parents[2] / "docs/examples/verdicts.csv"
    records = [row for row in csv.DictReader(path.open()) if row["claim"] != SHARE]
    assert words <= {(row["claim"], row["measured"]) for row in records}


def test_the_correction_counts_all_that_is_measured():
    rows = [row for row in verdicts(a_pool(400, 20)) if row.number is not None]
    p_values = sorted(row.holm_p for row in rows)
    assert p_values[0] == pytest.approx(len(rows) * 1e-9, rel=1e-6)  # the least that is told apart
    assert holm_adjust([1e-9] * len(rows))[0] == pytest.approx(p_values[0])


def test_what_a_small_pool_cannot_say_has_a_reason():
    rows = verdicts(a_pool(6, 5), sizes=(4,))
    absent = {row.measured: row.reason for row in rows if row.verdict == "not measured"}
    assert all(absent.values())
    assert any("24 questions, got 6" in reason for reason in absent.values())
    assert not any(row.verdict in ("holds", "does not hold") and row.number is None for row in rows)


def test_one_correction_says_nothing_of_claims(logged):
    words = ("experiment=verdicts", logged)
    line = r"use study.corrections=\[token_mask,token_truncate,sequence_truncate\]"
    with pytest.raises(ConfigError, match=line):
        compose("mse", *words, "study.corrections=[token_mask]")
    assert compose("mse", *words, BOTH).measured.judged.keys() == {"none", "token", "sequence"}


def test_a_share_decides_no_more_often_than_its_interval_misses():
    """An efficiency without error over a share whose interval ends at the bound: p = 2 x 5 %, as
    half of it is the efficiency's.
    """
    shares_D = np.exp(np.log(0.84) + 0.003 * np.random.default_rng(0).normal(size=101))
    drift = Drift(Interval(0, 0, 0), Interval(1, 1, 1), shares_D)
    exact = lambda _: Interval(1.0, 1.0, 1.0)  # noqa: E731
    bound = 1 / drift.completions.low
    decision = decide(partial(_over, exact, drift.completions_at), most=bound)
    assert decision.inside and decision.p_value == pytest.approx(0.1, rel=1e-3)
    shown = _over(exact, drift.completions_at, 0.9)
    assert shown.high == pytest.approx(bound) and shown.low == 1 / drift.completions.high


def test_a_share_of_a_few_questions_may_be_anything_at_a_high_level():
    share_at = Drift(Interval(0, 0, 0), Interval(1, 1, 1), SHARES_D).completions_at
    exact = lambda _: Interval(1.0, 1.0, 1.0)  # noqa: E731
    assert share_at(0.95).low > 0 and share_at(1 - 1e-9).low == 0
    assert math.isinf(_over(exact, share_at, 1 - 1e-9).high)
    decision = decide(partial(_over, exact, share_at), 2 / 3, 3 / 2)
    assert decision.inside and 0 < decision.p_value < 1


@pytest.mark.slow
def test_a_ratio_of_two_estimates_is_said_wrongly_as_often_as_its_p_value_says():
    """2000 studies of 60 questions whose true ratio is a bound: p <= 5 % in at most 5 %."""
    rng, wrong = np.random.default_rng(1), 0
    for _ in range(2000):
        logs = rng.normal(0, 0.3, (2, 60))
        efficiency_D, share_D = (np.exp(mean_over_prompts(log_P)) for log_P in logs)
        drift = Drift(Interval(0, 0, 0), Interval(1, 1, 1), 0.8 * share_D)
        at = partial(_over, partial(positive, efficiency_D), drift.completions_at)
        wrong += decide(at, most=1 / 0.8).p_value <= 0.05
    assert wrong / 2000 < 0.05
