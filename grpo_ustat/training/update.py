"""From advantages to a step of the optimizer: the gradient of the objective, exactly.

Ranks hold whole groups and meet only where gradients are summed, so they may have unequal work.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from grpo_ustat.pace import Pace
from grpo_ustat.policy.head import Head
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.reading import Prompts, Whole
from grpo_ustat.policy.recomputing import recomputing
from grpo_ustat.records import Rollouts
from grpo_ustat.rollout.draws import generator
from grpo_ustat.training import objective as objectives
from grpo_ustat.training import sharded
from grpo_ustat.training.batch import Batch, gathered
from grpo_ustat.training.objective import Part
from grpo_ustat.training.plan import plan

if TYPE_CHECKING:
    from grpo_ustat.training.setup import Run


@dataclass(frozen=True)
class Constants:
    """What does not change during a step's updates, of this rank's N completions.

    Attributes:
        old_NT, reference_NT: log-probabilities under the policy that wrote the completions and
            under the reference model, None where the objective needs none.
    """

    old_NT: torch.Tensor | None = None
    reference_NT: torch.Tensor | None = None


@dataclass(frozen=True)
class Minibatch:
    """The completions of one update.

    Attributes:
        index: flat indices of this rank's completions in it.
        num_rollouts, num_tokens: of the whole update, on all ranks.
    """

    index: np.ndarray
    num_rollouts: int
    num_tokens: int


@dataclass
class Found:
    """What the updates of a step found: sums, on this rank.

    Attributes:
        sums: see `objective.diagnostics`; `skipped` and `rows` count completions.
        gap: absolute differences between the trainer's and the sampler's log-probabilities.
    """

    sums: Counter = field(default_factory=Counter)
    gap: list[np.ndarray] = field(default_factory=list)


def fixed_logprobs(run: Run, rollouts: Rollouts) -> Constants:
    """The log-probabilities that the step's updates and rewards need, before any update."""
    objective, index = run.config.objective, np.arange(rollouts.lengths_PG.size)
    old = reference = None
    if objectives.needs_old(objective, run.config.budget.rollouts):
        old = token_logprobs(run, run.policy, rollouts, index)
    if objective.beta:
        reference = reference_logprobs(run, rollouts)
    return Constants(old, reference)


def judged_rewards(run: Run, batch: Batch, constants: Constants) -> np.ndarray:
    """Rewards as the baseline sees them, [P, G] of all prompts: `Z - beta sum_t K1` where the
    penalty is in the reward.
    """
    objective = run.config.objective
    if not objective.beta or objective.kl_in != "reward":
        return batch.rewards_PG
    mine_NT = (constants.old_NT - constants.reference_NT).double().cpu().numpy()
    mine_PG = mine_NT.sum(axis=1).reshape(batch.rollouts.lengths_PG.shape)
    return batch.rewards_PG - objective.beta * np.array(gathered(run.accelerator, mine_PG))


def update(
    run: Run, batch: Batch, advantage_PG: np.ndarray, constants: Constants, step: int
) -> tuple[float, Found]:
    """All updates of a step on this rank's completions, whose advantages are given.

    Returns:
        The norm of the last update's gradient before clipping, and what was found.

    Raises:
        FloatingPointError: a gradient is not finite; the parameters are as before that update.
    """
    norm, found = 0.0, Found()
    with sharded.updating(run):
        for minibatch in minibatches(run, batch.lengths_PG, step):
            norm = apply_gradient(run, batch.rollouts, advantage_PG, minibatch, constants, found)
    return norm, found


