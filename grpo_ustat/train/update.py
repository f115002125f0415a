"""Updates of the policy: gradients of the objective, and steps of the optimizer.

Each rank has complete groups. Without FSDP2, ranks communicate only after their backward passes, so
they can have different numbers of passes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import gather_object

from grpo_ustat.draws import generator
from grpo_ustat.estimators.row_weights import rows_that_count, token_weights
from grpo_ustat.policy.adapters import recomputing
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.output_layer import Head, Window
from grpo_ustat.policy.prompt_sharing import (
    ContiguousReader,
    FullReader,
    Reader,
    SharedPromptReader,
)
from grpo_ustat.records import Rollouts
from grpo_ustat.terminal.progress import Progress
from grpo_ustat.train import fsdp2
from grpo_ustat.train import objective as objectives
from grpo_ustat.train.batch import gather_by_prompt
from grpo_ustat.train.context import Batch, TrainContext
from grpo_ustat.train.micro_batches import plan
from grpo_ustat.train.objective import Part

# Entropies that differ by at most this many nats count as equal. Completions that begin with the
# same tokens have the same entropies at these tokens, but rounding makes them differ slightly.
TIE = 1e-6


@dataclass(frozen=True)
class FixedLogprobs:
    """Log-probabilities of this rank's N completions that stay fixed during a step's updates.

    Values are 0 on padding. A field is None if the objective does not need it.
    """

    # Log-probabilities under the policy that sampled the completions.
    old_NT: torch.Tensor | None = None
    # Log-probabilities under the reference model.
    reference_NT: torch.Tensor | None = None


@dataclass(frozen=True)
class Minibatch:
    """Completions of one update."""

    # Flat indices p*G + i, among this rank's completions, of those in the update.
    index: np.ndarray
    # Weight w_i of each completion of this rank in the objective, 0 for excluded completions; see
    # `estimators.row_weights.token_weights`.
    weight_N: np.ndarray
    # Number n of completions of all ranks that count in the update.
    num_rollouts: int


@dataclass
class UpdateStats:
    """Measurements of a step's updates on this rank."""

    # Sums of `objective.diagnostics`, and two numbers of completions: `rows` counts all completions
    # of the updates, and `skipped` those that add exactly 0 to the gradient.
    sums: Counter = field(default_factory=Counter)
    # Absolute differences between the trainer's and the sampler's log-probabilities.
    gap: list[np.ndarray] = field(default_factory=list)


def fixed_logprobs(run: TrainContext, rollouts: Rollouts) -> FixedLogprobs:
    """Compute log-probabilities under the policy before any update, and under the reference model.

    Each is computed only if the step needs it. The reference model is a frozen copy of the first
    policy, or the policy without its adapters.
    """
    objective, index = run.config.objective, np.arange(rollouts.lengths_PG.size)
    old = reference = None
    if objectives.needs_old(objective, run.config.budget.rollouts):
        old = token_logprobs(run, run.policy, rollouts, index)
    if objective.beta:
        model: Any = run.policy.model
        with nullcontext() if run.reference else model.disable_adapter():
            reference = token_logprobs(run, run.reference or run.policy, rollouts, index)
    return FixedLogprobs(old, reference)


def penalised_rewards(run: TrainContext, batch: Batch, fixed: FixedLogprobs) -> np.ndarray:
    """Return the rewards from which advantages are computed, [P, G] for all prompts.

    If the objective puts the KL penalty into the reward, they are `Z - beta sum_t K1_t`, with the
    reward Z of the task. K1 is the log-ratio of policy and reference model at a token. Otherwise,
    they are Z.
    """
    objective = run.config.objective
    if not objective.beta or objective.kl_in != "reward":
        return batch.rewards_PG
    assert fixed.old_NT is not None and fixed.reference_NT is not None
    own_k1_NT = (fixed.old_NT - fixed.reference_NT).double().cpu().numpy()
    own_k1_PG = own_k1_NT.sum(axis=1).reshape(batch.own_rollouts.lengths_PG.shape)
    return batch.rewards_PG - objective.beta * np.array(gather_by_prompt(own_k1_PG))


