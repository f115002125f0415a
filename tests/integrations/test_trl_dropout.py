"""With dropout, what is measured is the gradient that is applied: the scores of the model in
training, of masks that an update draws, and training does not notice.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM
from trl_room import GRPOTrainer, output_of

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.groups import group_terms
from grpo_ustat.estimators.moments import pool_gradient_weights, shifted_moments
from grpo_ustat.integrations.trl.generation import Completion, Group
from grpo_ustat.integrations.trl.objective import ratio_factors
from grpo_ustat.integrations.trl.scoring import GroupScorer, unchanged
from grpo_ustat.policy.dropout import dropping, random_states, same_draws, seeded_states
from grpo_ustat.policy.logprobs import positions
from grpo_ustat.policy.scores.backward import completion_scores

SIZE = 4
PROMPTS = [[5, 6, 7], [8]]
COMPLETIONS = [[3, 4], [3, 4], [9, 3, 2], [1]], [[2, 2, 6], [7], [1, 5], [4, 4]]
CPU = torch.device("cpu")


def enumerated(prompt):
    """Rewards, probabilities and scores of all pairs of an outcome and the masks of its score.

    A softmax policy of three outcomes loses each of two hidden units with probability 1/2. An
    outcome is sampled with masks of its own, as TRL samples, and its score has others.
    """
    rng = np.random.default_rng(3)
    first_HD, last_VH = (torch.from_numpy(rng.normal(size=(n, 2)) * 2) for n in (2, 3))
    x_D = torch.from_numpy(np.random.default_rng(prompt).normal(size=2))
    z_V = np.random.default_rng(prompt + 9).normal(size=3)
    weights = first_HD.requires_grad_(), last_VH.requires_grad_()
    masks = [torch.tensor(bits) * 2.0 for bits in itertools.product([0, 1], repeat=2)]
    logs_MV = torch.stack(
        [(last_VH @ (mask.double() * (first_HD @ x_D))).log_softmax(dim=0) for mask in masks]
    )
    sampled_V = logs_MV.exp().mean(dim=0).detach().numpy()
    scores = []
    for log in logs_MV.flatten():
        grads = torch.autograd.grad(log, weights, retain_graph=True)
        scores.append(torch.cat([g.flatten() for g in grads]).numpy())
    return np.tile(z_V, 4), np.tile(sampled_V, 4) / 4, np.stack(scores)


def all_groups(prompt, size):
    """Probabilities, rewards, products of scores and leave-one-out gradients of all groups of a
    prompt, without regard to order.
    """
    z_O, p_O, s_OD = enumerated(prompt)
    index = itertools.combinations_with_replacement(range(len(z_O)), size)
    index_NG = np.array(list(index))
    orders_N = [
        math.factorial(size) / np.prod([math.factorial(row.count(x)) for x in set(row)])
        for row in index_NG.tolist()
    ]
    p_N = orders_N * p_O[index_NG].prod(axis=1)
    assert p_N.sum() == pytest.approx(1, abs=1e-12)
    z_NG, s_NGD = z_O[index_NG], s_OD[index_NG]
    ghat_ND = np.einsum("ng,ngd->nd", pool_gradient_weights(z_NG), s_NGD)
    return p_N, z_NG, np.einsum("ngd,nhd->ngh", s_NGD, s_NGD), ghat_ND


def test_estimates_are_right_for_the_applied_gradient_over_all_masks_and_outcomes():
    """Of three equally likely prompts. The error of an update of one group of any size, and that of
    its mean, are summed over all that can happen; so are the estimates from groups of four.
    """
    prompts, size = range(3), 4
    means, terms, plain = [], [], []
    for prompt in prompts:
        p_N, z_NG, gram_NGG, ghat_ND = all_groups(prompt, size)
        means.append(p_N @ ghat_ND)
        norms_NG = np.diagonal(gram_NGG, axis1=1, axis2=2)
        args = z_NG, norms_NG, ghat_ND @ ghat_ND.T
        for into, gram in ((terms, gram_NGG), (plain, None)):
            of = group_terms(*args, gram)
            into.append([p_N @ x for x in (of.g_sq_P, of.first_order_P, of.second_order_P)])
    grad_sq = np.square(np.mean(means, axis=0)).sum()
    g_sq, c2, c3 = np.mean(terms, axis=0)
    assert g_sq == pytest.approx(np.mean(np.square(means).sum(axis=1)), rel=1e-12)
    for group_size in (2, 3, 4, 5):
        error = 0.0
        for prompt in prompts:
            p_N, _, _, ghat_ND = all_groups(prompt, group_size)
            error += p_N @ np.square(ghat_ND - np.mean(means, axis=0)).sum(axis=1) / 3
        parts = (g_sq - grad_sq, c2 / group_size, c3 / (group_size * (group_size - 1)))
        assert sum(parts) == pytest.approx(error, rel=1e-11)
    # with the mean score taken to be 0, which that of a policy of other masks is not
    assert abs(np.mean(plain, axis=0)[2] / c3 - 1) > 0.02


def test_shifted_moments_are_those_of_scores_without_their_mean():
    """They need four completions, are the usual ones in the mean, and know of no shift."""
    rng = np.random.default_rng(0)
    z_PN, s_PND = rng.normal(size=(3, 6)), rng.normal(size=(3, 6, 4))
    shifted = shifted_moments(z_PN, s_PND @ s_PND.mT)
    far = s_PND + rng.normal(size=(3, 1, 4))
    for one, other in zip(shifted, shifted_moments(z_PN, far @ far.mT), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10)
    pairs = [(i, j) for i in range(6) for j in range(6) if i != j]
    kernel = {(i, j): (z_PN[0, i] - z_PN[0, j]) * (s_PND[0, i] - s_PND[0, j]) / 2 for i, j in pairs}
    apart = [kernel[a] @ kernel[b] for a in pairs for b in pairs if not {*a} & {*b}]
    assert shifted[2][0] == pytest.approx(np.mean(apart))
    with pytest.raises(ValueError, match="at least 4 completions"):
        shifted_moments(z_PN[:, :3], np.zeros((3, 3, 3)))


def qwen(attention="sdpa", lora=True, rate=0.3):
    """A small model in float64 with dropout in its adapters and attention, in training mode."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=12, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, attention_dropout=rate,
        attn_implementation=attention, max_position_embeddings=32,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).double()
    if lora:
        lora_config = LoraConfig(r=2, lora_dropout=rate, target_modules="all-linear")
        model = get_peft_model(model, lora_config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_()
    return model.double().train()


def gpt2(rate=0.3):
    """A small GPT-2 in float64, with absolute positions, in training mode."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=12, n_positions=32, n_embd=8, n_layer=2, n_head=2, resid_pdrop=rate,
        embd_pdrop=rate, attn_pdrop=rate, initializer_range=0.5,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double().train()


MODELS = {
    "adapters": qwen, "eager": lambda: qwen("eager"), "base": lambda: qwen(lora=False), "gpt2": gpt2
}  # fmt: skip


def inputs_of(rows=None):
    """A micro-batch of two groups of four, shuffled, as TRL hands it to its loss."""
    pairs = [(p, c) for p, own in zip(PROMPTS, COMPLETIONS, strict=True) for c in own]
    pairs = [pairs[i] for i in (rows or (3, 0, 5, 1, 7, 2, 6, 4))]
    return output_of([p for p, _ in pairs], [c for _, c in pairs])


def loss_of_rows(model, inputs, place=True):
    """Log-probabilities of a micro-batch's rows in one forward pass, as TRL's loss makes it."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    width = inputs["completion_ids"].shape[1]
    where = {"position_ids": positions(mask)} if place else {}
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **where).logits
    logs = logits[:, :-1].log_softmax(dim=-1).gather(2, ids[:, 1:, None])[..., 0]
    return logs[:, -width:] * inputs["completion_mask"]


