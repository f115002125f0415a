"""Objectives: written formulas on an enumerable policy, and what their expectations are."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import compose
from verl_run import CHANGES, LENGTHS, LOSSES, ORDER, REWARDS_PG, batch

from grpo_ustat.config.objective import ObjectiveConfig
from grpo_ustat.estimators.baselines import advantages
from grpo_ustat.estimators.row_weights import token_weights
from grpo_ustat.estimators.token_weights import by_kind, token_factors
from grpo_ustat.records import BaselineContext
from grpo_ustat.train.objective import Part, diagnostics, factors, surrogate

RECORD = json.loads((Path(__file__).parents[1] / "data/verl_gradients.json").read_text())
VOCAB = 3
SEQUENCES = list(itertools.product(range(VOCAB), repeat=2))


@dataclass
class Table:
    """A policy over two tokens: a row of logits for the first, one per first token for the second.

    Its 12 parameters are the logits; a token's score is `onehot - softmax` of its own row.
    """

    logits: np.ndarray  # [1 + VOCAB, VOCAB]

    @classmethod
    def random(cls, seed):
        return cls(np.random.default_rng(seed).normal(size=(1 + VOCAB, VOCAB)))

    def logprob(self, sequence, t):
        row = self.logits[0 if t == 0 else 1 + sequence[0]]
        return float(row[sequence[t]] - np.log(np.exp(row).sum()))

    def score(self, sequence, t):
        place = 0 if t == 0 else 1 + sequence[0]
        result = np.zeros_like(self.logits)
        weights = np.exp(self.logits[place])
        result[place] = -weights / weights.sum()
        result[place, sequence[t]] += 1
        return result

    def probability(self, sequence):
        return math.exp(self.logprob(sequence, 0) + self.logprob(sequence, 1))

    def logprobs(self, sequences):
        rows = [[self.logprob(s, t) for t in range(2)] for s in sequences]
        return torch.tensor(rows, dtype=torch.float64)


def objective(**fields):
    neutral = dict(
        name="grpo", importance_sampling_level="token", loss_type="sum", num_iterations=1,
        num_minibatches=1, epsilon=None, epsilon_high=None, beta=0.0,
        kl_estimator=None, kl_in=None, entropy_coef=0.0, micro_batch_size=None,
        mask_truncated_completions=False, top_entropy_quantile=1.0, zero_variance_groups="keep",
        reward_variance_share=1.0,
    )  # fmt: skip
    return ObjectiveConfig(**neutral | fields)


def part_of(kind, sequences, lengths, advantages, old, reference):
    mask = torch.arange(2)[None] < torch.tensor(lengths)[:, None]
    weights = token_weights(kind.loss_type, np.array(lengths), 5)
    return Part(
        advantage_B=torch.tensor(advantages, dtype=torch.float64),
        mask_BT=mask.double(),
        old_BT=None if old is None else old.logprobs(sequences) * mask,
        reference_BT=None if reference is None else reference.logprobs(sequences) * mask,
        weight_B=torch.from_numpy(weights),
        num_rollouts=len(lengths),
    )


def gradient(kind, policy, sequences, lengths, advantages, old=None, reference=None):
    """What the code applies: factors of the log-probabilities times the scores."""
    part = part_of(kind, sequences, lengths, advantages, old, reference)
    factor, _ = factors(kind, policy.logprobs(sequences) * part.mask_BT, part)
    return sum(
        float(factor[i, t]) * policy.score(s, t)
        for i, s in enumerate(sequences)
        for t in range(lengths[i])
    )


def applied(kind, policy, sequences, lengths, advantages, old, reference):
    """The factor of each token in an update of `train`, 0 on padding."""
    part = part_of(kind, sequences, lengths, advantages, old, reference)
    return factors(kind, policy.logprobs(sequences) * part.mask_BT, part)[0]


def measured(kind, policy, sequences, lengths, advantages, old, reference):
    """The same as `mse` weighs tokens: a vector of each kind, times that kind's weight."""
    counts = np.arange(2) < np.array(lengths)[:, None]
    own, before, anchor = (x.logprobs(sequences).numpy() for x in (policy, old, reference))
    tokens, weight = kind.token_weights(), token_weights(kind.loss_type, np.array(lengths), 5)
    of_kinds = by_kind(np.array(advantages), tokens.kinds, tokens.beta) * weight
    return sum(
        of_rows[:, None] * token_factors(tokens, name, own, before, counts, anchor)
        for name, of_rows in zip(tokens.kinds, of_kinds, strict=True)
    )


