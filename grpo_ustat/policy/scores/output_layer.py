"""Gradients of the output layer's parameters for each completion, and gradients at its input.

The logits are computed in slices of the vocabulary, each of which fits into `LOGIT_BYTES`. A
softmax needs the log-sum-exp of all logits. If there are several slices, the logits are therefore
computed twice: first for the log-sum-exp, then for the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_ustat.policy.limits import LOGIT_BYTES
from grpo_ustat.policy.logprobs import widen
from grpo_ustat.policy.output_layer import OutputLayer, Window
from grpo_ustat.policy.scores.accumulate import Accumulator


def add_output_layer(
    layer: OutputLayer,
    windows: Sequence[Window],
    names: dict[int, str],
    totals: Accumulator,
    tokens_U: torch.Tensor,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Add the gradients of the output layer's parameters to the totals.

    Args:
        layer: output layer.
        windows: hidden states and targets, one window for each pass over consecutive completions.
        names: names of the trainable parameters, keyed by the parameter's id.
        totals: accumulator to which the gradients are added.
        tokens_U: tokens of the vocabulary for whose logits the gradients are also returned.

    Returns:
        For each window, the gradients at its hidden states, [B, T, D], and the gradients at the
        logits of `tokens_U`, [B, T, U]. D is the hidden size.
    """
    vocabulary, dtype = layer.head.weight.shape[0], windows[0].hidden_BTD.dtype
    wide = widen(windows[0].hidden_BTD[:0])
    budget = LOGIT_BYTES[wide.device.type] // wide.element_size()
    grads = [
        (
            wide.new_zeros(window.hidden_BTD.shape),
            wide.new_zeros((*window.mask_BT.shape, len(tokens_U))),
        )
        for window in windows
    ]
    if layer.opaque:
        for window, (grad_BTD, _) in zip(windows, grads, strict=True):
            size = max(1, budget // vocabulary // window.mask_BT.shape[1])
            for index in torch.arange(len(grad_BTD)).split(size):
                part, columns = window.part(index)
                grad_BTD[index, columns] = layer.through(part).to(grad_BTD)
        return [(grad_BTD.to(dtype), grad_BTU) for grad_BTD, grad_BTU in grads]
    step = max(1, budget // sum(window.mask_BT.numel() for window in windows))
    slices = [slice(low, min(low + step, vocabulary)) for low in range(0, vocabulary, step)]
    normalisers = [
        _normaliser(layer, window, slices) if len(slices) > 1 else None for window in windows
    ]
    for tokens in slices:
        inside_U = (tokens_U >= tokens.start) & (tokens_U < tokens.stop)
        logit_grads = []
        for window, normaliser_BT, (grad_BTD, grad_BTU) in zip(
            windows, normalisers, grads, strict=True
        ):
            grad_BTS, _ = layer.gradients(window, tokens, normaliser_BT)
            grad_BTD[:] += layer.back(grad_BTS, tokens)
            grad_BTU[:, :, inside_U] = grad_BTS[:, :, tokens_U[inside_U] - tokens.start]
            logit_grads.append(grad_BTS)
        _add_parameters(layer, windows, names, totals, logit_grads, tokens.start)
    return [(grad_BTD.to(dtype), grad_BTU) for grad_BTD, grad_BTU in grads]


def _normaliser(layer: OutputLayer, window: Window, slices: Sequence[slice]) -> torch.Tensor:
    """Compute the log-sum-exp of all logits, [B, T], one slice of the vocabulary at a time."""
    parts = []
    for tokens in slices:
        _, logits = layer.logits(window.hidden_BTD, tokens)
        parts.append((widen(logits) / layer.temperature).logsumexp(dim=-1))
    return torch.stack(parts).logsumexp(dim=0)


def _add_parameters(
    layer: OutputLayer,
    windows: Sequence[Window],
    names: dict[int, str],
    totals: Accumulator,
    logit_grads: Sequence[torch.Tensor],
    first_row: int,
) -> None:
    """Add the gradients of the layer's weight and bias, if these are trainable, to the totals.

    Args:
        layer, windows, names, totals: see `add_output_layer`.
        logit_grads: for each window, the gradients at the logits of a slice of the vocabulary.
        first_row: first token of the slice.
    """
    weight, bias = layer.head.weight, layer.head.bias
    if (name := names.get(id(weight))) is not None:
        pairs = zip(logit_grads, (window.hidden_BTD for window in windows), strict=True)
        totals.add_outer(name, weight.shape, list(pairs), first_row)
    if bias is not None and (name := names.get(id(bias))) is not None:
        sums_NV = torch.cat([grad_NTV.sum(dim=1) for grad_NTV in logit_grads])
        totals.add_flat(name, bias.shape, sums_NV, first_row)