def plain(model, logs_BT):
    """Each row's gradient from the graph of all, [B, D], by name."""
    own = [p for _, p in sorted((n, p) for n, p in model.named_parameters() if p.requires_grad)]
    rows = [
        torch.autograd.grad(
            total, own, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for total in logs_BT.sum(dim=1)
    ]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).numpy()


def scorer_of(model, **changes):
    """A scorer of a trainer with that model, whose sketches are products of whole scores."""
    trainer = GRPOTrainer(SIZE, model=model, importance_sampling_level="token", **changes)
    trainer.epsilon_low = trainer.epsilon_high = 0.2
    trainer.args.seed = 1
    return GroupScorer(trainer, SIZE, 10**6)


def close(found_BR, expected_BD, rtol=1e-6):
    """The same products; sketches of few numbers are whole but for an order and signs."""
    scale = np.abs(expected_BD @ expected_BD.T).max()
    products = found_BR.astype(float) @ found_BR.astype(float).T
    np.testing.assert_allclose(products, expected_BD @ expected_BD.T, rtol, rtol * scale)


@pytest.mark.parametrize("name", MODELS)
def test_scores_of_an_update_have_the_masks_that_its_loss_drew(name):
    model, inputs = MODELS[name](), inputs_of()
    torch.manual_seed(5)
    states = random_states(CPU)
    expected = plain(model, loss_of_rows(model, inputs))
    after = torch.get_rng_state()
    scorer = scorer_of(model)
    with unchanged(model):
        found = scorer.update_scores(model, inputs, states, np.ones(8), trl_positions=False)
    close(found, expected)
    assert torch.equal(torch.get_rng_state(), after) and all(m.training for m in model.modules())
    with unchanged(model):
        other = scorer.update_scores(
            model, inputs, seeded_states(CPU, 6), np.ones(8), trl_positions=False
        )
    assert np.abs(other - found).max() > 0.01 * np.abs(found).max(), "masks change nothing"


