"""Errors of baselines without a closed form: against every group of a pool, and fresh updates."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from prompt_pools import prompts, whole_pool
from reference import BASELINE_OPTIONS

from grpo_ustat.config.mse import CLOSED_FORMS
from grpo_ustat.estimators import losses
from grpo_ustat.estimators.baseline_errors import baseline_errors, baseline_rows
from grpo_ustat.estimators.baselines import BASELINES, OF_THE_BATCH, advantages
from grpo_ustat.estimators.closed_form import CurvePoint, Request, closed_form
from grpo_ustat.estimators.minibatch import scale_free
from grpo_ustat.estimators.row_weights import Loss
from grpo_ustat.records import BaselineContext

MEASURED = [
    name
    for name, baseline in BASELINES.items()
    if not baseline.only_trains and not baseline.needs - OF_THE_BATCH
]
APART = [name for name in MEASURED if not BASELINES[name].couples_prompts]
COUPLED = [name for name in MEASURED if BASELINES[name].couples_prompts]
SIZE, ROLLOUTS = 3, 12


def drawn_pool(rng, questions, completions=6, graded=False):
    """Scores along a common gradient, of which right answers have more."""
    rewards = rng.integers(0, 2, size=(questions, completions)).astype(float)
    rewards[:, :2] = 0, 1
    scores = rng.normal(size=(questions, completions, 4))
    scores[..., 0] += 2 * rewards
    if graded:
        rewards = rewards / 2 + rng.integers(0, 3, size=rewards.shape) / 4
    lengths = rng.integers(1, 9, size=rewards.shape)
    of_functions = np.stack([rewards - 0.1 * lengths, 0.1 * lengths], axis=-1)
    return whole_pool(
        scores, rewards, lengths, rewards_PNF=of_functions, reward_weights_F=np.ones(2)
    )


def every_update(pool, name):
    """The MSE of a baseline that treats questions apart: all groups of each question, all pairs of
    questions.
    """
    questions, completions = pool.rewards_PN.shape
    groups = np.array(list(itertools.permutations(range(completions), SIZE)))
    energy, mean = [], []
    for x in range(questions):
        context = BaselineContext(lengths_PG=pool.lengths_PN[x][groups])
        rewards = pool.rewards_PN[x][groups]
        weights = advantages(name, rewards, context, BASELINE_OPTIONS.get(name)) / SIZE
        estimates = np.einsum("rg,rgd->rd", weights, pool.features_PNR[x][groups])
        energy.append(np.square(estimates).sum(axis=1).mean())
        mean.append(estimates.mean(axis=0))
    z = pool.rewards_PN - pool.rewards_PN.mean(axis=1, keepdims=True)
    gradient = np.einsum("pn,pnd->pd", z, pool.features_PNR) / (completions - 1)

    def product(left, right):
        """<E left, E right> over pairs of different questions."""
        whole = np.sum(left, axis=0) @ np.sum(right, axis=0) - np.sum(np.multiply(left, right))
        return whole / (questions * (questions - 1))

    signal = product(gradient, gradient)
    if BASELINES[name].unbiased:
        mu_sq = cross = signal
    else:
        mu_sq, cross = product(mean, mean), product(mean, gradient)
    bias2 = mu_sq - 2 * cross + signal
    return bias2 + (np.mean(energy) - mu_sq) * SIZE / ROLLOUTS, bias2


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("name", APART)
def test_all_groups_of_a_pool_count(rng, monkeypatch, name, graded):
    """Exactly where they can be counted, to 2 % where 4000 are drawn of each question."""
    monkeypatch.setattr(losses, "DRAWN_GROUPS", 4000)
    pool = drawn_pool(rng, 7, graded=graded)
    errors = baseline_errors(pool, {name: BASELINE_OPTIONS.get(name, {})}, [SIZE], ROLLOUTS, 2, 0)
    mse, bias2 = every_update(pool, name)
    assert list(errors) == [(name, SIZE)]
    found = errors[name, SIZE]
    loose = 1e-9 if found.draws is None else 0.02
    assert found.mse.estimate == pytest.approx(mse, rel=loose)
    assert found.bias2 == pytest.approx(bias2, rel=loose, abs=loose * mse)
    assert found.bias2 + found.variance == pytest.approx(found.mse.estimate)
    assert found.mse.low < found.mse.estimate < found.mse.high


@pytest.mark.slow(minutes=0.1)
@pytest.mark.parametrize("name, size", [*((name, SIZE) for name in COUPLED), ("reinforce_pp", 1)])
def test_a_coupled_rule_has_the_energy_of_drawn_updates(rng, name, size):
    """E||ghat||^2 of 4000 fresh batches of 4 of 30 questions, whose products across questions are
    exact: within 4 standard errors, for the drawing of both.
    """
    pool, options, count = drawn_pool(rng, 30), BASELINE_OPTIONS[name], 4
    loss = Loss(name, name, options, "sum", 1)
    moments, _ = losses.loss_moments(pool, {loss: [size]}, 4 * size, 600, 0)
    energies = []
    for _ in range(4000):
        chosen = rng.permutation(30)[:count, None]
        place = rng.permuted(np.tile(np.arange(6), (count, 1)), axis=1)[:, :size]
        context = BaselineContext(
            lengths_PG=pool.lengths_PN[chosen, place], history=np.zeros((2, 3)),
            rewards_PGF=pool.rewards_PNF[chosen, place], reward_weights_F=pool.reward_weights_F,
        )  # fmt: skip
        weights = advantages(name, pool.rewards_PN[chosen, place], context, options) / (4 * size)
        update = np.einsum("bg,bgd->d", weights, pool.features_PNR[chosen, place])
        energies.append(update @ update)
    noise = np.std(energies) * (1 / 4000 + 1 / 600) ** 0.5
    found = float(moments[loss, size].energy_D[0])
    assert found == pytest.approx(np.mean(energies), abs=4 * noise)
    (error,) = baseline_errors(pool, {name: options}, [size], 4 * size, 600, 0).values()
    assert error.draws == 600


def test_rules_with_a_closed_form_have_that_error(rng):
    """But for E s = 0, which closed forms use and groups do not: to a twentieth of the interval."""
    policy = prompts(20, rng)
    outcomes, rows = policy.sample(100, rng), np.arange(20)[:, None]
    scores, rewards = policy.scores_PYD[rows, outcomes], policy.rewards_PY[rows, outcomes]
    pool = whole_pool(scores, rewards, np.ones_like(outcomes))
    errors = baseline_errors(pool, {"leave_one_out": {}, "group_mean": {}}, [2, 4], 8, 2, 0)
    points = [CurvePoint(name, size, "with_replacement", 8 // size) for name, size in errors]
    formulas = closed_form(pool, Request(points, {}, {}))
    for error, point in zip(errors.values(), points, strict=True):
        expected = formulas[point.key]
        near = (expected.high - expected.low) / 20
        np.testing.assert_allclose(error.mse, expected, atol=near, rtol=0)
        bias2, variance, *moments = formulas.parts[point]
        np.testing.assert_allclose([error.bias2, error.variance], [bias2, variance], atol=near)
        for found, of_formula in zip(
            (error.cosine, error.best_scalar_mse), scale_free(*moments), strict=True
        ):
            assert (found or 0) == pytest.approx(of_formula or 0, rel=0.05)


def test_what_a_pool_does_not_tell_is_said(rng):
    baselines = {"batch_std": BASELINE_OPTIONS["batch_std"], "opo": {}, "remax": {}}
    pool, sizes = drawn_pool(rng, 12), [2, 3, 4, 12]
    measured = list(baseline_errors(pool, baselines, sizes, 12, 2, 0))
    assert measured == [("batch_std", 3), ("batch_std", 4), *(("opo", g) for g in (2, 3, 4))]
    rows = [row for row in baseline_rows(pool, baselines, sizes, 12) if row.reason is not None]
    reasons = {(row.loss.baseline, row.group_size): row.reason.line for row in rows}
    assert "needs 18 questions, got 12" in reasons["batch_std", 2]
    assert "groups of 12 need 12 completions" in reasons["opo", 12]
    assert all("reads greedy_P" in reasons["remax", size] for size in (2, 3, 4, 12))
    assert len(reasons) == 3 * 4 - len(measured)


def test_every_rule_of_a_study_has_a_closed_form_or_is_measured_by_groups():
    assert {name for name, baseline in BASELINES.items() if not baseline.only_trains} == {
        *CLOSED_FORMS, *MEASURED
    }  # fmt: skip
