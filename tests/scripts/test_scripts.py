"""Scripts beside the commands: their help, a few rows of the simulations, the table of numbers."""

from __future__ import annotations

import ast
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts/benchmarks"))
import error_rates  # noqa: E402
import numbers_table  # noqa: E402
import speed  # noqa: E402
from statements import KINDS, Asked, Cell  # noqa: E402

COMMANDS = [
    path
    for path in sorted((ROOT / "scripts").rglob("*.py"))
    if 'if __name__ == "__main__"' in path.read_text()
]


@pytest.mark.nightly
@pytest.mark.parametrize("script", COMMANDS, ids=lambda path: path.stem)
def test_its_help_says_what_it_does(script, monkeypatch, capsys):
    """Like the first sentence of its file."""
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    first = ast.get_docstring(ast.parse(script.read_text())).splitlines()[0]
    assert ended.value.code in (0, None)
    assert " ".join(first.split()) in " ".join(capsys.readouterr().out.split())


def test_statements_are_counted():
    """A sentence that is printed by two of three studies, a number, and one that none prints."""
    studies = [{"G": True, "x": 1.0}, {"G": False, "x": 2.0}, {"x": 6.0}]
    cell = Cell({"prompts": 8}, studies, {"x": 3.0}, statements=("G", "worse"))
    of_g, worse, x = error_rates.rows_of("light", cell)
    assert (of_g["printed"], of_g["wrong"], of_g["studies"]) == (2, 1, 3)
    assert of_g["wrong_given_printed"] == 0.5 and of_g["low"] < 0.05 and of_g["high"] > 0.95
    assert (worse["printed"], worse["wrong"], worse["wrong_given_printed"]) == (0, 0, None)
    assert (x["truth"], x["mean"], x["median"], x["wrong"]) == (3.0, 3.0, 2.0, None)
    assert error_rates.worst_of([of_g, worse, x]) == [of_g]


@pytest.mark.nightly(minutes=1)
@pytest.mark.parametrize(
    "kind, name, cell, studies, printed",
    [
        ("group_size", "light, G* 8.8", (60, 32), 300, 250),
        ("group_size", "few loud", (200, 16), 300, 3),
        ("group_size", "Pareto, high", (100, 16), 300, 150),
        ("stopping", "rare success", (200, 16), 150, 120),
        ("losses", "light, G* 5.5", (100, 16), 40, 1),
        ("turned", "camps", (100, 16), 100, 80),
        ("claims", "opposed", (100, 18), 40, 1),
    ],
)
def test_what_is_printed_is_rarely_wrong(kind, name, cell, studies, printed):
    """At most 5 %, and three standard errors; and it is printed."""
    (found,) = list(KINDS[kind].cells_of(name, Asked(studies, [cell])))[:1]
    rows = [row for row in error_rates.rows_of(name, found) if row["wrong"] is not None]
    assert max(row["printed"] for row in rows) >= printed
    for row in rows:
        count = row["printed"]
        assert row["wrong"] <= 0.05 * count + 3 * (0.05 * 0.95 * count) ** 0.5, row


def test_the_table_of_numbers_is_that_of_its_rows():
    rows = [json.loads(file.read_text()) for file in numbers_table.ROWS.glob("*.json")]
    page = numbers_table.PAGE.read_text()
    assert len(rows) >= 4 and numbers_table.page_with(page, rows) == page


def test_ratios_are_medians_over_turns(capsys):
    def turns(*seconds, peak):
        rows = [{"wall": a, "cpu": 2 * a, "widest": b} for a, b in seconds]
        return [{"rows": [row], "peak": peak * 10**9, "above": 10**8} for row in rows]

    measured = {
        "ours": turns((3.0, 1.0), (5.0, 1.0), peak=1),
        "TRL": turns((9.0, 2.0), (25.0, 4.0), peak=4),
    }
    speed.report(measured)
    ours, theirs = (" ".join(x.split()[1:]) for x in capsys.readouterr().out.splitlines()[1:])
    assert ours == "4.00 3.00 - 5.00 1.00 8.00 6.00 - 10.00 1.00 1000 100 1"
    assert theirs == "17.00 9.00 - 25.00 4.00 34.00 18.00 - 50.00 4.00 4000 100 3"


@pytest.mark.nightly(minutes=0.5)
def test_programs_take_turns(tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"question": f"{i}+1="}) + "\n" for i in range(9)))
    model = ROOT / "grpo_ustat/assets/tiny"
    small = ["--prompts", "2", "--group-size", "4", "--length", "8", "--ours", "64", "--trl"]
    cases = {
        "train": ["--model", model, "--questions", questions, *small],
        "scores": ["embedded:tiny", "--rows", "2", "--completion", "8", "--turns", "1"],
        "mse": ["study.questions=4", "debug=mse", "group_sizes=[2,4]", "budget=study_smoke"],
    }
    for case, words in cases.items():
        command = [sys.executable, speed.__file__, case, *map(str, words), "--turns", "1"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == {"train": 2, "scores": 4, "mse": 3}[case]
