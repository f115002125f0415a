"""The study that the script repeats: its constants are unbiased in the metric of the other half,
and both halves count alike.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from grpo_ustat.estimators.intervals import jackknife_interval
from grpo_ustat.estimators.moments import pool_moments
from grpo_ustat.policy.scores.metric import adam_metric

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/benchmarks"))
import error_rates  # noqa: E402
from statements import adam  # noqa: E402

PROMPTS = 32  # of a step


@pytest.fixture(scope="module")
def population():
    return adam.population_of(adam.POLICIES["few rare of style"], 400, np.random.default_rng(0))


def by_definition(population):
    """The constants of every entry, prompt by prompt and outcome by outcome."""
    g_PD, a_v, d = [], 0.0, 0.0
    table = population.p_PY, population.rewards_PY, population.scores_PYD
    for p_Y, z_Y, s_YD in zip(*table, strict=True):
        outcomes = list(zip(p_Y, z_Y, s_YD, strict=True))
        value = sum(p * z for p, z, _ in outcomes)
        g_PD.append(sum(p * z * s for p, z, s in outcomes))
        a_v += sum(p * (z - value) ** 2 * s**2 for p, z, s in outcomes) / 400
        variance = sum(p * (z - value) ** 2 for p, z, _ in outcomes)
        d += variance * sum(p * s**2 for p, _, s in outcomes) / 400
    g_sq, grad_sq = np.square(g_PD).mean(axis=0), np.square(np.mean(g_PD, axis=0))
    return {"c1": g_sq - grad_sq, "c2": a_v - g_sq, "c3": d + g_sq, "grad_sq": grad_sq}


def test_the_truth_is_that_of_the_definitions(population):
    for name, slow in by_definition(population).items():
        np.testing.assert_allclose(population.by_entry()[name], slow, rtol=1e-9, atol=1e-12)


def half_constants(z_PN, s_PND, weight_D):
    """C1 and C3 of some questions by themselves, in the metric of these weights."""
    s_PND = s_PND * weight_D
    centred_PN = z_PN - z_PN.mean(axis=1, keepdims=True)
    g_PD = np.einsum("pn,pnd->pd", centred_PN, s_PND) / (z_PN.shape[1] - 1)
    pairs = [g @ h for x, g in enumerate(g_PD) for y, h in enumerate(g_PD) if x != y]
    moments = pool_moments(z_PN, s_PND @ s_PND.transpose(0, 2, 1))
    return np.array([moments.g_sq.mean() - np.mean(pairs), (moments.d + moments.g_sq).mean()])


def weights(z_PN, s_PND):
    """The weights that each half of the questions gives."""
    v_2 = (half.second_moments("w", PROMPTS) for half in adam.halves(z_PN, s_PND))
    return [adam_metric({"w": v}).of("w", 0, v.numel()).numpy() for v in v_2]


def test_a_study_is_the_mean_of_its_halves_each_in_the_metric_of_the_other(population):
    """The estimates, and the jackknife of each half's questions added up."""
    z_PN, s_PND = adam.draw(population, 10, 16, np.random.default_rng(2))
    found, _ = adam.study(z_PN, s_PND)
    weight_2D = weights(z_PN, s_PND)
    halves = [(z_PN[k::2], s_PND[k::2], weight_2D[1 - k]) for k in range(2)]
    whole = [half_constants(*half) for half in halves]
    deleted = np.array([
        [
            (half_constants(np.delete(z, x, 0), np.delete(s, x, 0), weight) + whole[1 - k]) / 2
            for x in range(5)
        ]
        for k, (z, s, weight) in enumerate(halves)
    ])  # fmt: skip
    for i, name in enumerate(("c1", "c3")):
        slow = jackknife_interval(float(np.mean(whole, axis=0)[i]), deleted[..., i])
        assert found[name] == pytest.approx(slow, rel=1e-5)


@pytest.mark.nightly(minutes=0.02)
@pytest.mark.parametrize("of_the_other", [True, False])
def test_constants_are_unbiased_in_the_metric_of_the_other_half_alone(population, of_the_other):
    """Against the truth in each study's own metrics. With v of the same questions, which no study
    has, the same check fails: entries that they moved much count less.
    """
    entries, rng, off = population.by_entry(), np.random.default_rng(1), []
    for _ in range(300):
        z_PN, s_PND = adam.draw(population, 8, 16, rng)
        weight_2D = weights(z_PN, s_PND)
        for k in range(2):
            weight_D = weight_2D[1 - k if of_the_other else k]
            truth = [(entries[name] * weight_D**2).sum() for name in ("c1", "c3")]
            off.append(half_constants(z_PN[k::2], s_PND[k::2], weight_D) / truth - 1)
    mean, error = np.mean(off, axis=0), np.std(off, axis=0) / np.sqrt(len(off))
    assert (np.abs(mean) < 3 * error).all() == of_the_other, (mean, error)


def test_the_halves_count_alike(population):
    """Questions at even places against those at odd ones: every statistic stays."""
    z_PN, s_PND = adam.draw(population, 12, 16, np.random.default_rng(3))
    swapped = np.arange(12).reshape(6, 2)[:, ::-1].ravel()
    (one, moved), (other, moved_too) = (
        adam.study(z_PN[order], s_PND[order]) for order in (np.arange(12), swapped)
    )
    assert moved == pytest.approx(moved_too, rel=1e-9)
    for name, interval in one.statistics.items():
        assert interval == pytest.approx(other[name], rel=1e-6, nan_ok=True), name


def test_a_row_of_the_table(capsys, monkeypatch):
    arguments = ["--populations", "common", "--cells", "8x16", "--studies", "3"]
    monkeypatch.setattr("sys.argv", ["error_rates.py", "adam", *arguments, "--warnings", "G*"])
    error_rates.main()
    out = capsys.readouterr().out
    assert "| 8 | 16 | G* | " in out
    warnings = "warning: either 0.*, warning: heavy tails 0.*, warning: v is uncertain 0.*"
    assert re.search(warnings, "".join(out.splitlines()[-2:]).replace("1.00", "0.1"))
