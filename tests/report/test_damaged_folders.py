"""One edited or damaged run folder never ends the report of the others, and is named in it."""

from __future__ import annotations

import json
import random
import shutil

import damages
import pytest
from folders import claim, proved, studied, trained
from slow_cases import slow_after

from grpo_ustat.report.aggregate import report_runs, run_set_notes, without_unreadable
from grpo_ustat.report.collect import entries_in, read_runs
from grpo_ustat.runs.contents import content_digest, parsed_yaml
from grpo_ustat.runs.folder import file_digests
from grpo_ustat.runs.record import RunRecord
from grpo_ustat.runs.status import status_table, sweeps_in
from grpo_ustat.terminal.console import Console

FILES = ("result.json", "metrics.jsonl", "eval.csv", ".hydra/config.yaml", "code.json",
         "launches.jsonl", "figure.svg")  # fmt: skip
KINDS = ("train", "mse", "gap")


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
    run_set = without_unreadable(read_runs(entries_in([str(place)])))
    names = {run.label for run in run_set.runs}
    assert {path.name for path in place.glob("good-*")} <= names
    return run_set_notes(run_set)


@pytest.mark.parametrize("case", slow_after(4, damages.NAMED))
def test_what_does_not_fit_is_named(case, folders, tmp_path):
    name, damage = damages.NAMED[case]
    kinds = [k for k in KINDS if (folders / f"bad-{k}" / name).is_file()]
    copied(folders, tmp_path, kinds)
    touched = []
    for kind in kinds:
        file = tmp_path / f"bad-{kind}" / name
        before = file.read_text()
        file.write_text(damage(before))
        touched += [f"bad-{kind}"] if damage(before) != before else []
    lines = notes_of(tmp_path)
    assert touched
    if case not in (
        "an unknown baseline",
        "a time that is none",
    ):  # one is a baseline of somebody's
        for folder in touched:
            assert any(folder in line for line in lines), (folder, lines)
    assert not any(len(line) > 700 for line in lines)
    sweep = sweeps_in(tmp_path)  # the table of a sweep's states reads the same files
    for one in sweep:
        Console(quiet=True).print(status_table(one, [entry.state() for entry in one.entries]))


def damaged(folders, place, draw):
    """A copy with one file of one folder edited or torn; the folder's and the file's name."""
    kind = draw.choice(KINDS)
    copied(folders, place, [kind])
    folder = place / f"bad-{kind}"
    file = draw.choice([folder / name for name in FILES if (folder / name).is_file()])
    if file.name == "result.json" or (file.suffix == ".json" and draw.random() < 0.5):
        file.write_text(damages.edited(file.read_text(), draw))
    elif file.suffix == ".jsonl" and draw.random() < 0.7:
        lines = file.read_text().splitlines()
        place_of = draw.randrange(len(lines))
        lines[place_of] = damages.edited(lines[place_of], draw)
        file.write_text("\n".join(lines) + "\n")
    elif file.suffix == ".yaml" and draw.random() < 0.8:
        content = parsed_yaml(file.read_text())
        file.write_text(damages.edited(json.dumps(content), draw))  # JSON is YAML
    else:
        file.write_bytes(damages.torn(file.read_bytes(), draw))
    return folder.name, file.name


@pytest.mark.parametrize("seed", range(12))
def test_no_edit_ends_the_report_of_the_others(seed, folders, tmp_path):
    notes_of_seed(seed, folders, tmp_path)


def notes_of_seed(seed, folders, tmp_path):
    draw = random.Random(seed)
    try:
        what = damaged(folders, tmp_path, draw)
    except (TypeError, ValueError, RecursionError):  # no JSON comes of it
        return None
    notes_of(tmp_path)
    return what


@pytest.mark.nightly(minutes=1)
@pytest.mark.parametrize("first", range(20, 80, 20))
def test_no_edit_ends_a_whole_report(first, folders, tmp_path):
    """With figures, in one format, and page, of twenty edits each."""
    for seed in range(first, first + 20):
        place = tmp_path / str(seed)
        place.mkdir()
        try:
            damaged(folders, place, random.Random(seed))
        except (TypeError, ValueError, RecursionError):  # no JSON comes of it
            continue
        report_runs([str(place)], place / "report", None)
        assert (place / "report/report.html").is_file()
        shutil.rmtree(place)


@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl", "eval.csv"])
def test_a_file_that_was_edited_after_the_run_is_named(name, folders, tmp_path):
    place = copied(folders, tmp_path, ["train"])
    folder = place / "bad-train"
    result = json.loads((folder / "result.json").read_text()) | {"files": file_digests(folder)}
    result["digest"] = content_digest(result)
    (folder / "result.json").write_text(json.dumps(result))
    assert RunRecord(folder).notes == RunRecord(place / "good-train").notes
    file = folder / name
    file.write_text(file.read_text().replace("0.4", "0.9").replace('"reward": 0.1', '"reward": 1'))
    assert any(f"bad-train: {name} was changed after the run" in line for line in notes_of(place))


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
