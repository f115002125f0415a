"""Gradients of the output layer's parameters for each completion, and gradients at its input.

All logits of a batch are computed at once if they fit into `LOGIT_BYTES`. Otherwise they are
computed in chunks of rows or of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from grpo_ustat.policy.limits import LOGIT_BYTES
from grpo_ustat.policy.logprobs import widen
from grpo_ustat.policy.output_layer import OutputLayer, Window
from grpo_ustat.policy.scores.accumulate import Accumulator

Gradients = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""For each window, the gradients at the hidden states, [B, T, D], and at some logits, [B, T, U].

D is the hidden size. The logits are those of U chosen tokens of the vocabulary.
"""


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
        logits of `tokens_U`, [B, T, U].
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
            for index in torch.arange(len(grad_BTD)).split(_rows(window, budget // vocabulary)):
                part, columns = window.part(index)
                grad_BTD[index, columns] = layer.through(part)
        return [(grad_BTD.to(dtype), grad_BTU) for grad_BTD, grad_BTU in grads]
    add = partial(_add_parameters, layer, names=names, totals=totals)
    if sum(window.mask_BT.numel() for window in windows) * vocabulary <= budget:
        _all_logits(layer, windows, grads, tokens_U, add)
    elif totals.gram_BB is None:
        _by_rows(layer, windows, grads, tokens_U, add, budget // vocabulary)
    else:
        # Inner products of all pairs of rows need all rows at once.
        _by_tokens(layer, windows, grads, tokens_U, add, budget)
    return [(grad_BTD.to(dtype), grad_BTU) for grad_BTD, grad_BTU in grads]


def _all_logits(
    layer: OutputLayer,
    windows: Sequence[Window],
    grads: Gradients,
    tokens_U: torch.Tensor,
    add: Callable[..., None],
) -> None:
    """Fill `grads`, with the gradients at all logits in memory at once."""
    logit_grads = [layer.gradients(window)[0] for window in windows]
    for grad_BTV, (grad_BTD, grad_BTU) in zip(logit_grads, grads, strict=True):
        grad_BTD[:] = layer.back(grad_BTV)
        grad_BTU[:] = grad_BTV[:, :, tokens_U]
    add(windows, logit_grads=logit_grads)


def _by_rows(
    layer: OutputLayer,
    windows: Sequence[Window],
    grads: Gradients,
    tokens_U: torch.Tensor,
    add: Callable[..., None],
    most: int,
) -> None:
    """Fill `grads` in chunks of rows of similar length, with at most `most` tokens in a chunk."""
    start = 0
    for window, (grad_BTD, grad_BTU) in zip(windows, grads, strict=True):
        order = window.mask_BT.sum(dim=1).argsort()
        for index in order.split(_rows(window, most)):
            part, columns = window.part(index)
            grad_NTV, _ = layer.gradients(part)
            grad_BTD[index, columns] = layer.back(grad_NTV)
            grad_BTU[index, columns] = grad_NTV[:, :, tokens_U]
            add([part], logit_grads=[grad_NTV], rows=start + index)
        start += len(order)


def _by_tokens(
    layer: OutputLayer,
    windows: Sequence[Window],
    grads: Gradients,
    tokens_U: torch.Tensor,
    add: Callable[..., None],
    budget: int,
) -> None:
    """Fill `grads` in chunks of the vocabulary, with at most `budget` logits in a chunk.

    A softmax needs the log-sum-exp of all logits, so the logits are computed twice: first for the
    log-sum-exp, then for the gradients.
    """
    vocabulary = layer.head.weight.shape[0]
    step = max(1, budget // sum(window.mask_BT.numel() for window in windows))
    slices = [slice(low, min(low + step, vocabulary)) for low in range(0, vocabulary, step)]
    normalisers = [_normaliser(layer, window, slices) for window in windows]
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
        add(windows, logit_grads=logit_grads, first_row=tokens.start)


def _rows(window: Window, positions: int) -> int:
    """Return the largest number of rows with at most `positions` tokens in all, but at least 1."""
    return max(1, positions // window.mask_BT.shape[1])


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
    *,
    names: dict[int, str],
    totals: Accumulator,
    logit_grads: Sequence[torch.Tensor],
    first_row: int = 0,
    rows: torch.Tensor | None = None,
) -> None:
    """Add the gradients of the layer's weight and bias, if these are trainable, to the totals."""
    weight, bias = layer.head.weight, layer.head.bias
    if (name := names.get(id(weight))) is not None:
        pairs = zip(logit_grads, (window.hidden_BTD for window in windows), strict=True)
        totals.add_outer(name, weight.shape, list(pairs), first_row, rows)
    if bias is not None and (name := names.get(id(bias))) is not None:
        sums_NV = torch.cat([grad_NTV.sum(dim=1) for grad_NTV in logit_grads])
        totals.add_flat(name, bias.shape, sums_NV, first_row, rows)
