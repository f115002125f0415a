"""`prompt.max_length`: longer prompts are left out and counted; what cannot fit is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toys
from commands import compose
from golden import naming
from slow_cases import slow_after
from transformers import Phi3Config, Phi3ForCausalLM

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.mse import study as study_run
from grpo_ustat.mse.sampler import sampler_gap
from grpo_ustat.policy.configured import configured_task
from grpo_ustat.policy.loading import load_policy
from grpo_ustat.policy.source import crossed_switch, rope_switch
from grpo_ustat.policy.tokenizer import configured_tokenizer, encode
from grpo_ustat.records import Prompt
from grpo_ustat.rollout.local import sample
from grpo_ustat.rollout.sampling import Sampling
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.train import setup

LONG = "x" * 40


def data(folder):
    """30 train rows of which every third is long, 9 test rows of which three are."""
    folder.mkdir()
    for name, count in (("train", 30), ("test", 9)):
        rows = [
            {"question": f"{name} {n:02} {LONG * (n % 3 == 0)}?", "answer": f"#### {n}"}
            for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def configured(entry, tmp_path, *overrides, positions=128, chat_template=None):
    model = toys.folder(tmp_path / "m", chat_template, positions)
    return compose(
        entry, "dataset=gsm8k", f"dataset.path={data(tmp_path / 'data')}", "dataset.study_size=10",
        "model=hub", f"model.model_name_or_path={model}", "prompt=gsm8k",
        "prompt.template='{question}'", "max_completion_length=8", *overrides,
    )  # fmt: skip


def longer(split, count, most):
    return {f"{split} questions whose prompts exceed prompt.max_length={most} tokens": count}


@pytest.mark.slow
@pytest.mark.parametrize("most", [15, 45])
def test_only_longer_prompts_are_left_out_and_counted_by_split(tmp_path, most):
    """A token is a byte: "train 01 ?" has 10, and <s>; long ones have 40 more."""
    config = configured("train", tmp_path, f"prompt.max_length={most}")
    without = compose_without(config)
    whole = configured_task(without.task_options, without.model)
    task = configured_task(config.task_options, config.model)
    left_out = {}
    for split in ("train", "test", "study"):
        every, kept = whole.prompts(split), task.prompts(split)
        assert kept == [p for p in every if len(p.text.encode()) + 1 <= most]
        assert [q.id for q in task.questions(split)] == [p.id for p in kept]
        assert 0 < len(kept) < len(every)
        left_out |= longer(split, len(every) - len(kept), most)
        assert task.dropped == left_out  # of the splits asked for
    assert sum(left_out.values()) == 10 + 3
    assert whole.dropped == {}


def compose_without(config):
    """The same configuration without a limit."""
    return replace(config, prompt=replace(config.prompt, max_length=None))


@pytest.mark.slow(minutes=0.02)
def test_the_turns_of_a_chat_count(tmp_path):
    """Its own special tokens once, none added: what the policy reads."""
    config = configured(
        "train", tmp_path, "prompt.chat=true", "prompt.max_length=80", chat_template=toys.CHATML
    )
    task = configured_task(config.task_options, config.model)
    whole = configured_task(compose_without(config).task_options, config.model)
    texts = [prompt.text for prompt in whole.prompts("test")]
    lengths = [
        len(x) for x in encode(configured_tokenizer(config.model), texts, special_tokens=False)
    ]
    assert len(task.prompts("test")) == sum(x <= 80 for x in lengths) == 6


@pytest.mark.slow
def test_nothing_left_is_refused_with_the_lengths(tmp_path):
    config = configured("mse", tmp_path, "prompt.max_length=5")
    with pytest.raises(ConfigError, match="10 study questions, .* 11 to 51 tokens"):
        configured_task(config.task_options, config.model).prompts("study")


SMALL = ("budget.rollouts=8", "group_size=4")


def start(entry, config, tmp_path):
    """Both entries up to where weights are needed."""
    if entry == "train":
        return setup.set_up(config, RunFolder(tmp_path / "run", config))
    return study_run.study(config, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["train", "mse"])
def test_what_cannot_fit_is_refused_before_weights_are_loaded(entry, tmp_path, monkeypatch):
    """51 + 8 tokens of 58; each of the two fixes that are named lets the run reach its weights."""

    def refused(*_, **__):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refused)
    of_train = SMALL if entry == "train" else ()
    config = configured(entry, tmp_path, *of_train, positions=58)
    fixes = naming(58, "max_completion_length=7", "prompt.max_length=50")
    with pytest.raises(ConfigError, match=fixes):
        start(entry, config, tmp_path)
    config.max_completion_length = 7
    with pytest.raises(ConfigError, match="AssertionError: weights were loaded"):
        start(entry, config, tmp_path)
    config.max_completion_length, config.prompt.max_length = 8, 50
    with pytest.raises(ConfigError, match="AssertionError: weights were loaded"):
        start(entry, config, tmp_path)


def test_vllm_s_own_limit_counts_too(tmp_path):
    config = configured("train", tmp_path, *SMALL)
    config.rollout.max_model_len = 55
    with pytest.raises(ConfigError, match=naming("rollout.max_model_len", 55)):
        start("train", config, tmp_path)


@pytest.mark.slow
def test_a_study_counts_what_is_left(tmp_path, capsys):
    config = configured("mse", tmp_path, "prompt.max_length=20")
    prompts, left_out = study_run._prompts(config)
    assert left_out == longer("study", 10 - len(prompts), 20) and len(prompts) < 10
    assert capsys.readouterr().err.startswith("note: ")
    config.baselines, config.group_sizes, config.study.rollouts = ["batch_std"], [4], 16
    with pytest.raises(ConfigError, match=naming(12, len(prompts))):
        study_run._prompts(config)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.0],
    "long_factor": [3.0, 4.0],
}


def with_rope(config, tmp_path, **rope):
    """The configuration's model as a Phi-3 with these parameters of its positions."""
    folder = tmp_path / "m"
    stored = json.loads((folder / "config.json").read_text())
    original = rope.get("original_max_position_embeddings", 4096)
    phi = Phi3Config(
        vocab_size=stored["vocab_size"], hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=2, pad_token_id=0,
        max_position_embeddings=stored["max_position_embeddings"], rope_parameters=rope,
        original_max_position_embeddings=original,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Phi3ForCausalLM(phi)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return config


@pytest.mark.parametrize("entry", slow_after(1, ["train", "mse"]))
@pytest.mark.parametrize("switch, fixes", [
    (58, r"max_completion_length=7 or less, or prompt\.max_length=50 "),
    (40, r"prompt\.max_length=32 "),
    (20, r"prompt\.max_length=12 "),
])  # fmt: skip
def test_rows_on_either_side_of_longropes_switch_are_refused(
    entry, switch, fixes, tmp_path, monkeypatch
):
    """Prompts have 11 or 51 tokens, completions 8: the keys of short rows in the cache, and short
    rows beside long ones, would be of other positions. Either fix lets the run begin."""

    def refused(*_, **__):
        raise AssertionError("weights were loaded")

    of_train = SMALL if entry == "train" else ()
    config = with_rope(
        configured(entry, tmp_path, *of_train), tmp_path,
        original_max_position_embeddings=switch, **LONGROPE,
    )  # fmt: skip
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refused)
    with pytest.raises(ConfigError, match=f"LongRoPE .* {switch} tokens: use {fixes}"):
        start(entry, config, tmp_path)
    most = switch - config.max_completion_length
    config.prompt.max_length = most
    with pytest.raises(ConfigError, match="AssertionError: weights were loaded"):
        start(entry, config, tmp_path)


