"""The baseline, task, rewards and loop that docs/ show, laid out as installed and run."""

from __future__ import annotations

import csv
import json
import re
import runpy

import numpy as np
import pyarrow.parquet as pq
import pytest
import readme
import torch
from fakes import random_policy, random_rollouts
from folders import pictures
from readme import PAGES, blocks
from safetensors.numpy import load_file

from grpo_ustat.policy.logprobs import pack

BASELINE, TASK = "A baseline of your own", "A task and a reward of your own"
COMMANDS = {
    BASELINE: ["mse", "train"],
    TASK: ["train", "mse", "train"],
    "Several rewards": ["train"],
}
REWARDS = np.random.default_rng(0).integers(0, 2, size=(4, 8)).astype(float)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Both packages of the page, installed."""
    place = tmp_path_factory.mktemp("installed")
    readme.installed(BASELINE, place)
    return readme.installed(TASK, place)


def command(heading, number):
    rows = readme.own_commands(heading)
    assert [words[1] for words in rows] == COMMANDS[heading]
    return rows[number]


def completions(folder):
    return pq.read_table(readme.only(folder, "completions.parquet")).to_pylist()


def check_baseline(folder, site):
    """The kept completions are a whole group: advantages worked out again from its rewards."""
    for step in (1, 2):
        rows = [row for row in completions(folder) if row["step"] == step]
        rewards = [row["reward"] for row in rows]
        assert len(rewards) == 8
        expected = [r - np.median(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
        assert [row["advantage"] for row in rows] == pytest.approx(expected)


def check_study_of_baseline(folder, site):
    rows = list(csv.DictReader(readme.only(folder, "curves.csv").open()))
    mine, loo = (
        {row["group_size"]: row for row in rows if row["baseline"] == name}
        for name in ("median", "leave_one_out")
    )
    assert mine and set(mine) == set(loo)
    # The median of one other is its mean; the baseline's groups are drawn, the other has a closed
    # form.
    assert float(mine["2"]["mse"]) == pytest.approx(float(loo["2"]["mse"]), rel=0.05)
    assert all(abs(float(row["bias2"])) < 1e-12 for row in mine.values())
    # Its package need not be installed where the report is made.
    words = ["grpo-ustat", "report", "runs=outputs/mse", "name=own"]
    assert readme.run(words, folder, None)[0] == 0
    page = (folder / "outputs/report/own/report.html").read_text()
    assert any(">median</text>" in picture for picture in pictures(page))


def check_task(folder, site):
    task = runpy.run_path(str(site / "sorting.py"))["Sorting"](digits=3)
    answers = {question.text + "=": question for question in task.questions("train")}
    rows = completions(folder)
    assert len(rows) == 16 and {row["step"] for row in rows} == {1, 2}
    for row in rows:
        assert row["reward"] == task.reward(answers[row["prompt"]], row["completion"])
    result = json.loads(readme.only(folder, "result.json").read_text())
    assert result["steps"] == 2 and result["left_out"] == {}


def check_study_of_task(folder, site):
    """Rewards are shaped, as no judge of the package is."""
    pools = readme.only(folder, "pool").glob("*.safetensors")
    rewards = {round(float(r), 6) for pool in pools for r in load_file(pool)["rewards_N"]}
    assert rewards - {0.0, 1.0}


def check_reward(folder, site):
    rewards = {row["reward"] for row in completions(folder)}
    assert rewards <= {0.0, 0.2, 1.0} and 0.2 in rewards


def check_two_rewards(folder, site):
    for line in readme.only(folder, "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        total = row["rewards/task/mean"] + 0.5 * row["rewards/lenient/mean"]
        assert row["reward"] == pytest.approx(total)


RUNS = {
    "train with a baseline": (BASELINE, 1, check_baseline),
    "mse with a baseline": (BASELINE, 0, check_study_of_baseline),
    "train on a task": (TASK, 0, check_task),
    "mse on a task": (TASK, 1, check_study_of_task),
    "a reward for a judge": (TASK, 2, check_reward),
    "a reward beside the task's": ("Several rewards", 0, check_two_rewards),
}


@pytest.mark.slow
@pytest.mark.parametrize("heading, number, check", RUNS.values(), ids=RUNS)
def test_a_command_of_the_page_uses_what_the_page_shows(heading, number, check, site, tmp_path):
    code, told = readme.run(command(heading, number), tmp_path, site)
    assert code == 0, told
    check(tmp_path, site)


@pytest.mark.slow
def test_an_option_has_its_default_unless_it_is_set(tmp_path):
    """An option at its default is the same run; an edit of the file makes another."""
    site = readme.installed(BASELINE, tmp_path / "site")
    source = site / "median.py"
    text = source.read_text().replace(
        "(rewards_PG, context):", "(rewards_PG, context, *, shift=0.25):"
    )
    source.write_text(text.replace("return rewards_PG -", "return shift + rewards_PG -"))
    words = command(BASELINE, 1)
    names = []
    for number, options in enumerate(([], ["+baseline.options.shift=0.25"], [])):
        folder = tmp_path / str(number)
        folder.mkdir()
        if number == 2:
            source.write_text(source.read_text() + "\n")
        assert readme.run([*words, *options], folder, site)[0] == 0
        names.append(readme.only(folder, "result.json").parents[1].name)
    assert names[0] == names[1] != names[2]
    told = readme.run([*words, "+baseline.options.size=1"], tmp_path, site)[1]
    assert "options of baseline median: unknown size; the options are shift" in told


WRONG = {
    "baseline=own baseline.name=mode": "unknown baseline.name 'mode': choose from leave_one_out",
    "baseline=own baseline.name=gone": "baseline.name=gone cannot be loaded: AttributeError",
    "baseline=own baseline.name=other": "cannot be loaded: TypeError: entry point other of",
    "dataset=own dataset.name=sorting dataset.options.digits=3":
        r"unknown key dataset.options.digits: .*\+dataset.options.d",
    "dataset=own dataset.name=sort": "unknown dataset.name 'sort': .*tasks are sorting",
    "reward_funcs=[task,kind]": "unknown reward_funcs 'kind': .*rewards are lenient",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("arguments, match", WRONG.items(), ids=WRONG)
def test_a_wrong_name_is_refused_before_anything_starts(arguments, match, tmp_path):
    for heading in (BASELINE, TASK):
        readme.installed(heading, tmp_path)
    with (tmp_path / "median-0.1.dist-info/entry_points.txt").open("a") as points:
        points.write("\ngone = median:gone\nother = median:median\n")
    code, told = readme.run(["grpo-ustat", "train", *arguments.split()], tmp_path, tmp_path)
    assert code == 2 and re.search(f"^error: .*{match}", told) and len(told.splitlines()) == 1


@pytest.mark.parametrize(
    "divisor, line", [(4, None), (1, "The applied gradient equals the declared ")]
)
def test_the_loop_of_the_page(tmp_path, capsys, divisor, line):
    """Divided once more by the number of micro-batches, as on the page, and right."""
    page = blocks(PAGES["docs/library.md"], "Is the applied gradient the declared one?")
    policy = random_policy(dtype=torch.float32)
    rows = pack(random_rollouts([3, 5, 2, 4], 8, 9), np.arange(32), 0, policy.model.device)
    advantage = REWARDS - REWARDS.mean(axis=1, keepdims=True)
    advantage /= REWARDS.std(axis=1, ddof=1, keepdims=True) + 1e-4
    advantage_B = torch.from_numpy(advantage.ravel()).float()

    def loss_of(model, part):
        ids, attention = rows.input_ids_BT[part], rows.attention_mask_BT[part]
        positions = (attention.cumsum(dim=1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=attention, position_ids=positions).logits
        logprobs = logits[:, :-1].log_softmax(dim=-1).gather(2, ids[:, 1:, None])[..., 0]
        own = logprobs * rows.completion_mask_BT[part, 1:] * advantage_B[part, None]
        return -own.sum() / rows.completion_mask_BT.sum() / divisor

    names = {
        "model": policy.model, "loss_of": loss_of, "rewards_PG": REWARDS,
        "micro_batches": torch.arange(32).chunk(4), "input_ids": rows.input_ids_BT,
        "attention_mask": rows.attention_mask_BT, "completion_mask": rows.completion_mask_BT,
    }  # fmt: skip
    (tmp_path / "loop.py").write_text(page["python"])
    runpy.run_path(str(tmp_path / "loop.py"), names)
    assert capsys.readouterr().out.startswith(line or page["text"].strip())
