"""Rollouts with their tokens: scored as they are, after a check that this model wrote them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.rows import read_rollouts
from grpo_ustat.mse.import_rollouts import (
    MAX_LOGPROB_GAP,
    import_pool,
    logged_rollouts,
    sampler_gap,
)
from grpo_ustat.policy.configured import configured_policy, configured_task
from grpo_ustat.rollout.local import Sampling, sample
from grpo_ustat.tasks.base import summed_rewards

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from commands import compose  # noqa: E402
from test_pool import build  # noqa: E402

SMALL = ("debug=mse", "model=tiny_base", "study.questions=6")


def sampled(*overrides, questions=6, completions=8):
    """Completions of the first study questions, their rewards and the policy."""
    config = compose("mse", *SMALL, *overrides)
    policy, task = (
        configured_policy(config.policy_options),
        configured_task(config.task_options, config.model),
    )
    rollouts = sample(
        policy, task.prompts("study")[:questions], completions,
        Sampling.of(config.sampler_options, "pool"),
    )  # fmt: skip
    return rollouts, summed_rewards(task, rollouts), policy


def rows_of(rollouts, rewards_PG):
    """As `grpo-ustat convert` writes them."""
    rows = []
    for p, prompt in enumerate(rollouts.prompts):
        for i in range(rollouts.mask_PGT.shape[1]):
            written = rollouts.mask_PGT[p, i]
            rows.append({
                "prompt_id": prompt.id, "prompt_ids": rollouts.prompt_tokens[p],
                "completion_ids": rollouts.tokens_PGT[p, i][written].tolist(),
                "reward": float(rewards_PG[p, i]), "ended": bool(rollouts.ended_PG[p, i]),
                "logprobs": rollouts.logprobs_PGT[p, i][written].tolist(),
                "policy_version": 3,
            })  # fmt: skip
    return rows


def write(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.fixture(scope="module")
def exact():
    return sampled()


@pytest.mark.slow
def test_tokens_are_scored_as_they_are(tmp_path, exact, capsys):
    """The pool of our own study of the same completions, bit for bit in rewards and tokens."""
    rollouts, rewards_PG, _ = exact
    path = write(tmp_path / "r.parquet", rows_of(rollouts, rewards_PG))
    ours, _ = build(tmp_path / "ours")
    config = compose("mse", *SMALL, f"pool={path}")
    theirs, _, prompts, _ = import_pool(config, tmp_path / "pool")
    np.testing.assert_array_equal(theirs.rewards_PN, ours.rewards_PN)
    np.testing.assert_array_equal(theirs.lengths_PN, ours.lengths_PN)
    np.testing.assert_allclose(theirs.gram_PNN, ours.gram_PNN, rtol=1e-5, atol=1e-5)
    assert [prompt.text for prompt in prompts] == [p.text for p in rollouts.prompts]
    assert (
        "within 0.0000 nats per token of the sampler's, on average over 48 completions"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_what_ended_follows_from_the_end_token(tmp_path, exact):
    rollouts, rewards_PG, _ = exact
    rows = [{k: v for k, v in row.items() if k != "ended"} for row in rows_of(rollouts, rewards_PG)]
    config = compose("mse", *SMALL, f"pool={write(tmp_path / 'r.parquet', rows)}")
    assert import_pool(config, tmp_path / "pool")[1].clipped == int((~rollouts.ended_PG).sum())


@pytest.mark.slow
@pytest.mark.parametrize("override", ["model=tiny", "temperature=0.7"])
def test_rows_that_another_policy_wrote_are_refused(tmp_path, exact, override):
    path = write(tmp_path / "r.parquet", rows_of(*exact[:2]))
    config = compose("mse", *SMALL, override, f"pool={path}")
    with pytest.raises(ConfigError, match="differ from the logged ones by 0.*nats per token in 48"):
        import_pool(config, tmp_path / "pool")


@pytest.mark.slow
def test_the_limit_lies_between_rounding_and_another_policy(exact):
    """bfloat16 weights against float32 logs (.0054), and the next policy of this family (.44)."""
    rollouts, _, policy = exact
    index = np.arange(48)
    assert sampler_gap(policy, rollouts, index, 1.0) < 1e-5
    rounded = configured_policy(compose("mse", *SMALL, "model.dtype=bfloat16").policy_options)
    rounding = sampler_gap(rounded, rollouts, index, 1.0)
    assert 1e-5 < rounding < MAX_LOGPROB_GAP / 2
    other = configured_policy(compose("mse", *SMALL, "model=tiny").policy_options)
    assert sampler_gap(other, rollouts, index, 1.0) > 2 * MAX_LOGPROB_GAP


@pytest.mark.slow
def test_tokens_of_tools_are_read_and_not_scored(exact):
    """The score of a completion is the sum over the policy's own tokens: with the first half masked
    and with the second it adds up to that of all.
    """
    from grpo_ustat.policy.scores.rollouts import score_rollouts

    rollouts, _, policy = exact
    half = np.zeros_like(rollouts.mask_PGT)
    half[..., ::2] = True
    parts = [replace(rollouts, scored_PGT=x & rollouts.mask_PGT) for x in (half, ~half)]
    index, weights = np.arange(8), np.ones((1, 8))
    whole, *some = (
        score_rollouts(policy, one, index, 1.0, weights_KB=weights) for one in (rollouts, *parts)
    )
    for name, value in whole.gradients_K[0].items():
        both = some[0].gradients_K[0][name] + some[1].gradients_K[0][name]
        assert np.allclose(both.numpy(), value.numpy(), atol=1e-4), name


ROW = {
    "prompt_id": "a", "prompt_ids": [1, 2], "completion_ids": [3, 4], "reward": 1.0, "ended": True,
    "logprobs": [-0.1, -0.2], "loss_mask": [1, 1], "policy_version": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"completion_ids": []}, r"row 1 \(from 0\): completion_ids is \[\], not a list of token"),
        ({"prompt_ids": [1, -2]}, r"prompt_ids holds -2, which is not a token id"),
        ({"logprobs": [-0.1]}, r"logprobs has 1 numbers, .* 2 tokens"),
        ({"logprobs": [-0.1, float("nan")]}, r"logprobs holds nan, not a finite number"),
        ({"logprobs": None}, r"row 1 \(from 0\): logprobs is null, but other rows"),
        ({"loss_mask": [1, 1, 0]}, r"loss_mask has 3 numbers, .* 2 tokens"),
        ({"reward": float("inf")}, r"reward is inf: not a finite reward"),
        (
            {"policy_version": 2},
            r"has rollouts of 2 policies \(policy_version 1 to 2\), but a study measures one",
        ),
    ],
)
def test_rows_that_cannot_be_used_are_refused_by_field(tmp_path, changes, message):
    path = write(tmp_path / "r.parquet", [ROW, ROW | changes])
    with pytest.raises(ConfigError, match=message):
        read_rollouts(path)


def test_tokens_say_themselves_what_was_cut(tmp_path):
    path = write(tmp_path / "r.parquet", [{k: v for k, v in ROW.items() if k != "ended"}])
    with pytest.raises(ConfigError, match="has token ids, whose ends show which completions"):
        logged_rollouts(compose("mse", *SMALL, f"pool={path}", "study.cut_at=4"))


def test_rows_need_no_texts(tmp_path):
    (one,) = read_rollouts(write(tmp_path / "r.parquet", [ROW]))
    assert one.is_exact and (one.prompt_ids, one.completion_ids) == ([1, 2], [3, 4])
    assert one.loss_mask == [True, True] and one.prompt is one.completion is None
