"""The meter of the noise scale: in loops of several kinds, against gradients taken one by one."""

from __future__ import annotations

import contextlib
import copy
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fakes import random_policy, random_rollouts
from forks import in_ranks
from tabular import known_policy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import grpo_ustat as gu
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.groups import group_terms, noise_estimate
from grpo_ustat.estimators.micro_batch_norms import law_of_norms
from grpo_ustat.estimators.moments import pool_gradient_weights
from grpo_ustat.estimators.scaling import GRAD_SQ, ScalingLaw
from grpo_ustat.policy.logprobs import pack
from grpo_ustat.policy.scores import completion_scores

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


def loss_of(model, rows, count):
    return model(rows).mean() / count


def optimizer_of(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)


def expected(model, inputs_SK, rollouts):
    """The law from products of the micro-batches' gradients, all of which are independent."""
    steps, count = inputs_SK.shape[:2]
    model = copy.deepcopy(model)
    model.again = None
    trained = [p for p in model.parameters() if p.requires_grad]
    signal_S, noise_S = np.zeros(steps), np.zeros(steps)
    for s in range(steps):
        rows = []
        for k in range(count):
            grads = torch.autograd.grad(
                loss_of(model, inputs_SK[s, k], count), trained, materialize_grads=True
            )
            rows.append(torch.cat([g.flatten() for g in grads]).double().numpy())
        products = np.array(rows) @ np.array(rows).T
        signal_S[s] = (products.sum() - products.trace()) * count / (count - 1)
        noise_S[s] = products.sum() - signal_S[s]
    return law_of_norms(signal_S, noise_S, rollouts, 1)


def assert_law(meter, law, rel=1e-5):
    found = meter.estimate()
    assert found.problem == ""
    np.testing.assert_allclose(found.intervals["grad_sq"], law.linear(GRAD_SQ), rtol=rel)
    np.testing.assert_allclose(found.intervals["noise_scale"], law.noise_scale(2), rtol=10 * rel)


def run(model, options=(), count=4, optimizer=None, part=None, steps=STEPS, law_of=None):
    """A loop; returns the meter and the law that it should find."""
    inputs = batches(count, steps)
    optimizer = optimizer or optimizer_of(model)
    law = expected(law_of or model, inputs, count * ROWS)
    meter = gu.watch(model, optimizer, rollouts=count * ROWS, **dict(options))
    for micro_batches in inputs:
        for rows in micro_batches:
            (part or (lambda rows: loss_of(model, rows, count).backward()))(rows)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return meter, law


@pytest.mark.parametrize(
    ("again", "tied"), [(None, False), (False, False), (True, False), (None, True), (False, True)]
)
def test_the_meter_finds_the_products_of_micro_batches(again, tied):
    """Clipped, with unused parameters, tied weights, and checkpointed layers."""
    assert_law(*run(Net(again, tied)))


def test_a_tied_weight_that_is_added_one_by_one():
    """Only the norms of the sums are right then; the law's interval has the products' estimate."""
    meter, law = run(Net(again=True, tied=True), steps=60)
    _, low, high = meter.estimate().intervals["noise_scale"]
    assert low <= law.noise_scale(2).estimate <= high
    (record, *_) = meter._records
    assert math.isnan(record[0, 2])


def test_frozen_and_half_precision_parameters():
    model = Net()
    model.first.weight.requires_grad_(False)
    assert_law(*run(model))
    narrow = Net().bfloat16()
    meter, law = run(
        narrow, part=lambda rows: (narrow(rows.bfloat16()).mean() / 4).backward(), law_of=Net()
    )
    np.testing.assert_allclose(
        meter.estimate().intervals["noise_scale"].estimate, law.noise_scale(2).estimate, rtol=0.1
    )


def test_gradients_that_stay_zeros():
    model = Net()
    optimizer = optimizer_of(model)
    zero_grad = optimizer.zero_grad
    optimizer.zero_grad = lambda: zero_grad(set_to_none=False)
    assert_law(*run(model, optimizer=optimizer))


def test_several_optimizers_and_wrapped_ones():
    model = Net()
    pair = [torch.optim.SGD(layer.parameters(), lr=0.0) for layer in (model.first, model.second)]

    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    inputs, law = batches(4), expected(model, batches(4), 4 * ROWS)
    meter = gu.watch(model, [Wrapper(pair[0]), pair[1]], rollouts=4 * ROWS)
    for micro_batches in inputs:
        for rows in micro_batches:
            loss_of(model, rows, 4).backward()
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
    assert_law(meter, law)


