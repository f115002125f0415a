"""Rows of files that grow: what is whole counts, what is not is counted."""

from __future__ import annotations

import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from grpo_ustat.runs.files import atomic_write, read_rows, write_whole


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


@pytest.mark.parametrize("umask, mode", [(0o027, 0o640), (0o022, 0o644), (0o077, 0o600)])
def test_who_may_read_a_file_follows_from_the_umask(umask, mode, tmp_path):
    """Also of safetensors, which makes files that their owner alone may read."""
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "text", "x")
        for shared in (False, True):
            with atomic_write(tmp_path / f"tensors{shared}", shared) as staged:
                save_file({"x": np.zeros(2)}, staged)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {mode}
    assert len(list(tmp_path.iterdir())) == 3
