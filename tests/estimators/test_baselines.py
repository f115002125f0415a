"""Every baseline of the zoo: against a slow version, against enumeration, and its invariants."""

from __future__ import annotations

import dataclasses
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from reference import (
    BASELINE_OPTIONS,
    beta_weights,
    joint_mean,
    softmax_policy,
    true_gradient,
    zoo_advantages,
)
from scipy import stats

from grpo_ustat.estimators.baselines import (
    BASELINES,
    Baseline,
    advantages,
    registry,
    running_update,
)
from grpo_ustat.records import BaselineContext

PROMPTS = [  # logits, rewards and lengths of three outcomes
    ([0.3, -0.8, 0.5], [1.0, 0.0, 0.25], [2, 5, 1]),
    ([-0.2, 1.1, 0.4], [0.0, 1.0, 0.75], [3, 1, 4]),
    ([0.9, 0.1, -0.6], [0.5, 0.0, 1.0], [1, 2, 6]),
]
CENTRED = [
    "leave_one_out", "group_mean", "group_std", "maxrl", "opo", "batch_std",
    "reinforce_pp", "reinforce_pp_baseline", "james_stein", "beta",
    "group_std_jackknife", "leave_one_out_std", "quantile", "pods", "length_weighted", "ebpo",
]  # fmt: skip
EPSILON = [name for name, baseline in BASELINES.items() if "epsilon" in baseline.options]


def side(rng, count):
    """What baselines read besides the batch: any numbers that do not come from it."""
    fields = ("value_P", "optimal_P", "greedy_P", "critic_P")
    past = ([0.2, 1.0, 0.3, 0.1], [0.6, 0.2])  # rewards, and means of groups
    return {name: rng.random(count).tolist() for name in fields} | {"running": 0.4, "past": past}


def context_of(known, rewards, lengths):
    """Of two reward functions, 0.1 length and the rest of the reward; their sum is the reward."""
    arrays = {k: np.array(v) for k, v in known.items() if k not in ("running", "past")}
    second_PG = 0.1 * np.array(lengths)
    history = [[len(x), np.mean(x), np.var(x) * len(x)] for x in known["past"]]
    return BaselineContext(
        **arrays,
        running=known["running"],
        lengths_PG=np.array(lengths),
        history=np.array(history),
        rewards_PGF=np.stack([np.array(rewards) - second_PG, second_PG], axis=-1),
        reward_weights_F=np.ones(2),
    )


def apply(name, rewards, lengths, known, **changes):
    options = BASELINE_OPTIONS.get(name, {}) | changes
    context = context_of(known, rewards, lengths)
    return advantages(name, np.array(rewards), context, options)


@pytest.mark.parametrize("name", BASELINES)
def test_every_rule_is_the_one_written_out(name, rng):
    """Random groups with lengths, binary and real rewards."""
    baseline = BASELINES[name]
    for trial in range(40):
        prompts = rng.integers(max(2, baseline.min_prompts), 6)
        size = rng.integers(max(2, baseline.min_group_size), 6)
        rewards = rng.random((prompts, size))
        rewards = (np.round(rewards) if trial % 2 else rewards).tolist()
        lengths = rng.integers(1, 9, size=(prompts, size)).tolist()
        known = side(rng, prompts)
        slow = zoo_advantages(name, rewards, lengths, known, BASELINE_OPTIONS.get(name, {}))
        np.testing.assert_allclose(
            apply(name, rewards, lengths, known), slow, rtol=1e-10, atol=1e-10
        )


def bias(name, group_size):
    prompts = PROMPTS[: max(2, BASELINES[name].min_prompts)]
    known = side(np.random.default_rng(3), len(prompts))
    mean = joint_mean(prompts, group_size, lambda z, lengths: apply(name, z, lengths, known))
    return mean - gradient(prompts)


def gradient(prompts):
    return sum(true_gradient(logits, rewards) for logits, rewards, _ in prompts) / len(prompts)


