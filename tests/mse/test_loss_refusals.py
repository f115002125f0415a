"""What a study does not tell of a loss, a line each, and what it says of those that it measures."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from commands import run
from prompt_pools import whole_pool

from grpo_ustat.estimators.losses import loss_worths
from grpo_ustat.estimators.row_weights import Loss, RowFilter
from grpo_ustat.mse.loss_refusals import refusal_line
from grpo_ustat.runs.library import load_run

NORMED = {"epsilon": 1e-4}
ADDITIVE = Loss("std", "group_std", NORMED, "grpo", 9)
COUPLED = Loss("tokens", "group_std", NORMED, "dapo", 9)
MICRO = Loss("micro", "leave_one_out", {}, "bnpo", 9, micro_batch_size=6)
REPLACED = Loss("replaced", "none", {}, "sum", 9, rows=RowFilter("replace"))


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
    "no groups": (30, REPLACED, 2, 16,
                  "0 questions have groups of 2 whose rewards differ: use 4 or more of such"),
    "a small batch": (30, rule_of("james_stein"), 8, 16,
                      "baseline james_stein needs 3 prompts in an update, and study.rollouts=16 in "
                      "groups of 8 has 2"),
}  # fmt: skip


@pytest.mark.parametrize("questions, loss, size, rollouts, line", REFUSED.values(), ids=REFUSED)
def test_what_a_pool_does_not_tell_is_a_line(questions, loss, size, rollouts, line):
    rewards = np.zeros((questions, 8))
    rewards[:, 0] = 1
    rewards[:, 1:] += loss == REPLACED
    pool = whole_pool(np.ones((questions, 8, 4)), rewards, np.ones((questions, 8), dtype=int))
    (row,) = loss_worths(pool, [loss], [size], rollouts, 4, 0)
    assert refusal_line(row) == line
    assert (row.worth, row.best, row.alike) == (None, False, False)


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