def test_inner_modules_alone_and_several_backward_passes():
    """Without calls of the model, a pass is a micro-batch; else the last of a call's passes."""
    model = Net()
    assert_law(*run(model, part=lambda rows: (model.forward(rows).mean() / 4).backward()))

    def in_two(rows):
        output = model(rows).mean() / 8
        output.backward(retain_graph=True)
        output.backward()

    meter, law = run(model, part=in_two, steps=400)
    found = meter.estimate().intervals["noise_scale"]
    # Only norms of the sums are known, so the estimate is another.
    assert found.low <= law.noise_scale(2).estimate <= found.high


def test_calls_before_their_backward_passes():
    model, inputs = Net(), batches(4)
    law, optimizer = expected(model, inputs, 4 * ROWS), optimizer_of(model)
    meter = gu.watch(model, optimizer, rollouts=4 * ROWS)
    for micro_batches in inputs:
        with torch.no_grad():
            model(micro_batches[0])
        for loss in [loss_of(model, rows, 4) for rows in micro_batches]:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_law(meter, law)


def test_skipped_steps_and_gradients_that_are_not_finite():
    model, inputs = Net(), batches(4, STEPS + 2)
    law, optimizer = expected(model, inputs[:STEPS], 4 * ROWS), optimizer_of(model)
    meter = gu.watch(model, optimizer, rollouts=4 * ROWS)
    for s, micro_batches in zip(
        [STEPS, *range(STEPS), STEPS + 1], inputs[[-1, *range(STEPS), -2]], strict=True
    ):
        for rows in micro_batches:
            loss_of(model, rows, 4 * (math.nan if s == STEPS + 1 else 1)).backward()
        if s != STEPS:
            optimizer.step()
        optimizer.zero_grad()
    assert_law(meter, law)
    assert meter.skipped == 2
    assert "2." in meter.summary()[-1]


def test_a_step_without_gradients_is_none():
    """As torchtitan and SkyRL's checkpoints take to create an optimizer's state."""
    model = Net()
    optimizer = optimizer_of(model)
    meter = gu.watch(model, optimizer, rollouts=8)
    optimizer.step()
    assert meter.skipped == 0 and "0 steps" in meter.summary()[0]


def test_gradient_scaler():
    model, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer, inputs = optimizer_of(model), batches(4)
    law = expected(model, inputs, 4 * ROWS)
    meter = gu.watch(model, optimizer, rollouts=4 * ROWS, scaler=scaler)
    for micro_batches in inputs:
        for rows in micro_batches:
            scaler.scale(loss_of(model, rows, 4)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**13
    assert_law(meter, law)


def test_a_closed_meter_counts_no_more():
    model = Net()
    meter, law = run(model)
    meter.close()
    run(model, count=2)[0].close()
    assert_law(meter, law)
    assert not model._forward_hooks and not model.first.weight._backward_hooks


def test_checkpointed_layers_alone_are_refused():
    """The meter sees neither the model's call nor any pass but that of the layer."""
    model = Net(again=True)
    model.first.requires_grad_(False)
    model.first.register_forward_hook(lambda *x: x[2].requires_grad_())
    optimizer = optimizer_of(model)
    meter = gu.watch(model, optimizer, rollouts=16)
    model.forward(batches(1)[0, 0]).mean().backward()
    optimizer.step()
    assert "use_reentrant=False" in meter.summary()[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rollouts": 0}, "rollouts=0"),
        ({"rollouts": 12, "group_size": 8}, "rollouts=12, group_size=8"),
        ({"rollouts": 8, "group_size": 1}, "group_size=1"),
        ({"rollouts": 8, "data_ranks": 2}, "data_ranks=2"),
    ],
)
def test_numbers_that_do_not_fit(options, words):
    model = Net()
    with pytest.raises(ConfigError, match=words):
        gu.watch(model, optimizer_of(model), **options)


def test_other_optimizers_are_refused():
    model = Net()
    with pytest.raises(ConfigError, match="optimizer object"):
        gu.watch(model, object(), rollouts=8)
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter"):
        gu.watch(model, torch.optim.SGD(model.parameters(), lr=1.0), rollouts=8)


@pytest.mark.parametrize(
    ("count", "options", "words"),
    [
        (1, {}, "1 micro-batch per rank"),
        (4, {"group_size": 32, "prompts_together": True}, "not two groups of 32"),
        (3, {"group_size": 6, "prompts_together": True}, "8 rows cut groups of 6"),
    ],
)
def test_steps_that_show_nothing(count, options, words):
    meter, _ = run(Net(), {**options}, count=count) if count > 1 else run_single()
    (line,) = meter.summary()
    assert words in line
    assert meter.metrics().keys() == {"grpo_ustat/steps", "grpo_ustat/skipped_steps"}


