"""The card of a finished run: what it says, that it is whole, and that no text in it does harm."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import hostile
import pytest
import yaml
from commands import compose
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from resuming import SHORT, config_of, fit, rewind
from slow_cases import slow_after

from grpo_ustat.cli.compose import parse
from grpo_ustat.pages.tables import Table, fenced, plain
from grpo_ustat.train import model_card as cards
from grpo_ustat.train.model_card import CONFIG, NAME, front_matter
from grpo_ustat.train.snapshots import MANIFEST, DamagedSnapshot, verify

HOSTILE = (
    "<script>alert(1)</script> [x](javascript:alert(1)) ![i](http://a.b/c) | `x` ``` *b* _u_\n"
    "# big\n---\nhttps://evil.example www.evil.example @me $x$ &lt; \x1b[31m <!-- "
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that was killed after its second step and went on."""
    path = fit(tmp_path_factory.mktemp("card") / "run")
    fit(rewind(path, 3, 4))
    return path


def text_of(path, step=4):
    return (path / f"checkpoint-{step}" / NAME).read_text()


def rendered(text):
    """Every token of the Markdown, those inside lines too, as a reader that allows HTML sees it."""
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    return [inner for token in tokens for inner in (token, *(token.children or ()))]


@pytest.mark.slow
def test_the_last_checkpoint_alone_has_one_and_the_manifest_covers_it(finished):
    assert not (finished / "checkpoint-3" / NAME).exists()
    files = json.loads((finished / "checkpoint-4" / MANIFEST).read_text())["files"]
    assert {NAME, CONFIG} <= files.keys()
    verify(finished / "checkpoint-4")


@pytest.mark.slow
def test_changed_card_damages_the_checkpoint(finished, tmp_path):
    copy = shutil.copytree(finished / "checkpoint-4", tmp_path / "checkpoint-4")
    (copy / NAME).write_text(text_of(finished).replace("0.", "0,", 1))
    with pytest.raises(DamagedSnapshot, match="README.md"):
        verify(copy)


