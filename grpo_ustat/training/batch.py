"""One step's batch across ranks, and what a baseline reads besides its rewards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object

from grpo_ustat.estimators.baselines import BASELINES, best_constant
from grpo_ustat.policy.batches import score_rollouts
from grpo_ustat.records import BaselineContext, Prompt, Rollouts
from grpo_ustat.rollout.local import Sampling
from grpo_ustat.tasks.base import answered, rewards

if TYPE_CHECKING:
    from grpo_ustat.training.setup import Run


@dataclass(frozen=True)
class Batch:
    """Completions of a step or of an evaluation.

    Attributes:
        prompts: all P prompts.
        rollouts: this rank's completions, of `prompts[rank::world]`; None without any.
        rewards_PG, lengths_PG, ended_PG: of all prompts, the same on every rank.
        answered_PG: whether an answer was found in the text, right or wrong.
        prompt_lengths_P: tokens of the prompts.
    """

    prompts: list[Prompt]
    rollouts: Rollouts | None
    rewards_PG: np.ndarray
    lengths_PG: np.ndarray
    ended_PG: np.ndarray
    answered_PG: np.ndarray
    prompt_lengths_P: np.ndarray


@dataclass(frozen=True)
class Extra:
    """What a baseline cost beyond the step's own completions, over all ranks."""

    rollouts: int = 0
    tokens: int = 0


def gathered(accelerator: Accelerator, mine: Iterable[Any]) -> list[Any]:
    """One entry per prompt of the step, in the step's order, from each `prompts[rank::world]`."""
    shares = gather_object([list(mine)])
    rows: list[Any] = [None] * sum(map(len, shares))
    for rank, share in enumerate(shares):
        rows[rank :: len(shares)] = share
    return rows


def draw_batch(run: Run, prompts: list[Prompt], step: int) -> Batch:
    """The step's completions."""
    return written(run, prompts, run.config.group_size, Sampling.of(run.config, "rollout"), step)


def written(
    run: Run, prompts: list[Prompt], count: int, sampling: Sampling, step: int = 0
) -> Batch:
    """Sample and judge this rank's share of the prompts, which may be none of them, and learn what
    the other ranks found.
    """
    mine = prompts[run.accelerator.process_index :: run.accelerator.num_processes]
    rollouts, rows = None, []
    if mine:
        rollouts = run.engine.sample(mine, count, sampling, step=step)
        rows = zip(
            rewards(run.task, rollouts), rollouts.lengths_PG, rollouts.ended_PG,
            answered(run.task, rollouts), map(len, rollouts.prompt_tokens), strict=True,
        )  # fmt: skip
    columns = zip(*gathered(run.accelerator, rows), strict=True)
    return Batch(prompts, rollouts, *(np.array(column) for column in columns))


def fresh(
    run: Run, prompts: list[Prompt], count: int, step: int, greedy: bool = False
) -> tuple[Rollouts | None, Extra]:
    """Completions outside the batch of this rank's prompts (None without any), and their cost."""
    stream = "greedy" if greedy else "value"
    rollouts, cost = None, (0, 0)
    if prompts:
        sampling = Sampling.of(run.config, stream, greedy=greedy)
        rollouts = run.engine.sample(prompts, count, sampling, step=step)
        cost = (len(prompts) * count, int(rollouts.lengths_PG.sum()))
    return rollouts, Extra(*(sum(part) for part in zip(*gather_object([cost]), strict=True)))


def baseline_context(run: Run, batch: Batch, step: int) -> tuple[BaselineContext, Extra]:
    """What the configured baseline needs of all prompts, and what that cost."""
    needs = BASELINES[run.config.baseline.name].needs
    mine, count = batch.rollouts.prompts, run.config.budget.value_completions
    fields, extra = run.memory.recall(run, batch, step)
    if "lengths_PG" in needs:
        fields["lengths_PG"] = batch.lengths_PG
    if "greedy_P" in needs:
        rollouts, extra = fresh(run, mine, 1, step, greedy=True)
        fields["greedy_P"] = _of_all(run, rewards(run.task, rollouts)[:, 0])
    if "value_P" in needs:
        rollouts, extra = fresh(run, mine, count, step)
        fields["value_P"] = _of_all(run, rewards(run.task, rollouts).mean(axis=1))
    if "optimal_P" in needs:
        rollouts, extra = fresh(run, mine, count, step)
        fields["optimal_P"] = _of_all(run, optimal_baseline(run, rollouts))
    return BaselineContext(**fields), extra


def _of_all(run: Run, mine_P: np.ndarray) -> np.ndarray:
    return np.array(gathered(run.accelerator, mine_P))


def optimal_baseline(run: Run, rollouts: Rollouts) -> np.ndarray:
    """`b* = sum q z / sum q` of each prompt, q the squared score norms; 0 where every q is 0."""
    count = rollouts.lengths_PG.size
    longest = max(map(len, rollouts.prompt_tokens)) + rollouts.mask_PGT.shape[-1]

    def score() -> np.ndarray:
        """The squared norms, in parts of as many tokens as a pass may take."""
        size = max(1, run.passes.tokens // longest)
        parts = np.split(np.arange(count), range(size, count, size))
        found = (
            score_rollouts(run.policy, rollouts, part, run.config.temperature) for part in parts
        )
        return np.concatenate([scores.sq_norm_B.cpu().numpy() for scores in found])

    q_N = run.passes.attempt(score)
    return best_constant(q_N.reshape(rollouts.lengths_PG.shape), rewards(run.task, rollouts))
