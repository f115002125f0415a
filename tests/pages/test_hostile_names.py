"""Names are data: on a terminal, in figures, on pages, in CSV, LaTeX, file names and overrides."""

from __future__ import annotations

import ast
import csv
import io
import re
from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree

import hostile
import matplotlib.pyplot as plt
import pytest
import yaml
from folders import claim, proved, studied, trained
from test_page import Skeleton, page_of
from test_tables import check_latex

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.config.identity import folder_name
from grpo_ustat.measurements.next_step import policy_overrides
from grpo_ustat.pages.figures import FONTS, legend_label, show_names_as_texts
from grpo_ustat.pages.page import render
from grpo_ustat.pages.tables import LATEX_SPECIAL, Table, csv_text
from grpo_ustat.report.aggregate import report_runs
from grpo_ustat.runs.files import csv_rows
from grpo_ustat.terminal.console import Console
from grpo_ustat.terminal.streams import tell, visible

ROOT = Path(__file__).parents[2] / "grpo_ustat"
NAMES = list(hostile.NAMES.values())
RUN_BY_A_SHEET = ("=", "+", "-", "@", "\t", "\r")
OWN_PRINTS = {  # modules that print what no name is in, or bytes as they are
    "__main__.py", "advise/__main__.py", "cli/help.py", "cli/parser.py",
    "doctor/__main__.py",
    "runs/log.py", "terminal/console.py", "terminal/streams.py", "integrations/verl_record.py",
}  # fmt: skip


LATEX_COMMANDS = {
    "begin", "end", "centering", "caption", "label", "resizebox", "ifdim", "width", "linewidth",
    "else", "fi", "toprule", "midrule", "bottomrule", "textbackslash", "textbar", "textasciitilde",
    "textasciicircum", "textless", "textgreater", "surd", "dots", "usepackage",
}  # fmt: skip


def table_of(names):
    return Table(
        names[0], ["name", "place"], [[name, i] for i, name in enumerate(names)], notes=names,
        name="names", data=[{"name": name, "low": -0.5} for name in names],
    )  # fmt: skip


def on_a_terminal(name, capsys, place):
    console = Console(width=25_000)
    console.print(table_of([name]))
    console.print(name, soft_wrap=True)
    tell(name)
    text = capsys.readouterr().out
    assert not set(text) & set(hostile.TERMINAL_ACTS)
    lines = visible(name).split("\n")
    assert all(text.count(line.expandtabs()[:100].strip()) >= 4 for line in lines)


def in_a_spreadsheet(name, capsys, place):
    """It runs no name, and reading gives the name back."""
    text = csv_text([{"name": name, "low": -0.5}])
    assert "-0.5" in text and not set(text) & set(hostile.TERMINAL_ACTS)
    (_, (cell, _)) = csv.reader(io.StringIO(text))
    assert not cell.startswith(RUN_BY_A_SHEET)
    assert csv_rows(text)[0]["name"] == (visible(name) or None)


def in_latex(name, capsys, place):
    text = table_of([name, "other"]).latex()
    assert set(re.findall(r"\\([A-Za-z]+)", text)) <= LATEX_COMMANDS
    assert text.count(r"\begin{") == 2 and text.isascii()
    check_latex(text)
    for piece in (r"\$", *LATEX_SPECIAL.values()):
        text = text.replace(piece, "")
    assert "$" not in text


def on_a_page(name, capsys, place):
    plain, page = (Skeleton(render(page_of([*"abcd", text]))) for text in ("e", name))
    assert {tag for tag, *_ in page.tags} <= {tag for tag, *_ in plain.tags}


def in_a_folders_name(name, capsys, place):
    config = compose_config("train", [])
    folder = folder_name(replace(config, model=replace(config.model, name=name)))
    assert "/" not in folder and not folder.startswith(".")
    (place / folder).mkdir()
    assert (place / folder).parent == place


@pytest.mark.parametrize(
    "renderer", [on_a_terminal, in_a_spreadsheet, in_latex, on_a_page, in_a_folders_name]
)
@pytest.mark.parametrize("name", NAMES, ids=hostile.NAMES)
def test_a_name_is_a_text(name, renderer, tmp_path, capsys):
    renderer(name, capsys, tmp_path)


