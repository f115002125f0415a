"""When it measures, what it logs and says, on how many ranks, and that training does not notice.

Scores are made up here; tests/integrations/test_real_trl.py has those of a policy in the real
trainer.
"""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import hostile
import numpy as np
import pytest
import torch
from trl_room import GRPOTrainer, changed

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.groups import group_terms, noise_estimate
from grpo_ustat.estimators.moments import pool_gradient_weights
from grpo_ustat.integrations.trl import callback as callback_module
from grpo_ustat.integrations.trl import scoring, windows
from grpo_ustat.integrations.trl.callback import GradientNoiseCallback
from grpo_ustat.integrations.trl.in_step import LayersInStep
from grpo_ustat.integrations.trl.scoring import GroupScorer, unchanged
from grpo_ustat.integrations.trl.support import check_trainer
from grpo_ustat.integrations.trl.windows import Window
from grpo_ustat.policy.scores.groups import GroupScores

SIZE, PROMPTS = 4, 6


def batch(seed):
    """Prompts, completions and rewards of 6 groups of 4; one of them has zero variance."""
    rng = np.random.default_rng(seed)
    prompts = [[p + 1, p + 2] for p in range(PROMPTS) for _ in range(SIZE)]
    completions = [[seed + 1, 10 + i] + [3] * (i % 3) for i in range(PROMPTS * SIZE)]
    rewards = rng.integers(0, 2, PROMPTS * SIZE).astype(float)
    rewards[SIZE : 2 * SIZE] = 1.0
    rewards[0], rewards[1] = 0.0, 1.0
    return prompts, completions, rewards.tolist()


def made_up(group):
    """Scores of a group that depend on its tokens alone, in three dimensions."""
    scores_GD = np.array([
        np.random.default_rng(one.completion_ids + one.prompt_ids).standard_normal(3)
        for one in group.completions
    ])  # fmt: skip
    return GroupScores(scores_GD @ scores_GD.T, scores_GD)


def expected_terms(prompts, completions, rewards):
    """The terms from all of a batch's scores at once."""
    rows = [
        SimpleNamespace(prompt_ids=p, completion_ids=c)
        for p, c in zip(prompts, completions, strict=True)
    ]
    rewards_PG = np.array(rewards).reshape(-1, SIZE)
    groups = [
        made_up(SimpleNamespace(completions=rows[k * SIZE : (k + 1) * SIZE])).gradient(
            pool_gradient_weights(rewards_G)
        )
        for k, rewards_G in enumerate(rewards_PG)
    ]
    ghat_PD = np.stack([group.ghat_R for group in groups])
    norms_PG = np.stack([group.sq_norm_G for group in groups])
    return group_terms(rewards_PG, norms_PG, ghat_PD @ ghat_PD.T)


@pytest.fixture(autouse=True)
def scores_are_made_up(monkeypatch):
    monkeypatch.setattr(GroupScorer, "scores", lambda self, model, group, place: made_up(group))
    monkeypatch.setattr(GradientNoiseCallback, "_announce", lambda *_: None)


def generate(trainer, seed, step):
    """A generation batch at an update, as the trainer asks for it."""
    prompts, completions, rewards = batch(seed)
    share = len(prompts) // trainer.accelerator.num_processes
    own = slice(trainer.accelerator.process_index * share, None)
    trainer.rows = prompts[own][:share], completions[own][:share]
    trainer.rewards = {"right": rewards}
    trainer.state.global_step = step
    return trainer._generate_and_score_completions(None)


def measured(**changes):
    trainer = GRPOTrainer(SIZE, **changes)
    return trainer, GradientNoiseCallback(trainer, every=1)


def test_it_measures_one_of_so_many_batches_of_training():
    """However many updates a batch feeds, or batches an update."""
    trainer = GRPOTrainer(SIZE)
    callback = GradientNoiseCallback(trainer, every=2)
    for seed, step in enumerate([0, 3, 4, 4, 5, 6, 7]):
        generate(trainer, seed, step)
    assert [one.first for one in callback.windows] == [0, 4, 5, 7]
    trainer.model.eval()
    generate(trainer, 9, 20)
    assert len(callback.windows) == 4
    callback.on_train_begin(trainer.args, SimpleNamespace(global_step=21), None)
    trainer.model.train()
    generate(trainer, 9, 21)
    generate(trainer, 9, 22)
    assert [one.first for one in callback.windows][4:] == [21]