@pytest.mark.parametrize(
    "name, group_size",
    [
        pytest.param(
            name,
            size,
            marks=pytest.mark.slow if (name, size) == ("james_stein", 3) else (),
        )
        for name in BASELINES
        for size in (2, 3)
        if size >= BASELINES[name].min_group_size
    ],
)
def test_a_rule_is_unbiased_exactly_when_it_says_so(name, group_size):
    """Joint enumeration of all outcomes of prompts that share their parameters."""
    size = np.abs(bias(name, group_size)).max()
    if BASELINES[name].unbiased:
        assert size < 1e-12
    else:
        assert size > 1e-4


@pytest.mark.parametrize("group_size", [2, 3])
def test_the_group_mean_is_short_by_one_part_in_g(group_size):
    expected = -gradient(PROMPTS[:2]) / group_size
    np.testing.assert_allclose(bias("group_mean", group_size), expected, atol=1e-14)


def test_the_published_shrinkage_worked_by_hand():
    """Three prompts of two: equation 15 of arXiv 2511.03710v1.

    Prompt 0 sees means 1 and 1/2 of the others: v = (0 + (1/2)/2)/2 = 1/8, s = 1/16, so that
    v/(v+s) = 2/3 of which the paper takes (3-1)/3; its rewards are 1 and 0, the pooled mean 3/4.
    """
    z = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    shrink = 4 / 9
    expected = [1 - shrink * 3 / 4, -(1 - shrink) - shrink * 3 / 4]
    found = advantages("james_stein", z, BaselineContext(), {"epsilon": 0.0})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-14)


def binary_mean(name, probability, group_size, **options):
    """Exact mean of the estimate for one logit and 0/1 rewards, a sum over success counts."""
    successes = np.arange(group_size + 1)
    rewards = (np.arange(group_size) < successes[:, None]).astype(float)
    advantage = advantages(name, rewards, BaselineContext(), options or {"epsilon": 1e-12})
    estimates = (advantage * (rewards - probability)).mean(axis=1)
    return float(stats.binom.pmf(successes, group_size, probability) @ estimates)


VALUES = np.array([0.25, 0.5])  # of two prompts with a logit each; right answers are longer
LENGTHS = np.array([[2, 6], [1, 3]])  # of wrong and right ones


def mean_over_g(name, options, size):
    """Exact mean of each prompt's estimate over its g, a sum over the prompts' success counts."""
    counts, baseline = np.arange(size + 1), BASELINES[name]
    law_2K = [stats.binom.pmf(counts, size, value) for value in VALUES]
    z_KG = (np.arange(size) < counts[:, None]).astype(float)
    right_KG = z_KG.astype(int)
    scores_2KG = z_KG - VALUES[:, None, None]
    mean = np.zeros(2)
    if baseline.couples_prompts:
        for pair in itertools.product(counts, repeat=2):
            z, lengths = z_KG[list(pair)], [LENGTHS[x][right_KG[k]] for x, k in enumerate(pair)]
            context = BaselineContext(
                lengths_PG=np.array(lengths), history=np.zeros((2, 3)),
                rewards_PGF=np.stack([z, 0 * z], axis=-1), reward_weights_F=np.ones(2),
            )  # fmt: skip
            estimate = (advantages(name, z, context, options) * (z - VALUES[:, None])).mean(axis=1)
            mean += law_2K[0][pair[0]] * law_2K[1][pair[1]] * estimate
    else:
        for x in range(2):
            context = BaselineContext(lengths_PG=LENGTHS[x][right_KG])
            estimate = (advantages(name, z_KG, context, options) * scores_2KG[x]).mean(axis=1)
            mean[x] = law_2K[x] @ estimate
    return mean / (VALUES * (1 - VALUES))


