"""Prompts in a model's own chat format, against what transformers makes of the same turns."""

from __future__ import annotations

import resource
import signal

import pytest
import toys
from commands import compose
from slow_cases import slow_after

from grpo_ustat.config.model import cache_folder
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy import chat
from grpo_ustat.policy.chat import ChatFormat
from grpo_ustat.policy.loading import (
    chat_format,
    configured_policy,
    configured_task,
    configured_tokenizer,
    encode,
)
from grpo_ustat.tasks.prompts import Prompting

ASK = "What is {question}?"


def prompting(template=toys.CHATML, **fields):
    return Prompting(ASK, **fields, chat=ChatFormat(toys.tokenizer(template), "toy"))


def user(i):
    return {"role": "user", "content": f"What is [red]{i}+1[/red]?"}


def test_turns_are_what_transformers_writes():
    plain = prompting().prompt(toys.QUESTIONS[2])
    assert plain.text == (
        "<s><|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhat is [red]2+1[/red]?"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    examples = tuple(toys.QUESTIONS[:2])
    shown = prompting(reply="{answer}", examples=examples, system="Be brief.").prompt(
        toys.QUESTIONS[2]
    )
    turns = [{"role": "system", "content": "Be brief."}]
    for i in range(2):
        turns += [user(i), {"role": "assistant", "content": str(i + 1)}]
    expected = toys.tokenizer(toys.CHATML).apply_chat_template(
        [*turns, user(2)], tokenize=False, add_generation_prompt=True
    )
    assert shown.text == expected


@pytest.mark.slow
@pytest.mark.parametrize("template", [toys.CHATML, None])
def test_a_question_of_ones_own_is_passed_on_as_it_stands(template, tmp_path):
    """`prompt=as_is`: in the chat format of a model that has one, else as text, beginning once."""
    path = toys.folder(tmp_path / "m", template)
    config = compose("mse", "model=hub", f"model.model_name_or_path={path}", "prompt=as_is")
    policy, (prompt, *_) = (
        configured_policy(config.policy_options),
        configured_task(config.task_options, config.model).prompts("study"),
    )
    if template is None:
        assert prompt.text == prompt.question
    else:
        turns = [{"role": "user", "content": prompt.question}]
        assert prompt.text == policy.tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True
        )
    (ids,) = policy.encode([prompt.text])
    assert ids.count(0) == 1 and ids[0] == 0


@pytest.mark.parametrize("chat", [True, False])
def test_no_prompt_has_two_beginnings_or_none(chat, tmp_path):
    """The chat format writes `<s>`, the tokenizer would put another before it."""
    path = toys.folder(tmp_path / "m", toys.CHATML)
    overrides = [
        "model=hub",
        f"model.model_name_or_path={path}",
        f"prompt.chat={str(chat).lower()}",
    ]
    config = compose("mse", *overrides, "model.dtype=float64")
    policy, (prompt, *_) = (
        configured_policy(config.policy_options),
        configured_task(config.task_options, config.model).prompts("study"),
    )
    (ids,) = policy.encode([prompt.text])
    assert ids.count(0) == 1 and ids[0] == 0
    if chat:
        turns = [{"role": "user", "content": f"{prompt.question}="}]
        expected = policy.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=True
        )
        assert ids == expected["input_ids"]
    both = encode(policy.tokenizer, [prompt.text], special_tokens=True)[0]
    assert (both != ids) == chat


def test_a_base_model_has_no_chat_format():
    config = compose("mse", "prompt=chat")
    with pytest.raises(ConfigError, match="embedded:tiny_base has no chat format.*prompt=plain"):
        chat_format(config.model, config.prompt)


@pytest.mark.parametrize(
    "template, what", [(toys.NO_SYSTEM, "System role not supported"), (toys.DEAF, "leaves out the")]
)
def test_a_format_without_a_system_turn_says_so(template, what):
    """Gemma's raises; others drop the turn, which the run would never notice."""
    assert "2+1" in prompting(template).prompt(toys.QUESTIONS[2]).text
    with pytest.raises(ConfigError) as caught:
        prompting(template, system="Be brief.").prompt(toys.QUESTIONS[2])
    assert what in str(caught.value) and "use prompt.system=null" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(
    not (cache_folder() / "smollm2-135m" / "config.json").is_file(),
    reason="scripts/tools/fetch_smollm2.py has not been run",
)
@pytest.mark.slow
def test_smollm2_reads_its_own_format():
    config = compose("mse", "model=smollm2_135m", "prompt=chat", "prompt.system=Short.")
    prompt = configured_task(config.task_options, config.model).prompts("study")[0]
    assert prompt.text.startswith("<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\n")
    assert prompt.text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    (ids,) = encode(configured_tokenizer(config.model), [prompt.text], special_tokens=False)
    assert ids.count(1) == 3  # <|im_start|> is one token, of each turn


BEYOND = {  # templates that a model could bring, and what is said of them
    "loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% set k = i %}{% endfor %}"
        "{% endfor %}",
        "does not end within 0.5 s",
    ),
    "in one word": ("{{ 'a' * 10 ** 11 }}", "takes more than 1 GiB"),
    "doubles": (
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(99) %}"
        "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "(takes more than 1 GiB|does not end within 0.5 s)",
    ),
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "divides": ("{{ 1 / 0 }}", "division by zero"),
    "writes and writes": ("{{ 'a' * 20_000_000 }}", "more than 10,000,000 letters"),
    "reaches": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
}


@pytest.mark.parametrize("name", slow_after(1, BEYOND))
def test_a_template_beyond_its_limits_is_one_line(name, monkeypatch):
    template, why = BEYOND[name]
    if "0.5 s" in why:  # the others end of themselves, on a busy machine later
        monkeypatch.setattr(chat, "MOST_SECONDS", 0.5)
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    with pytest.raises(ConfigError, match=f"the chat format of toy .*{why}") as refusal:
        prompting(template).prompt(toys.QUESTIONS[0])
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400
    assert before == (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM))
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
