"""Tables as LaTeX: what a paper would print, in a document that compiles."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import product
from xml.etree import ElementTree

import hostile
import pytest
from folders import claim, proved, studied, trained
from markdown_it import MarkdownIt

from grpo_ustat.pages.tables import Table, plain, tex
from grpo_ustat.report.aggregate import report_runs

STARTS = re.compile(r"\\\\\s*(%[^\n]*\s*)?[\[*]")  # a row, or a rule's option, after a line's end
DOCUMENT = (
    "\\documentclass{article}\n\\usepackage{booktabs,graphicx}\n\\begin{document}\n"
    "%s\n\\end{document}\n"
)


def check_latex(text):
    """Of a small reader: no option after `\\\\`, groups closed, as many cells in every row."""
    assert not STARTS.search(text)
    depth = 0
    for letter in re.sub(r"\\[\\{}%]", "", text):
        depth += (letter == "{") - (letter == "}")
        assert depth >= 0
    assert depth == 0
    for name in ("table", "tabular"):
        assert text.count(f"\\begin{{{name}}}") == text.count(f"\\end{{{name}}}") == 1
    assert re.search(r"\\caption\[.*\]\{.+\}\n\\label\{tab:[A-Za-z0-9.=:-]+\}", text)
    body = text.split("\\toprule\n")[1].split("\\bottomrule")[0].splitlines()
    rows = [line for line in body if line not in ("\\midrule", "\\addlinespace")]
    assert all(row.endswith(r" \\") for row in rows)
    counts = [len(re.findall(r"(?<!\\)&", row)) for row in rows if "\\multicolumn" not in row]
    assert len(set(counts)) == 1


def table(rows, **options):
    return Table("Errors", ["policy", "G", "none"], rows, name="mse", headings=True, **options)


def test_a_study_is_a_line_above_its_rows_and_a_cell_is_one_line():
    rows = [["tiny\narithmetic", "2", "23.1*\n[21.3, 25.0]"], ["tiny\narithmetic", "4", "-0.5"]]
    text = table(rows, notes=["95 % intervals"]).latex()
    check_latex(text)
    assert text == (
        "% \\usepackage{booktabs,graphicx}\n\\begin{table}\n\\centering\n"
        "\\caption[{Errors}]{Errors. 95 \\% intervals.}\n\\label{tab:mse}\n"
        "\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%\n"
        "\\begin{tabular}{rr}\n\\toprule\nG & none \\\\\n\\midrule\n"
        "\\multicolumn{2}{l}{tiny, arithmetic} \\\\\n"
        "2 & 23.1* {\\scriptsize [21.3, 25.0]} \\\\\n"
        "4 & $-$0.5 \\\\\n"
        "\\bottomrule\n\\end{tabular}%\n}\n\\end{table}\n"
    )


@pytest.mark.parametrize("start", ["[0, 1]", "*", " [x", "\\\\[3pt]", "\n[a]"])
def test_no_row_begins_with_what_latex_reads_as_an_option(start):
    text = table([["x", "1", "2"], [start, "1", start]]).latex()
    check_latex(text)


@pytest.mark.parametrize("text", [*hostile.MARKUP, "a & b % c # d $ e _ f ^ g ~ h \\ { }", "中≤±"])
def test_what_latex_would_run_is_set_as_it_is(text):
    assert not re.search(r"(?<!\\)[&%#_]", tex(text))
    assert tex(text).isascii()
    check_latex(table([[text, text, text]], notes=[text]).latex())


@pytest.fixture(scope="module")
def report(tmp_path_factory, every_format):
    """A report of runs of every kind, and of names with all that LaTeX takes for its own."""
    home = tmp_path_factory.mktemp("report")
    final = {4: 0.3, 8: 0.45, 16: 0.46}  # the first surely less than the last
    for size, seed in product(final, (0, 1)):
        for rollouts in (32, 64):
            reached = {0: 0.2, 4: 0.25, 8: final[size] + 0.02 * seed}
            folder = home / f"runs/G-{size}/n-{rollouts}/seed-{seed}"
            trained(folder, size, seed, reached, rollouts=rollouts)
            other = home / f"runs/x_y%/G-{size}/n-{rollouts}/seed-{seed}"
            trained(other, size, seed, reached, rollouts=rollouts, changes={"learning_rate": 1.0})
    names = ("none", "leave_one_out", "group_mean", "oracle", "median")
    errors = {(name, size): 8.0 / size for name in names for size in (2, 4)}
    studied(home / "studies/a", "tiny", errors)
    studied(home / "studies/b", "[x]_{y} & 100 % #1 中 \\input{z}", errors)
    proved(home / "gap/a", "lemma6", claim("agrees"), claim("disagrees", "a & b <= 1"))
    report_runs([str(home / name) for name in ("runs", "studies", "gap")], home / "out", None)
    return home / "out"


@pytest.mark.slow
def test_every_exported_table_has_no_option_after_a_lines_end(report):
    tables = sorted(report.glob("*.tex"))
    names = {path.stem for path in tables}
    assert names >= {"mse", "fixed_n", "accuracy", "budget", "theorems", "claims", "runs"}
    for path in tables:
        check_latex(path.read_text())
    assert "4.00 {\\scriptsize [2.00, 8.00]}" in (report / "mse.tex").read_text()
    accuracy = (report / "accuracy.tex").read_text()
    assert "* {\\scriptsize" in accuracy and "*: mean significantly below" in accuracy


@pytest.mark.slow
def test_a_document_with_every_table_and_figure_compiles(report):
    if shutil.which("pdflatex") is None:
        pytest.skip("no pdflatex: apt-get install texlive-latex-base texlive-latex-extra")
    parts = [f"\\input{{{path.name}}}\\clearpage" for path in sorted(report.glob("*.tex"))]
    figures = sorted(report.glob("*.pdf"))
    parts += [
        f"\\noindent\\includegraphics[width=\\linewidth]{{{path.name}}}\\clearpage"
        for path in figures
    ]
    (report / "paper.ltx").write_text(DOCUMENT % "\n".join(parts))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.ltx"]
    for _ in range(2):  # the second knows the references of the first
        done = subprocess.run(
            command, cwd=report, capture_output=True, timeout=120, encoding="latin-1"
        )
        assert done.returncode == 0, done.stdout[-2000:]
    assert len(parts) >= 12 and (report / "paper.pdf").stat().st_size > 20_000
    assert "multiply defined" not in done.stdout and "Overfull \\hbox" not in done.stdout


def test_plain_text_is_read_back_from_markdown_as_it_was():
    name = "<b>a</b> [x](javascript:1) ![i](http://a.b/c) | `x` ``` *b* _u_\n# c\n---\n&lt; <!--"
    shown = ElementTree.fromstring(MarkdownIt("commonmark").render("x " + plain(name))).text
    assert shown.split() == ["x", *name.split()]