def written(kind, policy, sequences, lengths, advantages, old, reference):
    """The formulas of the module's docstring and of theory section 8, in plain loops."""
    total, n, longest = np.zeros((1 + VOCAB, VOCAB)), len(sequences), 5
    divisor = {"sum": n, "dr_grpo": n * longest, "luspo": n}
    divisor |= dict.fromkeys(("dapo", "cispo", "vespo"), sum(lengths))
    for s, length, advantage in zip(sequences, lengths, advantages, strict=True):
        weight = 1 / divisor.get(kind.loss_type, n * length)
        change = [policy.logprob(s, t) - old.logprob(s, t) for t in range(length)]
        for t in range(length):
            level, weighted = kind.importance_sampling_level, weight
            if level == "none":
                ratio, inner = 1.0, 1.0
            elif level == "token":
                ratio = inner = math.exp(change[t])
            elif level == "sequence":
                ratio = math.exp(sum(change) / length)
                inner = ratio / length
                weighted = length / n if kind.loss_type == "luspo" else 1 / n
            else:
                ratio = inner = math.exp(sum(change))
                weighted = weight if kind.loss_type == "vespo" else 1 / n
            if level != "none" and kind.epsilon is not None:  # not with cispo
                above = ratio > 1 + kind.epsilon_high and advantage > 0
                below = ratio < 1 - kind.epsilon and advantage < 0
                inner = 0.0 if above or below else inner
            if kind.loss_type == "cispo":
                inner = ratio if kind.epsilon_high is None else min(ratio, kind.epsilon_high)
            if kind.loss_type == "sapo":  # d/dl of 4/tau sigmoid(tau (ratio - 1))
                tau = 1.0 if advantage > 0 else 1.05
                gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
                inner = 4 * gate * (1 - gate) * ratio
            if kind.loss_type == "vespo":
                power, decay = (2, 3) if advantage >= 0 else (3, 2)
                inner = ratio**power * math.exp(decay * (1 - ratio))
            per_token = weighted * inner * advantage
            if kind.beta:
                log = reference.logprob(s, t) - policy.logprob(s, t)
                slope = math.exp(log) - 1 if kind.kl_estimator == "k3" else log
                per_token += weight * kind.beta * slope
            total += per_token * policy.score(s, t)
    return total


FORMS = [("none", kind) for kind in ("sum", "dr_grpo", "dapo", "grpo")]
FORMS += [("token", kind) for kind in ("sum", "dr_grpo", "dapo", "grpo")]
FORMS += [("sequence", "grpo"), ("whole_sequence", "sum"), ("sequence", "luspo")]
SMOOTH = [("token", "sapo"), ("whole_sequence", "vespo")]


