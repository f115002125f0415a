"""Rows that are turns of one rollout: the gradient by enumeration of a policy that uses a tool, and
the studies of such files."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.rows import read_rollouts
from grpo_ustat.mse.import_rollouts import import_pool
from grpo_ustat.mse.off_policy import _question_logprobs
from grpo_ustat.policy.configured import configured_policy
from grpo_ustat.policy.scores.rollouts import score_rollouts

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from commands import compose  # noqa: E402
from fakes import random_model  # noqa: E402

WORDS, PROMPTS = 6, ([2, 3], [4])
SUMMARY, CONTINUED, MIXED = "summary", "continued", "mixed"


def tool(first):
    """Tokens that the tool answers to the first turn."""
    return [2 + first % 4] * (1 + first % 2)


def context(prompt, first, kind):
    """Tokens that the policy reads before its second turn: the conversation, or a summary."""
    is_continued = kind == CONTINUED or (kind == MIXED and first < 3)
    return [*prompt, first, *tool(first)] if is_continued else [5, *tool(first)]


def reward(p, first, second):
    return float((first * 7 + second * 3 + p) % 5) / 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model of six words, in a folder, and its weights in float64."""
    folder = tmp_path_factory.mktemp("model")
    words = ["<pad>", "<end>", *"abcd"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>"
    )
    policy = random_model(vocab=WORDS)
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, policy


def logprobs_of(policy, tokens):
    return torch.log_softmax(policy(torch.tensor([tokens])).logits[0, -1], dim=0)


def trajectories(policy, kind):
    """Prompt, both turns, and log-probabilities of all trajectories, with a graph."""
    for p, prompt in enumerate(PROMPTS):
        first_V = logprobs_of(policy, prompt)
        for first in range(WORDS):
            second_V = logprobs_of(policy, context(prompt, first, kind))
            for second in range(WORDS):
                yield p, first, second, first_V[first], second_V[second]


def table(path, policy, kind, **columns):
    """Two rows for each trajectory, as `grpo-ustat convert` writes them."""
    rows = []
    for p, first, second, *logprobs in trajectories(policy, kind):
        reads = PROMPTS[p], context(PROMPTS[p], first, kind)
        for turn, (read, written) in enumerate(zip(reads, (first, second), strict=True)):
            rows.append({
                "prompt_id": str(p), "trajectory_id": f"{p}-{first}-{second}", "turn": turn,
                "prompt_ids": read, "completion_ids": [written], "ended": True,
                "reward": reward(p, first, second), "logprobs": [logprobs[turn].item()],
            })  # fmt: skip
    for name, value in columns.items():
        for k, row in enumerate(rows):
            row[name] = value(k, row)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def imported(folder, path, tmp_path, *overrides):
    config = compose(
        "mse", "debug=mse", "model=hub", f"model.model_name_or_path={folder}",
        "model.dtype=float64", "study.questions=null", f"pool={path}", *overrides,
    )  # fmt: skip
    return config, import_pool(config, tmp_path / "pool")


@pytest.mark.parametrize("kind", [SUMMARY, CONTINUED, MIXED])
def test_the_sum_over_turns_is_the_gradient_by_enumeration(tmp_path, model, kind, capsys):
    """Mean over all trajectories of advantage times summed scores, against the derivative of the
    expected reward: equal to 1e-10, also where turns are merged to one sequence."""
    folder, policy = model
    config, (pool, _, _, rollouts) = imported(
        folder, table(tmp_path / "r.parquet", policy, kind), tmp_path
    )
    count = WORDS**2
    sequences = {CONTINUED: 2 * count, SUMMARY: 4 * count, MIXED: 3 * count}[kind]
    assert (
        f"144 rows are turns of 72 rollouts; the score of a rollout is the sum of the scores of "
        f"its turns, which are read in {sequences} sequences" in capsys.readouterr().out
    )
    assert pool.rewards_PN.shape == (2, count)
    np.testing.assert_array_equal(pool.lengths_PN >= 2, True)

    exact = torch.zeros((), dtype=torch.float64)
    for p, first, second, *logprobs in trajectories(policy, kind):
        exact = exact + sum(logprobs).exp() * reward(p, first, second) / len(PROMPTS)
    names, parameters = zip(*policy.named_parameters(), strict=True)
    exact_gradients = dict(zip(names, torch.autograd.grad(exact, parameters), strict=True))

    with torch.no_grad():
        shares_N = np.array([
            sum(logprobs).exp().item() for *_, first, second in trajectories(policy, kind)
            for logprobs in [(first, second)]
        ])  # fmt: skip
    np.testing.assert_allclose(shares_N.reshape(2, -1).sum(axis=1), 1.0)
    ours = configured_policy(config.policy_options)
    baseline = 0.3
    weights_1N = (shares_N * (pool.rewards_PN.ravel() - baseline) / len(PROMPTS))[None]
    scores = score_rollouts(ours, rollouts, np.arange(2 * count), 1.0, weights_KB=weights_1N)
    for name, value in scores.gradients_K[0].items():
        np.testing.assert_allclose(value.numpy(), exact_gradients[name].numpy(), atol=1e-10)