@pytest.mark.parametrize("shortest, longest, crosses", [
    (3, 16, False), (3, 17, True), (16, 17, True), (17, 40, True), (18, 40, False),
])  # fmt: skip
def test_rows_wholly_on_one_side_of_the_switch_are_read_alike(shortest, longest, crosses, tmp_path):
    """The sampler may read all but the last token of a prompt, so 17 are not beyond 16."""
    config = with_rope(
        configured("mse", tmp_path), tmp_path, original_max_position_embeddings=16, **LONGROPE
    )
    assert bool(crossed_switch(config.model, shortest, longest)) == crosses
    policy = load_policy(config.model.model_name_or_path)
    sampling = Sampling(seed=0, stream="x", max_completion_length=longest - shortest)
    lengths = sorted({shortest, min(longest - 1, shortest + 5)})
    prompts = [Prompt(str(n), "y" * (n - 1), "", "", "") for n in lengths]
    sampling = replace(sampling, max_completion_length=longest - lengths[-1])
    if shortest == 3 and crosses:  # one long row moves the short one beside it
        sampling = replace(sampling, max_completion_length=14)
    rollouts = sample(policy, prompts, 4, sampling)
    gap = sampler_gap(policy, rollouts, np.arange(rollouts.ended_PG.size), 1.0)
    assert crosses or gap < 1e-5


@pytest.mark.parametrize("rope, switch", [
    ({"rope_type": "default"}, None),
    ({"rope_type": "dynamic", "factor": 2.0}, None),
    ({"rope_type": "yarn", "original_max_position_embeddings": 16}, None),
    (LONGROPE | {"original_max_position_embeddings": 16}, 16),
    ({"type": "longrope", "original_max_position_embeddings": 16}, 16),
    ({"a": LONGROPE | {"original_max_position_embeddings": 9}, "b": {"rope_type": "x"}}, 9),
    (None, None),
])  # fmt: skip
def test_the_switch_is_longropes_alone(rope, switch):
    """Dynamic positions change beyond max_position_embeddings, which no row may exceed."""
    config = SimpleNamespace(rope_parameters=rope)
    assert rope_switch(config) == switch


def test_dynamic_positions_are_refused_beyond_the_models_length(tmp_path):
    config = configured("mse", tmp_path, positions=58)
    stored = json.loads((tmp_path / "m" / "config.json").read_text())
    stored["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    (tmp_path / "m" / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match="exceed the model's .*58 tokens"):
        start("mse", config, tmp_path)
