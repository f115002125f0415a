"""Scripts beside the entrypoints."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from test_config import run

SCRIPTS = Path(__file__).parents[1] / "scripts"


def along(*arguments):
    command = [sys.executable, str(SCRIPTS / "along_training.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_a_run_without_checkpoints_is_refused(tmp_path):
    done = along(tmp_path)
    assert done.returncode == 2 and "has no checkpoint-* with a model: train first" in done.stderr
    assert along(tmp_path / "nowhere").returncode == 2


@pytest.mark.slow
def test_constants_along_a_training_run(tmp_path):
    code, _, err = run(
        "train", "debug=train", "save_steps=1", f"hydra.run.dir={tmp_path}", cwd=tmp_path
    )
    assert code == 0, err
    small = ("study.questions=8", "budget.pool_completions=8", "launch.workers=1")
    done = along(tmp_path, *small)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "scaling_along_training.csv").open()))
    assert [row["step"] for row in rows] == ["1", "2"]
    assert all(float(row["c3"]) > 0 for row in rows) and rows[0]["c3"] != rows[1]["c3"]
    assert (tmp_path / "scaling_along_training.png").stat().st_size > 5000
    assert "is complete" in along(tmp_path, *small).stdout
