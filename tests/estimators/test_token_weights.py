"""Weights of tokens against the derivative of TRL's losses by a token's log-probability."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_ustat.config.losses import MeasuredLosses
from grpo_ustat.estimators.baselines import advantages
from grpo_ustat.estimators.row_weights import row_weights
from grpo_ustat.estimators.token_weights import CORRECTIONS, token_factors
from grpo_ustat.records import BaselineContext

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from commands import compose  # noqa: E402

LENGTHS, LONGEST, CAP = np.array([[5, 1, 3], [2, 6, 4]]), 6, 1.15
MASK = np.arange(LONGEST) < LENGTHS.reshape(-1, 1)
OBJECTIVES = ("trl_grpo", "trl_dapo", "trl_dr_grpo", "trl_bnpo", "trl_sapo", "trl_cispo",
              "trl_gspo", "trl_luspo")  # fmt: skip


def losses_of(name, correction):
    """The objective at a batch's first update without and with a correction."""
    micro = ("objective.micro_batch_size=3",) if name == "trl_bnpo" else ()
    config = compose("mse", "debug=mse", f"objective={name}", *micro)
    study = replace(config.study, corrections=[correction], correction_cap=CAP)
    return MeasuredLosses(
        config.objective, config.baseline, [], study, "logged.parquet", True, LONGEST
    ).off_policy


def loss_of_trl(name, correction, own, sampler, advantage_B1):
    """`_compute_loss` of TRL 1.16 with vLLM's ratios, at pi_old = pi; sizes of tensors are its
    own: (B, 1) with a ratio of the completion, (B, T) with one of each token.
    """
    mask, old = torch.tensor(MASK, dtype=own.dtype), own.detach()
    change = (old - sampler) * mask
    if correction.startswith("sequence"):
        change = change.sum(-1, keepdim=True)
    ratio = change.exp()
    truncated = ratio.clamp(max=CAP)
    ratio = truncated if correction.endswith("truncate") else ratio * (ratio <= CAP)
    log_weights = own - old
    if name in ("trl_gspo", "trl_luspo"):
        log_weights = ((own - old) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    weights = log_weights.exp()
    per_token = -weights * advantage_B1
    if name == "trl_cispo":
        per_token = -weights.detach() * advantage_B1 * own
    if name == "trl_sapo":
        temperature = torch.where(advantage_B1 > 0, 1.0, 1.05)
        per_token = -torch.sigmoid(temperature * (weights - 1)) * 4 / temperature * advantage_B1
    per_token = per_token * ratio
    if name in ("trl_grpo", "trl_gspo", "trl_sapo"):
        return ((per_token * mask).sum(-1) / mask.sum(-1)).mean()
    if name == "trl_luspo":
        return (per_token * mask).sum(-1).mean()
    if name == "trl_dr_grpo":
        return (per_token * mask).sum() / (len(own) * LONGEST)
    if name == "trl_bnpo":
        micro = [(x.sum(), m.sum()) for x, m in zip((per_token * mask).split(3), mask.split(3),
                                                   strict=True)]  # fmt: skip
        return sum(total / count for total, count in micro) / len(micro)
    return (per_token * mask).sum() / mask.sum()


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_corrections_of_a_samplers_gap_are_those_that_trl_applies(name, correction):
    rng = np.random.default_rng(11)
    own, gap = -rng.random((6, LONGEST)), 0.2 * rng.normal(size=(6, LONGEST))
    rewards = np.array([[1.0, 0, 0.5], [0, 1, 1]])
    _, loss = losses_of(name, correction)
    context = BaselineContext(lengths_PG=LENGTHS)
    weights = row_weights(loss, rewards, context).reshape(len(loss.kinds), 6, 1)
    factors = [token_factors(loss.tokens, kind, own, own - gap, MASK) for kind in loss.kinds]
    ours = (weights * np.stack(factors)).sum(axis=0)
    advantage_B1 = torch.tensor(advantages(loss.baseline, rewards, context, loss.options)).reshape(
        6, 1
    )
    logprobs = torch.tensor(own, requires_grad=True)
    loss_of_trl(name, correction, logprobs, torch.tensor(own - gap), advantage_B1).backward()
    np.testing.assert_allclose(ours, -logprobs.grad.numpy(), rtol=1e-12, atol=1e-15)
    if correction.startswith("token") and name in ("trl_gspo", "trl_luspo"):
        assert np.ptp(ours[0, :5]) == 0 != np.ptp(np.exp(gap[0, :5]))
