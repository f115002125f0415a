from __future__ import annotations

import ast
import itertools
import operator
import re
import sys
from pathlib import Path

import pytest

from grpo_ustat.tasks.answers import final_number
from grpo_ustat.tasks.arithmetic import KINDS, Arithmetic, Exercise, Ranges, draw, worked
from grpo_ustat.tasks.base import NumberJudge, Task
from grpo_ustat.tasks.prompts import Prompting

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/tools"))
from train_tiny import Writer, answer  # noqa: E402

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(node):
    """The value of our own question texts, by walking their syntax tree; no eval."""
    if isinstance(node, ast.Expression):
        return calculate(node.body)
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp):
        return -calculate(node.operand)
    left, right = calculate(node.left), calculate(node.right)
    if isinstance(node.op, ast.Div):
        assert left % right == 0
        return left // right
    return OPERATORS[type(node.op)](left, right)


def value(text):
    return calculate(ast.parse(text, mode="eval"))


@pytest.fixture(scope="module")
def questions():
    return {split: draw(split, 500, Ranges(), 0) for split in ("train", "test", "study")}


def test_answers_are_right(questions):
    for question in [q for found in questions.values() for q in found]:
        assert value(question.text) == question.answer


def test_kinds_are_drawn_uniformly_and_look_as_named(questions):
    shapes = {
        "two_step": r"\d+([+-]\d+){2}",
        "three_step": r"\d+([+-]\d+){3}",
        "multiplication": r"\d+\*\d+",
        "division": r"\d+/\d+",
        "parentheses": r"\d+[+-]\(\d+[+-]\d+\)|\(\d+[+-]\d+\)[+-]\d+",
    }
    for found in questions.values():
        for kind in KINDS:
            of_kind = [q for q in found if q.kind == kind]
            assert 65 <= len(of_kind) <= 140  # 100 +- 4 standard deviations of 9
            assert all(re.fullmatch(shapes[kind], q.text) for q in of_kind)


def test_splits_share_no_arithmetic(questions):
    forms = [{q.canonical for q in found} for found in questions.values()]
    assert not any(a & b for a, b in itertools.combinations(forms, 2))


def test_questions_are_distinct_and_seeded(questions):
    again = draw("study", 500, Ranges(), 0)
    assert again == questions["study"]
    assert len({q.text for q in again}) == 500
    assert draw("study", 50, Ranges(), 1) != again[:50]


def test_the_same_arithmetic_has_one_canonical_form():
    def form(kind, text, operands, inside=None):
        return Exercise(kind, text, 0, operands, inside).canonical

    product = form("multiplication", "3*7", (3, 7))
    assert product == form("multiplication", "7*3", (7, 3)) == form("division", "21/7", (3, 7))
    minus = form("parentheses", "9-(4+2)", (9, -4, 2), 1)
    assert minus == form("two_step", "9-2-4", (9, -2, -4))
    assert form("parentheses", "9-(4-2)", (9, -4, -2), 1) == form("two_step", "9+2-4", (9, 2, -4))
    assert form("parentheses", "(9-4)+2", (9, -4, 2), 0) == form("two_step", "2+9-4", (2, 9, -4))
    assert form("parentheses", "9+(4-2)", (9, 4, -2), 1) == form("two_step", "4+9-2", (4, 9, -2))


def test_too_narrow_ranges_are_refused():
    with pytest.raises(ValueError, match="500 distinct study questions"):
        draw("study", 500, Ranges(1, 3, 11, 13, 2, 3), 0)


def test_an_echoed_question_scores_nothing(questions):
    source = Arithmetic(Ranges(), {"study": 500}, 0)
    task = Task(source, Prompting("{question}="), NumberJudge())
    for prompt in task.prompts("study"):
        wrong = (prompt.question, prompt.text, f"#### {prompt.question}", prompt.text * 2)
        texts = [prompt.answer, *wrong, f"{prompt.text}{prompt.answer}"]
        assert task.rewards([prompt] * len(texts), texts) == [1] + [0] * (len(texts) - 1)


def test_examples_are_solved_step_by_step_and_are_nowhere_else():
    source = Arithmetic(Ranges(), {"train": 300, "test": 9, "study": 9, "examples": 60}, 0, 1)
    examples = source.questions("examples")
    others = {q.text for split in ("train", "test", "study") for q in source.questions(split)}
    assert len({q.text for q in examples} - others) == 60
    assert {q.kind for q in examples} == set(KINDS)
    for question in examples:
        steps = re.findall(r"(-?\d+[-+*/]\d+)=(-?\d+)", question.solution)
        assert all(value(left) == int(right) for left, right in steps)
        assert steps[-1][1] == question.answer == question.solution.rpartition(" #### ")[2]
    again = Arithmetic(Ranges(), {"train": 300, "examples": 60}, 0, 2).questions("examples")
    assert again != examples


@pytest.mark.parametrize("exercise, solution", [
    (("two_step", "9-4+2", 7, (9, -4, 2)), "9-4=5, 5+2=7 #### 7"),
    (("parentheses", "9-(2-1)", 8, (9, -2, -1), 1), "2-1=1, 9-1=8 #### 8"),
    (("parentheses", "(4+2)-9", -3, (4, 2, -9), 0), "4+2=6, 6-9=-3 #### -3"),
    (("division", "84/7", 12, (12, 7)), "84/7=12 #### 12"),
    (("three_step", "1-5+2-3", -5, (1, -5, 2, -3)), "1-5=-4, -4+2=-2, -2-3=-5 #### -5"),
])  # fmt: skip
def test_worked_examples_by_hand(exercise, solution):
    assert worked(Exercise(*exercise)) == solution


def test_worked_solutions_are_right_in_every_step(questions):
    writer = Writer(0, chatty=True)
    for question in questions["train"]:
        text = writer.solution(question)
        assert final_number(text) == question.answer == int(answer(question))
        assert len(text) <= 90
        for left, right in re.findall(r"(-?\d+ ?[-+*/] ?-?\d+) ?=(-?\d+)", text):
            assert value(left.replace(" ", "")) == int(right)
