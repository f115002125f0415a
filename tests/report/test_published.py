"""The paper's Table 2 beside own runs."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from folders import trained

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.report.aggregate import report_runs
from grpo_ustat.report.published import QUESTIONS, TABLE2, homogeneity, published_table

MATH = {"dataset.name": "math", "dataset.kind": "math", "budget.rollouts": 1024}


def fitting(count, cut):
    """How many of the 18 published accuracies are shares of so many questions, to four digits.

    Args:
        count: of questions.
        cut: `np.round` or `np.floor`, of shares in units of 1e-4.
    """
    units = [round(1e4 * share) for row in TABLE2.values() for share in row.values()]
    near = np.array([[unit * count // 10_000 + step for step in (0, 1)] for unit in units])
    return int((cut(1e4 * near / count + 1e-9) == np.array(units)[:, None]).any(axis=1).sum())


@pytest.mark.slow
def test_the_published_accuracies_are_of_sizes_next_to_maths_test_split():
    """All are of four sizes rounded and of four others truncated, none of 500 or 5000."""
    sizes = {
        cut: [count for count in range(1, 6000) if fitting(count, cut) == 18]
        for cut in (np.round, np.floor)
    }
    assert sizes[np.round] == [4994, 4998, 5002, 5006]
    assert sizes[np.floor] == [4995, 4999, 5003, 5007]
    assert not any(fitting(count, cut) for count in (500, 5000) for cut in sizes)
    assert abs(QUESTIONS / 5000 - 1) < 0.002
    config = compose_config("train", ["experiment=table2_math", "hydra.mode=RUN"])
    assert config.dataset.test_path is None and config.dataset.test_size is None
    half = compose_config("train", ["dataset=math500", "prompt=qwen_math_cot"]).dataset
    assert half.test_path == "HuggingFaceH4/MATH-500" and half.kind == "math"


def test_homogeneity_by_hand():
    """At n = 4096 the six are 3846, 3857, 3851, 3837, 3852, 3879 of 5000, a mean of 0.7706."""
    right = np.array([3845.5, 3856.5, 3850.5, 3836.5, 3851.5, 3878.5])
    expected = right.mean()
    statistic = (np.square(right - expected) / (expected * (1 - expected / 5000))).sum()
    assert statistic == pytest.approx(1.131, abs=1e-3) and homogeneity(4096) > 0.9
    assert homogeneity(1024) < 0.01 < 0.3 < homogeneity(2048)


@pytest.mark.slow
def test_a_report_of_runs_on_math_has_the_published_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # a row in one line
    for size, accuracy in ((4, 0.75), (8, 0.8)):
        trained(tmp_path / f"G-{size}/seed-0", size, 0, {0: 0.2, 8: accuracy}, changes=MATH.items())
    report_runs([str(tmp_path / "G-*")], tmp_path / "joint", None)
    rows = list(csv.DictReader((tmp_path / "joint/published_table2.csv").open()))
    assert len(rows) == 18
    (row,) = [r for r in rows if (r["rollouts"], r["group_size"]) == ("1024", "8")]
    assert float(row["published"]) == 0.7491 and float(row["own"]) == 0.8
    assert float(row["difference"]) == pytest.approx(0.8 - 0.7491)
    half = np.hypot(0.1, 1.96 * np.sqrt(0.7491 * 0.2509 / 5000))  # the folder's own half is 0.1
    assert float(row["difference_high"]) == pytest.approx(0.8 - 0.7491 + half, abs=1e-4)
    assert sum(r["own"] != "" for r in rows) == 2
    assert "Qwen2.5-Math-7B on MATH" in (tmp_path / "joint/report.html").read_text()
    assert "n=1024, own - paper" in " ".join(capsys.readouterr().out.split())


def test_series_stand_apart():
    cell = {"rollouts": 1024, "group_size": 4, "mean_reward": 0.7, "low": 0.6, "high": 0.8}
    cell |= {"questions": 40, "seeds": 1}
    sheet = published_table([cell | {"series": "a"}, cell | {"series": "b"}])
    assert [row[0] for row in sheet.rows if row[0].endswith("own")] == ["n=1024 a, own",
                                                                     "n=1024 b, own"]  # fmt: skip