def test_what_is_logged_are_ratios_of_running_means(capsys):
    trainer, callback = measured()
    steps = [expected_terms(*batch(seed)) for seed in range(3)]
    for seed in range(3):
        output = generate(trainer, seed, 2 * seed)
        assert set(output) >= {"prompt_ids", "completion_ids", "advantages"}
    expected = noise_estimate(steps, SIZE).intervals
    logged = trainer._metrics["train"]
    for name, interval in expected.items():
        values = logged.get(f"grpo_ustat/{name}")
        if name in callback_module.RATIOS and np.isinf(interval.high):
            assert values is None, "an estimate without an upper end says little"
        elif np.isfinite(interval.estimate):
            assert values == [pytest.approx(interval.estimate)], name
    alone = noise_estimate(steps[2:], SIZE).intervals
    for name in ("c1", "c2", "c3", "grad_sq"):
        assert logged[f"grpo_ustat/step/{name}"] == [pytest.approx(alone[name].estimate)]
    assert logged["grpo_ustat/zero_variance"] == [
        pytest.approx(np.mean([np.isnan(step.norm_P).mean() for step in steps]))
    ]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"grpo_ustat step {k}" for k in (0, 2, 4)]
    assert "G* " in lines[-1] and "noise scale" in lines[-1] and "of the time so far" in lines[-1]


def one_prompt(trainer, prompt, step):
    """A generation batch of one prompt out of a batch of six, as TRL's defaults make it."""
    prompts, completions, rewards = batch(0)
    own = slice(prompt * SIZE, (prompt + 1) * SIZE)
    trainer.rows, trainer.rewards = (prompts[own], completions[own]), {"right": rewards[own]}
    trainer.state.global_step = step
    trainer._generate_and_score_completions(None)


