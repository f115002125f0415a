"""Scripts beside the entrypoints."""

from __future__ import annotations

import ast
import csv
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from launching import finished

from grpo_ustat.mse import study

SCRIPTS = Path(__file__).parents[2] / "scripts"


COMMANDS = sorted(
    path
    for folder in ("benchmarks", "tools")
    for path in (SCRIPTS / folder).glob("*.py")
    if "__main__" in path.read_text() and path.stem != "trl_worker"  # which imports TRL
)


def test_only_what_a_shell_starts_is_at_the_top():
    top = {path.name for path in SCRIPTS.iterdir() if path.name != "__pycache__"}
    assert top == {"run", "test", "setup.sh", "slurm", "benchmarks", "tools"}


@pytest.mark.nightly
@pytest.mark.parametrize("script", COMMANDS, ids=lambda path: path.stem)
def test_its_help_says_what_it_does(script, execute):
    """Like the first sentence of its file, which names the result."""
    code, out, err = execute(script, "--help")
    assert code == 0, err
    first = ast.get_docstring(ast.parse(script.read_text())).splitlines()[0]
    assert " ".join(first.split()) in " ".join(out.split())


@pytest.fixture
def execute(monkeypatch, capfd):
    """A script as Python starts it, in this process: nothing is imported again."""

    def executed(script, *arguments):
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
        code = 0
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            code = ended.code or 0
        return code, *capfd.readouterr()

    return executed


ALONG = SCRIPTS / "tools/along_training.py"


@pytest.mark.nightly
def test_a_run_without_checkpoints_is_refused(tmp_path, execute):
    code, _, err = execute(ALONG, tmp_path)
    assert code == 2 and "has no checkpoint-* with a model: train first" in err
    assert execute(ALONG, tmp_path / "nowhere")[0] == 2


@pytest.mark.nightly
def test_constants_along_a_training_run(tmp_path, execute, monkeypatch):
    """The studies that it starts are forks, without their figures; see `launching`."""
    started = subprocess.run

    def fork(command, check):
        assert command[:3] == [sys.executable, "-m", "grpo_ustat.mse"] and check
        ended = finished("mse", *command[3:], cwd=tmp_path.parent, before=undrawn, seconds=600)
        print(ended[1])
        assert ended[0] == 0

    def undrawn():
        subprocess.run = started
        study.mse_figure = study.scaling_figure = lambda *_: None

    folder = tmp_path / "G-8/seed-0"  # as run folders are named
    trained = ("debug=train", "save_steps=1", f"hydra.run.dir={folder}")
    code, said = finished("train", *trained, cwd=tmp_path.parent, seconds=600)
    assert code == 0, said
    small = ("study.questions=8", "budget.pool_completions=8", "launch.workers=1")
    monkeypatch.setattr(subprocess, "run", fork)
    code, out, err = execute(ALONG, folder, *small)
    assert code == 0 and "is complete" not in " ".join(out.split()), err
    rows = list(csv.DictReader((folder / "scaling_along_training.csv").open()))
    assert [row["step"] for row in rows] == ["1", "2"]
    assert all(float(row["c3"]) > 0 for row in rows) and rows[0]["c3"] != rows[1]["c3"]
    assert (folder / "scaling_along_training.png").stat().st_size > 5000
    assert "is complete" in " ".join(execute(ALONG, folder, *small)[1].split())
