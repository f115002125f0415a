"""The page of a run folder: finished, unfinished, damaged, hostile, large."""

from __future__ import annotations

import html
import json
import re
from dataclasses import asdict
from datetime import UTC, datetime
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from commands import compose
from folders import completed
from page_views import page_of
from test_page import SVG

from grpo_ustat.measurements.study_page import COSTS_CAPTION
from grpo_ustat.pages import run_page as pages
from grpo_ustat.pages.page import render
from grpo_ustat.pages.run_page import leave_page
from grpo_ustat.runs.contents import command_of
from grpo_ustat.runs.files import csv_rows
from grpo_ustat.runs.log import write_rows
from grpo_ustat.runs.result import StudyResult, TheoremResult, TrainResult

CONFIG = {
    "model": {"name": "small", "model_name_or_path": "here", "dtype": "float32"},
    "dataset": {"name": "sums"}, "prompt": {"name": "bare"}, "launch": {"device": "cpu"},
    "baseline": {"name": "leave_one_out"}, "objective": {"name": "algorithm1"},
    "optimizer": {"name": "adamw"}, "budget": {"rollouts": 64}, "group_size": 8,
    "learning_rate": 1e-4, "temperature": 1.0, "max_completion_length": 32, "seed": 3,
}  # fmt: skip
TRAIN = CONFIG | {"max_steps": 4}
MSE = CONFIG | {"study": {"methods": ["closed_form"], "questions": 10}}
MSE |= {"reward_funcs": ["task"], "reward_weights": None}
EVAL = """step,split,decoding,quantity,mean_reward,low,high,n,num_generations,clipped_ratio,\
extraction_failure_ratio
0,test,sampled,accuracy,0.25,0.2,0.3,100,1,0.0,0.0
0,test,greedy,accuracy,0.35,0.2,0.3,100,1,0.0,0.0
4,test,sampled,accuracy,0.5,0.45,0.55,100,1,0.1,0.0
4,test,greedy,accuracy,0.6,0.45,0.55,100,1,0.1,0.0
"""
RESULT = completed(TrainResult, {
    "quantity": "accuracy", "final_mean_reward": 0.5, "gain": 0.25, "gain_low": 0.125,
    "gain_high": 0.375, "steps": 4,
    "rollouts": 256, "tokens": 4096, "seconds": 8.0, "alarms": {"no_signal": 2},
    "failed_saves": 0, "evals": csv_rows(EVAL),
    "left_out": {"too long": 7}, "config_hash": "0123456789ab",
    "summary": "Accuracy rose. WARNING: 10% of the completions were cut.",
})  # fmt: skip
STUDIED = completed(StudyResult, {
    "curves": [
        {"method": "closed_form", "baseline": "none", "group_size": g, "mse": 8.0 / g,
         "low": 7.0 / g, "high": None if g == 4 else 9.0 / g, "cosine": None,
         "interval": "completions"}
        for g in (2, 4)
    ],
    "scaling": {"c1": 1.0, "c1_low": 0.5, "c1_high": 2.0, "c2": 2.0, "c3": 9.0,
                "gstar": 4.25, "gstar_low": 4.0, "gstar_high": 4.5,
                "covariance": (1e-4 * np.eye(3)).tolist(), "dof": 199.0},
    "assumption2": {"corr": -0.5, "av_minus_a0": -2.0, "av_minus_a0_low": -3.0,
                    "av_minus_a0_high": -1.0, "crossover_group_size": 3.0,
                    "crossover_group_size_low": 2.5, "crossover_group_size_high": None},
    "grad_sq": {"reason": "not above 0"},
    "metric": {"parameters": 12, "norm": "Euclidean", "between_questions": "exact"},
    "policy": {"quantity": "accuracy", "mean_reward": 0.5, "mean_reward_low": 0.4,
               "mean_reward_high": 0.6, "mean_length": 9.0},
    "noise": {"curve": [{"group_size": 4}], "best": {"group_size": None}},
    "questions": 10, "pool_completions": 8, "summary": "corr(q, Z) = -0.5.", "not_measured": [],
    "cost": {"rollouts": 80, "tokens": 720, "judge_timeouts": 1, "judge_failures": 2,
             "seconds_generate": 1.0, "seconds_score": 2.0},
    "config_hash": "0123456789ab",
})  # fmt: skip

