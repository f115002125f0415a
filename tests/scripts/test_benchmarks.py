"""The benchmark of methods runs, prints its table and goes on from its state file."""

from __future__ import annotations

from pathlib import Path

import pytest
from warm import run_python

pytestmark = pytest.mark.nightly(minutes=0.8)

SCRIPT = Path(__file__).parents[2] / "scripts/benchmarks/mse.py"
SMALL = (
    "budget.pool_completions=8", "budget.reference_completions=16",
    "budget.reference_blocks=4", "budget.value_completions=8",
)  # fmt: skip


def bench(state, *arguments):
    asked = ("--questions", "3", "--group-sizes", "2", "4", "--slice", "0.5", "--state", str(state))
    done = run_python(SCRIPT, *SMALL, *asked, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def spent(text):
    """(rollouts, gradients, CPU seconds, worst half-width in %) by method of the printed table."""
    rows = [line.split() for line in text.split("worst half-width")[1].splitlines()[1:4]]
    return {row[0]: (*map(float, row[1:4]), float(row[-1].rstrip("%"))) for row in rows}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    state = tmp_path_factory.mktemp("bench") / "mse.state"
    return state, bench(state, "--target", "1")


def test_every_method_reaches_the_target(first):
    _, text = first
    assert set(spent(text)) == {"closed_form", "ordinary", "weighted"}
    assert all(width <= 100 for *_, width in spent(text).values())
    assert text.count("closed_form - ") == 2


def test_goes_on_from_its_state(first):
    state, text = first
    more = bench(state, "--target", "0.4", "--extrapolate", "--replicates", "6")
    assert "own measured variance of" in more
    before, after = spent(text), spent(more)
    assert before["closed_form"] == after["closed_form"]  # seconds included: nothing is done again
    for way in ("ordinary", "weighted"):
        assert all(a <= b for a, b in zip(before[way][:3], after[way], strict=False))
