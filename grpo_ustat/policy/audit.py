"""Check that a trainer's applied gradient (`p.grad`) equals the gradient of its declared loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.applied_gradient import (
    FULL,
    NO_CAUSE,
    REDUCED,
    GradientAudit,
    advantages_by_baseline,
    agreement,
    cause_of,
    divided,
    other_losses,
    rounding,
    rows_text,
    without_cause,
)
from grpo_ustat.estimators.row_weights import Loss, row_weights, token_weights
from grpo_ustat.policy.memory import GRAPH_MEMORY_SHARE, free_bytes, score_bytes
from grpo_ustat.policy.scores.backward import completion_scores, parameter_sizes
from grpo_ustat.policy.scores.sketch import Sketch
from grpo_ustat.records import Array, BaselineContext, Integers, Mask

# Number of entries of the random projections (sketches) of gradients, from which the cause of a
# difference is found.
SKETCH = 16381


@dataclass(frozen=True)
class UpdateRows:
    """Rows of an update, and the weight of each row in the gradient of the declared loss.

    A row is a prompt with a completion. The score of a row is the gradient of the completion's
    log-probability.
    """

    # Token ids of prompts and completions.
    input_ids_BT: torch.Tensor
    # 1 on real tokens, 0 on padding.
    attention_mask_BT: torch.Tensor
    # 1 on the tokens whose log-probabilities the loss uses.
    completion_mask_BT: torch.Tensor
    # Weight W_i of each row. The declared gradient is `sum_i W_i s_i` with scores s_i; it points in
    # the direction in which the loss falls.
    weights_B: Array
    # Row weights of other losses, by name. If the applied gradient differs from the declared one,
    # it may be the gradient of one of these losses.
    others: Mapping[str, Array] = field(default_factory=dict[str, Array])

    @classmethod
    def of_loss(
        cls,
        loss: Loss,
        rewards_PG: Array,
        input_ids_BT: torch.Tensor,
        attention_mask_BT: torch.Tensor,
        completion_mask_BT: torch.Tensor,
        ended_PG: Mask | None = None,
    ) -> UpdateRows:
        """Return the rows with the weights that a loss gives them at the first update of a batch.

        Args:
            loss: declared loss.
            rewards_PG: rewards; row p G + i is completion i of prompt p.
            input_ids_BT, attention_mask_BT, completion_mask_BT: tokens of the B = P G rows.
            ended_PG: True for each completion that ended before the length limit; None if all did.
        """
        rewards_PG = np.asarray(rewards_PG, dtype=np.float64)
        if rewards_PG.ndim != 2 or rewards_PG.size != len(input_ids_BT):
            raise ConfigError(
                f"rewards of shape {rewards_PG.shape} for {len(input_ids_BT)} rows: give [P, G] "
                "with P G equal to the number of rows"
            )
        lengths_PG = completion_mask_BT.sum(dim=1).cpu().numpy().reshape(rewards_PG.shape)
        counted_N = loss.counted_lengths(lengths_PG, ended_PG).ravel()
        weight_N = token_weights(
            loss.loss_type, counted_N, loss.max_completion_length, loss.micro_batch_size
        )
        context = BaselineContext(lengths_PG=lengths_PG)
        advantage_N = {
            baseline: advantage_PG.ravel()
            for baseline, advantage_PG in advantages_by_baseline(loss, rewards_PG, context).items()
        }
        return cls(
            input_ids_BT, attention_mask_BT, completion_mask_BT,
            row_weights(loss, rewards_PG, context, ended_PG).sum(axis=0).ravel(),
            other_losses(loss, advantage_N, weight_N, counted_N),
        )  # fmt: skip

    def part(self, index: Integers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the ids and masks of the rows with these indices."""
        place = torch.as_tensor(index, device=self.input_ids_BT.device)
        tensors = (self.input_ids_BT, self.attention_mask_BT, self.completion_mask_BT)
        return tensors[0][place], tensors[1][place], tensors[2][place]


