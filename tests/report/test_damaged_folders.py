"""One damaged run folder never ends the report of the others, and is named in it."""

from __future__ import annotations

import json
import shutil

import pytest
from folders import claim, proved, studied, trained

from grpo_ustat.report.aggregate import report_runs, run_set_notes
from grpo_ustat.report.collect import entries_in, read_runs
from grpo_ustat.runs.status import status_table, sweeps_in
from grpo_ustat.terminal.console import Console

KINDS = ("train", "mse", "gap")
DAMAGES = {
    "half": ("result.json", lambda x: x[: len(x) // 2]),
    "empty": ("result.json", lambda x: ""),
    "deep": ("result.json", lambda x: '{"evals": ' + "[" * 100_000),
    "a text for a number": ("result.json", lambda x: x.replace("0.4", '"0.4"')),
    "a list": ("result.json", lambda x: "[1]"),
    "of an older version": ("result.json", lambda x: '{"summary": "as it was"}'),
    "rows": ("metrics.jsonl", lambda x: x + '{"step": 9, "rew\n'),
    "a huge cell": ("eval.csv", lambda x: x + "9" * 200_000 + "\n"),
    "tags": (".hydra/config.yaml", lambda x: x + "\nx: !!python/object/apply:os.system [true]"),
    "code": ("code.json", lambda x: "[7]"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A good run of each command, and one of each to be damaged, `bad-<command>`."""
    place = tmp_path_factory.mktemp("runs")
    for name, seed in (("good", 0), ("bad", 1)):
        trained(place / f"{name}-train", 4, seed, {0: 0.2, 4: 0.3, 8: 0.4})
        errors = {("none", 2): 0.5, ("none", 4): 0.4, ("leave_one_out", 2): 0.3}
        studied(place / f"{name}-mse", f"tiny{seed}", errors)
        proved(place / f"{name}-gap", "theorem7", claim("agrees"), seed=seed)
    return place


def copied(folders, place, kinds=KINDS):
    for kind in kinds:
        for name in ("good", "bad"):
            shutil.copytree(folders / f"{name}-{kind}", place / f"{name}-{kind}")
    return place


def notes_of(place):
    """The lines of a report on what is not whole; raises where a folder ends it."""
    run_set = read_runs(entries_in([str(place)]))
    names = {run.label for run in run_set.runs}
    assert {path.name for path in place.glob("good-*")} <= names
    return run_set_notes(run_set)


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_file_is_named(case, folders, tmp_path):
    name, damage = DAMAGES[case]
    kinds = [kind for kind in KINDS if (folders / f"bad-{kind}" / name).is_file()]
    copied(folders, tmp_path, kinds)
    touched = []
    for kind in kinds:
        file = tmp_path / f"bad-{kind}" / name
        before = file.read_text()
        file.write_text(damage(before))
        touched += [f"bad-{kind}"] if damage(before) != before else []
    lines = notes_of(tmp_path)
    assert touched
    for folder in touched:
        assert any(folder in line for line in lines), (folder, lines)
    assert not any(len(line) > 700 for line in lines)
    # The table of a sweep's states reads the same files.
    for sweep in sweeps_in(tmp_path):
        table = status_table(sweep, [entry.state() for entry in sweep.entries])
        Console(quiet=True).print(table)


@pytest.mark.slow
def test_many_evaluations_take_seconds_and_are_counted(folders, tmp_path):
    place = copied(folders, tmp_path, ["train"])
    file = place / "bad-train/eval.csv"
    head, *rows = file.read_text().splitlines()
    lines = [f"{step},{rows[0].partition(',')[2]}" for step in range(30_000)]
    file.write_text("\n".join([head, *lines]) + "\n")
    (place / "bad-train/result.json").unlink()
    assert any("30,000 evaluations, of which 1000 are" in line for line in notes_of(place))


def test_report_of_several_versions(folders, tmp_path):
    place = copied(folders, tmp_path, ["train"])
    for name, number in (("good", "1"), ("bad", "2")):
        versions = {"grpo-ustat": number, "torch": "2"}
        code = json.dumps({"commit": "a" * 40, "versions": versions})
        (place / f"{name}-train/code.json").write_text(code)
    lines = notes_of(place)
    (line,) = (line for line in lines if "versions of grpo-ustat" in line)
    assert "1 (1 run)" in line and "2 (1 run)" in line
    assert not any("versions of torch" in line for line in lines)


def test_a_section_that_cannot_be_shown_is_a_line(folders, tmp_path, capsys):
    copied(folders, tmp_path / "runs", ["train", "gap"])
    with (tmp_path / "runs/bad-train/metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "reward": "high"}\n')
    report_runs([str(tmp_path / "runs")], tmp_path / "report", None)
    said = " ".join(capsys.readouterr().out.split())
    assert "damaged: the training runs cannot be shown (" in said and "Theorem 7" in said
    assert (tmp_path / "report/theorems.csv").is_file()