def test_batches_of_one_prompt_are_pooled(monkeypatch):
    """Of one policy they have the terms of a single batch of all their prompts; ten times as many
    updates follow a window unmeasured as with larger batches.
    """
    monkeypatch.setattr(windows, "WINDOW_GROUPS", PROMPTS)
    trainer = GRPOTrainer(SIZE)
    callback = GradientNoiseCallback(trainer, every=3)
    for prompt in range(PROMPTS):
        assert not callback.windows
        one_prompt(trainer, prompt, step=prompt)
    (window,) = callback.windows
    assert (window.first, window.last) == (0, PROMPTS - 1)
    for one, other in zip(window.terms, expected_terms(*batch(0)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)
    for step in range(PROMPTS, 3 * PROMPTS + 2):
        one_prompt(trainer, step % PROMPTS, step)
    callback.on_train_end(trainer.args, trainer.state, None)
    assert [(one.first, one.last) for one in callback.windows[1:]] == [(18, 19)]


def test_a_window_of_two_groups_at_the_end_counts(monkeypatch):
    """One group alone has nothing to be compared with."""
    trainer = GRPOTrainer(SIZE)
    callback = GradientNoiseCallback(trainer, every=1)
    one_prompt(trainer, 0, 0)
    callback.on_train_end(trainer.args, trainer.state, None)
    assert not callback.windows
    one_prompt(trainer, 0, 1), one_prompt(trainer, 1, 2)
    callback.on_train_end(trainer.args, trainer.state, None)
    assert [len(one.terms.g_sq_P) for one in callback.windows] == [2]


def test_a_trainer_that_is_refused_trains_on(capsys):
    """In one line; with `strict` it is an error."""
    trainer = GRPOTrainer(SIZE, mask_truncated_completions=True, tools=[print])
    callback = GradientNoiseCallback(trainer)
    line = capsys.readouterr().out
    assert line.startswith(
        "grpo_ustat: this run is not measured: with mask_truncated_completions=True"
    )
    assert line.count("\n") == 1
    generate(trainer, 0, 0)
    callback.on_train_end(trainer.args, trainer.state, None)
    assert not callback.windows and not capsys.readouterr().out
    with pytest.raises(ConfigError, match="mask_truncated_completions"):
        GradientNoiseCallback(trainer, strict=True)


def test_an_error_at_the_end_ends_no_script(monkeypatch, capsys):
    """What comes after training saves the model."""
    trainer, callback = measured()
    generate(trainer, 0, 0)
    monkeypatch.setattr(callback, "summary", lambda: 1 / 0)
    callback.on_train_end(trainer.args, trainer.state, None)
    assert "no summary: ZeroDivisionError: division by zero" in capsys.readouterr().out


def test_scores_are_kept_within_bounds(monkeypatch):
    """Of the last groups, whenever the loss was judged last."""
    monkeypatch.setattr(callback_module, "POOL_BYTES", 10 * SIZE * 3 * 8)
    trainer, callback = measured()
    for seed in range(6):
        generate(trainer, seed, 2 * seed)
        assert len(callback._kept) <= 10
    assert [one.step for one in callback._kept] == [8] * 4 + [10] * 6


def test_running_means_forget_the_first_half():
    """Of the steps so far, but keep four."""
    trainer, callback = measured()
    for seed, step in enumerate([0, 2, 4, 6, 8]):
        generate(trainer, seed, step)
    assert [one.first for one in callback.recent()] == [2, 4, 6, 8]
    for step in range(10, 30, 2):
        generate(trainer, step, step)
    assert [one.first for one in callback.recent()] == list(range(14, 30, 2))


def on_ranks(world, monkeypatch, act):
    """`act(rank)` on every rank, which are threads."""
    heard, barrier = {}, threading.Barrier(world)

    def gather(mine):
        heard[threading.current_thread().name] = mine
        barrier.wait(20)
        everything = [one for name in sorted(heard) for one in heard[name]]
        barrier.wait(20)
        return everything

    monkeypatch.setattr(scoring, "gather_object", gather)
    threads = [threading.Thread(target=act, args=(rank,), name=str(rank)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_find_what_one_finds(world, monkeypatch):
    """24 rows of 6 groups: 12, 8 or 6 rows a rank; of four ranks' groups some straddle."""
    callbacks = [measured(rank=rank, world=world) for rank in range(world)]
    on_ranks(world, monkeypatch, lambda rank: generate(callbacks[rank][0], 0, 0))
    expected = expected_terms(*batch(0))
    for _, callback in callbacks:
        (window,) = callback.windows
        for one, other in zip(window.terms, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("error", ["", "CUDA out of memory.", "no rule"])
def test_ranks_in_step_gather_the_same_layers(error, monkeypatch):
    """Four groups on three ranks, of which one fails at first: with halves where memory ran out."""
    scorers = [GroupScorer(GRPOTrainer(4, rank, 3), 4, 9) for rank in range(3)]
    scorers[0].at_once = 8  # another rank had less memory for whole weights
    pair = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    gathered, scored, said = [[], [], []], {}, {}

    def act(rank):
        @contextmanager
        def gather(layer):
            gathered[rank].append(pair.index(layer))
            yield

        def scores(model, group, place, layers):
            if rank == 0:  # others need fewer layers than there are turns
                for layer in [*pair, *pair[::-1]] * (4 // scorers[0].at_once):
                    with layers.weights(layer):
                        pass
            if rank == 1 and len(gathered[1]) < 4 and error:
                with layers.weights(pair[1]):
                    raise RuntimeError(error)
            return group

        scorers[rank]._scores = scores
        layers = LayersInStep(pair, lambda layer, _: ([], gather(layer)))
        layers._places = {layer: [] for layer in pair}
        try:
            scored[rank] = scorers[rank].all_scores(None, dict(enumerate("abcd")), layers)
        except ConfigError as failure:
            said[rank] = str(failure)

    on_ranks(3, monkeypatch, act)
    sweep = [0, 1, 1, 0]
    if error == "no rule":
        assert said == dict.fromkeys(range(3), "RuntimeError: no rule") and not scored
        assert gathered == [sweep] * 3
    else:
        assert scored == dict.fromkeys(range(3), dict(enumerate("abcd")))
        assert {scorer.at_once for scorer in scorers} == {2 if error else 4}
        assert gathered == [sweep * (5 if error else 2)] * 3


def test_a_fault_ends_the_measuring_and_not_the_training(monkeypatch, capsys):
    def fails(self, model, group, place):
        raise RuntimeError("no rule\nfor this layer")

    monkeypatch.setattr(GroupScorer, "scores", fails)
    trainer, callback = measured()
    assert "prompt_ids" in generate(trainer, 0, 0)
    generate(trainer, 1, 2)
    expected = "stopped measuring at step 0: RuntimeError: no rule for this layer"
    assert capsys.readouterr().out == f"grpo_ustat: {expected}\n"
    assert callback.summary() == [
        "grpo_ustat: nothing was measured: RuntimeError: no rule for this layer."
    ]
    assert trainer.model.training and not trainer._metrics["train"]


@pytest.mark.parametrize("size, groups, starts", [
    (SIZE, 200, "grpo_ustat: Raise num_generations from 4 to "),
    (2, 2000, "grpo_ustat: Raise num_generations from 2: at the same n, the error"),
])  # fmt: skip
def test_the_end_says_what_to_do(size, groups, starts):
    """Prompts whose gradients hardly differ, so G* is far above the group size."""
    trainer, callback = measured()
    trainer.args.gradient_accumulation_steps, trainer.num_generations = 32, size
    rng = np.random.default_rng(0)
    for step in range(8):
        mean_PD = 0.1 * rng.standard_normal((groups, 3))
        if size == 2:
            mean_PD = rng.standard_normal(3) + 5 * mean_PD
        scores = rng.standard_normal((groups, size, 3))
        rewards = np.einsum("pgd,pd->pg", scores, mean_PD) + rng.standard_normal((groups, size))
        ghat = np.einsum("pg,pgd->pd", pool_gradient_weights(rewards), scores)
        terms = group_terms(rewards, np.square(scores).sum(axis=2), ghat @ ghat.T)
        callback.windows.append(Window(step, step, terms, step == 7))
    lines = callback.summary()
    assert lines[0].startswith(starts) and f"from {4 * groups} groups of steps 4 to 7" in lines[1]
    assert ("G* in [" in lines[1] and "under Assumption 2)" in lines[1]) == (size == 2)
    assert "Groups left out because a completion has no reward: 1." in lines


def test_modes_and_random_states_are_as_before():
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Dropout(0.5))
    model.train()
    model[1].eval()
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    with pytest.raises(ConfigError), unchanged(model):
        assert not model[0].training and torch.is_grad_enabled()
        random.random(), np.random.rand(), torch.rand(1)
        raise ConfigError("stop")
    assert model.training and model[0].training and not model[1].training
    assert random.getstate() == states[0]
    np.testing.assert_array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])


def test_a_forward_that_accelerate_wrapped_is_set_aside():
    """Its mixed precision; afterwards it is there again."""
    model = torch.nn.Linear(2, 2)
    model._original_forward = model.forward
    model.forward = lambda x: model._original_forward(x).bfloat16()
    with unchanged(model):
        assert model(torch.ones(1, 2)).dtype == torch.float32
    assert model(torch.ones(1, 2)).dtype == torch.bfloat16


def test_some_parameters_alone_are_measured(monkeypatch):
    """And are said, with the precision that was scored."""
    seen = []

    def scores(self, model, group, place):
        seen.append([name for name, p in model.named_parameters() if p.requires_grad])
        return made_up(group)

    monkeypatch.setattr(GroupScorer, "scores", scores)
    model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(2), "head": torch.nn.Linear(2, 2)})
    model["norm"].bias.requires_grad_(False)
    trainer = GRPOTrainer(SIZE, model=model)
    callback = GradientNoiseCallback(trainer, parameters="norm|head.b")
    generate(trainer, 0, 0)
    assert seen and {tuple(names) for names in seen} == {("norm.weight", "head.bias")}
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable == ["norm.weight", "head.weight", "head.bias"]
    words = "scores of parameters that match 'norm|head.b' in float32; measuring took"
    assert words in callback.summary()[1]


