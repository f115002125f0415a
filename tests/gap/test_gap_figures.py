"""Figures of theorems: a baseline has the colour that it has elsewhere."""

from __future__ import annotations

import matplotlib.pyplot as plt

from grpo_ustat.gap.evidence import Panel, PlotLine
from grpo_ustat.gap.figures import draw
from grpo_ustat.pages.figures import STYLE


def test_a_baseline_has_its_own_colour_and_no_other_line_has_it():
    lines = [PlotLine(name, [1, 2], [1, 2]) for name in ("normalised", "GRPO", "vanilla", "oracle")]
    figure, axes = plt.subplots()
    draw(axes, Panel("", "x", "y", lines))
    colours = {line.get_label(): line.get_color() for line in axes.get_lines()}
    plt.close(figure)
    for label, baseline in (("GRPO", "leave_one_out"), ("vanilla", "none"), ("oracle", "oracle")):
        assert colours[label] == STYLE[baseline][0]
    assert len(set(colours.values())) == 4
