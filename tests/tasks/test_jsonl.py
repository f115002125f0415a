"""Rows and a reward of the user's own from files: read, split, judged, refused by row."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import readme
from commands import compose
from golden import naming
from launching import finished

from grpo_ustat.config.identity import folder_name
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.records import Prompt
from grpo_ustat.tasks.jsonl import ExactJudge
from grpo_ustat.tasks.registry import make_task

DATA = Path(__file__).parents[1] / "data" / "jsonl"
SPLITS = ("study", "test", "train")
ROWS = [{"question": f"q{n}?", "answer": f"a {n}", "level": n} for n in range(40)]


def written(path, rows):
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("\n".join(lines) + "\n")
    return path


def configured(path, *overrides, entry="train"):
    return compose(entry, "dataset=jsonl", f"dataset.path={path}", *overrides)


def task(path, *overrides):
    return make_task(configured(path, *overrides, "budget.rollouts=8").task_options)


def texts(a_task, split):
    return {question.text for question in a_task.questions(split)}


@pytest.mark.slow
def test_one_file_is_split_without_overlap(tmp_path):
    path = written(tmp_path / "my.jsonl", [*ROWS[:20], "", *ROWS[20:]])
    made = task(path)
    study, test, train = (texts(made, split) for split in ("study", "test", "train"))
    assert (len(study), len(test), len(train)) == (10, 10, 20)
    assert study | test | train == {row["question"] for row in ROWS}
    assert re.findall(r"\d+ \w+|dataset\.\w+", made.note.removeprefix(str(path))) == [
        "10 questions", "dataset.study_size", "10 for", "dataset.test_size", "20 to",
    ]  # fmt: skip
    again = task(written(tmp_path / "other.jsonl", ROWS[::-1]))
    assert texts(again, "test") == test
    assert {q.id for q in again.questions("study")} == {q.id for q in made.questions("study")}


@pytest.mark.slow(minutes=0.02)
def test_sizes_can_be_set_and_a_study_may_take_all(tmp_path):
    path = written(tmp_path / "my.jsonl", ROWS)
    made = task(path, "dataset.study_size=5", "dataset.test_size=15")
    assert [len(made.questions(s)) for s in ("study", "test", "train")] == [5, 15, 20]
    whole = configured(path, "dataset.study_size=40", entry="mse")
    assert len(make_task(whole.task_options).questions("study")) == 40
    with pytest.raises(ConfigError, match="test.* dataset.study_size"):
        make_task(whole.task_options).questions("test")
    with pytest.raises(ConfigError, match=r"^dataset.study_size=50 of 40 rows"):
        configured(path, "dataset.study_size=50", entry="mse")
    with pytest.raises(ConfigError, match=naming("study_size=30", "dataset.test_size=20", 40)):
        configured(path, "dataset.study_size=30", "dataset.test_size=20")


@pytest.mark.parametrize("given", [True, False])
def test_test_rows_of_their_own_are_tested_on_and_not_trained_on(given, tmp_path):
    """Those of a file that is named, or of the folder."""
    path = written(tmp_path / "train.jsonl", ROWS)
    tests = written(tmp_path / "test.jsonl", ROWS[:4])
    made = task(path, f"dataset.test_path={tests}") if given else task(tmp_path)
    assert texts(made, "test") == {row["question"] for row in ROWS[:4]}
    assert len(made.questions("train")) == 40 - 4 - 10
    assert made.dropped == {"train questions that are also test questions": 4}


def test_columns_have_names_of_ones_own(tmp_path):
    rows = [{"q": "2+2", "gold": 4.5}, *({"q": f"{n}", "gold": "so #### x"} for n in range(7))]
    path = written(tmp_path / "my.jsonl", rows)
    made = task(path, "dataset.question=q", "dataset.answer=gold", "dataset.study_size=1")
    found = [q for split in ("study", "test", "train") for q in made.questions(split)]
    assert {q.text: q.answer for q in found}["2+2"] == "4.5"
    assert {(q.answer, q.solution) for q in found} == {("4.5", "4.5"), ("x", "so #### x")}


VERBATIM = ["Q: 1+%d\nA:\n", "  2+%d=", "3+%d= ", "\t4+%d =\n\n"]


@pytest.mark.parametrize("prompt, kept", [("as_is", True), ("one_line", False)])
def test_white_space_at_the_ends_of_a_question_is_kept_by_as_is_alone(prompt, kept, tmp_path):
    """Base models read prompts that end in a new line; other prompts put words behind it."""
    rows = [{"question": VERBATIM[i % 4] % i, "answer": f" {i} "} for i in range(40)]
    made = task(written(tmp_path / "my.jsonl", rows), f"prompt={prompt}")
    prompts = [p for split in ("study", "test", "train") for p in made.prompts(split)]
    texts_now = {p.question for p in prompts}
    assert texts_now == {r["question"] if kept else r["question"].strip() for r in rows}
    assert {p.answer for p in prompts} == {str(i) for i in range(40)}
    if kept:
        assert all(p.text == p.question for p in prompts)


def test_rows_that_differ_in_white_space_alone_are_prompts_of_their_own_under_as_is(tmp_path):
    """But none is trained on or shown solved beside one that is tested or studied."""
    rows = [{"question": f"{i}+1={end}", "answer": i} for i in range(20) for end in ("", " ", "\n")]
    path = written(tmp_path / "my.jsonl", rows)
    whole = configured(path, "dataset.study_size=60", "prompt=as_is", entry="mse")
    made = make_task(whole.task_options)
    assert len({q.id for q in made.questions("study")}) == 60 and not made.dropped
    other = task(path, "prompt=one_line", "dataset.study_size=3", "dataset.test_size=2")
    assert other.dropped == {"repeated train questions": 36}
    split = task(path, "prompt=as_is", "dataset.study_size=10", "dataset.test_size=10")
    families = [{t.strip() for t in texts(split, s)} for s in ("study", "test", "train")]
    assert not any(a & b for a, b in itertools.combinations(families, 2))
    assert split.dropped == {
        "train questions that are also test questions": 2,
        "train questions that are also study questions": 2,
    }


def test_a_worked_example_keeps_its_white_space_under_as_is(tmp_path):
    rows = [{"question": f"Q{i}\nA:\n", "answer": f"work\n#### {i}\n\n"} for i in range(20)]
    made = task(
        written(tmp_path / "my.jsonl", rows), "prompt=as_is", "prompt.shots=1",
        "prompt.reply='{solution}'",
    )  # fmt: skip
    (example,) = made.questions("examples")
    assert example.solution.endswith("\n\n") and example.answer == example.text[1:-4]
    prompt = made.prompts("train")[0]
    assert prompt.text == example.text + example.solution + prompt.question


@pytest.mark.parametrize("answer, fault", [
    (None, "field answer is missing, the row has question"), (" ", "field answer is ' ', it must"),
    ([1], r"field answer is \[1\], it must be a text or a number"),
    (True, "field answer is True, it must be a text"), ("so ####", "field answer is 'so ####'"),
])  # fmt: skip
def test_a_broken_row_is_refused_before_the_command_says_what_it_does(answer, fault, tmp_path):
    path = written(tmp_path / "my.jsonl", [*ROWS[:2], {"question": "x", "answer": answer}])
    with pytest.raises(ConfigError, match=f"my.jsonl row 3: {fault}"):
        compose("mse", "dataset=jsonl", f"dataset.path={path}")


def test_exact_answers_earn_one():
    prompt = Prompt("1", "", "", "a  b", "jsonl")
    told = ["a b", " a b\n", "so #### a b\nmore", "a b.", "b", "#### a b #### c", ""]
    assert ExactJudge().rewards([prompt] * 7, told) == [1, 1, 1, 0, 0, 0, 0]


def reward_in(tmp_path, source):
    path = written(tmp_path / "my.jsonl", ROWS)
    (tmp_path / "my.py").write_text(source)
    return path, f"dataset.reward={tmp_path / 'my.py'}:score"


def test_a_reward_from_a_file_sees_the_other_columns(tmp_path):
    made = task(
        *reward_in(tmp_path, "def score(prompt, text):\n return prompt.columns['level'] / 39")
    )
    prompts = made.prompts("train")
    levels = [int(prompt.question[1:-1]) / 39 for prompt in prompts]
    assert made.rewards(prompts, [""] * len(prompts)) == levels
    assert not list(tmp_path.glob("__pycache__"))


def test_rewards_of_coroutines_are_awaited_together_and_keep_their_order(tmp_path):
    """Each waits until all have come: one after the other they would wait for ever."""
    source = """
