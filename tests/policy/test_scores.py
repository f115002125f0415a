"""Score norms, pooled gradients and Gram matrices against one-at-a-time autograd in float64."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from architectures import build
from fakes import Wobble, random_policy, random_rollouts
from scored import agree, all_at_once, assert_close, flat, one_by_one, packed

from grpo_ustat.policy.loading import load_policy
from grpo_ustat.policy.scores import accumulate, check, layers, output_layer
from grpo_ustat.policy.scores.backward import completion_scores, parameter_sizes
from grpo_ustat.policy.scores.check import check_scores
from grpo_ustat.policy.scores.sketch import Sketch


@pytest.mark.slow
def test_nothing_outlives_the_result():
    """Gradients are freed with the result, without waiting for the garbage collector."""
    policy, rollouts = random_policy(), random_rollouts([3], group_size=2, longest=4)
    gc.disable()
    try:
        result = all_at_once(policy.model, rollouts, weights_KB=torch.ones(1, 2))
        watched = weakref.ref(next(iter(result.gradients_K[0].values())))
        del result
        assert watched() is None
    finally:
        gc.enable()


def by_keyword(model):
    def move(module, args, kwargs):
        return ((), {"input": args[0]}) if args else None

    model.model.embed_tokens.register_forward_pre_hook(move, with_kwargs=True)


def in_a_layer_too(model):
    weight, layer = model.lm_head.weight, model.model.layers[0]
    layer.extra = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.extra.weight = weight
    layer.register_forward_hook(
        lambda module, args, output: output + module.extra(output).mean(-1, keepdim=True)
    )


def of_unknown_kind(model):
    mlp = model.model.layers[0].mlp
    mlp.act_fn = Wobble(mlp.up_proj.out_features)


def never_used(model):
    model.model.layers[0].mlp.extra = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))


def a_module_of_two_layers(model):
    first, second = model.model.layers
    second.mlp, second.input_layernorm = first.mlp, first.input_layernorm


def a_weight_of_two_modules(model):
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight, first.v_proj.weight = first.q_proj.weight, first.k_proj.weight


def outside_any_layer(model):
    """A learned scale of the hidden states, next to the layers that have rules."""
    norm = model.model.norm
    norm.scale = torch.nn.Parameter(torch.tensor([0.8], dtype=torch.float64))
    norm.register_forward_hook(lambda module, args, output: output * module.scale)


@pytest.mark.parametrize(
    "change",
    [by_keyword, in_a_layer_too, of_unknown_kind, never_used, a_module_of_two_layers,
     a_weight_of_two_modules, outside_any_layer],
)  # fmt: skip
@pytest.mark.parametrize("way", [{}, {"passes": (1, 3)}, {"by_layer": True}], ids=str)
def test_weights_that_no_rule_covers_and_weights_used_twice_count_once(change, way):
    policy, rollouts = random_policy(tied=True), random_rollouts([2, 5], group_size=2, longest=4)
    change(policy.model)
    agree(policy.model, rollouts, **way)


def test_a_parameter_of_which_a_pass_says_nothing_takes_the_slow_exact_way(monkeypatch):
    policy, rollouts = random_policy(), random_rollouts([2, 5], group_size=2, longest=6)
    original = layers.parts

    def forgetful(module, arguments, grads):
        alone = len(arguments[0]) == 1 and isinstance(module, torch.nn.Linear)
        return iter(()) if alone else original(module, arguments, grads)

    monkeypatch.setattr(layers, "parts", forgetful)
    agree(policy.model, rollouts, passes=(1, 3))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("passes", [None, (1, 4, 3)])
def test_slices_do_not_matter(monkeypatch, tied, passes):
    """Logits in slices of the vocabulary, weights in slices, in one pass or several."""
    policy, rollouts = random_policy(tied=tied), random_rollouts([2, 5], group_size=4, longest=6)
    monkeypatch.setitem(output_layer.LOGIT_BYTES, "cpu", 700)
    monkeypatch.setitem(accumulate.GRADIENT_BYTES, "cpu", 500)
    monkeypatch.setattr(layers, "EMBEDDING_BYTES", 3000)
    agree(policy.model, rollouts, passes=passes)


@pytest.mark.parametrize("tied", [True, False])
def test_a_pass_without_a_token_that_counts_scores_nothing(tied):
    policy, rollouts = random_policy(tied=tied), random_rollouts([2, 5], group_size=2, longest=6)
    ids_BT, attention_BT, completion_BT = packed(rollouts)
    completion_BT[1] = 0
    slow = one_by_one(policy.model, rollouts)
    slow[1] = 0
    rows = (ids_BT, attention_BT, completion_BT)
    result = completion_scores(policy.model, *rows, gram=True, passes=(1, 1, 2))
    assert_close(result.gram_BB, slow @ slow.T)


def test_a_pass_of_one_real_column_scores_nothing():
    """A prompt of one token, and a completion that was cut before its first."""
    model = random_policy().model
    ids, attention = torch.tensor([[3, 4, 5], [3, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    rows = (ids, attention, torch.tensor([[0, 1, 1], [0, 0, 0]]))
    expected = completion_scores(model, *rows).sq_norm_B
    found = completion_scores(model, *rows, passes=(1, 1)).sq_norm_B
    torch.testing.assert_close(found, expected)
    assert found[0] > 0 and found[1] == 0


def test_a_row_with_a_hole_gets_its_mask():
    model, ids = random_policy().model, torch.tensor([[3, 4, 5, 6]])
    rows = (ids, torch.tensor([[1, 0, 1, 1]]), torch.tensor([[0, 0, 1, 1]]))
    expected = completion_scores(model, *rows).sq_norm_B
    torch.testing.assert_close(completion_scores(model, *rows, contiguous=True).sq_norm_B, expected)


@pytest.mark.parametrize("passes", [None, (2, 4)])
def test_sketches_are_linear_and_full_where_they_can_be(passes):
    policy, rollouts = random_policy(), random_rollouts([2, 5], group_size=3, longest=6)
    slow = one_by_one(policy.model, rollouts)
    sizes = parameter_sizes(policy.model)
    weights = torch.randn(2, 6, dtype=torch.float64)
    for size in (101, 10**6):
        sketch = Sketch(sizes, size, seed=3)
        way = {"weights_KB": weights, "features": sketch, "pooled": sketch, "passes": passes}
        result = all_at_once(policy.model, rollouts, **way)
        torch.testing.assert_close(result.pooled_KR, weights @ result.features_BR)
        assert result.features_BR.shape == (6, min(size, slow.shape[1]))
        assert not any(result.gradients_K)
    torch.testing.assert_close(result.features_BR @ result.features_BR.T, slow @ slow.T)


def test_sketched_products_are_unbiased():
    """Over 400 seeds the mean of <F u, F v> is <u, v> within five standard errors."""
    rng = np.random.default_rng(0)
    u, v = rng.normal(size=(2, 60)) * np.linspace(0.1, 3, 60)
    exact, found = float(u @ v), []
    for seed in range(400):
        sketch = Sketch({"a": 25, "b": 35}, 11, seed)
        rows = [
            sketch.of({"a": torch.from_numpy(x[:25]), "b": torch.from_numpy(x[25:])})
            for x in (u, v)
        ]
        found.append(float(rows[0] @ rows[1]))
    error = np.std(found) / 400**0.5
    assert abs(np.mean(found) - exact) < 5 * error
    bound = (float(u @ u) * float(v @ v) + exact**2) / 11
    assert 0.3 * bound < np.var(found) < 3 * bound


def test_a_layer_that_breaks_its_rule_is_refused_by_name():
    class Doubled(torch.nn.Linear):
        forward = torch.nn.Linear.forward

    policy, rollouts = random_policy(), random_rollouts([3], group_size=3, longest=4)
    arguments = packed(rollouts)
    check_scores(policy.model, *arguments)
    old = policy.model.model.layers[1].mlp.up_proj
    new = Doubled(old.in_features, old.out_features, bias=False, dtype=torch.float64)
    policy.model.model.layers[1].mlp.up_proj = new
    weight = new.weight
    new.register_forward_hook(lambda module, args, out: out + args[0] @ weight.T)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        check_scores(policy.model, *arguments)


def test_a_float64_model_whose_norms_are_computed_in_float32_is_not_refused(monkeypatch):
    """As transformers computes them, outside of these tests."""
    monkeypatch.undo()
    policy = load_policy("embedded:tiny", dtype="float64")
    check_scores(policy.model, *packed(random_rollouts([3], group_size=3, longest=40)))


@pytest.mark.parametrize("scale", [1, 120, 150, 200])
def test_a_policy_that_is_nearly_certain_is_not_refused(scale):
    """In float32 its scores are mostly the rounding of 1 - p."""
    policy = random_policy(tied=False, dtype=torch.float32)
    policy.model.lm_head.weight.data *= scale
    rollouts = random_rollouts([3], group_size=2, longest=4)
    ids_BT, attention_BT, completion_BT = packed(rollouts)
    for t in range(1, ids_BT.shape[1]):  # its own choices
        with torch.no_grad():
            likeliest_B = policy.model(ids_BT, attention_BT).logits[:, t - 1].argmax(dim=1)
        ids_BT[:, t] = torch.where(completion_BT[:, t].bool(), likeliest_B, ids_BT[:, t])
    check_scores(policy.model, ids_BT, attention_BT, completion_BT)


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_compared_a_few_parameters_at_a_time(monkeypatch, tied):
    """What a check of a large model holds is a group's; the same layer is refused in any group."""
    policy, rollouts = random_policy(tied=tied), random_rollouts([3], group_size=3, longest=4)
    arguments = packed(rollouts)
    sizes, counts, original = parameter_sizes(policy.model), [], check.completion_scores

    def spy(model, *args, **kwargs):
        counts.append(sum(parameter_sizes(model).values()))
        return original(model, *args, **kwargs)

    monkeypatch.setattr(check, "completion_scores", spy)
    monkeypatch.setattr(check, "PARAMETERS_AT_ONCE", 600)
    check_scores(policy.model, *arguments)
    assert len(counts) > 3 and sum(counts) == sum(sizes.values())
    assert max(counts) <= max(600, *sizes.values())
    assert parameter_sizes(policy.model) == sizes
    rule = layers._norm
    monkeypatch.setattr(
        layers, "_norm", lambda *x: ((k, layers.Small(2 * p.gradient_B)) for k, p in rule(*x))
    )
    with pytest.raises(ValueError, match=r"norm\.weight differs"):
        check_scores(policy.model, *arguments)


