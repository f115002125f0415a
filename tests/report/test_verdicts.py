"""Studies of theorems in a report: a verdict each, every claim, their own figures, one sentence."""

from __future__ import annotations

import csv
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from folders import claim, pictures, proved, studied, trained

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.report import aggregate
from grpo_ustat.report.aggregate import report_runs, report_sweep
from grpo_ustat.report.collect import entries_in, read_runs
from grpo_ustat.report.verdicts import (
    claims_table,
    in_order,
    theorems_table,
    verdict_sentence,
)
from grpo_ustat.runs.status import Entry

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

AGREES, DISAGREES, OPEN = (claim(verdict) for verdict in ("agrees", "disagrees", "not decided"))
BOUND = claim("agrees", "gap over the bound", predicted="<= 1", low=None, high=None)


def found(*folders):
    return read_runs(entries_in([str(folder) for folder in folders]))


def theorems(*folders):
    return in_order(found(*folders).runs)


def two(path):
    """Theorem 8 agrees in two claims; Lemma 6 disagrees in one of three."""
    proved(path / "a", "theorem8", AGREES, BOUND, answer="The laws are the same.")
    proved(path / "b", "lemma6", DISAGREES, AGREES, OPEN, problem="softmax", answer="It is looser.")
    return path


def csv_rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


class Shown(HTMLParser):
    """Texts and tags of a page, in their order."""

    def __init__(self, page):
        super().__init__()
        self.texts, self.tags = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.texts += [data] if data.strip() else []


def test_results_come_in_the_order_of_the_paper_with_counts_and_verdict(tmp_path):
    sheet = theorems_table(theorems(two(tmp_path)))
    assert sheet.columns == [
        "result", "about", "test problem", "agree", "disagree", "not decided", "verdict",
    ]  # fmt: skip
    assert sheet.rows == [
        ["Lemma 6", "the gap under constant and falling learning rates", "softmax", "1", "1", "1",
         "disagrees"],
        ["Theorem 8", "the law of the gap", "coins", "2", "0", "0", "agrees"],
    ]  # fmt: skip
    assert sheet.data[0]["statement"] == "The paper says so." and sheet.data[0]["rollouts"] == 3000


def test_every_claim_has_prediction_measurement_interval_and_verdict(tmp_path):
    """A claim that was enumerated has no p-value, and none is shown."""
    tested = {"p_value": 0.001, "holm_p": 0.003, "alternatives": {"half": 0.2, "twice": 1e-9}}
    tested |= {"severity": "1 of 2"}
    proved(tmp_path / "a", "theorem8", AGREES, BOUND)
    proved(tmp_path / "b", "lemma6", DISAGREES | tested, AGREES, OPEN, problem="softmax")
    sheet = claims_table(theorems(tmp_path))
    assert "alternatives" not in sheet.data[0] and sheet.data[0]["holm_p"] == 0.003
    assert sheet.rows[:2] == [
        ["Lemma 6 (softmax)", "slope of the error", "-1", "-0.75", "[-0.9, -0.6]",
         "0.001 (0.003)", "disagrees", "1 of 2"],
        ["Lemma 6 (softmax)", "slope of the error", "-1", "-0.75", "[-0.9, -0.6]", "-", "agrees",
         "-"],
    ]  # fmt: skip
    assert sheet.rows[-1] == [
        "Theorem 8 (coins)", "gap over the bound", "<= 1", "-0.75", "-", "-", "agrees", "-"
    ]  # fmt: skip
    assert sheet.data[-1]["how"] == "95 % over 100 replicates" and sheet.data[-1]["low"] is None


# Claims of Lemma 6, Theorem 7 and Theorem 8, and texts of the answer in their order.
ANSWERS = {
    "all agree": ((AGREES, AGREES, AGREES), ("All 3 claims", "Lemma 6, Theorem 7 and Theorem 8")),
    "one of each": (
        (AGREES, DISAGREES, OPEN),
        ("1 of 3 ", "Theorem 7 disagree", "Theorem 8 are not decided", "1 of 3 claims"),
    ),
    "two disagree": (
        (DISAGREES, AGREES, DISAGREES),
        ("1 of 3 ", "Lemma 6 and Theorem 8 disagree", "1 of 3 claims"),
    ),
}