import asyncio
came, all_here = [], asyncio.Event()
async def score(prompt, text):
    came.append(text)
    if len(came) % 4 == 0:
        all_here.set()
    await asyncio.wait_for(all_here.wait(), 20)
    return float(text)
"""
    made = task(*reward_in(tmp_path, source))
    prompts = made.prompts("train")[:4]
    for _ in range(2):  # in one event loop, which sessions of a client outlive
        assert made.rewards(prompts, ["3", "1", "2", "0"]) == [3, 1, 2, 0]


@pytest.mark.parametrize("source, message", [
    ("def score(p, t):\n return 1 / 0", r"ZeroDivisionError: division by zero \(.*my.py, line 2\)"),
    ("def score(p, t):\n return 'good'", "the reward is 'good', but each call must"),
    ("import sys\ndef score(p, t):\n sys.exit(0)", r"SystemExit: 0 \(.*my.py, line 3\)"),
    ("async def score(p, t):\n return 1 / 0", r"ZeroDivisionError: .* \(.*my.py, line 2\)"),
    ("async def score(p, t):\n exit()", r"SystemExit: None \(.*, line \d+\)"),
    ("async def score(p, t):\n return 'x'", "the reward is 'x', but each call must"),
])  # fmt: skip
def test_a_reward_that_fails_names_the_row(source, message, tmp_path):
    made = task(*reward_in(tmp_path, source))
    prompt = made.prompts("train")[0]
    row = 1 + int(prompt.question[1:-1])
    with pytest.raises(ConfigError, match=rf"my.py:score, .*my.jsonl row {row}: {message}"):
        made.rewards([prompt], [""])


@pytest.mark.parametrize("source, message", [
    ("def scores(p, t):\n return 1", "has no function 'score': did you mean scores. it has scores"),
    ("x = 1", "has no function 'score': it has none"),
    ("def score(:", "my.py line 1 is not valid Python"),
    ("def score(completions, **kwargs):\n return [1.0]",
     r"my.py:score takes \(completions, \*\*kwargs\): write score\(prompt, completion\), which re"),
    ("async def score(*, completions):\n return [1.0]", r"takes \(\*, completions\): write score"),
    ("def score(completion, prompt):\n return 1", r"takes \(completion, prompt\): write score"),
    ("def score(p, t, *, rate):\n return 1", r"takes \(p, t, \*, rate\): write score"),
])  # fmt: skip
def test_a_wrong_reward_file_is_refused_before_it_runs(source, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        configured(*reward_in(tmp_path, f"{source}\n"))


@pytest.mark.parametrize("takes", ["p, t, /", "*pair", "p, t=1, **more", "p, t, *, k=1"])
def test_whatever_can_be_called_with_prompt_and_completion_is_a_reward(takes, tmp_path):
    path, reward = reward_in(tmp_path, f"def score({takes}):\n return 0.5")
    assert task(path, reward).rewards([Prompt("1", "", "", "a", "jsonl")], [""]) == [0.5]


def test_a_file_without_its_function_says_which_it_has(tmp_path):
    path, reward = reward_in(tmp_path, "def a(p, t): 0\nasync def b(p, t): 0\n")
    file = reward.removesuffix(":score").partition("=")[2]
    for words, told in (
        (f"dataset.reward={file}", r"dataset.reward=.*my.py:FUNCTION, .* a, b"),
        (f"reward_funcs=[task,{file}]", r"reward_funcs=.*my.py:FUNCTION, .* a, b"),
        ("dataset.reward=no.py", "dataset.reward=no.py"),
        ("dataset.reward=nowhere.py:score", "nowhere.py:score"),
    ):
        with pytest.raises(ConfigError, match=told):
            configured(path, words)


@pytest.mark.parametrize("columns, words, fix", [
    (("problem", "solution"), (), "question is missing, the row has problem, solution: "
     "set dataset.question=problem dataset.answer=solution"),
    (("problem", "answer"), (), "field question is missing, .*: set dataset.question=problem$"),
    (("problem", "solution"), ("dataset.question=problem",), "set dataset.answer=solution$"),
    (("question", "k"), (), "field answer is missing, .*: set dataset.answer=COLUMN$"),
    (("a", "b"), (), "set dataset.question=COLUMN dataset.answer=COLUMN$"),
    (("question", "b"), ("dataset.answer=question2",), "field question2 is missing"),
])  # fmt: skip
def test_columns_of_other_names_are_named_before_anything_is_read(columns, words, fix, tmp_path):
    path = written(tmp_path / "my.jsonl", [dict.fromkeys(columns, "x")] * 40)
    with pytest.raises(ConfigError, match=f"my.jsonl row 1: .*{fix}"):
        configured(path, *words, entry="mse")


@pytest.mark.parametrize("rows, words, line", [
    (2, (), "my.jsonl has 2 rows: 1 for studies .* 0 for tests .* and 1 to train on, but training "
     "needs 2 for tests and 8 per step .*: use 11 rows or more$"),
    (10, (), "use 11 rows or more, or lower budget.rollouts"),
    (11, (), "use dataset.study_size=1 dataset.test_size=2, or lower"),
    (20, ("dataset.test_size=12",), "use dataset.study_size=1 dataset.test_size=11, or lower"),
    (20, ("dataset.study_size=20",), "use dataset.study_size=10 dataset.test_size=2"),
])  # fmt: skip
def test_too_few_rows_to_train_on_are_refused_with_what_can_be_typed(rows, words, line, tmp_path):
    path = written(tmp_path / "my.jsonl", ROWS[:rows])
    with pytest.raises(ConfigError, match=line) as caught:
        configured(path, "budget.rollouts=64", *words)
    if "use dataset." in str(caught.value):
        fix = str(caught.value).partition(": use ")[2].partition(",")[0].split()
        made = make_task(configured(path, "budget.rollouts=64", *words, *fix).task_options)
        assert len(made.questions("train")) >= 8 and len(made.questions("test")) >= 2
    configured(path, "budget.rollouts=64", "show_prompts=1")


def test_rows_of_a_test_file_are_not_counted_among_those_to_train_on(tmp_path):
    path, tests = (written(tmp_path / name, ROWS[:8]) for name in ("my.jsonl", "test.jsonl"))
    with pytest.raises(ConfigError, match=naming("study_size", "6 to train", "8 per step", "9 r")):
        configured(path, "budget.rollouts=64", f"dataset.test_path={tests}")


@pytest.mark.parametrize("source, message", [
    ("import nowhere_to_be\ndef score(p, t): 0", "ModuleNotFoundError: .*my.py, line 1"),
    ("score = 3", "score is not a function in"),
    ("import sys\nsys.exit()\ndef score(p, t): 0", "SystemExit: .*my.py, line 2"),
])  # fmt: skip
def test_a_reward_file_that_fails_is_one_line(source, message, tmp_path):
    _, reward = reward_in(tmp_path, source)
    with pytest.raises(ConfigError, match=message):
        make_task(compose("train", reward).task_options)


def test_a_run_is_known_by_the_content_of_rows_and_reward(tmp_path):
    def name(place, rows, reward):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / "r.py").write_text(f"def score(p, t):\n return {reward}")
        path = written(tmp_path / place / "rows.jsonl", rows)
        words = (f"dataset.reward={path.with_name('r.py')}:score", "budget.rollouts=8")
        return folder_name(configured(path, *words))

    before = name("here", ROWS, 0.25)
    assert "-jsonl-" in before and name("there", ROWS, 0.25) == before
    assert len({before, name("there", ROWS, 0.5), name("there", ROWS[1:], 0.25)}) == 3


def test_the_files_are_those_of_the_page():
    page, rows = readme.PAGES["docs/models-and-data.md"], (DATA / "my.jsonl").read_text()
    code = page.partition("```python\ndef score(")[2].partition("```")[0]
    assert code and code in (DATA / "my.py").read_text()
    assert all(line in rows for line in page.splitlines() if line[:2] == '{"')


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["mse", "train"])
def test_both_commands_run_with_files_alone(entry, tmp_path):
    data = ("dataset=jsonl", f"dataset.path={DATA / 'my.jsonl'}")
    reward = f"dataset.reward={DATA / 'my.py'}:score"
    code, told = finished(entry, *data, reward, f"debug={entry}", cwd=tmp_path, seconds=600)
    assert code == 0, told
    assert "my.jsonl: 10 questions" in told
    result = json.loads(readme.only(tmp_path, "result.json").read_text())
    assert result["left_out"] == {}


def test_rows_of_csv_are_texts_with_the_names_of_the_header(tmp_path):
    """A quoted cell may hold commas, quotes and lines; an answer that is a number stays a text."""
    rows = "".join(f'"q{n}, ""so""?\nwhat",{n}\r\n' for n in range(40))
    (tmp_path / "rows.csv").write_bytes(b"\xef\xbb\xbfquestion,answer\r\n" + rows.encode())
    made = task(tmp_path / "rows.csv")
    found = {(q.text, q.answer) for split in SPLITS for q in made.questions(split)}
    assert found == {(f'q{n}, "so"?\nwhat', str(n)) for n in range(40)}


WHOLE = [  # an answer of a row and its text: whole floats are integers
    (3.0, "3"), (-2.0, "-2"), (-0.0, "0"), (2.5, "2.5"), (1e3, "1000"), (1e22, "1e+22"),
]  # fmt: skip
SINGLE = list(
    zip([0.1, 0.7, 2.5, 3.0, 0.9, -0.3], ["0.1", "0.7", "2.5", "3", "0.9", "-0.3"], strict=True)
)


@pytest.mark.parametrize("kind, answers", [
    (None, [*WHOLE, (7, "7"), ("3.0", "3.0"), (10**22, "1" + 22 * "0")]),
    ("float64", [*WHOLE, *SINGLE]), ("float32", SINGLE), ("float16", SINGLE),
])  # fmt: skip
def test_a_number_is_the_shortest_text_that_its_precision_tells_apart(kind, answers, tmp_path):
    """In a row of JSON, or in a column of a table."""
    names, values = [f"{n}?" for n in range(len(answers))], [value for value, _ in answers]
    if kind is None:
        rows = [{"question": q, "answer": a} for q, a in zip(names, values, strict=True)]
        path = written(tmp_path / "my.jsonl", rows)
    else:
        path = tmp_path / "my.parquet"
        pq.write_table(pa.table({"question": names, "answer": np.array(values, kind)}), path)
    study = configured(path, f"dataset.study_size={len(names)}", entry="mse")
    found = {q.text: q.answer for q in make_task(study.task_options).questions("study")}
    assert [found[name] for name in names] == [text for _, text in answers]
