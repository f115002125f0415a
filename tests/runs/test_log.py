"""Tables of what a run writes."""

from __future__ import annotations

import subprocess
import sys

import pyarrow
import pytest

from grpo_ustat.runs.log import COLUMNS, arrow_table

ROWS = [
    {"step": 2**53 + 1, "prompt": 'a\nb\u2028"\\', "completion": "é\x00\x1b", "reward": 0.1 + 0.2},
    {"step": 1, "prompt": "x", "reward": 1, "advantage": -1e-320, "ended": True, "answer": None},
    {"step": 2, "reward": float("nan"), "advantage": float("-inf")},
]


@pytest.mark.parametrize("rows", [[], ROWS, ROWS * 5000])
def test_a_table_is_the_one_that_arrow_makes_of_its_rows(rows):
    table = arrow_table(rows, COLUMNS)
    assert table.schema == COLUMNS
    assert repr(table.to_pylist()) == repr(
        pyarrow.Table.from_pylist(rows, schema=COLUMNS).to_pylist()
    )


@pytest.mark.parametrize("row", [{"stop": 1}, {"step": 1.5}, {"step": "one"}, {"ended": 1}])
def test_another_column_or_type_is_refused(row):
    with pytest.raises(ValueError):
        arrow_table([row], COLUMNS)


@pytest.mark.slow(minutes=0.02)
def test_no_run_imports_pandas_for_it():
    code = (
        "import sys; from grpo_ustat.runs.log import COLUMNS, arrow_table\n"
        "for rows in ([], [{'step': 1, 'prompt': 'x'}]): arrow_table(rows, COLUMNS)\n"
        "assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
