"""A pool in the metric of AdamW's step against autograd, completion by completion."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from commands import compose
from reference import one_flat_score

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.moments import centred
from grpo_ustat.mse import adam_pool as module
from grpo_ustat.mse import study as study_run
from grpo_ustat.mse.adam_pool import adam_pool
from grpo_ustat.mse.pool import build_pool
from grpo_ustat.mse.pool_store import PoolStore, draws_of
from grpo_ustat.mse.scoring import stored_rollouts
from grpo_ustat.policy.configured import configured_policy, configured_task
from grpo_ustat.policy.scores.backward import trainable
from grpo_ustat.runs.folder import RunFolder

SMALL = (
    "debug=mse", "model=tiny_base", "model.dtype=float64", "launch.workers=1",
    "budget.pool_completions=6", "budget.gradient_sketch=300000", "budget.feature_sketch=300000",
    "study.metric=adam", "study.adam_rollouts=8",
    "study.adam_group_size=2",
)  # fmt: skip


def build(tmp_path, *words):
    """Of nine questions, the last of which has no half."""
    config = compose("mse", *SMALL, "study.questions=9", *words)
    prompts = configured_task(config.task_options, config.model).prompts("study")[:9]
    plain, _ = build_pool(config, prompts, tmp_path / "pool")
    plain = replace(plain, greedy_P=np.arange(9.0))
    pool, *_ = adam_pool(config, prompts, plain, tmp_path / "pool", tmp_path / "pool_adam")
    return config, prompts, plain, pool


def slow_scores(config, prompts, source):
    """Every completion's score by autograd, [P, N, D]."""
    policy = configured_policy(config.policy_options)
    scores_PND = []
    for prompt in prompts:
        rollouts, _ = stored_rollouts(policy, prompt, next(source.completions([prompt], 6)))
        tokens, masks = rollouts.tokens_PGT[0], rollouts.mask_PGT[0]
        ids = rollouts.prompt_tokens[0]
        scores_PND.append([
            one_flat_score(policy.model, ids, row[mask], config.temperature).numpy()
            for row, mask in zip(tokens, masks, strict=True)
        ])  # fmt: skip
    return np.array(scores_PND)


def slow_second_moments(rewards_PN, scores_PND):
    """v of steps of 8 rollouts in groups of 2 from three groups of each question, pair by pair."""
    pairs = [[z[k] - z[k + 1] for k in (0, 2, 4)] for z in rewards_PN]
    u_PKD = np.array([
        [pair[k] / 2 * (s[2 * k] - s[2 * k + 1]) for k in range(3)]
        for pair, s in zip(pairs, scores_PND, strict=True)
    ])  # fmt: skip
    mean_PD, count = u_PKD.mean(axis=1), len(u_PKD)
    different = [mean_PD[x] * mean_PD[y] for x in range(count) for y in range(count) if x != y]
    grad_sq = np.maximum(np.mean(different, axis=0), 0)
    return np.square(u_PKD).mean(axis=(0, 1)) / 4 + 3 / 4 * grad_sq


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [None, "self_attn"])
def test_each_half_has_scores_of_autograd_over_the_root_mean_square_of_the_other(tmp_path, pattern):
    words = [] if pattern is None else [f"study.parameters={pattern}"]
    config, prompts, plain, pool = build(tmp_path, *words)
    source = PoolStore(tmp_path / "pool", draws_of(config))
    scores_PND, rewards_PN = slow_scores(config, prompts[:8], source), plain.rewards_PN[:8]
    sizes = {
        name: p.numel() for name, p in trainable(configured_policy(config.policy_options).model)
    }
    names = sorted(sizes)
    ends = np.cumsum([sizes[name] for name in names])
    v_2D = [slow_second_moments(rewards_PN[k::2], scores_PND[k::2]) for k in (1, 0)]
    for half in range(2):
        for name, end in zip(names, ends, strict=True):
            entries = slice(end - sizes[name], end)
            v = v_2D[half][entries]
            root = np.sqrt((4 * v + v.mean()) / 5) + 1e-8
            scores_PND[half::2, :, entries] *= (pattern is None or pattern in name) / root
    slow = scores_PND @ scores_PND.transpose(0, 2, 1)
    np.testing.assert_allclose(pool.gram_PNN, slow, rtol=1e-7, atol=1e-8 * slow.max())
    sums_PD = np.einsum("pn,pnd->pd", centred(rewards_PN), scores_PND)
    cross = pool.centred_sums_PR @ pool.centred_sums_PR.T
    np.testing.assert_allclose(cross, sums_PD @ sums_PD.T, rtol=1e-4, atol=1e-5 * cross.max())
    np.testing.assert_array_equal(pool.rewards_PN, rewards_PN)
    np.testing.assert_array_equal(pool.greedy_P, np.arange(8))
    assert pool.metrics == 2


@pytest.mark.slow
def test_questions_whose_groups_are_all_alike_have_no_second_moments(tmp_path):
    config = compose("mse", *SMALL)
    prompts = configured_task(config.task_options, config.model).prompts("study")[:8]
    plain, _ = build_pool(config, prompts, tmp_path / "pool")
    plain = replace(plain, rewards_PN=np.ones_like(plain.rewards_PN))
    with pytest.raises(ConfigError, match="in 4 questions no group of study.adam_group_size=2 has"):
        adam_pool(config, prompts, plain, tmp_path / "pool", tmp_path / "pool_adam")


@pytest.mark.nightly(minutes=0.7)
def test_a_study_in_the_metric_goes_on_where_it_was_cut(tmp_path, monkeypatch):
    """The words say which metric; rewards and tokens are those of the Euclidean study."""
    config = compose("mse", *SMALL)
    study_run.run(config, RunFolder(tmp_path / "whole", config))
    whole = json.loads((tmp_path / "whole" / "result.json").read_text())
    assert "Errors are for AdamW's step" in whole["summary"]
    assert whole["metric"]["norm"].startswith(
        "AdamW's step (second moments for steps of 8 rollouts in groups of 2) over all"
    )
    assert whole["metric"]["uncertain"] == ("arbitrary choice" in whole["summary"])
    original, scored = module.score_part, []

    def cut(*arguments):
        if len(scored) == 2:
            raise KeyboardInterrupt
        scored.append(1)
        return original(*arguments)

    monkeypatch.setattr(module, "score_part", cut)
    with pytest.raises(KeyboardInterrupt):
        study_run.run(config, RunFolder(tmp_path / "cut", config))
    monkeypatch.setattr(module, "score_part", original)
    monkeypatch.setattr(module, "shift", lambda *_: math.nan)
    study_run.run(config, RunFolder(tmp_path / "cut", config))
    again = json.loads((tmp_path / "cut" / "result.json").read_text())
    left = set((tmp_path / "whole").iterdir())
    assert left <= {*RunFolder(tmp_path / "whole", config)._artefacts()}  # what overwriting removes
    assert again["curves"] == whole["curves"] and again["noise"] == whole["noise"]
    assert again["metric"]["shift"] is None
    (tmp_path / "cut" / "result.json").unlink()
    for part in (tmp_path / "cut" / "pool_adam").glob("*-0-6.safetensors"):
        part.unlink()
    (tmp_path / "cut" / "pool_adam" / "group_gradients-1.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="group_gradients-1.safetensors is damaged: delete it"):
        study_run.run(config, RunFolder(tmp_path / "cut", config))


def test_an_imported_pool_is_refused(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match="study.metric=adam with pool=.*rows.parquet"):
        compose("mse", "study.metric=adam", f"pool={tmp_path / 'rows.parquet'}")
