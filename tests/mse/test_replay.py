"""Replay of pools of an enumerable policy against exact truth, and coverage of its intervals."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from scipy import stats

from grpo_ustat.estimators.baselines import BASELINES, advantages
from grpo_ustat.estimators.settings import decompose
from grpo_ustat.policy.tabular import TabularPolicy
from grpo_ustat.records import BaselineContext, ScorePool
from grpo_ustat.study import apart
from grpo_ustat.study.groups import rest_gradient
from grpo_ustat.study.replay import replay, unmeasured

OPTIONS = {
    "constant": {"value": 0.3},
    "running_mean": {"decay": 0.9},
    "group_std": {"epsilon": 1e-4},
    "maxrl": {"epsilon": 1e-4},
    "batch_std": {"epsilon": 1e-4},
    "reinforce_pp": {"epsilon": 1e-8},
    "reinforce_pp_baseline": {"epsilon": 1e-8},
    "james_stein": {"epsilon": 1e-8},
    "beta": {"minimum": 0.0, "maximum": 1.0, "ceiling": 1e6},
}
RULES = [name for name, rule in BASELINES.items() if not rule.only_trains]
APART = [name for name in RULES if not BASELINES[name].couples_prompts]
COUPLED = [name for name in RULES if BASELINES[name].couples_prompts]
SETTINGS = [
    ("all_questions_once", None),
    ("with_replacement", 1),
    ("with_replacement", 2),
    ("without_replacement", 2),
    ("one_question", None),
]
LENGTHS = np.array([2, 5, 1])


def tabular(prompts=3, parameters=4, seed=5):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(prompts, 3, parameters))
    rewards = np.array([rng.permutation(row) for row in [[1.0, 0.0, 0.5]] * prompts])
    return TabularPolicy(features, 0.5 * rng.normal(size=parameters), rewards)


def pool_of(policy, count, rng):
    """A pool of tabular completions; their sketches are the scores themselves, in full."""
    outcomes = policy.sample(count, rng)
    rows = np.arange(len(outcomes))[:, None]
    scores, z = policy.scores_PYD[rows, outcomes], policy.rewards_PY[rows, outcomes]
    return ScorePool(
        rewards_PN=z,
        gram_PNN=np.einsum("pid,pjd->pij", scores, scores),
        lengths_PN=LENGTHS[outcomes],
        features_PNR=scores,
        reward_sums_PR=np.einsum("pn,pnd->pd", z, scores),
        score_sums_PR=scores.sum(axis=1),
        greedy_P=greedy(policy),
    )


def greedy(policy):
    best = policy.probabilities_PY.argmax(axis=1)
    return policy.rewards_PY[np.arange(len(best)), best]


def groups_of(policy, x, size):
    """Every group of question x: probabilities, rewards, lengths and scores."""
    actions = np.array(list(itertools.product(range(policy.rewards_PY.shape[1]), repeat=size)))
    chance = policy.probabilities_PY[x][actions].prod(axis=1)
    return chance, policy.rewards_PY[x][actions], LENGTHS[actions], policy.scores_PYD[x][actions]


def apart_truth(policy, name, size, target):
    """(e, p, c, t, ||mu||^2, <mu, tau>, ||tau||^2), questions enumerated one by one."""
    moments, gradient_PD = policy.moments(), policy.gradient_PD
    q_PY = np.square(policy.scores_PYD).sum(axis=2)
    best_P = (policy.probabilities_PY * q_PY * policy.rewards_PY).sum(axis=1) / moments.m0
    e, mu = [], []
    for x in range(len(gradient_PD)):
        chance, z, lengths, scores = groups_of(policy, x, size)
        context = BaselineContext(
            value_P=np.full(len(z), policy.value_P[x]),
            optimal_P=np.full(len(z), best_P[x]),
            greedy_P=np.full(len(z), greedy(policy)[x]),
            running=policy.value_P.mean(),
            lengths_PG=lengths,
        )
        weights = advantages(name, z, context, OPTIONS.get(name)) / size
        estimate = np.einsum("rg,rgd->rd", weights, scores)
        e.append(chance @ np.square(estimate).sum(axis=1))
        mu.append(chance @ estimate)
    scale = {
        "expected_reward": np.ones_like(moments.value),
        "arcsin": moments.var_z**-0.5,
        "log_value": 1 / moments.value,
    }[target]
    mu, tau = np.array(mu), scale[:, None] * gradient_PD
    inner = [np.mean((a * b).sum(axis=1)) for a, b in ((mu, mu), (mu, tau), (tau, tau))]
    mu, tau = mu.mean(axis=0), tau.mean(axis=0)
    return (np.mean(e), *inner, mu @ mu, mu @ tau, tau @ tau)


def coupled_truth(policy, name, size, batch):
    """(mse, bias2) over all batches of B questions and all joint outcomes of their groups."""
    target, count = policy.gradient_PD.mean(axis=0), len(policy.rewards_PY)
    energy, mean = 0.0, 0.0
    batches = list(itertools.combinations(range(count), batch))
    for chosen in batches:
        tables = [groups_of(policy, x, size) for x in chosen]
        for joint in itertools.product(range(len(tables[0][0])), repeat=batch):
            chance, z, lengths, scores = (
                np.array([table[k][row] for table, row in zip(tables, joint, strict=True)])
                for k in range(4)
            )
            weights = advantages(name, z, BaselineContext(lengths_PG=lengths), OPTIONS[name])
            estimate = np.einsum("pg,pgd->d", weights, scores) / (batch * size)
            share = chance.prod() / len(batches)
            energy, mean = energy + share * estimate @ estimate, mean + share * estimate
    bias2 = float(np.square(mean - target).sum())
    return energy - 2 * mean @ target + target @ target, bias2


@functools.cache
def truth(name, size, target, setting, batch):
    """Exact (mse, bias2) of the small policy."""
    policy = tabular()
    count = len(policy.rewards_PY)
    if BASELINES[name].couples_prompts:
        return coupled_truth(policy, name, size, batch or count)
    e, p, c, t, *products = apart_truth(policy, name, size, target)
    if setting == "one_question":
        products = p, c, t
    return decompose(setting, batch, count, e, p, *products)[:2]


def replays(names, sizes, pool_size, pools, draws, seed=0):
    """(mse, bias2) of independent pools by row, arrays [pools, 2]."""
    policy, rng, found = tabular(), np.random.default_rng(seed), {}
    for study in range(pools):
        pool = pool_of(policy, pool_size, rng)
        rows = replay(pool, names, OPTIONS, sizes, SETTINGS, draws, study, "completions")
        for row in rows:
            key = (row.baseline, row.group_size, row.target, row.setting, row.num_prompts)
            found.setdefault(key, []).append((row.mse.estimate, row.bias2))
    return {key: np.array(values) for key, values in found.items()}


def z_values(found):
    """Standard scores of the means against the truth; 0 for what is 0 by construction."""
    result = {}
    for key, values in found.items():
        gap, error = values.mean(axis=0) - truth(*key), values.std(axis=0, ddof=1)
        error = error / len(values) ** 0.5
        gap, error = np.where(np.abs(gap) < 1e-12, 0.0, gap), np.maximum(error, 1e-15)
        result |= {(*key, what): z for what, z in zip(("mse", "bias2"), gap / error, strict=True)}
    return result


def limit_of(count, level=0.001):
    """Bonferroni: all z values of an unbiased replay are inside with probability 1 - level."""
    return stats.norm.isf(level / (2 * count))


def failures(found):
    """The rows whose z value is beyond the simultaneous limit; prints the largest."""
    z = {key: value for key, value in z_values(found).items() if is_sharp(key)}
    worst = max(z, key=lambda key: abs(z[key]))
    print(len(z), "values, limit", limit_of(len(z)), "largest", worst, z[worst])
    return [key for key, value in z.items() if not abs(value) < limit_of(len(z))]


def is_sharp(key):
    """Rows without a plug-in: not those of b*, nor those against g / sigma or g / V."""
    return key[0] != "optimal" and key[2] == "expected_reward"


@pytest.mark.slow
def test_rules_apart_meet_enumeration():
    found = replays(APART, [2, 3], pool_size=12, pools=80, draws=60)
    rows = 2 * (len(APART) + 2) * len(SETTINGS)  # two rules have a target of their own
    assert len(found) == rows
    assert failures(found) == []


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_coupled_rules_meet_enumeration(size):
    found = replays(COUPLED, [size], pool_size=14, pools=60, draws=30)
    assert failures(found) == []


def test_the_gradient_of_the_same_pool_would_be_noticed(monkeypatch):
    """Negative control: the true gradient taken from the whole pool, the group included."""
    monkeypatch.setattr(
        apart, "rest_gradient", lambda u, z, rest: rest_gradient(u, z, np.ones_like(rest))
    )
    assert failures(replays(["none", "group_std"], [2, 3], pool_size=12, pools=80, draws=60))


@pytest.mark.parametrize(
    "name, target, allowance",
    [("optimal", "expected_reward", 0.03), ("group_std", "arcsin", 0.12),
     ("maxrl", "log_value", 0.12)],
)  # fmt: skip
def test_plug_ins_are_off_by_a_little(name, target, allowance):
    """Pools of 60: the O(1/N) bias of sigma or V, squared and inverted, the O(1/N^2) one of b*.

    A bias in the target's squared norm moves mse and bias2 alike, so it is measured by the mse.
    """
    found = replays([name], [2, 3], pool_size=60, pools=60, draws=60)
    chosen = {key: values for key, values in found.items() if key[2] == target}
    assert len(chosen) == 2 * len(SETTINGS)
    for key, values in chosen.items():
        exact = np.array(truth(*key))
        error = values.std(axis=0, ddof=1) / len(values) ** 0.5
        gap = np.abs(values.mean(axis=0) - exact)
        assert (gap < limit_of(2 * len(chosen)) * error + allowance * exact[0]).all(), key


def small_pool(count=16, seed=3):
    return pool_of(tabular(), count, np.random.default_rng(seed))


def run(pool, names, sizes=(2,), settings=SETTINGS, draws=80, seed=1, interval="completions"):
    return replay(pool, list(names), OPTIONS, list(sizes), settings, draws, seed, interval)


def test_a_rule_knows_nothing_of_the_others():
    """Same seed, same numbers; other rules and group sizes change none; another seed does."""
    pool, alone = small_pool(), run(small_pool(), ["group_std"])
    together = run(pool, ["none", "batch_std", "group_std"], sizes=(3, 2))
    assert [x for x in together if (x.baseline, x.group_size) == ("group_std", 2)] == alone
    coupled = [x for x in together if (x.baseline, x.group_size) == ("batch_std", 2)]
    assert coupled == run(pool, ["batch_std"])
    assert run(pool, ["group_std"], seed=2)[0].mse != alone[0].mse


def test_linear_rules_agree_with_their_closed_form():
    """Many draws of one pool approach the pool's own unbiased estimates of the moments."""
    pool, once = small_pool(24), [("all_questions_once", None)]
    rows = run(pool, ["none", "oracle", "leave_one_out"], (2, 4), once, draws=20_000)
    moments = apart.Facts(pool).whole
    for row in rows:
        exact = moments.mse(row.baseline, row.group_size).mean() / len(pool.rewards_PN)
        assert row.mse.estimate == pytest.approx(exact, rel=0.15), row
        assert row.bias2 == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", ["oracle", "optimal", "leave_one_out", "maxrl"])
