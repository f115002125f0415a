"""Simulated mixtures for the bounds on the zero-variance share."""

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/benchmarks"))
import zero_variance_bounds as script  # noqa: E402


def test_the_truth_is_inside_for_a_mixture_of_each_kind():
    rows = [row for seed in range(len(script.KINDS)) for row in script.one_mixture(seed)]
    assert {row["kind"] for row in rows} == set(script.KINDS)
    exact = [row for row in rows if row["averages"] == "exact"]
    assert not any(row["outside"] for row in exact)


def test_stored_figures_are_of_a_thousand_mixtures():
    with script.RESULTS.open() as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "all"]
    assert {row["mixtures"] for row in rows} == {"1000"}
    assert {row["outside"] for row in rows if row["averages"] == "exact"} == {"0"}
    assert all(int(row["outside"]) <= 50 for row in rows)
