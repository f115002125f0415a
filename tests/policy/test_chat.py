"""Prompts in a model's own chat format, against what transformers makes of the same turns."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime

import pytest
import toys
from commands import compose
from golden import naming

from grpo_ustat.config.identity import folder_name, identity
from grpo_ustat.config.model import cache_folder
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.measurements.next_step import policy_overrides
from grpo_ustat.mse import pool_store
from grpo_ustat.mse import study as study_run
from grpo_ustat.mse.pool_store import draws_of, prompt_date
from grpo_ustat.policy import chat
from grpo_ustat.policy.chat import ChatFormat, chat_format, in_chat_format
from grpo_ustat.policy.configured import configured_policy, configured_task
from grpo_ustat.policy.tokenizer import configured_tokenizer, encode
from grpo_ustat.runs import files
from grpo_ustat.runs import folder as run_folder
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.tasks.prompts import Prompting
from grpo_ustat.train import setup

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
    with pytest.raises(ConfigError, match=naming("embedded:tiny_base", "prompt=plain")):
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


FAULTY = {  # templates that a model could bring, and what is said of them
    "calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "divides": ("{{ 1 / 0 }}", "division by zero"),
    "reaches": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_template_is_one_line(name):
    template, why = FAULTY[name]
    with pytest.raises(ConfigError, match=naming("toy", why)) as refusal:
        prompting(template).prompt(toys.QUESTIONS[0])
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{% endif %}"
)
DATED = "<s>{{ strftime_now('%d %b %Y, %H:%M') }}\n" + toys.CHATML.removeprefix("{{ bos_token }}")
GIVEN = "{% if date_string is not defined %}{% set date_string = strftime_now('%d') %}{% endif %}"
NO_THOUGHT = "prompt.template_options={enable_thinking: false}"


def of_model(entry, path, *overrides):
    return compose(entry, "model=hub", f"model.model_name_or_path={path}", *overrides)


def first_prompt(config, split="study"):
    return configured_task(config.task_options, config.model).prompts(split)[0].text


@pytest.mark.slow
@pytest.mark.parametrize("entry, split", [("mse", "study"), ("train", "train"), ("train", "test")])
def test_options_reach_the_template_of_every_prompt(entry, split, tmp_path, capsys):
    path = toys.folder(tmp_path / "m", THINKS)
    plain = of_model(entry, path, "prompt=as_is")
    assert "think" not in first_prompt(plain, split)
    for option, word in ((NO_THOUGHT, "<think></think>"),
                         ("prompt.template_options={reasoning_effort: low}", "[low]")):  # fmt: skip
        config = of_model(entry, path, "prompt=as_is", option)
        assert word in first_prompt(config, split)
        assert identity(config) != identity(plain)
        assert folder_name(config) != folder_name(plain)
        if entry == "mse":
            assert draws_of(config) != draws_of(plain)
        again = compose(entry, *policy_overrides(asdict(config)))
        assert again.prompt == config.prompt


def test_a_run_without_options_is_the_run_it_was():
    keys = identity(compose("mse"))
    assert "template_options" not in keys["prompt"]
    assert "template_options" not in draws_of(compose("mse"))["prompt"]


def test_options_of_a_model_without_a_template_are_refused():
    config = compose("mse", "prompt=as_is", NO_THOUGHT)
    with pytest.raises(ConfigError, match=naming("enable_thinking", "embedded:tiny_base")):
        configured_task(config.task_options, config.model)


def test_an_option_that_the_template_never_reads_is_named(tmp_path, capsys):
    path = toys.folder(tmp_path / "m", THINKS, positions=256)
    wrong = "prompt.template_options={enable_thinkin: false, reasoning_effort: low}"
    config = of_model("mse", path, "prompt=as_is", wrong)
    study_run._prompts(config, tmp_path / "pool")
    said = capsys.readouterr().err
    assert "enable_thinkin, " in said and "enable_thinking?" in said
    assert "reasoning_effort" not in said


class Day(datetime):
    """A clock that stands still."""

    stamp = "2026-03-01T23:59:00"

    @classmethod
    def now(cls, tz=None):
        return datetime.fromisoformat(cls.stamp)


@pytest.fixture
def days(monkeypatch):
    """A function that sets the day on which runs start."""
    for module in (files, run_folder, chat):
        monkeypatch.setattr(module, "datetime", Day)

    def on(stamp):
        monkeypatch.setattr(Day, "stamp", stamp)

    return on


def test_a_template_tells_the_date_that_it_is_given_and_leaves_the_clock_alone():
    tokenizer, turns = toys.tokenizer(DATED), [{"role": "user", "content": "x"}]
    moment = datetime(2026, 3, 1, 10, 30)
    assert in_chat_format(tokenizer, turns, {}, moment).startswith("<s>01 Mar 2026, 10:30\n")
    with pytest.raises(ValueError, match="writes today's date"):
        in_chat_format(tokenizer, turns, {}, None)
    today = tokenizer.apply_chat_template(turns, tokenize=False)
    assert datetime.now().strftime("%Y") in today
    given = toys.tokenizer(GIVEN + "{{ date_string }}" + toys.CHATML)
    assert in_chat_format(given, turns, {"date_string": "5 May"}, None).startswith("5 May")


@pytest.mark.slow
def test_a_training_run_resumed_on_another_day_has_the_same_prompts(tmp_path, days):
    path = toys.folder(tmp_path / "m", DATED, positions=128)
    words = ("prompt=as_is", "budget.rollouts=8", "group_size=4", "max_completion_length=8")
    config = of_model("train", path, *words)

    def prompts(config, name="run"):
        folder = RunFolder(tmp_path / name, config)
        run = setup.set_up(config, folder)
        folder.open()
        return [p.text for p in (*run.train_prompts, *run.test_prompts)]

    days("2026-03-01T23:59:00")
    first = prompts(config)
    days("2026-03-02T00:01:00")
    assert prompts(config) == first and "01 Mar 2026, 23:59" in first[0]
    assert "02 Mar 2026" in prompts(config, "other")[0]
    anew = of_model("train", path, *words, "on_existing=overwrite")
    assert "02 Mar 2026" in prompts(anew)[0]
    assert prompts(config)[0] == prompts(anew)[0]


def test_the_parts_of_a_pool_on_both_sides_of_midnight_have_the_same_prompts(tmp_path, days):
    path, pool = toys.folder(tmp_path / "m", DATED, positions=128), tmp_path / "pool"
    words = ("prompt=as_is", "max_completion_length=8", f"pool={pool}")
    texts = []
    for stamp, part in (("2026-03-01T23:59:00", "1/2"), ("2026-03-02T00:01:00", "2/2")):
        days(stamp)
        config = of_model("mse", path, *words, f"study.part={part}")
        prompts, _ = study_run._prompts(config, pool)
        texts.append([prompt.text for prompt in prompts])
        pool_store.PoolStore(pool, draws_of(config)).open()
    assert texts[0] == texts[1] and "01 Mar" in texts[0][0]
    of_model("mse", path, *words)  # the folder is a pool's


def test_a_study_whose_pool_can_be_reused_keeps_its_day(tmp_path, days):
    config = of_model("mse", toys.folder(tmp_path / "m", DATED), "prompt=as_is")
    draws, root = draws_of(config), tmp_path / "outputs"
    first = root / "mse" / "a" / "seed-0" / "pool"
    days("2026-03-01T10:00:00")
    begun = prompt_date(first, root, draws)
    pool_store.PoolStore(first, draws).open()
    days("2026-03-02T10:00:00")
    assert prompt_date(root / "mse" / "b" / "seed-0" / "pool", root, draws) == begun
    others = draws | {"seed": 7}
    assert prompt_date(root / "mse" / "c" / "seed-0" / "pool", root, others).day == 2
    (first / files.PROMPT_DATE).write_text("x")
    with pytest.raises(ConfigError, match="prompt_date.txt"):
        prompt_date(first, root, draws)


def test_a_template_without_a_date_leaves_no_file(tmp_path):
    path = toys.folder(tmp_path / "m", toys.CHATML, positions=256)
    study_run._prompts(of_model("mse", path, "prompt=as_is"), tmp_path / "pool")
    assert not (tmp_path / "pool").exists()
