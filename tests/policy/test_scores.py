"""Score norms, pooled gradients and Gram matrices against one-at-a-time autograd in float64."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from architectures import build
from fakes import Wobble, random_policy, random_rollouts
from reference import one_flat_score

from grpo_ustat.policy.loading import load_policy
from grpo_ustat.policy.logprobs import completion_logprobs, pack
from grpo_ustat.policy.scores import accumulate, check, layers, output_layer
from grpo_ustat.policy.scores.backward import completion_scores, covered_parameters, parameter_sizes
from grpo_ustat.policy.scores.check import check_scores
from grpo_ustat.policy.scores.sketch import Sketch


def reference(policy, rollouts, temperature=1.0):
    """One flat score per completion, each from its own unpadded forward and backward."""
    rows = []
    for p, prompt in enumerate(rollouts.prompt_tokens):
        for tokens, mask in zip(rollouts.tokens_PGT[p], rollouts.mask_PGT[p], strict=True):
            rows.append(one_flat_score(policy.model, prompt, tokens[mask], temperature))
    return torch.stack(rows)


def fast(policy, rollouts, weights=None, gram=True, temperature=1.0, **options):
    count = rollouts.mask_PGT.shape[0] * rollouts.mask_PGT.shape[1]
    rows = pack(rollouts, np.arange(count), policy.pad_token, policy.model.device)
    return completion_scores(
        policy.model,
        rows.input_ids_BT,
        rows.attention_mask_BT,
        rows.completion_mask_BT,
        weights_KB=weights,
        gram=gram,
        temperature=temperature,
        **options,
    )


def flat(gradient):
    return torch.cat([gradient[name].flatten() for name in sorted(gradient)])


CASES = {"tied": dict(tied=True), "untied": dict(tied=False)}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_everything_equals_autograd(options, temperature):
    """Several prompts of different lengths in one left-padded batch, grouped-query attention."""
    policy = random_policy(**options)
    rollouts = random_rollouts([2, 5, 3], group_size=4, longest=6)
    slow = reference(policy, rollouts, temperature)
    weights = torch.randn(3, 12, dtype=torch.float64)
    result = fast(policy, rollouts, weights, temperature=temperature)
    torch.testing.assert_close(result.sq_norm_B, slow.square().sum(1), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(result.gram_BB, slow @ slow.T, rtol=1e-10, atol=1e-9)
    for gradient, row in zip(result.gradients_K, weights, strict=True):
        torch.testing.assert_close(flat(gradient), row @ slow, rtol=1e-10, atol=1e-10)


def test_a_padding_token_inside_a_completion_counts_as_autograd_counts_it():
    """Its embedding row gets no gradient from being read, but does from being predicted."""
    policy, rollouts = random_policy(), random_rollouts([3, 2], group_size=3, longest=6)
    rollouts.tokens_PGT[:, :, 1] = 0
    slow = reference(policy, rollouts)
    torch.testing.assert_close(
        fast(policy, rollouts).sq_norm_B, slow.square().sum(1), rtol=1e-10, atol=1e-10
    )


@pytest.mark.slow
def test_nothing_outlives_the_result():
    """Gradients are freed with the result, without waiting for the garbage collector."""
    policy, rollouts = random_policy(), random_rollouts([3], group_size=2, longest=4)
    gc.disable()
    try:
        result = fast(policy, rollouts, torch.ones(1, 2))
        watched = weakref.ref(next(iter(result.gradients_K[0].values())))
        del result
        assert watched() is None
    finally:
        gc.enable()


def test_norms_do_not_need_the_gram_matrix():
    policy, rollouts = random_policy(), random_rollouts([3, 2], group_size=3, longest=5)
    both = fast(policy, rollouts, gram=True)
    torch.testing.assert_close(fast(policy, rollouts, gram=False).sq_norm_B, both.sq_norm_B)


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


@pytest.mark.parametrize("change", [by_keyword, in_a_layer_too])
@pytest.mark.parametrize("passes", [None, (1, 3)])
def test_the_output_layers_share_of_a_weight_that_no_rule_covers_counts_once(change, passes):
    policy, rollouts = random_policy(tied=True), random_rollouts([2, 5], group_size=2, longest=4)
    change(policy.model)
    slow = reference(policy, rollouts)
    result = fast(policy, rollouts, passes=passes)
    torch.testing.assert_close(result.gram_BB, slow @ slow.T, rtol=1e-10, atol=1e-9)


def test_frozen_parameters_are_left_out_and_stay_frozen():
    policy, rollouts = random_policy(tied=False), random_rollouts([3], group_size=3, longest=4)
    slow = fast(policy, rollouts).sq_norm_B
    policy.model.lm_head.weight.requires_grad_(False)
    rest = fast(policy, rollouts)
    assert (rest.sq_norm_B < slow).all()
    assert "lm_head.weight" not in covered_parameters(policy.model)
    assert not policy.model.lm_head.weight.requires_grad
    assert policy.model.model.norm.weight.requires_grad


def test_a_layer_of_unknown_kind_takes_the_slow_exact_way():
    policy, rollouts = random_policy(), random_rollouts([3, 5], group_size=2, longest=4)
    mlp = policy.model.model.layers[0].mlp
    mlp.act_fn = Wobble(mlp.up_proj.out_features)
    slow = reference(policy, rollouts)
    weights = torch.randn(1, 4, dtype=torch.float64)
    result = fast(policy, rollouts, weights)
    assert "model.layers.0.mlp.act_fn.phase" in result.gradients_K[0]
    torch.testing.assert_close(result.gram_BB, slow @ slow.T, rtol=1e-10, atol=1e-9)
    torch.testing.assert_close(flat(result.gradients_K[0]), weights[0] @ slow)


def test_a_parameter_that_is_never_used_has_a_zero_gradient():
    policy, rollouts = random_policy(), random_rollouts([3], group_size=2, longest=4)
    before = fast(policy, rollouts).sq_norm_B
    policy.model.model.layers[0].mlp.extra = torch.nn.Parameter(torch.zeros(2))
    result = fast(policy, rollouts, torch.ones(1, 2))
    torch.testing.assert_close(result.sq_norm_B, before)
    assert not result.gradients_K[0]["model.layers.0.mlp.extra"].any()


def test_a_parameter_of_which_a_pass_says_nothing_takes_the_slow_exact_way(monkeypatch):
    policy, rollouts = random_policy(), random_rollouts([2, 5], group_size=2, longest=6)
    slow, original = reference(policy, rollouts), layers.parts

    def forgetful(module, arguments, grads):
        alone = len(arguments[0]) == 1 and isinstance(module, torch.nn.Linear)
        return iter(()) if alone else original(module, arguments, grads)

    monkeypatch.setattr(layers, "parts", forgetful)
    result = fast(policy, rollouts, passes=(1, 3))
    torch.testing.assert_close(result.gram_BB, slow @ slow.T, rtol=1e-10, atol=1e-9)


def test_a_layer_called_twice_is_one_parameter():
    policy, rollouts = random_policy(), random_rollouts([3, 4], group_size=3, longest=5)
    policy.model.model.layers[1].mlp = policy.model.model.layers[0].mlp
    slow = reference(policy, rollouts)
    torch.testing.assert_close(fast(policy, rollouts).gram_BB, slow @ slow.T, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("gram", [True, False])
@pytest.mark.parametrize("passes", [None, (1, 4, 3)])
def test_slices_do_not_matter(monkeypatch, tied, gram, passes):
    """Logits in slices of the vocabulary, weights in slices, in one pass or several."""
    policy, rollouts = random_policy(tied=tied), random_rollouts([2, 5], group_size=4, longest=6)
    weights = torch.randn(2, 8, dtype=torch.float64)
    slow = reference(policy, rollouts)
    monkeypatch.setitem(output_layer.LOGIT_BYTES, "cpu", 700)
    monkeypatch.setitem(accumulate.GRADIENT_BYTES, "cpu", 500)
    monkeypatch.setattr(layers, "EMBEDDING_BYTES", 3000)
    result = fast(policy, rollouts, weights, gram=gram, passes=passes)
    torch.testing.assert_close(result.sq_norm_B, slow.square().sum(1), rtol=1e-10, atol=1e-10)
    for gradient, row in zip(result.gradients_K, weights, strict=True):
        torch.testing.assert_close(flat(gradient), row @ slow, rtol=1e-10, atol=1e-10)
    if gram:
        torch.testing.assert_close(result.gram_BB, slow @ slow.T, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("tied", [True, False])
def test_a_pass_without_a_token_that_counts_scores_nothing(tied):
    policy, rollouts = random_policy(tied=tied), random_rollouts([2, 5], group_size=2, longest=6)
    rows = pack(rollouts, np.arange(4), policy.pad_token, policy.model.device)
    rows.completion_mask_BT[1] = 0
    slow = reference(policy, rollouts)
    slow[1] = 0
    result = completion_scores(
        policy.model, rows.input_ids_BT, rows.attention_mask_BT, rows.completion_mask_BT,
        gram=True, passes=(1, 1, 2),
    )  # fmt: skip
    torch.testing.assert_close(result.gram_BB, slow @ slow.T, rtol=1e-10, atol=1e-9)


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
    slow = reference(policy, rollouts)
    sizes = parameter_sizes(policy.model)
    weights = torch.randn(2, 6, dtype=torch.float64)
    for size in (101, 10**6):
        sketch = Sketch(sizes, size, seed=3)
        rows = pack(rollouts, np.arange(6), 0, "cpu")
        result = completion_scores(
            policy.model, rows.input_ids_BT, rows.attention_mask_BT, rows.completion_mask_BT,
            weights_KB=weights, features=sketch, pooled=sketch, passes=passes,
        )  # fmt: skip
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
    rows = pack(rollouts, np.arange(3), 0, "cpu")
    arguments = (rows.input_ids_BT, rows.attention_mask_BT, rows.completion_mask_BT)
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
    rows = pack(random_rollouts([3], group_size=3, longest=40), np.arange(3), 0, "cpu")
    check_scores(policy.model, rows.input_ids_BT, rows.attention_mask_BT, rows.completion_mask_BT)


@pytest.mark.parametrize("scale", [1, 120, 150, 200])
def test_a_policy_that_is_nearly_certain_is_not_refused(scale):
    """In float32 its scores are mostly the rounding of 1 - p."""
    policy = random_policy(tied=False, dtype=torch.float32)
    policy.model.lm_head.weight.data *= scale
    rows = pack(random_rollouts([3], group_size=2, longest=4), np.arange(2), 0, "cpu")
    ids_BT, attention_BT, completion_BT = (
        rows.input_ids_BT, rows.attention_mask_BT, rows.completion_mask_BT,
    )  # fmt: skip
    for t in range(1, ids_BT.shape[1]):  # its own choices
        with torch.no_grad():
            likeliest_B = policy.model(ids_BT, attention_BT).logits[:, t - 1].argmax(dim=1)
        ids_BT[:, t] = torch.where(completion_BT[:, t].bool(), likeliest_B, ids_BT[:, t])
    check_scores(policy.model, ids_BT, attention_BT, completion_BT)


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_compared_a_few_parameters_at_a_time(monkeypatch, tied):
    """What a check of a large model holds is a group's; the same layer is refused in any group."""
    policy, rollouts = random_policy(tied=tied), random_rollouts([3], group_size=3, longest=4)
    rows = pack(rollouts, np.arange(3), 0, "cpu")
    arguments = (rows.input_ids_BT, rows.attention_mask_BT, rows.completion_mask_BT)
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
    rows = pack(rollouts, np.arange(3), 0, policy.model.device)
    weights = torch.eye(3, dtype=torch.float64)

    def gradients(mask):
        arguments = (rows.input_ids_BT, rows.attention_mask_BT, mask)
        found = completion_scores(policy.model, *arguments, weights_KB=weights)
        return torch.stack([flat(g) for g in found.gradients_K])

    first = rows.completion_mask_BT.clone()
    first[:, 6:] = 0
    second = rows.completion_mask_BT - first
    whole = gradients(rows.completion_mask_BT)
    torch.testing.assert_close(gradients(first) + gradients(second), whole)


