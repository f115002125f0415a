"""The live monitor against one-at-a-time scores, a study of the same pool, and itself."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from golden import naming
from prompt_pools import whole_pool
from reference import one_flat_score
from resuming import rows, weights
from simulated import on_ranks
from training_runs import config_of, first_batch, fit

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.closed_form import Request, closed_form
from grpo_ustat.estimators.groups import law_of_prompts
from grpo_ustat.estimators.scaling import C3
from grpo_ustat.policy.scores.rollouts import score_rollouts
from grpo_ustat.tasks.base import summed_rewards
from grpo_ustat.train import gradient_monitor
from grpo_ustat.train.gradient_monitor import gradient_mse

ASKED = ("monitor.gradient_mse_every=1", "model.dtype=float64", "monitor.gradient_sketch=300000",
         "max_completion_length=96", "budget.rollouts=32", "group_size=4", "seed=3")  # fmt: skip
NAMES = ("c1", "c2", "c3", "gstar", "corr")


def flat_scores(run, batch):
    """Scores one at a time by autograd, [P, G, D]."""
    rollouts = batch.rollouts
    return np.array([
        [one_flat_score(run.policy.model, prompt, tokens[mask]).numpy()
         for tokens, mask in zip(rollouts.tokens_PGT[p], rollouts.mask_PGT[p], strict=True)]
        for p, prompt in enumerate(rollouts.prompt_tokens)
    ])  # fmt: skip


def intervals(row, name):
    return [row[f"monitor/{name}{end}"] for end in ("", "_low", "_high")]


def close(found, expected, rel):
    """Equal but for rounding; None where the other is."""
    same = [(a is None) == (b is None) for a, b in zip(found, expected, strict=True)]
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None]
    return all(same) and all(a == pytest.approx(b, rel=rel) for a, b in pairs)


def numbers(row):
    return {k: v for k, v in row.items() if k != "monitor/seconds"}


@pytest.fixture
def watched(tmp_path):
    run, batch = first_batch(tmp_path, *ASKED)
    varies = (batch.rewards_PG != batch.rewards_PG[:, :1]).any(axis=1)
    assert varies.sum() >= 4
    return run, batch


@pytest.mark.slow
def test_it_is_the_scaling_law_of_the_steps_own_scores(watched):
    run, batch = watched
    row, scores = gradient_mse(run, batch), flat_scores(run, batch)
    others = (batch.rewards_PG.sum(axis=1, keepdims=True) - batch.rewards_PG) / 3
    ghat = np.einsum("pg,pgd->pd", batch.rewards_PG - others, scores) / 4
    law, tails = law_of_prompts(batch.rewards_PG, np.square(scores).sum(axis=2), ghat @ ghat.T)
    found = law.intervals(4)
    assert row["monitor/heavy_tails"] == tails.heavy
    for name in NAMES[:3]:
        np.testing.assert_allclose(intervals(row, name), found[name], rtol=1e-8)
    c1, c2, c3 = (found[name].estimate for name in NAMES[:3])
    assert row["monitor/mse"] == pytest.approx((4 * c1 + c2 + c3 / 3) / batch.rewards_PG.size)
    grad_sq = float((ghat @ ghat.T).sum() - np.trace(ghat @ ghat.T)) / (8 * 7)
    assert row["monitor/grad_sq"] == pytest.approx(grad_sq)
    scale = (4 * c1 + c2 + c3 / 3) / grad_sq
    if row["monitor/noise_scale"] is None:  # of which nothing is known, or less than nothing
        ends = row["monitor/noise_scale_low"], row["monitor/noise_scale_high"]
        assert scale < 0 or ends == (0, None)
    else:
        assert row["monitor/noise_scale"] == pytest.approx(scale)
        assert row["monitor/noise_share"] == pytest.approx(scale / (32 + scale))
    estimate = found["gstar"].estimate
    assert row["monitor/gstar"] == pytest.approx(None if math.isnan(estimate) else estimate)


@pytest.mark.slow
def test_it_is_what_a_study_says_of_the_same_pool(watched):
    run, batch = watched
    row, size = gradient_mse(run, batch), batch.rewards_PG.shape[1]
    scores, z = flat_scores(run, batch), batch.rewards_PG
    grams = [
        score_rollouts(run.policy, batch.rollouts, p * size + np.arange(size), 1.0, gram=True)
        for p in range(len(batch.prompts))
    ]
    gram_PNN = np.stack([found.gram_BB.cpu().numpy() for found in grams])
    pool = dataclasses.replace(whole_pool(scores, z, batch.lengths_PG), gram_PNN=gram_PNN)
    study = closed_form(pool, Request([], {}, {}))
    for name in NAMES:
        expected = [value if math.isfinite(value) else None for value in study[name]]
        assert close(intervals(row, name), expected, 1e-7), name


@pytest.mark.slow
def test_small_parts_and_a_sketch_change_what_they_may(watched):
    """Passes of one completion: rounding. A sketch: only C1, of which it is unbiased."""
    run, batch = watched
    whole = numbers(gradient_mse(run, batch))
    run.token_budget.tokens = 1
    parts = numbers(gradient_mse(run, batch))
    assert all(close(intervals(parts, name), intervals(whole, name), 1e-8) for name in NAMES)
    run.token_budget.tokens = 16384
    sketched = dataclasses.replace(run.config.monitor, gradient_sketch=4093)
    small = dataclasses.replace(run, config=dataclasses.replace(run.config, monitor=sketched))
    row = gradient_mse(small, batch)
    for name in ("c2", "c3", "corr"):
        assert close(intervals(row, name), intervals(whole, name), 1e-9)
    assert row["monitor/c1"] != whole["monitor/c1"]
    assert row["monitor/c1"] == pytest.approx(whole["monitor/c1"], rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 8])
def test_any_number_of_ranks_finds_the_same(watched, monkeypatch, world):
    """Bit by bit: a prompt's scores depend on nothing else, and all ranks compute with all."""
    run, batch = watched
    alone = numbers(gradient_mse(run, batch))

    def work(own):
        mine = slice(own.accelerator.process_index, None, world)
        names = ("prompts", "prompt_tokens", "texts_PG", "tokens_PGT", "mask_PGT", "ended_PG")
        parts = {name: getattr(batch.rollouts, name)[mine] for name in names}
        rollouts = type(batch.rollouts)(**vars(batch.rollouts) | parts)
        return gradient_mse(own, type(batch)(**vars(batch) | {"rollouts": rollouts}))

    for found in on_ranks(monkeypatch, run, world, work):
        assert numbers(found) == alone


