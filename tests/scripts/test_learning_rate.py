"""Learning rate: the enumerations are exact, and the rule fails where its assumption does."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from grpo_ustat.gap.covariance import covariance_parts

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/benchmarks"))
import learning_rate as benchmark  # noqa: E402


@pytest.mark.parametrize("name", benchmark.POLICIES)
def test_the_law_of_the_batch_has_the_exact_mean_and_covariance(name):
    problem, u_K = benchmark.policy_at(name, 0.3)
    parts = covariance_parts(*problem.law(u_K[:, None]), problem.rewards_PY, "leave_one_out")
    for size in (2, 4):
        ghat_KV, weight_V = benchmark.batch_law(problem, u_K, 16, size)
        mean_K = ghat_KV @ weight_V
        np.testing.assert_allclose(mean_K, problem.gradient(u_K[:, None])[:, 0], atol=1e-12)
        centred_KV = ghat_KV - mean_K[:, None]
        covariance_KK = (weight_V * centred_KV) @ centred_KV.T
        exact_KK = parts.covariance(16 // size, size)[..., 0]
        np.testing.assert_allclose(covariance_KK, exact_KK, atol=1e-12)


def test_the_best_rate_is_that_of_the_largest_mean():
    problem, u_K = benchmark.policy_at("2 arms, unequal difficulty", 1.0)
    ghat_KV, weight_V = benchmark.batch_law(problem, u_K, 16, 4)
    rate = benchmark.best_rate(problem, u_K, 16, 4, guess=1.0)

    def mean(rate):
        return weight_V @ problem.objective(u_K[:, None] + rate * ghat_KV)

    assert mean(rate) > max(mean(0.999 * rate), mean(1.001 * rate))
    assert benchmark.best_rate(problem, u_K, 16, 4, guess=3.0) == pytest.approx(rate, rel=1e-8)


def test_the_weighted_rule_is_exact_near_the_maximiser_and_the_plain_rule_fails_with_a_style():
    names = ["2 arms, equal difficulty", "2 arms, style without reward"]
    rows = benchmark.enumerated(names, rollouts=(16, 64), group_sizes=(2, 8))
    by_name = {
        (name, kind): [c for c in benchmark.changes(rows, kind) if c.policy == name]
        for name in names
        for kind in ("n", "G")
    }
    # A style that earns no reward changes neither the best rate nor n_H.
    for kind in ("n", "G"):
        plain, styled = (by_name[name, kind] for name in names)
        assert len(plain) == len(styled) == 6
        for base, noisy in zip(plain, styled, strict=True):
            assert noisy.exact == pytest.approx(base.exact, rel=1e-6)
            assert noisy.weighted == pytest.approx(base.weighted, rel=1e-9)
            assert base.rule == pytest.approx(base.weighted, rel=1e-9)
    near = [c for changes in by_name.values() for c in changes if c.distance == "near"]
    assert max(c.errors[1] for c in near) < 0.01
    # The best rate falls to about half if G rises from 2 to 8; the rule lets it grow.
    near_styled = [c for c in by_name[names[1], "G"] if c.distance == "near"]
    assert all(c.exact < 0.6 < 1 < c.rule for c in near_styled)


def test_rates_of_a_curve():
    mean_R = np.array([0.0, 3.0, 4.0, 3.0, 0.0])
    rates = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    curve = benchmark.Curve(rates, np.stack([mean_R, mean_R], axis=1))
    # The vertex is at 4; from 3 at 8 to 0 at 16, half of 4 is passed after a third of the way.
    assert curve.best(mean_R) == pytest.approx(2.0)
    assert curve.largest(mean_R, 0.5) == pytest.approx(3 + 1 / 3)
    assert curve.largest(mean_R, 0.0) == 4.0
    assert curve.next_rate() is None
    assert benchmark.Curve(rates[2:], curve.gain_RS[2:]).next_rate() == 2.0
    assert benchmark.Curve(rates[:4], curve.gain_RS[:4]).next_rate() == 16.0


def test_the_law_of_tiny_base_is_that_of_its_record():
    law = benchmark.policy_law()
    assert law.best_size() == pytest.approx(8.99771)
    assert law.noise_scale(8).estimate == pytest.approx(3461.0)
    assert law.prompt_share(8).estimate == pytest.approx(0.13265)


def test_the_page_quotes_the_records():
    page = (ROOT / "docs/verdicts.md").read_text()
    paragraph = page.partition("**The best learning rate changes")[2].partition("![")[0]
    rows = benchmark.read_bandits(benchmark.BANDITS)
    near = [
        change
        for kind in ("n", "G")
        for change in benchmark.changes(rows, kind)
        if change.distance != "far"
    ]
    without = max(c.errors[0] for c in near if "style" not in c.policy)
    styled = [c for c in near if "style" in c.policy and c.distance == "near"]
    worst = max(styled, key=lambda c: c.errors[0])
    assert f"{100 * without:.0f} %" in paragraph
    words = " ".join(paragraph.split())
    assert f"{worst.exact:.2f} times" in words and f"predicts {worst.rule:.2f} times" in words
    gains = benchmark.gains_of(benchmark.read_rows(benchmark.TRAINING))
    factors = {(m.optimizer, m.before, m.after): m for m in benchmark.measured(gains)}
    for pair in (((128, 8), (256, 8)), ((128, 2), (128, 8))):
        row = factors["sgd", *pair]
        estimate, low, high = row.factors[1]
        assert (
            f"{estimate:.1f} [{low:.1f}, {high:.1f}], and the rule predicts {row.rule:.1f}" in words
        )


def test_the_grid_is_extended_and_finished_runs_are_not_repeated(tmp_path, monkeypatch):
    trained = []

    def train(cell, rate, seed, before):
        """A gain that is largest at a rate of 8 and negative above 16."""
        trained.append((rate, seed))
        return 0.5, 0.5 + 0.01 * (2 - abs(np.log2(rate / 8)))

    monkeypatch.setattr(benchmark, "train", train)
    monkeypatch.setattr(benchmark, "MIDDLE", {("sgd", 32, 8): 2.0})
    file = tmp_path / "runs.csv"
    benchmark.run_cells(file, minutes=0)
    assert not trained
    benchmark.run_cells(file, minutes=1)
    assert sorted({rate for rate, _ in trained}) == [1, 2, 4, 8, 16]
    count = len(trained)
    assert count == 5 * len(benchmark.SEEDS)
    benchmark.run_cells(file, minutes=1)
    assert len(trained) == count
    curve = benchmark.curves(benchmark.gains_of(benchmark.read_rows(file)))["sgd", 32, 8]
    assert curve.best(curve.mean_R) == pytest.approx(3.0)


@pytest.mark.slow
def test_a_run_measures_accuracy_before_and_after(monkeypatch):
    monkeypatch.setattr(benchmark, "RUN", [*benchmark.RUN, "max_steps=1", "eval.num_generations=1"])
    before, after = benchmark.train(("sgd", 32, 8), 0.1, 0, None)
    assert 0.2 < before < 0.4 and 0.2 < after < 0.4
