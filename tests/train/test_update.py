"""Updates against a slow trainer that reads one completion at a time with plain autograd."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from fakes import random_rollouts
from golden import naming
from training_runs import first_batch

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.memory import out_of_memory
from grpo_ustat.rollout import batch as decoding
from grpo_ustat.train import update as update_module
from grpo_ustat.train.micro_batches import TokenBudget, plan
from grpo_ustat.train.update import (
    FixedLogprobs,
    UpdateStats,
    accumulate_gradient,
    fixed_logprobs,
    minibatches,
    penalised_rewards,
    update,
)

EXACT = ("model.dtype=float64", "learning_rate=0.01")
ADVANTAGES = np.random.default_rng(3).normal(size=(4, 4))


def alone(model, rollouts, i):
    """Logits of one completion's tokens, unpadded, [L, V], and the tokens."""
    size = rollouts.mask_PGT.shape[1]
    prompt, mask = rollouts.prompt_tokens[i // size], rollouts.mask_PGT[i // size, i % size]
    tokens = torch.from_numpy(rollouts.tokens_PGT[i // size, i % size][mask])
    ids = torch.cat([torch.tensor(prompt), tokens])[None]
    return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1], tokens


def chosen(model, rollouts, i):
    logits, tokens = alone(model, rollouts, i)
    return logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def slow_updates(run, rollouts, advantage_N):
    """Clipped token ratios, each completion averaged, K3 to a reference, an entropy bonus."""
    objective, model = run.config.objective, run.policy.model
    with torch.no_grad():
        old = [chosen(model, rollouts, i) for i in range(16)]
        reference = [chosen(run.reference.model, rollouts, i) for i in range(16)]
    for minibatch in minibatches(run, rollouts.lengths_PG, 0):
        run.optimizer.zero_grad()
        for i in minibatch.index:
            logits, tokens = alone(model, rollouts, i)
            logp = logits.log_softmax(-1)
            now = logp.gather(1, tokens[:, None])[:, 0]
            ratio, advantage = (now - old[i]).exp(), float(advantage_N[i])
            bounded = ratio.clamp(1 - objective.epsilon, 1 + objective.epsilon_high)
            value = torch.minimum(ratio * advantage, bounded * advantage)
            log = reference[i] - now
            value = value - objective.beta * (log.exp() - log - 1)
            value = value - objective.entropy_coef * (logp.exp() * logp).sum(-1)
            (-value.mean() / minibatch.num_rollouts).backward()
        run.optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer, tokens", [("sgd", 1), ("adamw", 400)])
def test_algorithm_2_in_full_equals_the_slow_trainer(tmp_path, optimizer, tokens):
    """Two iterations over minibatches of half a batch; parameters after four updates."""
    overrides = (
        *EXACT, "objective=grpo_original", "objective.num_iterations=2",
        "objective.num_minibatches=2", f"optimizer={optimizer}",
        "objective.entropy_coef=0.01", "objective.epsilon=0.02", "objective.epsilon_high=0.03",
    )  # fmt: skip
    run, batch = first_batch(tmp_path, *overrides, f"micro_batch_tokens={tokens}")
    twin, _ = first_batch(tmp_path, *overrides)
    for each in (run, twin):  # a reference that is not the policy
        with torch.no_grad():
            each.reference.model.lm_head.weight *= 1.02
    constants = fixed_logprobs(run, batch.rollouts)
    _, found = update(run, batch, ADVANTAGES, constants, 0)
    slow_updates(twin, batch.rollouts, ADVANTAGES.ravel())
    start, _ = first_batch(tmp_path, *EXACT)
    for p, q, s in zip(*(r.policy.model.parameters() for r in (run, twin, start)), strict=True):
        moved = (q - s).abs().max().item()
        torch.testing.assert_close(p, q, rtol=0, atol=1e-9 * max(moved, 1e-6))
    assert found.sums["clip_low"] + found.sums["clip_high"] > 0
    assert found.sums["rows"] == 32 and found.sums["skipped"] == 0


@pytest.mark.slow
def test_every_iteration_visits_each_group_once(tmp_path):
    run, batch = first_batch(
        tmp_path, "objective=dr_grpo", "objective.num_minibatches=2", "objective.num_iterations=3"
    )
    found = [m.index.tolist() for m in minibatches(run, batch.lengths_PG, 5)]
    assert len(found) == 6 and all(len(index) == 8 for index in found)
    for first in (0, 2, 4):
        assert sorted(found[first] + found[first + 1]) == list(range(16))
        for index in found[first : first + 2]:
            assert all(index[k : k + 4] == list(range(index[k], index[k] + 4)) for k in (0, 4))
    again = [m.index.tolist() for m in minibatches(run, batch.lengths_PG, 5)]
    assert found == again and len({str(index) for index in found}) > 2
    for minibatch in minibatches(run, batch.lengths_PG, 5):  # dr_grpo: 1 / (n L_max)
        weight = 1 / (8 * run.config.max_completion_length)
        assert (np.flatnonzero(minibatch.weight_N) == minibatch.index).all()
        assert (minibatch.weight_N[minibatch.index] == weight).all()


def gradient_of(run, rollouts, advantages, constants=None):
    (whole,) = list(minibatches(run, rollouts.lengths_PG, 0))[:1]
    found = UpdateStats()
    accumulate_gradient(run, rollouts, advantages, whole, constants or FixedLogprobs(), found)
    named = run.policy.model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}, found


def assert_same(left, right, rtol=1e-10):
    assert left.keys() == right.keys()
    for name in left:
        scale = right[name].abs().max().item()
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=rtol * scale + 1e-15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "override",
    ["share_prompts=false", "gradient_checkpointing=true", "micro_batch_tokens=1",
     "micro_batch_tokens=250"],
)  # fmt: skip
def test_what_saves_memory_or_time_changes_no_gradient(tmp_path, override):
    run, batch = first_batch(tmp_path, *EXACT)
    twin, _ = first_batch(tmp_path, *EXACT, override)
    left, _ = gradient_of(run, batch.rollouts, ADVANTAGES)
    right, _ = gradient_of(twin, batch.rollouts, ADVANTAGES)
    assert_same(left, right)


