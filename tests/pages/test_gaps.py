"""A number that is missing draws a gap and is said, in figures, tables and on pages."""

from __future__ import annotations

import json
import math
from copy import deepcopy

import matplotlib.pyplot as plt
import pytest
from folders import refused_loss, studied, trained, unsaved_study
from page_views import page_of

from grpo_ustat.measurements import error_figures, errors, group_size, recipes
from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.registry import draw_figures
from grpo_ustat.measurements.study_page import facts, tables
from grpo_ustat.pages import figures, learning
from grpo_ustat.pages.learning import GSTAR, Learning, learning_rows, notes
from grpo_ustat.pages.page import render
from grpo_ustat.report.collect import entries_in, read_runs
from grpo_ustat.runs.contents import record_of
from grpo_ustat.runs.record import RunRecord
from grpo_ustat.runs.result import RESULT_TYPES

ERRORS = {(name, size): 1 / size for name in ("none", "oracle") for size in (2, 4, 8)}
MISSING = [  # where a result may have null for a number
    "curves.1.mse", "curves.1.low", "curves.1.high", "curves.4.mse", "ratio_to_oracle.1.ratio",
    "ratio_to_oracle.1.ratio_low", "ratio_to_oracle.1.ratio_high", "scaling.gstar",
    "scaling.gstar_low", "scaling.gstar_high", "scaling.c1_low", "scaling.c3_high",
    "scaling.c1", "scaling.curve.0.n_mse", "scaling.curve.0.low", "scaling.curve.1.high",
    "assumption2.corr", "assumption2.corr_low",
    "assumption2.av_minus_a0", "assumption2.crossover_group_size",
]  # fmt: skip


def study(path, key=None):
    """A study's folder, of whose result one number is missing, and the result."""
    folder = studied(path, "tiny", ERRORS)
    result = json.loads((folder / "result.json").read_text())
    kind = {"setting": "all_questions_once", "num_prompts": 8, "baseline": "none"}
    result["ratio_to_oracle"] = [
        kind | {"group_size": size, "ratio": 1.5, "ratio_low": 1.2, "ratio_high": 2.0}
        for size in (2, 4, 8)
    ]
    result["recipes"] = [refused_loss("DAPO (arXiv 2503.14476)", 16, "few")]
    result["summary"] = "All rewards are equal."
    result["policy"]["mean_length"] = 20.0
    if key:
        *way, last = key.split(".")
        node = result
        for name in way:
            node = node[int(name)] if isinstance(node, list) else node[name]
        node[last] = None
        record_of(RESULT_TYPES["mse"], result)
    (folder / "result.json").write_text(json.dumps(result))
    return folder, result


def drawn_lines(monkeypatch, *modules):
    """Heights of the lines of every figure that is saved, and the words below it."""
    lines, words = [], []

    def save(figure, *_):
        figures.show_names_as_texts(figure)
        lines.extend(line.get_ydata() for axes in figure.axes for line in axes.lines)
        words.append(figure.get_supxlabel())
        plt.close(figure)

    for module in modules:
        monkeypatch.setattr(module, "save", save)
    return lines, words


@pytest.mark.slow
@pytest.mark.parametrize("key", MISSING)
def test_a_study_without_one_of_its_numbers_is_shown(key, tmp_path, monkeypatch):
    lines, words = drawn_lines(monkeypatch, error_figures, group_size, recipes)
    folder, result = study(tmp_path / "runs/study", key)
    one = Study(RunRecord(folder))
    error_figures.draw(folder, one)
    group_size.draw(folder, one)
    draw_figures(folder, one)
    assert render(page_of(folder, result))
    runs = read_runs(entries_in([str(tmp_path)]))
    assert not runs.damaged
    studies = list(map(Study, runs.runs))
    for table in (errors.joint_table(studies, ()), group_size.joint_table(studies, ())):
        assert table.latex() and table.csv()
    error_figures.draw_joint(tmp_path, "mse", studies, [])
    group_size.draw_joint(tmp_path, "fixed_n", studies, [])


def test_rewards_other_than_0_and_1_have_a_mean_reward_and_no_accuracy(tmp_path, monkeypatch):
    """In titles, tables and facts alike; of several studies where one has such rewards."""
    titles = []

    def save(figure, *_):
        titles.extend(axes.get_title(loc="left") for axes in figure.axes)
        plt.close(figure)

    for module in (group_size, recipes):
        monkeypatch.setattr(module, "save", save)
    for name, quantity in (("a", "accuracy"), ("b", "mean reward")):
        folder, result = study(tmp_path / name)
        result["policy"] |= {"quantity": quantity, "mean_reward": 0.5}
        (folder / "result.json").write_text(json.dumps(result))
        one = Study(RunRecord(folder))
        group_size.draw(folder, one)
        draw_figures(folder, one)
        assert titles
        words = [
            *titles,
            errors.curve_tables({one: one.need(errors.CURVES)})[0].notes[0],
            facts(RunRecord(folder))[0][0],
        ]
        (other,) = {"accuracy", "mean reward"} - {quantity}
        for text in words:
            assert quantity in text.lower() and other not in text.lower()
        titles.clear()
    both = [Study(RunRecord(tmp_path / name, name)) for name in ("a", "b")]
    for runs, quantity in ((both[:1], "accuracy"), (both, "mean reward")):
        assert group_size.joint_table(runs, ()).columns[1] == quantity
        assert f"intervals of {quantity} are for new" in " ".join(
            errors.joint_table(runs, ()).notes
        )


