"""Studies that sample with vLLM; tests/gpu/test_vllm.py runs the engine itself."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import compose
from fake_vllm import FakeLLM, install
from fakes import letter_prompts

from grpo_ustat.cli import compose as composing
from grpo_ustat.config.identity import folder_name
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed import ranks
from grpo_ustat.distributed.ranks import RefusedByRank
from grpo_ustat.mse import sampler
from grpo_ustat.mse import study as study_run
from grpo_ustat.mse.pool import build_pool, read_pool
from grpo_ustat.mse.pool_parts import Part
from grpo_ustat.mse.pool_store import PoolStore, draws_of
from grpo_ustat.mse.sampler import MAX_LOGPROB_GAP, sampler_text, start_sampler
from grpo_ustat.policy.configured import configured_policy, configured_task
from grpo_ustat.runs.folder import RunFolder

SMALL = ("debug=mse", "model=tiny_base", "study.questions=3", "max_completion_length=64")
VLLM = ("rollout=vllm", "rollout.max_model_len=128")


@pytest.mark.slow(minutes=0.02)
def test_a_study_with_vllm_is_another_run_and_another_pool(tmp_path):
    local, vllm = compose("mse"), compose("mse", *VLLM)
    assert folder_name(local) != folder_name(vllm)
    assert draws_of(vllm) == draws_of(local) | {"rollout": "vllm"}
    more = compose("mse", *VLLM, "rollout.gpu_memory_utilization=0.8")
    assert draws_of(more) == draws_of(vllm)  # memory alone
    PoolStore(tmp_path / "pool", draws_of(local)).open()
    with pytest.raises(
        ConfigError, match="has completions for rollout=local, but this study has vllm: use"
    ):
        PoolStore(tmp_path / "pool", draws_of(vllm)).open()
    PoolStore(tmp_path / "other", draws_of(vllm)).open()
    PoolStore(tmp_path / "other", draws_of(vllm)).open()
    with pytest.raises(
        ConfigError, match="has completions for rollout=vllm, but this study has local: use"
    ):
        PoolStore(tmp_path / "other", draws_of(local)).open()


def test_what_vllm_cannot_do_in_a_study_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="launch.num_processes=2 with rollout=vllm: .*study.part"):
        compose("mse", *VLLM, "launch.num_processes=2")
    with pytest.raises(ConfigError, match="rollout.max_model_len .*use rollout=vllm"):
        compose("mse", "rollout.max_model_len=99")
    (tmp_path / "made.parquet").touch()
    with pytest.raises(ConfigError, match="use rollout=local"):
        compose("mse", *VLLM, f"pool={tmp_path / 'made.parquet'}")


def test_ranks_of_a_launcher_are_refused_before_anything_is_loaded(monkeypatch):
    config = compose("mse", *VLLM)
    monkeypatch.setattr(sampler, "world", lambda: 4)
    with pytest.raises(RefusedByRank, match="rollout=vllm on 4 ranks: a study samples with vLLM"):
        start_sampler(config.sampling)
    assert ranks.world() == 1


def test_one_process_samples_and_the_plan_says_so():
    local, vllm = (compose("mse", "launch.workers=3", *more) for more in ((), VLLM))
    assert (local.sampling_workers, vllm.sampling_workers) == (3, 1)
    assert vllm.plan == f"{local.plan}; one process samples with vLLM and computes gradients"


@pytest.mark.slow
def test_a_missing_vllm_is_one_line_but_a_dry_run_needs_none(monkeypatch, capsys):
    monkeypatch.setattr(composing, "is_installed", lambda _: False)
    with pytest.raises(ConfigError, match=r"rollout=vllm needs the package vllm: pip install -e "):
        composing.parse("mse", ["rollout=vllm"])
    assert (
        len(composing.parse("mse", ["-m", "rollout=local,vllm", "dry_run=true"]).planned_runs) == 2
    )


def test_the_sentence_warns_above_the_limit():
    assert "WARNING" not in sampler_text("vllm", MAX_LOGPROB_GAP)
    assert "by 0.0004 nats per token" in sampler_text("vllm", 0.0004)
    warning = sampler_text("vllm", 0.123)
    assert warning.startswith(" WARNING: the log-probabilities of the sampler vllm")
    assert "0.12 nats per token" in warning and "use rollout=local" in warning


def test_gaps_of_parts_count_by_their_tokens(tmp_path):
    """One question in two parts, one in one; files of the model's own draws have no gap."""

    def part(count, gap):
        ones = np.ones(count)
        return Part(
            rewards_N=np.arange(count) % 2.0, lengths_N=ones.astype(int), ended_N=ones > 0,
            tokens_NT=np.ones((count, 1), dtype=np.int32), gram_NN=np.eye(count),
            features_NR=np.ones((count, 2), dtype=np.float32),
            centred_sum_R=np.ones(2, dtype=np.float32), score_sum_R=np.ones(2, dtype=np.float32),
            cost=np.ones(7), sampler_gap=gap,
        )  # fmt: skip

    one, two = letter_prompts("a", "b")
    for folder, known in (("vllm", True), ("local", False)):
        store = PoolStore(tmp_path / folder, {})
        store.open()
        for prompt, first, count, gap in ((one, 0, 4, (0.1, 10)), (one, 4, 2, (0.2, 20)),
                                          (two, 0, 6, (0.4, 30))):  # fmt: skip
            store.write(prompt, first, part(count, np.array(gap) if known else None))
        pool, _ = read_pool(store, [one, two], 6)
        assert pool.sampler_gap == (pytest.approx(17 / 60) if known else None)


