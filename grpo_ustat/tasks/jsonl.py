"""Data set of a user: questions and answers from the rows of a file or folder.

Files can be JSON Lines, JSON or Parquet, with or without compression.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from grpo_ustat.config.data import JsonlConfig
from grpo_ustat.config.row_files import Row
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.records import Prompt, Question
from grpo_ustat.tasks.answers import MARK, after_thoughts
from grpo_ustat.tasks.base import spoken
from grpo_ustat.tasks.rows import rows_of_file
from grpo_ustat.tasks.splits import Splits, hold_out, question_id


class JsonlSource:
    """Source of questions from a user's files.

    If there is no test file, some rows are held out for tests. `counts` has the number of dropped
    rows by reason, and `note` states the number of questions in each split.

    Args:
        dataset: configuration of the data set.
        sizes: number of questions in `train`, `test`, `study` and `examples`; None for all
            remaining questions.
        examples_seed: seed with which the examples are drawn.
        verbatim: True to keep leading and trailing white space in questions and solutions.
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
        """Return the questions of a split; see `Source.questions`."""
        questions = self._splits.questions(split)
        if split != "examples" and not questions:
            raise ConfigError(
                f"{self.note}: no row is left for {split}: lower dataset.study_size or "
                "dataset.test_size"
            )
        return questions


def questions_of(
    key: str, files: list[Path], dataset: JsonlConfig, verbatim: bool = False
) -> list[Question]:
    """Read one question from each row of the files."""
    rows = (row for file in files for row in rows_of_file(file, key))
    return [_question(row, dataset, verbatim) for row in rows]


def _question(row: Row, dataset: JsonlConfig, verbatim: bool) -> Question:
    """Return a row's question.

    The expected answer is the text after the last #### in the answer column, or all its text.
    """
    text, solution = dataset.question_and_answer(row)
    if not verbatim:
        text, solution = text.strip(), solution.strip()
    expected = solution.rpartition(MARK)[2].strip()
    others = {k: v for k, v in row.fields.items() if k not in (dataset.question, dataset.answer)}
    name = question_id("jsonl", text, verbatim=verbatim)
    return Question(name, text, expected, "jsonl", solution, others, row.where)


class ExactJudge:
    """Judge that gives reward 1 if the answer is exactly the expected one, and 0 otherwise.

    Consecutive white space counts as one space. The answer of a completion is the text between its
    last #### and the end of that line. If there is no ####, the answer is the whole completion
    after its thoughts.
    """

    def __init__(self):
        self.counts: Counter[str] = Counter()

    def extract(self, completion: str) -> str | None:
        r"""Return the answer in a completion, or None if the answer is empty.

        >>> judge = ExactJudge()
        >>> judge.extract("3 + 4 #### 7 \nNext"), judge.extract(" a  b "), judge.extract(" ")
        ('7', 'a b', None)
        """
        _, mark, end = after_thoughts(completion).rpartition(MARK)
        return " ".join((end.split("\n")[0] if mark else end).split()) or None

    def rewards(self, prompts: list[Prompt], completions: list[str]) -> list[float]:
        """Return 1 for each completion with the expected answer and 0 for all others."""
        return [
            float(self.extract(text) == " ".join(prompt.answer.split()))
            for prompt, text in zip(prompts, spoken(prompts, completions), strict=True)
        ]
