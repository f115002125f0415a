"""Plans and training: a step has the gradient of the theory, and is the trainer's for `fixed`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from training_runs import config_of

from grpo_ustat.estimators.plan_terms import paths_of, prompt_weight, weights_of
from grpo_ustat.estimators.plans import PLANS, Setting
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.train import trainer
from grpo_ustat.train.setup import set_up

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/benchmarks"))
import plans_and_training as benchmark  # noqa: E402

# Success rates of the prompts of `one_token`.
TARGETS = (0.1, 0.3, 0.6, 0.9)
COPIES, BLOCKS = 60, 30


def context(path, *overrides):
    config = config_of("optimizer=sgd", "objective=algorithm1", *overrides)
    return set_up(config, RunFolder(path, config))


def weights_of_policy(run):
    return [parameter.detach().clone() for parameter in run.policy.model.parameters()]


def test_fixed_is_the_step_of_the_trainer(tmp_path):
    trained, planned = (context(tmp_path / name, "model=tiny") for name in ("a", "b"))
    start = weights_of_policy(trained)
    arm = benchmark.Arm(PLANS["fixed"], "per_rollout", Setting(4), 4)
    progress = trainer.TrainProgress()
    for step in range(2):
        trainer.train_step(trained, progress)
        groups = benchmark.draw_batch(planned, arm, 4, step, {})
        benchmark.take_step(planned, arm, groups)
        assert sum(group.size for group in groups) == 16
    pairs = list(zip(weights_of_policy(trained), weights_of_policy(planned), strict=True))
    assert all(torch.equal(left, right) for left, right in pairs)
    assert any(not torch.equal(left, right) for left, (right, _) in zip(start, pairs, strict=True))


@pytest.fixture(scope="module")
def one_token(tmp_path_factory):
    """Four prompts with completions of one token, their success rates and their gradients."""
    run = context(
        tmp_path_factory.mktemp("one"), "model=tiny", "model.dtype=float64", "temperature=4",
        "max_completion_length=1",
    )  # fmt: skip
    right: dict[str, set[int]] = {}
    rates, gradients = [], []
    prompts = run.train_prompts[: len(TARGETS)]
    for prompt, target in zip(prompts, TARGETS, strict=True):
        tokens = torch.tensor(run.policy.encode([prompt.text]))
        chance_V = (run.policy.model(input_ids=tokens).logits[0, -1] / 4).softmax(-1)
        chosen, left = [], target
        for token in chance_V.argsort(descending=True).tolist():
            if float(chance_V[token].detach()) <= left:
                chosen.append(token)
                left -= float(chance_V[token].detach())
        rate = chance_V[chosen].sum()
        right[prompt.text] = set(chosen)
        rates.append(float(rate.detach()))
        parameters = list(run.policy.model.parameters())
        grads = torch.autograd.grad(rate, parameters, allow_unused=True, materialize_grads=True)
        gradients.append(torch.cat([grad.ravel() for grad in grads]))
    assert np.abs(np.array(rates) - TARGETS).max() < 0.05
    return run, prompts, right, np.array(rates), torch.stack(gradients)


CASES = [
    ("fixed", "per_rollout"),
    ("until_mixed", "per_rollout"),
    ("until_mixed", "per_prompt"),
    ("until_mixed", "earlier"),
    ("until_mixed", "all_orders"),
    ("refill", "per_rollout"),
    ("pilot_commit", "per_rollout"),
    ("reinforce_ada", "per_rollout"),
    ("dynamo", "per_rollout"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, estimate", CASES)
def test_the_mean_step_is_the_gradient_weighted_by_success_rate(
    one_token, monkeypatch, name, estimate
):
    run, prompts, right, rate_P, gradient_PK = one_token
    monkeypatch.setattr(
        benchmark,
        "summed_rewards",
        lambda task, rollouts: np.array([
            [float(token in right[prompt.text]) for token in tokens_GT[:, 0]]
            for prompt, tokens_GT in zip(rollouts.prompts, rollouts.tokens_PGT, strict=True)
        ]),
    )  # fmt: skip
    setting = Setting(4, most=8, history=4, price=0.02)
    arm = benchmark.Arm(PLANS[name], estimate, setting, COPIES * len(prompts))
    copies = [
        dataclasses.replace(prompt, id=f"{prompt.id} {i}")
        for prompt in prompts
        for i in range(COPIES)
    ]
    rng, projected, generated = np.random.default_rng(0), [], []
    for step in range(BLOCKS):
        histories = {}
        if arm.plan.has_history:
            history_CH = rng.random((len(copies), 4)) < np.repeat(rate_P, COPIES)[:, None]
            histories = {
                copy.id: (tuple(sorted(map(float, history_H))),)
                for copy, history_H in zip(copies, history_CH, strict=True)
            }
        groups = benchmark.draw_groups(run, arm, copies, step, histories)
        generated.append([group.size for group in groups])
        benchmark.plan_gradient(run, arm, groups)
        grads = [parameter.grad.ravel() for parameter in run.policy.model.parameters()]
        projected.append((gradient_PK @ -torch.cat(grads)).numpy())
    paths = paths_of(arm.plan, setting, [0.0, 1.0])
    weights = weights_of(paths, estimate)
    weight_P = prompt_weight(paths, weights, rate_P) * arm.scale / setting.size
    exact_P = (gradient_PK.T @ torch.from_numpy(weight_P) / len(prompts)) @ gradient_PK.T
    found_BP = np.array(projected)
    error_P = found_BP.std(axis=0, ddof=1) / BLOCKS**0.5
    z_P = (found_BP.mean(axis=0) - exact_P.numpy()) / error_P
    print(name, estimate, weight_P.round(3), z_P.round(2), np.mean(generated))
    assert np.abs(z_P).max() < 4
    if weight_P.max() > 2 * weight_P.min():
        plain_P = (gradient_PK.sum(dim=0) @ gradient_PK.T).numpy()
        scale = found_BP.mean(axis=0) @ plain_P / (plain_P @ plain_P)
        assert np.abs((found_BP.mean(axis=0) - scale * plain_P) / error_P).max() > 5


def test_groups_do_not_depend_on_how_many_are_drawn_together(tmp_path):
    run = context(tmp_path, "model=tiny", "dataset=plus_digit", "max_completion_length=48")
    arm = benchmark.Arm(PLANS["refill"], "per_rollout", Setting(4), 3)
    each, together = (benchmark.draw_batch(run, arm, 3, 0, {}, ahead) for ahead in (1.0, 5.0))
    assert [group.prompt.id for group in each] == [group.prompt.id for group in together]
    assert [group.tokens for group in each] == [group.tokens for group in together]
    assert sum(map(arm.trains, each)) == 3 < len(each)
    assert arm.trains(each[-1])


def test_the_last_step_uses_what_is_left_of_the_budget(tmp_path):
    run = context(tmp_path, "model=tiny", "learning_rate=1e-6")
    arm = benchmark.Arm(PLANS["fixed"], "per_rollout", Setting(4), 4)
    first = sum(group.tokens for group in benchmark.draw_batch(run, arm, 4, 0, {}))
    spent = benchmark.spend(run, arm, 1.5 * first, {})
    assert spent["steps"] == 2
    assert spent["rollouts"] == 24
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.5e-6)
    assert spent["tokens"] == pytest.approx(1.5 * first, rel=0.2)


def test_the_record_has_runs_of_equal_numbers_of_tokens():
    file = ROOT / "docs/examples/plans_and_training.csv"
    runs, arms = benchmark.recorded(file, "plan", benchmark.COUNTS)
    for policy, of_policy in arms.items():
        assert of_policy.keys() == benchmark.ARMS[policy].keys()
        of_cell = [row for cell, row in runs if cell.policy == policy]
        tokens = np.array([row["tokens"] for row in of_cell if row["after"] > 0])
        assert np.abs(tokens / np.median(tokens) - 1).max() < 0.1
    side = benchmark.sides(*benchmark.selected(runs, arms, None, range(5)))[-1]
    assert side.gain_LMS.shape == (4, 3, 5)