@pytest.mark.slow
def test_padding_of_prompts_changes_no_gradient(tmp_path):
    """A prompt beside a much longer one, whose completions count for nothing."""
    run, batch = first_batch(tmp_path, *EXACT)
    rollouts = batch.rollouts
    longer = [[3] * 40, *rollouts.prompt_tokens[1:]]
    changed = dataclasses.replace(rollouts, prompt_tokens=longer)
    advantages = ADVANTAGES.copy()
    advantages[0] = 1e-300  # read, and without effect
    assert_same(gradient_of(run, rollouts, advantages)[0], gradient_of(run, changed, advantages)[0])


@pytest.mark.slow
def test_silent_completions_are_skipped_only_where_that_is_exact(tmp_path, monkeypatch):
    advantages = ADVANTAGES * (np.arange(16).reshape(4, 4) % 3 == 0)
    run, batch = first_batch(tmp_path, *EXACT)
    skipped, found = gradient_of(run, batch.rollouts, advantages)
    assert found.sums["skipped"] == 10 and found.sums["rows"] == 16
    monkeypatch.setattr(update_module.objectives, "skips_zero_variance", lambda objective: False)
    all_read, found = gradient_of(run, batch.rollouts, advantages)
    assert found.sums["skipped"] == 0
    assert_same(skipped, all_read)
    monkeypatch.undo()
    penalised, batch = first_batch(tmp_path, *EXACT, "objective=grpo")
    constants = fixed_logprobs(penalised, batch.rollouts)
    assert gradient_of(penalised, batch.rollouts, advantages, constants)[1].sums["skipped"] == 0


@pytest.mark.slow
def test_out_of_memory_gives_the_same_gradient_from_smaller_passes(tmp_path, monkeypatch, capsys):
    run, batch = first_batch(tmp_path, *EXACT)
    expected, _ = gradient_of(run, batch.rollouts, ADVANTAGES)
    real, calls = update_module.Head.backward, []

    def failing(self, window, *factors):
        calls.append(window.mask_BT.numel())
        if len(calls) == 1 or calls[-1] > 400:
            raise torch.OutOfMemoryError("injected")
        return real(self, window, *factors)

    monkeypatch.setattr(update_module.Head, "backward", failing)
    found, sums = gradient_of(run, batch.rollouts, ADVANTAGES)
    assert_same(found, expected)
    assert run.token_budget.tokens < 16384 and sums.sums["rows"] == 16
    assert "out of memory" in capsys.readouterr().err


