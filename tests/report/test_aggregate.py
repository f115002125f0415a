"""The report entry: refusals in one line, and one report of everything from real pictures."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from folders import begin, completed, configured, pictures, studied, trained
from slow_cases import slow_but

from grpo_ustat.pages.learning import learning_rows
from grpo_ustat.report import __main__ as command
from grpo_ustat.report import aggregate
from grpo_ustat.report.accuracy_answer import at_last, best_sentence
from grpo_ustat.report.aggregate import report_runs, report_sweep
from grpo_ustat.runs.result import StudyResult
from grpo_ustat.runs.status import Entry

REFUSED = {
    "nothing named": ([], "runs has no value"),
    "nothing there": (["runs=outputs/nothing"], "matches nothing in"),
    "a seed's folder by name": (["runs=a/seed-7"], "runs=a/seed-7 matches nothing in"),
    "a list with one that is not there": (["runs=[a,b/seed-0]"], "runs=b/seed-0 matches nothing"),
    "no folders": (["runs=[]"], "name folders"),
    "a name that leads elsewhere": (["runs=a", "name=../x"], "use letters, digits"),
    "an unknown key": (["runs=a", "nme=x"], "did you mean name"),
    "another entry's key": (["runs=a", "group_size=4"], "report has no group_size"),
    "a sweep": (["-m", "runs=a"], "remove -m"),
    "a step that is not evaluated": (["runs=a", "steps=[3]"], "evaluated at steps [0, 4, 8]"),
    "a run's own folder": (["runs=a", "'hydra.run.dir=a/seed-0'"], "is the folder of a run"),
    "runs that have not come to anything": (["runs=begun"], "nothing to show yet"),
}


@pytest.mark.parametrize("arguments, message", slow_but(REFUSED, "no folders", "a sweep"))
def test_what_cannot_be_reported_is_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    trained(tmp_path / "a/seed-0", 4, 0, {0: 0.2, 4: 0.3, 8: 0.4})
    begin(tmp_path / "begun", configured("train", {}), ())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["report", *(x.strip("'") for x in arguments)])
    if "hydra.run.dir" in str(arguments):
        monkeypatch.setattr(sys, "argv", ["report", arguments[0], "hydra.run.dir='a/seed-0'"])
    with pytest.raises(SystemExit) as refused:
        command.main()
    said = capsys.readouterr().err
    assert refused.value.code == 2 and message in said and len(said.splitlines()) == 1
    assert not (tmp_path / "outputs/report").exists()
    assert (tmp_path / "a/seed-0/result.json").is_file()


def test_a_sweep_of_which_nothing_has_begun_says_so(tmp_path, capsys):
    report_sweep([Entry("seed=0", tmp_path / "seed-0", "hash", 8)], tmp_path / "joint", None)
    assert "has results to report" in capsys.readouterr().out
    assert not (tmp_path / "joint").exists()


def test_report_of_a_step_that_no_run_has_reached(tmp_path, monkeypatch, capsys):
    trained(tmp_path / "seed-0", 4, 0, {0: 0.2, 4: 0.3}, done=False)
    monkeypatch.setattr(
        aggregate, "learning_figure", lambda folder, name, runs: learning_rows(runs)
    )
    monkeypatch.setattr(aggregate, "page", lambda made: None)
    monkeypatch.setattr(aggregate, "render", lambda page: "")
    report_sweep([Entry("seed=0", tmp_path / "seed-0", None, 8)], tmp_path / "joint", [8])
    said = capsys.readouterr().out
    assert "step 8" in said and "unfinished: seed=0" in said
    assert (tmp_path / "joint/learning.csv").is_file()


def test_the_table_of_budgets_is_of_the_last_step_that_the_most_cells_have_reached():
    def row(series, step, size):
        return {"series": series, "step": step, "rollouts": 32, "group_size": size}

    rows = [row("a", step, size) for step in (4, 8) for size in (4, 8)]
    rows += [row("a", 12, 4), row("b", 4, 4), row("b", 12, 4)]
    last = at_last(rows, [4, 8, 12])
    assert {(x["series"], x["step"], x["group_size"]) for x in last} == {
        ("a", 8, 4), ("a", 8, 8), ("b", 12, 4)
    }  # fmt: skip


def csv_rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_report_of_everything(tmp_path):
    """Eight training runs of two series, one killed, two studies; in a process without torch."""
    accuracies = {}
    other = {"changes": {"learning_rate": 1.0}, "commit": "b" * 40}
    trained(tmp_path / "runs/other", 4, 0, {0: 0.9}, **other)
    for size, seed in ((4, 0), (4, 1), (8, 0), (8, 1)):
        for rollouts in (32, 64):
            done = (size, seed, rollouts) != (8, 1, 64)
            final = 0.3 + 0.01 * size + 0.02 * seed + 0.001 * rollouts
            folder = tmp_path / f"runs/G-{size}/n-{rollouts}/seed-{seed}"
            reached = {0: 0.2, 4: 0.25, 8: final} if done else {0: 0.2, 4: 0.25}
            trained(folder, size, seed, reached, rollouts=rollouts, done=done)
            if done:
                accuracies.setdefault((rollouts, size), []).append(final)
    errors = {(name, size): 8.0 / size for name in ("none", "oracle") for size in (2, 4)}
    studied(tmp_path / "studies/a", "tiny", errors)
    studied(tmp_path / "studies/b", "tiny_direct", {**errors, ("optimal", 2): 3.0})
    code = "import sys; from grpo_ustat.report.__main__ import main; main(); "
    code += "assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "runs=[runs,studies]", "name=both"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line in (
        "runs/G-8/n-64/seed-1: stopped, step 4 of 8 (killed)",
        "aaaaaaaa (10 runs), bbbbbbbb (1 run)",
        "2 series",
    ):
        assert line in done.stdout
    home = tmp_path / "outputs/report/both"
    for name in ("accuracy", "mse", "fixed_n", "learning-n=32"):
        pdf = (home / f"{name}.pdf").read_bytes()
        assert b"/FontFile2" in pdf and b"/Type3" not in pdf
        assert ElementTree.parse(home / f"{name}.svg").getroot().tag.endswith("svg")
        assert (home / f"{name}.png").stat().st_size > 5000
        assert "\\bottomrule" in (home / f"{name}.tex").read_text()
        assert csv_rows(home / f"{name}.csv")
    for cell in csv_rows(home / "budget.csv"):
        if cell["series"] == "learning_rate=0.0001":
            mine = accuracies[int(cell["rollouts"]), int(cell["group_size"])]
            assert float(cell["mean_reward"]) == pytest.approx(sum(mine) / len(mine))
            assert int(cell["seeds"]) == len(mine)
    page = (home / "report.html").read_text()
    assert "studies/a: optimal at G = 2" in page and "runs/G-8/n-64/seed-1" in page
    assert "learning_rate" in page
    assert any("G* = 2.0 [2.0, 2.0]" in picture for picture in pictures(page))


@pytest.mark.slow
def test_a_report_answers_each_study_at_its_own_rollouts(tmp_path, capsys):
    errors = {(name, size): 8.0 / size for name in ("none", "oracle") for size in (2, 4)}
    for n in (64, 100):
        studied(tmp_path / f"runs/{n}", "tiny", errors, changes={"study.rollouts": n})
    report_runs([str(tmp_path / "runs")], tmp_path / "report", None)
    said = " ".join(capsys.readouterr().out.split())
    drawn = (tmp_path / "report/fixed_n.svg").read_text()
    for n, size in ((64, 2), (100, 2)):
        assert f"At {n} rollouts" in said and f"G = {size}" in said
        assert f"n = {n}" in drawn
    assert "256" not in said


def equally_rewarded(folder, model):
    """A finished study without a curve."""
    studied(folder, model, {})
    result = json.loads((folder / "result.json").read_text())
    result = {key: result[key] for key in ("policy", "questions", "pool_completions", "cost")}
    result |= {"equal_rewards": {"reward": 0.0, "completions": 128, "cut": 128, "no_answer": 0},
               "summary": "All were cut. WARNING: x"}  # fmt: skip
    (folder / "result.json").write_text(json.dumps(completed(StudyResult, result)))


@pytest.mark.slow
def test_studies_of_equal_rewards_are_a_line_of_a_report(tmp_path, capsys):
    equally_rewarded(tmp_path / "a", "tiny")
    report_runs([str(tmp_path / "a")], tmp_path / "report", None)
    said = capsys.readouterr().out
    line = "tiny, bare on arithmetic (this study is not in the tables and figures): All were cut."
    assert line in " ".join(said.split()) and "damaged" not in said and "MSE" not in said
    assert {file.stem for file in (tmp_path / "report").iterdir()} == {"report", "runs"}
    assert line in (tmp_path / "report/report.html").read_text()


@pytest.mark.slow
def test_studies_of_equal_rewards_are_left_out_of_tables_and_figures(tmp_path, capsys):
    equally_rewarded(tmp_path / "a", "tiny")
    studied(tmp_path / "b", "tiny_direct", {("none", 2): 1.0, ("none", 4): 0.5})
    report_runs([str(tmp_path / "?")], tmp_path / "report", None)
    assert "All were cut. " in " ".join(capsys.readouterr().out.split())
    for name in ("mse", "fixed_n"):
        rows = csv_rows(tmp_path / f"report/{name}.csv")
        assert {row["policy"] for row in rows} == {"tiny_direct, bare"}


@pytest.mark.slow
def test_a_report_made_again_keeps_nothing_of_the_one_before(tmp_path):
    for seed in (0, 1):
        trained(tmp_path / f"a/seed-{seed}", 4, seed, {0: 0.2, 8: 0.3 + seed / 10})
    studied(tmp_path / "b", "tiny", {("none", 2): 1.0, ("none", 4): 0.5})
    home = tmp_path / "report"
    report_runs([str(tmp_path / "b")], home, None)
    (home / "notes.csv").write_text("mine")
    assert (home / "mse.csv").is_file()
    report_runs([str(tmp_path / "a")], home, [8])
    assert (home / "notes.csv").is_file() and not list(home.glob("mse.*"))
    assert {row["step"] for row in csv_rows(home / "budget.csv")} == {"8"}
    assert {row["step"] for row in csv_rows(home / "accuracy.csv")} == {"0", "8"}


def test_best_sentence_names_sizes_that_differ():
    def cell(size, mean, best=False, distinct=None, decided=True, rollouts=64):
        return {
            "series": "", "step": 8, "rollouts": rollouts, "group_size": size, "over": "seeds",
            "quantity": "accuracy", "mean_reward": mean, "low": mean - 0.1, "high": mean + 0.1,
            "best": best, "distinct": distinct, "decided": decided,
        }  # fmt: skip

    cells = [cell(2, 0.3, distinct=True), cell(4, 0.5, best=True), cell(8, 0.4, distinct=True)]
    assert "G = 4: 0.500 [0.400, 0.600]" in best_sentence(cells)
    assert "G = 2 and 8." in best_sentence(cells)
    cells[2] = cell(8, 0.45, distinct=False)
    assert best_sentence(cells).endswith(
        "lower at G = 2, but not significantly different at G = 8."
    )
    alike = [cell(2, 0.3, distinct=False, decided=False), cell(4, 0.5, best=True, decided=False)]
    assert best_sentence(alike).endswith("0.300 (G = 2) to 0.500 (G = 4).")
