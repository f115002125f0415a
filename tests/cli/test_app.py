"""Output folders that no file system allows are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import run

WAYS = {
    "mse": (("mse", "hydra.run.dir=/proc/x/y"), "/proc/x/y", "hydra.run.dir"),
    "train": (("train", "hydra.run.dir=/proc/x"), "/proc/x", "hydra.run.dir"),
    "gap": (("gap", "theorem=lemma6", "hydra.run.dir=/proc/x"), "/proc/x", "hydra.run.dir"),
    "report": (("report", "runs=a", "hydra.run.dir=/proc/x"), "/proc/x", "hydra.run.dir"),
    "a sweep": (("mse", "-m", "seed=0,1", "hydra.sweep.dir=/proc/x"), "/proc/x", "hydra.sweep.dir"),
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no /proc")
@pytest.mark.parametrize("words, folder, key", WAYS.values(), ids=WAYS)
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, words, folder, key):
    code, out, told = run(*words, cwd=tmp_path)
    assert (code, out) == (2, "")
    assert told == (
        f"error: the output folder {folder} cannot be created (No such file or directory): choose "
        f"another with {key}=DIR\n"
    )
    assert list(tmp_path.iterdir()) == []
