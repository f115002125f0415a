"""C1, C2, C3 and G* as training goes, from a step's own rollouts, before its update.

With ghat_x the leave-one-out gradient of prompt x's group and q the squared score norms, what a
study computes from a pool (see `estimators.scaling`) is computed here from the P groups of a step,
N = G: one more forward and backward pass over the step's completions, nothing else sampled. With
bf16=true the completions are those of bfloat16, but the scores are of the float32 computation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.moments import norm_moments, pool_gradient_weights
from grpo_ustat.estimators.scaling import correlation, scaling_from_arrays
from grpo_ustat.policy.batches import score_rollouts
from grpo_ustat.policy.scores import parameter_sizes
from grpo_ustat.policy.sketch import Sketch
from grpo_ustat.training.batch import Batch, gathered

if TYPE_CHECKING:
    from grpo_ustat.training.setup import Run

REPORTED = ("c1", "c2", "c3", "gstar", "corr")


@dataclass(frozen=True)
class GroupScores:
    """What one prompt's group says.

    Attributes:
        sq_norm_G: squared score norms q, float64.
        ghat_sq: ||ghat||^2 of its leave-one-out gradient, exact.
        ghat_R: sketch of ghat, exact where the model has no more parameters than R.
    """

    sq_norm_G: np.ndarray
    ghat_sq: float
    ghat_R: np.ndarray


def gradient_mse(run: Run, batch: Batch) -> dict[str, Any]:
    """`monitor/...` of a metrics row: C1, C2, C3, G* and corr(q, Z) with intervals over prompts.

    The constants are those of the population that the step's prompts are drawn from and of the
    rewards as judged by the task. A bound that is not finite is None, and `..._reason` says why.
    The same on any number of ranks; parameters and gradients stay as they are.
    """
    start = time.perf_counter()
    if (batch.rewards_PG == batch.rewards_PG[:, :1]).all():
        found = dict.fromkeys(REPORTED, Interval(math.nan, math.nan, math.nan))
    else:
        found = _constants(run, batch)
    row: dict[str, Any] = {}
    for name in REPORTED:
        row |= _fields(name, found)
    return row | {"monitor/seconds": time.perf_counter() - start}


def _constants(run: Run, batch: Batch) -> dict[str, Interval]:
    sketch = Sketch(parameter_sizes(run.policy.model), run.config.monitor.gradient_sketch)
    groups_P = gathered(run.accelerator, list(_own_groups(run, batch, sketch)))
    q_PG = np.stack([group.sq_norm_G for group in groups_P])
    found = scaling_from_arrays(batch.rewards_PG, q_PG, gradient_gram(groups_P))
    own_P = np.array([group.ghat_sq for group in groups_P])
    found["corr"] = correlation(norm_moments(q_PG, batch.rewards_PG, own_P))
    return found


def gradient_gram(groups_P: list[GroupScores]) -> np.ndarray:
    """<ghat_x, ghat_y>, [P, P]: unbiased from sketches between prompts, exact on the diagonal."""
    ghat_PR = np.stack([group.ghat_R for group in groups_P])
    gram_PP = ghat_PR @ ghat_PR.T
    np.fill_diagonal(gram_PP, [group.ghat_sq for group in groups_P])
    return gram_PP


def _own_groups(run: Run, batch: Batch, sketch: Sketch) -> Iterator[GroupScores]:
    """Of this rank's prompts, in order; again in smaller parts where memory runs out."""
    rank, world = run.accelerator.process_index, run.accelerator.num_processes
    weights_PG = pool_gradient_weights(batch.rewards_PG)[rank::world]
    for row, weights_G in enumerate(weights_PG):
        yield run.passes.attempt(partial(_group, run, batch, row, weights_G, sketch))


def _group(run: Run, batch: Batch, row: int, weights_G: np.ndarray, sketch: Sketch) -> GroupScores:
    rollouts, size = batch.rollouts, len(weights_G)
    longest = len(rollouts.prompt_tokens[row]) + int(rollouts.lengths_PG[row].max())
    at_once = max(1, run.passes.tokens // longest)
    norms, ghat = [], {}
    for part in np.split(np.arange(size), range(at_once, size, at_once)):
        scores = score_rollouts(
            run.policy, rollouts, row * size + part, run.config.temperature,
            weights_KB=weights_G[None, part],
        )  # fmt: skip
        norms.append(scores.sq_norm_B.cpu().numpy())
        for name, value in scores.gradients_K[0].items():
            ghat[name] = ghat[name] + value if name in ghat else value
    ghat_sq = sum(float(value.double().square().sum()) for value in ghat.values())
    return GroupScores(np.concatenate(norms), ghat_sq, sketch.of(ghat).double().cpu().numpy())


def _fields(name: str, found: dict[str, Interval]) -> dict[str, Any]:
    interval = found[name]
    keys = (f"monitor/{name}", f"monitor/{name}_low", f"monitor/{name}_high")
    values = [value if math.isfinite(value) else None for value in interval]
    row = dict(zip(keys, values, strict=True))
    if None in values:
        row[f"monitor/{name}_reason"] = _reason(name, found)
    return row


def _reason(name: str, found: dict[str, Interval]) -> str:
    if math.isnan(found["c1"].estimate):
        return "every group is silent"
    if name == "corr":
        return "rewards or score norms vary within one group at most"
    unsure = [constant for constant in ("c1", "c3") if not found[constant].low > 0]
    return f"the interval of {' and '.join(unsure)} reaches 0: more prompts a step, or an average"
