"""The gradient of a plain PyTorch loop against the declared one, with planted faults."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fakes import random_policy, random_rollouts
from golden import naming

import grpo_ustat as gu
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.applied_gradient import NOT_OF_ROWS
from grpo_ustat.policy.logprobs import pack

RNG = np.random.default_rng(1)
REWARDS = RNG.integers(0, 2, size=(4, 8)).astype(float)
REWARDS[3] = 1  # a zero-variance group
GROUP_STD = ("group_std", {"epsilon": 1e-4})
LONGEST, PARTS = 9, 4
LOSS = gu.Loss("own", *GROUP_STD, "dapo", LONGEST)


@pytest.fixture
def policy():
    return random_policy(dtype=torch.float32)


@pytest.fixture
def packed(policy):
    rollouts = random_rollouts([3, 5, 2, 4], 8, LONGEST, seed=3)
    return pack(rollouts, np.arange(32), policy.pad_token, policy.model.device)


def rows_of(packed, loss=LOSS):
    tensors = (packed.input_ids_BT, packed.attention_mask_BT, packed.completion_mask_BT)
    return gu.UpdateRows.of_loss(loss, REWARDS, *tensors)


def loop(model, rows, terms, parts=PARTS):
    """`p.grad` after a loop over micro-batches in training mode.

    Args:
        model, rows: whose.
        terms: the loss of a micro-batch, of its log-probabilities, mask, advantages and rows.
        parts: micro-batches.
    """
    advantage = REWARDS - REWARDS.mean(axis=1, keepdims=True)
    advantage /= REWARDS.std(axis=1, ddof=1, keepdims=True) + 1e-4
    model.zero_grad()
    model.train()
    for index in np.array_split(np.arange(32), parts):
        ids, attention, completion = rows.part(index)
        positions = (attention.cumsum(dim=1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=attention, position_ids=positions).logits
        logprobs = logits[:, :-1].log_softmax(dim=-1).gather(2, ids[:, 1:, None])[..., 0]
        weights = torch.from_numpy(advantage.ravel()[index]).float()
        terms(logprobs, completion[:, 1:], weights[:, None], index).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def by_tokens(rows, factor=1.0):
    """The loss of `LOSS`."""
    tokens = rows.completion_mask_BT.sum()
    return lambda logprobs, mask, a, _: -factor * (logprobs * mask * a).sum() / tokens


def test_a_right_loop_agrees_and_nothing_changes(policy, packed):
    rows = rows_of(packed)
    gradients = loop(policy.model, rows, by_tokens(rows))
    before = {name: g.clone() for name, g in gradients.items()}
    found = gu.audit(policy.model, gradients, rows, completions_at_once=5)
    assert found.agrees and found.difference < 1e-5
    assert "ratio 1.000, cosine 1.000" in found.sentence()
    assert policy.model.training
    for name, parameter in policy.model.named_parameters():
        assert parameter.requires_grad and torch.equal(parameter.grad, before[name])


def test_a_temperature_is_one_of_the_declaration(policy, packed):
    rows = rows_of(packed)
    found = gu.audit(policy.model, loop(policy.model, rows, by_tokens(rows)), rows, temperature=0.5)
    assert not found.agrees


def no_scaling(logprobs, mask, a, index):
    plain = (REWARDS - REWARDS.mean(axis=1, keepdims=True)).ravel()[index]
    return -(logprobs * mask * torch.from_numpy(plain).float()[:, None]).sum()


FAULTS = {
    "1/K": (lambda n: lambda lp, m, a, _: -(lp * m * a).sum() / n / PARTS,
            "divided once more by accumulation_steps = 4"),
    "sign": (lambda n: lambda lp, m, a, _: (lp * m * a).sum() / n, "the sign is reversed"),
    "normaliser": (lambda n: lambda lp, m, a, _: -((lp * m * a).sum(1) / m.sum(1)).sum() / 32,
                   "it is the gradient of loss_type=grpo"),
    "scaling": (lambda n: lambda *args: no_scaling(*args) / n,
                "it is the gradient of advantages group_mean"),
    "capped": (lambda n: lambda lp, m, a, _: -0.2 * (lp * m * a).sum() / n,
               "1/5, as if it were divided once more by 5"),
    "dropped": (lambda n: lambda lp, m, a, i: -(lp * m * a).sum() / n * float(i[0] != 8),
                "8 of 32 rows are missing (8 to 15)"),
    "micro-batches": (lambda n: lambda lp, m, a, _: -(lp * m * a).sum() / m.sum() / PARTS,
                      "it is a sum of the same scores with other weights, mostly "),
    "penalty": (lambda n: lambda lp, m, a, _: -(lp * m * a).sum() / n + ((lp * m) ** 2).sum() / n,
                NOT_OF_ROWS),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(policy, packed, fault):
    terms, says = FAULTS[fault]
    rows = rows_of(packed)
    gradients = loop(policy.model, rows, terms(rows.completion_mask_BT.sum()))
    found = gu.audit(policy.model, gradients, rows, divisors={"accumulation_steps": PARTS})
    assert not found.agrees
    assert found.cause.startswith(says), found.sentence()


@pytest.mark.parametrize("loss_type", ["sum", "dr_grpo", "grpo", "bnpo"])
def test_every_normaliser_agrees_with_its_own_loop(policy, packed, loss_type):
    loss = gu.Loss("own", *GROUP_STD, loss_type, LONGEST, 8 if loss_type == "bnpo" else None)
    rows = rows_of(packed, loss)
    divisors = {
        "sum": lambda m: torch.tensor(32.0), "dr_grpo": lambda m: torch.tensor(32.0 * LONGEST),
        "grpo": lambda m: 32.0 * m.sum(dim=1, keepdim=True), "bnpo": lambda m: PARTS * m.sum(),
    }  # fmt: skip
    gradients = loop(
        policy.model, rows, lambda lp, m, a, _: -(lp * m * a / divisors[loss_type](m)).sum()
    )
    assert gu.audit(policy.model, gradients, rows).difference < 1e-5


def test_rounding_to_bfloat16_is_told_from_a_fault(packed):
    """The whole loop is in bfloat16."""
    policy = random_policy(dtype=torch.bfloat16)
    rows = rows_of(packed)
    found = gu.audit(policy.model, loop(policy.model, rows, by_tokens(rows)), rows)
    assert found.agrees and found.difference > 1e-4
    gradients = loop(policy.model, rows, by_tokens(rows, factor=2.0))
    assert not gu.audit(policy.model, gradients, rows).agrees


def test_a_loop_under_autocast_is_scored_under_autocast(policy, packed):
    """In float32 the same scores would be further from it by a multiple."""
    rows = rows_of(packed)
    with torch.autocast("cpu", torch.bfloat16):
        gradients = loop(policy.model, rows, by_tokens(rows))
    found = gu.audit(policy.model, gradients, rows, compute_dtype=torch.bfloat16)
    assert (
        found.agrees and 2 * found.difference < gu.audit(policy.model, gradients, rows).difference
    )
    assert not torch.is_autocast_enabled("cpu")


def test_frozen_parameters_and_those_without_a_gradient(policy, packed):
    rows = rows_of(packed)
    frozen = next(iter(dict(policy.model.named_parameters())))
    policy.model.get_parameter(frozen).requires_grad_(False)
    gradients = loop(policy.model, rows, by_tokens(rows))
    assert gradients[frozen] is None
    assert gu.audit(policy.model, gradients, rows).agrees
    largest = max((n for n in gradients if n != frozen), key=lambda n: gradients[n].norm())
    found = gu.audit(policy.model, gradients | {largest: None}, rows)
    assert not found.agrees and found.cause == NOT_OF_ROWS
    empty = gu.audit(policy.model, dict.fromkeys(gradients), rows)
    assert "applied gradient is 0" in empty.sentence()


def test_gradients_of_another_model_are_refused(policy, packed):
    rows = rows_of(packed)
    gradients = loop(policy.model, rows, by_tokens(rows))
    name = next(iter(gradients))
    with pytest.raises(ConfigError, match=naming("1 of ", name)):
        gu.audit(policy.model, {n: g for n, g in gradients.items() if n != name}, rows)
    with pytest.raises(ConfigError, match=f"{name} .*shape"):
        gu.audit(policy.model, gradients | {name: gradients[name][:1]}, rows)
    with pytest.raises(ConfigError, match=naming("(2, 8)", 32)):
        gu.UpdateRows.of_loss(
            LOSS, REWARDS[:2], packed.input_ids_BT, packed.attention_mask_BT,
            packed.completion_mask_BT,
        )  # fmt: skip