@pytest.mark.slow
def test_other_errors_and_hopeless_ones_are_not_swallowed():
    def failing(error):
        raise error

    with pytest.raises(RuntimeError, match="something else"):
        TokenBudget(100).attempt(lambda: failing(RuntimeError("something else")))
    with pytest.raises(ConfigError, match="out of memory"):
        TokenBudget(4).attempt(lambda: failing(torch.OutOfMemoryError("no more")))
    assert out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 bytes"))


@pytest.mark.slow
def test_long_gradients_are_shortened(tmp_path):
    run, batch = first_batch(tmp_path, *EXACT, "optimizer=sgd", "max_grad_norm=0.5")
    before = [p.detach().clone() for p in run.policy.model.parameters()]
    norm, _ = update(run, batch, 100 * ADVANTAGES, FixedLogprobs(), 0)
    pairs = zip(before, run.policy.model.parameters(), strict=True)
    moved = torch.nn.utils.get_total_norm([(p - q).detach() for p, q in pairs])
    assert norm > 0.5 and moved.item() == pytest.approx(0.01 * 0.5)


@pytest.mark.slow
def test_a_penalty_in_the_reward_is_k1(tmp_path):
    run, batch = first_batch(
        tmp_path, *EXACT, "objective=whole_sequence", "objective.beta=0.5",
        "objective.kl_estimator=k1", "objective.kl_in=reward",
    )  # fmt: skip
    with torch.no_grad():
        run.reference.model.lm_head.weight *= 1.05
    constants = fixed_logprobs(run, batch.rollouts)
    judged = penalised_rewards(run, batch, constants)
    with torch.no_grad():
        for i in (0, 5, 15):
            policy, reference = (
                float(chosen(m, batch.rollouts, i).sum())
                for m in (run.policy.model, run.reference.model)
            )
            expected = batch.rewards_PG.ravel()[i] - 0.5 * (policy - reference)
            assert judged.ravel()[i] == pytest.approx(expected, rel=1e-10)


@pytest.mark.slow
def test_adapters_train_alone_and_their_absence_is_the_reference(tmp_path):
    run, batch = first_batch(tmp_path, *EXACT, "lora=r16", "objective=grpo")
    assert run.reference is None
    base = {n: p.clone() for n, p in run.policy.model.named_parameters() if not p.requires_grad}
    first = fixed_logprobs(run, batch.rollouts)
    torch.testing.assert_close(first.old_NT, first.reference_NT)  # adapters start at zero
    update(run, batch, ADVANTAGES, first, 0)
    second = fixed_logprobs(run, batch.rollouts)
    torch.testing.assert_close(second.reference_NT, first.reference_NT)
    assert (second.old_NT - first.old_NT).abs().max() > 1e-3
    named = dict(run.policy.model.named_parameters())
    assert base and all(torch.equal(value, named[name]) for name, value in base.items())


@pytest.mark.slow
def test_bf16_samples_what_it_scores(tmp_path, monkeypatch):
    """Weights stay float32; sampler and update compute in bfloat16."""
    seen, choose = set(), decoding.choose
    monkeypatch.setattr(
        decoding, "choose", lambda logits, *rest: (seen.add(logits.dtype), choose(logits, *rest))[1]
    )
    run, batch = first_batch(tmp_path, "bf16=true")
    assert seen == {torch.bfloat16}
    assert next(run.policy.model.parameters()).dtype == torch.float32
    exact, _ = first_batch(tmp_path)
    left, _ = gradient_of(run, batch.rollouts, ADVANTAGES)
    right, _ = gradient_of(exact, batch.rollouts, ADVANTAGES)
    total = sum(float((left[n] - right[n]).square().sum()) for n in left) ** 0.5
    size = sum(float(g.square().sum()) for g in right.values()) ** 0.5
    assert batch.rollouts.logprobs_PGT is not None
    _, found = gradient_of(run, batch.rollouts, ADVANTAGES)
    assert 1e-4 < np.concatenate(found.gap).mean() < 0.05
    assert 1e-6 < total / size < 0.1 and all(g.dtype == torch.float32 for g in left.values())


def test_plans_cover_everything_once_within_their_limit(tmp_path):
    _, batch = first_batch(tmp_path)
    for tokens in (1, 60, 200, 10**6):
        for share in (True, False):
            assert_covered(batch.rollouts, tokens, share)