@pytest.fixture
def weights(monkeypatch):
    """A stand-in for vLLM that has the policy's shape; no engine is started yet."""
    config = compose("mse", *SMALL, *VLLM)
    install(monkeypatch, configured_policy(config.policy_options).model)
    monkeypatch.setattr(sampler, "_STARTED_ENGINES", {})
    return config


def prompts_of(config):
    return configured_task(config.task_options, config.model).prompts("study")[
        : config.study.questions
    ]


@pytest.mark.nightly(minutes=0.5)
def test_a_pool_extended_later_has_the_draws_of_one_made_at_once(weights, tmp_path):
    """Of one engine; the keyed requests alone decide the draws."""
    prompts = prompts_of(weights)
    build_pool(weights, prompts, tmp_path / "grown", 4)
    grown, _ = build_pool(weights, prompts, tmp_path / "grown", 8)
    assert len(FakeLLM.made) == 1 and len(sampler._STARTED_ENGINES) == 1
    assert FakeLLM.made[0].options["max_num_seqs"] == weights.rollout_batch_size
    sampler._STARTED_ENGINES.clear()
    whole, _ = build_pool(weights, prompts, tmp_path / "whole", 8)
    assert len(FakeLLM.made) == 2
    for name in ("rewards_PN", "lengths_PN"):
        np.testing.assert_array_equal(getattr(grown, name), getattr(whole, name))
    np.testing.assert_allclose(
        grown.sq_norm_PN, whole.sq_norm_PN, rtol=1e-3, atol=1e-3 * whole.sq_norm_PN.max()
    )
    assert 0 < whole.sampler_gap < 1e-5 and 0 < grown.sampler_gap < 1e-5


@pytest.mark.slow(minutes=0.8)
def test_every_completion_of_a_study_is_vllms(weights, tmp_path, monkeypatch):
    """Pool, greedy, values, reference and replicates, with one engine; scores are the model's."""
    config = compose(
        "mse", *SMALL, *VLLM, "study.methods=[closed_form,monte_carlo]", "group_sizes=[2]",
        "baselines=[leave_one_out,remax,oracle]", "launch.workers=2",
        "budget.replicates=2", "budget.reference_completions=9",
        "budget.reference_blocks=3", "budget.value_completions=2", "budget.pool_completions=6",
    )  # fmt: skip
    monkeypatch.setattr("grpo_ustat.rollout.engine.sample", None)  # of the model itself
    drawn, generate = [], FakeLLM.generate

    def counted(self, requests, options, use_tqdm):
        drawn.append((len(requests), options[0].temperature))
        return generate(self, requests, options, use_tqdm)

    monkeypatch.setattr(FakeLLM, "generate", counted)
    study_run.run(config, RunFolder(tmp_path, config))
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(FakeLLM.made) == 1
    assert {row["method"] for row in result["curves"]} == {"closed_form", "monte_carlo"}
    greedy, pool, values, reference, replicates = 3 + 3, 18, 6, 27, 3 * 2 * 2
    drawn_in_all = sum(count for count, _ in drawn[1:])  # without that of vLLM's start
    assert drawn_in_all == greedy + pool + values + reference + replicates
    assert sum(temperature == 0 for _, temperature in drawn) == 2  # greedy, of pool and replicates
    assert result["sampler"]["name"] == "vllm" and 0 < result["sampler"]["gap"] < 1e-5
    assert "The log-probabilities of the sampler vllm" in result["summary"]
    assert "WARNING: the log-probabilities" not in result["summary"]
    assert "nats per token" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_sampler_of_other_weights_is_warned_of(weights, tmp_path, monkeypatch):
    def forget(self, method, kwargs):  # weights that never arrive
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)

    monkeypatch.setattr(FakeLLM, "collective_rpc", forget)
    study_run.run(weights, RunFolder(tmp_path, weights))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["sampler"]["gap"] > MAX_LOGPROB_GAP
    gap = f"differ from the model's by {result['sampler']['gap']:.2g} nats"
    assert "WARNING: " in result["summary"] and gap in result["summary"]


@pytest.mark.slow
def test_the_next_study_of_a_sweep_keeps_the_engine_unless_the_model_changes(weights):
    _, first, _ = start_sampler(weights.sampling)
    assert start_sampler(replace(weights, seed=1, group_sizes=[2]).sampling)[1] is first
    other = replace(weights, rollout=replace(weights.rollout, max_model_len=96))
    assert start_sampler(other.sampling)[1] is not first
    assert len(sampler._STARTED_ENGINES) == 1 and len(FakeLLM.made) == 2
    longer = replace(other, max_completion_length=other.max_completion_length + 1)
    start_sampler(longer.sampling)  # vLLM's room follows the length of completions
    assert len(sampler._STARTED_ENGINES) == 1 and len(FakeLLM.made) == 3
    part = replace(longer, study=replace(longer.study, parameters="mlp"))
    start_sampler(part.sampling)  # others of its policy's parameters have a gradient
    assert len(sampler._STARTED_ENGINES) == 1 and len(FakeLLM.made) == 4
