"""`grpo-ustat gap` from the command line to the folder that it leaves."""

from __future__ import annotations

import csv
import json
import sys
from subprocess import CompletedProcess

import pytest
from commands import compose

from grpo_ustat.cli import app
from grpo_ustat.config.gap import THEOREMS
from grpo_ustat.config.load import CONF
from grpo_ustat.config.problems import PROBLEMS
from grpo_ustat.gap.evidence import theorem
from grpo_ustat.gap.problems import build_problem
from grpo_ustat.launch.command import load_command
from grpo_ustat.pages.claims import TITLES

SMALL = (
    "theorem.replicates=20",
    "theorem.steps=5",
    "theorem.constant_rates=[0.1]",
    "launch.workers=1",
)


@pytest.fixture
def gap(tmp_path, monkeypatch, capsys):
    """Type the command in `tmp_path`: its exit code and what it printed, as a finished process.

    It runs in this process: nothing is imported again.
    """
    monkeypatch.chdir(tmp_path)

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["gap", "hydra.run.dir=run", *words])
        code = 0
        try:
            app.main(load_command("gap"))
        except SystemExit as end:
            code = end.code
        return CompletedProcess(words, code, *capsys.readouterr())

    return command


@pytest.mark.slow
def test_every_theorem_and_every_problem_has_a_file_of_its_name():
    names = {file.stem for file in (CONF / "theorem").glob("*.yaml")}
    assert set(THEOREMS) <= names and set(THEOREMS) == set(TITLES)
    for kind, schema in THEOREMS.items():
        assert theorem(kind).schema is schema and theorem(kind).title and theorem(kind).statement
    files = (CONF / "problem").glob("*")
    problems = [compose("gap", f"problem={f.stem}", *_suits(f.stem)) for f in files]
    assert {config.problem.kind for config in problems} == set(PROBLEMS)
    kinds = ("coins", "ridge_coins", "softmax")
    planes = [config for config in problems if config.problem.kind in kinds]
    assert len(planes) == 5 and all(
        0 < build_problem(config.problem).highest < 1 for config in planes
    )


def _suits(problem):
    suits = {"sequences": "theorem12", "graded_sequences": "theorem12"}
    suits["ridge_coins"] = "theorem8"
    return [f"theorem={suits[problem]}"] if problem in suits else []


@pytest.mark.parametrize(
    "name", [*THEOREMS, "theorem7_uneven", "theorem7_total", "theorem8_mixture"]
)
def test_every_theorem_composes_on_its_problem(name):
    config = compose("gap", f"theorem={name}")
    assert config.theorem.kind == name.partition("_")[0] if name not in THEOREMS else name
    assert config.problem.kind in config.theorem.problems
    theorem(config.theorem.kind).check(config)


@pytest.mark.slow
def test_a_run_leaves_a_folder_and_is_shown_again(tmp_path, gap, every_format):
    first = gap(*SMALL)
    assert first.returncode == 0, first.stderr
    run = tmp_path / "run"
    result = json.loads((run / "result.json").read_text())
    assert result["theorem"] == "lemma6" and len(result["claims"]) == 15
    assert result["cost"]["rollouts"] == 20 * 6 * 16 * 6  # T and one step more
    rows = list(csv.DictReader((run / "curves.csv").open()))
    assert {row["estimator"] for row in rows} == {"vanilla", "GRPO", "oracle"}
    files = {file.name for file in run.iterdir()}
    figures = {f"figure.{kind}" for kind in ("pdf", "svg", "png")}
    assert files >= figures | {".hydra", "code.json", "report.html"}
    written = (run / "result.json").stat().st_mtime_ns
    # The number of workers is no part of a run's identity.
    again = gap(*SMALL, "launch.workers=2")
    assert again.returncode == 0 and (run / "result.json").stat().st_mtime_ns == written
    other = gap(*SMALL, "seed=1")
    assert other.returncode == 2 and "seed: 0" in other.stderr


def test_a_refused_bed_leaves_no_folder(tmp_path, gap):
    (tmp_path / "other").touch()
    refused = gap("theorem.decaying_rate=0.5")
    assert refused.returncode == 2 and refused.stderr.startswith("error: theorem.decaying_rate=0.5")
    assert refused.stderr.count("\n") == 1 and not (tmp_path / "run").exists()


def test_dry_run_counts_what_a_run_draws(tmp_path, gap):
    config = compose("gap", *SMALL)
    assert theorem("lemma6").completions(config) == 20 * 6 * 16 * 6  # T and one step more
    shown = gap("dry_run=true", "theorem=theorem7")
    assert shown.returncode == 0 and "1,433.6 M" in shown.stdout
    assert not list(tmp_path.iterdir())
