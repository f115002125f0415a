"""The meter of the noise scale: in loops of several kinds, against gradients taken one by one."""

from __future__ import annotations

import contextlib
import copy
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forks import in_ranks
from tabular import known_policy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import grpo_ustat as gu
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.micro_batch_norms import law_of_norms, signal_of_increments
from grpo_ustat.estimators.scaling import GRAD_SQ, ScalingLaw

STEPS, ROWS, INPUTS = 6, 8, 5


class Net(nn.Module):
    """Two layers; the second may be computed again in the backward pass."""

    def __init__(self, again=None, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS)
        self.unused, self.again = nn.Linear(2, 2), again
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.again is None:
            return self.second(x).mean(dim=1)
        return checkpoint(self.second, x, use_reentrant=self.again).mean(dim=1)


def batches(count, steps=STEPS):
    """Inputs of every step and micro-batch, [S, K, ROWS, INPUTS]."""
    return torch.randn(steps, count, ROWS, INPUTS, generator=torch.Generator().manual_seed(1)) + 0.3


def gradients(model, inputs_KRI, shares_K):
    """The micro-batches' gradients, [K, D], by autograd one after another."""
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = [
        torch.autograd.grad(share * model(part).mean(), trained, materialize_grads=True)
        for part, share in zip(inputs_KRI, shares_K, strict=True)
    ]
    return np.array([torch.cat([g.flatten() for g in row]).double().numpy() for row in rows])


def expected(model, inputs_SK, shares_K=None):
    """The law from the norms of sums of gradients taken one by one."""
    count = inputs_SK.shape[1]
    shares_K = np.full(count, 1 / count) if shares_K is None else shares_K
    model, values = copy.deepcopy(model), []
    model.again = None
    for parts in inputs_SK:
        norms_K = np.square(gradients(model, parts, shares_K).cumsum(axis=0)).sum(axis=1)
        signal = signal_of_increments(norms_K, shares_K)
        values.append((signal, norms_K[-1] - signal))
    return law_of_norms(*np.array(values).T, inputs_SK[0, ..., 0].numel(), 1)


def assert_law(meter, law, rel=1e-5):
    found = meter.estimate()
    assert found.problem == ""
    np.testing.assert_allclose(found.intervals["grad_sq"], law.linear(GRAD_SQ), rtol=rel)
    np.testing.assert_allclose(found.intervals["noise_scale"], law.noise_scale(2), rtol=10 * rel)


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)


def ordinary(model, rows, share):
    (share * model(rows).mean()).backward()


def in_two(model, rows, share):
    """A forward pass whose output is thrown away, and two backward passes."""
    model(rows)
    output = share / 2 * model(rows).mean()
    output.backward(retain_graph=True)
    output.backward()


def by_hand(model, rows, share):
    trained = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(share * model(rows).mean(), trained, materialize_grads=True)
    for parameter, grad in zip(trained, grads, strict=True):
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def narrow(model, rows, share):
    (share * model(rows.bfloat16()).mean()).backward()


def run(
    model, part=ordinary, optimizer=None, inputs=None, scaler=None, said=False, shares_K=None,
    watched=lambda: None, clips_early=False, to_none=True, **options,
):  # fmt: skip
    """A loop with clipping; returns its meter.

    Args:
        said: whether the loop tells the rows of a micro-batch, which are by their shares.
        watched: called once the meter watches.
        clips_early: whether gradients are clipped before the meter has seen them.
        to_none: what the optimizer leaves of gradients.
    """
    inputs = batches(4) if inputs is None else inputs
    count = inputs.shape[1]
    shares_K = np.full(count, 1 / count) if shares_K is None else shares_K
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer or sgd(model)]
    meter = gu.watch(
        model, optimizers, **{"rollouts": count * ROWS, "group_size": 1} | options, scaler=scaler
    )
    watched()
    for micro_batches in inputs:
        for rows, share in zip(micro_batches, shares_K.tolist(), strict=True):
            part(model, rows, share * (1 if scaler is None else scaler.get_scale()))
            meter.after_backward(int(count * ROWS * share) if said else None)
        if clips_early:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        meter.before_step()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        for each in optimizers:
            each.step()
            each.zero_grad(set_to_none=to_none)
    return meter


