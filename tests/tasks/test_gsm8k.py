"""GSM8K: all its rows are read, and every answer is the one of its own solution."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

import pytest

from grpo_ustat.config.row_files import Row
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.records import Prompt
from grpo_ustat.tasks.base import NumberJudge
from grpo_ustat.tasks.gsm8k import question_of
from grpo_ustat.tasks.rows import Origin

FOLDER = Path(__file__).parents[1] / "data" / "gsm8k"
SIZES = {"train": 7473, "test": 1319}


@pytest.fixture(scope="module")
def rows():
    return {split: Origin("dataset.path", str(FOLDER)).rows(split) for split in SIZES}


def question(answer):
    return question_of(Row({"question": "How many?", "answer": answer}, "rows.jsonl row 1"))


def test_the_copy_is_the_source_byte_for_byte():
    card = (FOLDER / "README.md").read_text()
    for split in SIZES:
        content = gzip.decompress((FOLDER / f"{split}.jsonl.gz").read_bytes())
        assert f"`{hashlib.sha256(content).hexdigest()}`" in card


@pytest.mark.slow
@pytest.mark.parametrize("split", SIZES)
def test_every_row_parses_and_every_gold_scores_1_against_its_own_solution(rows, split):
    found = [question_of(row) for row in rows[split]]
    assert len(found) == len({q.id for q in found}) == SIZES[split]
    judge = NumberJudge()
    prompts = [Prompt(q.id, q.text, q.text, q.answer, q.kind) for q in found]
    assert judge.rewards(prompts, [q.solution for q in found]) == [1.0] * len(found)
    written = [row.fields["answer"] for row in rows[split]]
    assert judge.rewards(prompts, written) == [1.0] * len(found)
    assert all(re.fullmatch(r"-?\d+", q.answer) for q in found)
    assert not any("<<" in q.solution or ">>" in q.solution for q in found)
    wrong = judge.rewards(prompts, [q.solution + "1" for q in found])
    assert sum(wrong) == 0


def test_a_solution_without_its_annotations_by_hand(rows):
    first = question_of(rows["train"][0])
    assert first.text.startswith("Natalia sold clips to 48 of her friends in April")
    assert first.answer == "72"
    assert first.solution == (
        "Natalia sold 48/2 = 24 clips in May.\n"
        "Natalia sold 48+24 = 72 clips altogether in April and May.\n#### 72"
    )


def test_answers_by_hand():
    found = [question(f"So it is.\n#### {end}").answer for end in ("1,070", "-5", "109,200,000 ")]
    assert found == ["1070", "-5", "109200000"]
    assert question("#### 3 is no answer\n#### 4").answer == "4"


@pytest.mark.parametrize("answer", [
    "72", "#### ", "#### four", "#### x = 3", "#### 3 or 4", "#### 1,23", "5 ####",
])  # fmt: skip
def test_an_answer_that_is_no_number_is_refused(answer):
    with pytest.raises(ConfigError, match="rows.jsonl row 1: field answer "):
        question(answer)


def test_an_id_is_the_question_alone(rows):
    row = rows["train"][0]
    other = Row({"question": row.fields["question"].upper(), "answer": "#### 3"}, "elsewhere row 9")
    assert question_of(row).id == question_of(other).id
    assert re.fullmatch(r"gsm8k-[0-9a-f]{12}", question_of(row).id)


def test_a_unit_behind_the_answer_is_read_over_in_golds_and_completions():
    for end in ("45 dollars", "45 eggs", r"$45", "45.00"):
        assert question(f"So it is.\n#### {end}").answer == "45"
    prompt = Prompt("1", "How many?", "How many?", "9500", "gsm8k")
    assert NumberJudge().rewards([prompt] * 2, ["#### 9,500 eggs", "#### 9 thousand"]) == [1, 0]
