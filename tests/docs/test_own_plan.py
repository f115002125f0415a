"""The plan that docs/extending.md shows, laid out as an installed package and measured."""

from __future__ import annotations

import json
import os

import pytest
import readme
from warm import run_python

SECTION = "A plan of your own"


@pytest.mark.slow
def test_a_plan_of_another_package_is_measured_and_in_help(tmp_path):
    site = readme.installed(SECTION, tmp_path / "installed")
    (command,) = readme.own_commands(SECTION)
    code, told = readme.run([*command[:2], "study.plans=[twise]"], tmp_path, site)
    assert code and "did you mean twice?" in told
    environment = os.environ | {"PYTHONPATH": f"{site}:{readme.ROOT}"}
    words = ("-m", "grpo_ustat", "mse", "--help", "plans")
    assert "twice" in run_python(*words, cwd=tmp_path, env=environment).stdout
    code, told = readme.run(command, tmp_path, site)
    assert code == 0, told
    file = readme.only(tmp_path, "result.json")
    rows = json.loads(file.read_text())["plans"]
    assert {row["plan"] for row in rows} == {"twice"}
    assert {row["estimate"] for row in rows} >= {"per_rollout", "per_prompt", "all_orders"}
    assert all(4 <= row["generated"] <= 8 for row in rows)
    for place in (site, None):  # its package need not be installed where the report is made
        words = ["grpo-ustat", "report", "runs=outputs/mse", f"name={'with' if place else 'out'}"]
        assert readme.run(words, tmp_path, place)[0] == 0
        name = "with" if place else "out"
        assert "twice" in (tmp_path / f"outputs/report/{name}/plans.csv").read_text()
    (site / "twice.py").write_text("TWICE = 3\n")
    code, told = readme.run(command, tmp_path, site)
    assert code and "study.plans=twice cannot be loaded" in told and "must be a Plan" in told