@pytest.mark.parametrize("name", MODELS)
def test_layers_that_are_computed_twice_drop_the_same(name):
    model, inputs = MODELS[name](), inputs_of()
    states, found = seeded_states(CPU, 5), []
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    counts = torch.cat([torch.zeros_like(inputs["prompt_mask"]), inputs["completion_mask"]], dim=1)
    for by_layer in (False, True):
        with dropping(model, states):
            scores = completion_scores(
                model, ids, mask, counts, gram=True, drops=True, all_columns=True, by_layer=by_layer
            )
        found.append(scores.gram_BB.numpy())
    np.testing.assert_allclose(*found, rtol=1e-9)
    with pytest.raises(ConfigError, match="training mode"):
        completion_scores(model, ids, mask, counts)


def test_ratios_of_two_draws_of_masks_are_those_of_the_loss():
    """Its own gradient of a row, with clipping, where pi_old had other masks."""
    model, inputs = qwen(), inputs_of()
    with same_draws(CPU, seeded_states(CPU, 4)), torch.no_grad():
        inputs["old_per_token_logps"] = loss_of_rows(model, inputs)
    states, sign_B = seeded_states(CPU, 5), np.array([1.0, -1.0] * 4)
    with same_draws(CPU, states):
        logs_BT = loss_of_rows(model, inputs)
        sign_B1 = torch.from_numpy(sign_B)[:, None]
        ratio_BT = (logs_BT - inputs["old_per_token_logps"]).exp()
        gain_BT = torch.min(ratio_BT * sign_B1, ratio_BT.clamp(0.98, 1.02) * sign_B1) * sign_B1
        expected = plain(model, gain_BT * inputs["completion_mask"])
    scorer = scorer_of(model)
    scorer.trainer.epsilon_low = scorer.trainer.epsilon_high = 0.02
    with unchanged(model):
        found = scorer.update_scores(model, inputs, states, sign_B, trl_positions=False)
    close(found, expected)
    gap, cut, tokens = scorer.ratio_gaps
    assert tokens == inputs["completion_mask"].sum() and gap / tokens > 0.01 and cut > 0
    scorer.trainer.args.loss_type = "vespo"
    with unchanged(model), pytest.raises(ConfigError, match="different dropout masks"):
        scorer.update_scores(model, inputs, states, sign_B, trl_positions=False)