@pytest.mark.parametrize("part", [ordinary, in_two, by_hand])
@pytest.mark.parametrize(
    ("again", "tied"), [(None, False), (False, False), (True, True), (None, True)]
)
def test_the_meter_finds_the_norms_of_sums(part, again, tied):
    """Clipped, with unused parameters, tied weights, and checkpointed layers."""
    if part is by_hand and again:
        pytest.skip("reentrant checkpoints do not work with torch.autograd.grad")
    model = Net(again, tied)
    assert_law(run(model, part), expected(model, batches(4)))
    assert_law(run(model, part, said=True), expected(model, batches(4)))


def test_half_precision():
    model, law = Net().bfloat16(), expected(Net(), batches(4))
    np.testing.assert_allclose(
        run(model, narrow).estimate().intervals["noise_scale"].estimate,
        law.noise_scale(2).estimate, rtol=0.2,
    )  # fmt: skip


@pytest.mark.parametrize("adds", [False, True])
def test_parameters_that_begin_to_train_later(adds):
    """In the optimizer from the beginning, or added to it."""
    model = Net()
    law, optimizer = expected(model, batches(4)), torch.optim.SGD(model.first.parameters(), lr=0.0)
    second = {"params": [*model.second.parameters()]}
    if not adds:
        optimizer.add_param_group(second)
    model.second.requires_grad_(False)

    def watched():
        model.second.requires_grad_(True)
        if adds:
            optimizer.add_param_group(second)

    assert_law(run(model, optimizer=optimizer, watched=watched, to_none=False), law)


class Wrapper:
    """An optimizer in another object, as Accelerate's."""

    def __init__(self, optimizer):
        self.optimizer, self.step = optimizer, optimizer.step
        self.zero_grad = optimizer.zero_grad


def test_several_optimizers_and_wrapped_ones():
    model = Net()
    pair = [torch.optim.SGD(layer.parameters(), lr=0.0) for layer in (model.first, model.second)]
    meter = run(model, optimizer=[Wrapper(pair[0]), pair[1]])
    assert_law(meter, expected(model, batches(4)))


def test_gradient_scaler():
    model, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.zeros(1))
    assert_law(run(model, scaler=scaler), expected(model, batches(4)))


def test_unequal_micro_batches():
    model, shares_K = Net(), np.array([1, 2, 2, 3]) / 8
    law = expected(model, batches(4), shares_K)
    assert_law(run(model, shares_K=shares_K, said=True), law)


@pytest.mark.parametrize("said", [False, True])
def test_steps_that_do_not_count(said):
    """Discarded ones, one with NaN, one with fewer micro-batches, one without any."""
    model, inputs = Net(), batches(4, STEPS + 3)
    law, optimizer = expected(model, inputs[:STEPS]), sgd(model)
    meter = gu.watch(model, optimizer, rollouts=4 * ROWS, group_size=1)
    meter.before_step()
    meter.discard()
    for s in [STEPS, *range(STEPS), STEPS + 1, STEPS + 2]:
        for rows in inputs[s][: 3 if s == STEPS + 2 else 4]:
            ordinary(model, rows, math.nan if s == STEPS + 1 else 1 / 4)
            meter.after_backward(ROWS if said else None)
        (meter.discard if s == STEPS else meter.before_step)()
        optimizer.zero_grad()
    assert_law(meter, law)
    assert meter.skipped == 2
    assert "2." in meter.summary()[-1]
    assert meter.metrics()["grpo_ustat/steps"] == STEPS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rollouts": 0, "group_size": 1}, "rollouts=0"),
        ({"rollouts": 12, "group_size": 8}, "rollouts=12, group_size=8"),
        ({"rollouts": 8, "group_size": 0}, "group_size=0"),
    ],
)
def test_numbers_that_do_not_fit(options, words):
    model = Net()
    with pytest.raises(ConfigError, match=words):
        gu.watch(model, sgd(model), **options)
    with pytest.raises(ConfigError, match=r"torch\.optim\.Optimizer"):
        gu.watch(model, object(), rollouts=8, group_size=1)