@pytest.mark.parametrize("pattern", ["attn", "norm[", "norm.bias"])
def test_parameters_that_are_none_are_refused(pattern):
    model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(2), "head": torch.nn.Linear(2, 2)})
    model["norm"].bias.requires_grad_(False)
    with pytest.raises(ConfigError, match="parameters='") as caught:
        GradientNoiseCallback(GRPOTrainer(SIZE, model=model), parameters=pattern, strict=True)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="every=0 is below 1"):
        GradientNoiseCallback(GRPOTrainer(SIZE), every=0)


def without(name):
    """A trainer of another version of TRL."""
    trainer = GRPOTrainer()
    delattr(trainer, name)
    return trainer


REFUSED = {
    "cannot be identified": changed(mask_truncated_completions=True, tools=[print]),
    "not SimpleNamespace": SimpleNamespace(),
    "has no _logs: install TRL 1.16": without("_logs"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_measured_is_refused(message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_trainer(REFUSED[message])
    assert "\n" not in str(caught.value)
    check_trainer(changed(mask_truncated_completions=True))
    check_trainer(changed(_is_vlm=True, top_k=5))


@pytest.mark.parametrize("name", hostile.NAMES.values(), ids=hostile.NAMES)
def test_what_it_prints_are_texts(name, capsys):
    """Such as a layer's name within an error."""
    _, callback = measured()
    callback.fault = name
    callback._print(*callback.summary())
    text = capsys.readouterr().out
    assert not set(text) & set(hostile.TERMINAL_ACTS) and text.encode()
