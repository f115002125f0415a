"""What a policy reads: the template, solved examples, turns of a chat."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from commands import compose

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.records import Question
from grpo_ustat.tasks.base import Fitting, warn_of_prompt
from grpo_ustat.tasks.prompts import Prompting, render

QUESTION = Question("id", "How many {x}?", "7", "kind", "3+4=7 #### 7")
SOLVED = (Question("a", "1+1", "2", "sum", "so 2"), Question("b", "2+2", "4", "sum", "so 4"))


def test_only_the_three_fields_are_filled_and_nothing_inside_them():
    text = r"{question} in \boxed{}, {answer} {solution} {other} {{question}}"
    question = Question("id", "{answer}", "{solution}", "kind", "{question}")
    assert (
        render(text, question) == r"{answer} in \boxed{}, {solution} {question} {other} {{answer}}"
    )


def test_half_a_character_in_a_template_is_refused():
    with pytest.raises(ConfigError, match=r"prompt.template='.question.\\ud83d'"):
        compose("train", "prompt.template='{question}\ud83d'")


def test_a_prompt_is_the_examples_then_the_question():
    prompting = Prompting("Q: {question}\nA: ", "{solution} ({answer})\n", SOLVED)
    prompt = prompting.prompt(QUESTION)
    assert prompt.text == (
        "Q: 1+1\nA: so 2 (2)\nQ: 2+2\nA: so 4 (4)\nQ: How many {x}?\nA: "
    )  # fmt: skip
    assert (prompt.id, prompt.question, prompt.answer) == ("id", "How many {x}?", "7")
    assert Prompting("{question}=").prompt(QUESTION).text == "How many {x}?="


def test_a_prompt_as_long_as_it_may_be_is_kept():
    """Lengths are letters here: 1+1= has four, 10+1= five."""
    questions = [replace(QUESTION, text=text) for text in ("1+1", "10+1", "1+10")]
    source = SimpleNamespace(questions=lambda split: questions)
    fitting = Fitting(source, Prompting("{question}="), lambda texts: [*map(len, texts)], 4)
    assert [question.text for question in fitting.questions("study")] == ["1+1"]
    assert fitting.counts.total() == 2


@pytest.mark.parametrize("texts, template, warned", [
    (["What size does Ginger wear?", "How many?"], "{question}=", True),
    (["What size does Ginger wear?"], "{question}\nAnswer:", False),
    (["3+4", "sin(3)*2"], "{question} = ", False),
    (["What is it? 3+4 ="], "{question}", False),
])  # fmt: skip
def test_an_equals_sign_behind_words_is_warned_of(texts, template, warned, capsys):
    prompting = Prompting(template)
    prompts = [prompting.prompt(Question(text, text, "7", "gsm8k", "7")) for text in texts]
    dataset = SimpleNamespace(kind="gsm8k", name="gsm8k")
    warn_of_prompt(replace(compose("mse").task_options, dataset=dataset), prompts)
    line = (
        "warning: prompt=bare ends questions with '=', which suits only arithmetic; for gsm8k use "
        "prompt=gsm8k, or prompt=gsm8k_chat for a chat model\n"
    )
    assert capsys.readouterr().err == (line if warned else "")


def test_a_chat_has_a_turn_for_each():
    def chat(turns):
        return "|".join(f"{turn['role']}:{turn['content']}" for turn in turns)

    options = {"template": "{question}?", "reply": "{answer}", "examples": SOLVED[:1], "chat": chat}
    assert Prompting(**options, system="Be brief.").prompt(QUESTION).text == (
        "system:Be brief.|user:1+1?|assistant:2|user:How many {x}??"
    )
    assert Prompting(**options).prompt(QUESTION).text.startswith("user:1+1?|")
