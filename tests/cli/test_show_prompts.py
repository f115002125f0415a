"""`debug=prompts`: rendered prompts, and how their answers are read."""

from __future__ import annotations

import pytest
import toys
from commands import CONF, compose, run

from grpo_ustat.cli import show_prompts as shown
from grpo_ustat.config.load import values_of
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.records import Question
from grpo_ustat.tasks.base import NumberJudge, Task
from grpo_ustat.tasks.prompts import Prompting

MESSAGES = "Please reason step by step, and put your final answer within \\boxed{}."


class Listed:
    """The same questions in every split."""

    def __init__(self, questions):
        self._questions = questions

    def questions(self, split):
        return self._questions


def preview(monkeypatch, capsys, questions, overrides=(), entry="train", split="train"):
    """What is printed for these questions, and the warnings."""
    config = compose(entry, "debug=prompts", *overrides)
    prompt = config.prompt
    task = Task(Listed(questions), Prompting(prompt.template, prompt.reply), NumberJudge())
    monkeypatch.setattr(shown, "configured_task", lambda *_: task)
    shown.show_prompts(config, split)
    return capsys.readouterr()


def test_texts_are_shown_as_they_are(monkeypatch, capsys, tmp_path):
    """No markup is interpreted, no control character reaches the terminal, the end is marked."""
    path = toys.folder(tmp_path / "m")
    model = ("model=hub", f"model.model_name_or_path={path}", "prompt.template='{question} ='")
    odd = Question("odd", "[bold]a\x1b[31m", "7", "sum", "seven")
    out, err = preview(monkeypatch, capsys, [*toys.QUESTIONS[:2], odd], model)
    first, second, third, _ = out.split("---")[1:] + [""]
    assert "[red]0+1[/red] =\N{LEFTWARDS ARROW TO BAR}\nexpected answer: 1\n" in first
    assert "read from the reference: 1, reward 1" in first
    assert "17 tokens, '<s>' '[' ... ' ' '='" in first  # 16 bytes and <s>
    assert "[bold]a\\x1b[31m =" in third and "\x1b" not in out
    assert "read from the reference: nothing, reward 0" in third
    total = 17 + 96
    assert (
        f"longest of 3 train prompts: 17 tokens (q0); with max_completion_length=96: {total}" in out
    )
    assert f"can reach {total} tokens, but the model has 64 positions" in err.replace("\n", " ")


@pytest.mark.slow
def test_what_ends_a_completion_is_told(monkeypatch, capsys, tmp_path):
    path = toys.folder(tmp_path / "m")
    model = ["model=hub", f"model.model_name_or_path={path}"]
    out, _ = preview(monkeypatch, capsys, toys.QUESTIONS, [*model, "prompt=one_line"])
    assert "Arithmetic: [red]0+1[/red] = \N{LEFTWARDS ARROW TO BAR}" in out
    assert "reference: 1\n" in out and "1 tokens contain prompt.stop='\\n'" in out
    with pytest.raises(ConfigError, match="in none of the tokenizer's 259 tokens"):
        preview(monkeypatch, capsys, toys.QUESTIONS, [*model, "prompt=plain_icl"])


@pytest.mark.slow
def test_a_prompt_that_fits_is_no_warning(monkeypatch, capsys):
    questions = [Question("q", "1+1", "2", "sum", "1+1=2 #### 2")]
    out, err = preview(monkeypatch, capsys, questions, entry="mse", split="study")
    assert "--- study prompt 1: 4 tokens, '1' '+' '1' '='" in out and not err
    assert "96: 100 tokens (limit of the model: 512)" in out


@pytest.mark.slow
def test_the_command_shows_three_and_leaves_nothing(tmp_path):
    code, out, err = run("mse", "debug=prompts", cwd=tmp_path)
    assert code == 0, err
    assert out.count("--- study prompt") == 3 and out.count("reward 1\n") == 3
    assert not list(tmp_path.iterdir())


def test_no_weights_are_loaded(monkeypatch, capsys):
    def refused(*_, **__):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refused)
    shown.show_prompts(compose("train", "debug=prompts"), "train")
    assert "prompt 3" in capsys.readouterr().out


def rendered(name, question):
    """The prompt that a shipped file makes without a chat format."""
    made = values_of("prompt", name)
    return Prompting(made["template"], made["reply"]).prompt(question).text


def test_qwen_s_template_is_the_published_one():
    text = rendered("qwen_math_cot", Question("q", "What is $1+1$?", "2", "a", "b"))
    assert text == (
        f"<|im_start|>system\n{MESSAGES}<|im_end|>\n<|im_start|>user\nWhat is $1+1$?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("file", sorted((CONF / "prompt").glob("*.yaml")), ids=lambda f: f.stem)
def test_every_shipped_prompt_says_what_it_is(file):
    lines = file.read_text().splitlines()
    made = values_of("prompt", file.stem)
    assert lines[0].startswith("# ") and made["name"] == file.stem
    asked = rendered(file.stem, Question("q", "1+1", "2", "a", "1+1=2 #### 2"))
    assert asked.count("1+1") == 1 and "{" not in asked.replace("\\boxed{}", "")
    assert made["chat"] or made["system"] is None
    assert "chat" not in file.stem or made["chat"]
