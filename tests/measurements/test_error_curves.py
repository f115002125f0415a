"""Errors of the gradient and costs of group sizes: tables and figures."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from folders import studied, unsaved_study
from matplotlib.text import Text

from grpo_ustat.measurements import error_figures
from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.error_figures import ratio_rows
from grpo_ustat.measurements.errors import CURVES, worse_baselines
from grpo_ustat.measurements.group_size import SCALING, scaling_panel
from grpo_ustat.report.aggregate import report_runs
from grpo_ustat.runs.record import RunRecord


def test_unbiased_errors_above_the_interval_of_the_least_are_worse():
    rows = [
        {"baseline": name, "mse": x, "low": low, "high": high, "unbiased": name != "shrunken"}
        for name, x, low, high in (
            ("oracle", 1.0, 0.9, 1.1), ("a", 5.0, 4.0, 6.0), ("b", 3.0, 2.0, 4.0),
            ("c", 5.0, 4.5, 6.0), ("d", None, None, None), ("e", 4.0, None, None),
            ("shrunken", 1.0, 0.5, 2.0),
        )
    ]  # fmt: skip
    curves = unsaved_study({"curves": rows}).need(CURVES)
    assert worse_baselines(curves) == ["c"]
    assert worse_baselines(curves[:2]) == worse_baselines([]) == []


@pytest.mark.slow
def test_a_figure_of_studies_shows_it(tmp_path):
    errors = {(name, size): 8.0 / size for name in ("leave_one_out", "median") for size in (2, 4)}
    folder = studied(tmp_path / "study", "tiny", errors)
    error_figures.draw_joint(tmp_path, "mse", [Study(RunRecord(folder, "study"))], [])
    assert ">median</text>" in (tmp_path / "mse.svg").read_text()


def test_no_size_is_recommended_where_the_best_is_not_known():
    """Neither a bold "G = 256" nor a band over the picture: a line at what G* is at least."""
    law = {"c1": 0.01, "c2": 2.0, "c3": 9.0, "dof": 20.0}
    law |= {"covariance": np.diag([1.0, 0.01, 0.01]).tolist()}
    ends = {"gstar": 31.0, "gstar_low": 5.8, "gstar_high": None}
    figure, (known, unknown) = plt.subplots(1, 2)
    for axes, scaling in ((unknown, law | ends), (known, law | ends | {"gstar_high": 40.0})):
        scaling_panel(axes, unsaved_study({"scaling": scaling}).need(SCALING), 256)
    for axes, labels, bands in ((unknown, 0, 0), (known, 1, 1)):
        bold = [text for text in axes.texts if text.get_fontweight() == "bold"]
        spans = [patch for patch in axes.patches if patch.get_alpha() == 0.3]
        assert (len(bold), len(spans)) == (labels, bands)
    assert "dotted: G* is at least 5.8" in unknown.get_xlabel()
    plt.close(figure)


def test_of_many_sizes_that_divide_those_that_are_apart_are_named():
    """Dots stand at all: 240 has 15 beside 16."""
    law = {"c1": 1.0, "c2": 2.0, "c3": 49.0, "dof": 99.0, "covariance": (1e-4 * np.eye(3)).tolist()}
    law |= {"gstar": 8.0, "gstar_low": 7.0, "gstar_high": 9.0}
    figure, axes = plt.subplots()
    scaling_panel(axes, unsaved_study({"scaling": law}).need(SCALING), 240)
    assert list(axes.get_xticks())[:6] == [2, 3, 4, 6, 8, 12]
    assert len(axes.texts) <= len(axes.get_xticks())
    dots = {line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"}
    assert {5, 10, 15, 16} <= dots and "n = 240" in axes.get_xlabel()
    plt.close(figure)


def test_ratios_of_a_study_without_any_are_those_of_its_curves(tmp_path):
    """8/G and 4/G: 2; with ratios of its own, these and their intervals."""
    errors = {(name, g): x / g for name, x in (("none", 8.0), ("oracle", 4.0)) for g in (2, 4)}
    result = RunRecord(studied(tmp_path / "study", "tiny", errors)).final_result
    rows = ratio_rows(unsaved_study(result), "all_questions_once")
    assert [(r.baseline, r.group_size, r.ratio.estimate) for r in rows] == [
        ("none", 2, 2.0),
        ("none", 4, 2.0),
    ]
    assert all(np.isnan(row.ratio.low) for row in rows)
    own = {"baseline": "none", "setting": "all_questions_once", "num_prompts": 8, "group_size": 4}
    own |= {"ratio": 2.5, "ratio_low": 2.0, "ratio_high": 3.0}
    rows = ratio_rows(unsaved_study(result | {"ratio_to_oracle": [own]}), "all_questions_once")
    assert {row.group_size: row.ratio.estimate for row in rows} == {2: 2.0, 4: 2.5}
    assert {row.ratio.high for row in rows if row.group_size == 4} == {3.0}
    assert ratio_rows(unsaved_study(result), "with_replacement") == []


def test_rules_that_one_panel_alone_has_are_named_too(tmp_path, monkeypatch):
    errors = {(name, g): 8 / g for name in ("none", "oracle") for g in (2, 4)}
    result = RunRecord(studied(tmp_path / "study", "tiny", errors)).final_result
    new = {"setting": "with_replacement", "method": "new_questions", "interval": "questions"}
    rows = [row | new | {"num_prompts": 16 // row["group_size"]} for row in result["curves"]]
    rows += [row | {"baseline": "opo"} for row in rows if row["baseline"] == "none"]
    drawn = []
    monkeypatch.setattr(error_figures, "save", lambda figure, *_: drawn.append(figure))
    error_figures.draw(tmp_path, unsaved_study(result | {"curves": result["curves"] + rows}))
    (figure,) = drawn
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][-1] == "opo"
    figure.canvas.draw()
    texts = [x for x in figure.findobj(Text) if x.get_text() and x not in legend.get_texts()]
    assert not any(legend.get_window_extent().overlaps(x.get_window_extent()) for x in texts)
    titles = [" ".join(axes.get_title("left").split()) for axes in figure.axes[::2]]
    assert titles[1] == "batch: 16 rollouts: 16/G new questions x G completions"
    plt.close(figure)


@pytest.mark.slow
def test_panels_of_studies_have_the_order_of_the_sweep(tmp_path):
    """As they were started, whatever their folders are called; the batch is named."""
    errors = {
        (name, size): 8.0 / size for name in ("none", "group_mean", "oracle") for size in (2, 4)
    }
    for second, name in enumerate(("tiny_base", "tiny", "tiny_direct")):
        folder = studied(tmp_path / "studies" / name, name, errors)
        time = f"2026-01-01T00:00:0{second}+00:00"
        start = f'{{"event": "start", "time": "{time}", "host": "h", "pid": 1}}'
        end = '{"event": "end", "outcome": "done"}'
        (folder / "launches.jsonl").write_text(f"{start}\n{end}\n")
    report_runs([str(tmp_path / "studies")], tmp_path / "report", None)
    picture = (tmp_path / "report/mse.svg").read_text()
    places = [
        picture.index(f">{name}, bare</text>") for name in ("tiny_base", "tiny", "tiny_direct")
    ]
    assert places == sorted(places)
    assert "batch: all 8 questions x" in picture
    assert "group mean (biased)" in picture and "the oracle's" in picture
