"""completions.parquet: what it holds, through kills and resumes, and as a pool."""

from __future__ import annotations

import numpy as np
import pytest
from commands import compose
from pyarrow import parquet
from training_runs import first_batch, fit

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.mse.import_rollouts import import_pool
from grpo_ustat.policy.scores.rollouts import score_rollouts
from grpo_ustat.runs.log import NAME, CompletionLog
from grpo_ustat.tasks.base import summed_rewards
from grpo_ustat.train.metrics import completion_rows

pytestmark = pytest.mark.slow


def table(path):
    return parquet.read_table(path / NAME).to_pylist()


def test_rows_are_the_steps_first_completions(tmp_path):
    run, batch = first_batch(tmp_path, "log_completions=6")
    advantage_PG = np.arange(16.0).reshape(4, 4)
    rows = completion_rows(run, batch, advantage_PG, 3)
    assert [(row["prompt_id"], row["completion_index"]) for row in rows] == [
        (batch.prompts[p].id, i) for p, i in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1))
    ]
    for row, place in zip(rows, range(6), strict=True):
        p, i = divmod(place, 4)
        assert row["completion"] == batch.rollouts.texts_PG[p][i]
        assert row["prompt"] == batch.prompts[p].text and row["answer"] == batch.prompts[p].answer
        assert row["reward"] == batch.rewards_PG[p, i] == (row["extracted"] == row["answer"])
        assert (row["advantage"], row["step"]) == (place, 3)
        assert (row["length"], row["ended"]) == (batch.lengths_PG[p, i], batch.ended_PG[p, i])


def test_none_are_kept_where_none_are_asked_for(tmp_path):
    assert not (fit(tmp_path, "log_completions=0", "max_steps=2") / NAME).exists()


def test_rows_are_on_disk_before_their_checkpoint(tmp_path, monkeypatch):
    """Killed within the first save: the file already holds the two steps; without it, it lacks."""
    from grpo_ustat.train import checkpoint

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_checkpoint", die)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path)
    assert {row["step"] for row in table(tmp_path)} == {1, 2}


def test_what_a_full_disk_refuses_waits_for_the_next_time(tmp_path, monkeypatch):
    log, row = CompletionLog(tmp_path, 0), {"step": 1, "reward": 1.0}
    log.add([row])
    with monkeypatch.context() as context:
        context.setattr(parquet, "write_table", full)
        with pytest.raises(OSError, match="No space left"):
            log.sync()
    assert not (tmp_path / NAME).exists()
    log.add([row | {"step": 2}])
    log.sync()
    assert [row["step"] for row in table(tmp_path)] == [1, 2]


def full(*_, **__):
    raise OSError(28, "No space left on device")


def test_refusal_names_the_damaged_file(tmp_path):
    (tmp_path / NAME).write_bytes(b"PAR1 nothing")
    with pytest.raises(ConfigError, match="completions.parquet"):
        CompletionLog(tmp_path, 4)


def test_a_steps_completions_are_a_pool(tmp_path):
    """Scored by the policy that wrote them: rewards and inner products are those of the step."""
    run, batch = first_batch(
        tmp_path / "run", "log_completions=16", "max_completion_length=45", "seed=1"
    )
    assert 0 < (~batch.ended_PG).sum() < 16  # cut ones are no longer than they were
    path = tmp_path / "step.parquet"
    log = CompletionLog(tmp_path, 0)
    log.add(completion_rows(run, batch, batch.rewards_PG, 1))
    log.sync()
    (tmp_path / NAME).rename(path)
    config = compose("mse", "debug=mse", "model=tiny_base", f"pool={path}")
    pool, spent, prompts, _ = import_pool(config, tmp_path / "pool")
    assert [p.text for p in prompts] == [p.text for p in batch.prompts]
    assert spent.tokens == batch.lengths_PG.sum()
    np.testing.assert_array_equal(pool.rewards_PN, summed_rewards(run.task, batch.rollouts))
    for p in range(4):
        own = score_rollouts(run.policy, batch.rollouts, 4 * p + np.arange(4), 1.0, gram=True)
        gram = own.gram_BB.cpu().numpy()
        np.testing.assert_allclose(pool.gram_PNN[p], gram, atol=1e-4 * gram.max())