def test_part_of_a_completion_can_be_scored_alone():
    """Scores of two halves add up to the whole: masks choose tokens, not sequences."""
    policy, rollouts = random_policy(), random_rollouts([4], group_size=3, longest=6)
    ids_BT, attention_BT, completion_BT = packed(rollouts)
    weights = torch.eye(3, dtype=torch.float64)

    def gradients(mask):
        found = completion_scores(policy.model, ids_BT, attention_BT, mask, weights_KB=weights)
        return torch.stack([flat(g) for g in found.gradients_K])

    first = completion_BT.clone()
    first[:, 6:] = 0
    second = completion_BT - first
    whole = gradients(completion_BT)
    torch.testing.assert_close(gradients(first) + gradients(second), whole)


@pytest.mark.parametrize("name", ["tiny", "tiny_base", "tiny_direct"])
def test_embedded_policies_in_float64(name):
    policy = load_policy(f"embedded:{name}", dtype="float64")
    assert sum(p.numel() for p in policy.model.parameters()) < 400_000
    rollouts = random_rollouts([5, 9], group_size=3, longest=12, vocab=90)
    agree(policy.model, rollouts)


def test_a_padding_row_of_zeros_leaves_scores_finite():
    """There the derivative of Gemma 3n's root is infinite, and backpropagation drops it."""
    model = build("gemma3n", tied=True)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0
    rollouts = random_rollouts([3, 3], 2, 4)
    rollouts.tokens_PGT[0, 0, 0] = 0
    agree(model, rollouts)
