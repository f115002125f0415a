"""MATH's schema on fifteen own rows: 11 for training, 4 for tests, one of them in both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_ustat.config.data import MathConfig
from grpo_ustat.config.row_files import Row
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.tasks.math import boxed, level_of, math, question_of
from grpo_ustat.tasks.rows import Origin

FOLDER = Path(__file__).parents[1] / "data" / "math"
SOLVED = "Solve $4x-9=23$ for $x$."  # in train and, with another space, in test


def config(path=FOLDER, **fields):
    names = ("subset", "revision", "test_path", "test_revision", "subjects", "levels", "test_ids")
    sizes = {"train_size": None, "test_size": None, "study_size": 1}
    judge = {"max_answer_length": 300, "judge_seconds": 2.0, "judge_memory_gb": 2.0}
    named = {"name": "math", "kind": "math", "seed": 0, "reward": None, "filter_test": False}
    splits = {"train_split": "train", "test_split": "test"}
    return MathConfig(
        **dict.fromkeys(names) | sizes | judge | named | splits | fields, path=str(path)
    )


def found(**fields):
    """(texts of all train rows that are left, texts of the test rows, what was left out)."""
    dataset = config(**fields)
    dataset.check()
    source = math(dataset, {"train": None, "test": None, "study": 1, "examples": 0}, 0)
    train = {q.text for split in ("study", "train") for q in source.questions(split)}
    return train, {q.text for q in source.questions("test")}, dict(+source.counts)


def test_without_filters_by_hand():
    train, test, counts = found()
    assert len(train) == 9 and len(test) == 4 and SOLVED not in train
    assert counts == {
        "train questions without an answer": 1,
        "train questions that are also test questions": 1,
    }


@pytest.mark.parametrize("fields, expected, other_subjects, other_levels", [
    ({"levels": [3, 4, 5]}, 5, 0, 5),  # one more of level 4 has no answer
    ({"levels": [1]}, 1, 0, 9),  # of two, the other is a test question
    ({"subjects": ["Algebra"]}, 3, 7, 0),
    ({"subjects": ["Algebra", "Geometry"], "levels": [3, 5]}, 4, 5, 2),
    ({"subjects": ["Geometry"]}, 2, 9, 0),  # with the one of `Level ?`
    ({"subjects": ["Geometry"], "levels": [1, 2, 3, 4, 5]}, 1, 9, 1),
])  # fmt: skip
def test_filters_by_hand(fields, expected, other_subjects, other_levels):
    train, test, counts = found(**fields)
    assert len(train) == expected and len(test) == 4
    assert counts.get("train questions of other subjects", 0) == other_subjects
    assert counts.get("train questions of other levels", 0) == other_levels


def test_a_test_question_that_a_filter_took_is_not_trained_on():
    train, test, counts = found(levels=[1, 2], filter_test=True)
    assert test == {"Find the slope of the line through $(2,5)$ and $(6,17)$."}
    assert len(train) == 3 and SOLVED not in train  # of level 1 as a train row, 3 as a test row
    assert counts["test questions of other levels"] == 3


def test_ids_choose_test_rows(tmp_path):
    listed = tmp_path / "ids.txt"
    listed.write_text("test/algebra/1.json\ntest/precalculus/3.json\n")
    train, test, counts = found(test_ids=str(listed))
    assert len(test) == 2 and SOLVED not in train | test
    assert counts["test questions that test_ids does not name"] == 2
    listed.write_text("test/algebra/1.json\ntest/algebra/77.json\n")
    with pytest.raises(ConfigError, match="2 rows, .* 1 .*'test/a"):
        found(test_ids=str(listed))
    listed.write_text("\n")
    with pytest.raises(ConfigError, match="names 0 rows"):
        found(test_ids=str(listed))
    listed.write_text("test/algebra/1.json\n")
    with pytest.raises(ConfigError, match="train.jsonl row 1: field unique_id "):
        found(test_path=str(FOLDER / "train.jsonl"), test_ids=str(listed))


def test_answers_and_kinds_by_hand():
    rows = Origin("k", str(FOLDER)).rows("train")
    answers = [question_of(row).answer for row in rows]
    assert answers == [
        "84", r"\frac{31}{2}", "8", "14", "(x-8)(x+3)", "126", "2", "12", "4", "18", ""
    ]  # fmt: skip
    assert [level_of(row) for row in rows] == [1, 2, 1, 3, 3, 5, 4, 2, 5, None, 4]
    tests = Origin("k", str(FOLDER)).rows("test")
    assert [question_of(row).kind for row in tests][:2] == ["Algebra", "Counting & Probability"]
    assert [level_of(row) for row in tests] == [2, 4, 5, 3]


def test_a_given_answer_goes_before_the_box_and_an_empty_one_does_not():
    def answer(given):
        fields = {"problem": "p", "solution": r"$\boxed{5}$", "subject": "Algebra", "answer": given}
        return question_of(Row(fields, "row 1")).answer

    assert [answer(given) for given in ("6", "", " ", None)] == ["6", "5", "5", "5"]
    assert boxed(r"no box, $5$") == ""


@pytest.mark.parametrize("fields, match", [
    ({"levels": [6]}, "dataset.levels=.6.: MATH has levels 1 to 5"),
    ({"levels": []}, "dataset.levels=.. keeps no row: use null"),
    ({"subjects": []}, "dataset.subjects=.. keeps no row"),
    ({"subjects": ["algebra"]}, "'algebra', which no train row has: use one of Algebra, Geo"),
    ({"subjects": ["Prealgebra"], "filter_test": True}, "'Prealgebra', which no test row has"),
    ({"test_ids": "nowhere.txt"}, "dataset.test_ids=nowhere.txt: no such file"),
    ({"subjects": ["Precalculus"]}, "dataset.study_size=1, but only 0 different questions"),
])  # fmt: skip
def test_wrong_options_are_refused(fields, match):
    with pytest.raises(ConfigError, match=match):
        found(**fields)


@pytest.mark.parametrize("change, match", [
    ({"level": "Level 7"}, "train.jsonl row 2: field level is 'Level 7', it must be 1 to 5"),
    ({"level": "hard"}, "row 2: field level is 'hard'"),
    ({"level": None}, "row 2: field level is missing, the row has"),
    ({"type": None}, "row 2: field subject or type is missing, the row has problem"),
    ({"solution": ""}, "row 2: field solution is '', it must be non-empty text"),
    ({"answer": 31}, "row 2: field answer is 31, it must be a text"),
])  # fmt: skip
def test_a_wrong_field_is_named(change, match, tmp_path):
    rows = [json.loads(line) for line in (FOLDER / "train.jsonl").read_text().splitlines()]
    rows[1] |= change
    bad = tmp_path / "train.jsonl"
    bad.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=match):
        found(path=bad, test_path=str(FOLDER / "test.jsonl"), levels=[2, 3, 4, 5])