def test_leave_one_out_is_the_statistic_of_the_smaller_pool(name):
    """What the jackknife takes for the pool without i is a replay of that pool, but for draws."""
    pool, size, i = small_pool(10), 3, 4
    facts, kept = apart.Facts(pool), np.delete(np.arange(10), i)
    groups = np.array(list(itertools.permutations(range(10), size)))[::3]
    rest = np.array([np.setdiff1d(np.arange(10), row) for row in groups])
    orders = np.concatenate([groups, rest], axis=1)
    whole = apart.measure(facts, 0, name, OPTIONS.get(name, {}), orders, size)
    without = orders[(groups != i).all(axis=1)]
    reduced = np.searchsorted(kept, without[without != i].reshape(len(without), 9))
    smaller = ScorePool(
        rewards_PN=pool.rewards_PN[:1, kept],
        gram_PNN=pool.gram_PNN[:1][:, kept][:, :, kept],
        lengths_PN=pool.lengths_PN[:1, kept],
        features_PNR=pool.features_PNR[:1, kept],
        reward_sums_PR=pool.reward_sums_PR[:1],
        score_sums_PR=pool.score_sums_PR[:1],
        greedy_P=pool.greedy_P[:1],
    )
    found = apart.measure(apart.Facts(smaller), 0, name, OPTIONS.get(name, {}), reduced, size)
    assert whole.e_N[i] == pytest.approx(found.e)
    assert whole.c_N[i] == pytest.approx(found.c)
    np.testing.assert_allclose(whole.mean_NN[i, kept], found.mean_N, atol=1e-12)


