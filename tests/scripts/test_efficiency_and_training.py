"""Efficiency and training: the numbers of the page are those of the recorded runs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/benchmarks"))
import efficiency_and_training as benchmark  # noqa: E402

RUNS, EFFICIENCIES = benchmark.recorded(ROOT / "docs/examples/efficiency_and_training.csv")
NAMES = {"sgd": "SGD", "adamw": "AdamW"}


def sides(seeds):
    return benchmark.sides([(cell, row) for cell, row in RUNS if cell.seed in seeds], EFFICIENCIES)


def table_rows():
    """The rows of the page: five seeds of each policy, then ten of `tiny`."""
    rows = []
    for seeds in (range(5), range(10)):
        found = sides(seeds)
        for side, tested in zip(found, benchmark.tests(found), strict=True):
            count = side.gain_LMS.shape[2]
            if count == 5 and seeds == range(10):
                continue
            p_values = "; ".join(benchmark.p_text(tested[key]) for key in ("rank_p", "rank_holm"))
            rows.append(
                f"| `{side.policy}`, {NAMES[side.optimizer]}, {count} | "
                f"{benchmark.span(tested['rank'], 2)} | {p_values} | "
                f"{benchmark.span(tested['slope'])} | {benchmark.p_text(tested['slope_holm'])} |"
            )
    return rows


@pytest.mark.nightly
def test_the_table_of_the_page_is_that_of_the_record():
    page = (ROOT / "docs/objectives.md").read_text()
    for row in table_rows():
        assert row in page


@pytest.mark.nightly
def test_losses_as_the_sample_show_nothing_after_correction():
    tested = benchmark.tests(sides(range(5)))
    assert [round(row["rank_p"], 3) for row in tested] == [0.136, 0.175, 0.033, 0.017]
    assert [round(row["rank_holm"], 2) for row in tested] == [0.27, 0.27, 0.1, 0.07]
    assert all(row["rank"].estimate > 0.6 for row in tested)


@pytest.mark.nightly
def test_what_the_page_says_beside_the_table_is_so():
    tiny_sgd, tiny_adamw, base_sgd, base_adamw = sides(range(5))
    for side, slope in ((tiny_sgd, (-0.04, -0.38, 0.30)), (tiny_adamw, (0.10, -0.24, 0.44))):
        x_L = np.log2(side.efficiency_L[:3]) - np.log2(side.efficiency_L[:3]).mean()
        found = benchmark.t_interval(x_L @ side.gain_LS[:3] / (x_L @ x_L))
        assert found == pytest.approx(slope, abs=0.01)
    assert benchmark.t_interval(base_sgd.difference_LS[0]) == pytest.approx(
        (-0.013, -0.018, -0.008), abs=5e-4
    )
    assert (base_sgd.chosen_LS == 2).mean() == pytest.approx(0.57, abs=0.005)
    assert (base_adamw.chosen_LS == 0).mean() == pytest.approx(0.25, abs=0.03)
    late = benchmark.tests(sides(range(5, 10)))
    assert [round(row["slope_holm"], 3) for row in late] == [0.042, 0.042]


def test_a_record_is_read_as_it_was_written(tmp_path):
    runs = [(cell, row) for cell, row in RUNS if cell.seed == 3]
    benchmark.record(tmp_path / "runs.csv", runs, EFFICIENCIES)
    assert benchmark.recorded(tmp_path / "runs.csv") == (runs, EFFICIENCIES)