@pytest.mark.parametrize("level, loss_type", [*FORMS, *SMOOTH, ("token", "cispo")])
@pytest.mark.parametrize("penalty", [None, "k2", "k3"])
@pytest.mark.parametrize("clipped", [False, True])
def test_the_gradient_is_the_written_formula(level, loss_type, penalty, clipped):
    if clipped and (level == "none" or (level, loss_type) in SMOOTH):
        pytest.skip("no ratio to clip")
    kind = objective(
        importance_sampling_level=level, loss_type=loss_type, beta=0.3 if penalty else 0.0,
        kl_estimator=penalty, kl_in="loss" if penalty else None,
        epsilon=0.2 if clipped and loss_type != "cispo" else None,
        epsilon_high=(1.3 if loss_type == "cispo" else 0.3) if clipped else None,
    )  # fmt: skip
    policy, old, reference = (Table.random(seed) for seed in range(3))
    rng = np.random.default_rng(5)
    sequences = [SEQUENCES[k] for k in rng.integers(9, size=12)]
    lengths, advantages = rng.integers(1, 3, size=12).tolist(), rng.normal(size=12).tolist()
    case = (kind, policy, sequences, lengths, advantages, old, reference)
    np.testing.assert_allclose(gradient(*case), written(*case), rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(applied(*case), measured(*case), rtol=1e-12, atol=1e-15)
    if clipped:  # some ratios are beyond the bounds, some are not
        found = diagnostics(kind, policy.logprobs(sequences), part_of(kind, *case[2:]))
        assert 0 < found["clip_low"] + found["clip_high"] < found["ratio_count"]


@pytest.mark.parametrize("level, loss_type", [*FORMS, *SMOOTH, ("token", "cispo")])
def test_on_policy_every_level_is_the_plain_score_function(level, loss_type):
    """At the policy that wrote the completions a ratio changes nothing, clipped or not."""
    policy, plain = (
        Table.random(0),
        objective(importance_sampling_level="none", loss_type=loss_type),
    )
    low, high = {"sapo": (None, None), "vespo": (None, None), "cispo": (None, 1.1)}.get(
        loss_type, (0.1, 0.1)
    )
    kind = objective(
        importance_sampling_level=level, loss_type=loss_type, epsilon=low, epsilon_high=high
    )
    rest = (policy, SEQUENCES, [2, 1, 2] * 3, list(range(-4, 5)))
    for old in (None, policy):
        np.testing.assert_allclose(
            gradient(kind, *rest, old=old), gradient(plain, *rest), rtol=1e-12, atol=1e-15
        )


def enumerated(policy, old, kind, rewards, reference=None):
    """The applied gradient's mean over completions of `old`, one completion at a time."""
    return sum(
        old.probability(s) * gradient(kind, policy, [s], [2], [z], old=old, reference=reference)
        for s, z in zip(SEQUENCES, rewards, strict=True)
    )


def expected_reward_gradient(policy, rewards):
    return sum(
        policy.probability(s) * z * (policy.score(s, 0) + policy.score(s, 1))
        for s, z in zip(SEQUENCES, rewards, strict=True)
    )


REWARDS = [1.0, 0.0, 0.3, 0.0, 1.0, 0.5, 0.0, 0.0, 1.0]


def test_whole_sequence_ratios_are_unbiased_and_token_ratios_are_not():
    """Theorem 12, by enumeration: completions of one policy, the gradient of another."""
    policy, old = Table.random(0), Table.random(1)
    truth = expected_reward_gradient(policy, REWARDS)
    whole = enumerated(policy, old, objective(importance_sampling_level="whole_sequence"), REWARDS)
    np.testing.assert_allclose(whole, truth, rtol=1e-10, atol=1e-13)
    for level, loss_type in (("token", "sum"), ("sequence", "grpo")):
        kind = objective(importance_sampling_level=level, loss_type=loss_type)
        biased = enumerated(policy, old, kind, REWARDS)
        assert np.abs(biased - truth).max() > 1e-3


def divergence(first, second):
    return sum(
        first.probability(s) * math.log(first.probability(s) / second.probability(s))
        for s in SEQUENCES
    )


def numeric_gradient(function, policy, step=1e-5):
    result = np.zeros_like(policy.logits)
    for place in np.ndindex(*result.shape):
        ends = []
        for sign in (1, -1):
            moved = policy.logits.copy()
            moved[place] += sign * step
            ends.append(function(Table(moved)))
        result[place] = (ends[0] - ends[1]) / (2 * step)
    return result


def penalised(kind):
    return objective(beta=1.0, kl_estimator=kind, kl_in="loss")


def test_k2_in_the_loss_has_the_gradient_of_the_divergence():
    """Token by token, prefixes held fixed: the sum over t of the gradients of conditional KLs."""
    policy, reference = Table.random(0), Table.random(2)
    mean = enumerated(policy, policy, penalised("k2"), [0.0] * 9, reference)
    np.testing.assert_allclose(
        -mean, tokenwise(policy, reference, lambda p, r: (p * np.log(p / r)).sum()), atol=1e-8
    )


def test_k3_in_the_loss_has_the_gradient_of_the_other_divergence():
    policy, reference = Table.random(0), Table.random(2)
    mean = enumerated(policy, policy, penalised("k3"), [0.0] * 9, reference)
    np.testing.assert_allclose(
        -mean, tokenwise(policy, reference, lambda p, r: (r * np.log(r / p)).sum()), atol=1e-8
    )


def tokenwise(policy, reference, distance):
    """Gradient of `sum over prefixes of P(prefix) distance(rows)`, the weights held fixed."""

    def softmax(row):
        return np.exp(row) / np.exp(row).sum()

    def total(moved):
        first = softmax(policy.logits[0])
        weights = [1.0, *first]
        rows = zip(moved.logits, reference.logits, strict=True)
        parts = (distance(softmax(p), softmax(r)) for p, r in rows)
        return sum(w * part for w, part in zip(weights, parts, strict=True))

    return numeric_gradient(total, policy)


def test_k1_in_the_loss_has_mean_zero_and_in_the_reward_the_gradient_of_the_divergence():
    policy, reference = Table.random(0), Table.random(2)
    mean = enumerated(policy, policy, penalised("k1"), [0.0] * 9, reference)
    np.testing.assert_allclose(mean, 0.0, atol=1e-12)
    log = policy.logprobs(SEQUENCES) - reference.logprobs(SEQUENCES)
    judged = [z - 0.7 * float(k) for z, k in zip(REWARDS, log.sum(dim=1), strict=True)]
    plain = objective(importance_sampling_level="none")
    mean = enumerated(policy, policy, plain, judged)
    truth = expected_reward_gradient(policy, REWARDS)
    truth = truth - 0.7 * numeric_gradient(lambda moved: divergence(moved, reference), policy)
    np.testing.assert_allclose(mean, truth, atol=1e-8)


def test_tokens_of_low_entropy_add_the_penalty_alone():
    """A mask of tokens beside the weights, whose divisor stays that of all tokens."""
    policy, reference = Table.random(0), Table.random(2)
    kind = objective(loss_type="grpo", beta=0.3, kl_estimator="k3", kl_in="loss")
    part = part_of(kind, SEQUENCES[:2], [2, 2], [1.0, -2.0], None, reference)
    logprob = policy.logprobs(SEQUENCES[:2])
    chosen = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    some, _ = factors(kind, logprob, replace(part, chosen_BT=chosen))
    every, _ = factors(kind, logprob, part)
    penalty, _ = factors(kind, logprob, replace(part, advantage_B=torch.zeros(2).double()))
    torch.testing.assert_close(some, torch.where(chosen > 0, every, penalty))
    assert (penalty != 0).all() and not torch.allclose(every, penalty)


def test_a_hand_worked_clipped_update():
    """Two tokens of one completion, ratios 1.5 and 0.5, advantage 2, bounds 0.8 and 1.25."""
    kind = objective(epsilon=0.2, epsilon_high=0.25)
    part = Part(torch.tensor([2.0]), torch.ones(1, 2), torch.zeros(1, 2), None, torch.ones(1), 1)
    logprob = torch.tensor([[1.5, 0.5]]).log().requires_grad_()
    value = surrogate(kind, logprob, part)
    assert value.item() == pytest.approx(1.25 * 2 + 0.5 * 2)
    value.backward()
    torch.testing.assert_close(logprob.grad, torch.tensor([[0.0, 1.0]]))


@pytest.mark.parametrize("preset", LOSSES)
def test_presets_are_the_recorded_losses_of_verl(preset):
    """By verl 0.9.1's `compute_policy_loss_vanilla` and its aggregation: the first update of a
    batch, whose ratios are 1, and one after the policy has moved, where some are clipped.
    """
    config = compose("train", f"objective={preset}")
    kind, baseline = config.objective, config.baseline
    advantage_PG = advantages(baseline.name, REWARDS_PG, BaselineContext(), baseline.options)
    _, mask = batch()
    weight_N = token_weights(kind.loss_type, LENGTHS, 4)
    recorded = np.split(np.array(RECORD["losses"][preset]), 2)
    for change, theirs in zip((0 * CHANGES, CHANGES), recorded, strict=True):
        part = Part(
            advantage_B=torch.tensor(advantage_PG.ravel()[ORDER]), mask_BT=mask.double(),
            old_BT=torch.zeros(9, 4), reference_BT=None, weight_B=torch.tensor(weight_N),
            num_rollouts=9,
        )  # fmt: skip
        ours, _ = factors(kind, torch.tensor(change), part)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-8)
    zero = [(np.array(theirs) == 0).sum() for theirs in recorded]
    assert zero[0] < zero[1]  # of clipped tokens
    assert RECORD["losses"].keys() == LOSSES.keys()
