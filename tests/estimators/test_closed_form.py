"""Closed forms of a pool against exact truth, and the coverage of their intervals."""

from __future__ import annotations

import dataclasses
import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from prompt_pools import pool_of, truth, whole_pool
from tabular import TabularPolicy, known_policy

from grpo_ustat.estimators.closed_form import CurvePoint, Request, closed_form
from grpo_ustat.estimators.groups import HeavyTails, scaling_from_arrays
from grpo_ustat.estimators.intervals import Tails, jackknife_interval
from grpo_ustat.estimators.moments import centred, refutes_assumption2
from grpo_ustat.pages.caveats import heavy_warning
from grpo_ustat.records import ScorePool

BASELINES = ["none", "leave_one_out", "group_mean", "oracle"]
PROMPT_ONLY = ["optimal", "constant", "remax"]


def statistics(pool, baselines, group_sizes):
    """`closed_form` of batches with every question once, curves named `mse/<baseline>/<G>`."""
    point = ("all_questions_once", len(pool.rewards_PN))
    rows = [CurvePoint(b, g, *point) for b in baselines for g in group_sizes]
    asked = Request(rows, {"constant": {"value": 0.4}}, {"tokens": (5.0, 2.0)})
    found = closed_form(pool, asked)
    short = {
        "/".join(name.split("/")[:3]) if name.startswith("mse/") else name: value
        for name, value in found.statistics.items()
    }
    return dataclasses.replace(found, statistics=short)


def test_rewards_of_minus_one_and_one_are_the_same_law_in_another_unit(rng):
    """2 z - 1 in place of z: what subtracts a group's own reward has 4 times the error, at the same
    best size; vanilla, which subtracts nothing, has not.
    """
    pool = pool_of(known_policy(), 24, rng)
    signed = dataclasses.replace(
        pool,
        rewards_PN=2 * pool.rewards_PN - 1,
        centred_sums_PR=2 * pool.centred_sums_PR,
    )
    one, other = (
        statistics(x, ["none", "leave_one_out", "oracle"], [2, 8]) for x in (pool, signed)
    )
    for name in ("mse/leave_one_out/2", "mse/leave_one_out/8", "mse/oracle/8", "c1", "c2", "c3"):
        expected = 4 * np.array(one[name])
        np.testing.assert_allclose(other[name], expected, rtol=1e-9, err_msg=name)
    np.testing.assert_allclose(other["gstar"], one["gstar"], rtol=1e-9)
    vanilla = one["mse/none/8"].estimate, other["mse/none/8"].estimate
    assert abs(vanilla[1] / vanilla[0] - 4) > 0.5


@pytest.mark.parametrize("offset", [1e6, 1e8])
def test_a_large_constant_in_all_rewards_changes_what_vanilla_sees_alone(rng, offset):
    pool = pool_of(known_policy(), 24, rng)
    higher = dataclasses.replace(pool, rewards_PN=pool.rewards_PN + offset)
    before, after = (
        statistics(x, ["none", "leave_one_out", "group_mean"], [2, 8]) for x in (pool, higher)
    )
    same = ["c1", "c2", "c3", "grad_sq", "a_v", "corr", "mse/leave_one_out/8", "mse/group_mean/2"]
    for name in [*same, "gstar"]:
        # the offset itself rounds rewards to 1e-8
        np.testing.assert_allclose(after[name], before[name], rtol=1e-7, err_msg=name)
    m0 = pool.sq_norm_PN.mean()
    for name, scale in (("a0", 1), ("mse/none/8", 8 * len(pool.rewards_PN))):
        assert after[name].estimate * scale == pytest.approx(offset**2 * m0, rel=1e-5)


@pytest.mark.slow
def test_what_training_is_asked_of_does_not_grow_with_the_questions():
    """Given the questions the noise scale would: ||grad J||^2 + C1/m is their signal. Means over
    400 pools of 10 and of 60 questions, 12 completions, of ||grad J||^2 and of the signal.
    """
    rng, everyone = np.random.default_rng(8), known_policy(4000)
    exact = truth(everyone, [4])
    for count in (10, 60):
        signals = []
        for _ in range(400):
            chosen = rng.choice(4000, count, replace=False)
            part = TabularPolicy(
                everyone.features_PYD[chosen], everyone.theta_D, everyone.rewards_PY[chosen]
            )
            found = statistics(pool_of(part, 12, rng), ["oracle"], [4])
            signals.append([found["grad_sq"].estimate, found["grad_sq_at_hand"].estimate])
        error = 4 * np.std(signals, axis=0) / 20
        expected = exact["grad_sq"], exact["grad_sq"] + exact["c1"] / count
        assert (abs(np.mean(signals, axis=0) - expected) < error).all()


