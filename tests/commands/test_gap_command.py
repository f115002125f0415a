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
from grpo_ustat.gap.evidence import theorem
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


@pytest.mark.parametrize("name", THEOREMS)
def test_every_theorem_composes_on_its_problem(name):
    config = compose("gap", f"theorem={name}")
    assert config.theorem == THEOREMS[name] and name.startswith(config.theorem.kind)
    assert config.theorem.kind in TITLES and theorem(config.theorem.kind).statement
    theorem(config.theorem.kind).check(config.theorem)


@pytest.mark.parametrize("words", [
    "lemma6 theorem.steps=3", "theorem7 theorem.steps=[2,3]", "theorem8 theorem.steps=[2,3]",
    "theorem7_total theorem.totals=[128] theorem.steps=[2,4] theorem.constant_rates=[]",
    "corollaries9_10 theorem.steps=4", "proposition13 theorem.steps=4", "lemma11",
])  # fmt: skip
def test_a_study_draws_as_many_completions_as_a_dry_run_says(words):
    few = () if words == "lemma11" else ("theorem.replicates=10", "launch.workers=1")
    config = compose("gap", *f"theorem={words}".split(), *few)
    record = theorem(config.theorem.kind)
    assert record.run(config).rollouts == record.completions(config.theorem)


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
    shown = gap("dry_run=true", "theorem=theorem7")
    assert shown.returncode == 0 and "1,433.6 M" in shown.stdout
    assert not list(tmp_path.iterdir())
