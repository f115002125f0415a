"""The README's own task and reward, laid out as an installed package and run by its commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]


def blocks():
    """The fenced blocks of the README's section, by language."""
    text = (ROOT / "README.md").read_text()
    section = text.split("### A task and a reward of your own")[1].split("\n## ")[0]
    return dict(re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL))


def installed(site):
    """As pip leaves a package: its module, and its entry points in a dist-info folder."""
    project = tomllib.loads(blocks()["toml"])["project"]
    info = site / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (site / "sorting.py").write_text(blocks()["python"])
    return site


def run(command, site, cwd):
    """`./scripts/run ENTRY ...` with this Python; (exit code, standard error)."""
    _, entry, *arguments = shlex.split(command)
    paths = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", f"grpo_ustat.{entry}", *arguments],
        cwd=cwd, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stderr


def commands():
    found = [line for line in blocks()["bash"].splitlines() if line.startswith("./scripts/run")]
    assert [shlex.split(line)[1] for line in found] == ["train", "mse", "train"]
    return found


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    site = installed(tmp_path_factory.mktemp("installed"))
    sys.path.insert(0, str(site))
    import sorting

    yield site, sorting
    sys.path.remove(str(site))
    del sys.modules["sorting"]


def only(folder, pattern):
    (found,) = folder.glob(f"outputs/*/*/seed=0/{pattern}")
    return found


@pytest.mark.slow
def test_training_by_the_readme_uses_the_tasks_questions_and_reward(package, tmp_path):
    site, sorting = package
    code, told = run(commands()[0], site, tmp_path)
    assert code == 0, told
    task = sorting.Sorting(digits=3)
    answers = {q.text + "=": q for q in task.questions("train")}
    rows = pq.read_table(only(tmp_path, "completions.parquet")).to_pylist()
    assert len(rows) == 16 and {row["step"] for row in rows} == {1, 2}
    for row in rows:
        assert row["reward"] == task.reward(answers[row["prompt"]], row["completion"])
    result = json.loads(only(tmp_path, "result.json").read_text())
    assert result["steps"] == 2 and result["left_out"] == {}


@pytest.mark.slow
def test_a_study_by_the_readme_uses_the_reward(package, tmp_path):
    site, _ = package
    code, told = run(commands()[1], site, tmp_path)
    assert code == 0, told
    pools = only(tmp_path, "pool").glob("*.safetensors")
    rewards = {round(float(r), 6) for pool in pools for r in load_file(pool)["rewards_N"]}
    assert rewards - {0.0, 1.0}  # shaped, as no judge of ours is
    assert json.loads(only(tmp_path, "result.json").read_text())["left_out"] == {}


@pytest.mark.slow
def test_a_reward_by_the_readme_takes_the_place_of_a_judge(package, tmp_path):
    site, sorting = package
    code, told = run(commands()[2], site, tmp_path)
    assert code == 0, told
    rows = pq.read_table(only(tmp_path, "completions.parquet")).to_pylist()
    rewards = {row["reward"] for row in rows}
    assert rewards <= {0.0, 0.2, 1.0} and 0.2 in rewards


@pytest.mark.parametrize(
    "arguments, match",
    [
        ("dataset=own", "dataset.name has no value: set dataset.name="),
        (
            "dataset=own dataset.name=sorting dataset.options.digits=3",
            r"added, \+dataset.options.d",
        ),
        ("dataset=own dataset.name=sort", "unknown dataset.name 'sort': .*tasks are: sorting"),
        ("dataset.reward=kind", "unknown dataset.reward 'kind': .*rewards are: lenient"),
        ("dataset=own dataset.name=sorting dataset.study_size=0", "study_size=0 must be above 0"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_starts(package, tmp_path, arguments, match):
    site, _ = package
    code, told = run(f"x train {arguments}", site, tmp_path)
    assert code == 2 and re.search(f"^error: .*{match}", told) and len(told.splitlines()) == 1
