"""The check of a GPU runs on a CPU, prints and keeps its rows, and outlives a part that is cut."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly(minutes=1.7)

SCRIPT = Path(__file__).parents[2] / "scripts/benchmarks/check_gpu.py"


def check(*arguments):
    command = [sys.executable, SCRIPT, "--device", "cpu", "--shape", "tiny", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_part_has_rows(tmp_path):
    file = tmp_path / "rows.json"
    text = check("--json", file)
    result = json.loads(file.read_text())
    parts = {}
    for row in result["rows"]:
        parts.setdefault(row["part"], []).append(row)
    assert "not finished" not in text
    assert list(parts) == ["rates", "correct", "sampling", "scores", "update", "ranks", "study"]
    assert all(row["TFLOP/s"] > 0 for row in parts["rates"])
    assert parts["correct"][0]["exit code"] == 0
    kinds = [row["what"].rpartition(", ")[2] for row in parts["sampling"]]
    assert kinds == ["bfloat16", "TF32", "float32"] and len(parts["update"]) == 3
    for row in [*parts["sampling"], *parts["update"][:2]]:
        assert 0 < row["range"][0] <= row["tokens/s"] <= row["range"][1]
    assert all(row["Gram matrix off by"] < 0.1 for row in parts["scores"])
    assert len(parts["scores"]) == 6 and parts["ranks"][0]["steps"] == 2
    assert parts["study"][0]["A_0"] > 0 and parts["study"][0]["G*"] > 1
    assert set(result) == {"device", "torch", "transformers", "rows"}


def test_a_part_that_is_cut_is_said_to_be_and_the_next_one_runs(tmp_path):
    text = check("rates", "correct", "--minutes", "0.001")
    assert text.count("not finished: why stopped after 0.001 minutes") == 2
