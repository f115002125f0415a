"""Worth of losses by a scored pool: what it does not tell, and in which order rows are."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from commands import run

from grpo_ustat.estimators.row_weights import Loss
from grpo_ustat.mse.losses import UNBIASED, loss_worths, refusal
from grpo_ustat.records import ScorePool
from grpo_ustat.runs.library import load_run

COMPLETIONS = 8
NORMED = {"epsilon": 1e-4}
ADDITIVE = Loss("std", "group_std", NORMED, "grpo", 9)
COUPLED = Loss("tokens", "group_std", NORMED, "dapo", 9)
MICRO = Loss("micro", "leave_one_out", {}, "bnpo", 9, micro_batch_size=6)
SCALED = Loss("scaled", "group_mean", {}, "dr_grpo", 9)


def a_pool(questions, metrics=1):
    """Scores along a common gradient, of which right answers have more."""
    rng = np.random.default_rng(8)
    shape = questions, COMPLETIONS
    rewards = rng.integers(0, 2, size=shape).astype(float)
    rewards[:, :2] = 0, 1
    scores = rng.normal(size=(*shape, 4)) + 2 * (rewards[..., None] - 0.5) * np.eye(4)[0]
    scores = scores.astype(np.float32)
    return ScorePool(
        rewards_PN=rewards,
        gram_PNN=scores.astype(float) @ scores.astype(float).transpose(0, 2, 1),
        lengths_PN=rng.integers(1, 9, size=shape),
        features_PNR=scores,
        reward_sums_PR=np.zeros((questions, 4)),
        score_sums_PR=np.zeros((questions, 4)),
        metrics=metrics,
    )


def rule_of(name):
    return Loss("own", name, {}, "sum", 9)


REFUSED = {
    "one question": (1, ADDITIVE, 2, 16, "1 question gives no interval: use study.questions=4"),
    "two questions": (2, ADDITIVE, 2, 16, "2 questions give no interval: use study.questions=4"),
    "few questions": (3, ADDITIVE, 2, 16, "3 questions give no interval: use study.questions=4"),
    "no value": (30, rule_of("oracle"), 2, 16,
                 "baseline oracle reads value_P, which no pool of one policy has"),
    "several functions": (30, rule_of("gdpo"), 2, 16,
                          "baseline gdpo reads reward_weights_F, rewards_PGF, which no pool of one "
                          "policy has"),
    "past batches": (30, rule_of("running_mean"), 2, 16,
                     "baseline running_mean reads running, which no pool of one policy has"),
    "a small group": (30, rule_of("leave_one_out_std"), 2, 16,
                      "baseline leave_one_out_std needs groups of 3 or more"),
    "a large group": (30, ADDITIVE, 16, 16,
                      "groups of 16 need as many completions of each question, the pool has 8: use "
                      "budget.pool_completions=16, or log larger groups"),
    "no multiple": (30, ADDITIVE, 8, 20, "study.rollouts=20 is no multiple of 8"),
    "a micro-batch": (30, MICRO, 2, 16, "micro-batches of 6 do not divide 16 rollouts"),
    "a large batch": (23, COUPLED, 2, 16,
                      "an update has 8 questions whose rows are weighed together: batches of so "
                      "many need a study of 24, got 23"),
    "a small batch": (30, rule_of("james_stein"), 8, 16,
                      "baseline james_stein needs 3 prompts in an update, and study.rollouts=16 in "
                      "groups of 8 has 2"),
}  # fmt: skip


@pytest.mark.parametrize("questions, loss, size, rollouts, line", REFUSED.values(), ids=REFUSED)
def test_what_a_pool_does_not_tell_is_a_line(questions, loss, size, rollouts, line):
    pool = a_pool(questions)
    assert refusal(pool, loss, size, rollouts) == line
    (row,) = loss_worths(pool, [loss], [size], rollouts, 4, 0)
    assert (row.worth, row.reason, row.best, row.alike) == (None, line, False, False)


def test_a_coupled_loss_needs_one_metric_and_an_additive_one_does_not():
    pool = a_pool(24, metrics=2)
    assert "each half has its own metric" in (refusal(pool, COUPLED, 2, 16) or "")
    assert refusal(pool, ADDITIVE, 2, 16) is None
    assert refusal(a_pool(24), COUPLED, 2, 16) is None


def test_rows_are_by_loss_as_given_then_by_size_with_those_that_are_refused():
    losses = [COUPLED, ADDITIVE]
    rows = loss_worths(a_pool(14), losses, [8, 4, 16, 2], 32, 40, 0)
    order = [(row.loss.name, row.group_size) for row in rows]
    assert order == [(loss.name, size) for loss in losses for size in (2, 4, 8, 16)]
    measured = {(row.loss.name, row.group_size) for row in rows if row.worth is not None}
    assert measured == {("tokens", 8), *(("std", size) for size in (2, 4, 8))}
    for loss in losses:
        best = [row for row in rows if row.loss == loss and row.best]
        assert len(best) == 1 and best[0].alike


def test_a_loss_alone_has_the_numbers_that_it_has_among_others():
    """Up to the rounding of sums over more losses."""
    pool, others = (
        a_pool(24),
        [COUPLED, replace(COUPLED, name="mean", rule="group_mean", options={}), ADDITIVE],
    )
    together = loss_worths(pool, [SCALED, *others], [2, 4], 16, 20, 3)
    for loss in (SCALED, *others):
        alone = loss_worths(pool, [loss], [2, 4], 16, 20, 3)
        of_loss = [row for row in together if row.loss == loss]
        for one, other in zip(alone, of_loss, strict=True):
            assert (one.group_size, one.best, one.alike) == (
                other.group_size, other.best, other.alike
            )  # fmt: skip
            assert one.worth is not None and other.worth is not None
            np.testing.assert_allclose(
                list(vars(one.worth).values()), list(vars(other.worth).values()), rtol=1e-6
            )


def test_group_mean_over_a_constant_is_worth_the_unbiased_one():
    """Its update is (G-1)/G of leave-one-out's, over the longest length."""
    for row in loss_worths(a_pool(12), [SCALED, UNBIASED], [2, 4, 8], 16, 4, 0):
        assert row.worth is not None
        assert row.worth.worth == pytest.approx((1, 1, 1))
        assert row.worth.direction == (1, 1, 1)
        assert (row.worth.worth_best.estimate == pytest.approx(1)) == row.best