@pytest.mark.parametrize("name", [x for x, r in BASELINES.items() if not r.unbiased])
@pytest.mark.slow
def test_the_mean_of_a_rule_goes_to_its_target(name):
    """By enumeration at G = 32, 64 and 128 without the terms of order 1/G and 1/G^2."""
    options = BASELINE_OPTIONS.get(name, {})
    options = options | {"pods": {"share": 0.75}, "quantile": {"level": 0.1}}.get(name, {})
    means = [mean_over_g(name, options, size) for size in (32, 64, 128)]
    limit = (8 * means[2] - 6 * means[1] + means[0]) / 3
    sigma, epsilon, target = (
        np.sqrt(VALUES * (1 - VALUES)), options.get("epsilon", 0), BASELINES[name].target
    )  # fmt: skip
    if target in ("multiple_of_g", "sum_g_over_sigma"):
        ratio = sigma[1] / sigma[0] if target == "sum_g_over_sigma" else 1
        assert limit[0] / limit[1] == pytest.approx(ratio, rel=2e-3)
    else:
        # a quarter is right: of the three quarters that pods keeps, a third; a half: a half
        kept = np.sqrt([2 / 9, 1 / 4])
        short = LENGTHS.astype(float) ** -options.get("power", 0)
        weights = (1 - VALUES) * short[:, 1] + VALUES * short[:, 0]
        all_of_them = (VALUES * short[:, 1] + (1 - VALUES) * short[:, 0]).mean()
        expected = {
            "expected_reward": 1,
            "g_over_sigma": 1 / (sigma + epsilon),
            "g_over_v": 1 / (VALUES + epsilon),
            "kept_part": kept**2 / (kept + epsilon) / sigma**2,
            "g_over_density": beta_weights(VALUES.tolist(), 1e6),
            "weighted_by_length": weights / (sigma + epsilon) / all_of_them,
        }[target]
        np.testing.assert_allclose(limit, expected, rtol=6e-3)
    assert (np.abs(limit - 1).max() < 6e-3) == (target == "expected_reward")


def test_unbiased_rules_have_the_gradient_for_a_target():
    assert {r.target for r in BASELINES.values() if r.unbiased} == {"expected_reward"}


@pytest.mark.parametrize(
    "name", ["group_std", "group_std_jackknife", "leave_one_out_std", "quantile"]
)
def test_graded_rewards_go_to_g_over_sigma_too(name):
    """One prompt of three outcomes, every composition of a group, as above."""
    p, z = np.array([0.2, 0.5, 0.3]), np.array([1.0, 0.4, 0.0])
    scores_YD = np.eye(3) - p
    gradient, sigma = p * (z - p @ z), np.sqrt(p @ (z - p @ z) ** 2)
    options, means = BASELINE_OPTIONS[name], []
    options = options | ({"level": 0.55} if name == "quantile" else {})
    for size in (16, 32, 64):
        counts_K3 = [(a, b, size - a - b) for a in range(size + 1) for b in range(size + 1 - a)]
        outcomes_KG = np.array([np.repeat(np.arange(3), counts) for counts in counts_K3])
        law_K = stats.multinomial.pmf(counts_K3, size, p)
        weights_KG = advantages(name, z[outcomes_KG], BaselineContext(), options) / size
        means.append(np.einsum("k,kg,kgd->d", law_K, weights_KG, scores_YD[outcomes_KG]))
    limit = (8 * means[2] - 6 * means[1] + means[0]) / 3
    np.testing.assert_allclose(limit, gradient / (sigma + options["epsilon"]), atol=3e-3)


def test_a_quantile_that_stays_random_slows_the_rule_down():
    """At V = 1 - K the gap to g/sigma halves where G is four times as large, elsewhere it falls
    by four."""
    options = {"level": 0.4, "epsilon": 0.0}
    for value, share in ((0.6, 0.5), (0.3, 0.25)):
        sigma = math.sqrt(value * (1 - value))
        gaps = [sigma - binary_mean("quantile", value, size, **options) for size in (200, 800)]
        assert gaps[1] / gaps[0] == pytest.approx(share, rel=0.05)


@pytest.mark.parametrize("probability", [0.3, 0.5, 0.6])
def test_the_jackknife_takes_off_the_bias_of_order_one_over_g(probability):
    """By enumeration: G times group_std's bias tends to -(1 + 4v) / (8 v^(3/2)) g, v = p (1-p);
    that of the jackknifed baseline falls by 4 where G doubles."""
    v = probability * (1 - probability)
    target = math.sqrt(v)
    sizes = (64, 128, 256)
    plain = [size * (binary_mean("group_std", probability, size) - target) for size in sizes]
    assert plain[-1] == pytest.approx(-(1 + 4 * v) / (8 * math.sqrt(v)), rel=0.03)
    left = [abs(binary_mean("group_std_jackknife", probability, size) - target) for size in sizes]
    assert max(x / y for x, y in zip(left[1:], left, strict=False)) < 0.3
    assert left[0] < 0.1 * abs(plain[0]) / sizes[0]


