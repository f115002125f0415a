"""Scripts beside the entrypoints."""

from __future__ import annotations

import ast
import csv
import json
import runpy
import shutil
import subprocess
import symtable
import sys
from functools import cache
from pathlib import Path

import pytest
from launching import finished, without_figures

from grpo_ustat.mse import study

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
PYTHON = sorted(SCRIPTS.rglob("*.py"))

COMMANDS = [
    path
    for path in PYTHON
    if 'if __name__ == "__main__"' in path.read_text()
    and path.stem != "trl_worker"  # which imports TRL
]


def test_only_what_a_shell_starts_is_at_the_top():
    top = {path.name for path in SCRIPTS.iterdir() if path.name != "__pycache__"}
    assert top == {"run", "test", "setup.sh", "slurm", "benchmarks", "tools", "typings"}


@cache
def names_of(module):
    """Names in a module of this repository, submodules too; None for what is no module of it."""
    for folder in (ROOT, SCRIPTS / "benchmarks", SCRIPTS / "tools", ROOT / "tests/helpers"):
        place = folder.joinpath(*module.split("."))
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.is_file():
                symbols = symtable.symtable(file.read_text(), str(file), "exec").get_symbols()
                return {symbol.get_name() for symbol in symbols} | {x.stem for x in place.glob("*")}
    return None


@pytest.mark.parametrize("script", PYTHON, ids=lambda path: path.stem)
def test_the_names_that_it_takes_are_there(script):
    """Imported by name, or read from or set in a module that is imported."""
    nodes, taken, imported = [*ast.walk(ast.parse(script.read_text()))], set(), {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            parts = node.module.split(".")
            taken |= {(".".join(parts[:depth]), parts[depth]) for depth in range(1, len(parts))}
            taken |= {(node.module, alias.name) for alias in node.names}
            imported |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            taken.add((imported.get(node.value.id, ""), node.attr))
    known = [(module, name) for module, name in taken if module and names_of(module) is not None]
    assert [pair for pair in known if pair[1] not in names_of(pair[0])] == []


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
    assert code == 2 and "contains no checkpoint-* with a model: train first" in err
    assert execute(ALONG, tmp_path / "nowhere")[0] == 2


@pytest.mark.nightly
def test_the_table_of_smollm2_is_drawn_again_from_its_records(tmp_path, execute):
    for name in ("full", "lora"):
        shutil.copytree(ROOT / "docs/examples/smollm2" / name, tmp_path / name)
    code, out, err = execute(ALONG, tmp_path / "full", tmp_path / "lora")
    assert code == 0, err
    lines = [line for line in out.splitlines() if line.startswith(("| full |", "| lora |"))]
    assert len(lines) == 10
    records = [
        list(csv.DictReader((folder / "along_training.csv").open()))
        for folder in (tmp_path, ROOT / "docs/examples/smollm2")
    ]
    assert records[0] == records[1]
    assert (tmp_path / "along_training.png").stat().st_size > 5000


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
        without_figures(study)

    folder = tmp_path / "G-8/seed-0"  # as run folders are named
    trained = ("debug=train", "save_steps=1", f"hydra.run.dir={folder}")
    code, said = finished("train", *trained, cwd=tmp_path.parent, seconds=600)
    assert code == 0, said
    small = ("study.questions=8", "budget.pool_completions=8", "launch.workers=1")
    monkeypatch.setattr(subprocess, "run", fork)
    code, out, err = execute(ALONG, folder, *small)
    assert code == 0 and "is complete" not in " ".join(out.split()), err
    rows = list(csv.DictReader((folder / "along_training.csv").open()))
    assert [row["step"] for row in rows] == ["1", "2"]
    assert all(float(row["c3"]) > 0 for row in rows) and rows[0]["c3"] != rows[1]["c3"]
    assert (folder / "along_training.png").stat().st_size > 5000
    assert "is complete" in " ".join(execute(ALONG, folder, *small)[1].split())


VERDICTS = SCRIPTS / "tools/verdict_figures.py"


@pytest.mark.nightly
def test_figures_of_verdicts_are_drawn_again_from_their_records(tmp_path, execute):
    code, out, err = execute(VERDICTS, "--images", tmp_path)
    assert code == 0, err
    drawn = {path.name for path in tmp_path.glob("*.png")}
    page = (ROOT / "docs/verdicts.md").read_text()
    assert len(drawn) == 2 and all(f"](images/{name})" in page for name in drawn)
    assert all((tmp_path / name).stat().st_size > 5000 for name in drawn)


@pytest.mark.nightly
def test_a_study_is_taken_into_the_records_in_place_of_an_earlier_one(tmp_path, execute):
    judged = {"claim": "a step of 8192 rollouts is about right", "measured": "n_c(16)",
              "least": 4096, "most": 16384, "verdict": "not decided", "number": None,
              "number_low": 2500.0, "number_high": None, "holm_p": 0.25}  # fmt: skip
    point = {"group_size": 8, "prompt_share": 0.5, "prompt_share_low": 0.25,
             "prompt_share_high": 0.75}  # fmt: skip
    places = ("--records", tmp_path / "records.csv", "--images", tmp_path)
    for share in (0.5, 0.625):
        result = {"verdicts": [judged], "noise": {"curve": [point | {"prompt_share": share}]}}
        (tmp_path / "result.json").write_text(json.dumps(result))
        assert execute(VERDICTS, f"b={tmp_path}", *places)[0] == 0
    first, second = csv.DictReader((tmp_path / "records.csv").open())
    assert (first["policy"], first["number"], first["low"], first["high"]) == ("b", "", "2500", "")
    assert (second["measured"], second["number"], second["high"]) == ("8", "0.625", "0.75")
    assert (tmp_path / "prompt_share.png").stat().st_size > 5000
    (tmp_path / "result.json").write_text(json.dumps({"noise": {"curve": [point]}}))
    refused = execute(VERDICTS, f"c={tmp_path}", *places)
    assert refused[0] == f"{tmp_path} has no verdicts: run the study with experiment=verdicts"
    empty = execute(VERDICTS, "--records", tmp_path / "nowhere.csv")
    assert empty[0] == 2 and "has no records: pass studies as NAME=FOLDER" in empty[2]
