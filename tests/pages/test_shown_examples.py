"""Stored examples as they are shown: words unbroken on a terminal, letters legible in figures."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from grpo_ustat.measurements import error_figures, group_size
from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.group_size import extra_error_table
from grpo_ustat.measurements.registry import MEASUREMENTS, draw_figures, tables
from grpo_ustat.pages.figures import SMALL, WIDTH, panel_figure, panel_rows
from grpo_ustat.pages.tables import Table, cell_text
from grpo_ustat.report.aggregate import report_runs
from grpo_ustat.runs.record import RunRecord
from grpo_ustat.terminal.console import Console

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
STUDIES = sorted(path.parent for path in EXAMPLES.glob("mse/*/result.json"))
# An interval, or what has no space in it.
WORD = re.compile(r"\[[^\]\[\n]*?[\])]|[^\s\[\]]+")
NAMES = ["tiny_base, bare", "Qwen2.5-Math-7B-Instruct, qwen_math_cot\ngsm8k", "a b"]


def printed(table, width):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def check_words(table, width):
    """Every word and interval of the table is in a line, and no line is longer than the screen."""
    text = printed(table, width)
    assert max(map(len, text.splitlines())) <= width
    shown = [i for i, column in enumerate(table.columns) if column not in table.sentences]
    cells = [row[i] for row in (table.columns, *table.rows) for i in shown]
    for cell in cells:
        words = WORD.findall(cell if isinstance(cell, str) else cell_text(cell))
        assert set(words) <= {*WORD.findall(text), *text.split()}


@pytest.mark.parametrize("width", [64, 80, 120])
@pytest.mark.parametrize("columns", range(2, 9))
def test_columns_without_room_follow_in_a_part_of_their_own(columns, width):
    rows = [[name, *["0.2751*\n[0.2573, 0.2934]"] * (columns - 1)] for name in NAMES]
    names = ["", *(f"G = {2**i}" for i in range(1, columns))]
    table = Table("Held-out accuracy", names, rows, ["A note."], headings=True)
    check_words(table, width)
    text = printed(table, width)
    assert text.count("[0.2573, 0.2934]") == len(NAMES) * (columns - 1)
    parts = text.count("qwen_math_cot")
    assert text.count("A note.") == text.count("Held-out accuracy") == 1
    assert (parts > 1) == (columns > (3 if width == 64 else 4 if width == 80 else 6)), parts


def test_a_word_longer_than_a_screen_is_all_that_is_broken():
    name = "x" * 100
    table = Table("Names", ["name", "number"], [[name, "1 [0, 2]"], ["y", "3 [0, 4]"]])
    text = printed(table, 40)
    assert text.count("x") == 100 and "[0, 2]" in text and max(map(len, text.splitlines())) <= 40


@pytest.mark.parametrize("folder", STUDIES, ids=lambda folder: folder.name)
def test_no_table_of_a_study_breaks_a_word(folder):
    study = Study(RunRecord(folder))
    shown = [extra_error_table(study), *tables(study, MEASUREMENTS)]
    for table in filter(None, shown):
        check_words(table, 80)


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """Every figure of the stored studies, of a run of the sweep, and of both reports."""
    home, figures = tmp_path_factory.mktemp("figures"), {}

    def keep(figure, file, **_):
        figures[f"{Path(file).parent.name} {Path(file).stem}"] = figure
        if str(file).endswith("svg"):
            Path(file).write_text('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"/>')

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Figure, "savefig", keep)
        for folder in STUDIES:
            study = Study(RunRecord(folder))
            place = home / folder.name
            place.mkdir()
            error_figures.draw(place, study)
            group_size.draw(place, study)
            draw_figures(place, study)
        report_runs([str(EXAMPLES / "mse")], home / "studies", None)
        report_runs([str(EXAMPLES / "sweep")], home / "sweep", None)
    return figures


@pytest.mark.slow
def test_letters_are_legible_and_no_place_is_empty(figures):
    names = {name.split()[-1] for name in figures}
    assert names >= {"figure", "scaling", "recipes", "fixed_n", "mse", "accuracy", "learning"}
    for name, figure in figures.items():
        scale = min(1.0, WIDTH / figure.get_figwidth())
        texts = [x for x in figure.findobj(Text) if x.get_visible() and x.get_text().strip()]
        assert texts and min(x.get_fontsize() * scale for x in texts) >= SMALL, name
        check_grid(figure)
        for axes in figure.axes:
            assert axes.get_visible() and (axes.lines or axes.collections or axes.texts), name
            assert axes.get_xlabel() or axes.get_ylabel() or len(figure.axes) > 1, name


def check_grid(figure):
    """Axes cover every place of the figure's grid."""
    specs = [axes.get_subplotspec() for axes in figure.axes]
    rows, columns = specs[0].get_gridspec().get_geometry()
    covered = {place for spec in specs for place in itertools.product(spec.rowspan, spec.colspan)}
    assert covered == set(itertools.product(range(rows), range(columns)))


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("heights", [(1.0,), (1.0, 0.7)])
def test_panels_fill_their_figure(count, heights):
    figure, panels = panel_figure(panel_rows(count), heights)
    assert sum(map(len, panels)) == count and len(figure.axes) == count * len(heights)
    check_grid(figure)
    assert figure.get_figwidth() == WIDTH
    plt.close(figure)