def test_the_jackknife_helps_where_most_groups_are_silent_too():
    """By enumeration: bias in units of g at V = .05 and .02."""
    table = {(0.05, 4): (-3.11, -2.13), (0.05, 16): (-1.42, -0.28), (0.02, 4): (-5.65, -4.64),
             (0.02, 16): (-3.65, -2.04), (0.02, 32): (-2.45, -0.73)}  # fmt: skip
    for (value, size), biases in table.items():
        v = value * (1 - value)
        for name, bias_over_g in zip(("group_std", "group_std_jackknife"), biases, strict=True):
            found = binary_mean(name, value, size) / v - v**-0.5
            assert found == pytest.approx(bias_over_g, abs=6e-3)


def test_a_std_without_the_completion_explodes_near_silent_groups():
    """By enumeration at p = 0.9, G = 4: the second moment grows like 1/epsilon^2, that of group_std
    stays; the mean grows like 1/epsilon too, so no scale cures it."""
    p, size = 0.9, 4
    successes = np.arange(size + 1)
    rewards = (np.arange(size) < successes[:, None]).astype(float)
    law = np.array([math.comb(size, k) * p**k * (1 - p) ** (size - k) for k in successes])

    def second(name, epsilon):
        advantage = advantages(name, rewards, BaselineContext(), {"epsilon": epsilon})
        return float(law @ np.square((advantage * (rewards - p)).mean(axis=1)))

    growth = second("leave_one_out_std", 1e-4) / second("leave_one_out_std", 1e-3)
    assert growth == pytest.approx(100, rel=0.02)
    assert second("group_std", 1e-4) == pytest.approx(second("group_std", 1e-3), rel=0.01)


@pytest.mark.parametrize("level", [0.2, 0.4, 0.6, 0.8])
def test_the_quantile_rule_pushes_rare_successes_or_rare_failures(level):
    """The paper's two regimes, 0/1 rewards: only right completions where p <= 1 - K, else only
    wrong ones."""
    for right in range(1, 5):
        z = (np.arange(5) < right).astype(float)[None]
        options = {"level": level, "epsilon": 0.0}
        found = advantages("quantile", z, BaselineContext(), options)[0]
        hard = right / 5 <= 1 - level + 1e-12
        assert ((found > 0) == (z[0] == 1) & hard).all()
        assert ((found < 0) == (z[0] == 0) & (not hard)).all()


def test_ebpo_keeps_a_share_of_the_differences_between_groups(rng):
    """Within a group advantages differ as rewards do, and between groups their means differ by S
    times as much: nothing else is left of the policy's mean reward. Groups of equal rewards have an
    advantage where others differ."""
    z, known = rng.random((4, 3)), side(rng, 4)
    z[2] = 0.25
    found = apply("ebpo", z, np.ones((4, 3), int), known, epsilon=0.0)
    scale = (found[0, 0] - found[0, 1]) / (z[0, 0] - z[0, 1])
    rewards, means = known["past"][0] + z.ravel().tolist(), known["past"][1] + z.mean(1).tolist()
    shrink = np.var(rewards) / 3 / (np.var(rewards) / 3 + np.var(means))
    np.testing.assert_allclose(
        found - found.mean(1, keepdims=True), scale * (z - z.mean(1)[:, None]), atol=1e-12
    )
    np.testing.assert_allclose(found.mean(1), scale * shrink * (z.mean(1) - z.mean()), atol=1e-12)
    assert 0.01 < np.abs(found[2]).min() == pytest.approx(np.abs(found[2]).max())


@pytest.mark.parametrize("group_size", [2, 5])
def test_maxrl_is_the_logarithm_cut_after_g_minus_1_terms(group_size):
    p = 0.3
    expected = (1 - (1 - p) ** (group_size - 1)) / p * p * (1 - p)
    assert binary_mean("maxrl", p, group_size) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", [n for n in CENTRED if n not in ("maxrl", "beta", "ebpo")])