def test_logprobs_do_not_depend_on_the_batch():
    """Alone and unpadded, or with longer neighbours: the same log-probability."""
    policy, rollouts = random_policy(), random_rollouts([1, 6], group_size=2, longest=5)
    together = completion_logprobs(policy.model, pack(rollouts, np.arange(4), 0, "cpu"))
    for i in range(4):
        alone = completion_logprobs(policy.model, pack(rollouts, np.array([i]), 0, "cpu"))
        assert alone.item() == pytest.approx(together[i].item(), rel=1e-12)


@pytest.mark.parametrize("name", ["tiny", "tiny_base", "tiny_direct"])
def test_embedded_policies_in_float64(name):
    policy = load_policy(f"embedded:{name}", dtype="float64")
    assert sum(p.numel() for p in policy.model.parameters()) < 400_000
    rollouts = random_rollouts([5, 9], group_size=3, longest=12, vocab=90)
    slow = reference(policy, rollouts)
    result = fast(policy, rollouts)
    torch.testing.assert_close(result.sq_norm_B, slow.square().sum(1), rtol=1e-10, atol=1e-8)
    torch.testing.assert_close(result.gram_BB, slow @ slow.T, rtol=1e-10, atol=1e-7)


def test_a_padding_row_of_zeros_leaves_scores_finite():
    """There the derivative of Gemma 3n's root is infinite, and backpropagation drops it."""
    model = build("gemma3n", tied=True)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0
    policy = replace(random_policy(), model=model, pad_token=0)
    rollouts = random_rollouts([3, 3], 2, 4)
    rollouts.tokens_PGT[0, 0, 0] = 0
    scores = reference(policy, rollouts)
    assert torch.isfinite(scores).all()
    torch.testing.assert_close(fast(policy, rollouts).gram_BB, scores @ scores.T)