@pytest.mark.slow
def test_the_hub_reads_its_front_matter(finished):
    data = ModelCard(text_of(finished)).data
    assert (data.library_name, data.license, data.base_model) == (
        "transformers",
        "apache-2.0",
        None,
    )
    assert data.tags == ["grpo", "grpo-ustat", "reinforcement-learning"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides, expected",
    [
        (("model=qwen2_5_0_5b", "dataset=gsm8k", "prompt=gsm8k"),
         {"base_model": "Qwen/Qwen2.5-0.5B", "base_model_relation": "finetune",
          "datasets": ["openai/gsm8k"], "library_name": "transformers", "license": None}),
        (("model=qwen2_5_0_5b", "dataset=math500", "prompt=qwen_math_cot", "lora=r16"),
         {"base_model_relation": "adapter", "library_name": "peft",
          "datasets": ["DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"]}),
    ],
)  # fmt: skip
def test_the_front_matter_names_what_the_hub_knows(overrides, expected, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    data = ModelCard(f"---\n{yaml.safe_dump(front_matter(compose('train', *overrides)))}---\n").data
    assert {key: getattr(data, key, None) for key in expected} == expected


def test_local_models_and_data_are_not_named():
    config = config_of()
    config.model.model_name_or_path = str(Path(__file__).parent)
    config.dataset.path = str(Path(__file__).parents[1] / "data/gsm8k")
    assert front_matter(config).keys() == {"library_name", "pipeline_tag", "tags"}


def test_a_base_model_in_a_folder_hands_on_its_license(tmp_path):
    config = compose("train", *SHORT)
    config = replace(config, model=replace(config.model, model_name_or_path=str(tmp_path)))
    assert "license" not in front_matter(config)
    for text, known in (
        ("---\nlicense: mit\n---\n# M", "mit"), ("---\nlicense: [a]\n---\n", None),
        ("---\n: {\n---", None), ("---\n- 1\n---", None), ("# license: mit", None), ("---", None),
    ):  # fmt: skip
        (tmp_path / NAME).write_text(text)
        assert front_matter(config).get("license") == known, text


@pytest.mark.slow
def test_numbers_of_the_card_are_those_of_the_run(finished):
    text, result = text_of(finished), json.loads((finished / "result.json").read_text())
    first, last = result["evals"][0], result["evals"][-1]
    for row in (first, last):
        assert f"| {row['step']} | sampled | {row['mean_reward']:.3f} | {row['low']:.3f} to" in text
    gain = [f"{result[f'gain{end}']:+.3f}" for end in ("", "_low", "_high")]
    assert "{}, 95 % interval {} to {}".format(*gain) in text
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").open()]
    assert all(f"| {row['step']} | {row['reward']:.4g} |" in text for row in rows)
    assert result["config_hash"] in text and "n = 16 = 4 " in text
    assert "| train questions | 8 |" in text and "| test questions | 10 |" in text
    assert "2 launches" in text
    assert "| resumed | from checkpoint-2 |" in text and "| end | done |" in text


@pytest.mark.slow
def test_the_stored_configuration_is_the_same_run(finished):
    arguments = [f"--config-dir={finished / 'checkpoint-4'}", f"--config-name={CONFIG[:-5]}"]
    assert arguments[1] in text_of(finished)
    asked = parse("train", arguments)
    assert asked.planned_runs[0].config == config_of()
    other = parse("train", [*arguments, "seed=5"]).planned_runs[0]
    assert other.config.seed == 5 and other.folder.path.name == "seed-5"


def test_a_thousand_steps_stay_a_small_table():
    rows = [{"step": n} for n in range(1, 1001)]
    assert [row["step"] for row in cards.thinned(rows)] == [
        1, 112, 223, 334, 445, 556, 667, 778, 889, 1000,
    ]  # fmt: skip


def pretended(folder, lora=False):
    """A run whose every text is hostile, and its progress."""
    config = config_of()
    config.lora.r = 16 * lora
    config.model.name = config.dataset.name = config.prompt.name = HOSTILE
    config.model.revision = config.prompt.system = HOSTILE + "````\n</details>"
    told = {
        "event": "end",
        "outcome": "failed",
        "error": HOSTILE,
        "time": "2026-11-23T00:00:00+00:00",
    }
    (folder / "launches.jsonl").write_text(json.dumps(told) + "\n")
    code = {"commit": HOSTILE, "diff": None, "versions": {HOSTILE: HOSTILE}}
    (folder / "code.json").write_text(json.dumps(code))
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    run = SimpleNamespace(
        config=config, folder=SimpleNamespace(path=folder, config_hash="abc"),
        task=SimpleNamespace(dropped={HOSTILE: 2}), train_prompts=[], test_prompts=[],
    )  # fmt: skip
    row = {"step": 0, "decoding": "sampled", "quantity": "accuracy", "mean_reward": 0.5}
    row |= {"low": 0.1, "high": 0.9, "n": 4}
    return run, SimpleNamespace(
        step=4, evals=[row | {"clipped_ratio": 0.0}], rewards_first=[0, 1.0], rewards_last=[1, 1.0],
        rollouts=1, value_rollouts=0, tokens=1, seconds=1.0, clipped_ratio=0.5, failed_saves=1,
        alarms={HOSTILE: 3},
    )  # fmt: skip


def test_hostile_names_and_reasons_stay_text(tmp_path):
    """In names, places, counts and the history: nothing but what the card itself is made of."""
    run, progress = pretended(tmp_path)
    text = cards.card(run, progress, [{"step": 1, "reward": 0.5}])
    body = text.split("---\n", 2)[2]
    tokens = rendered(body)
    html = [t.content for t in tokens if t.type in ("html_block", "html_inline")]
    assert [re.sub(r"\s", "", one) for one in html] == [
        "<details><summary>Fullconfiguration</summary>", "</details>",
    ]  # fmt: skip
    assert not [t for t in tokens if t.type == "image"]
    assert not [t for t in tokens if t.type in ("link_open", "em_open", "strong_open", "hr")]
    assert not [t for t in tokens if t.type == "code_inline"]
    shown = "".join(t.content for t in tokens if t.type == "text")
    assert shown.count("<script>alert(1)</script> [x](javascript:alert(1))") == 15  # all of them
    assert len([t for t in tokens if t.type == "fence"]) == 2
    assert "\x1b" not in body.replace("\\e", "") and "https://evil" not in _outside_code(body)


def _outside_code(text):
    return re.sub(r"(?s)(`{3,}).*?\n\1\n", "", text)


def test_a_card_of_adapters_names_them(tmp_path):
    run, progress = pretended(tmp_path, lora=True)
    text = cards.card_files(run, progress)[NAME]
    data = ModelCard(text).data
    assert data.library_name == "peft" and "lora" in data.tags
    assert "rank 16" in text


def test_error_in_the_card_is_a_warning(tmp_path, monkeypatch, capsys):
    run, progress = pretended(tmp_path)
    monkeypatch.setattr(cards, "card", lambda *_: 1 / 0)
    assert cards.card_files(run, progress) == {}
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_plain_text_is_read_back_as_it_was():
    """By an independent reader of Markdown, white space apart."""
    text = MarkdownIt("commonmark").render("x " + plain(HOSTILE.replace("\x1b", " ")))
    shown = ElementTree.fromstring(text).text
    assert shown.split() == ["x", *HOSTILE.replace("\x1b", " ").split()]
    cells = Table("", ["a|b"], [[HOSTILE], [None]]).markdown().splitlines()
    assert len(cells) == 4 and cells[0] == "| a\\|b |" and cells[3] == "|  |"
    assert fenced("````").startswith("`````\n````\n")


@pytest.mark.parametrize("key", slow_after(6, hostile.NAMES))
def test_no_name_is_more_than_a_text_of_a_card(key, tmp_path):
    name = hostile.NAMES[key]
    run, progress = pretended(tmp_path)
    run.config.model.name = run.config.dataset.name = run.config.prompt.name = name
    run.config.baseline.name = run.config.model.revision = name
    run.task.dropped = progress.alarms = {name: 1}
    text = cards.card(run, progress, [{"step": 1, "reward": None, "grad_norm": 0.5}])
    head, body = text.split("---\n", 2)[1:]
    assert yaml.safe_load(head)["pipeline_tag"] == "text-generation"
    tokens = rendered(body)
    assert len([t for t in tokens if t.type.startswith("html_")]) == 2
    assert not [t for t in tokens if t.type == "image"]
    assert not [t for t in tokens if t.type in ("link_open", "em_open", "strong_open", "hr")]
    assert not set(body) & set(hostile.TERMINAL_ACTS) and body.encode()
