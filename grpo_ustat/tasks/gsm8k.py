"""GSM8K: grade-school word problems (Cobbe et al. 2021)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from grpo_ustat.config.data import Gsm8kConfig
from grpo_ustat.config.row_files import Row
from grpo_ustat.records import Question
from grpo_ustat.tasks.answers import MARK, measured, plain
from grpo_ustat.tasks.rows import train_and_test
from grpo_ustat.tasks.splits import Splits, question_id

# Calculator annotation of GSM8K's solutions, such as <<48/2=24>> in 48/2 = <<48/2=24>>24.
_ANNOTATION = re.compile(r"<<[^<>]*>>")


def gsm8k(
    dataset: Gsm8kConfig,
    sizes: Mapping[str, int | None],
    examples_seed: int,
    *,
    verbatim: bool = False,
) -> Splits:
    """Create the splits of GSM8K; `verbatim` keeps leading and trailing white space."""
    train, test = ([question_of(row, verbatim) for row in rows] for rows in train_and_test(dataset))
    return Splits(train, test, sizes, dataset.seed, examples_seed)


def question_of(row: Row, verbatim: bool = False) -> Question:
    """Return a row's question; calculator annotations are removed from the solution."""
    text, worked = row.text("question"), row.text("answer")
    if not verbatim:
        text, worked = text.strip(), worked.strip()
    _, mark, end = worked.rpartition(MARK)
    gold = measured(end, any_unit=True) if mark else None
    if gold is None:
        raise row.refused("answer", worked[-40:], f"a solution that ends with {MARK} and a number")
    solution = _ANNOTATION.sub("", worked)
    return Question(
        question_id("gsm8k", text, verbatim=verbatim), text, plain(gold), "gsm8k", solution
    )