def test_a_shift_of_all_rewards_changes_nothing(name, rng):
    z, lengths = rng.random((4, 3)), rng.integers(1, 7, (4, 3))
    known = side(rng, 4)
    np.testing.assert_allclose(
        apply(name, z + 0.7, lengths, known), apply(name, z, lengths, known), atol=1e-10
    )


@pytest.mark.parametrize(
    "name, power",
    [("none", 1), ("leave_one_out", 1), ("group_mean", 1), ("opo", 1),
     ("james_stein", 1), ("group_std", 0), ("batch_std", 0), ("maxrl", 0),
     ("reinforce_pp", 0), ("reinforce_pp_baseline", 0)],
)  # fmt: skip
def test_scaled_rewards_scale_advantages_or_leave_them(name, power, rng):
    z, lengths, known = rng.random((4, 3)), rng.integers(1, 7, (4, 3)), side(rng, 4)
    exact = {"epsilon": 0.0} if name in EPSILON else {}
    np.testing.assert_allclose(
        apply(name, 3 * z, lengths, known, **exact),
        3**power * apply(name, z, lengths, known, **exact),
        rtol=1e-10,
    )


def test_beta_knows_its_range(rng):
    z, lengths, known = rng.random((4, 3)), np.ones((4, 3), int), side(rng, 4)
    moved = apply("beta", 5 * z - 2, lengths, known, minimum=-2.0, maximum=3.0)
    np.testing.assert_allclose(moved, apply("beta", z, lengths, known), rtol=1e-9)
    with pytest.raises(ValueError, match="widen its options minimum and maximum"):
        apply("beta", 5 * z - 2, lengths, known)


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("name", CENTRED)
def test_equal_rewards_give_no_advantage(name, value, rng):
    """No 0/0 and no magnified rounding, with epsilon 0 too (0.1 has an inexact mean)."""
    lengths = rng.integers(1, 7, (4, 3))
    for changes in ({}, {"epsilon": 0.0}) if name in EPSILON else ({},):
        found = apply(name, np.full((4, 3), value), lengths, side(rng, 4), **changes)
        np.testing.assert_allclose(found, 0, atol=1e-15)


