"""What a policy reads: the template, solved examples, turns of a chat."""

from __future__ import annotations

from grpo_ustat.records import Question
from grpo_ustat.tasks.prompts import Prompting, render

QUESTION = Question("id", "How many {x}?", "7", "kind", "3+4=7 #### 7")
SOLVED = (Question("a", "1+1", "2", "sum", "so 2"), Question("b", "2+2", "4", "sum", "so 4"))


def test_only_the_three_fields_are_filled_and_nothing_inside_them():
    text = r"{question} in \boxed{}, {answer} {solution} {other} {{question}}"
    question = Question("id", "{answer}", "{solution}", "kind", "{question}")
    assert (
        render(text, question) == r"{answer} in \boxed{}, {solution} {question} {other} {{answer}}"
    )


def test_a_prompt_is_the_examples_then_the_question():
    prompting = Prompting("Q: {question}\nA: ", "{solution} ({answer})\n", SOLVED)
    prompt = prompting.prompt(QUESTION)
    assert prompt.text == (
        "Q: 1+1\nA: so 2 (2)\nQ: 2+2\nA: so 4 (4)\nQ: How many {x}?\nA: "
    )  # fmt: skip
    assert (prompt.id, prompt.question, prompt.answer) == ("id", "How many {x}?", "7")
    assert Prompting("{question}=").prompt(QUESTION).text == "How many {x}?="


def test_a_chat_has_a_turn_for_each():
    def chat(turns):
        return "|".join(f"{turn['role']}:{turn['content']}" for turn in turns)

    options = {"template": "{question}?", "reply": "{answer}", "examples": SOLVED[:1], "chat": chat}
    assert Prompting(**options, system="Be brief.").prompt(QUESTION).text == (
        "system:Be brief.|user:1+1?|assistant:2|user:How many {x}??"
    )
    assert Prompting(**options).prompt(QUESTION).text.startswith("user:1+1?|")
