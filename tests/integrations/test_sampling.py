"""What samples otherwise than it is scored is named, and shows in the mean score."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trl_room import GRPOTrainer, changed

from grpo_ustat.integrations.trl.sampling import (
    mean_score_share,
    mean_score_warning,
    sampling_warnings,
)

GROUPS, SIZE = 16, 8


def drops(rate):
    """An attention that drops by a number of its own, in a model."""
    attention = torch.nn.Identity()
    attention.attention_dropout = rate
    return torch.nn.Sequential(torch.nn.Dropout(0.0), attention)


NAMED = {
    "top_p=0.9 excludes tokens": changed(top_p=0.9),
    "top_k=50 excludes tokens": changed(top_k=50),
    "min_p=0.1 excludes tokens": changed(min_p=0.1),
    "Use repetition_penalty=1, or remove the argument.": changed(
        args_generation_kwargs={"repetition_penalty": 1.1}
    ),
    "presence_penalty=0.5 changes": changed(args_generation_kwargs={"presence_penalty": 0.5}),
    "temperature=0.5 changes": changed(args_generation_kwargs={"temperature": 0.5}),
    "1.attention_dropout is 0.1. TRL computes its loss with dropout": changed(model=drops(0.1)),
    "TRL samples with other masks": changed(model=torch.nn.Sequential(torch.nn.Dropout(0.5))),
    "TRL samples without dropout": changed(model=drops(0.1), use_vllm=True),
}


@pytest.mark.parametrize("words", NAMED)
def test_it_is_named_once_and_in_one_line(words):
    (sentence,) = sampling_warnings(NAMED[words])
    assert words in sentence and "\n" not in sentence


@pytest.mark.parametrize(
    "trainer", [GRPOTrainer(), changed(top_k=None, top_p=1), changed(model=drops(0.0)),
                changed(args_generation_kwargs={"top_k": 0, "top_p": 1.0, "min_p": None})],
)  # fmt: skip
def test_nothing_is_said_of_what_changes_nothing(trainer):
    assert sampling_warnings(trainer) == []


def policies(sharpness, tokens=12):
    """A softmax policy of each of GROUPS prompts, by token; scores are by its logits."""
    logits_PV = np.random.default_rng(0).normal(size=(GROUPS, tokens)) * sharpness
    p_PV = np.exp(logits_PV)
    return p_PV / p_PV.sum(axis=1, keepdims=True)


def top(p_PV, k):
    """What is sampled of the k likeliest tokens alone."""
    least_P1 = np.sort(p_PV, axis=1)[:, -k, None]
    kept_PV = np.where(p_PV >= least_P1, p_PV, 0.0)
    return kept_PV / kept_PV.sum(axis=1, keepdims=True)


def true_share(p_PV, sampled_PV):
    """By enumeration of the tokens: E||E[s | x]||^2 over E||s||^2."""
    means_PV = sampled_PV - p_PV
    squares_P = (sampled_PV * (1 - 2 * p_PV)).sum(axis=1) + np.square(p_PV).sum(axis=1)
    return np.square(means_PV).sum() / squares_P.sum()


def draws(p_PV, sampled_PV, count, seed=1):
    """Shares of `count` batches of one group of SIZE completions of each prompt."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        grams = []
        for p_V, sampled_V in zip(p_PV, sampled_PV, strict=True):
            tokens_G = rng.choice(len(p_V), size=SIZE, p=sampled_V)
            scores_GV = np.eye(len(p_V))[tokens_G] - p_V
            grams.append(scores_GV @ scores_GV.T)
        yield mean_score_share(grams)


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 3.0])
def test_a_policy_of_its_own_is_rarely_warned_of(sharpness):
    p_PV = policies(sharpness)
    shares = list(draws(p_PV, p_PV, 600))
    estimates = np.array([share.estimate for share in shares])
    assert abs(estimates.mean()) < 4 * estimates.std() / np.sqrt(len(estimates))
    warned = [bool(mean_score_warning(share)) for share in shares]
    assert np.mean(warned) <= 0.05
    covers = [share.low <= 0 <= share.high for share in shares]
    assert np.mean(covers) >= 0.95


def test_top_k_of_a_flat_policy_is_seen():
    """The mean of the estimates is the share that enumeration gives, and every batch shows it."""
    p_PV = policies(0.1)
    sampled_PV = top(p_PV, 4)
    truth = true_share(p_PV, sampled_PV)
    assert truth > 0.1
    shares = list(draws(p_PV, sampled_PV, 200))
    estimates = np.array([share.estimate for share in shares])
    assert estimates.mean() == pytest.approx(truth, rel=0.02)
    assert np.mean([share.low > 0 for share in shares]) == 1
    assert np.mean([share.low <= truth <= share.high for share in shares]) > 0.9
    assert "Another policy therefore wrote" in mean_score_warning(shares[0])[0]


def test_of_few_groups_there_is_no_interval():
    grams = [np.eye(3) + 0.1] * 7
    share = mean_score_share(grams)
    assert share == (pytest.approx(0.1 / 1.1), -np.inf, np.inf)
    assert mean_score_warning(share) == []
    assert mean_score_share([*grams, np.eye(3)]).low > -np.inf