RECORDS = {"train": TrainResult, "mse": StudyResult, "gap": TheoremResult}


def completion(step, reward=1.0, text="42"):
    return {"step": step, "prompt": "6*7=", "completion": text, "reward": reward}


def folder_of(path, config, result=None, steps=4, rows=None):
    (path / ".hydra").mkdir(parents=True)
    (path / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    code = {"commit": "f" * 40, "diff": "+one\n-two\n", "versions": {"torch": "2"}}
    (path / "code.json").write_text(json.dumps(code))
    launches = [{"event": "start"}, {"event": "start"}, {"event": "resumed", "step": 2}]
    (path / "launches.jsonl").write_text("".join(json.dumps(row) + "\n" for row in launches))
    if "max_steps" in config:
        metrics = [{"step": s, "reward": s / 8, "tokens": 10} for s in range(1, steps + 1)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
        (path / "eval.csv").write_text(EVAL)
        write_rows(path, rows or [completion(step) for step in range(1, steps + 1)])
    if result:
        whole = completed(RECORDS[command_of(config)], result)
        (path / "result.json").write_text(json.dumps(whole))
    return path


def test_a_page_says_when_where_and_by_which_command_its_run_started(tmp_path):
    folder = folder_of(tmp_path, TRAIN, RESULT)
    assert page_of(folder).provenance == ""  # of an earlier version, which kept no times
    start = {"event": "start", "time": "2026-03-01T04:20:59+00:00", "host": "node7"}
    row = start | {"command": "grpo-ustat train -m group_size=4,8"}
    (folder / "launches.jsonl").write_text(json.dumps(row) + "\n")
    now = datetime(2026, 3, 1, 5, 20, 59, tzinfo=UTC)
    page = page_of(folder, now=now)
    line = "started 2026-03-01 04:20 UTC on node7 by `grpo-ustat train -m group_size=4,8`"
    assert page.provenance == line and line in html.unescape(render(page))
    assert dict(page.facts)["Wall time"] == "1:00:00"
    assert dict(page_of(folder).facts)["Wall time"] is None  # killed


def test_page_of_a_finished_training_run(tmp_path):
    page = page_of(folder_of(tmp_path, TRAIN, RESULT))
    for numbers in ("0.250 [0.200, 0.300]", "0.500 [0.450, 0.550]", "+0.250 [+0.125, +0.375]"):
        assert numbers in page.answer
    cut, left_out = page.notes
    assert cut.startswith("WARNING: 10%") and left_out.startswith("WARNING: 7 questions")
    facts = dict(page.facts)
    assert facts["Rollouts per step"] == "64 = 8 prompts x G = 8"
    assert facts["Started"] == "2 times; resumed from step 2"
    assert facts["Alarms"] == "no_signal in 2 steps"
    assert facts["Commit"].startswith("f" * 40 + ", with 2 lines")
    assert (facts["Steps"], facts["Wall time of training steps"]) == ("4 of 4", "8 s")
    accuracy = page.tables[0]
    assert list(accuracy.columns) == [
        "step",
        "decoding",
        "accuracy",
        "questions",
        "cut",
        "no answer",
    ]
    assert accuracy.rows[2] == [4, "sampled", "0.500 [0.450, 0.550]", 100, 0.1, 0.0]
    assert [row["step"] for row in page.completions.rows] == [1, 2, 3, 4]
    assert set(page.completions.rows[0]) == {"step", "prompt", "completion", "reward"}


def test_what_the_monitor_measured_is_on_the_page(tmp_path):
    folder = folder_of(tmp_path, TRAIN, RESULT, steps=1)
    assert "Best group size" not in render(page_of(folder))
    monitored = {f"monitor/{name}": 2.0 for name in ("c1", "c1_low", "c1_high", "mse")}
    sizes = {"monitor/gstar": 8.94, "monitor/gstar_low": 7.1, "monitor/gstar_high": None}
    unknown = dict.fromkeys([*monitored, *sizes])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "tokens": 1} | monitored | sizes) + "\n")
        file.write(json.dumps({"step": 4, "tokens": 1} | unknown) + "\n")
    page = page_of(folder)
    (table,) = (one for one in page.tables if one.title.startswith("Best group size"))
    first, last = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert first["G*"] == "at least 7.1" and first["MSE of leave one out's gradient"] == 2.0
    assert first["C1"] == "2.00 [2.00, 2.00]" and (last["step"], last["G*"]) == (
        4,
        "not enough data",
    )
    assert dict(page.facts)["G* of the latest monitored step"] == "not enough data, step 4"


