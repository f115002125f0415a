from __future__ import annotations

from collections import Counter

import pytest

from grpo_ustat.config.data import STUDY_QUESTIONS
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.tasks.base import NumberJudge, Task
from grpo_ustat.tasks.one_step import OneStep, draw, exercises
from grpo_ustat.tasks.prompts import Prompting

NAMES = ("one_digit_product", "one_digit_sum", "plus_one", "plus_digit")
SIZES = {"train": 24, "test": 15, "study": 24}
RESULTS = {"*": lambda a, b: a * b, "+": lambda a, b: a + b}


def task(name, shots=4, seed=0, **sizes):
    source = OneStep([name], SIZES | {"examples": shots} | sizes, seed, seed)
    examples = tuple(source.questions("examples"))
    return Task(source, Prompting("{question} = ", "{answer}\n", examples), NumberJudge())


@pytest.mark.parametrize("name, count", list(zip(NAMES, (81, 81, 90, 810), strict=True)))
def test_answers_are_right_and_every_question_has_one_split(name, count):
    found = exercises([name])
    assert len({q.text for q in found}) == len(found) == count
    for question in found:
        left, sign, right = question.text.split()
        assert RESULTS[sign](int(left), int(right)) == question.answer
    splits = {q.canonical: q.split for q in found}
    assert all(splits[q.canonical] == q.split for q in found)
    forms = {frozenset(q.text.split()): q.canonical for q in found}  # 3 + 7 is 7 + 3
    assert all(forms[frozenset(q.text.split())] == q.canonical for q in found)


@pytest.mark.parametrize("name", NAMES)
def test_splits_and_solved_lines_share_no_arithmetic(name):
    sizes = Counter(q.split for q in exercises([name]))
    assert sizes["study"] == STUDY_QUESTIONS[name]
    drawn = [draw([name], split, sizes[split], 0) for split in SIZES]
    drawn += [draw([name], "examples", 7, 0)]
    forms = [{q.canonical for q in found} for found in drawn]
    assert all(not a & b for i, a in enumerate(forms) for b in forms[:i])
    assert len(forms[-1]) == 7


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_the_same_solved_lines_and_one_question(name):
    prompts = [p for split in SIZES for p in task(name).prompts(split)]
    heads = {p.text.removesuffix(f"{p.question} = ") for p in prompts}
    assert len(heads) == 1
    lines = heads.pop().splitlines(keepends=True)
    assert lines == [f"{q.text} = {q.answer}\n" for q in draw([name], "examples", 4, 0)]


def test_an_id_is_the_question_whatever_the_shots_and_seed():
    few, more = task("plus_one"), task("plus_one", shots=7, seed=3, study=31)
    ids = [p.id for p in few.prompts("study")]
    assert ids == [p.question for p in few.prompts("study")]
    assert set(ids) < {p.id for p in more.prompts("study")}
    assert ids[:5] == [p.id for p in task("plus_one", study=5).prompts("study")]
    assert ids != [p.id for p in task("plus_one", seed=1).prompts("study")]


def test_only_the_right_integer_counts():
    found = {p.question: p for split in SIZES for p in task("one_digit_product").prompts(split)}
    prompt = next(p for p in found.values() if p.answer == "56")
    right = ["56", "56\n", " 56\n\n", "\n56", "56."]
    wrong = ["", "\n", "5", "560", "56 and", "5 6", "56\n7", "7 * 8", "= 56", "56, 56",
             "7 * 8 = 56", "٥٦", "5_6"]  # fmt: skip
    found = task("one_digit_product").rewards([prompt] * 18, right + wrong)
    assert found == [1] * 5 + [0] * 13


@pytest.mark.parametrize("asked, message", [
    ({"study": 32}, "dataset.study_size=32, but plus_one has 31: use 31 or less"),
    ({"test": 19}, "dataset.test_size=19, but plus_one has 16: use"),
    ({"examples": 19}, "prompt.shots=19, but plus_one has 18: use"),
])  # fmt: skip
def test_more_than_exist_are_refused_with_both_numbers(asked, message):
    with pytest.raises(ConfigError, match=message):
        task("plus_one", **asked)


def test_two_tables_are_one_data_set_without_common_questions():
    both = OneStep(["one_digit_product", "one_digit_sum"], {"study": 53, "examples": 14}, 0)
    kinds = Counter(q.kind for q in both.questions("study"))
    assert kinds == {"one_digit_product": 29, "one_digit_sum": 24}
    assert len({q.text for q in both.questions("study") + both.questions("examples")}) == 67
