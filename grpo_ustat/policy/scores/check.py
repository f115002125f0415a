"""Check that the rules of `layers` give the same gradients as plain autograd on a user's model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.quantized import unpacked
from grpo_ustat.policy.scores.backward import completion_scores, trainable
from grpo_ustat.policy.scores.images import same_positions
from grpo_ustat.policy.scores.one_by_one import logprob

# Largest relative difference, by the type of the parameters; 0.1 for other types. The tolerance for
# float64 is wide, because transformers computes norms and rotations of float64 models in float32.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
# Temperature of the check. It is so high that no token is nearly certain.
FLAT = 10.0
# Number of parameter entries whose gradients are compared at a time.
PARAMETERS_AT_ONCE = 2**28


def check_scores(
    model: PreTrainedModel,
    input_ids_BT: torch.Tensor,
    attention_mask_BT: torch.Tensor,
    completion_mask_BT: torch.Tensor,
    *,
    contiguous: bool = False,
    images: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Raise an error if scores of these completions differ from gradients by plain autograd.

    A weighted sum of the scores is compared, for each parameter. They differ if a layer uses its
    inputs in a way that its rule in `layers` does not cover. The weights are unequal, so that
    swapped rows are detected too. The temperature is high: otherwise, the scores of a peaked policy
    would consist mostly of the rounding error of 1 - p, where p is a token's probability.

    Args:
        model, input_ids_BT, attention_mask_BT, completion_mask_BT: see `completion_scores`.
        contiguous, images: see `completion_scores`. If there are images, all rows must belong to
            one prompt.
    """
    rows = (input_ids_BT, attention_mask_BT, completion_mask_BT)
    weights = torch.linspace(0.5, 1.5, len(input_ids_BT), dtype=torch.float64)
    parameters = trainable(model)
    norms, errors = [], []
    for group in _compared_together(parameters):
        with _only_trainable(parameters, group), unpacked(model), same_positions(model):
            gradients = completion_scores(
                model, *rows, weights_KB=weights[None], temperature=FLAT, contiguous=contiguous,
                images=images,
            ).gradients_K[0]  # fmt: skip
            logprobs = (
                weight * logprob(model, ids[mask.bool()], completion[mask.bool()], FLAT, images)
                for weight, ids, mask, completion in zip(weights.tolist(), *rows, strict=True)
            )
            plain = torch.autograd.grad(
                cast(torch.Tensor, sum(logprobs)),
                [p for _, p in group],
                allow_unused=True,
                materialize_grads=True,
            )
        for (name, _), grad in zip(group, plain, strict=True):
            norms.append(_norm(grad))
            errors.append(_norm(gradients.pop(name).sub_(grad)))
    total, worst = torch.stack(norms).norm(), int(torch.stack(errors).argmax())
    if errors[worst] > TOLERANCE.get(parameters[0][1].dtype, 0.1) * total:
        raise ConfigError(
            f"the gradient of {parameters[worst][0]} differs from that of plain autograd by "
            f"{errors[worst]:.3g}; the norm of the whole gradient is {total:.3g}: freeze this "
            f"parameter (requires_grad=False), or report the model class {type(model).__name__}"
        )


def _compared_together(parameters: list[tuple[str, nn.Parameter]]) -> Iterator[list]:
    """Divide parameters into lists with at most PARAMETERS_AT_ONCE entries each.

    A parameter with more entries is in a list of its own.
    """
    group, entries = [], 0
    for name, parameter in parameters:
        if group and entries + parameter.numel() > PARAMETERS_AT_ONCE:
            yield group
            group, entries = [], 0
        group.append((name, parameter))
        entries += parameter.numel()
    yield group


@contextmanager
def _only_trainable(parameters: list[tuple[str, nn.Parameter]], some: list) -> Iterator[None]:
    """Freeze all trainable parameters except `some` within the block."""
    others = {name for name, _ in parameters} - {name for name, _ in some}
    for name, parameter in parameters:
        parameter.requires_grad_(name not in others)
    try:
        yield
    finally:
        for _, parameter in parameters:
            parameter.requires_grad_(True)


def _norm(values: torch.Tensor) -> torch.Tensor:
    """Return the Euclidean norm of all entries, in float64."""
    return torch.linalg.vector_norm(values, dtype=torch.float64)
