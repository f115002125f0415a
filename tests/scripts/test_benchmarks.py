"""The benchmark of methods runs and prints its table."""

from __future__ import annotations

from pathlib import Path

import pytest
from warm import run_python

SCRIPT = Path(__file__).parents[2] / "scripts/benchmarks/speed.py"
SMALL = (
    "budget.pool_completions=8", "budget.reference_completions=16",
    "budget.reference_blocks=4", "budget.value_completions=8",
)  # fmt: skip


@pytest.mark.nightly(minutes=0.8)
def test_every_method_reaches_the_target():
    asked = ("--questions", "3", "--group-sizes", "2", "4", "--target", "1")
    done = run_python(SCRIPT, "mse", *SMALL, *asked)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    table = {row[0]: row for row in rows[1:4]}
    assert set(table) == {"closed_form", "ordinary", "weighted"}
    assert rows[0][-3:] == ["gradients", "worst", "half-width"]
    assert all(float(row[-1]) <= 1 for row in table.values())
    assert table["closed_form"][-2] == "0" and int(table["ordinary"][-2]) > 0
    assert done.stdout.count("closed_form - ") == 2


@pytest.mark.nightly(minutes=0.2)
def test_programs_take_turns():
    """Two of test problems, twice each, in alternating order."""
    done = run_python(SCRIPT, "gap", "--replicates", "20", "--steps", "5", "--turns", "2")
    assert done.returncode == 0, done.stderr
    order = [line.split(", ", 1)[1].split(":")[0] for line in done.stderr.splitlines()]
    assert len(order) == 10 and order[:5] == order[:4:-1], done.stderr
    assert len(done.stdout.splitlines()) == 6