@pytest.mark.parametrize("claims, texts", ANSWERS.values(), ids=ANSWERS)
def test_answer_names_theorems_that_do_not_agree(tmp_path, claims, texts):
    for study, one in zip(("lemma6", "theorem7", "theorem8"), claims, strict=True):
        proved(tmp_path / study, study, one)
    assert re.search(".*".join(texts), verdict_sentence(theorems(tmp_path)))


def test_studies_of_one_result_are_told_apart_by_bed_and_by_what_else_they_differ_in(tmp_path):
    proved(tmp_path / "a", "lemma6", AGREES)
    proved(tmp_path / "b", "lemma6", DISAGREES, problem="softmax")
    proved(tmp_path / "c", "lemma6", DISAGREES, problem="softmax", seed=1)
    runs = theorems(tmp_path)
    assert [row[2] for row in theorems_table(runs).rows] == [
        "coins\nseed=0", "softmax\nseed=0", "softmax\nseed=1",
    ]  # fmt: skip
    said = "Lemma 6 (softmax, seed=0) and Lemma 6 (softmax, seed=1)"
    assert said in verdict_sentence(runs)


@pytest.mark.slow
def test_unfinished_and_damaged_studies_are_named_and_count_nowhere(tmp_path):
    two(tmp_path)
    proved(tmp_path / "c", "theorem7", done=False)
    torn = proved(tmp_path / "d", "theorem12", AGREES, problem="sequences")
    (torn / "result.json").write_text('{"claims": [')
    old = proved(tmp_path / "e", "lemma11", AGREES) / "result.json"
    old.write_text(old.read_text().replace('"statement"', '"said"'))
    bare = proved(tmp_path / "f", "proposition13", AGREES, problem="unequal_coins") / "result.json"
    bare.write_text(bare.read_text().replace('"measured"', '"meant"'))
    (proved(tmp_path / "g", "theorem8", AGREES, seed=1) / "figure.svg").write_text("<svg>")
    got = found(tmp_path)
    notes = {run.label: run.notes[0] for run in got.runs if run.notes}
    assert all(notes[label].startswith("result.json") for label in "ef")
    rows = theorems_table(in_order(got.runs)).rows
    assert [(row[0], row[3], row[6]) for row in rows] == [
        ("Lemma 6", "1", "disagrees"), ("Theorem 7", "-", "unfinished"),
        ("Theorem 8", "2", "agrees"), ("Theorem 8", "1", "agrees"),
        ("Lemma 11", "-", "unfinished"), ("Theorem 12", "-", "unfinished"),
        ("Proposition 13", "-", "unfinished"),
    ]  # fmt: skip
    report_runs([str(tmp_path)], tmp_path / "report", None)
    page = (tmp_path / "report/report.html").read_text()
    assert "unfinished: c: stopped (killed)" in page
    assert "damaged: g: figure.svg" in page
    drawn = "".join(pictures(page))
    assert drawn.count("drawn by theorem8 on coins") == 1 and "drawn by lemma6" in drawn
    assert "2 of 3 " in page


def test_nothing_finished_is_nothing_to_show(tmp_path):
    proved(tmp_path / "a", "theorem7", done=False)
    with pytest.raises(ConfigError, match=r"a: stopped \(killed\)"):
        report_runs([str(tmp_path)], tmp_path / "report", None)