def update(
    run: TrainContext, batch: Batch, advantage_PG: np.ndarray, fixed: FixedLogprobs, step: int
) -> tuple[float, UpdateStats]:
    """Make all updates of a step; each update is one optimizer step on a minibatch.

    Args:
        run: training run; the parameters of its policy are changed.
        batch: completions of the step.
        advantage_PG: advantages of the completions of all ranks.
        fixed: log-probabilities of this rank's completions before the step.
        step: number of the step, which determines the random order of minibatches.

    Returns:
        Norm of the last update's gradient before clipping, and measurements of the step.

    Raises:
        FloatingPointError: If a gradient is not finite; that update is not applied.
    """
    norm, stats, own_advantage_PG = 0.0, UpdateStats(), run.own_rows(advantage_PG)
    lengths_PG = counted_lengths(run, batch)
    with fsdp2.release_full_copy(run):
        for minibatch in minibatches(run, lengths_PG, step, batch.rewards_PG):
            accumulate_gradient(run, batch.own_rollouts, own_advantage_PG, minibatch, fixed, stats)
            grads = sum_gradients(run)
            norm = float(fsdp2.full_tensor(torch.nn.utils.get_total_norm(grads)))
            if not math.isfinite(norm):
                raise FloatingPointError(f"the gradient's norm is {norm}: lower learning_rate")
            if run.config.max_grad_norm is not None and norm > run.config.max_grad_norm:
                scale = run.config.max_grad_norm / norm
                torch._foreach_mul_(grads, scale)  # pyright: ignore[reportPrivateImportUsage]
            run.optimizer.step()
            run.optimizer.zero_grad()
    return norm, stats


def counted_lengths(run: TrainContext, batch: Batch) -> np.ndarray:
    """Return the number of tokens in each completion of all ranks, [P, G].

    If `mask_truncated_completions` is set, a truncated completion has length 0, which excludes it.
    """
    if run.config.objective.mask_truncated_completions:
        return np.where(batch.ended_PG, batch.lengths_PG, 0)
    return batch.lengths_PG


def minibatches(
    run: TrainContext,
    lengths_PG: np.ndarray,
    step: int,
    rewards_PG: np.ndarray | None = None,
) -> Iterator[Minibatch]:
    """Yield the minibatches of a step's updates, in order.

    A minibatch consists of complete groups. If a step has several minibatches, the groups are
    shuffled in each iteration over the batch. For the loss type `bnpo`, the rows of an update are
    assigned to micro-batches at random, as in TRL. Both random orders are the same for any number
    of ranks.

    Args:
        run: training run.
        lengths_PG: number of tokens in each completion; see `counted_lengths`.
        step: number of the step, which determines the random orders.
        rewards_PG: rewards of the completions of all ranks. An objective that filters rows needs
            them; see `estimators.row_weights.rows_that_count`.
    """
    config, objective = run.config, run.config.objective
    count, size = config.prompts_per_step, config.group_size
    per_update = objective.update_size(config.budget.rollouts) // size
    rank, world = run.accelerator.process_index, run.accelerator.num_processes
    for iteration in range(objective.num_iterations):
        order = np.arange(count)
        if per_update < count:
            order = generator(config.seed, "minibatches", step, str(iteration)).permutation(count)
        for first in range(0, count, per_update):
            prompts = order[first : first + per_update]
            lengths_N = lengths_PG[prompts].ravel()
            rows = np.arange(len(lengths_N))
            if objective.loss_type == "bnpo":
                key = f"{iteration}.{first}"
                rows = generator(config.seed, "micro_batches", step, key).permutation(rows)
            counts_N = None
            if objective.rows.couples:
                assert rewards_PG is not None
                counts_N = rows_that_count(objective.rows, rewards_PG[prompts]).ravel()
            weight_N = token_weights(
                objective.loss_type, lengths_N, config.max_completion_length,
                objective.micro_batch_size, rows, counts_N,
            )  # fmt: skip
            weight_PG = np.zeros(lengths_PG.shape)
            weight_PG[prompts] = weight_N.reshape(-1, size)
            own_prompts = np.sort(prompts[prompts % world == rank]) // world
            index = (own_prompts[:, None] * size + np.arange(size)).ravel()
            counted = len(rows) if counts_N is None else int(counts_N.sum())
            yield Minibatch(index, run.own_rows(weight_PG).ravel(), counted)


def trainable(policy: Policy) -> list[torch.nn.Parameter]:
    """Return the trained parameters without duplicates."""
    return [p for p in policy.model.parameters() if p.requires_grad]


def sum_gradients(run: TrainContext) -> list[torch.Tensor]:
    """Sum the gradients over ranks in place and return them.

    They are not averaged, because each rank has already divided by the number of completions of all
    ranks. Under FSDP2, the gradient of each shard is already summed over ranks.
    """
    grads = []
    for parameter in trainable(run.trained_policy):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grads.append(parameter.grad)
    if run.accelerator.num_processes > 1 and run.sharded_policy is None:
        pending = [dist.all_reduce(grad, async_op=True) for grad in grads]
        for handle in pending:
            if handle is not None:
                handle.wait()
    return grads