@pytest.mark.slow
def test_every_module_prints_through_the_terminal():
    """So that no print is forgotten."""
    modules = {str(path.relative_to(ROOT)): path for path in ROOT.rglob("*.py")}
    printing, of_rich = set(), set()
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
                printing.add(name)
            if isinstance(node, ast.ImportFrom) and node.module in ("rich.console", "rich.markup"):
                of_rich.add(name)
    assert printing <= OWN_PRINTS
    # For the types of a console's protocol.
    assert of_rich <= {"pages/tables.py"}


@pytest.mark.slow
def test_a_figure_draws_names_as_texts():
    with plt.rc_context(FONTS):
        figure, axes = plt.subplots(figsize=(3, 2))
        for place, name in enumerate(NAMES):
            axes.plot([place], [place], label=legend_label(name))
        axes.set_xticks(range(3), [hostile.NAMES["mathtext, wrong"], "$a$", "${"])
        axes.set_title(hostile.NAMES["mathtext, wrong"])
        axes.set_yscale("log")  # whose numbers are formulas of matplotlib
        axes.legend()
        figure.supxlabel("\n".join(NAMES))
        show_names_as_texts(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg")
        for other in ("pdf", "png"):
            figure.savefig(io.BytesIO(), format=other)
        plt.close(figure)
    texts = list(ElementTree.fromstring(text.getvalue()).itertext())
    for name in NAMES:
        assert sum(visible(name)[:50].split("\n")[0].strip() in one for one in texts) >= 2, name
    assert "$a$" in texts and "_hidden" in " ".join(texts)
    assert not any("mathdefault" in one for one in texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["${oc.env:HOME}", "[a,b=c]", "it's"])
def test_the_next_command_names_the_same_model(name, tmp_path):
    """A command to copy: no part of it is looked up."""
    (tmp_path / name).symlink_to(ROOT / "assets/tiny_base")
    config = asdict(compose_config("mse", []))
    config["model"] |= {"name": "own", "model_name_or_path": str(tmp_path / name)}
    again = compose_config("train", policy_overrides(config))
    assert again.model.model_name_or_path == str(tmp_path / name)


@pytest.mark.slow
def test_the_next_command_reads_no_file_for_a_name():
    config = asdict(compose_config("mse", []))
    for name in ("../common", *NAMES):
        config["model"]["name"] = name
        assert policy_overrides(config)[0] == "model=hub"


AT_EVERY_PUSH = {  # one of each kind; a push tries every name at single places, above
    "rich opens", "mathtext, wrong", "jinja", "omegaconf", "html", "latex", "escapes", "null",
    "half a letter", "long, wide", "spreadsheet =", "parent", "empty",
}  # fmt: skip


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=pytest.mark.slow if key in AT_EVERY_PUSH else pytest.mark.nightly)
        for key in hostile.NAMES
    ],
)
def test_a_report_with_the_name_at_every_place(key, tmp_path, capsys):
    name = hostile.NAMES[key]
    keys = {f"{node}.name": name for node in ("model", "dataset", "prompt")}
    place = tmp_path / (re.sub("[/\x00\ud800]", "_", name.encode()[:200].decode(errors="ignore"))
                        if "\ud800" not in name else "x")  # fmt: skip
    if place == tmp_path:
        place = tmp_path / "x"
    trained(place / "a", 4, 0, {0: 0.2, 8: 0.4}, changes=keys | {"baseline.name": name})
    trained(place / "b", 8, 0, {0: 0.2, 8: 0.4}, changes=keys)
    errors = {(name, 2): 0.5, (name, 4): 0.4, ("leave_one_out", 2): 0.3}
    studied(place / "c", name, errors, changes=keys)
    folder = proved(place / "d", "theorem7", claim("agrees", name), answer=name)
    file = folder / ".hydra/config.yaml"
    config = yaml.safe_load(file.read_text())
    config["theorem"]["problem"] = name
    file.write_text(yaml.safe_dump(config))
    report_runs([str(tmp_path)], tmp_path / "report", None)
    said = capsys.readouterr().out
    assert not set(said) & set(hostile.TERMINAL_ACTS)
    assert all(f"{len(list((tmp_path / 'report').glob(x)))}" != "0" for x in ("*.svg", "*.tex"))
    for file in (tmp_path / "report").glob("*.csv"):
        text = file.read_text()
        assert not set(text) & set(hostile.TERMINAL_ACTS)
        for row in csv.reader(io.StringIO(text)):
            for cell in row:
                number = re.fullmatch(r"-?[\d.]+(e[-+]\d+)?|-", cell)
                assert number or not cell.startswith(RUN_BY_A_SHEET)