def test_a_page_before_its_result_is_that_after_it(tmp_path):
    """As a run leaves it, the result being written last."""
    folder = folder_of(tmp_path, TRAIN)
    early = render(page_of(folder, RESULT))
    (folder / "result.json").write_text(json.dumps(RESULT))
    assert render(page_of(folder)) == early


@pytest.mark.parametrize(
    "evals, numbers",
    [
        (0, ()),
        (1, ("0.250 [0.200, 0.300]",)),
        (3, ("0.250 [0.200, 0.300]", "0.500 [0.450, 0.550]")),
    ],
)
def test_page_of_an_unfinished_training_run(tmp_path, evals, numbers):
    folder = folder_of(tmp_path, TRAIN, steps=2)
    (folder / "eval.csv").write_text("".join(EVAL.splitlines(keepends=True)[: evals + 1]))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')  # as a killed run leaves it
    page = page_of(folder)
    assert "2 of 4 steps" in page.answer and page.notes == []
    assert re.findall(r"0\.\d+ \[.*?\]", page.answer) == [*numbers]
    assert dict(page.facts)["Tokens sampled"] == 20
    assert page.title in render(page)


def test_page_of_a_study(tmp_path):
    folder = folder_of(tmp_path, MSE, STUDIED)
    (folder / "figure.svg").write_text(SVG)
    (folder / "scaling.svg").write_text(SVG)
    (folder / "own.svg").write_text(SVG)
    (folder / "curves.csv").write_text("mse\n")
    page = page_of(folder)
    assert "4.2 [4.0, 4.5]" in page.answer and "G = 4" in page.answer
    assert page.next_step.startswith("grpo-ustat train model=") and "group_size=4" in page.next_step
    assert page.next_step in render(page)
    assert page.notes[1] == "corr(q, Z) = -0.5." and page.lead is not None
    assert page.lead.title == COSTS_CAPTION
    assert [figure.data for figure in page.figures] == ["curves.csv", None]
    assert page.figures[1].title == "own"
    by_title = {table.title: table for table in page.tables}
    law = by_title["Scaling law and Assumption 2"]
    (curves,) = (table for title, table in by_title.items() if title.startswith("MSE of the"))
    assert curves.rows == [["2", "4.00\n[3.50, 4.50]"], ["4", "2.00\n(no interval)"]]
    assert law.notes[1:] == ["not above 0"]
    assert law.rows[0] == ["C1", 1.0, 0.5, 2.0]
    assert dict(page.facts)["Answers that could not be judged"] == 3


def test_a_study_without_signal_answers_in_its_own_words_once(tmp_path):
    result = STUDIED | {"assumption2": STUDIED["assumption2"] | {"corr": None}}
    page = page_of(folder_of(tmp_path, MSE, result))
    assert page.answer == "corr(q, Z) = -0.5." and page.answer not in page.notes


def test_a_study_of_equal_rewards_has_an_answer_and_no_table(tmp_path):
    result = {
        "equal_rewards": {"reward": 0.0, "completions": 80, "right": 80},
        "summary": "All are right. WARNING: 2 were not judged.",
    }
    result |= {key: STUDIED[key] for key in ("policy", "cost", "questions", "pool_completions")}
    page = page_of(folder_of(tmp_path, asdict(compose("mse")), result))
    assert page.answer == "All are right." and page.notes == ["WARNING: 2 were not judged."]
    assert page.next_step.startswith("harder questions: grpo-ustat mse ")
    assert [table.title for table in page.tables] == ["Starts and ends"] and page.figures == []
    assert dict(page.facts)["Questions"] == 10 and "Parameters of the gradient" not in dict(
        page.facts
    )
    assert "All are right." in render(page)


def test_unfinished_study_counts_its_questions(tmp_path):
    folder = folder_of(tmp_path, MSE)
    (folder / "pool").mkdir()
    for name in ("aa-0-4", "aa-4-4", "bb-0-4"):
        (folder / "pool" / f"{name}.safetensors").touch()
    page = page_of(folder)
    assert "2 of 10 questions" in page.answer
    render(page)


