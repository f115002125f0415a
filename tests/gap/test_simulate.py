"""The simulator against a slow one that draws every completion, and against exact moments."""

from __future__ import annotations

import numpy as np
import pytest
from problems import coins, softmax, unequal

from grpo_ustat.draws import generator
from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.gap.covariance import baseline_values, covariance_parts
from grpo_ustat.gap.simulate import (
    REPLICATES_AT_ONCE,
    STREAM,
    Estimator,
    Rate,
    Simulation,
    gradient,
    reference_law,
    run_simulations,
    simulate,
)
from grpo_ustat.records import BaselineContext

EVERY = ("none", "oracle", "optimal", "leave_one_out", "leave_one_out_std")


def slow_gradient(problem, one, u_K, uniform, old_K=None):
    """Completion by completion, with the baselines of the zoo; pi_old at another u writes."""
    own_PYR, score_PYKR = problem.law(u_K[:, None])
    probability_PYR = own_PYR if old_K is None else problem.law(old_K[:, None])[0]
    known_P = None
    if one.baseline in ("oracle", "optimal"):
        known_P = baseline_values(probability_PYR, score_PYKR, problem.rewards_PY, one.baseline)[
            :, 0
        ]
    total = np.zeros(len(u_K))
    prompts, rest = uniform[: one.num_prompts], uniform[one.num_prompts :]
    for b, draw in enumerate(prompts):
        x = int(draw * np.float32(len(problem.rewards_PY)))
        edges = probability_PYR[x, :, 0].cumsum()[:-1].astype(np.float32)
        own = rest.reshape(one.group_size, one.num_prompts)[:, b]
        drawn = [int((u >= edges).sum()) for u in own]
        rewards = problem.rewards_PY[x, drawn]
        if known_P is not None:
            advantages = rewards - known_P[x]
        else:
            longer, name = 1.0, one.baseline
            if name == "leave_one_out_std":
                longer, name = one.group_size / (one.group_size - 1), "group_std"
            options = {"epsilon": one.epsilon} if name == "group_std" else {}
            baseline = BASELINES[name].advantage
            advantages = longer * baseline(rewards[None], BaselineContext(), **options)[0]
        ratios = own_PYR[x, drawn, 0] / probability_PYR[x, drawn, 0]
        penalties = np.zeros(one.group_size)
        if one.beta:
            reference_PY = problem.law(np.array(one.reference)[:, None])[0][..., 0]
            penalties = one.beta * (reference_PY[x, drawn] / own_PYR[x, drawn, 0] - 1)
        total += (ratios * advantages + penalties) @ score_PYKR[x, drawn, :, 0]
    return total / one.rollouts


@pytest.mark.parametrize("baseline", EVERY)
@pytest.mark.parametrize("make", [coins, softmax])
def test_a_step_is_that_of_single_completions(make, baseline, rng):
    problem, one = make(), Estimator(baseline, 3, 4, epsilon=1e-3)
    u_KR = problem.best_K[:, None] + rng.uniform(-0.1, 0.1, (2, 30))
    uniform = rng.random((15, 30), dtype=np.float32)
    found = gradient(problem, one, problem.law(u_KR), uniform)
    slow = [slow_gradient(problem, one, u, d) for u, d in zip(u_KR.T, uniform.T, strict=True)]
    np.testing.assert_allclose(found, np.array(slow).T, atol=1e-13)


@pytest.mark.parametrize("make", [coins, softmax])
def test_ratios_and_the_kl_term_are_those_of_single_completions(make, rng):
    problem = make()
    one = Estimator("leave_one_out_std", 3, 4, 1e-3, beta=0.4, reference=(0.1, -0.2))
    u_KR = problem.best_K[:, None] + rng.uniform(-0.1, 0.1, (2, 30))
    old_KR = problem.best_K[:, None] + rng.uniform(-0.1, 0.1, (2, 30))
    uniform = rng.random((15, 30), dtype=np.float32)
    found = gradient(
        problem,
        one,
        problem.law(u_KR),
        uniform,
        problem.law(old_KR)[0],
        reference_law(problem, one),
    )
    columns = zip(u_KR.T, uniform.T, old_KR.T, strict=True)
    slow = [slow_gradient(problem, one, u, d, old) for u, d, old in columns]
    np.testing.assert_allclose(found, np.array(slow).T, atol=1e-13)


