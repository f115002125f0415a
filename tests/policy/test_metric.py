"""Scores in the optimizer's metric against one-at-a-time autograd, entry by entry, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fakes import Wobble, random_policy, random_rollouts
from reference import one_flat_score
from slow_cases import slow_after

from grpo_ustat.policy.logprobs import pack
from grpo_ustat.policy.scores import accumulate, layers, output_layer
from grpo_ustat.policy.scores.backward import completion_scores, parameter_sizes, trainable
from grpo_ustat.policy.scores.metric import EPS, Metric, adam_metric
from grpo_ustat.policy.scores.sketch import Sketch


def random_metric(policy):
    """Weights over two orders of magnitude, some of them 0; and the same in one flat vector."""
    sizes = parameter_sizes(policy.model)
    weights = {name: torch.rand(size).mul_(4.6).exp_() for name, size in sizes.items()}
    for weight in weights.values():
        weight[:: max(2, len(weight) // 5)] = 0
    return Metric(weights), torch.cat([weights[name] for name in sorted(weights)]).double()


def flat(gradient):
    return torch.cat([gradient[name].flatten() for name in sorted(gradient)])


def scores(policy, rollouts, metric, weights=None, **options):
    count = rollouts.mask_PGT.shape[0] * rollouts.mask_PGT.shape[1]
    rows = pack(rollouts, np.arange(count), policy.pad_token, policy.model.device)
    masks = (rows.attention_mask_BT, rows.completion_mask_BT)
    return completion_scores(
        policy.model, rows.input_ids_BT, *masks, weights, metric=metric, **options
    )


def reference(policy, rollouts, flat_weights):
    """D s_i of each completion, from its own unpadded forward and backward."""
    rows = [
        one_flat_score(policy.model, prompt, tokens[mask], 1.0)
        for p, prompt in enumerate(rollouts.prompt_tokens)
        for tokens, mask in zip(rollouts.tokens_PGT[p], rollouts.mask_PGT[p], strict=True)
    ]
    return torch.stack(rows) * flat_weights


@pytest.mark.parametrize("tied", slow_after(1, [True, False]))
@pytest.mark.parametrize("gram", [True, False])
@pytest.mark.parametrize("way", ["whole", "in chunks", "layer by layer", "without a rule"])
def test_everything_equals_autograd_weighed_entry_by_entry(tied, gram, way, monkeypatch):
    policy, rollouts = random_policy(tied=tied), random_rollouts([2, 5], group_size=3, longest=6)
    if way == "without a rule":
        mlp = policy.model.model.layers[0].mlp
        mlp.act_fn = Wobble(mlp.up_proj.out_features)
    if way == "in chunks":
        monkeypatch.setitem(output_layer.LOGIT_BYTES, "cpu", 700)
        monkeypatch.setitem(accumulate.GRADIENT_BYTES, "cpu", 500)
        monkeypatch.setattr(layers, "EMBEDDING_BYTES", 3000)
    metric, flat_weights = random_metric(policy)
    slow = reference(policy, rollouts, flat_weights)
    weights = torch.randn(2, 6, dtype=torch.float64)
    by_layer = way == "layer by layer"
    result = scores(policy, rollouts, metric, weights, gram=gram, by_layer=by_layer)
    torch.testing.assert_close(result.sq_norm_B, slow.square().sum(1), rtol=1e-10, atol=1e-8)
    if gram:
        torch.testing.assert_close(result.gram_BB, slow @ slow.T, rtol=1e-10, atol=1e-8)
    for gradient, row in zip(result.gradients_K, weights, strict=True):
        torch.testing.assert_close(flat(gradient), row @ slow, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("tied", [True, False])
def test_sketches_in_full_hold_the_weighed_scores(tied):
    policy, rollouts = random_policy(tied=tied), random_rollouts([2, 5], group_size=3, longest=6)
    metric, flat_weights = random_metric(policy)
    slow = reference(policy, rollouts, flat_weights)
    weights = torch.randn(2, 6, dtype=torch.float64)
    sketch = Sketch(parameter_sizes(policy.model), 10**6)
    options = {"gram": True, "features": sketch, "pooled": sketch}
    result = scores(policy, rollouts, metric, weights, **options)
    torch.testing.assert_close(result.features_BR, slow, rtol=1e-10, atol=1e-9)
    torch.testing.assert_close(result.pooled_KR, weights @ slow, rtol=1e-10, atol=1e-9)
    torch.testing.assert_close(result.gram_BB, slow @ slow.T, rtol=1e-10, atol=1e-8)


def test_a_metric_of_ones_is_euclidean():
    policy, rollouts = random_policy(tied=True), random_rollouts([3], group_size=4, longest=5)
    sizes = parameter_sizes(policy.model)
    ones = Metric({name: torch.ones(size) for name, size in sizes.items()})
    plain, weighed = (scores(policy, rollouts, metric, gram=True) for metric in (None, ones))
    torch.testing.assert_close(weighed.gram_BB, plain.gram_BB, rtol=1e-12, atol=1e-12)


def test_weights_are_one_over_the_root_of_the_second_moment():
    policy = random_policy(tied=True)
    v = moments(policy)
    metric = adam_metric(v)
    for name, second in v.items():
        weight = metric.of(name, 0, second.numel())
        assert weight[0] == 0
        torch.testing.assert_close(weight[1:], torch.full_like(weight[1:], 1 / (2 + EPS)))


def moments(policy):
    """v = 4 for every entry but the first of each parameter, which has 0."""
    v = {name: torch.full_like(p, 4.0, requires_grad=False) for name, p in trainable(policy.model)}
    for second in v.values():
        second.view(-1)[0] = 0
    return v
