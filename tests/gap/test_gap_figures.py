"""Figure of a theorem: markers with intervals for measurements, lines for predictions."""

from __future__ import annotations

import matplotlib.pyplot as plt

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.gap.evidence import Panel, Series
from grpo_ustat.gap.figures import draw


def test_measurements_are_markers_and_predictions_are_lines_of_their_colour():
    measured = [Interval(1.0, -1.0, 3.0), Interval(2.0, 1.0, 4.0)]
    lines = [Series("both", [2, 4], measured, [1.0, 2.0]), Series("line", [2, 4], predicted=[1, 1])]
    figure, axes = plt.subplots()
    draw(axes, Panel("group size G", "y", lines))
    markers, line, alone = axes.get_lines()
    assert markers.get_linestyle() == "None" and line.get_color() == markers.get_color()
    assert alone.get_color() != line.get_color()
    (ends,) = axes.collections[0].get_segments()[:1]
    assert ends[:, 1].tolist() == [0.01, 3.0]  # a logarithmic axis ends above 0
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["both", "line"]
    plt.close(figure)
