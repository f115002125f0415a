"""The task and the reward that docs/extending.md shows, laid out as installed and run."""

from __future__ import annotations

import json
import re
import sys

import pyarrow.parquet as pq
import pytest
import readme
from safetensors.numpy import load_file

SECTION = "A task and a reward of your own"


def commands():
    rows = readme.own_commands(SECTION)
    assert [words[1] for words in rows] == ["train", "mse", "train"]
    return rows


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    site = readme.installed(SECTION, tmp_path_factory.mktemp("installed"))
    sys.path.insert(0, str(site))
    import sorting

    yield site, sorting
    sys.path.remove(str(site))
    del sys.modules["sorting"]


@pytest.mark.slow
def test_training_by_the_page_uses_the_tasks_questions_and_reward(package, tmp_path):
    site, sorting = package
    code, told = readme.run(commands()[0], tmp_path, site)
    assert code == 0, told
    task = sorting.Sorting(digits=3)
    answers = {q.text + "=": q for q in task.questions("train")}
    rows = pq.read_table(readme.only(tmp_path, "completions.parquet")).to_pylist()
    assert len(rows) == 16 and {row["step"] for row in rows} == {1, 2}
    for row in rows:
        assert row["reward"] == task.reward(answers[row["prompt"]], row["completion"])
    result = json.loads(readme.only(tmp_path, "result.json").read_text())
    assert result["steps"] == 2 and result["left_out"] == {}


@pytest.mark.slow
def test_a_study_by_the_page_uses_the_reward(package, tmp_path):
    site, _ = package
    code, told = readme.run(commands()[1], tmp_path, site)
    assert code == 0, told
    pools = readme.only(tmp_path, "pool").glob("*.safetensors")
    rewards = {round(float(r), 6) for pool in pools for r in load_file(pool)["rewards_N"]}
    assert rewards - {0.0, 1.0}  # shaped, as no judge of ours is
    assert json.loads(readme.only(tmp_path, "result.json").read_text())["left_out"] == {}


@pytest.mark.slow
def test_a_reward_by_the_page_takes_the_place_of_a_judge(package, tmp_path):
    site, sorting = package
    code, told = readme.run(commands()[2], tmp_path, site)
    assert code == 0, told
    rows = pq.read_table(readme.only(tmp_path, "completions.parquet")).to_pylist()
    rewards = {row["reward"] for row in rows}
    assert rewards <= {0.0, 0.2, 1.0} and 0.2 in rewards


@pytest.mark.slow
def test_a_reward_by_the_page_stands_beside_the_tasks_own(package, tmp_path):
    site, _ = package
    (words,) = readme.own_commands("Several rewards")
    code, told = readme.run(words, tmp_path, site)
    assert code == 0, told
    lines = readme.only(tmp_path, "metrics.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        total = row["rewards/task/mean"] + 0.5 * row["rewards/lenient/mean"]
        assert row["reward"] == pytest.approx(total)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, match",
    [
        (
            "dataset=own dataset.name=sorting dataset.options.digits=3",
            r"unknown key dataset.options.digits: .*\+dataset.options.d",
        ),
        ("dataset=own dataset.name=sort", "unknown dataset.name 'sort': .*tasks are sorting"),
        ("reward_funcs=[task,kind]", "unknown reward_funcs 'kind': .*rewards are lenient"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_starts(package, tmp_path, arguments, match):
    site, _ = package
    code, told = readme.run(["grpo-ustat", "train", *arguments.split()], tmp_path, site)
    assert code == 2 and re.search(f"^error: .*{match}", told) and len(told.splitlines()) == 1