def test_damaged_files_are_named_and_cost_nothing_else(tmp_path):
    folder = folder_of(tmp_path, TRAIN, RESULT)
    for name, text in {
        "code.json": "{", "eval.csv": "\x00\udcff", "completions.parquet": "PAR1",
        "own.svg": "<svg><script/></svg>", "result.json": "[]", "metrics.jsonl": "{}\n{\n",
    }.items():  # fmt: skip
        (folder / name).write_text(text, errors="surrogateescape")
    page = page_of(folder)
    named = [note.split()[0] for note in page.notes]
    assert sorted(named) == [
        "code.json", "completions.parquet", "eval.csv", "metrics.jsonl", "own.svg", "result.json",
    ]  # fmt: skip
    assert "small" in render(page)


def test_error_in_a_page_is_a_warning(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise KeyError("whatever")

    folder = SimpleNamespace(path=tmp_path, config_hash="x", write=None)
    monkeypatch.setattr(pages, "run_page", fail)
    leave_page(folder, RESULT)
    said = capsys.readouterr().err
    assert "report.html" in said and "KeyError" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_long_run_has_a_page_of_some_thousand_completions(tmp_path):
    """Whole steps of it, evenly spaced, the first and the last among them, and the page says so."""
    rows = [completion(s, i % 2, f"{s} {i} " * 60) for s in range(1, 1001) for i in range(8)]
    folder = folder_of(tmp_path, TRAIN | {"max_steps": 1000}, RESULT, steps=1000, rows=rows)
    page = page_of(folder)
    text = render(page)
    shown = [row["step"] for row in page.completions.rows]
    assert shown == [step for step in dict.fromkeys(shown) for _ in range(8)]
    assert 2500 < len(shown) <= 3000 and {1, 1000} <= set(shown)
    gaps = {
        b - a for a, b in zip(dict.fromkeys(shown), list(dict.fromkeys(shown))[1:], strict=False)
    }
    assert gaps <= {2, 3}
    assert "8000 completions" in text and f"{len(shown)} are shown here" in text
    steps = next(table for table in page.tables if table.title == "Steps")
    assert len(steps.rows) == 200 and "200 of 1000 steps" in steps.notes[0]


@pytest.mark.slow
def test_few_large_steps_are_cut_to_what_a_page_holds(tmp_path):
    rows = [completion(None, text="x" * 10_000) for _ in range(2000)]
    page = page_of(folder_of(tmp_path, TRAIN, RESULT, rows=rows))
    assert 700 <= len(page.completions.rows) <= 800
    assert "2000 completions" in page.completions.note


def closed(name, estimate, low, high):
    return {name: estimate, f"{name}_low": low, f"{name}_high": high}


def test_the_page_of_a_study_has_noise_and_dynamic_sampling(tmp_path):
    """Numbers with their intervals, unknown ends said, all in tables of their own."""
    noise = {"rollouts": 768.0, "rollouts_low": 512.0, "rollouts_high": None,
             "tokens": None, "tokens_low": None, "tokens_high": None,
             "prompt_share": 0.25, "prompt_share_low": 0.2, "prompt_share_high": 0.3}  # fmt: skip
    dynamic = {"group_size": 4, "kept": 0.5, "kept_low": 0.25, "kept_high": 0.75,
               "generated": 2.0, "generated_low": 4 / 3, "generated_high": 4.0,
               "break_even": 0.01, "break_even_low": 0.0, "break_even_high": 0.02}  # fmt: skip
    result = STUDIED | {
        "noise": {"curve": [noise | {"group_size": 4}],
                  "best": noise | {"group_size": 4.25, "group_size_tokens": None},
                  "reason": "no upper end"},
        "dynamic_sampling": [dynamic],
    }  # fmt: skip
    folder = folder_of(tmp_path, MSE, result)
    tables = {table.title: table for table in page_of(folder).tables}
    row = ["768 [512, infinity)", "-", "0.250 [0.200, 0.300]"]
    assert tables["Noise scale"].rows == [["4", *row], ["G* = 4.2", *row]]
    assert tables["Noise scale"].notes[1] == "no upper end"
    assert tables["Dynamic sampling"].rows == [
        ["4", "0.500 [0.250, 0.750]", "2.00 [1.33, 4.00]", "0.0100 [0.00, 0.0200]"]
    ]
