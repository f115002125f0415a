r"""Rules that compute a layer's part of a score from its input and the gradient at its output.

The score of a completion is the gradient of its log-probability in all trainable parameters. For
completion i and token t, a_it is the layer's input, and b_it is the gradient at its output.

    Linear, Conv1D    dW_i = sum_t b_it a_it'     bias    sum_t b_it
    norms             dw_i = sum_t b_it * xhat_it, for the outputs `w * xhat` and `(1 + w) * xhat`
                      (xhat is the normalised input)
    embedding         dE_i = sum_t c e_{x_t} b_it', c the factor of a scaled embedding
                      (e_v is the unit vector of token v)

If a layer is called twice, or if two layers share a weight, the weight's gradient is the sum of two
parts. The parts are added before norms are computed. `one_by_one` computes the gradients of
parameters for which there is no rule here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from grpo_ustat.policy.logprobs import widen
from grpo_ustat.policy.precision import full_products
from grpo_ustat.policy.scores.accumulate import Accumulator, Factors

# Largest size in bytes of the embedding gradients in memory at a time.
EMBEDDING_BYTES = 2**25


@dataclass(frozen=True)
class Outer:
    """Gradients of a weight matrix, `sum_t left_it right_it'`, one for each completion i."""

    factors: Factors


@dataclass(frozen=True)
class Lookup:
    """Gradients of an embedding: for completion i, row v is the sum of grad_it over tokens v."""

    # Token ids.
    ids_BT: torch.Tensor
    # Gradients at the embedding's output.
    grads_BTD: torch.Tensor


@dataclass(frozen=True)
class Small:
    """Gradients of a bias or of a norm's weight, [B, *shape]."""

    gradient_B: torch.Tensor


Part = Outer | Lookup | Small
P = TypeVar("P", Outer, Lookup, Small)


def kind(module: nn.Module) -> str | None:
    """Return the name of the rule for a module's direct parameters; None if there is no rule."""
    forward, parameters = type(module).forward, dict(module.named_parameters(recurse=False))
    if not parameters:
        return None
    if isinstance(module, nn.Linear) and forward is nn.Linear.forward:
        return "linear"
    if isinstance(module, Conv1D):
        return "conv1d"
    if isinstance(module, nn.Embedding):
        plain = forward is nn.Embedding.forward or hasattr(module, "embed_scale")
        return "embedding" if plain and not module.scale_grad_by_freq else None
    if type(module).__name__.endswith("Norm") and set(parameters) <= {"weight", "bias"}:
        return "norm"
    return None


def looks_up_tokens(module: nn.Module) -> bool:
    """Return True for an embedding and for PEFT's wrapper of an embedding.

    PEFT's option `trainable_token_indices` wraps the embedding in a module that looks up all rows
    itself, so the embedding inside is never called.
    """
    trains_rows = hasattr(module, "trainable_tokens_delta")
    return isinstance(getattr(module, "base_layer", None) if trains_rows else module, nn.Embedding)


def parts(module: nn.Module, arguments: tuple, grads: torch.Tensor) -> Iterator[tuple[str, Part]]:
    """Yield each parameter's name in the module and its gradient for every completion.

    Args:
        module: module with a rule.
        arguments: arguments of the module's call, with completions along the first axis.
        grads: gradient at the module's output.
    """
    sort = kind(module)
    if sort == "embedding":
        assert isinstance(module, nn.Embedding)
        ids, scale = arguments[0], getattr(module, "embed_scale", None)
        if module.padding_idx is not None:
            # The gradient of the padding row is set to 0, as autograd does. Otherwise it could be
            # infinite: Gemma 3n computes a square root, whose derivative at a row of zeros is.
            grads = grads.masked_fill((ids == module.padding_idx)[..., None], 0)
        grads = grads if scale is None else grads * torch.as_tensor(scale).to(grads)
        yield "weight", Lookup(ids, grads)
        return
    if sort == "norm":
        yield from _norm(module, arguments, grads)
        return
    batch = len(arguments[0])
    inputs, grads = (x.reshape(batch, -1, x.shape[-1]) for x in (arguments[0], grads))
    straight = sort == "linear"
    yield "weight", Outer([(grads, inputs) if straight else (inputs, grads)])
    if module.bias is not None:
        yield "bias", Small(widen(grads).sum(dim=1))


def _norm(module: nn.Module, arguments: tuple, grads: torch.Tensor) -> Iterator[tuple[str, Part]]:
    """Yield each parameter's name in a norm and its gradients, [B, *shape].

    The output is linear in the weight. Its derivative is therefore the difference of the outputs
    with all weights 1 and with all weights 0.
    """
    parameters = dict(module.named_parameters(recurse=False))

    def output(value: float) -> torch.Tensor:
        chosen = {name: torch.zeros_like(p) for name, p in parameters.items()}
        if "weight" in parameters:
            chosen["weight"] = torch.full_like(parameters["weight"], value)
        return torch.func.functional_call(module, chosen, arguments)

    batch = grads.shape[0]
    for name, parameter in parameters.items():
        with torch.no_grad():
            change = widen(grads)
            if name == "weight":
                change = change * (output(1.0) - output(0.0))
        yield name, Small(change.reshape(batch, -1, *parameter.shape).sum(dim=1))