def test_of_fewer_than_4_questions_nothing_is_known_of_new_ones(rng):
    for count in (1, 3):
        found = statistics(pool_of(known_policy(count), 12, rng), ["oracle"], [4])
        error = found["mse/oracle/4"]
        assert math.isfinite(error.estimate) and np.isnan(error[1:]).all()
        assert np.isnan(found["gstar"]).all() and np.isnan(found.law.constants_4).all()
        assert np.isnan(found["noise/8"].estimate) and found["noise/8"][1:] == (0, math.inf)


@pytest.mark.slow
def test_large_pools_meet_the_truth():
    policy = known_policy()
    found = statistics(pool_of(policy, 500, np.random.default_rng(0)), EVERY, [2, 8])
    for name, value in truth(policy, [2, 8]).items():
        if name.startswith(("mse/", "av_minus", "share", "corr")):
            assert found[name].estimate == pytest.approx(value, rel=0.2, abs=0.05), name


EVERY = [*BASELINES, *PROMPT_ONLY]


@pytest.mark.slow
def test_intervals_over_questions_cover():
    """Questions drawn from a population of 40 000: constants, errors and their ratios."""
    rng = np.random.default_rng(4)
    everyone = known_policy(40_000)
    exact = truth(everyone, [2, 4, 16])
    names = ("c1", "c3", "grad_sq", "av_minus_a0", "noise/8", "noise/best")
    names += ("prompt_share/8",)
    baselines = ("none", "leave_one_out", "oracle")
    curves = [f"mse/{name}/{size}" for name in baselines for size in (2, 16)]
    ratios = ["ratio/none/4", "ratio/leave_one_out/4"]
    hits = dict.fromkeys((*names, *curves, *ratios), 0)
    given = dict(hits)
    studies, size = 300, 40
    for _ in range(studies):
        chosen = rng.choice(40_000, size, replace=False)
        part = TabularPolicy(
            everyone.features_PYD[chosen], everyone.theta_D, everyone.rewards_PY[chosen]
        )
        found = statistics(pool_of(part, 16, rng), baselines, [2, 4, 16])
        values = {name: (found[name], exact[name]) for name in names}
        values |= {name: (found[name], exact[name] * 40_000 / size) for name in curves}
        for name in ratios:
            _, baseline, _ = name.split("/")
            ratio = exact[f"mse/{baseline}/4"] / exact["mse/oracle/4"]
            values[name] = (ratio_of(found, baseline, 4), ratio)
        for name, (interval, value) in values.items():
            given[name] += not math.isnan(interval.low)
            hits[name] += interval.low <= value <= interval.high
    coverage = {name: hits[name] / given[name] for name in hits}
    # Few of these studies decide G*, at which noise/best is taken.
    assert {name for name, count in given.items() if count < studies} == {"noise/best"}
    assert given["noise/best"] >= 10
    # Fieller's sets cover more than they say where ||grad J||^2 may be 0.
    for name, share in coverage.items():
        upper = 1 if name.startswith(("noise", "prompt_share")) else 0.99
        assert 0.90 <= share <= upper, (name, coverage)


def test_identical_questions_vary_not_at_all():
    """Twenty copies of one question: an interval over questions has no width."""
    pool = pool_of(known_policy(1), 32, np.random.default_rng(3))
    copies = {
        name: np.repeat(values, 20, axis=0)
        for name, values in vars(pool).items()
        if isinstance(values, np.ndarray)
    }
    found = statistics(ScorePool(**copies), ["oracle"], [4])
    interval = found["mse/oracle/4"]
    assert interval.high - interval.low < 1e-9


@pytest.mark.slow
def test_without_spread_between_questions_the_best_group_size_has_no_upper_end():
    """With the same gradient at every question C1 is 0 and G* infinite: nothing is decided."""
    rng, bounded = np.random.default_rng(6), 0
    one = known_policy(1)
    same = TabularPolicy(
        np.repeat(one.features_PYD, 30, axis=0), one.theta_D, np.repeat(one.rewards_PY, 30, axis=0)
    )
    for _ in range(40):
        found = statistics(pool_of(same, 16, rng), ["oracle"], [4])
        bounded += math.isfinite(found["gstar"].high)
        assert found["gstar"].low >= 1
    assert bounded <= 5