@pytest.mark.parametrize("loss_type", ["dapo", "sapo", "cispo", "luspo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_ratio_of_1_multiplies_nothing(loss_type, level):
    args = SimpleNamespace(loss_type=loss_type, delta=None,
                           sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)  # fmt: skip
    trainer = SimpleNamespace(
        args=args, importance_sampling_level=level, epsilon_low=0.2, epsilon_high=0.2
    )
    zeros, sign = torch.zeros(2, 3), torch.tensor([1.0, -1.0])
    factors = ratio_factors(trainer, zeros, torch.ones(2, 3), sign)
    assert factors is not None and torch.allclose(factors, torch.ones_like(factors))


def groups_of():
    """Two groups of four; two completions of the first are equal."""
    rewards = np.array([1.0, 0.0, 1.0, 0.0])
    return {
        place: Group([Completion(prompt, c) for c in own], rewards, rewards[:, None])
        for place, (prompt, own) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True))
    }


def one_process(monkeypatch):
    monkeypatch.setattr("grpo_ustat.integrations.trl.scoring.gather_object", lambda own: own)


def test_every_completion_has_masks_of_its_own(monkeypatch):
    """Equal ones too, and others in the next batch; the run's own draws are as they were."""
    one_process(monkeypatch)
    model = qwen()
    scorer, before = scorer_of(model), torch.get_rng_state()
    with unchanged(model):
        found = [scorer.all_scores(model, groups_of(), None) for _ in range(2)]
    again = scorer_of(model)
    with unchanged(model):
        same = again.all_scores(model, groups_of(), None)
    np.testing.assert_array_equal(found[0][1].gram_GG, same[1].gram_GG)
    gram_GG = found[0][0].gram_GG
    assert gram_GG[0, 0] != pytest.approx(gram_GG[1, 1], rel=1e-3)
    assert found[0][0].gram_GG != pytest.approx(found[1][0].gram_GG, rel=1e-3)
    assert torch.equal(torch.get_rng_state(), before) and all(m.training for m in model.modules())
    model = qwen(rate=0.0)
    scorer = scorer_of(model)
    with unchanged(model):
        gram_GG = scorer.all_scores(model, groups_of(), None)[0].gram_GG
    assert gram_GG[0, 0] == pytest.approx(gram_GG[1, 1])


def test_positions_that_padding_shifts_are_seen():
    """GPT-2's are absolute; Qwen2's are not, and in the loss they make no difference."""
    inputs, states = inputs_of(), seeded_states(CPU, 5)
    assert not scorer_of(qwen()).shifts_positions(qwen().eval())
    model = gpt2()
    scorer = scorer_of(model)
    with unchanged(model):
        assert scorer.shifts_positions(model)
        found = scorer.update_scores(model, inputs, states, np.ones(8), trl_positions=True)
        right = scorer.update_scores(model, inputs, states, np.ones(8), trl_positions=False)
    with same_draws(CPU, states):
        expected = plain(model, loss_of_rows(model, inputs, place=False))
    close(found, expected)
    assert np.abs(found - right).max() > 0.01 * np.abs(right).max()


def test_masks_that_cannot_be_drawn_once_more_are_refused_by_name():
    model, inputs = qwen(), inputs_of()
    scorer, states = scorer_of(model), seeded_states(CPU, 5)
    with unchanged(model), pytest.raises(ConfigError, match="images of several prompts"):
        images = inputs | {"pixel_values": torch.zeros(1)}
        scorer.update_scores(model, images, states, np.ones(8), trl_positions=False)
    model = qwen(lora=False)
    model.model.extra = torch.nn.Bilinear(1, 1, 1).double()
    with unchanged(model), pytest.raises(ConfigError, match="extra.* has no formula"):
        scorer_of(model).update_scores(model, inputs, states, np.ones(8), trl_positions=False)


def test_modes_checkpointing_and_statistics_are_as_before():
    model = qwen(lora=False)
    model.gradient_checkpointing_enable()
    model.add_module("norm", torch.nn.BatchNorm1d(2))
    modes = [m.training for m in model.modules()]
    with unchanged(model), dropping(model, seeded_states(CPU, 1)):
        assert model.training and not model.norm.training
        assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    assert modes == [m.training for m in model.modules()]
    assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
