"""The baseline that docs/extending.md shows, laid out as an installed package and run."""

from __future__ import annotations

import csv
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import readme
import yaml
from folders import pictures

SECTION = "A baseline of your own"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return readme.installed(SECTION, tmp_path_factory.mktemp("installed"))


def commands():
    rows = readme.own_commands(SECTION)
    assert [words[1] for words in rows] == ["mse", "train"]
    return rows


@pytest.mark.slow
def test_training_by_the_page_uses_the_rule(site, tmp_path):
    """The kept completions are a whole group: advantages worked out again from its rewards."""
    code, told = readme.run(commands()[1], tmp_path, site)
    assert code == 0, told
    rows = pq.read_table(readme.only(tmp_path, "completions.parquet")).to_pylist()
    for step in (1, 2):
        rewards = [row["reward"] for row in rows if row["step"] == step]
        assert len(rewards) == 8
        expected = [r - np.median(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
        assert [row["advantage"] for row in rows if row["step"] == step] == pytest.approx(expected)
    before = readme.only(tmp_path, "result.json").parent
    source = site / "median.py"
    source.write_text(source.read_text() + "\n")  # an edit makes another run
    assert readme.run(commands()[1], tmp_path, site)[0] == 0
    assert len([*before.parents[1].glob("*/seed-0/result.json")]) == 2


@pytest.mark.nightly
def test_a_study_by_the_page_measures_the_rule(site, tmp_path):
    code, told = readme.run(commands()[0], tmp_path, site)
    assert code == 0, told
    rows = list(csv.DictReader(readme.only(tmp_path, "curves.csv").open()))
    mine = {row["group_size"]: row for row in rows if row["baseline"] == "median"}
    loo = {row["group_size"]: row for row in rows if row["baseline"] == "leave_one_out"}
    assert mine and set(mine) == set(loo)
    # The median of one other is its mean; the baseline's groups are drawn, the other has a closed
    # form.
    assert float(mine["2"]["mse"]) == pytest.approx(float(loo["2"]["mse"]), rel=0.05)
    assert all(abs(float(row["bias2"])) < 1e-12 for row in mine.values())
    assert json.loads(readme.only(tmp_path, "result.json").read_text())["curves"]
    for place in (site, None):  # its package need not be installed where the report is made
        code, told = readme.run(
            ["grpo-ustat", "report", "runs=outputs/mse", "name=own"], tmp_path, place
        )
        assert code == 0, told
        page = (tmp_path / "outputs/report/own/report.html").read_text()
        assert any(">median</text>" in picture for picture in pictures(page))


@pytest.mark.slow
def test_an_option_has_its_default_unless_it_is_set(site, tmp_path):
    """In a run of its own for each value, which the folder's name tells apart."""
    source = site / "median.py"
    plain = source.read_text()
    text = plain.replace("(rewards_PG, context):", "(rewards_PG, context, *, shift=0.25):")
    source.write_text(text.replace("return rewards_PG -", "return shift + rewards_PG -"))
    results = {}
    try:
        for number, words in enumerate(([], ["+baseline.options.shift=0.25"])):
            folder = tmp_path / str(number)
            folder.mkdir()
            assert readme.run([*commands()[1], *words], folder, site)[0] == 0
            results[number] = readme.only(folder, "result.json")
        first, second = results.values()
        assert first.parents[1].name == second.parents[1].name
        told = readme.run([*commands()[1], "+baseline.options.size=1"], tmp_path, site)[1]
        assert "options of baseline median: unknown size; the options are shift" in told
        given = (
            "+baseline_options.median.shift=2",
            "+baseline_options.median={shift:2.0}",
        )
        for number, words in enumerate(([], given[:1], given[1:])):
            folder = tmp_path / f"study-{number}"
            folder.mkdir()
            assert readme.run([*commands()[0], *words], folder, site)[0] == 0
            config = yaml.safe_load(readme.only(folder, ".hydra/config.yaml").read_text())
            shift = 2.0 if words else 0.25
            assert config["baseline_options"]["median"] == {"shift": shift}
    finally:
        source.write_text(plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, match",
    [
        (
            "baseline=own baseline.name=mode",
            "unknown baseline.name 'mode': choose from leave_one_out",
        ),
        ("baseline=own baseline.name=gone", "baseline.name=gone cannot be loaded: AttributeError"),
        ("baseline=own baseline.name=other", "cannot be loaded: TypeError: entry point other of"),
    ],
)
def test_a_wrong_rule_is_refused_before_anything_starts(site, tmp_path, arguments, match):
    points = site / "median-0.1.dist-info" / "entry_points.txt"
    points.write_text(
        points.read_text().partition("gone")[0] + "gone = median:gone\nother = median:median\n"
    )
    code, told = readme.run(["grpo-ustat", "train", *arguments.split()], tmp_path, site)
    assert code == 2 and len(told.splitlines()) == 1 and told.startswith("error: ")
    assert match in told