def opposite_questions(prompts=2):
    """Three outcomes each; Cov(q, z) is +0.375 at every other question and -0.375 at the rest.

    Four equally likely outcomes with scores a, -a, 0, 0 of one parameter, a^2 = 3/2; reward 1 on
    the first two, or on the last two: V = 1/2, M_0 = 3/4, E[q z] = 3/4 or 0.
    """
    features = np.sqrt(1.5) * np.array([1.0, -1.0, 0.0, 0.0])[None, :, None]
    rewards = np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])
    each = np.arange(prompts) % 2
    return TabularPolicy(np.repeat(features, prompts, axis=0), np.zeros(1), rewards[each])


def test_covariances_of_opposite_sign_cancel_in_the_correlation_and_not_in_the_share():
    """By enumeration: corr(q, Z) = 0, and Cov^2/M_0 = 3/16 is all of A_V: b* has no error."""
    moments = opposite_questions().moments()
    np.testing.assert_allclose(moments.cov_qz, [0.375, -0.375])
    assert moments.cov_qz.mean() == 0
    np.testing.assert_allclose(moments.m0, 0.75)
    np.testing.assert_allclose(moments.a_v, 0.1875)  # E q (z - 1/2)^2 = M_0 / 4
    np.testing.assert_allclose(moments.cov_qz**2 / moments.m0, moments.a_v)
    fails = 0
    for seed in range(20):
        pool = pool_of(opposite_questions(12), 16, np.random.default_rng(seed))
        found = statistics(pool, ["oracle"], [4])
        fails += refutes_assumption2(found["share"], found["corr"])
        assert found["share"].estimate == pytest.approx(1.0, abs=0.1)
    assert fails == 20


@pytest.mark.slow
def test_a_norm_that_is_independent_of_the_reward_seldom_refutes_the_assumption():
    """Assumption 2 holds at every prompt of 60 pools; 4 false alarms at most (a rate of 5 % gives
    more than 6 in 3 % of the runs), and an estimate whose mean is 0."""
    rng, fails, estimates = np.random.default_rng(8), 0, []
    for _ in range(60):
        found = statistics(independent_pool(rng, 12, 16), ["oracle"], [4])
        fails += refutes_assumption2(found["share"], found["corr"])
        estimates.append(found["share"].estimate)
    assert fails <= 4
    assert abs(np.mean(estimates)) < 3.5 * np.std(estimates) / 60**0.5


def independent_pool(rng, questions, count):
    """Scores of lognormal length in random directions, rewards that do not look at the length."""
    length = rng.lognormal(0, 0.5, (questions, count, 1))
    direction = rng.normal(size=(questions, count, 2))
    unit = direction / np.linalg.norm(direction, axis=2, keepdims=True)
    z = (rng.random((questions, count)) < 0.5 + 0.3 * unit[..., 0]).astype(float)
    return whole_pool(length * unit, z, np.ones_like(z, dtype=int))


def heavy_pool(questions, count, rng, sd=1.0):
    """Log-normal score norms of so many questions, sd that of the logarithm of the length."""
    pool = independent_pool(rng, questions, count)
    stretch = rng.lognormal(0, sd, (questions, count, 1)) / 2
    scores = pool.features_PNR * stretch
    z = pool.rewards_PN
    return dataclasses.replace(
        pool,
        gram_PNN=np.einsum("pid,pjd->pij", scores, scores),
        features_PNR=scores,
        centred_sums_PR=np.einsum("pn,pnd->pd", centred(z), scores),
    )


@pytest.mark.slow
def test_a_small_pool_of_heavy_tails_is_told_from_a_large_and_from_a_light_one():
    """12 x 16 heavy: warned; 60 x 32 of the tabular problem and light ones: not (coverage .95)."""
    rng = np.random.default_rng(4)
    heavy = [statistics(heavy_pool(12, 16, rng), ["oracle"], [4]).tails.heavy for _ in range(10)]
    light = [
        statistics(pool_of(known_policy(120), 32, rng), ["oracle"], [4]).tails.heavy
        for _ in range(10)
    ]
    assert sum(heavy) >= 9 and sum(light) <= 1