def minibatches(run: Run, lengths_PG: np.ndarray, step: int) -> Iterator[Minibatch]:
    """The step's updates in order: whole groups, shuffled anew in each iteration.

    Args:
        run: whose objective says how many.
        lengths_PG: tokens of all ranks' completions.
        step: keys the order.
    """
    config, objective = run.config, run.config.objective
    count, size = config.prompts_per_step, config.group_size
    per_update = (objective.minibatch_size or config.budget.rollouts) // size
    rank, world = run.accelerator.process_index, run.accelerator.num_processes
    for iteration in range(objective.num_iterations):
        order = np.arange(count)
        if per_update < count:
            order = generator(config.seed, "minibatches", step, str(iteration)).permutation(count)
        for first in range(0, count, per_update):
            chosen = order[first : first + per_update]
            mine = np.sort(chosen[chosen % world == rank]) // world
            index = (mine[:, None] * size + np.arange(size)).ravel()
            yield Minibatch(index, len(chosen) * size, int(lengths_PG[chosen].sum()))


def apply_gradient(
    run: Run,
    rollouts: Rollouts,
    advantage_PG: np.ndarray,
    minibatch: Minibatch,
    constants: Constants,
    found: Found,
) -> float:
    """Ascend the objective on a minibatch by one optimizer step; returns the gradient's norm.

    Raises:
        FloatingPointError: the gradient is not finite; the parameters are left as they were.
    """
    accumulate_gradient(run, rollouts, advantage_PG, minibatch, constants, found)
    sum_over_ranks(run)
    grads = [p.grad for p in trainable(run.trained)]
    norm = float(sharded.whole(torch.nn.utils.get_total_norm(grads)))
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient's norm is {norm}: lower learning_rate")
    if run.config.max_grad_norm is not None and norm > run.config.max_grad_norm:
        torch._foreach_mul_(grads, run.config.max_grad_norm / norm)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return norm


def trainable(policy: Policy) -> list[torch.nn.Parameter]:
    """The parameters that are trained, each once."""
    return [p for p in policy.model.parameters() if p.requires_grad]


def sum_over_ranks(run: Run) -> None:
    """Add the ranks' gradients up: the divisors are those of the whole update already.

    Shards hold the sum by now.
    """
    for parameter in trainable(run.trained):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if run.accelerator.num_processes > 1 and run.sharded is None:
        pending = [dist.all_reduce(p.grad, async_op=True) for p in trainable(run.policy)]
        for handle in pending:
            handle.wait()


def accumulate_gradient(
    run: Run,
    rollouts: Rollouts,
    advantage_PG: np.ndarray,
    minibatch: Minibatch,
    constants: Constants,
    found: Found,
) -> None:
    """Put the objective's gradient on this rank's completions, negated for descent, into `grad`.

    Completions that add exactly nothing are skipped. Where memory runs out, the whole gradient is
    formed again from smaller passes.
    """
    weight_N, objective = advantage_PG.ravel(), run.config.objective
    index = minibatch.index
    if objectives.skips_silent(objective):
        index = index[weight_N[index] != 0]
    found.sums.update(rows=len(minibatch.index), skipped=len(minibatch.index) - len(index))

    def from_zero() -> Found:
        run.optimizer.zero_grad()
        here = Found()
        with recomputing(run.trained.model):
            _accumulate(run, rollouts, weight_N, index, minibatch, constants, here)
        return here

    if run.sharded is None:
        here = run.passes.attempt(from_zero)
    else:
        here = sharded.attempt_once(run, from_zero)
    found.sums.update(here.sums)
    found.gap += here.gap


def _accumulate(run: Run, rollouts, weight_N, index, minibatch, constants, found: Found) -> None:
    pace = Pace("updating", len(index))
    for reader, parts in _read(run, run.trained, rollouts, index):
        for index_B in parts:
            window = reader.window(index_B)
            if len(index_B):  # else another rank's work, in which this one takes part
                part = _part(run, rollouts, weight_N, index_B, minibatch, constants, window)
                head = Head(reader.policy, reader.output, run.config.temperature)
                _carry_back(run, rollouts, index_B, part, window, head, found)
            del window
            pace.add(len(index_B))
        reader.backward()
        del reader  # with the prompts' graph, before the next ones are read


