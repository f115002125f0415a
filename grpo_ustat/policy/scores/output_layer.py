"""The output layer's share of a score: its own parameters, and what it hands to the layers below.

All logits of a batch at once where they fit into memory; else some rows, or some of the vocabulary.
"""

from __future__ import annotations

import torch

from grpo_ustat.policy.limits import LOGIT_BYTES
from grpo_ustat.policy.logprobs import widen
from grpo_ustat.policy.output_layer import OutputLayer, Window
from grpo_ustat.policy.scores.accumulate import Accumulator


def add_output_layer(
    layer: OutputLayer,
    window: Window,
    names: dict[int, str],
    totals: Accumulator,
    tokens_U: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the output layer's parameters to the totals.

    Args:
        layer: the output layer.
        window: positions that count.
        names: of the trainable parameters, by identity.
        totals: to add to.
        tokens_U: tokens whose logits' gradients are returned too.

    Returns:
        Gradients at the hidden states of the window, [B, T, D], and at the logits of `tokens_U`,
        [B, T, U].
    """
    vocabulary, (batch, length, _) = layer.head.weight.shape[0], window.hidden_BTD.shape
    wide = widen(window.hidden_BTD[:0])
    budget = LOGIT_BYTES[window.hidden_BTD.device.type] // wide.element_size()
    rows = max(1, budget // (length * vocabulary))
    grad_BTD = wide.new_zeros(window.hidden_BTD.shape)  # slices of the vocabulary add up
    grad_BTU = wide.new_zeros((batch, length, len(tokens_U)))
    if layer.opaque:
        for index in torch.arange(batch).split(rows):
            part, columns = window.part(index)
            grad_BTD[index, columns] = layer.through(part)
    elif batch * length * vocabulary <= budget:
        grad_BTV, _ = layer.gradients(window)
        grad_BTD[:] = layer.back(grad_BTV)
        grad_BTU[:] = grad_BTV[:, :, tokens_U]
        _add_parameters(layer, window, names, totals, grad_BTV)
    elif totals.gram_BB is None:  # rows of similar length together; each row's logits exist once
        for index in window.mask_BT.sum(dim=1).argsort().split(rows):
            part, columns = window.part(index)
            grad_NTV, _ = layer.gradients(part)
            grad_BTD[index, columns] = layer.back(grad_NTV)
            grad_BTU[index, columns] = grad_NTV[:, :, tokens_U]
            _add_parameters(layer, part, names, totals, grad_NTV, rows=index)
    else:  # a Gram matrix needs all rows: some of the vocabulary, after a pass for normalisers
        step = max(1, budget // (batch * length))
        slices = [slice(low, min(low + step, vocabulary)) for low in range(0, vocabulary, step)]
        normaliser_BT = None
        for tokens in slices:
            with torch.no_grad():
                _, logits = layer.logits(window.hidden_BTD, tokens)
            part_BT = (widen(logits) / layer.temperature).logsumexp(dim=-1)
            normaliser_BT = (
                part_BT if normaliser_BT is None else torch.logaddexp(normaliser_BT, part_BT)
            )
        for tokens in slices:
            grad_BTS, _ = layer.gradients(window, tokens, normaliser_BT)
            grad_BTD[:] += layer.back(grad_BTS, tokens)
            inside_U = (tokens_U >= tokens.start) & (tokens_U < tokens.stop)
            grad_BTU[:, :, inside_U] = grad_BTS[:, :, tokens_U[inside_U] - tokens.start]
            _add_parameters(layer, window, names, totals, grad_BTS, first_row=tokens.start)
    return grad_BTD.to(window.hidden_BTD), grad_BTU


def _add_parameters(
    layer: OutputLayer,
    window: Window,
    names: dict[int, str],
    totals: Accumulator,
    grad_NTV: torch.Tensor,
    first_row: int = 0,
    rows: torch.Tensor | None = None,
) -> None:
    """Add the gradients of the layer's weight and bias, where these are trained."""
    weight, bias = layer.head.weight, layer.head.bias
    if (name := names.get(id(weight))) is not None:
        totals.add_outer(name, weight.shape, [(grad_NTV, window.hidden_BTD)], first_row, rows)
    if bias is not None and (name := names.get(id(bias))) is not None:
        totals.add_flat(name, bias.shape, grad_NTV.sum(dim=1), first_row, rows)