def assert_covered(rollouts, tokens, share):
    index = np.array([0, 1, 2, 5, 8, 9, 10, 11, 15])
    lengths, heads = rollouts.lengths_PG.ravel(), list(map(len, rollouts.prompt_tokens))
    passes = plan(rollouts, index, tokens, share)
    assert sorted(np.concatenate([part for p in passes for part in p.parts])) == index.tolist()
    for chosen_pass in passes:
        assert (np.diff(chosen_pass.prompts) > 0).all()
        for part in chosen_pass.parts:
            assert set(part // 4) <= set(chosen_pass.prompts)
            padded = len(part) * (max(heads[i // 4] for i in part) + lengths[part].max())
            assert padded <= tokens or len(part) == 1
    if share:
        seen = np.concatenate([p.prompts for p in passes])
        assert len(seen) == len(set(seen)) == 4  # each prompt is read once


def test_short_completions_are_not_padded_to_long_ones():
    """64 completions of 10 to 73 tokens: a part ends where a tenth would be padding."""
    rollouts = random_rollouts([5], group_size=64, longest=9)
    mask = np.arange(73) < np.arange(10, 74)[:, None]
    rollouts = dataclasses.replace(rollouts, mask_PGT=mask[None], tokens_PGT=mask[None] * 2)
    (one,) = plan(rollouts, np.arange(64), 10**4, share=True)
    lengths = [mask[part].sum(axis=1) for part in one.parts]
    assert len(lengths) == 3 and all((np.diff(part) <= 0).all() for part in lengths)
    padded = sum(len(part) * part.max() for part in lengths)
    assert mask.sum() < padded < 1.3 * mask.sum() < 64 * 73


def test_a_gpu_takes_fewer_and_larger_parts():
    """The same completions in two parts, where a CPU takes three."""
    rollouts = random_rollouts([5], group_size=64, longest=9)
    mask = np.arange(73) < np.arange(10, 74)[:, None]
    rollouts = dataclasses.replace(rollouts, mask_PGT=mask[None], tokens_PGT=mask[None] * 2)
    counts = {}
    for device in ("cpu", "cuda"):
        (one,) = plan(rollouts, np.arange(64), 6000, share=True, device=device)
        assert sorted(np.concatenate(one.parts)) == list(range(64))
        counts[device] = len(one.parts)
    assert counts["cuda"] < counts["cpu"]


def test_too_small_a_target_of_adapters_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="lora.target_modules=nothing_of_that_name"):
        first_batch(tmp_path, "lora=r16", "lora.target_modules=nothing_of_that_name")


@pytest.mark.slow
def test_layers_are_recomputed_in_updates_and_nowhere_else(tmp_path):
    """Each layer reads an update's tokens twice; sampling keeps its cache and its completions."""
    counts, texts = {}, {}
    for flag in ("false", "true"):
        run, batch = first_batch(tmp_path, f"gradient_checkpointing={flag}", "share_prompts=false")
        layer, calls = run.policy.model.model.layers[0].self_attn, []
        handle = layer.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        gradient_of(run, batch.rollouts, np.ones((4, 4)))
        handle.remove()
        counts[flag], texts[flag] = len(calls), batch.rollouts.texts_PG
    assert texts["true"] == texts["false"]
    assert counts["true"] == 2 * counts["false"]


def test_what_does_not_fit_into_the_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=naming("max_completion_length=600", 512)):
        first_batch(tmp_path, "max_completion_length=600")


def test_prompts_that_cannot_be_shared_are_said(tmp_path, capsys):
    run, _ = first_batch(tmp_path, "gradient_checkpointing=true")
    assert not run.share_prompts
    assert "gradient_checkpointing=true" in capsys.readouterr().err


@pytest.mark.slow
def test_gradients_and_prompts_are_let_go(tmp_path, monkeypatch):
    """No gradient outlives its step, no prompt's graph the next one's."""
    import gc
    import weakref

    run, batch = first_batch(tmp_path, "micro_batch_tokens=60")
    alive, init = [], update_module.SharedPromptReader.__init__

    def counting(self, *rest):
        gc.collect()
        assert not [1 for reference in alive if reference() is not None]
        init(self, *rest)
        alive.append(weakref.ref(self))

    monkeypatch.setattr(update_module.SharedPromptReader, "__init__", counting)
    update(run, batch, ADVANTAGES, FixedLogprobs(), 0)
    assert len(alive) > 1 and all(p.grad is None for p in run.policy.model.parameters())