def accumulate_gradient(
    run: TrainContext,
    rollouts: Rollouts,
    advantage_PG: np.ndarray,
    minibatch: Minibatch,
    fixed: FixedLogprobs,
    stats: UpdateStats,
) -> None:
    """Set `grad` to the negated gradient of the objective on this rank's completions.

    Completions that add exactly 0 to the gradient are skipped. If memory runs out, the gradient is
    computed again with smaller micro-batches; under FSDP2, an error is raised instead.
    """
    index = minibatch.index[minibatch.weight_N[minibatch.index] > 0]
    chosen_NT = highest_entropies(run, rollouts, index)
    if objectives.skips_zero_variance(run.config.objective):
        index = index[advantage_PG.ravel()[index] != 0]
    stats.sums.update(rows=len(minibatch.index), skipped=len(minibatch.index) - len(index))

    def gradient_within_budget() -> UpdateStats:
        """Set the gradient to 0 and compute it with the current token budget."""
        run.optimizer.zero_grad()
        with recomputing(run.trained_policy.model):
            return backward_parts(run, rollouts, advantage_PG, index, minibatch, fixed, chosen_NT)

    if run.sharded_policy is None:
        part_stats = run.token_budget.attempt(gradient_within_budget)
    else:
        part_stats = fsdp2.attempt_once(run, gradient_within_budget)
    stats.sums.update(part_stats.sums)
    stats.gap += part_stats.gap


def backward_parts(
    run: TrainContext,
    rollouts: Rollouts,
    advantage_PG: np.ndarray,
    index: np.ndarray,
    minibatch: Minibatch,
    fixed: FixedLogprobs,
    chosen_NT: torch.Tensor | None,
) -> UpdateStats:
    """Add the negated gradient of the completions in `index` to `grad`, one part at a time.

    First, the objective is differentiated with respect to each token's log-probability and entropy.
    These derivatives are then propagated through the output layer and the rest of the model.
    """
    config, objective = run.config, run.config.objective
    advantage_N = torch.from_numpy(advantage_PG.ravel())
    weight_N = torch.from_numpy(minibatch.weight_N)
    stats, progress = UpdateStats(), Progress("updating", len(index))
    for reader, parts in readers(run, run.trained_policy, rollouts, index):
        for index_B in parts:
            window = reader.window(index_B)
            if len(index_B):
                # Under FSDP2, a part can be empty. This rank then skips the block, but still takes
                # part in the communication of the forward and backward pass.
                head = Head(reader.policy, reader.output, config.temperature)
                dtype = torch.promote_types(window.hidden_BTD.dtype, torch.float32)
                mask_BT = window.mask_BT.to(dtype)
                part = Part(
                    advantage_B=advantage_N[index_B].to(mask_BT),
                    mask_BT=mask_BT,
                    old_BT=rows_like(mask_BT, fixed.old_NT, index_B),
                    reference_BT=rows_like(mask_BT, fixed.reference_NT, index_B),
                    weight_B=weight_N[index_B].to(mask_BT),
                    num_rollouts=minibatch.num_rollouts,
                    chosen_BT=rows_like(mask_BT, chosen_NT, index_B),
                )
                logprob_BT = torch.zeros_like(mask_BT)
                if objectives.depends_on_logprobs(objective, part):
                    logprob_BT = head.logprobs(window)
                    stats.sums.update(objectives.diagnostics(objective, logprob_BT, part))
                factor_BT, entropy_BT = objectives.factors(objective, logprob_BT, part)
                descent_entropy_BT = None if entropy_BT is None else -entropy_BT
                logprob_BT = head.backward(window, -factor_BT, descent_entropy_BT)
                if part.old_BT is None and rollouts.logprobs_PGT is not None:
                    stats.gap.append(logprob_gap(rollouts, index_B, logprob_BT, factor_BT))
            # Free the window and its graph before the next window is read.
            del window
            progress.add(len(index_B))
        reader.backward()
        # Free the reader and the graph of its prompts before the next prompts are read.
        del reader
    return stats


