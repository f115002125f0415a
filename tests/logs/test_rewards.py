"""Rewards alone: zero-variance groups by enumeration, and files that are refused by row."""

from __future__ import annotations

import csv
import itertools
import json

import numpy as np
import pytest

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.ustatistic import zero_variance_share
from grpo_ustat.logs.rewards import (
    RewardGroups,
    expected_zero_variance,
    read_rewards,
    reward_lines,
)


@pytest.mark.parametrize("rewards", [[0, 0, 1, 1, 1], [0, 0.5, 0.5, 1, 0.5], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_share_is_that_of_all_subsets(rewards, size):
    subsets = list(itertools.combinations(rewards, size))
    share = np.mean([len(set(subset)) == 1 for subset in subsets])
    assert zero_variance_share(np.array([rewards], float), size)[0] == pytest.approx(
        share, abs=1e-12
    )


def test_the_share_is_unbiased_for_fresh_groups(rng):
    """E share = p^G + (1-p)^G, over all 2^N pools of N = 6 completions, p = 0.3, G = 4."""
    p, total = 0.3, 0.0
    for pool in itertools.product([0.0, 1.0], repeat=6):
        weight = np.prod([p if one else 1 - p for one in pool])
        total += weight * zero_variance_share(np.array([pool]), 4)[0]
    assert total == pytest.approx(p**4 + (1 - p) ** 4, abs=1e-12)


def test_prompts_with_too_few_completions_are_left_out():
    groups = [np.array([0.0, 1.0, 1.0]), np.array([1.0, 1.0, 1.0]), np.array([0.0, 1.0])]
    rewards = RewardGroups("reward", groups, 0)
    share = expected_zero_variance(rewards, 3)
    assert share is not None and share.estimate == 0.5
    assert 0 <= share.low < 0.5 < share.high <= 1
    assert expected_zero_variance(rewards, 4) is None


def write(path, rows):
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


ROWS = [{"prompt": f"q{k // 4}", "reward": float(k % 4 == 0)} for k in range(12)]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_every_kind_of_file_has_the_same_groups(tmp_path, suffix):
    rewards = read_rewards(write(tmp_path / f"log{suffix}", ROWS))
    assert [group.tolist() for group in rewards.groups] == [[1.0, 0.0, 0.0, 0.0]] * 3
    lines = reward_lines(rewards, 3)
    assert lines[0].startswith("The data are 3 prompts with 4 completions")
    assert "G = 3: 25 % [" in lines[1]  # one of the four subsets has no 1


def test_one_prompt_has_no_variance_between_prompts():
    lines = reward_lines(RewardGroups("reward", [np.array([0.0, 1.0])], 0), 2)
    assert "single prompt" in lines[-1]
    assert not any("nan" in line for line in lines)


def test_steps_and_prompts_apart(tmp_path):
    rows = [row | {"step": step} for step in (1, 2) for row in ROWS]
    assert len(read_rewards(write(tmp_path / "log.parquet", rows)).groups) == 6


@pytest.mark.parametrize(
    "rows, column, message",
    [
        ([{"reward": 1.0}], None, "none of prompt_id, prompt, group_id, group, question"),
        ([{"prompt": "q", "a": 1.0, "b": 0.0}], None, "2 columns that may be rewards (a, b): name"),
        ([{"prompt": "q", "a": 1.0}], "b", "has no column b: choose from prompt, a"),
        ([*ROWS, {"prompt": "q2", "reward": float("nan")}], None, "row 12 (from 0): reward is nan"),
        ([*ROWS, {"prompt": "q2", "reward": None}], None, "row 12 (from 0): reward is None"),
        (
            [*ROWS, {"prompt": "q2", "reward": 1e300}],
            None,
            "1e+300, not a finite number of at most",
        ),
        ([*ROWS, {"prompt": "q2", "reward": 10**400}], None, "row 12 (from 0): reward is 1000"),
        (
            [{"prompt": "q", "reward": 1.0}],
            None,
            "every prompt in the 1 rows has only one completion",
        ),
        ([{"prompt": None, "reward": 1.0}] * 2, None, "row 0 (from 0): prompt is null"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path, rows, column, message):
    with pytest.raises(ConfigError) as refused:
        read_rewards(write(tmp_path / "log.jsonl", rows), column)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("log.parquet", "no table", "cannot be read"),
        (
            "log.jsonl", '{"prompt": "q", "reward": 1}\n\n{"prompt": "q',
            r"line 2 \(from 0\) is not JSON: Unterminated",
        ),
    ],
)  # fmt: skip
def test_a_file_that_is_no_table_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_rewards(tmp_path / name)


def test_a_table_saved_by_excel_begins_with_a_mark(tmp_path):
    path = write(tmp_path / "log.csv", ROWS)
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert len(read_rewards(path).groups) == 3