def test_loops_that_show_nothing():
    for options, words in (
        ({"inputs": batches(1)}, "1 micro-batch,"),
        ({"rollouts": 64, "said": True}, "0 steps have 64 rollouts"),
        ({"inputs": batches(4, 3)}, "3 steps so far"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}, "left no gradients"),
    ):
        meter = run(Net(), **options)
        (line,) = meter.summary()
        assert words in line
        assert meter.metrics().keys() == {"grpo_ustat/steps", "grpo_ustat/skipped_steps"}
    (line, *_) = run(Net(), clips_early=True).summary()
    assert "before gradients are unscaled or clipped" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"group_size": 8}, "may share prompts"),
        ({"group_size": 16, "prompts_together": True}, "8 rows does not contain whole groups"),
        ({"group_size": 16, "prompts_together": True, "said": True}, "8 rows does not contain"),
        ({"group_size": 4, "prompts_together": True}, ""),
    ],
)
def test_lower_bounds(options, words):
    meter = run(Net(), **options)
    assert words in meter.estimate().only_bound
    assert bool(words) == (len(meter.summary()) == 2)
    assert math.isnan(meter.estimate().intervals["noise_scale"].estimate) == bool(words)


class Table(nn.Module):
    """Log-probabilities of a tabular policy's outcomes."""

    def __init__(self, policy):
        super().__init__()
        self.theta = nn.Parameter(torch.from_numpy(policy.theta_D.copy()))
        self.features = torch.from_numpy(policy.features_PYD)

    def forward(self, prompts, outcomes):
        logprobs = (self.features[prompts] @ self.theta).log_softmax(dim=1)
        return logprobs.gather(1, outcomes[:, None])[:, 0]


