"""The card of a finished run: what the Hub reads, and that no name in it does harm."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from commands import compose
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from resuming import config_of

from grpo_ustat.train import model_card as cards
from grpo_ustat.train.context import TrainProgress
from grpo_ustat.train.model_card import CONFIG, NAME, metadata

HOSTILE = (
    "<script>alert(1)</script> [x](javascript:alert(1)) ![i](http://a.b/c) | `x` ``` *b* _u_\n"
    "# big\n---\nhttps://evil.example www.evil.example @me $x$ &lt; \x1b[31m <!-- {{ name }}"
)


@pytest.mark.slow
def test_the_last_checkpoint_alone_has_a_card_with_the_result(through):
    assert not (through / "checkpoint-3" / NAME).exists()
    card = ModelCard((through / "checkpoint-4" / NAME).read_text())
    result = json.loads((through / "result.json").read_text())
    assert (card.data.library_name, card.data.base_model) == ("transformers", None)
    for key in ("final_mean_reward", "mean_reward_low", "mean_reward_high", "gain"):
        assert f"{result[key]:.3f}" in card.text
    assert f"torch {result['versions']['torch']}" in card.text


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (("model=qwen2_5_0_5b", "dataset=gsm8k", "prompt=gsm8k"),
         {"base_model": "Qwen/Qwen2.5-0.5B", "datasets": ["openai/gsm8k"],
          "library_name": "transformers"}),
        (("model=qwen2_5_0_5b", "dataset=math500", "prompt=qwen_math_cot", "lora=r16"),
         {"library_name": "peft",
          "datasets": ["DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"]}),
    ],
)  # fmt: skip
def test_the_metadata_name_what_the_hub_knows(overrides, expected, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert metadata(compose("train", *overrides)).to_dict().items() >= expected.items()


def test_local_models_and_data_are_not_named():
    config = config_of()
    config.model.model_name_or_path = str(Path(__file__).parent)
    config.dataset.path = str(Path(__file__).parents[1] / "data/gsm8k")
    assert metadata(config).to_dict().keys() == {"library_name", "pipeline_tag", "tags"}


@pytest.mark.slow
def test_the_configuration_beside_the_card_is_that_of_the_run(through):
    stored = yaml.safe_load((through / "checkpoint-4" / CONFIG).read_text())
    assert stored == asdict(config_of()) | {"output_root": "outputs"}


def test_names_are_texts(monkeypatch):
    config = config_of()
    config.model.model_name_or_path = config.dataset.name = HOSTILE
    row = {"decoding": config.eval.decoding[0], "quantity": "accuracy", "n": 3}
    row |= {"mean_reward": 0.5, "low": 0.25, "high": 0.75}
    progress = TrainProgress(step=4, evals=[row], rewards_first=[0, 1, 0], rewards_last=[0, 1, 1])
    text = cards.card(type("Run", (), {"config": config})(), progress)
    body = re.split(r"^---$", text, flags=re.MULTILINE)[2]
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(body)
    kinds = {inner.type for token in tokens for inner in (token, *(token.children or ()))}
    assert not kinds & {"html_inline", "html_block", "link_open", "image", "em_open", "hr"}
    assert body.count("\n# ") == 1 and "\x1b" not in text
