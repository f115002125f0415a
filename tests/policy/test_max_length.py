"""`prompt.max_length`: longer prompts are left out and counted; what cannot fit is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import toys
from commands import compose

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.mse import study as study_run
from grpo_ustat.policy import loading
from grpo_ustat.policy.loading import configured_task, configured_tokenizer, encode
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


@pytest.mark.slow
def test_a_prompt_of_just_the_limit_stays(tmp_path):
    config = configured("train", tmp_path, "prompt.max_length=51")
    assert configured_task(config.task_options, config.model).dropped == {}
    task = configured_task(config.task_options, config.model)
    task.prompts("train")
    assert task.dropped == {}


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
    with pytest.raises(ConfigError, match="all 10 study questions, .* have 11 to 51 tokens"):
        configured_task(config.task_options, config.model).prompts("study")


@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_is_a_positive_number(value):
    with pytest.raises(ConfigError, match=f"prompt.max_length={value}"):
        compose("train", f"prompt.max_length={value}")


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
    fixes = r"max_completion_length=7 or less, or prompt\.max_length=50 "
    with pytest.raises(ConfigError, match=f"exceed the model's 58 tokens: use {fixes}"):
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
    with pytest.raises(ConfigError, match="exceed rollout.max_model_len, vLLM's 55 tokens: use"):
        start("train", config, tmp_path)


@pytest.mark.slow
def test_a_study_counts_what_is_left(tmp_path, capsys):
    config = configured("mse", tmp_path, "prompt.max_length=20")
    prompts, left_out = study_run._prompts(config)
    assert left_out == longer("study", 10 - len(prompts), 20) and len(prompts) < 10
    assert "note: questions left out: " in capsys.readouterr().err
    config.study.settings, config.study.num_prompts = ["without_replacement"], [10]
    with pytest.raises(ConfigError, match=f"num_prompts=10 of {len(prompts)} questions without"):
        study_run._prompts(config)


@pytest.mark.slow
def test_a_run_s_tokenizer_is_loaded_once(tmp_path, monkeypatch):
    loaded, original = [], loading.load_tokenizer

    def counting(*arguments, **options):
        loaded.append(arguments)
        return original(*arguments, **options)

    monkeypatch.setattr(loading, "load_tokenizer", counting)
    chat = (
        "prompt.chat=true",
        "prompt.max_length=120",
        "objective=grpo_original",
    )  # with a reference
    config = configured("train", tmp_path, *SMALL, *chat, chat_template=toys.CHATML, positions=256)
    run = start("train", config, tmp_path)
    assert len(loaded) == 1 and run.reference is not None
    assert run.task.dropped == {}
