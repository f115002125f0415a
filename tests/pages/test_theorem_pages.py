"""The page of a study of a theorem: verdict, statement, problem, claims beside measurements."""

from __future__ import annotations

import json

import pytest
from page_views import page_of
from test_page import SVG
from test_run_page import folder_of

from grpo_ustat.pages.page import render

CONFIG = {
    "seed": 2, "theorem": {"kind": "theorem8", "problem": "valley", "steps": [10, 100]},
    "launch": {"workers": 2},
}  # fmt: skip
CLAIMS = [
    {"what": "T times the gap", "predicted": 0.123456, "measured": 0.12, "low": 0.1, "high": 0.14,
     "verdict": "agrees", "how": "95 %, 2000 replicates", "p_value": 0.04, "holm_p": 0.2,
     "severity": "2 of 8 alternatives would also have agreed"},
    {"what": "gap over the bound", "predicted": "<= 1", "measured": 1.5, "low": None, "high": None,
     "verdict": "disagrees", "how": "enumerated"},
]  # fmt: skip
RESULT = {
    "theorem": "theorem8", "statement": "T (J* - J) tends to a weighted sum of chi-squares.",
    "problem": {"prompts": 4, "mu": 0.54321, "assumption 2": "fails"}, "claims": CLAIMS,
    "answer": "The limit is there, the bound is not.",
    "verdict": "disagrees", "cost": {"rollouts": 1234567, "seconds": 12.25},
    "summary": "not shown", "versions": {"grpo-ustat": "0.1"}, "config_hash": "0123456789ab",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    folder = folder_of(tmp_path, CONFIG, RESULT)
    (folder / "figure.svg").write_text(SVG)
    (folder / "curves.csv").write_text("step,gap\n")
    return folder


def test_page_of_a_finished_study(folder):
    page = page_of(folder)
    assert page.title.startswith("Theorem 8") and page.title.endswith("on valley, seed 2")
    assert "disagree" in page.answer and page.answer.endswith(RESULT["answer"])
    statement = "T (J* - J) tends to a weighted sum of chi-squares."
    assert page.notes == [statement]
    facts = dict(page.facts)
    assert facts["Test problem"] == "prompts: 4\nmu: 0.5432\nassumption 2: fails"
    assert (facts["Completions drawn"], facts["Wall time"]) == ("1 234 567", "12 s")
    assert facts["Hash of the configuration"] == "0123456789ab" and "Model" not in facts
    (figure,) = page.figures
    assert figure.data == "curves.csv"


def test_predictions_stand_beside_measurements(folder):
    table = page_of(folder).tables[0]
    assert table.title == "Predicted and measured"
    assert table.rows == [
        ["T times the gap", "0.1235", "0.12", "[0.1, 0.14]", "0.04 (0.2)", "agrees",
         "2 of 8 alternatives would also have agreed", "95 %, 2000 replicates"],
        ["gap over the bound", "<= 1", "1.5", "", "", "disagrees", "", "enumerated"],
    ]  # fmt: skip


def test_a_study_that_enumerates_says_so(tmp_path):
    result = RESULT | {"problem": {}, "cost": {"rollouts": 0, "seconds": 0.5}}
    page = page_of(folder_of(tmp_path, CONFIG, result))
    assert dict(page.facts)["Completions drawn"] == "none (all outcomes were enumerated)"


def test_an_unfinished_study_says_so(tmp_path):
    page = page_of(folder_of(tmp_path, CONFIG))
    assert page.answer.startswith("Unfinished") and page.notes == []
    assert [table.title for table in page.tables] == ["Starts and ends"]
    assert page.title in render(page)


def test_a_page_before_its_result_is_that_after_it(tmp_path):
    """As a study leaves it, the result being written last."""
    folder = folder_of(tmp_path, CONFIG)
    early = render(page_of(folder, RESULT))
    (folder / "result.json").write_text(json.dumps(RESULT))
    assert render(page_of(folder)) == early