def test_a_batch_is_one_pass_over_its_minibatches(rng):
    """Updates written out: pi_old changes after every second one."""
    problem, rate = coins(), Rate("decaying", 0.6, 1)
    one = Estimator("leave_one_out_std", 2, 4, minibatches=2, beta=0.2, reference=(0.0, 0.1))
    found = simulate(problem, Simulation(one, rate, (0, 1, 2, 3, 4)), range(3), 5)
    for number in range(3):
        uniforms = generator(5, STREAM, number).random((4, 2 + 8), dtype=np.float32)
        u_K = old_K = problem.start_K
        for t, eta in enumerate(rate.values(4)):
            old_K = u_K if t % 2 == 0 else old_K
            u_K = u_K + eta * slow_gradient(problem, one, u_K, uniforms[t], old_K)
            np.testing.assert_allclose(found.u_SKR[t + 1, :, number], u_K, atol=1e-12)


@pytest.mark.parametrize("baseline", ["none", "leave_one_out", "oracle"])
def test_mean_and_covariance_are_the_enumerated_ones(baseline, rng):
    """20 000 batches: z values of 2 means and 3 second moments are standard normal, within 4."""
    problem, one, count = softmax(), Estimator(baseline, 2, 3), 20_000
    u_KR = np.repeat(problem.start_K[:, None], count, axis=1)
    law = problem.law(problem.start_K[:, None])
    drawn = gradient(problem, one, problem.law(u_KR), rng.random((8, count), dtype=np.float32))
    off = drawn - problem.gradient(problem.start_K[:, None])
    expected = covariance_parts(*law, problem.rewards_PY, baseline).covariance(2, 3)[..., 0]
    products = [off[k] * off[m] - expected[k, m] for k, m in ((0, 0), (0, 1), (1, 1))]
    for values in (*off, *products):
        assert abs(values.mean()) < 4 * values.std() / np.sqrt(count)


def test_a_replicate_run_again_alone_takes_the_same_path():
    problem, one, rate = softmax(), Estimator("leave_one_out", 2, 3), Rate("constant", 0.3)
    job = Simulation(one, rate, (0, 60, 130))
    whole = simulate(problem, job, range(REPLICATES_AT_ONCE + 5), 7)
    for number in (0, 3, REPLICATES_AT_ONCE + 4):
        alone = simulate(problem, job, range(number, number + 1), 7)
        assert (alone.u_SKR[..., 0] == whole.u_SKR[..., number]).all()
        assert (alone.gap_SR[:, 0] == whole.gap_SR[:, number]).all()
    other = simulate(problem, Simulation(one, rate, (130,)), range(1), 8)
    assert (other.u_SKR[0, :, 0] != whole.u_SKR[2, :, 0]).all()


def test_replicates_that_leave_the_sublevel_set_are_known_and_kept_on_the_problem():
    problem = coins(start_K=np.array([0.43, 0.0]))
    job = Simulation(Estimator("none", 1, 2), Rate("constant", 0.8), tuple(range(51)))
    paths = simulate(problem, job, range(40), 0)
    outside_SR = paths.gap_SR > problem.reach
    first_R = np.where(outside_SR.any(axis=0), outside_SR.argmax(axis=0), 0)
    assert (paths.exit_R == first_R).all() and (first_R > 0).sum() > 0
    assert (np.abs(paths.u_SKR) <= problem.box_K[:, None] + 1e-15).all()


@pytest.mark.slow
def test_the_number_of_processes_changes_nothing():
    jobs = [
        Simulation(Estimator(name, 2, 2), Rate("constant", 0.1), (3, 9))
        for name in ("none", "oracle")
    ]
    one, drawn = run_simulations(jobs, unequal(), REPLICATES_AT_ONCE + 20, 3, 1)
    two, _ = run_simulations(jobs, unequal(), REPLICATES_AT_ONCE + 20, 3, 2)
    assert drawn == 2 * (REPLICATES_AT_ONCE + 20) * 9 * 4
    for a, b in zip(one, two, strict=True):
        assert (a.u_SKR == b.u_SKR).all() and (a.exit_R == b.exit_R).all()
