"""Rollouts saved elsewhere, as TRL logs them, become a pool."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from grpo_ustat.identity import folder_name
from grpo_ustat.policy.loading import configured_policy, configured_task
from grpo_ustat.rollout.local import Sampling, sample
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.study import run as study_run
from grpo_ustat.study.imported import import_pool
from grpo_ustat.tasks.base import rewards

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_config import compose, run  # noqa: E402
from test_pool import build  # noqa: E402

SMALL = ("debug=mse", "model=tiny_base", "study.questions=6")


def logged(path, **changes):
    """Completions of the first six study questions, in the columns that TRL logs."""
    config = compose("mse", *SMALL)
    policy, task = configured_policy(config), configured_task(config)
    prompts = task.prompts("study")[:6]
    rollouts = sample(policy, prompts, 8, Sampling.of(config, "pool"))
    z = rewards(task, rollouts)
    rows = [
        {"step": 1, "prompt": p.text, "completion": text, "accuracy_reward": reward}
        for p, texts, row in zip(prompts, rollouts.texts_PG, z, strict=True)
        for text, reward in zip(texts, row.tolist(), strict=True)
    ]
    table = {key: [row[key] for row in rows] for key in rows[0]} | {"advantage": [0.0] * len(rows)}
    table = {key: changes.get(key, value) for key, value in table.items()} | changes
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    return rollouts


@pytest.mark.slow
def test_an_imported_pool_is_the_one_that_was_logged(tmp_path):
    rollouts = logged(tmp_path / "completions.parquet")
    assert rollouts.ended_PG.all()
    ours, _ = build(tmp_path / "ours")
    config = compose("mse", *SMALL, f"pool={tmp_path / 'completions.parquet'}")
    theirs, spent, prompts = import_pool(config, tmp_path / "pool")
    assert [p.text for p in prompts] == [p.text for p in rollouts.prompts]
    assert spent.rollouts == 48 and spent.tokens == int(rollouts.lengths_PG.sum())
    np.testing.assert_array_equal(theirs.rewards_PN, ours.rewards_PN)
    np.testing.assert_allclose(theirs.gram_PNN, ours.gram_PNN, atol=1e-3 * ours.gram_PNN.max())


@pytest.mark.slow
def test_a_study_of_it_has_a_folder_of_its_own(tmp_path):
    path = tmp_path / "completions.parquet"
    logged(path)
    code, out, err = run("mse", *SMALL, f"pool={path}", cwd=tmp_path)
    assert code == 0, err
    (found,) = tmp_path.glob("outputs/mse/tiny_base-imported-*/seed=0/result.json")
    assert json.loads(found.read_text())["questions"] == 6


@pytest.mark.slow
def test_another_file_of_the_same_name_is_another_run(tmp_path):
    path = tmp_path / "completions.parquet"
    logged(path)
    before = folder_name(compose("mse", *SMALL, f"pool={path}"))
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).slice(0, 40), path)
    assert folder_name(compose("mse", *SMALL, f"pool={path}")) != before


def test_unequal_groups_are_cut_and_counted(tmp_path, capsys):
    path = tmp_path / "c.parquet"
    logged(path)
    table = pyarrow.parquet.read_table(path).slice(0, 45)
    pyarrow.parquet.write_table(table, path)
    config = compose("mse", *SMALL, f"pool={path}")
    pool, _, _ = import_pool(config, tmp_path / "pool")
    assert pool.rewards_PN.shape == (6, 5)
    assert "15 completions dropped, 5 kept of each prompt" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"step": [1, 2] * 24}, "holds steps 1 to 2, each of another policy"),
        ({"second_reward": [1.0] * 48}, "exactly one column of rewards are needed"),
    ],
)
def test_what_cannot_be_one_pool_is_refused(tmp_path, changes, message):
    path = tmp_path / "c.parquet"
    logged(path, **changes)
    config = compose("mse", *SMALL, f"pool={path}")
    with pytest.raises(ValueError, match=message):
        import_pool(config, tmp_path / "pool")


def test_sampling_methods_and_missing_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"pool=nowhere.parquet is no file"):
        compose("mse", *SMALL, "pool=nowhere.parquet")
    path = tmp_path / "c.parquet"
    logged(path)
    with pytest.raises(ValueError, match="samples completions, which an imported pool cannot"):
        compose("mse", *SMALL, f"pool={path}", "target_halfwidth=0.05")


def test_a_damaged_file_is_one_line(tmp_path):
    path = tmp_path / "c.parquet"
    path.write_bytes(b"PAR1 nothing")
    config = compose("mse", *SMALL, f"pool={path}")
    with pytest.raises(ValueError, match="cannot be read"):
        study_run.run(config, RunFolder(tmp_path / "run", config))
