"""A pool in the metric of AdamW's step against autograd, completion by completion."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from commands import compose
from reference import one_flat_score
from safetensors.torch import load_file

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.mse import adam_pool as module
from grpo_ustat.mse import study as study_run
from grpo_ustat.mse.adam_pool import SECOND_MOMENTS, _stored_rollouts, adam_pool
from grpo_ustat.mse.pool import build_pool
from grpo_ustat.mse.pool_store import PoolStore, draws_of
from grpo_ustat.policy.loading import configured_policy, configured_task
from grpo_ustat.policy.scores.backward import trainable
from grpo_ustat.runs.folder import RunFolder

SMALL = (
    "debug=mse", "model=tiny_base", "model.dtype=float64", "study.questions=4", "launch.workers=1",
    "budget.pool_completions=6", "budget.gradient_sketch=300000", "budget.feature_sketch=300000",
    "study.metric=adam",
)  # fmt: skip


def build(tmp_path, *words):
    config = compose("mse", *SMALL, *words)
    prompts = configured_task(config).prompts("study")[: config.study.questions]
    plain, _ = build_pool(config, prompts, tmp_path / "pool")
    pool, _ = adam_pool(config, prompts, plain, tmp_path / "pool", tmp_path / "pool_adam")
    return config, prompts, plain, pool


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [None, "self_attn"])
def test_scores_are_those_of_autograd_over_the_root_mean_square(tmp_path, pattern):
    """v by hand: mean over prompts of the shrunken variance times the mean of s_ij^2."""
    words = [] if pattern is None else [f"study.parameters={pattern}"]
    config, prompts, plain, pool = build(tmp_path, *words)
    policy, source = configured_policy(config), PoolStore(tmp_path / "pool", draws_of(config))
    names = sorted(name for name, _ in trainable(policy.model))
    variances = [np.var(z_N, ddof=1) for z_N in plain.rewards_PN]
    scores_PND, v_D = [], 0
    for prompt, variance in zip(prompts, variances, strict=True):
        rollouts, _ = _stored_rollouts(policy, prompt, source, 6)
        tokens, masks = rollouts.tokens_PGT[0], rollouts.mask_PGT[0]
        ids = rollouts.prompt_tokens[0]
        s_ND = torch.stack(
            [
                one_flat_score(policy.model, ids, row[mask], config.temperature)
                for row, mask in zip(tokens, masks, strict=True)
            ]
        )
        shrunken = (6 * variance + np.mean(variances)) / 7
        v_D = v_D + shrunken * s_ND.square().mean(dim=0) / len(prompts)
        scores_PND.append(s_ND)
    assert (v_D > 0).any()
    weight_D = torch.where(v_D > 0, 1 / (v_D.sqrt() + 1e-8), 0)
    sizes = {name: p.numel() for name, p in trainable(policy.model)}
    counts = torch.cat(
        [torch.full((sizes[n],), float(pattern is None or pattern in n)) for n in names]
    )
    weighed = torch.stack(scores_PND) * weight_D * counts
    slow = (weighed @ weighed.mT).numpy()
    np.testing.assert_allclose(pool.gram_PNN, slow, rtol=1e-8, atol=1e-8 * slow.max())
    sums_PD = torch.einsum("pn,pnd->pd", torch.from_numpy(plain.rewards_PN), weighed).numpy()
    cross = pool.reward_sums_PR @ pool.reward_sums_PR.T
    np.testing.assert_allclose(cross, sums_PD @ sums_PD.T, rtol=1e-4, atol=1e-5 * cross.max())
    np.testing.assert_array_equal(pool.rewards_PN, plain.rewards_PN)


@pytest.mark.slow
def test_the_mean_weighed_norm_counts_the_entries_that_scores_move(tmp_path):
    """mean_x sigma_x^2 E ||D s||^2 is their number, but for eps: none adds more than 1."""
    _, _, _, pool = build(tmp_path)
    variance_P = pool.rewards_PN.var(axis=1, ddof=1)
    shrunken_P = (6 * variance_P + variance_P.mean()) / 7
    total = (shrunken_P * pool.sq_norm_PN.mean(axis=1)).mean()
    v = load_file(tmp_path / "pool_adam" / SECOND_MOMENTS)
    most = sum(int((second > 0).sum()) for second in v.values())
    sure = sum(int((second > 1e-10).sum()) for second in v.values())
    assert 0.99 * sure < total < most * (1 + 1e-9)


@pytest.mark.slow
def test_a_study_in_the_metric_goes_on_where_it_was_cut(tmp_path, monkeypatch):
    """The words say which metric; rewards and tokens are those of the Euclidean study."""
    config = compose("mse", *SMALL)
    study_run.run(config, RunFolder(tmp_path / "whole", config))
    whole = json.loads((tmp_path / "whole" / "result.json").read_text())
    assert "Errors are those of AdamW's step" in whole["summary"]
    assert whole["metric"]["norm"].startswith("of AdamW's step")
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
    study_run.run(config, RunFolder(tmp_path / "cut", config))
    again = json.loads((tmp_path / "cut" / "result.json").read_text())
    left = set((tmp_path / "whole").iterdir())
    assert left <= {*RunFolder(tmp_path / "whole", config)._artefacts()}  # what overwriting removes
    assert again["curves"] == whole["curves"] and again["noise"] == whole["noise"]
    (tmp_path / "cut" / "result.json").unlink()
    for part in (tmp_path / "cut" / "pool_adam").glob("*-0-6.safetensors"):
        part.unlink()
    (tmp_path / "cut" / "pool_adam" / SECOND_MOMENTS).write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="second_moments.safetensors is damaged: delete it"):
        study_run.run(config, RunFolder(tmp_path / "cut", config))


def test_an_imported_pool_is_refused(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match="study.metric=adam with pool=.*rows.parquet"):
        compose("mse", "study.metric=adam", f"pool={tmp_path / 'rows.parquet'}")
