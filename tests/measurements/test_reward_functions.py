"""Each reward function by itself and in the sum, from one pool; a whole study with two of them."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from commands import compose
from prompt_pools import prompts, study_of_pool

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.baseline_errors import baseline_errors
from grpo_ustat.estimators.baselines import BASELINES, Baseline, advantages
from grpo_ustat.estimators.closed_form import Request, closed_form
from grpo_ustat.estimators.moments import centred
from grpo_ustat.measurements.rewards import SUM_NAME, measure_functions
from grpo_ustat.mse import study
from grpo_ustat.mse.pool_store import PoolStore, draws_of
from grpo_ustat.records import BaselineContext, ScorePool
from grpo_ustat.runs.folder import RunFolder

WEIGHTS = np.array([1.0, 0.5, 0.0])


def pool_of_three(rng):
    """A pool with full sketches whose functions are 0/1, a length, and one that never varies."""
    policy = prompts(6, rng)
    outcomes, rows = policy.sample(10, rng), np.arange(6)[:, None]
    scores, z = policy.scores_PYD[rows, outcomes], policy.rewards_PY[rows, outcomes]
    functions = np.stack([z, outcomes / 40, np.ones(z.shape)], axis=-1)
    sums = np.einsum("pfn,pnd->pfd", centred(functions.transpose(0, 2, 1)), scores)
    return ScorePool(
        rewards_PN=functions @ WEIGHTS,
        gram_PNN=np.einsum("pid,pjd->pij", scores, scores),
        lengths_PN=1 + outcomes,
        features_PNR=scores,
        centred_sums_PR=np.einsum("f,pfd->pd", WEIGHTS, sums),
        rewards_PNF=functions,
        centred_sums_PFR=sums,
        reward_weights_F=WEIGHTS,
    )


@pytest.mark.slow
def test_a_pool_of_other_functions_is_refused_before_a_run_is_written_down(tmp_path):
    """And it says which functions it is of."""
    pool = tmp_path / "pool"
    of = [f"pool={pool}", "debug=mse", f"hydra.run.dir={tmp_path / 'run'}"]
    two = compose("mse", *of, "reward_funcs=[task,brevity]")
    PoolStore(pool, draws_of(two)).open()
    config = compose("mse", *of, "reward_funcs=[task,format]")
    words = r"judged with reward_funcs=\[task,brevity\], but this study has \[task,format\]: use"
    with pytest.raises(ConfigError, match=words):
        study.run(config, RunFolder(tmp_path / "run", config))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["pool.json"]


def test_a_rule_of_ones_own_reads_every_function(rng, monkeypatch):
    """Leave-one-out of the weighted sum, formed from the functions, is that of the sum."""

    def of_functions(rewards_PG, context):
        total_PG = context.rewards_PGF @ context.reward_weights_F
        return advantages("leave_one_out", total_PG, BaselineContext())

    needs = frozenset({"rewards_PGF", "reward_weights_F"})
    own = Baseline("own", of_functions, unbiased=True, min_group_size=2, needs=needs)
    monkeypatch.setitem(BASELINES, "own", own)
    errors = baseline_errors(pool_of_three(rng), {"own": {}, "leave_one_out": {}}, [3], 18, 2, 0)
    one, other = (error.mse for error in errors.values())
    assert one == pytest.approx(other, rel=1e-12)


def test_a_function_alone_is_a_study_with_that_reward(rng):
    pool = pool_of_three(rng)
    request = Request([], {}, {})
    total = closed_form(pool, request)
    names = ["task", "brevity", "format"]
    study = study_of_pool(pool, population=total, request=request, reward_names=names)
    found = {row.name: row for row in measure_functions(study) or []}
    assert list(found) == [*names, SUM_NAME]
    second = dataclasses.replace(
        pool,
        rewards_PN=pool.rewards_PNF[..., 1],
        centred_sums_PR=np.einsum(
            "pn,pnd->pd", centred(pool.rewards_PNF[..., 1]), pool.features_PNR
        ),
    )
    alone = closed_form(second, request)
    assert found["brevity"].weight == 0.5
    for key in ("c1", "c2", "c3", "gstar", "grad_sq"):
        np.testing.assert_allclose(getattr(found["brevity"], key), alone[key], rtol=1e-9)
    assert found[SUM_NAME].c3 == total["c3"]
    assert not found["format"].gstar.is_known
    assert found["format"].mean.estimate == 1


SMALL = (
    "model=tiny_base", "debug=mse", "study.questions=4", "budget.pool_completions=8",
    "study.methods=[closed_form,monte_carlo]", "group_sizes=[2,4]", "study.rollouts=4",
    "budget.replicates=2", "budget.reference_completions=9", "budget.reference_blocks=3",
    "max_completion_length=60",
)  # fmt: skip


def fit(path, *overrides):
    config = compose("mse", *SMALL, *overrides)
    study.run(config, RunFolder(path, config))
    return json.loads((path / "result.json").read_text())


@pytest.mark.slow
def test_a_whole_study_of_two_functions(tmp_path):
    """The task's line is the study of the task alone, and one pool serves any weights."""
    two = ("reward_funcs=[task,brevity]", f"pool={tmp_path}/pool")
    baselines = "baselines=[leave_one_out,group_std,gdpo]"
    result = fit(tmp_path / "two", *two, "reward_weights=[1,0.5]", baselines)
    rows = {row["name"]: row for row in result["reward_functions"]}
    assert list(rows) == ["task", "brevity", SUM_NAME]
    methods = {(row["method"], row["baseline"]) for row in result["curves"]}
    assert {("new_questions", "gdpo"), ("monte_carlo", "gdpo")} <= methods
    assert result["reward_correlations"][0]["first"] == "task"

    one = fit(tmp_path / "one", "baselines=[leave_one_out,group_std]")
    assert "reward_functions" not in one
    for key in ("c1", "c2", "c3", "gstar"):
        assert rows["task"][key] == one["scaling"][key]
    assert result["policy"]["mean_reward"] == one["policy"]["mean_reward"]

    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "pool").iterdir()}
    other = fit(
        tmp_path / "other", *two, "reward_weights=[1,0]", "baselines=[leave_one_out]",
        "study.methods=[closed_form]",
    )  # fmt: skip
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "pool").iterdir()} == before
    assert other["scaling"]["c3"] == one["scaling"]["c3"]