def test_a_report_of_theorems_is_one_page_one_table_and_its_data(tmp_path, capsys):
    home = tmp_path / "report"
    report_runs([str(two(tmp_path / "runs"))], home, None)
    names = {f"{name}.{kind}" for name in ("theorems", "claims", "runs") for kind in ("csv", "tex")}
    assert {file.name for file in home.iterdir()} == names | {"report.html"}
    rows = csv_rows(home / "theorems.csv")
    assert [(row["theorem"], row["disagree"], row["verdict"]) for row in rows] == [
        ("lemma6", "1", "disagrees"), ("theorem8", "0", "agrees"),
    ]  # fmt: skip
    assert [row["verdict"] for row in csv_rows(home / "claims.csv")].count("agrees") == 3
    latex = (home / "theorems.tex").read_text()
    assert r"\begin{tabular}{lp{0.3\linewidth}rrrrr}" in latex
    assert r"Theorem 8 & the law of the gap & coins & 2 & 0 & 0 & agrees" in latex
    assert r"\textless{}= 1" in (home / "claims.tex").read_text()
    found = Shown((home / "report.html").read_text())
    drawn = pictures((home / "report.html").read_text())
    assert ["on softmax" in drawn[0], "on coins" in drawn[1]] == [True, True]
    (answer,) = (text for text in found.texts if text.startswith("1 of 2 "))
    order = [
        answer, "Theoretical results and their tests",
        "Lemma 6, the gap under constant and falling learning rates, on softmax",
        "Theorem 8, the law of the gap, on coins", "All claims, predicted and measured",
        "gap over the bound", "Runs", "Completions drawn from test problems", "6000",
    ]  # fmt: skip
    places = [found.texts.index(text) for text in order[:-3]]
    assert places == sorted(places) and set(order) <= set(found.texts)
    assert not {"Policies", "Tokens sampled by finished runs", "step", "accuracy"} & set(
        found.texts
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "Theorem 8" in said and "The laws are the same." not in said and order[0] in said


def test_a_report_of_a_sweep_names_what_has_not_begun(tmp_path):
    two(tmp_path)
    entries = [
        Entry(f"theorem={name}", tmp_path / folder, None, None)
        for name, folder in (("theorem8", "a"), ("lemma6", "b"), ("theorem7", "none"))
    ]
    report_sweep(entries, tmp_path / "theorems", None)
    text = (tmp_path / "theorems/report.html").read_text()
    assert "missing: theorem=theorem7: not started" in text and "some claims of Lemma 6" in text


@pytest.mark.slow(minutes=0.02)
def test_theorems_and_training_make_one_report(tmp_path, monkeypatch):
    """Theorems on top; verdicts, accuracies and policies each where they belong."""
    monkeypatch.setattr(aggregate, "learning_figure", lambda *_: [])
    two(tmp_path / "gap")
    trained(tmp_path / "train/G-4", 4, 0, {0: 0.2, 8: 0.4}, done=False)
    home = tmp_path / "report"
    report_runs([str(tmp_path / "gap"), str(tmp_path / "train")], home, None)
    there = {file.stem for file in home.glob("*.csv")}
    assert there == {"theorems", "claims", "accuracy", "budget", "runs"}
    rows = {row["run"]: row for row in csv_rows(home / "runs.csv")}
    told = {
        name: tuple(row[key] for key in ("entry", "policy", "dataset", "verdict", "rollouts"))
        for name, row in rows.items()
    }
    assert told == {
        "gap/a": ("gap", "coins", "", "agrees", ""),
        "gap/b": ("gap", "softmax", "", "disagrees", ""),
        "train/G-4": ("train", "tiny_base, bare", "arithmetic", "", "32"),
    }
    texts = Shown((home / "report.html").read_text()).texts
    titles = ["Theoretical results and their tests",
              "Theorem 8, the law of the gap, on coins", "Held-out accuracy",
              "All claims, predicted and measured"]  # fmt: skip
    places = [texts.index(title) for title in titles]
    assert places == sorted(places)
    assert texts[texts.index("Test problems") + 1] == "coins (1); softmax (1)"
    assert texts[texts.index("Policies") + 1] == "tiny_base, bare"
    (agreement,) = (place for place, text in enumerate(texts) if text.startswith("1 of 2 "))
    assert "at step 8" in texts[agreement + 1] and "is 0.400" in texts[agreement + 1]


@pytest.mark.slow
def test_theorems_training_and_errors_make_one_report(tmp_path):
    two(tmp_path / "gap")
    trained(tmp_path / "train", 4, 0, {0: 0.2, 8: 0.4})
    studied(tmp_path / "mse", "tiny", {("none", 2): 1.0, ("none", 4): 0.5})
    report_runs([str(tmp_path / x) for x in ("gap", "train", "mse")], tmp_path / "report", None)
    texts = Shown((tmp_path / "report/report.html").read_text()).texts
    assert texts[texts.index("Commands") + 1] == "gap (2); mse (1); train (1)"
    assert (
        texts[texts.index("Completions sampled by finished runs") + 1] == "384"
    )  # 128 and 8 times 32
    assert texts[texts.index("Completions drawn from test problems") + 1] == "6000"
    pictures = ["Lemma 6, the gap under constant and falling learning rates, on softmax",
                "Theorem 8, the law of the gap, on coins", "MSE of the gradient"]  # fmt: skip
    assert [text for text in texts if text in pictures][:3] == pictures
