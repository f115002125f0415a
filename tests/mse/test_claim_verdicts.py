"""Verdicts on published claims: the numbers of the estimators, corrected together."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from commands import compose
from prompt_pools import whole_pool
from pyarrow import parquet
from test_exact_rollouts import rows_of, sampled, write

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.closed_form import Request, closed_form
from grpo_ustat.estimators.intervals import Interval, decide
from grpo_ustat.estimators.losses import loss_worths
from grpo_ustat.estimators.token_weights import EXACT
from grpo_ustat.estimators.worth import mean_over_prompts, positive
from grpo_ustat.mse import study as study_run
from grpo_ustat.mse.off_policy import Drift, OffPolicy
from grpo_ustat.mse.verdicts import BY_MEAN, FILTERED, _over, claim_verdicts
from grpo_ustat.pages.verdicts import verdicts_table
from grpo_ustat.runs.claims import holm_adjust
from grpo_ustat.runs.folder import RunFolder

DRAWS, SEED, ROLLOUTS = 20, 3, 32
BOTH = "study.corrections=[token_truncate,sequence_truncate]"
SHARES_D = np.array([0.9, 0.89, 0.9, 0.91])
GAP_CLAIMS = (
    "a sampler's gap has to be corrected", "ratios of the sequence (truncated) beat those of tokens"
)  # fmt: skip


def a_pool(questions, completions, shared=1.5):
    """Chances of all sizes; scores along a common gradient, of which right answers have more."""
    rng = np.random.default_rng(8)
    shape = questions, completions
    chance = rng.beta(0.5, 0.8, size=(questions, 1))
    rewards = (rng.random(shape) < chance).astype(float)
    common = shared * (rewards - chance)[..., None] * np.eye(4)[0]
    return whole_pool(rng.normal(size=(*shape, 4)) + common, rewards, rng.integers(1, 9, shape))


def verdicts(pool, sizes=(2, 4, 8), off_policy=None):
    request = Request([], {}, len(pool.rewards_PN), True, {})
    population = closed_form(pool, request, "questions")
    return claim_verdicts(pool, population, sizes, ROLLOUTS, DRAWS, SEED, off_policy)


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
    gap = OffPolicy("gap", Drift(known, known, SHARES_D), [], judged, pool, weighted)
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
    rows = loss_worths(pool, [FILTERED, BY_MEAN], [8], ROLLOUTS, DRAWS, SEED)
    worths = [row.worth.worth for row in rows]
    found = [row for row in verdicts(pool) if row.measured.startswith("worth of a")]
    assert len(found) == 2
    for row, worth in zip(found, worths, strict=True):
        assert row.number == pytest.approx(worth)


def test_every_verdict_is_that_of_its_interval_and_of_its_corrected_p_value():
    rows = verdicts(a_pool(120, 20))
    measured = [row for row in rows if row.number is not None]
    assert len(measured) >= 9
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
    by_claim = {row.claim: row for row in rows}
    hard = by_claim["in mixed groups hard prompts get too low advantages"]
    assert hard.verdict == "holds" and "an update weighs every prompt alike" in hard.beside


def test_the_correction_counts_all_that_is_measured():
    rows = [row for row in verdicts(a_pool(120, 20)) if row.number is not None]
    p_values = sorted(row.holm_p for row in rows)
    assert p_values[0] == pytest.approx(len(rows) * 1e-9, rel=1e-6)  # the least that is told apart
    assert holm_adjust([1e-9] * len(rows))[0] == pytest.approx(p_values[0])


def test_what_a_small_pool_cannot_say_has_a_reason():
    rows = verdicts(a_pool(6, 5), sizes=(4,))
    absent = {row.measured: row.reason for row in rows if row.verdict == "not measured"}
    assert all(absent.values())
    assert any("study of 24, got 6" in reason for reason in absent.values())
    assert any("budget.pool_completions=10" in reason for reason in absent.values())
    assert not any(row.verdict in ("holds", "does not hold") and row.number is None for row in rows)


@pytest.mark.slow(minutes=0.5)
def test_a_study_leaves_them_in_its_result_and_on_its_page(tmp_path, capsys):
    words = ("experiment=verdicts", "debug=mse", "model=tiny_base", "study.questions=12")
    config = compose(
        "mse", *words, "launch.workers=1", "group_sizes=[4]", "study.policy=embedded:tiny",
        "study.rollouts=16", "budget.loss_draws=4",
    )  # fmt: skip
    study_run.run(config, RunFolder(tmp_path / "run", config))
    result = json.loads((tmp_path / "run/result.json").read_text())
    claims = [row["claim"] for row in result["verdicts"]]
    assert len(claims) == len(set(claims)) >= 14
    assert any("ratios of the sequence (product)" in claim for claim in claims)
    printed, table = capsys.readouterr().out, verdicts_table(result)
    assert "Published claims on this policy" in printed and "arXiv" not in printed
    page = (tmp_path / "run/report.html").read_text()
    assert "Published claims on this policy" in page and "arXiv 2605.17570" in page
    assert len(table.rows) == len(claims)
    assert all(math.isfinite(row["holm_p"]) for row in result["verdicts"] if "number" in row)


@pytest.mark.nightly(minutes=1)
def test_a_study_judges_a_samplers_gap(tmp_path, capsys):
    """Log-probabilities 0.04 nats a token off on average, the same verdicts whatever the other
    losses. Right are the shorter ones of a question, whose gradient a few questions show.
    """
    rollouts, _, _ = sampled(questions=40, completions=12)
    noise = np.random.default_rng(0).normal(scale=0.05, size=rollouts.logprobs_PGT.shape)
    off = replace(rollouts, logprobs_PGT=rollouts.logprobs_PGT + noise * rollouts.mask_PGT)
    lengths_PG = rollouts.mask_PGT.sum(axis=-1)
    rewards_PG = (lengths_PG < np.median(lengths_PG, axis=1, keepdims=True)).astype(float)
    path = write(tmp_path / "r.parquet", rows_of(off, rewards_PG))
    words = ("experiment=verdicts", "model=tiny_base", "launch.workers=1", "group_sizes=[4]",
             "study.rollouts=16", "budget.loss_draws=4")  # fmt: skip
    found = {}
    for objectives in ("[]", "[trl_grpo]"):
        config = compose("mse", *words, f"pool={path}", BOTH, f"objectives={objectives}")
        folder = tmp_path / objectives.strip("[]") / "run"
        study_run.run(config, RunFolder(folder, config))
        result = json.loads((folder / "result.json").read_text())
        rows = {row["claim"]: row for row in result["verdicts"]}
        found[objectives] = [rows[claim] for claim in GAP_CLAIMS]
        page, printed = (folder / "report.html").read_text(), capsys.readouterr().out
        assert "within 0.0" in printed and "a sampler's gap" in printed
        assert "vllm_importance_sampling_correction" in page and "trl#4493" in page
    corrected, by_sequence = found["[]"]
    assert corrected["number"] == pytest.approx(1, abs=0.1)  # such a gap changes little
    assert by_sequence["number"] > 0 and "nats a token apart" in by_sequence["beside"]
    numbers = [[row["number"] for row in rows] for rows in found.values()]
    assert numbers[0] == pytest.approx(numbers[1])
    bare = tmp_path / "bare.parquet"
    parquet.write_table(parquet.read_table(path).drop_columns(["logprobs"]), bare)
    config = compose("mse", *words, f"pool={bare}", BOTH)
    with pytest.raises(ConfigError, match="has no log-probabilities .*column logprobs.* log them"):
        study_run.run(config, RunFolder(tmp_path / "bare", config))
    assert not list((tmp_path / "bare").rglob("*.json"))


def test_one_correction_says_nothing_of_claims(logged):
    words = ("experiment=verdicts", logged)
    line = r"use study.corrections=\[token_mask,token_truncate,sequence_truncate\]"
    with pytest.raises(ConfigError, match=line):
        compose("mse", *words, "study.corrections=[token_mask]")
    assert compose("mse", *words, BOTH).measured.judged.keys() == {"none", "token", "sequence"}


def test_a_share_decides_no_more_often_than_its_interval_misses():
    """A worth without error over a share whose 95 % interval ends at the bound: p = 2 x 5 %, since
    half of it is the worth's.
    """
    shares_D = np.exp(np.log(0.84) + 0.003 * np.random.default_rng(0).normal(size=101))
    drift = Drift(Interval(0, 0, 0), Interval(1, 1, 1), shares_D)
    exact = lambda _: Interval(1.0, 1.0, 1.0)  # noqa: E731
    bound = 1 / drift.completions.low
    decision = decide(partial(_over, exact, drift.completions_at), most=bound)
    assert decision.inside and decision.p_value == pytest.approx(0.1, rel=1e-3)
    shown = _over(exact, drift.completions_at, 0.9)
    assert shown.high == pytest.approx(bound) and shown.low == 1 / drift.completions.high


@pytest.mark.slow
def test_a_ratio_of_two_estimates_is_said_wrongly_as_often_as_its_p_value_says():
    """2000 studies of 60 questions whose true ratio is a bound: p <= 5 % in at most 5 %."""
    rng, wrong = np.random.default_rng(1), 0
    for _ in range(2000):
        logs = rng.normal(0, 0.3, (2, 60))
        worth_D, share_D = (np.exp(mean_over_prompts(log_P)) for log_P in logs)
        drift = Drift(Interval(0, 0, 0), Interval(1, 1, 1), 0.8 * share_D)
        at = partial(_over, partial(positive, worth_D, 1), drift.completions_at)
        wrong += decide(at, most=1 / 0.8).p_value <= 0.05
    assert wrong / 2000 < 0.05