@pytest.mark.parametrize(
    "questions, batch, scope",
    [(1, "1 question", "for these questions"), (3, "3 questions", "for these questions"),
     (4, "4 questions", "for new questions")],
)  # fmt: skip
def test_intervals_of_a_few_questions_are_said_to_be_of_these(tmp_path, questions, batch, scope):
    folder, result = study(tmp_path / "a")
    result["questions"] = questions
    (folder / "result.json").write_text(json.dumps(result))
    run, other = RunRecord(folder, "a"), Study(RunRecord(study(tmp_path / "b")[0], "b"))
    one = Study(run)
    table = errors.curve_tables({one: one.need(errors.CURVES)})[0]
    assert f"averaged over {batch} (" in table.title and f"(interval {scope})" in table.notes[0]
    assert facts(run)[0][1] == f"0.500 [0.400, 0.600], {scope}"
    law = next(table for table in tables(run) if "Scaling law" in table.title)
    assert law.notes[0] == f"The 95 % intervals are {scope}."
    assert f"intervals of accuracy are {scope}." in errors.joint_table([one], ()).notes[0]
    if questions < 4:
        both = "for new questions or for these questions (fewer than 4)"
        assert (
            f"The 95 % intervals are {both}. Each study has one seed."
            in group_size.joint_table([one, other], ()).notes
        )


def test_a_missing_error_is_a_gap_and_is_said(tmp_path, monkeypatch):
    lines, words = drawn_lines(monkeypatch, error_figures)
    folder, result = study(tmp_path, "curves.1.mse")
    one = Study(RunRecord(folder))
    error_figures.draw(folder, one)
    assert any([math.isnan(x) for x in line] == [False, True, False] for line in lines)
    assert "no error of vanilla (no baseline) at G = 4" in " ".join(words[0].split())
    (table,) = errors.curve_tables({one: one.need(errors.CURVES)})
    assert any("at G = 4." in note for note in table.notes)
    assert table.rows[1][1] == "-"


def test_a_missing_ratio_is_a_gap(tmp_path):
    _, result = study(tmp_path, "ratio_to_oracle.1.ratio")
    rows = error_figures.ratio_rows(unsaved_study(result), "all_questions_once")
    figure, axes = plt.subplots()
    error_figures.ratio_panel(axes, rows, {})
    assert [math.isnan(x) for x in axes.lines[-1].get_ydata()] == [False, True, False]
    plt.close(figure)
    for row in result["ratio_to_oracle"]:
        row["ratio"] = None
    assert error_figures.ratio_rows(unsaved_study(result), "all_questions_once") == []


def test_a_step_without_a_number_is_a_gap_of_its_curve():
    metrics = [{"step": s, "reward": None if s == 2 else 0.5, "grad_norm": None} for s in (1, 2, 3)]
    rows = learning_rows([Learning("", metrics, [])])
    assert [row["mean"] for row in rows] == [0.5, None, 0.5]
    assert "1 point metrics.jsonl" in notes(rows)[0]


def test_an_undecided_best_size_is_a_gap():
    constants = {f"monitor/c{k}": 1.0 for k in (1, 2, 3)}
    metrics = [constants | {"step": s, GSTAR: g} for s, g in ((1, 3.0), (2, None), (3, 4.0))]
    metrics.append({"step": 4, GSTAR: None, "monitor/c1": None})
    rows = [row for row in learning_rows([Learning("", metrics, [])]) if row["quantity"] == GSTAR]
    assert [row["mean"] for row in rows] == [3.0, None, 4.0, None]
    assert "2 points" in notes(rows)[0]
    undecided = [row | {GSTAR: None} for row in metrics]
    assert not any(row["quantity"] == GSTAR for row in learning_rows([Learning("", undecided, [])]))


@pytest.mark.slow
def test_learning_with_gaps_is_drawn(tmp_path, monkeypatch):
    lines, words = drawn_lines(monkeypatch, learning)
    folder = trained(tmp_path / "run", 4, 0, {0: 0.2, 8: 0.4})
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    for row in rows[2:4]:
        row["reward"] = None
    run = RunRecord(folder)
    learning.learning_figure(folder, "learning", [Learning("", rows, run.evals)])
    assert any(sum(map(math.isnan, line)) == 2 for line in lines)
    assert "Gaps in" in words[0]
    assert deepcopy(rows) == rows
