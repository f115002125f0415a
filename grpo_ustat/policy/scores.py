r"""Scores of completions: squared norms, pooled gradients and Gram matrices from one backward.

The score of completion i is `s_i = grad_theta log pi(y_i | x)`, summed over completion tokens. One
forward and one backward over a batch give, layer by layer, what every s_i needs: a layer's input
and the gradient at its output. From these each layer's per-completion gradient is formed, reduced
(squared, multiplied by weights, by each other) and dropped before the next layer's is.

    linear      dW_i = sum_t b_it a_it'      bias    sum_t b_it
    RMSNorm     dw_i = sum_t b_it * xhat_it
    embedding   dE_i = sum_t e_{x_t} b_it'   tied    + the output layer's dW_i: one parameter, one
                                             gradient, so the cross term is in its norm
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from grpo_ustat.config import ConfigError
from grpo_ustat.policy.logprobs import positions


@dataclass(frozen=True)
class CompletionScores:
    """What one pass over B completions yields.

    Attributes:
        sq_norm_B: ||s_i||^2, float64.
        gradients_K: for each weight vector, `sum_i w_ki s_i` by parameter name.
        gram_BB: <s_i, s_j>, float64; None unless asked for.
    """

    sq_norm_B: torch.Tensor
    gradients_K: list[dict[str, torch.Tensor]]
    gram_BB: torch.Tensor | None


def completion_scores(
    model: PreTrainedModel,
    input_ids_BT: torch.Tensor,
    attention_mask_BT: torch.Tensor,
    completion_mask_BT: torch.Tensor,
    weights_KB: torch.Tensor | None = None,
    gram: bool = False,
    temperature: float = 1.0,
) -> CompletionScores:
    """Score norms, pooled gradients and Gram matrix over all trainable parameters.

    Args:
        model: a loaded causal language model; parameters with requires_grad are covered.
        input_ids_BT: token ids, prompts and completions.
        attention_mask_BT: 1 on real tokens.
        completion_mask_BT: 1 on the tokens whose log-probabilities the score sums; never the first
            column, since token t is predicted from t-1.
        weights_KB: K weight vectors over the B completions.
        gram: whether to form the Gram matrix.
        temperature: divides the logits, as in sampling.

    Raises:
        ConfigError: a trainable parameter belongs to a layer without a rule; it is named.
    """
    assert input_ids_BT.shape == attention_mask_BT.shape == completion_mask_BT.shape
    assert not completion_mask_BT[:, 0].any(), "column 0 has no prediction"
    covered_parameters(model)
    sums = _Sums(input_ids_BT.shape[0], weights_KB, gram, input_ids_BT.device)
    with torch.enable_grad(), _activations_only(model) as names, _hooks(model, names, sums):
        embeds = model.get_input_embeddings()(input_ids_BT).detach().requires_grad_()
        hidden_BTD = model.base_model(
            inputs_embeds=embeds,
            attention_mask=attention_mask_BT,
            position_ids=positions(attention_mask_BT),
            use_cache=False,
        ).last_hidden_state
        grad_hidden_BTD, of_head = _output_layer(
            model.get_output_embeddings(), hidden_BTD, input_ids_BT, completion_mask_BT, temperature
        )
        hidden_BTD.backward(grad_hidden_BTD)
    _add_ends(model, input_ids_BT, embeds.grad, of_head, names, sums)
    return CompletionScores(sums.sq_norm_B, sums.gradients_K, sums.gram_BB)


@dataclass
class _Sums:
    """Running totals over parameters; each parameter's per-completion gradients pass once."""

    batch: int
    weights_KB: torch.Tensor | None
    gram: bool
    device: torch.device
    gradients_K: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self):
        self.sq_norm_B = torch.zeros(self.batch, dtype=torch.float64, device=self.device)
        shape = (self.batch, self.batch)
        empty = torch.zeros(shape, dtype=torch.float64, device=self.device)
        self.gram_BB = empty if self.gram else None
        if self.weights_KB is not None:
            self.gradients_K = [{} for _ in self.weights_KB]

    def add(self, name: str, gradients_B: torch.Tensor) -> None:
        """Take one parameter's gradients, shape [B, *parameter.shape]."""
        flat = gradients_B.flatten(1)
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        if self.gram_BB is None:
            self.sq_norm_B += flat.square().sum(dim=1)
        else:
            products = flat @ flat.T
            self.gram_BB += products
            self.sq_norm_B += products.diagonal()
        if self.weights_KB is not None:
            pooled = (self.weights_KB.to(flat.dtype) @ flat).view(-1, *gradients_B.shape[1:])
            for gradient, value in zip(self.gradients_K, pooled, strict=True):
                gradient[name] = value


def _linear(module: nn.Linear, inputs_BTI, grads_BTO) -> Iterator[tuple[str, torch.Tensor]]:
    yield "weight", torch.bmm(grads_BTO.transpose(1, 2), inputs_BTI)
    if module.bias is not None:
        yield "bias", grads_BTO.sum(dim=1)


