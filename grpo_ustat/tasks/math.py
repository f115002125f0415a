"""MATH: competition problems with worked solutions (Hendrycks et al. 2021)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from grpo_ustat.config.data import MathConfig
from grpo_ustat.config.row_files import Row
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.records import Question
from grpo_ustat.tasks.answers import last_boxed
from grpo_ustat.tasks.rows import train_and_test
from grpo_ustat.tasks.splits import Splits, question_id


def math(
    dataset: MathConfig,
    sizes: Mapping[str, int | None],
    examples_seed: int,
    *,
    verbatim: bool = False,
) -> Splits:
    """Create the splits of MATH; `verbatim` keeps leading and trailing white space."""
    train_rows, test_rows = train_and_test(dataset)
    counts: Counter[str] = Counter()
    every_test = {question_id("math", row.text("problem")) for row in test_rows}
    train_rows = _filtered(train_rows, dataset, "train", counts)
    if dataset.filter_test:
        test_rows = _filtered(test_rows, dataset, "test", counts)
    if dataset.test_ids is not None:
        test_rows = _listed(test_rows, dataset.test_ids, counts)
    train = _answered(train_rows, "train", counts, verbatim)
    test = _answered(test_rows, "test", counts, verbatim)
    return Splits(train, test, sizes, dataset.seed, examples_seed, every_test, counts)


def question_of(row: Row, verbatim: bool = False) -> Question:
    """Return the question of a row.

    If the row has no answer, the answer is the content of the last box in the solution, or empty if
    there is no box.
    """
    text, solution = row.text("problem"), row.text("solution")
    if not verbatim:
        text, solution = text.strip(), solution.strip()
    answer_field = row.value("answer") if row.has("answer") else ""
    if not isinstance(answer_field, str):
        raise row.refused("answer", answer_field, "a text")
    answer = answer_field.strip() or boxed(solution).strip()
    name = question_id("math", text, verbatim=verbatim)
    return Question(name, text, answer, subject_of(row), solution)


def boxed(solution: str) -> str:
    r"""Return the content of the last box in a solution, or "" if there is none.

    The content can follow `\boxed` without braces, as in `\boxed 5`.

    >>> boxed(r"so $\boxed{\frac{1}{2}}$"), boxed(r"so $x = \boxed 5$."), boxed("so 5")
    ('\\frac{1}{2}', '5', '')
    """
    content = last_boxed(solution, len(solution))
    bare = re.findall(r"\\boxed ([^{}$]+)\$", solution)
    return content if content is not None else (bare or [""])[-1]


def subject_of(row: Row) -> str:
    """Return the row's `subject`, which some copies of the data set call `type`."""
    return row.text("subject", "type").strip()


def level_of(row: Row) -> int | None:
    """Return the level from 1 to 5, or None for `Level ?`.

    Rows state the level as a number or in the form `Level 3`.
    """
    value = row.value("level")
    match = re.fullmatch(r"(?:Level )?([1-5?])", str(value).strip())
    if not match:
        raise row.refused("level", value, "1 to 5, or Level 1 to Level 5")
    return None if match[1] == "?" else int(match[1])


def _filtered(rows: list[Row], dataset: MathConfig, name: str, counts: Counter[str]) -> list[Row]:
    subjects, levels = dataset.subjects, dataset.levels
    if subjects is not None:
        available = {subject_of(row) for row in rows}
        for subject in set(subjects) - available:
            raise ConfigError(
                f"dataset.subjects names {subject!r}, which no {name} row has: use one of "
                f"{', '.join(sorted(available))}"
            )
    of_subjects = [row for row in rows if subjects is None or subject_of(row) in subjects]
    counts[f"{name} questions of other subjects"] += len(rows) - len(of_subjects)
    fitting = [row for row in of_subjects if levels is None or level_of(row) in levels]
    counts[f"{name} questions of other levels"] += len(of_subjects) - len(fitting)
    return fitting


def _listed(rows: list[Row], file: str, counts: Counter[str]) -> list[Row]:
    """Return the rows whose `unique_id` is in a file, which has one id per line."""
    try:
        ids = set(Path(file).expanduser().read_text("utf-8-sig").split("\n")) - {""}
    except (OSError, ValueError) as error:
        raise ConfigError(f"dataset.test_ids={file} cannot be read: {error}") from error
    named_rows = [row for row in rows if row.text("unique_id").strip() in ids]
    missing = ids - {row.text("unique_id").strip() for row in named_rows}
    if missing or not ids:
        raise ConfigError(
            f"dataset.test_ids={file} names {len(ids)} rows, but {len(missing)} of them are not "
            f"test rows, such as {min(missing, default='')!r}: use the unique_id of test rows"
        )
    counts["test questions that test_ids does not name"] += len(rows) - len(named_rows)
    return named_rows


def _answered(rows: list[Row], name: str, counts: Counter[str], verbatim: bool) -> list[Question]:
    questions = [question_of(row, verbatim) for row in rows]
    answered = [question for question in questions if question.answer]
    counts[f"{name} questions without an answer"] += len(questions) - len(answered)
    return answered