def test_pools_too_small_for_two_groups_leave_the_parts_open():
    rows = run(small_pool(9), ["group_std", "leave_one_out"], sizes=(5,))
    for row in rows:
        lost = row.baseline == "group_std"
        assert np.isnan(row.bias2) == np.isnan(row.variance) == lost
        by_p = lost and (row.setting, row.num_prompts) == ("with_replacement", 2)
        assert np.isnan(row.mse.estimate) == np.isnan(row.mse.low) == by_p
    with pytest.raises(ValueError, match="needs pools of 8 completions, got 7"):
        run(small_pool(7), ["none"], sizes=(5,))


def test_rows_that_are_missing_have_a_reason():
    rows = run(small_pool(), RULES)
    there = {(x.baseline, x.setting, x.num_prompts) for x in rows}
    for name, setting in itertools.product(BASELINES, SETTINGS):
        assert ((name, *setting) in there) == (unmeasured(name, *setting) is None)


def test_over_questions_is_another_interval_of_the_same_estimate():
    rng = np.random.default_rng(7)
    pool, once = pool_of(tabular(12), 16, rng), [("all_questions_once", None)]
    for given, over in zip(
        run(pool, ["none", "group_std"], settings=once),
        run(pool, ["none", "group_std"], settings=once, interval="questions"),
        strict=True,
    ):
        assert given.mse.estimate == over.mse.estimate
        assert over.mse.high - over.mse.low != given.mse.high - given.mse.low