def _carry_back(run, rollouts, index_B, part: Part, window, head: Head, found: Found) -> None:
    objective = run.config.objective
    logprob_BT = torch.zeros_like(part.mask_BT)
    if objectives.depends_on_logprobs(objective, part):
        logprob_BT = head.logprobs(window)
        found.sums.update(objectives.diagnostics(objective, logprob_BT, part))
    factor_BT, entropy_BT = objectives.factors(objective, logprob_BT, part)
    entropy_BT = None if entropy_BT is None else -entropy_BT
    logprob_BT = head.backward(window, -factor_BT, entropy_BT)
    if part.old_BT is None and rollouts.logprobs_PGT is not None:
        found.gap.append(_gap(rollouts, index_B, logprob_BT, factor_BT))


def _read(run: Run, policy: Policy, rollouts: Rollouts, index: np.ndarray):
    """Readers of prompts, each with the parts of completions that continue them."""
    if policy is run.sharded:
        yield from sharded.rounds(run, rollouts, index)
        return
    for chosen in plan(rollouts, index, run.passes.tokens, run.shares):
        shared = run.shares and len(chosen.prompts) < sum(map(len, chosen.parts))
        yield (Prompts if shared else Whole)(policy, rollouts, chosen.prompts), chosen.parts


def _part(run: Run, rollouts, weight_N, index_B, minibatch, constants, window) -> Part:
    lengths_B = rollouts.lengths_PG.ravel()[index_B]
    weight_B = objectives.token_weights(
        run.config.objective.loss_type,
        lengths_B,
        minibatch.num_rollouts,
        minibatch.num_tokens,
        run.config.max_completion_length,
    )
    wide = torch.promote_types(window.hidden_BTD.dtype, torch.float32)
    mask_BT = window.mask_BT.to(wide)

    def rows(values_NT: torch.Tensor | None) -> torch.Tensor | None:
        return None if values_NT is None else values_NT[index_B, : mask_BT.shape[1]].to(wide)

    return Part(
        advantage_B=torch.from_numpy(weight_N[index_B]).to(mask_BT),
        mask_BT=mask_BT,
        old_BT=rows(constants.old_NT),
        reference_BT=rows(constants.reference_NT),
        weight_B=torch.from_numpy(weight_B).to(mask_BT),
        num_rollouts=minibatch.num_rollouts,
    )


def _gap(rollouts: Rollouts, index_B, logprob_BT, factor_BT) -> np.ndarray:
    """Absolute differences from the sampler's log-probabilities, where both are known."""
    used = (factor_BT != 0).cpu().numpy()
    width = used.shape[1]
    theirs = rollouts.logprobs_PGT.reshape(-1, rollouts.logprobs_PGT.shape[-1])[index_B, :width]
    return np.abs(theirs - logprob_BT.double().cpu().numpy())[used]


def token_logprobs(run: Run, policy: Policy, rollouts: Rollouts, index: np.ndarray) -> torch.Tensor:
    """Log-probabilities of this rank's completions, [N, T], 0 elsewhere; the trainer's own."""
    return run.passes.attempt(lambda: _token_logprobs(run, policy, rollouts, index))


@torch.no_grad()
def _token_logprobs(run: Run, policy: Policy, rollouts: Rollouts, index: np.ndarray):
    shape = (rollouts.lengths_PG.size, rollouts.mask_PGT.shape[-1])
    result, pace = None, Pace("reading", len(index))
    for reader, parts in _read(run, policy, rollouts, index):
        for index_B in parts:
            window = reader.window(index_B)
            found_BT = Head(policy, reader.output, run.config.temperature).logprobs(window)
            result = found_BT.new_zeros(shape) if result is None else result
            result[index_B, : found_BT.shape[1]] = found_BT
            pace.add(len(index_B))
        del reader, window
    return torch.zeros(shape, device=policy.model.device) if result is None else result


def reference_logprobs(run: Run, rollouts: Rollouts) -> torch.Tensor:
    """Those of the reference model: the policy without its adapters, or a frozen copy."""
    index = np.arange(rollouts.lengths_PG.size)
    adapters_off = nullcontext() if run.reference else run.policy.model.disable_adapter()
    with adapters_off:
        return token_logprobs(run, run.reference or run.policy, rollouts, index)