def measure_table(policy, rows, size, n, together, steps, seed):
    """A meter in a loop over a fixed tabular policy."""
    rng, model = np.random.default_rng(seed), Table(policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    meter = gu.watch(model, optimizer, n, size, prompts_together=together)
    for _ in range(steps):
        prompts_P = rng.integers(len(policy.rewards_PY), size=n // size)
        chances_PY = policy.probabilities_PY[prompts_P]
        outcomes_PG = np.array([rng.choice(len(p), size, p=p) for p in chances_PY])
        rewards_PG = policy.rewards_PY[prompts_P[:, None], outcomes_PG]
        advantage = size / (size - 1) * (rewards_PG - rewards_PG.mean(axis=1, keepdims=True))
        order = np.arange(n) if together else rng.permutation(n)
        columns = [
            torch.from_numpy(x.ravel()[order])
            for x in (np.repeat(prompts_P, size), outcomes_PG, advantage)
        ]
        for prompts, outcomes, advantages in zip(*(x.split(rows) for x in columns), strict=True):
            (-(model(prompts, outcomes) * advantages).sum() / n).backward()
            meter.after_backward()
        meter.before_step()
        optimizer.zero_grad()
    return meter


@pytest.mark.slow(minutes=1)
@pytest.mark.parametrize(
    ("together", "steps"), [(True, 400), (False, 120)], ids=["whole groups", "random rows"]
)
def test_the_exact_noise_scale_is_in_the_interval(together, steps):
    """12 runs, of which a 95 % interval misses the truth twice or more in 12 %."""
    policy, size, n = known_policy(), 8, 64
    grad_sq = float(np.square(policy.gradient_PD.mean(axis=0)).sum())
    law = ScalingLaw.of_moments(policy.moments(), grad_sq)
    truth = law.n_mse(size) / grad_sq
    inside = 0
    for seed in range(12):
        found = measure_table(policy, 16, size, n, together, steps, seed).estimate()
        _, low, high = found.intervals["noise_scale"]
        inside += low <= truth <= high and low > 0
        assert bool(found.only_bound) == (not together)
    assert inside >= 11


# Ranks.


def in_rank(rank, way, count):
    """A loop on a rank; returns its intervals, its summary, and the law of all gradients."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = Net()
    inputs = batches(2 * count).reshape(STEPS, 2, count, ROWS, INPUTS)
    # A micro-batch of ranks that add their gradients is that of both.
    joint_SK = inputs.transpose(1, 2).reshape(STEPS, count, -1, INPUTS)
    law, products = expected(model, joint_SK), np.zeros((2, STEPS))
    if "no_sync" in way:
        for s in range(STEPS):
            shares_K = np.full(count, 1 / count)
            before = [gradients(model, parts, shares_K)[:-1].sum(axis=0) for parts in inputs[s]]
            whole = gradients(model, joint_SK[s], shares_K).sum(axis=0)
            noise_and_signal = np.linalg.solve(
                [[1 / 2, 1], [(count - 1) / count, (1 - 1 / count) ** 2]],
                [whole @ whole, np.square(before).sum() / 2],
            )
            products[:, s] = noise_and_signal[1], noise_and_signal[0] / 2
        law = law_of_norms(*products, 2 * count * ROWS, 1)
    if "ddp" in way:
        model = DistributedDataParallel(
            model, gradient_as_bucket_view="view" in way, find_unused_parameters=True
        )
    elif "fsdp2" in way:
        for layer in (model.first, model.second, model):
            fully_shard(layer)
    elif "fsdp1" in way:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    optimizer = sgd(model)
    try:
        meter = gu.watch(model, optimizer, rollouts=2 * count * ROWS, group_size=1)
    except ConfigError as error:
        return {}, [str(error)], None
    for micro_batches in inputs[:, rank]:
        for k, rows in enumerate(micro_batches):
            waits = "no_sync" in way and k < count - 1
            if "fsdp2" in way:
                model.set_requires_gradient_sync(not waits)
            with model.no_sync() if waits and "ddp" in way else contextlib.nullcontext():
                ordinary(model, rows, 1 / count)
            meter.after_backward()
        meter.before_step()
        optimizer.zero_grad()
    found = meter.estimate()
    laws = np.array(law.linear(GRAD_SQ)), np.array(law.noise_scale(2))
    return {name: np.array(x) for name, x in found.intervals.items()}, meter.summary(), laws


def two_ranks(*arguments):
    found = in_ranks(2, lambda rank: in_rank(rank, *arguments))
    assert not any(isinstance(each, str) for each in found), found[0]
    (left, _, _), (right, _, _) = found
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])
    return found[0]


@pytest.mark.parametrize("way", ["ddp", "ddp view", "ddp no_sync", "ddp view no_sync", "fsdp2"])
def test_ranks(way):
    found, _, (grad_sq, scale) = two_ranks(way, 3)
    np.testing.assert_allclose(found["grad_sq"], grad_sq, rtol=1e-4)
    np.testing.assert_allclose(found["noise_scale"], scale, rtol=1e-3)


@pytest.mark.parametrize(
    ("way", "count", "words"),
    [
        ("fsdp2", 1, "1 micro-batch per rank"),
        ("fsdp2 no_sync", 3, "set_requires_gradient_sync"),
        ("fsdp1", 3, "2 ranks: the meter reads"),
        ("inner", 2, "pass the wrapped model"),
    ],
)
def test_ranks_that_show_nothing(way, count, words):
    found, (line,), _ = two_ranks(way, count)
    assert found == {} and words in line