def test_merged_turns_have_the_score_of_separate_turns(tmp_path, model, monkeypatch):
    folder, policy = model
    path = table(tmp_path / "r.parquet", policy, CONTINUED)
    _, (merged, _, _, together) = imported(folder, path, tmp_path / "merged")
    monkeypatch.setattr("grpo_ustat.mse.import_rollouts.merged_turns", list)
    config, (separate, _, _, apart) = imported(folder, path, tmp_path / "separate")
    assert together.turn_PGT is None and apart.turn_PGT is not None
    np.testing.assert_allclose(merged.gram_PNN, separate.gram_PNN, rtol=0, atol=1e-10)
    np.testing.assert_allclose(merged.features_PNR, separate.features_PNR, atol=1e-5)
    ours = configured_policy(config.policy_options)
    one, other = (_question_logprobs(ours, x.of_prompt(0), 1.0) for x in (together, apart))
    scored = together.scored_PGT[0]
    np.testing.assert_allclose(one[scored], other[apart.mask_PGT[0]], atol=1e-12)


def test_without_turns_a_row_would_be_a_question_of_its_own(tmp_path, model):
    """What the file said before turns were joined: later turns as questions or completions."""
    folder, policy = model
    path = table(tmp_path / "r.parquet", policy, SUMMARY)
    rows = parquet.read_table(path).drop_columns(["trajectory_id", "turn"])
    parquet.write_table(rows, tmp_path / "rows.parquet")
    assert len(read_rollouts(path)) == 72
    assert len(read_rollouts(tmp_path / "rows.parquet")) == 144
    _, (pool, *_) = imported(folder, tmp_path / "rows.parquet", tmp_path)
    assert len(pool.rewards_PN) > 2


def test_gram_and_sketches_are_those_of_summed_scores(tmp_path, model):
    folder, policy = model
    config, (pool, _, _, rollouts) = imported(
        folder, table(tmp_path / "r.parquet", policy, MIXED), tmp_path
    )
    ours = configured_policy(config.policy_options)
    scores = [
        torch.cat([
            value.flatten() for value in score_rollouts(
                ours, rollouts, np.array([i]), 1.0, weights_KB=np.ones((1, 1))
            ).gradients_K[0].values()
        ]) for i in range(8)
    ]  # fmt: skip
    gram = torch.stack(scores) @ torch.stack(scores).T
    np.testing.assert_allclose(pool.gram_PNN[0, :8, :8], gram.numpy(), atol=1e-10)


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"reward": lambda k, row: float(k % 2)}, r"r\.parquet: rollout trajectory_id=0-0-0 has "
         r"the rewards 0\.0 and 1\.0 in row 0 \(from 0\) and row 1 .* write the reward of the "),
        ({"advantage": lambda k, row: 0.5 - k % 2}, r"r\.parquet: rollout trajectory_id=0-0-0 has "
         r"advantage -0\.5 and 0\.5 in its rows, but all turns of a rollout must share one advan"),
        ({"turn": lambda k, row: 0}, "no column numbers them: add a column turn"),
    ],
    ids=["rewards", "advantages", "turns"],
)  # fmt: skip
def test_credit_by_turn_is_refused_by_name(tmp_path, model, columns, message):
    path = table(tmp_path / "r.parquet", model[1], SUMMARY, **columns)
    with pytest.raises(ConfigError, match=message):
        read_rollouts(path)


def test_one_turn_may_have_the_reward(tmp_path, model):
    null = {"reward": lambda k, row: row["reward"] if k % 2 else None}
    (again, expected) = (
        [x.reward for x in read_rollouts(table(tmp_path / f"{i}.parquet", model[1], SUMMARY, **y))]
        for i, y in enumerate((null, {}))
    )
    assert again == expected


def test_rows_in_any_order_are_the_same_rollouts(tmp_path, model):
    path = table(tmp_path / "r.parquet", model[1], CONTINUED)
    rows = parquet.read_table(path).to_pylist()
    mixed = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    other = tmp_path / "mixed.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(mixed), other)
    found = {x.rollout_id: x for x in read_rollouts(other)}
    for x, (first, second) in zip(read_rollouts(path), product(range(6), repeat=2), strict=False):
        assert [y.completion_ids for y in found[x.rollout_id].turns] == [[first], [second]]


def test_weights_of_tokens_are_those_of_their_turns(tmp_path, model, monkeypatch):
    """Importance ratios by token: separate turns against the merged sequence."""
    folder, policy = model
    path = table(tmp_path / "r.parquet", policy, CONTINUED)
    _, (*_, together) = imported(folder, path, tmp_path / "merged")
    monkeypatch.setattr("grpo_ustat.mse.import_rollouts.merged_turns", list)
    config, (*_, apart) = imported(folder, path, tmp_path / "separate")
    ours, index = configured_policy(config.policy_options), np.array([3, 40, 3])
    weights_B2 = np.random.default_rng(0).uniform(0.5, 2, (3, 2))
    merged_BT = np.zeros((3, together.mask_PGT.shape[-1]))
    merged_BT[together.scored_PGT.reshape(-1, merged_BT.shape[1])[index]] = weights_B2.ravel()
    one, other = (
        score_rollouts(ours, rollouts, index, 1.0, token_weights_BT=weights, gram=True)
        for rollouts, weights in ((together, merged_BT), (apart, weights_B2))
    )
    np.testing.assert_allclose(one.gram_BB.numpy(), other.gram_BB.numpy(), atol=1e-10)
    np.testing.assert_allclose(one.sq_norm_B.numpy(), other.sq_norm_B.numpy(), atol=1e-10)