def audit(
    model: PreTrainedModel,
    applied_gradients: Mapping[str, torch.Tensor | None],
    rows: UpdateRows,
    *,
    temperature: float = 1.0,
    compute_dtype: torch.dtype | None = None,
    divisors: Mapping[str, int] | None = None,
    completions_at_once: int = 8,
) -> GradientAudit:
    """Compare the gradient of an update, before clipping, with the declared gradient.

    The comparison is valid for the first update of a batch, in which every importance ratio is 1.
    The declared gradient is computed in evaluation mode, so dropout is off. It is computed in the
    precision of the loss, because bfloat16 changes the gradients of a peaked policy noticeably. The
    modes of all modules and the gradients are restored at the end.

    Args:
        model: causal language model with the weights at which the gradient was computed.
        applied_gradients: gradients of the minimised loss as the optimizer receives them, after
            processes have summed or averaged them:
            `{name: p.grad for name, p in model.named_parameters()}`. Pass full gradients, not
            shards. None means a gradient of 0.
        rows: rows of the update, from all processes and all micro-batches.
        temperature: temperature that divides the logits in the loss.
        compute_dtype: autocast type in which the loss was computed; None for the precision of the
            parameters.
        divisors: numbers by which a trainer could by mistake divide the gradient twice or not at
            all, such as `{"gradient_accumulation_steps": 4}`. If the gradients differ by one of
            these factors, the result names it.
        completions_at_once: number of completions per forward and backward pass.
    """
    faults = [fault for name, by in (divisors or {}).items() for fault in divided(by, name)]
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    _check(parameters, applied_gradients)
    epsilon = epsilon_of(
        compute_dtype, *(p.dtype for p in parameters.values()),
        *(g.dtype for g in applied_gradients.values() if g is not None),
    )  # fmt: skip
    with evaluating(model, compute_dtype):
        declared: dict[str, torch.Tensor] = {}
        rows_sq = 0.0
        for part in _parts(np.flatnonzero(rows.weights_B), completions_at_once):
            weights = torch.from_numpy(rows.weights_B[None, part])
            scores = completion_scores(
                model, *rows.part(part), weights_KB=weights, temperature=temperature,
                by_layer=_by_layer(model, rows, part),
            )  # fmt: skip
            rows_sq += float(weights[0].square() @ scores.sq_norm_B.cpu())
            for name, value in scores.gradients_K[0].items():
                declared[name] = declared[name] + value if name in declared else value
        both, declared_sq, applied_sq = _products(parameters, applied_gradients, declared)
        comparison = agreement(both, declared_sq, applied_sq)
        tolerance = rounding(epsilon, declared_sq, rows_sq)
        if (settled := without_cause(comparison, tolerance, applied_sq != 0)) is not None:
            return settled
        del declared
        sketch = Sketch(parameter_sizes(model), SKETCH)
        scores_BR = np.concatenate(
            [
                completion_scores(
                    model, *rows.part(part), temperature=temperature, features=sketch,
                    by_layer=_by_layer(model, rows, part),
                ).features_BR.cpu().numpy()  # pyright: ignore[reportOptionalMemberAccess]
                for part in _parts(np.arange(len(rows.weights_B)), completions_at_once)
            ]
        )  # fmt: skip
    given = {
        name: -g for name, g in applied_gradients.items() if g is not None and name in parameters
    }
    applied_R = sketch.of(given).double().cpu().numpy()
    others = {name: weights_B @ scores_BR for name, weights_B in rows.others.items()}
    cause = cause_of(applied_R, rows.weights_B @ scores_BR, others, tolerance, faults) or rows_text(
        applied_R, scores_BR, rows.weights_B, tolerance
    )
    return GradientAudit(*comparison, comparison.difference, tolerance, cause or NO_CAUSE)


@contextmanager
def evaluating(model: nn.Module, compute_dtype: torch.dtype | None) -> Iterator[None]:
    """Set the model to evaluation mode within the block, and restore all modules' modes after it.

    Args:
        model: model that the block calls.
        compute_dtype: type for autocast. Autocast is on only if the type has 16 bits.
    """
    modes = {module: module.training for module in model.modules()}
    device = next(model.parameters()).device
    narrow = compute_dtype is not None and compute_dtype.itemsize < 4
    try:
        model.eval()
        with torch.enable_grad(), torch.autocast(device.type, compute_dtype, enabled=narrow):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def epsilon_of(*dtypes: torch.dtype | None) -> float:
    """Return the tolerated relative rounding error of computations in these types; skip None."""
    narrow = any(dtype is not None and dtype.itemsize < 4 for dtype in dtypes)
    tf32 = torch.cuda.is_available() and torch.backends.cuda.matmul.allow_tf32
    return REDUCED if narrow or tf32 else FULL


def _check(
    parameters: Mapping[str, nn.Parameter], applied: Mapping[str, torch.Tensor | None]
) -> None:
    """Raise an error if a parameter has no entry in `applied` or a gradient of another shape."""
    if missing := sorted(parameters.keys() - applied.keys()):
        raise ConfigError(
            f"{len(missing)} of {len(parameters)} trainable parameters have no entry in the "
            f"{len(applied)} applied gradients, such as {missing[0]}: pass "
            "{name: p.grad for name, p in model.named_parameters()} of the same model"
        )
    for name, parameter in parameters.items():
        gradient = applied[name]
        if gradient is not None and gradient.shape != parameter.shape:
            raise ConfigError(
                f"the applied gradient of {name} has shape {tuple(gradient.shape)} and the "
                f"parameter has {tuple(parameter.shape)}: pass full gradients, not shards"
            )


def _products(
    parameters: Mapping[str, nn.Parameter],
    applied: Mapping[str, torch.Tensor | None],
    declared: Mapping[str, torch.Tensor],
) -> tuple[float, float, float]:
    """Compute <p, d>, ||d||^2 and ||p||^2 over all parameters, summed in float64.

    p is the negative of the applied gradients, and d is the declared gradient.
    """
    both = declared_sq = applied_sq = 0.0
    for name in parameters:
        d = declared[name].double().flatten() if name in declared else None
        declared_sq += 0.0 if d is None else float(d @ d)
        if (gradient := applied[name]) is not None:
            p = gradient.detach().double().flatten()
            applied_sq += float(p @ p)
            both -= 0.0 if d is None else float(p.to(d.device) @ d)
    return both, declared_sq, applied_sq


def _parts(index: Integers, at_once: int) -> list[Integers]:
    """Split the indices into arrays of at most `at_once`; return [] if there are no indices."""
    return np.split(index, range(at_once, len(index), at_once)) if len(index) else []


def _by_layer(model: PreTrainedModel, rows: UpdateRows, part: Integers) -> bool:
    """Return True if autograd's graph of these rows would exceed its share of the free memory."""
    needed = score_bytes(model, len(part) * rows.input_ids_BT.shape[1], by_layer=False)
    return needed > GRAPH_MEMORY_SHARE * free_bytes(model.device)