def test_plain_arrays_warn_of_heavy_tails_by_the_same_rule(rng):
    pool = heavy_pool(24, 16, rng)
    gram = pool.gradients_of(slice(None)) @ pool.gradients_of(slice(None)).T
    with pytest.warns(HeavyTails, match="with so few prompts: the mean squared norm"):
        scaling_from_arrays(pool.rewards_PN, pool.sq_norm_PN, gram)
    pool = pool_of(known_policy(120), 64, rng)
    gram = pool.gradients_of(slice(None)) @ pool.gradients_of(slice(None)).T
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaling_from_arrays(pool.rewards_PN, pool.sq_norm_PN, gram)


def test_plain_arrays_give_the_same_constants(rng):
    pool = pool_of(known_policy(120), 16, rng)
    gram = pool.gradients_of(slice(None)) @ pool.gradients_of(slice(None)).T
    plain = scaling_from_arrays(pool.rewards_PN, pool.sq_norm_PN, gram)
    found = statistics(pool, ["oracle"], [4])
    for name in ("c1", "c2", "c3", "gstar", "gstar_paper"):
        np.testing.assert_allclose(plain[name], found[name], rtol=1e-9, err_msg=name)
    with pytest.raises(ValueError, match="at least 4 prompts, got 3"):
        scaling_from_arrays(pool.rewards_PN[:3], pool.sq_norm_PN[:3], gram[:3, :3])
    with pytest.raises(ValueError, match="sq_norm_PN is not finite everywhere"):
        scaling_from_arrays(pool.rewards_PN, pool.sq_norm_PN * np.nan, gram)


@pytest.mark.slow
def test_the_running_mean_is_that_of_all_questions_and_unbiased():
    """Over 1500 pools of four completions of three questions, within four standard errors."""
    policy, rng = known_policy(3), np.random.default_rng(0)
    moments, b = policy.moments(), policy.value_P.mean()
    a_b = moments.a_0 - 2 * b * moments.m1 + b**2 * moments.m0
    exact = ((a_b - moments.g_sq) / 2).mean() / 3
    found = [
        statistics(pool_of(policy, 4, rng), ["running_mean"], [2])
        .statistics["mse/running_mean/2"]
        .estimate
        for _ in range(1500)
    ]
    assert abs(np.mean(found) - exact) < 4 * np.std(found) / 1500**0.5


def ratio_of(found, baseline, size):
    """The interval of one error over the oracle's."""
    prefix = f"ratio/{baseline}/{size}/"
    (value,) = (x for name, x in found.statistics.items() if name.startswith(prefix))
    return value


def test_a_ratio_to_the_oracle_is_that_of_the_errors_and_paired_over_questions(rng):
    """Slow reference: the ratio of the errors of the pools that lack one question."""
    pool, names = pool_of(known_policy(12), 8, rng), ["none", "leave_one_out"]
    found = statistics(pool, [*names, "oracle"], [4])
    for name in names:
        delete_one = []
        for x in range(12):
            rest = np.delete(np.arange(12), x)
            arrays = {
                f.name: getattr(pool, f.name)[rest]
                for f in dataclasses.fields(pool)
                if isinstance(getattr(pool, f.name), np.ndarray)
            }
            part = statistics(ScorePool(**arrays), [name, "oracle"], [4])
            errors = [part[f"mse/{baseline}/4"].estimate for baseline in (name, "oracle")]
            delete_one.append(errors[0] / errors[1])
        ratio = ratio_of(found, name, 4)
        whole = [found[f"mse/{baseline}/4"].estimate for baseline in (name, "oracle")]
        assert ratio.estimate == pytest.approx(whole[0] / whole[1])
        slow = jackknife_interval(ratio.estimate, np.array([delete_one]), positive=True)
        assert ratio == pytest.approx(slow)
    assert ratio_of(found, "oracle", 4) == pytest.approx((1.0, 1.0, 1.0))


def test_equal_rewards_have_no_tails():
    equal, heavy, light = (
        SimpleNamespace(tails=Tails(*one)) for one in ((21.0, math.inf), (21.0, 2.0), (500.0, 9.0))
    )
    assert heavy_warning(equal.tails) == heavy_warning(light.tails) == ""
    assert heavy_warning(heavy.tails).endswith("Raise study.questions.")
