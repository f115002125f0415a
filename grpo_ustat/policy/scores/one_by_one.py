"""Backpropagation of one completion at a time, which is slow but valid for any parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from grpo_ustat.policy.logprobs import widen
from grpo_ustat.policy.scores.accumulate import Accumulator
from grpo_ustat.policy.scores.images import row_inputs

# Largest size in bytes of the gradients of all completions in memory at a time.
SLOT_BYTES = 2**28


def one_by_one(
    model,
    rest: list[tuple[str, nn.Parameter]],
    rows: tuple,
    temperature: float,
    totals: Accumulator,
    images: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Compute the gradients of some parameters for one completion after another.

    This is for the parameters of modules whose per-completion gradients have no closed form here;
    see `scores.layers`.

    Args:
        model: causal language model.
        rest: names and values of these parameters.
        rows: input ids, attention mask and completion mask, each [B, T].
        temperature: temperature that divides the logits.
        totals: accumulator to which the gradients are added.
        images: model inputs from the images that all rows share; see `row_inputs`.
    """
    batch = len(rows[0])
    for group in _groups(rest, batch):
        slots = [widen(p.new_empty((batch, stop - start))) for _, p, start, stop in group]
        for i in range(batch):
            ids, attention, completion = (x[i] for x in rows)
            real = attention.bool()
            total = logprob(model, ids[real], completion[real], temperature, images)
            grads = torch.autograd.grad(
                total, [p for _, p, _, _ in group], allow_unused=True, materialize_grads=True
            )
            for slot, grad, (_, _, start, stop) in zip(slots, grads, group, strict=True):
                slot[i] = grad.flatten()[start:stop]
        for slot, (name, p, start, _) in zip(slots, group, strict=True):
            totals.add_flat(name, p.shape, slot, start)


def _groups(rest: list[tuple[str, nn.Parameter]], batch: int) -> Iterator[list[tuple]]:
    """Divide parameters into slices (name, parameter, start, stop), and yield lists of slices.

    The gradients of all `batch` completions in one list's slices fit into `SLOT_BYTES`.
    """
    room, group, used = max(1, SLOT_BYTES // (4 * batch)), [], 0
    for name, p in rest:
        for start in range(0, p.numel(), room):
            stop = min(start + room, p.numel())
            if used + stop - start > room:
                yield group
                group, used = [], 0
            group.append((name, p, start, stop))
            used += stop - start
    if group:
        yield group


def logprob(
    model,
    ids_T: torch.Tensor,
    completion_T: torch.Tensor,
    temperature: float,
    images: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute the log-probability of one unpadded completion, with its autograd graph.

    Args:
        model: causal language model.
        ids_T: token ids of the prompt and the completion.
        completion_T: weights of the tokens' log-probabilities; 0 for prompt tokens.
        temperature: temperature that divides the logits.
        images: model inputs from the prompt's images; see `row_inputs`.
    """
    inputs = row_inputs(images or {}, torch.ones_like(ids_T)[None], model.dtype)
    logits = model(input_ids=ids_T[None], use_cache=False, **inputs).logits[0, :-1]
    logprobs = (widen(logits) / temperature).log_softmax(dim=-1)
    chosen = logprobs.gather(1, ids_T[1:, None])[:, 0]
    return (chosen * completion_T[1:]).sum()
