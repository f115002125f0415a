"""The measurement that docs/extending.md shows, laid out as an installed package and run."""

from __future__ import annotations

import csv
import json
import os

import pytest
import readme
from warm import run_python

SECTION = "A measurement of your own"


@pytest.mark.slow
def test_a_measurement_of_another_package_is_in_result_page_report_and_help(tmp_path):
    site = readme.installed(SECTION, tmp_path / "installed")
    (command,) = readme.own_commands(SECTION)
    code, told = readme.run([*command[:2], "study.measurements=[lengthz]"], tmp_path, site)
    assert code and "did you mean lengths?" in told
    environment = os.environ | {"PYTHONPATH": f"{site}:{readme.ROOT}"}
    words = ("-m", "grpo_ustat", "mse", "--help", "measurements")
    assert "lengths" in run_python(*words, cwd=tmp_path, env=environment).stdout
    code, told = readme.run(command, tmp_path, site)
    assert code == 0, told
    file = readme.only(tmp_path, "result.json")
    tokens = json.loads(file.read_text())["lengths"]
    mean = json.loads(file.read_text())["policy"]["mean_length"]
    assert tokens["tokens"] == pytest.approx(mean)
    assert tokens["tokens_low"] < mean < tokens["tokens_high"]
    for place in (site, None):  # its package need not be installed where the report is made
        words = ["grpo-ustat", "report", "runs=outputs/mse", f"name={'with' if place else 'out'}"]
        assert readme.run(words, tmp_path, place)[0] == 0
    assert "Length of a completion" in (file.parent / "report.html").read_text()
    joint = tmp_path / "outputs/report"
    (row,) = csv.DictReader((joint / "with/lengths.csv").open())
    assert float(row["tokens"]) == pytest.approx(mean) and row["policy"] == "tiny_base, bare"
    assert "Length of a completion" in (joint / "with/report.html").read_text()
    assert "Length of a completion" not in (joint / "out/report.html").read_text()