@pytest.mark.parametrize("name", CENTRED)
def test_equal_groups_among_others_stay_finite(name, rng):
    z = np.array([[0.1, 0.1, 0.1], [0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    found = apply(name, z, rng.integers(1, 7, (4, 3)), side(rng, 4))
    assert np.isfinite(found).all()
    if not BASELINES[name].couples_prompts or name in ("batch_std", "beta", "length_weighted"):
        np.testing.assert_allclose(found[[0, 2, 3]], 0, atol=1e-15)


@pytest.mark.parametrize(
    "name", [n for n, baseline in BASELINES.items() if baseline.min_group_size == 1]
)
def test_groups_of_one(name, rng):
    z, known = np.array([[1.0], [0.0], [0.25]]), side(rng, 3)
    assert np.isfinite(apply(name, z, np.array([[2], [3], [1]]), known)).all()


@pytest.mark.parametrize("name", BASELINES)
def test_a_rule_reads_what_it_says_and_no_more(name, rng):
    """Without the fields of `needs` it refuses; with them alone it gives the same."""
    z, lengths = rng.random((4, 3)), rng.integers(1, 7, (4, 3))
    full, baseline = context_of(side(rng, 4), z, lengths), BASELINES[name]
    alone = BaselineContext(**{key: getattr(full, key) for key in baseline.needs})
    options = BASELINE_OPTIONS.get(name, {})
    np.testing.assert_array_equal(
        advantages(name, z, alone, options), advantages(name, z, full, options)
    )
    for key in baseline.needs:
        with pytest.raises(ValueError, match=f"needs BaselineContext.{key}"):
            advantages(name, z, dataclasses.replace(alone, **{key: None}), options)


@pytest.mark.parametrize("name", BASELINES)
def test_coupled_and_prompt_only_rules_are_so(name, rng):
    """Another reward and length of prompt 0 move other prompts, or the rest of the group, or
    neither."""
    z, lengths, known = rng.random((4, 3)), rng.integers(1, 7, (4, 3)), side(rng, 4)
    other, longer = z.copy(), lengths.copy()
    other[0, 0], longer[0, 0] = 1 - z[0, 0], lengths[0, 0] + 3
    change = np.abs(apply(name, other, longer, known) - apply(name, z, lengths, known))
    assert (change[1:].max() > 1e-12) == BASELINES[name].couples_prompts
    assert (change[0, 1:].max() < 1e-12) == BASELINES[name].prompt_only


def test_a_rule_of_ones_own_that_cannot_be_called_is_refused_when_it_is_loaded(monkeypatch):
    def offered(advantage, **options):
        baseline = Baseline("mine", advantage, unbiased=True, min_group_size=2, **options)
        point = SimpleNamespace(load=lambda: baseline)
        monkeypatch.setattr(registry, "entry_points", lambda group: {"mine": point})
        return registry._Baselines()["mine"]

    with pytest.raises(TypeError, match=r"mine .*\(rewards\).*rewards_PG, context"):
        offered(lambda rewards: rewards)
    with pytest.raises(TypeError, match=r"mine .*\(rewards, context, epsilon\)"):
        offered(lambda rewards, context, epsilon: rewards)
    with pytest.raises(TypeError, match="kind of baseline mine has the default 'wide'"):
        offered(lambda rewards, context, *, kind="wide": rewards)
    taken = offered(lambda r, c, decay=0.5, *, level=1: r, memory={"rho": 0.25})
    assert list(taken.options.items()) == [("decay", 0.5), ("level", 1), ("rho", 0.25)]


def test_a_declared_rule_is_the_function_itself(monkeypatch):
    def halved(rewards_PG, context, *, share=0.5):
        """Half of each reward."""
        return share * rewards_PG

    monkeypatch.setattr(registry, "BASELINES", registry._Baselines())
    declared = registry.baseline("Half of r.", unbiased=False, min_group_size=1, needs={"running"})
    assert declared(halved) is halved
    (only,) = registry.BASELINES.values()
    assert (only.name, only.advantage, only.words) == ("halved", halved, "Half of r.")
    assert (only.options, only.needs) == ({"share": 0.5}, frozenset({"running"}))
    z = np.ones((1, 2))
    assert advantages("halved", z, BaselineContext(), {"share": 0.25}).tolist() == [[0.25, 0.25]]


def test_options_are_exactly_the_rules():
    z = np.array([[1.0, 0.0]])
    with pytest.raises(ValueError, match="group_std: .*epsilon"):
        advantages("group_std", z, BaselineContext())
    with pytest.raises(ValueError, match="none: unknown epsilon; it has no options"):
        advantages("none", z, BaselineContext(), {"epsilon": 1.0})
    with pytest.raises(ValueError, match="at least 2 completions, got group_size"):
        advantages("opo", z[:, :1], BaselineContext())
    with pytest.raises(ValueError, match="needs at least 3 prompts, got 1"):
        advantages("james_stein", z, BaselineContext(), {"epsilon": 0.0})
    with pytest.raises(ValueError, match="rewards of at least 0, got -1.0"):
        advantages("maxrl", -z, BaselineContext(), {"epsilon": 1e-4})


def test_the_optimal_baseline_has_the_least_variance():
    """Among prompt-only baselines, E[q (Z - b)^2] is smallest at E[qZ]/E[q]."""
    logits, z, _ = PROMPTS[0]
    p, scores = softmax_policy(logits)
    q = [sum(x * x for x in s) for s in scores]
    best = sum(a * b * c for a, b, c in zip(p, q, z, strict=True)) / sum(np.multiply(p, q))

    def second_moment(b):
        context = BaselineContext(optimal_P=np.full(3, b))
        advantage = advantages("optimal", np.array(z)[:, None], context)[:, 0]
        return float(np.dot(np.multiply(p, q), advantage**2))

    assert second_moment(best) < min(second_moment(best + 1e-3), second_moment(best - 1e-3))


def test_memories_move_as_written():
    assert running_update(0.5, np.array([[1.0, 0.0], [1.0, 1.0]]), 0.9) == pytest.approx(0.525)
