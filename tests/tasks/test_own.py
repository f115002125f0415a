"""Tasks and rewards of the user's own: read, cut to size, and blamed by name for what they do."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import compose
from golden import naming

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.records import Prompt, Question
from grpo_ustat.tasks import plugins
from grpo_ustat.tasks.plugins import OwnJudge, OwnSource
from grpo_ustat.tasks.registry import make_judge

NUMBERS = (
    (True, 1), (np.bool_(False), 0), (1, 1), (np.float32(0.25), 0.25), (np.int64(-2), -2),
    (np.array(0.5), 0.5), (np.array([0.5]), 0.5), (torch.tensor(0.5), 0.5), (torch.tensor(True), 1),
    (Decimal("0.5"), 0.5), (Fraction(1, 4), 0.25), (-0.1, -0.1), (3e4, 3e4),
)  # fmt: skip
NO_NUMBERS = (
    math.nan, math.inf, -math.inf, None, "1", [1.0], 1j, -1e300, 10**5000, np.ones(2),
)  # fmt: skip
PROMPT = Prompt("p7", "3 1 2 =", "3 1 2", "1 2 3", "sorting")


def question(name):
    return Question(name, name, "1", "letters", "1")


class Letters:
    """Splits by their first letter, of a length that is an option."""

    def __init__(self, many=4, **splits):
        self.many, self.splits = many, splits

    def questions(self, split):
        if split in self.splits:
            return self.splits[split]
        if split == "examples":
            raise KeyError("no examples here")
        return (question(f"{split}{n}") for n in range(self.many))


def source(monkeypatch, task=Letters, options=None, **sizes):
    monkeypatch.setattr(plugins, "entry_point", lambda group, name: task)
    asked = {"train": None, "test": None, "study": 2, "examples": 0} | sizes
    return OwnSource("letters", options or {}, asked)


def test_a_source_gives_the_first_questions_of_a_split(monkeypatch):
    found = source(monkeypatch, options={"many": 5}, train=3)
    assert [q.id for q in found.questions("train")] == ["train0", "train1", "train2"]
    assert len(found.questions("test")) == 5 and len(found.questions("study")) == 2


def test_only_what_is_asked_for_must_be_there(monkeypatch):
    few = source(monkeypatch, options={"many": 4, "study": []})
    assert len(few.questions("train")) == 4
    with pytest.raises(ConfigError, match=naming("dataset.study_size=2", "letters", "0 study")):
        few.questions("study")
    with pytest.raises(ConfigError, match=naming("dataset.train_size=5", "train_size=4")):
        source(monkeypatch, train=5).questions("train")


@pytest.mark.parametrize("options, split, match", [
    ({"train": [question("a"), question("a")]}, "train", "two train questions with id 'a'"),
    ({"train": [question("test1")]}, "train", "id 'test1', or one that is also in test or exa"),
    ({"examples": [question("study1")]}, "study", "id 'study1', or one that is also in examples"),
    ({"train": ["1+1"]}, "train", r"\('train'\) contains '1\+1', but it must contain only grpo_"),
    ({"train": 3}, "train", r"questions\('train'\): TypeError: .*plugins.py, line \d+\)"),
    ({"many": 1, "lots": 2}, "examples", r"\('examples'\): KeyError: .*test_own.py, li"),
    ({"train": [Question("t", "x\ud800", "1", "letters", "1")]}, "train", r"\) .*'x\\ud800'"),
])  # fmt: skip
def test_wrong_questions_are_refused(monkeypatch, options, split, match):
    shots = 1 if "examples" in options or split == "examples" else 0
    with pytest.raises(ConfigError, match=match) as caught:
        source(monkeypatch, options=options, examples=shots).questions(split)
    assert "'letters'" in str(caught.value)


@pytest.mark.parametrize("error, told", [
    (ValueError("many must be even"), "ValueError: many must be even"),
    (SystemExit(0), "SystemExit: 0 "),
])  # fmt: skip
def test_a_task_that_cannot_be_made_is_named(error, told, monkeypatch):
    def refuse(**options):
        raise error

    with pytest.raises(ConfigError, match=f"'letters': {told}"):
        source(monkeypatch, task=refuse)
    with pytest.raises(ConfigError, match="TypeError: .*unexpected keyword argument 'size'"):
        source(monkeypatch, task=lambda many: None, options={"size": 3})


def test_rewards_are_the_functions(monkeypatch):
    judge = OwnJudge(lambda prompt, text: len(text) / len(prompt.answer))
    assert judge.rewards([PROMPT, PROMPT], ["1", "12345"]) == [0.2, 1.0]
    for value, number in NUMBERS:

        async def later(*_, value=value):
            return value

        for reward in (lambda *_, value=value: value, later):
            assert OwnJudge(reward).rewards([PROMPT] * 2, ["", ""]) == [number] * 2
    assert judge.extract(" 3 ") == "3" and judge.extract(" ") is None
    assert OwnJudge(None, lambda text: text[:1]).extract("321") == "3"


def test_functions_of_another_call_are_refused_when_they_are_loaded(monkeypatch):
    named = {"name": "grpo_ustat.rewards entry point 'x'"}
    with pytest.raises(ConfigError, match=r"'x' .*\(completions, \*\*more\): .*\(prompt"):
        OwnJudge(lambda completions, **more: [1.0], **named)
    with pytest.raises(ConfigError, match=r"'x' .*\(prompts, completions\): .*\(prompt"):
        OwnJudge(lambda prompts, completions: [1.0], **named)
    OwnJudge(max, **named)  # whose signature is not known

    class Wrong(Letters):
        def questions(self):
            return []

    with pytest.raises(ConfigError, match=r"questions .*\(\).* questions\(split"):
        source(monkeypatch, task=Wrong)
    with pytest.raises(ConfigError, match=r"'letters' returned 3, .* questions\(split"):
        source(monkeypatch, task=lambda: 3)


@pytest.mark.parametrize("methods, line", [
    ({}, r"which has no method reward\(prompt, completion\): add it"),
    ({"reward": lambda self, text: 1},
     r"reward has the signature \(text\), but it is called as reward\(prompt"),
    ({"reward": lambda self, p, t: 1, "extract": lambda self: ""},
     r"extract has the signature \(\), but it is called as extract\(completion\)"),
])  # fmt: skip
def test_a_task_without_its_methods_is_refused_when_it_is_made(monkeypatch, methods, line):
    own = source(monkeypatch, task=type("Mine", (Letters,), methods))
    options = compose("mse").task_options
    dataset = SimpleNamespace(kind="own", name="letters", reward=None)
    with pytest.raises(ConfigError, match=f"tasks entry point 'letters'.*{line}"):
        make_judge(replace(options, dataset=dataset), own)


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: f"{type(value).__name__}")
def test_what_is_no_reward_is_refused_by_prompt(value):
    judge = OwnJudge(lambda *_: value, name="grpo_ustat.rewards entry point 'near'")
    with pytest.raises(ConfigError, match="'near', prompt p7: the reward"):
        judge.rewards([PROMPT], ["1"])
