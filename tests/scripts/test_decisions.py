"""Answers that are said only sometimes hold where they are said: rows of the benchmark, shorter."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/benchmarks"))
from decisions import POPULATIONS, Population, conditional_errors, follow_ups  # noqa: E402

OPTIONS = Namespace(decided=400, few=150, studies=20_000, pilots=600)


def cells(row):
    return [cell.strip() for cell in row.strip("| ").split("|")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, prompts, completions, least",
    [("3.1", 16, 16, 0.93), ("3.1", 40, 16, 0.99), ("5.5", 40, 16, 0.86), ("5.5", 16, 16, 0.03),
     ("5.4, heavy", 40, 16, 0.1), ("8.8", 40, 16, 0.05)],
)  # fmt: skip
def test_a_best_size_that_is_named_is_rarely_wrong(name, prompts, completions, least):
    """At most 5 % of 400 studies that name one, and three standard errors; and it is named."""
    row = cells(conditional_errors(Population(*POPULATIONS[name]), prompts, completions, OPTIONS))
    share, count, sets, costs, direction = row[2:7]
    assert float(share) >= least and int(count) == 400
    assert float(sets) <= 0.083 and float(costs) <= 0.083 and float(direction) <= 0.05, row


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("3.1", "5.5")),
     pytest.param("8.8", marks=pytest.mark.nightly)],
)  # fmt: skip
def test_with_as_many_prompts_as_said_nine_of_ten_studies_are_decided(name):
    row = cells(follow_ups(Population(*POPULATIONS[name]), 16, 16, OPTIONS))
    assert float(row[7]) >= 0.9, row
