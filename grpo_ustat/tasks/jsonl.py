"""Rows of a user's own file or folder, each with a question and an answer: json lines, json or
Parquet, plain or compressed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from grpo_ustat.config.data import JsonlConfig
from grpo_ustat.config.row_files import json_rows, kind_of, text_of, unreadable
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.records import Prompt, Question
from grpo_ustat.tasks.answers import MARK, after_thoughts
from grpo_ustat.tasks.base import spoken
from grpo_ustat.tasks.rows import Row, rows_of_file
from grpo_ustat.tasks.splits import Splits, hold_out, question_id
from grpo_ustat.terminal.streams import SURROGATE

LARGEST_EXACT_FLOAT = 2**53  # a whole float below it is one integer; pandas writes 3 as 3.0


class JsonlSource:
    """The questions of a file's rows; where there is no test file, some rows are held out.

    Args:
        dataset: its configuration.
        sizes: how many of `train`, `test`, `study` and `examples`; None: all that are left.
        examples_seed: of the examples.
        verbatim: whether white space at the ends of questions and solutions stays.

    Attributes:
        counts: of rows that were left out, by reason.
        note: how many questions each split has.

    Raises:
        ConfigError: a row cannot be used; names file, row and column.
    """

    def __init__(
        self,
        dataset: JsonlConfig,
        sizes: Mapping[str, int | None],
        examples_seed: int,
        *,
        verbatim: bool = False,
    ):
        self._dataset = dataset
        rows = questions_of("dataset.path", dataset.train_files, dataset, verbatim)
        if dataset.test_files:
            tests = questions_of("dataset.test_path", dataset.test_files, dataset, verbatim)
        else:
            rows, tests = hold_out(rows, dataset.test_size or 0, dataset.seed)
            sizes = {**sizes, "test": None}
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


def questions_of(
    key: str, files: list[Path], dataset: JsonlConfig, verbatim: bool = False
) -> list[Question]:
    """The questions of files, one a row.

    Raises:
        ConfigError: a file cannot be read, or a row has no question or no answer; names file and
            row.
    """
    return [_question(row, dataset, verbatim) for file in files for row in rows_of(key, file)]


def rows_of(key: str, file: Path) -> list[Row]:
    """The rows of a file; blank lines count, but hold none.

    Json is read by Python's reader, for which 3 and 3.0 are two things in every row. A number of
    single precision in a Parquet file is the shortest that rounds to it: 0.1, not 0.10000000149.

    Raises:
        ConfigError: the file cannot be read, or a row is no object, or has what json and text files
            cannot hold.
    """
    if kind_of(file) == "parquet":
        rows = rows_of_file(file)
        for name, single in _single_precision(file).items():
            for row in rows:
                if row.fields[name] is not None:
                    row.fields[name] = float(str(single(row.fields[name])))
        return [_checked(row) for row in rows]
    try:
        numbered = json_rows(text_of(file))
    except Exception as error:
        raise unreadable(key, file, error) from error
    return [_row(content, f"{file} row {number}") for number, content in numbered]


def _single_precision(file: Path) -> dict[str, Any]:
    """NumPy's type of each column of a Parquet file that is of single or half precision."""
    if file.suffix != ".parquet":  # a compressed one, whose columns are read as they are
        return {}
    parquet: Any = import_module("pyarrow.parquet")
    types = {one.name: one.type for one in parquet.read_schema(file)}
    return {
        name: kind.to_pandas_dtype() for name, kind in types.items()
        if str(kind) in ("float", "halffloat")
    }  # fmt: skip


def _row(content: Any, where: str) -> Row:
    """A row from its line, or from what a json file has for it."""
    try:
        fields = json.loads(content) if isinstance(content, str) else content
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no json: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} is {fields!r:.60}, it must be an object with named fields")
    return _checked(Row(fields, where))


def _checked(row: Row) -> Row:
    """The row.

    Raises:
        ConfigError: it holds what is no number, or half of a character.
    """
    for name, value in row.fields.items():
        for part in (name, *_parts(value)):
            if isinstance(part, float) and not math.isfinite(part):
                raise row.refused(name, part, "a finite number, or null")
            if isinstance(part, str) and SURROGATE.search(part):
                raise row.refused(name, part, "a text of whole characters")
    return row


def _parts(value: Any) -> Iterator[Any]:
    """A value, or all that it holds."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting += [*part, *part.values()]
        elif isinstance(part, list):
            waiting += part
        else:
            yield part


def _question(row: Row, dataset: JsonlConfig, verbatim: bool) -> Question:
    """A row's question; what stands behind the last #### of its answer is the expected one."""
    text, answer = row.text(dataset.question), row.value(dataset.answer)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise row.refused(dataset.answer, answer, "a text or a number")
    if isinstance(answer, float) and answer.is_integer() and abs(answer) < LARGEST_EXACT_FLOAT:
        answer = int(answer)
    solution = str(answer)
    if not verbatim:
        text, solution = text.strip(), solution.strip()
    expected = solution.rpartition(MARK)[2].strip()
    if not expected:
        raise row.refused(dataset.answer, answer, "a text that is not empty")
    others = {k: v for k, v in row.fields.items() if k not in (dataset.question, dataset.answer)}
    name = question_id("jsonl", text, verbatim=verbatim)
    return Question(name, text, expected, "jsonl", solution, others, row.where)


class ExactJudge:
    """1 for the expected answer as it is written, else 0; white space counts as one blank.

    The answer of a completion is what stands behind its last #### on that line, else all of it but
    its thoughts.
    """

    def __init__(self):
        self.counts: Counter[str] = Counter()

    def extract(self, completion: str) -> str | None:
        r"""See `Judge.extract`.

        >>> judge = ExactJudge()
        >>> judge.extract("3 + 4 #### 7 \nNext"), judge.extract(" a  b "), judge.extract(" ")
        ('7', 'a b', None)
        """
        _, mark, end = after_thoughts(completion).rpartition(MARK)
        return " ".join((end.split("\n")[0] if mark else end).split()) or None

    def rewards(self, prompts: list[Prompt], completions: list[str]) -> list[float]:
        """See `Judge.rewards`."""
        return [
            float(self.extract(text) == " ".join(prompt.answer.split()))
            for prompt, text in zip(prompts, spoken(prompts, completions), strict=True)
        ]
