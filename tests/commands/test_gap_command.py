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
from grpo_ustat.config.schema import ConfigError
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
    assert "Lemma 6" in first.stdout and "run" in first.stdout
    again = gap(*SMALL, "launch.workers=2")  # which is no part of what a run is
    assert again.returncode == 0 and "is complete" in again.stdout
    page = (run / "report.html").read_text()
    assert "Polyak-Lojasiewicz" in page and "agrees" in page
    other = gap(*SMALL, "seed=1")
    assert other.returncode == 2 and "(seed: 0 there, 1 asked)" in other.stderr


WRONG = {
    "study=lemma7": "unknown study 'lemma7': did you mean lemma6? choose from",
    "bed=cards": "unknown bed 'cards': choose from",
    "study=theorem12 bed=coins": "study=theorem12 with bed.kind=coins: choose a test problem of "
    "kind "
    "sequences",
    "study=proposition13 bed=coins": "with 2 coordinates in bed.start: it needs one",
    "study.group_size=5": "study.group_size=5 with study.rollouts=16: use divisors of it",
    "study.group_size=1": "study.group_size=1 must be 2 or more",
    "study.constant_rates=[2.5]": "L of bed=coins is 1: use rates below 2",
    "study.decaying_rate=0.5": "use more than 0.8333, so that 2 mu c > 1",
    "study=lemma11 study.group_sizes=[2,4]": "use at least three sizes",
    "study=lemma11 study.epsilon=-1": "study.epsilon=-1.0 must be 0 or more",
    "study=theorem12 study.learning_rates=[0.1]": "use at least three, all above 0",
    "study=theorem12 study.learning_rates=[0,0.1,0.2]": "holds 0.0, which must be above 0",
    "study=theorem12 study.lengths=[3]": "study.lengths=[3]: use at least two, all of 1 to 14",
    "study=theorem12 study.lengths=[3,15]": "study.lengths=[3, 15]: use at least two, all of 1 to",
    "study=theorem12 bed.length=1 bed.difficulties=[1,1,1,1]": "tokens=1: use at least 2",
    "study=theorem12 study.beta=-1": "study.beta=-1.0 must be 0 or more",
    "study=theorem12 study.normalisations=[sigma]": "unknown study.normalisations 'sigma': choose",
    "study=theorem12 study.normalisations=[]": "name at least one of none, group_std",
    "study=theorem12 study.minibatches=3": "study.num_prompts=40 with study.minibatches=3: use p",
    "study=theorem12 study.group_size=3": "study.group_size=3 with study.group_sizes=[2, 4, 8, 16",
    "study=theorem12 study.limit_sizes=[2,4,9]": "study.limit_sizes=[2, 4, 9]: use three, each tw",
    "study=theorem12 study.floor=0": "study.floor=0.0 must be above 0",
    "study=theorem12 bed.reward_levels=33": "bed.reward_levels=33: use 2 to as many as there are",
    "study=theorem12 bed.difficulties=[1,2]": "bed.difficulties=[1.0, 2.0] with bed.prompts=4",
    "study=theorem12 bed.difficulties=[1,2,3,40]": "leaves prompt 3 with reward 0 alone",
    "study=proposition13 study.minibatches=3": "study.num_prompts=4 with study.minibatches=3: use",
    "study=proposition13 study.reference=[0.9]": "study.reference=[0.9] on bed=unequal_coins: give",
    "study=proposition13 study.limit_sizes=[8]": "study.limit_sizes=[8]: use three, each twice",
    "study=proposition13 study.variant_sizes=[1]": "study.variant_sizes=[1] holds 1, which must",
    "study=corollaries9_10 study.steps=3": "study.steps=3 must be 4 or more",
    "study.replicates=3": "study.replicates=3 must be 10 or more",
    "study.offset=-1": "study.offset=-1 must be 0 or more",
    "study.rollouts=-1": "study.rollouts=-1 must be above 0",
    "study.baselines=[]": "study.baselines=[]: name at least one of none",
    "study.constant_rates=[-1]": "study.constant_rates=[-1.0] holds -1.0, which must be above 0",
    "study=theorem7 study.rollouts=[-1]": "study.rollouts=[-1] holds -1, which must be above 0",
    "study=theorem8 study.rollouts=-16": "study.rollouts=-16 must be above 0",
    "study=corollaries9_10 study.group_sizes=[3]": "study.group_sizes=[3] with study.rollouts=",
    "study=proposition13 study.steps=2": "study.steps=2 must be 4 or more",
    "study=proposition13 study.epsilon=-1": "study.epsilon=-1.0 must be 0 or more",
    "study=proposition13 study.minibatches=-1": "study.minibatches=-1 must be 2 or more",
    "study=theorem12 study.replicates=0": "study.replicates=0 must be 3 or more",
    "study=theorem12 study.lengths=[-3]": "study.lengths=[-3] holds -3, which must be above 0",
    "study.baselines=[group_std]": "unknown study.baselines 'group_std': choose from none",
    "study=theorem7 study.rollouts=[6]": "at least two sizes must divide n=6 of a step",
    "study=theorem8 study.steps=[400,100]": "name steps above 0, ascending",
    "bed.start=[0.9,0.9]": "below the maximum, bed.reach=0.1: start nearer",
    "bed.reach=0.9": "lets a probability fall to",
    "bed.slopes=[[0.1,0.0]]": "bed.slopes has 1 rows of [2] numbers: use 4 of 2",
    "bed.slopes=[1,2]": "bed.slopes=[1, 2]: use rows of numbers",
    "bed.curvature=[1]": "bed.curvature=[1.0]: give a number above 0 for each of the 2",
    "bed.curvature=[1,0]": "bed.curvature=[1.0, 0.0]: give a number above 0 for each of the 2",
    "study=theorem8_mixture bed.start=[0.1,0.9]": "a w larger than bed.width=0.5: start within",
    "bed.parameters=1": "use bed.parameters=2 or more",
    "bed.values=[0.5,0.5,0.5,1.5]": "must be between 0 and 1",
    "bed=softmax bed.rewards=[[1,0,0,0,0],[1,0,0,0,0],[1,0,0,0,0],[1,0,0,0,0]]": "finite maximum",
    "study=theorem7_total study.totals=[1000]": "1000 is no multiple of T=[400, 800]",
    "study=theorem7_total study.totals=[]": "name rollouts of a step or a run",
    "study=theorem8_mixture bed.along=[0.6]": "bed.along has 1 numbers, bed.values has 4",
    "study=theorem8_mixture bed.bend=2.5": "makes the curvature negative: lower one",
    "study=theorem8_mixture bed.width=0.9": "let a probability fall to",
    "study=theorem8_mixture study.decaying_rate=0.8": "use more than 0.8333",
    "bed=ridge_coins": "study=lemma6 with bed.kind=ridge_coins",
    "launch.workers=0": "launch.workers=0 must be above 0",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_input_is_one_line_that_names_the_fix(words):
    with pytest.raises(ConfigError) as caught:
        config = compose("gap", *words.split())
        theorem(config.study.kind).check(config)
    assert WRONG[words] in str(caught.value) and "\n" not in str(caught.value)


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