def joined(parts: list[Part]) -> Part | None:
    """Add up a parameter's parts from one pass; return None if their kinds differ."""
    if len(parts) == 1:
        return parts[0]
    if small := _all(Small, parts):
        return Small(cast(torch.Tensor, sum(part.gradient_B for part in small)))
    if outer := _all(Outer, parts):
        left, right = zip(*(part.factors[0] for part in outer), strict=True)
        return Outer([(torch.cat(left, dim=1), torch.cat(right, dim=1))])
    if lookups := _all(Lookup, parts):
        return Lookup(
            torch.cat([part.ids_BT for part in lookups], dim=1),
            torch.cat([part.grads_BTD for part in lookups], dim=1),
        )
    return None


def stacked(parts: Sequence[Part | None]) -> Part | None:
    """Concatenate a parameter's parts from several passes along the completions.

    The result is None if the kinds differ or if a pass has no part.
    """
    if len(parts) == 1:
        return parts[0]
    if small := _all(Small, parts):
        return Small(torch.cat([part.gradient_B for part in small]))
    if outer := _all(Outer, parts):
        return Outer([factors for part in outer for factors in part.factors])
    if lookups := _all(Lookup, parts):
        longest = max(part.ids_BT.shape[1] for part in lookups)
        ids, grads = [], []
        # Shorter parts are padded with gradients of 0. The id there does not matter, so the last
        # token is repeated.
        for part in lookups:
            more = longest - part.ids_BT.shape[1]
            ids.append(torch.cat([part.ids_BT, part.ids_BT[:, -1:].expand(-1, more)], dim=1))
            grads.append(torch.nn.functional.pad(part.grads_BTD, (0, 0, 0, more)))
        return Lookup(torch.cat(ids), torch.cat(grads))
    return None


def _all(cls: type[P], parts: Sequence[Part | None]) -> list[P]:
    """Return the parts if all are of the given kind, otherwise an empty list."""
    chosen = [part for part in parts if isinstance(part, cls)]
    return chosen if len(chosen) == len(parts) else []


def add(totals: Accumulator, name: str, shape: torch.Size, part: Part) -> None:
    """Add a parameter's gradients to the totals."""
    if isinstance(part, Outer):
        totals.add_outer(name, shape, part.factors)
    elif isinstance(part, Small):
        totals.add_flat(name, shape, part.gradient_B.flatten(1))
    else:
        for ids_U, dense in dense_rows(part):
            totals.add_rows(name, shape, ids_U, dense)


def dense_rows(part: Lookup) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the nonzero rows of an embedding's gradients in chunks.

    A chunk consists of the ids of U tokens, [U], and their rows of the gradients, [B, U, D].
    """
    unique, place_BT = part.ids_BT.unique(return_inverse=True)
    grads = widen(part.grads_BTD)
    batch, _, width = grads.shape
    step = max(1, EMBEDDING_BYTES // (4 * batch * width))
    for low in range(0, len(unique), step):
        ids_U = unique[low : low + step]
        sums = row_sums if grads.device.type == "cpu" else row_sums_of_products
        yield ids_U, sums(place_BT - low, grads, len(ids_U))


def row_sums(place_BT: torch.Tensor, grads_BTD: torch.Tensor, count: int) -> torch.Tensor:
    """Sum the gradients of tokens with equal index, for each completion.

    Args:
        place_BT: index of each token; those outside 0 to count - 1 are ignored.
        grads_BTD: gradient at each token.
        count: number of indices.

    Returns:
        Sums [B, count, D].
    """
    inside = (place_BT >= 0) & (place_BT < count)
    target = torch.where(inside, place_BT, 0)[:, :, None].expand_as(grads_BTD)
    empty = grads_BTD.new_zeros((len(grads_BTD), count, grads_BTD.shape[2]))
    return empty.scatter_add_(1, target, grads_BTD * inside[:, :, None])


def row_sums_of_products(
    place_BT: torch.Tensor, grads_BTD: torch.Tensor, count: int
) -> torch.Tensor:
    """Compute the same sums as `row_sums`, but by a matrix product, for use on a GPU.

    On a GPU, `scatter_add_` adds in an arbitrary order, so the rounding of its results differs
    between calls.
    """
    places_U = torch.arange(count, device=place_BT.device)
    at_BUT = (place_BT[:, None] == places_U[:, None]).to(grads_BTD)
    with full_products():
        return torch.bmm(at_BUT, grads_BTD)
