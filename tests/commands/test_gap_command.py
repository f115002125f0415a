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
from grpo_ustat.config.schema import ConfigError
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
    assert "Lemma 6" in first.stdout and "run" in first.stdout
    again = gap(*SMALL, "launch.workers=2")  # which is no part of what a run is
    assert again.returncode == 0 and "is complete" in again.stdout
    page = (run / "report.html").read_text()
    assert "Polyak-Lojasiewicz" in page and "agrees" in page
    other = gap(*SMALL, "seed=1")
    assert other.returncode == 2 and "(seed: 0 there, 1 asked)" in other.stderr


WRONG = {
    "theorem=lemma7": "unknown theorem 'lemma7': did you mean lemma6? choose from",
    "problem=cards": "unknown problem 'cards': choose from",
    "theorem=theorem12 problem=coins": (
        "theorem=theorem12 with problem.kind=coins: choose a test problem of kind sequences"
    ),
    "theorem=proposition13 problem=coins": "with 2 coordinates in problem.start: it needs one",
    "theorem.group_size=5": "theorem.group_size=5 with theorem.rollouts=16: use divisors of it",
    "theorem.group_size=1": "theorem.group_size=1 must be 2 or more",
    "theorem.constant_rates=[2.5]": "L of problem=coins is 1: use rates below 2",
    "theorem.decaying_rate=0.5": "use more than 0.8333, so that 2 mu c > 1",
    "theorem=lemma11 theorem.group_sizes=[2,4]": "use at least three sizes",
    "theorem=lemma11 theorem.epsilon=-1": "theorem.epsilon=-1.0 must be 0 or more",
    "theorem=theorem12 theorem.learning_rates=[0.1]": "use at least three, all above 0",
    "theorem=theorem12 theorem.learning_rates=[0,0.1,0.2]": "holds 0.0, which must be above 0",
    "theorem=theorem12 theorem.lengths=[3]": (
        "theorem.lengths=[3]: use at least two, all of 1 to 14"
    ),
    "theorem=theorem12 theorem.lengths=[3,15]": (
        "theorem.lengths=[3, 15]: use at least two, all of 1 to"
    ),
    "theorem=theorem12 problem.length=1 problem.difficulties=[1,1,1,1]": "tokens=1: use at least 2",
    "theorem=theorem12 theorem.beta=-1": "theorem.beta=-1.0 must be 0 or more",
    "theorem=theorem12 theorem.normalisations=[sigma]": (
        "unknown theorem.normalisations 'sigma': choose"
    ),
    "theorem=theorem12 theorem.normalisations=[]": "name at least one of none, group_std",
    "theorem=theorem12 theorem.minibatches=3": (
        "theorem.num_prompts=40 with theorem.minibatches=3: use p"
    ),
    "theorem=theorem12 theorem.group_size=3": (
        "theorem.group_size=3 with theorem.group_sizes=[2, 4, 8, 16"
    ),
    "theorem=theorem12 theorem.limit_sizes=[2,4,9]": (
        "theorem.limit_sizes=[2, 4, 9]: use three, each tw"
    ),
    "theorem=theorem12 theorem.floor=0": "theorem.floor=0.0 must be above 0",
    "theorem=theorem12 problem.reward_levels=33": (
        "problem.reward_levels=33: use 2 to as many as there are"
    ),
    "theorem=theorem12 problem.difficulties=[1,2]": (
        "problem.difficulties=[1.0, 2.0] with problem.prompts=4"
    ),
    "theorem=theorem12 problem.difficulties=[1,2,3,40]": "leaves prompt 3 with reward 0 alone",
    "theorem=proposition13 theorem.minibatches=3": (
        "theorem.num_prompts=4 with theorem.minibatches=3: use"
    ),
    "theorem=proposition13 theorem.reference=[0.9]": (
        "theorem.reference=[0.9] on problem=unequal_coins: give"
    ),
    "theorem=proposition13 theorem.limit_sizes=[8]": (
        "theorem.limit_sizes=[8]: use three, each twice"
    ),
    "theorem=proposition13 theorem.variant_sizes=[1]": (
        "theorem.variant_sizes=[1] holds 1, which must"
    ),
    "theorem=corollaries9_10 theorem.steps=3": "theorem.steps=3 must be 4 or more",
    "theorem.replicates=3": "theorem.replicates=3 must be 10 or more",
    "theorem.offset=-1": "theorem.offset=-1 must be 0 or more",
    "theorem.rollouts=-1": "theorem.rollouts=-1 must be above 0",
    "theorem.baselines=[]": "theorem.baselines=[]: name at least one of none",
    "theorem.constant_rates=[-1]": (
        "theorem.constant_rates=[-1.0] holds -1.0, which must be above 0"
    ),
    "theorem=theorem7 theorem.rollouts=[-1]": (
        "theorem.rollouts=[-1] holds -1, which must be above 0"
    ),
    "theorem=theorem8 theorem.rollouts=-16": "theorem.rollouts=-16 must be above 0",
    "theorem=corollaries9_10 theorem.group_sizes=[3]": (
        "theorem.group_sizes=[3] with theorem.rollouts="
    ),
    "theorem=proposition13 theorem.steps=2": "theorem.steps=2 must be 4 or more",
    "theorem=proposition13 theorem.epsilon=-1": "theorem.epsilon=-1.0 must be 0 or more",
    "theorem=proposition13 theorem.minibatches=-1": "theorem.minibatches=-1 must be 2 or more",
    "theorem=theorem12 theorem.replicates=0": "theorem.replicates=0 must be 3 or more",
    "theorem=theorem12 theorem.lengths=[-3]": (
        "theorem.lengths=[-3] holds -3, which must be above 0"
    ),
    "theorem.baselines=[group_std]": "unknown theorem.baselines 'group_std': choose from none",
    "theorem=theorem7 theorem.rollouts=[6]": "at least two sizes must divide n=6 of a step",
    "theorem=theorem8 theorem.steps=[400,100]": "name steps above 0, ascending",
    "problem.start=[0.9,0.9]": "below the maximum, problem.reach=0.1: start nearer",
    "problem.reach=0.9": "lets a probability fall to",
    "problem.slopes=[[0.1,0.0]]": "problem.slopes has 1 rows of [2] numbers: use 4 of 2",
    "problem.slopes=[1,2]": "problem.slopes=[1, 2]: use rows of numbers",
    "problem.curvature=[1]": "problem.curvature=[1.0]: give a number above 0 for each of the 2",
    "problem.curvature=[1,0]": (
        "problem.curvature=[1.0, 0.0]: give a number above 0 for each of the 2"
    ),
    "theorem=theorem8_mixture problem.start=[0.1,0.9]": (
        "a w larger than problem.width=0.5: start within"
    ),
    "problem.parameters=1": "use problem.parameters=2 or more",
    "problem.values=[0.5,0.5,0.5,1.5]": "must be between 0 and 1",
    "problem=softmax problem.rewards=[[1,0,0,0,0],[1,0,0,0,0],[1,0,0,0,0],[1,0,0,0,0]]": (
        "finite maximum"
    ),
    "theorem=theorem7_total theorem.totals=[1000]": "1000 is no multiple of T=[400, 800]",
    "theorem=theorem7_total theorem.totals=[]": "name rollouts of a step or a run",
    "theorem=theorem8_mixture problem.along=[0.6]": (
        "problem.along has 1 numbers, problem.values has 4"
    ),
    "theorem=theorem8_mixture problem.bend=2.5": "makes the curvature negative: lower one",
    "theorem=theorem8_mixture problem.width=0.9": "let a probability fall to",
    "theorem=theorem8_mixture theorem.decaying_rate=0.8": "use more than 0.8333",
    "problem=ridge_coins": "theorem=lemma6 with problem.kind=ridge_coins",
    "launch.workers=0": "launch.workers=0 must be above 0",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_input_is_one_line_that_names_the_fix(words):
    with pytest.raises(ConfigError) as caught:
        config = compose("gap", *words.split())
        theorem(config.theorem.kind).check(config)
    assert WRONG[words] in str(caught.value) and "\n" not in str(caught.value)


def test_a_refused_problem_leaves_no_folder(tmp_path, gap):
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
