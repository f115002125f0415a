"""Rows of files that grow: what is whole counts, what is not is counted."""

from __future__ import annotations

import pytest

from grpo_ustat.runs.files import read_rows


@pytest.mark.parametrize(
    "text, rows, damaged",
    [
        ("", [], 0),
        ('{"step": 1}\n{"step": 2}\n', [1, 2], 0),
        ('{"step": 1}\n{"st', [1], 0),  # being written, or cut off by a kill
        ('{"step": 1}\n{"st\n[2]\n{"step": 3}\n', [1, 3], 2),
        ('{"step": 1}\n\x00\n{"step": 2}', [1, 2], 1),
    ],
)
def test_whole_rows_are_read_and_others_counted(tmp_path, text, rows, damaged):
    (tmp_path / "rows.jsonl").write_text(text)
    found, count = read_rows(tmp_path / "rows.jsonl")
    assert ([row["step"] for row in found], count) == (rows, damaged)


def test_a_file_that_is_not_there_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "rows.jsonl") == ([], 0)
