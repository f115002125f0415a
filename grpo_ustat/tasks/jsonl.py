"""Rows of a user's own file: a json object on each line, with a question and an answer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from grpo_ustat.config.data import JsonlConfig
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.records import Prompt, Question
from grpo_ustat.tasks.answers import MARK
from grpo_ustat.tasks.rows import Row
from grpo_ustat.tasks.splits import Splits, hold_out, question_id


class JsonlSource:
    """The questions of a file's rows; where there is no test file, some rows are held out.

    Args:
        dataset: its configuration.
        sizes: how many of `train`, `test`, `study` and `examples`; None: all that are left.
        examples_seed: of the examples.

    Attributes:
        counts: of rows that were left out, by reason.
        note: how many questions each split has.

    Raises:
        ConfigError: a row cannot be used; names file, row and column.
    """

    def __init__(self, dataset: JsonlConfig, sizes: Mapping[str, int | None], examples_seed: int):
        self._dataset = dataset
        rows = questions_of(dataset.path, dataset)
        if dataset.test_path is None:
            rows, tests = hold_out(rows, dataset.test_size or 0, dataset.seed)
            sizes = {**sizes, "test": None}
        else:
            tests = questions_of(dataset.test_path, dataset)
        self._splits = Splits(rows, tests, sizes, dataset.seed, examples_seed)
        self.counts: Counter[str] = self._splits.counts
        study, test, train = (len(self._splits.questions(s)) for s in ("study", "test", "train"))
        self.note = (
            f"{dataset.path}: {study} questions for studies (dataset.study_size), {test} for tests "
            f"(dataset.test_size), {train} to train on"
        )

    def questions(self, split: str) -> list[Question]:
        """See `Source.questions`.

        Raises:
            ConfigError: no row is left for it.
        """
        questions = self._splits.questions(split)
        if split != "examples" and not questions:
            raise ConfigError(
                f"{self.note}: no row is left for {split}, lower dataset.study_size or "
                "dataset.test_size"
            )
        return questions


def questions_of(path: str, dataset: JsonlConfig) -> list[Question]:
    """The questions of a file, one a row.

    Raises:
        ConfigError: a row is no object, or has no question or no answer; names file and row.
    """
    return [_question(row, dataset) for row in rows_of(path)]


def rows_of(path: str) -> list[Row]:
    """The rows of a file of json lines; blank lines count, but hold none.

    Raises:
        ConfigError: the file cannot be read, or a line is no object.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"dataset.path={path} cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path} row {number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} is no json: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{where} is {fields!r:.60}, it must be an object with named fields")
        rows.append(Row(fields, where))
    return rows


def _question(row: Row, dataset: JsonlConfig) -> Question:
    """A row's question; what stands behind the last #### of its answer is the expected one."""
    text, answer = row.text(dataset.question), row.value(dataset.answer)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise row.refused(dataset.answer, answer, "a text or a number")
    solution = str(answer).strip()
    expected = solution.rpartition(MARK)[2].strip()
    if not expected:
        raise row.refused(dataset.answer, answer, "a text that is not empty")
    others = {k: v for k, v in row.fields.items() if k not in (dataset.question, dataset.answer)}
    return Question(
        question_id("jsonl", text), text, expected, "jsonl", solution, others, row.where
    )


class ExactJudge:
    """1 for the expected answer as it is written, else 0; white space counts as one blank.

    The answer of a completion is what stands behind its last #### on that line, else all of it.
    """

    def __init__(self):
        self.counts: Counter[str] = Counter()

    def extract(self, completion: str) -> str | None:
        r"""See `Judge.extract`.

        >>> judge = ExactJudge()
        >>> judge.extract("3 + 4 #### 7 \nNext"), judge.extract(" a  b "), judge.extract(" ")
        ('7', 'a b', None)
        """
        _, mark, end = completion.rpartition(MARK)
        return " ".join((end.split("\n")[0] if mark else end).split()) or None

    def rewards(self, prompts: list[Prompt], completions: list[str]) -> list[float]:
        """See `Judge.rewards`."""
        return [
            float(self.extract(text) == " ".join(prompt.answer.split()))
            for prompt, text in zip(prompts, completions, strict=True)
        ]