def run_single():
    """A loop with one micro-batch per step, of which there are no products."""
    model = Net()
    optimizer = optimizer_of(model)
    meter = gu.watch(model, optimizer, rollouts=ROWS)
    for (rows,) in batches(1):
        loss_of(model, rows, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return meter, None


def test_the_meter_is_loaded_when_it_is_used():
    code = "import sys, grpo_ustat as gu; assert 'torch' not in sys.modules; gu.watch"
    subprocess.run([sys.executable, "-c", code], check=True)


# Exact scores and exact constants.


def test_whole_groups_say_what_exact_scores_say():
    """A micro-batch for each group of a language model: the numbers are those from scores."""
    policy, size, groups = random_policy(dtype=torch.float32), 4, 6
    model = policy.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    meter = gu.watch(
        model, optimizer, rollouts=size * groups, group_size=size, prompts_together=True
    )
    steps = []
    for step in range(5):
        rollouts = random_rollouts([3, 5, 2, 4, 3, 2], size, 6, seed=step)
        rows = pack(rollouts, np.arange(size * groups), 0, model.device)
        rewards_PG = np.random.default_rng(step).random((groups, size))
        weights_PG = pool_gradient_weights(rewards_PG)
        weights_KB = np.zeros((groups, size * groups))
        for p in range(groups):
            weights_KB[p, p * size : (p + 1) * size] = weights_PG[p]
        scores = completion_scores(
            model, rows.input_ids_BT, rows.attention_mask_BT, rows.completion_mask_BT,
            weights_KB=torch.from_numpy(weights_KB).float(),
        )  # fmt: skip
        ghat_PD = np.array([
            np.concatenate([x.double().numpy().ravel() for _, x in sorted(each.items())])
            for each in scores.gradients_K
        ])  # fmt: skip
        q_PG = scores.sq_norm_B.double().numpy().reshape(groups, size)
        steps.append(group_terms(rewards_PG, q_PG, ghat_PD @ ghat_PD.T))
        for p in range(groups):
            part = slice(p * size, (p + 1) * size)
            ids, attention = rows.input_ids_BT[part], rows.attention_mask_BT[part]
            positions = (attention.cumsum(dim=1) - 1).clamp(min=0)
            logits = model(input_ids=ids, attention_mask=attention, position_ids=positions).logits
            logprobs = logits[:, :-1].log_softmax(dim=-1).gather(2, ids[:, 1:, None])[..., 0]
            logprob_B = (logprobs * rows.completion_mask_BT[part, 1:]).sum(dim=1)
            (-(logprob_B * torch.from_numpy(weights_PG[p]).float()).sum() / groups).backward()
        optimizer.step()
        optimizer.zero_grad()
    exact, found = noise_estimate(steps, size).intervals, meter.estimate().intervals
    for name in ("grad_sq", "noise_scale"):
        assert found[name].estimate == pytest.approx(exact[name].estimate, rel=1e-3), name


class Table(nn.Module):
    """Log-probabilities of a tabular policy's outcomes."""

    def __init__(self, policy):
        super().__init__()
        self.theta = nn.Parameter(torch.from_numpy(policy.theta_D.copy()))
        self.features = torch.from_numpy(policy.features_PYD)

    def forward(self, prompts, outcomes):
        logprobs = (self.features[prompts] @ self.theta).log_softmax(dim=1)
        return logprobs.gather(1, outcomes[:, None])[:, 0]


def measure_table(policy, rows, size, n, together, steps, seed, random_order=False):
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
        order = rng.permutation(n) if random_order else np.arange(n)
        columns = [
            torch.from_numpy(x.ravel()[order])
            for x in (np.repeat(prompts_P, size), outcomes_PG, advantage)
        ]
        for prompts, outcomes, advantages in zip(*(x.split(rows) for x in columns), strict=True):
            (-(model(prompts, outcomes) * advantages).sum() / n).backward()
        optimizer.step()
        optimizer.zero_grad()
    return meter


@pytest.mark.slow(minutes=1)
@pytest.mark.parametrize(
    ("split", "rows", "steps"),
    [("whole groups", 16, 400), ("random rows", 16, 120), ("half groups", 4, 120)],
)
def test_the_exact_noise_scale_is_in_the_interval(split, rows, steps):
    """12 runs, of which a 95 % interval misses the truth twice or more in 12 %."""
    policy, size, n = known_policy(), 8, 64
    grad_sq = float(np.square(policy.gradient_PD.mean(axis=0)).sum())
    law = ScalingLaw.of_moments(policy.moments(), grad_sq)
    truth = law.n_mse(size) / grad_sq
    together, inside, gstar_inside = split != "random rows", 0, 0
    for seed in range(12):
        found = measure_table(
            policy, rows, size, n, together, steps, seed, random_order=not together
        ).estimate()
        _, low, high = found.intervals["noise_scale"]
        inside += low <= truth <= high and low > 0
        if split == "half groups":
            _, least, most = found.intervals["gstar"]
            gstar_inside += least <= law.best_size() <= most
    assert inside >= 11
    if split == "half groups":
        assert gstar_inside >= 11 and found.no_gstar == ""
    else:
        assert found.no_gstar and (found.only_bound != "") == (split == "random rows")


# Ranks.


def own_part(inputs_SRK, rank):
    return inputs_SRK[:, rank]


def in_rank(rank, way, count, options, watched="wrapped"):
    """A loop on a rank; returns its metrics, its summary, and the law of all gradients."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = Net()
    inputs = batches(2 * count).reshape(STEPS, 2, count, ROWS, INPUTS)
    law = expected(model, batches(2 * count), 2 * count * ROWS)
    # A micro-batch of sharded ranks is that of both.
    joint = expected(
        model, inputs.transpose(1, 2).reshape(STEPS, count, -1, INPUTS), 2 * count * ROWS
    )
    inner = model
    if way.startswith("ddp"):
        model = DistributedDataParallel(
            model, gradient_as_bucket_view="view" in way, find_unused_parameters=True
        )
    elif way.startswith("fsdp2"):
        for layer in (model.first, model.second, model):
            fully_shard(layer)
    elif way.startswith("fsdp1"):
        model = FullyShardedDataParallel(
            model, use_orig_params="orig" in way, device_id=torch.device("cpu")
        )
    optimizer = optimizer_of(model)
    meter = gu.watch(
        model if watched == "wrapped" else inner, optimizer, rollouts=2 * count * ROWS, **options
    )
    for micro_batches in inputs[:, rank]:
        for k, rows in enumerate(micro_batches):
            last = k == count - 1
            wait = "no_sync" in way and not last
            if "fsdp2" in way:
                model.set_requires_gradient_sync(not wait)
            with model.no_sync() if wait and "fsdp2" not in way else contextlib.nullcontext():
                loss_of(model, rows, count).backward()
        optimizer.step()
        optimizer.zero_grad()
    found, summary = meter.estimate(), meter.summary()
    laws = [(np.array(x.linear(GRAD_SQ)), np.array(x.noise_scale(2))) for x in (law, joint)]
    return {name: np.array(x) for name, x in found.intervals.items()}, summary, laws


def two_ranks(*arguments):
    found = in_ranks(2, lambda rank: in_rank(rank, *arguments))
    assert not any(isinstance(each, str) for each in found), found[0]
    (left, _, _), (right, _, _) = found
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])
    return found[0]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", ["ddp", "ddp view", "ddp no_sync", "ddp view no_sync"])
def test_ddp_compares_the_micro_batches_of_all_ranks(way, count):
    found, _, ((grad_sq, scale), _) = two_ranks(way, count, {})
    np.testing.assert_allclose(found["grad_sq"], grad_sq, rtol=1e-4)
    np.testing.assert_allclose(found["noise_scale"], scale, rtol=1e-3)


@pytest.mark.parametrize("way", ["fsdp2", "fsdp1", "fsdp1 orig"])
def test_fsdp_compares_the_micro_batches_of_all_ranks_together(way):
    found, _, (_, (grad_sq, scale)) = two_ranks(way, 3, {"copy_gradient": True})
    np.testing.assert_allclose(found["grad_sq"], grad_sq, rtol=1e-4)
    np.testing.assert_allclose(found["noise_scale"], scale, rtol=1e-3)
    # Without a copy, products of micro-batches have other weights.
    found, _, _ = two_ranks(way, 3, {})
    assert found["grad_sq"][1] <= grad_sq[0] <= found["grad_sq"][2]


@pytest.mark.parametrize(
    ("way", "count", "watched", "words"),
    [
        ("fsdp2", 1, "wrapped", "1 micro-batch of all ranks together"),
        ("fsdp2 no_sync", 3, "wrapped", "set_requires_gradient_sync"),
        ("fsdp1 no_sync", 3, "wrapped", "no_sync"),
        ("ddp", 2, "inner", "equal gradients"),
    ],
)
def test_ranks_that_show_nothing(way, count, watched, words):
    found, (line,), _ = two_ranks(way, count, {}, watched)
    assert found == {} and words in line


def test_separate_ranks_are_averaged():
    """Each rank's micro-batches are compared with each other, and rollouts are those of all."""
    found, _, ((_, scale), _) = two_ranks("separate", 3, {})
    assert found["noise_scale"][1] <= scale[0] <= found["noise_scale"][2]


def test_a_meter_of_ddp_does_not_compare_parts_of_groups():
    _, summary, _ = two_ranks("ddp", 4, {"group_size": 16, "prompts_together": True})
    assert "not compared in DDP" in summary[1]