@pytest.mark.slow
def test_watching_changes_nothing_but_the_rows(tmp_path):
    """Rows of the policies after 0 and 2 steps; weights and other numbers equal bit by bit."""
    plain = fit(tmp_path / "plain", "max_completion_length=96")
    seen = fit(tmp_path / "seen", "max_completion_length=96", "monitor.gradient_mse_every=2")
    for name, value in weights(plain, 4).items():
        assert torch.equal(value, weights(seen, 4)[name])
    marked = [[k for k in row if k.startswith("monitor/")] for row in rows(seen)]
    assert [bool(keys) for keys in marked] == [True, False, True, False]
    assert {f"monitor/{n}{e}" for n in NAMES for e in ("", "_low", "_high")} <= set(marked[0])
    kept = [{k: v for k, v in row.items() if not k.startswith("monitor/")} for row in rows(seen)]
    assert kept == rows(plain)


@pytest.mark.slow
def test_what_has_no_interval_says_why(watched):
    """All groups of zero variance, and all but one."""
    run, batch = watched
    zero_variance_PG, one_PG = np.ones((8, 4)), np.ones((8, 4))
    one_PG[2, 1] = 0
    for rewards_PG, reasons in (
        (zero_variance_PG, dict.fromkeys(NAMES, "every group has zero variance")),
        (
            one_PG,
            {"gstar": "the interval of c1 and c3 reaches 0", "corr": "at most one group"},
        ),
    ):
        row = gradient_mse(run, dataclasses.replace(batch, rewards_PGF=rewards_PG[..., None]))
        said = {f"monitor/{n}_reason" for n in NAMES} & set(row)
        assert said == {f"monitor/{n}_reason" for n in reasons}
        for name, reason in reasons.items():
            assert row[f"monitor/{name}_high"] is None
            assert row[f"monitor/{name}_low"] in (None, 1.0 if name == "gstar" else None)
            assert reason in row[f"monitor/{name}_reason"]
        assert json.loads(json.dumps(row, allow_nan=False)) == row


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [("lora=r16",), ("gradient_checkpointing=true",)])
def test_it_scores_what_is_trained(tmp_path, overrides):
    """Adapters alone; layers that recompute give what others give."""
    run, batch = first_batch(tmp_path, *ASKED, *overrides)
    row = gradient_mse(run, batch)
    assert summed_rewards(run.task, batch.rollouts).std() > 0
    if overrides == ("lora=r16",):
        plain, same = first_batch(tmp_path, *ASKED)
        np.testing.assert_array_equal(same.rewards_PG, batch.rewards_PG)
        assert row["monitor/c3"] < gradient_mse(plain, same)["monitor/c3"]
        scores = flat_scores(run, batch)
        others = (batch.rewards_PG.sum(axis=1, keepdims=True) - batch.rewards_PG) / 3
        ghat = np.einsum("pg,pgd->pd", batch.rewards_PG - others, scores) / 4
        law, _ = law_of_prompts(batch.rewards_PG, np.square(scores).sum(2), ghat @ ghat.T)
        np.testing.assert_allclose(intervals(row, "c3"), law.linear(C3), rtol=1e-7)
    else:
        plain, same = first_batch(tmp_path, *ASKED)
        assert batch.rollouts.texts_PG == same.rollouts.texts_PG
        expected = gradient_mse(plain, same)
        assert all(close(intervals(row, n), intervals(expected, n), 1e-9) for n in NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("most", [0, 1])
def test_no_memory_for_it_ends_nothing_and_leaves_updates_as_they_are(
    watched, monkeypatch, capsys, most
):
    """With memory for no completion, or for one at a time."""
    run, batch = watched
    real = gradient_monitor.group_scores

    def failing(*arguments):
        if arguments[-1] > most:
            raise torch.OutOfMemoryError("injected")
        return real(*arguments)

    tokens = run.token_budget.tokens
    monkeypatch.setattr(gradient_monitor, "group_scores", failing)
    row = gradient_mse(run, batch)
    assert run.token_budget.tokens == tokens
    if most:
        assert row["monitor/c1"] is not None
    else:
        assert {row[f"monitor/{name}_reason"] for name in NAMES} == {"out of memory"}
        assert row["monitor/mse"] is None and row["monitor/c1"] is None
        assert "monitor.gradient_mse_every" in capsys.readouterr().err


def test_too_few_completions_or_prompts_are_refused():
    with pytest.raises(ConfigError, match=naming("group_size=2", 3)):
        config_of("monitor.gradient_mse_every=5", "group_size=2")
    with pytest.raises(ConfigError, match=naming("2 prompts", 4)):
        config_of("monitor.gradient_mse_every=5", "group_size=8")
