"""`grpo-ustat gap` from the command line to the folder that it leaves."""

from __future__ import annotations

import csv
import json
import sys
from subprocess import CompletedProcess

import pytest
from commands import compose

from grpo_ustat.cli import app
from grpo_ustat.config.beds import BEDS
from grpo_ustat.config.gap import STUDIES
from grpo_ustat.config.load import CONF
from grpo_ustat.gap.evidence import theorem
from grpo_ustat.gap.testbeds import build_testbed
from grpo_ustat.launch.command import load_command
from grpo_ustat.pages.claims import TITLES

SMALL = ("study.replicates=20", "study.steps=5", "study.constant_rates=[0.1]", "launch.workers=1")


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
def test_every_study_and_every_bed_has_a_file_of_its_name():
    names = {file.stem for file in (CONF / "study").glob("*.yaml")}
    assert set(STUDIES) <= names and set(STUDIES) == set(TITLES)
    for kind, schema in STUDIES.items():
        assert theorem(kind).schema is schema and theorem(kind).title and theorem(kind).statement
    files = (CONF / "bed").glob("*")
    beds = [compose("gap", f"bed={f.stem}", *_suits(f.stem)) for f in files]
    assert {config.bed.kind for config in beds} == set(BEDS)
    kinds = ("coins", "ridge_coins", "softmax")
    planes = [config for config in beds if config.bed.kind in kinds]
    assert len(planes) == 5 and all(0 < build_testbed(config.bed).highest < 1 for config in planes)


def _suits(bed):
    suits = {"sequences": "theorem12", "graded_sequences": "theorem12"}
    suits["ridge_coins"] = "theorem8"
    return [f"study={suits[bed]}"] if bed in suits else []


@pytest.mark.parametrize(
    "name", [*STUDIES, "theorem7_uneven", "theorem7_total", "theorem8_mixture"]
)
def test_every_study_composes_on_its_bed(name):
    config = compose("gap", f"study={name}")
    assert config.study.kind == name.partition("_")[0] if name not in STUDIES else name
    assert config.bed.kind in config.study.beds
    theorem(config.study.kind).check(config)


@pytest.mark.slow
def test_a_run_leaves_a_folder_and_is_shown_again(tmp_path, gap, every_format):
    first = gap(*SMALL)
    assert first.returncode == 0, first.stderr
    run = tmp_path / "run"
    result = json.loads((run / "result.json").read_text())
    assert result["study"] == "lemma6" and len(result["claims"]) == 15
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
    refused = gap("study.decaying_rate=0.5")
    assert refused.returncode == 2 and refused.stderr.startswith("error: study.decaying_rate=0.5")
    assert refused.stderr.count("\n") == 1 and not (tmp_path / "run").exists()


def test_dry_run_counts_what_a_run_draws(tmp_path, gap):
    config = compose("gap", *SMALL)
    assert theorem("lemma6").completions(config) == 20 * 6 * 16 * 6  # T and one step more
    shown = gap("dry_run=true", "study=theorem7")
    assert shown.returncode == 0 and "1,433.6 M" in shown.stdout
    assert not list(tmp_path.iterdir())