def _rms_norm(module: nn.Module, inputs_BTD, grads_BTD) -> Iterator[tuple[str, torch.Tensor]]:
    """The output is `weight * xhat`: the module itself, with weights of one, says what xhat is."""
    ones = {"weight": torch.ones_like(module.weight)}
    with torch.no_grad():
        normed_BTD = torch.func.functional_call(module, ones, (inputs_BTD,))
    yield "weight", (grads_BTD * normed_BTD).sum(dim=1)


_RULES = {"Linear": _linear, "Qwen2RMSNorm": _rms_norm, "LlamaRMSNorm": _rms_norm}


def covered_parameters(model: PreTrainedModel) -> list[str]:
    """Names of the trainable parameters, each of which has an exact rule.

    Raises:
        ConfigError: one has none.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    ruled = {
        id(parameter)
        for module in model.modules()
        if type(module).__name__ in _RULES or any(module is end for end in ends)
        for parameter in module.parameters(recurse=False)
    }
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    missing = [name for name, p in trainable if id(p) not in ruled]
    if missing:
        raise ConfigError(
            f"no exact score rule for {len(missing)} trainable parameters, first {missing[0]}: "
            "freeze them (requires_grad=False) to leave them out of the metric knowingly"
        )
    return [name for name, _ in trainable]


@contextmanager
def _activations_only(model: PreTrainedModel) -> Iterator[dict[int, str]]:
    """Switch parameter gradients off, so that backward yields those of activations alone."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for _, parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield {id(parameter): name for name, parameter in trainable}
    finally:
        for _, parameter in trainable:
            parameter.requires_grad_(True)


@contextmanager
def _hooks(model: PreTrainedModel, names: dict[int, str], sums: _Sums) -> Iterator[None]:
    """Inside, every ruled layer below the output adds its gradients during backward."""

    def watch(module, args, output):
        inputs = args[0].detach()
        if output.requires_grad:  # functional_call inside a rule comes by here too
            output.register_hook(lambda grad: _take(module, inputs, grad, names, sums))

    handles = [
        module.register_forward_hook(watch)
        for module in model.base_model.modules()
        if type(module).__name__ in _RULES
        and any(id(p) in names for p in module.parameters(recurse=False))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _take(module, inputs, grads, names: dict[int, str], sums: _Sums) -> None:
    for local, gradients_B in _RULES[type(module).__name__](module, inputs, grads):
        name = names.get(id(getattr(module, local)))
        if name is not None:
            sums.add(name, gradients_B)


def _output_layer(head, hidden_BTD, input_ids_BT, completion_mask_BT, temperature):
    """The output layer's part: gradient at the hidden states and its own parameters' gradients.

    In closed form, `d log softmax(l)[y] / dl = onehot(y) - softmax(l)`.
    """
    columns = completion_mask_BT.any(dim=0).nonzero()
    first, last = int(columns.min()), int(columns.max()) + 1
    seen = hidden_BTD[:, first - 1 : last - 1].detach()
    with torch.no_grad():
        logits = head(seen)
        wide = torch.promote_types(logits.dtype, torch.float32)
        grads = -torch.softmax(logits.to(wide) / temperature, dim=-1)
    targets = input_ids_BT[:, first:last, None]
    grads.scatter_add_(-1, targets, torch.ones_like(targets, dtype=grads.dtype))
    grads *= completion_mask_BT[:, first:last, None]
    grads = (grads / temperature).to(seen.dtype)
    grad_hidden_BTD = torch.zeros_like(hidden_BTD)
    grad_hidden_BTD[:, first - 1 : last - 1] = grads @ head.weight
    return grad_hidden_BTD, dict(_linear(head, seen, grads))


def _scatter(embedding: nn.Embedding, input_ids_BT, grads_BTD) -> torch.Tensor:
    """The embedding's gradient of each completion, [B, V, D]: output gradients summed by token.

    As in backpropagation, looking up `padding_idx` gives no gradient.
    """
    if embedding.padding_idx is not None:
        grads_BTD = grads_BTD * (input_ids_BT != embedding.padding_idx)[:, :, None]
    empty = grads_BTD.new_zeros((grads_BTD.shape[0], *embedding.weight.shape))
    return empty.scatter_add_(1, input_ids_BT[:, :, None].expand_as(grads_BTD), grads_BTD)


def _add_ends(model, input_ids_BT, grads_BTD, of_head: dict, names, sums: _Sums) -> None:
    """Add embedding and output layer; one shared weight is one parameter with one gradient."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    of_embedding = _scatter(embedding, input_ids_BT, grads_BTD)
    if head.weight is embedding.weight:
        of_embedding += of_head.pop("weight")
    if id(embedding.weight) in names:
        sums.add(names[id(embedding.weight)], of_embedding)
    for local, gradients_B in of_head.items():
        name = names.get(id(getattr(head, local)))
        if name is not None:
            sums.add(name, gradients_B)