def test_identical_questions_vary_not_at_all():
    """Copies of one question with the same draws' mean: an interval over questions is MC alone."""
    one = small_pool(32)
    copies = {
        key: np.repeat(getattr(one, key)[:1], 12, axis=0)
        for key in ("rewards_PN", "gram_PNN", "lengths_PN", "features_PNR", "reward_sums_PR",
                    "score_sums_PR", "greedy_P")
    }  # fmt: skip
    once = [("all_questions_once", None)]
    row = run(ScorePool(**copies), ["none"], (2,), once, draws=4000, interval="questions")[0]
    given = run(ScorePool(**copies), ["none"], (2,), once, draws=4000)[0]
    assert row.mse.high - row.mse.low < 0.3 * (given.mse.high - given.mse.low)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [("all_questions_once", None), ("with_replacement", 4)])
def test_intervals_cover(setting):
    """300 studies of 10 questions: 95 % intervals cover 91 to 99 %; the standard error is 1.3 %."""
    policy, rng, studies = tabular(10, 6), np.random.default_rng(1), 300
    names, sizes = ["none", "leave_one_out", "group_std", "oracle"], [2, 4]
    exact = {
        (name, size): decompose(
            *setting, 10, *_inner(apart_truth(policy, name, size, "expected_reward"))
        )[0]
        for name in names
        for size in sizes
    }
    hits = dict.fromkeys(exact, 0)
    for study in range(studies):
        pool = pool_of(policy, 24, rng)
        for row in replay(pool, names, OPTIONS, sizes, [setting], 1000, study, "completions"):
            if row.target == "expected_reward":
                key = (row.baseline, row.group_size)
                hits[key] += row.mse.low <= exact[key] <= row.mse.high
    coverage = {key: count / studies for key, count in hits.items()}
    print(setting, coverage)
    assert all(0.91 <= share <= 0.99 for share in coverage.values()), coverage


def _inner(sums):
    """e, p and the products of the means over questions."""
    return (sums[0], sums[1], *sums[4:])


def simulated_mse(policy, name, size, batches, rng):
    """The mse of all questions once, from independent batches; no pool, no Gram matrix."""
    rows, target = np.arange(len(policy.rewards_PY))[:, None], policy.gradient_PD.mean(axis=0)
    scores_PYD, total = policy.scores_PYD, 0.0
    outcomes = policy.sample(batches * size, rng).reshape(len(rows), batches, size)
    for y in outcomes.transpose(1, 0, 2):
        context = BaselineContext(lengths_PG=LENGTHS[y])
        weights = advantages(name, policy.rewards_PY[rows, y], context, OPTIONS[name])
        estimate = np.einsum("pg,pgd->d", weights, scores_PYD[rows, y]) / y.size
        total += np.square(estimate - target).sum()
    return total / batches


@pytest.mark.slow
def test_intervals_of_coupled_rules_cover():
    """300 studies of 12 questions, random groups."""
    policy, rng, studies = tabular(12, 6), np.random.default_rng(2), 300
    once, names = [("all_questions_once", None)], ["batch_std", "james_stein"]
    exact = {name: simulated_mse(policy, name, 2, 50_000, rng) for name in names}
    hits = dict.fromkeys(names, 0)
    for study in range(studies):
        pool = pool_of(policy, 48, rng)
        for row in replay(pool, names, OPTIONS, [2], once, 200, study, "completions"):
            hits[row.baseline] += row.mse.low <= exact[row.baseline] <= row.mse.high
    print({name: count / studies for name, count in hits.items()})
    assert all(0.91 <= count / studies <= 0.99 for count in hits.values()), hits