@pytest.mark.slow(minutes=0.5)
def test_a_study_says_and_shows_what_a_rollout_of_its_losses_is_worth(tmp_path):
    """As a command, with batches of two questions and groups that the pool does not have."""
    words = ("debug=mse", "objectives=[trl_dapo,verl_token_mean]", "objective=grpo_original",
             "baseline=group_std", "study.rollouts=16")  # fmt: skip
    code, said, errors = run("mse", *words, cwd=tmp_path)
    assert code == 0, errors
    (file,) = tmp_path.rglob("result.json")
    rows = json.loads(file.read_text())["losses"]
    names = ("grpo_original", "trl_dapo", "verl_token_mean")
    assert [row["loss"] for row in rows] == [name for name in names for _ in range(6)]
    measured = [(row["loss"], row["group_size"]) for row in rows if "noise" in row]
    assert measured == [
        *((names[0], size) for size in (2, 4, 8)), *((name, 8) for name in names[1:])
    ]  # fmt: skip
    assert all(("reason" in row) != ("noise" in row) for row in rows)
    assert load_run(file.parent).final_result["losses"] == rows
    page = (file.parent / "report.html").read_text()
    said = " ".join(said.split())
    for name in names:
        assert re.search(rf"a rollout of [^(]*\b{name}\b", said)
        assert name in page
    assert "Worth of a rollout at n = 16" in said and "Losses at every" in page
    assert (file.parent / "losses.svg").is_file()