def readers(
    run: TrainContext, policy: Policy, rollouts: Rollouts, index: np.ndarray
) -> Iterator[tuple[Reader | fsdp2.Fsdp2Reader, list[np.ndarray]]]:
    """Yield, for each micro-batch, a reader of its prompts and the indices of its completions.

    The indices are divided into parts, which the caller passes to `reader.window` one by one.
    """
    if policy is run.sharded_policy:
        yield from fsdp2.rounds(run, rollouts, index)
        return
    device, tokens = policy.model.device.type, run.token_budget.tokens
    for micro_batch in plan(rollouts, index, tokens, run.share_prompts, device):
        completions = sum(map(len, micro_batch.parts))
        # Sharing saves time only if a prompt has several completions.
        several = len(micro_batch.prompts) < completions
        kind = ContiguousReader if run.contiguous else FullReader
        if run.share_prompts and several:
            kind = SharedPromptReader
        yield kind(policy, rollouts, micro_batch.prompts), micro_batch.parts


def rows_like(
    mask_BT: torch.Tensor, values_NT: torch.Tensor | None, index_B: np.ndarray
) -> torch.Tensor | None:
    """Return some completions' rows of `values_NT`, in the mask's width and type, or None."""
    return None if values_NT is None else values_NT[index_B, : mask_BT.shape[1]].to(mask_BT)


def logprob_gap(
    rollouts: Rollouts, index_B: np.ndarray, logprob_BT: torch.Tensor, factor_BT: torch.Tensor
) -> np.ndarray:
    """Return absolute differences, in nats, of the trainer's and the sampler's log-probabilities.

    Only tokens with a nonzero factor in the gradient are included, because the trainer computes no
    log-probabilities of other tokens.
    """
    assert rollouts.logprobs_PGT is not None
    used_BT = (factor_BT != 0).cpu().numpy()
    sampler_NT = rollouts.logprobs_PGT.reshape(-1, rollouts.logprobs_PGT.shape[-1])
    sampler_BT = sampler_NT[index_B, : used_BT.shape[1]]
    return np.abs(sampler_BT - logprob_BT.double().cpu().numpy())[used_BT]


def highest_entropies(
    run: TrainContext, rollouts: Rollouts, index: np.ndarray
) -> torch.Tensor | None:
    """Mark the tokens with the highest entropies under the current policy.

    A token is marked if its entropy is at or above the quantile `1 - top_entropy_quantile` of the
    entropies of all tokens in the update.

    Args:
        run: training run.
        rollouts: completions of this rank.
        index: indices of this rank's completions that count in the update.

    Returns:
        Mask [N, T] of this rank's N completions, or None if all tokens are used.
    """
    share = run.config.objective.top_entropy_quantile
    if share == 1:
        return None
    entropy_NT = read_tokens(run, run.policy, rollouts, index, Head.entropies)
    mask_NT = torch.zeros_like(entropy_NT, dtype=torch.bool)
    mask_PGT = torch.from_numpy(rollouts.mask_PGT).to(entropy_NT.device)
    mask_NT[index] = mask_PGT.flatten(0, 1)[index]
    own_entropies = entropy_NT[mask_NT].double().cpu().numpy()
    entropies = np.concatenate(gather_object([own_entropies]))
    if not len(entropies):
        return mask_NT
    threshold = np.quantile(entropies, 1 - share)
    return mask_NT & (entropy_NT.double() >= threshold - TIE)


def token_logprobs(
    run: TrainContext, policy: Policy, rollouts: Rollouts, index: np.ndarray
) -> torch.Tensor:
    """Compute log-probabilities of the tokens of this rank's completions under a policy.

    The result has shape [N, T]. It is 0 on padding and for completions that are not in `index`.
    """
    return read_tokens(run, policy, rollouts, index, Head.logprobs)


def read_tokens(
    run: TrainContext,
    policy: Policy,
    rollouts: Rollouts,
    index: np.ndarray,
    of_window: Callable[[Head, Window], torch.Tensor],
) -> torch.Tensor:
    """Apply a function that returns one number per token to this rank's completions.

    The result has shape [N, T]. It is 0 on padding and for completions that are not in `index`.
    """
    shape = (rollouts.lengths_PG.size, rollouts.mask_PGT.shape[-1])

    @torch.no_grad()
    def read_within_budget() -> torch.Tensor:
        """Compute the values, [N, T], with the current token budget."""
        result_NT, progress = None, Progress("reading", len(index))
        for reader, parts in readers(run, policy, rollouts, index):
            for index_B in parts:
                window = reader.window(index_B)
                value_BT = of_window(Head(policy, reader.output, run.config.temperature), window)
                if result_NT is None:
                    result_NT = value_BT.new_zeros(shape)
                result_NT[index_B, : value_BT.shape[1]] = value_BT
                progress.add(len(index_B))
            del reader, window
        return torch.zeros(shape, device=policy.model.device) if result_NT is None else result_NT

    return run.token_budget.attempt(read_within_budget)
