"""Estimates of the gradient error and G* during training, from a step's rollouts before the update.

The error is described by the constants C1, C2 and C3; see `estimators.scaling`. The command `mse`
estimates them from N stored completions per prompt. Here, they are estimated in the same way from
the P groups of a step, so N = G. The estimate uses the leave-one-out gradient ghat_x of each
prompt's group and the squared norms q of the completions' scores (gradients of log-probabilities).
This needs one more forward and backward pass over the step's completions, but no further sampling.
With bf16=true, the completions are sampled in bfloat16, but the scores are computed in float32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from grpo_ustat.estimators.groups import law_of_prompts
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.moments import correlation, norm_moments, pool_gradient_weights
from grpo_ustat.estimators.scaling import noise_share
from grpo_ustat.policy.scores.backward import parameter_sizes
from grpo_ustat.policy.scores.groups import GroupGradient, gradient_gram, group_scores
from grpo_ustat.policy.scores.sketch import Sketch
from grpo_ustat.terminal.console import warn
from grpo_ustat.train.batch import gather_by_prompt
from grpo_ustat.train.context import Batch, TrainContext
from grpo_ustat.train.fsdp2 import exact_full_copy
from grpo_ustat.train.micro_batches import OutOfMemory, TokenBudget

REPORTED = (
    "c1", "c2", "c3", "gstar", "corr", "grad_sq", "noise_scale", "noise_scale_best",
    "prompt_share", "noise_scale_tokens", "noise_share",
)  # fmt: skip


def gradient_mse(run: TrainContext, batch: Batch) -> dict[str, Any]:
    """Measure the gradient error and return the fields `monitor/...` of a metrics row.

    The fields are:

    - `mse`: unbiased estimate of the mean squared error of the leave-one-out gradient in a step of
      this size, `(G C1 + C2 + C3/(G-1)) / n`.
    - `c1`, `c2`, `c3`, `gstar`: the constants C1, C2 and C3, and the best group size G*.
    - `grad_sq`: the squared length of the expected gradient, ||grad J||^2.
    - `noise_scale`: number of rollouts at which the error equals ||grad J||^2.
    - `noise_scale_tokens`: noise scale in tokens, with each prompt counted once per group.
    - `noise_scale_best`: noise scale at G*.
    - `prompt_share`: share of the error that comes from the random draw of prompts.
    - `noise_share`: share of the error in E||ghat||^2; see `estimators.scaling`.
    - `corr`: correlation of squared score norms q and rewards Z.
    - `heavy_tails`: 1 if the intervals are likely to cover less than 90 % (see `intervals.Tails`),
      otherwise 0.
    - `seconds`: duration of the measurement.

    All but `mse`, `heavy_tails` and `seconds` also have the ends of an interval, `..._low` and
    `..._high`, for the population from which the step's prompts are drawn. A value that is not
    finite is stored as None, and `..._reason` gives the reason. If the estimate of ||grad J||^2 is
    not positive, a noise scale has no estimate and at most a lower bound. To average over steps,
    use ratios of averages; see `ScalingLaw.of_steps`.

    The row is the same for any number of ranks. Parameters and gradients do not change. If a rank
    has too little memory for even one completion at a time, a warning is printed, all intervals are
    None, and training continues with the same micro-batches.
    """
    start, error, heavy = time.perf_counter(), math.nan, None
    size = batch.rewards_PG.shape[1]
    intervals: dict[str, Interval] = dict.fromkeys(REPORTED, Interval(math.nan, math.nan, math.nan))
    zero_variance = bool((batch.rewards_PG == batch.rewards_PG[:, :1]).all())
    groups_P = []
    if not zero_variance:
        with exact_full_copy(run):
            own_gradients_P = own_gradients(run, batch)
        groups_P = gather_by_prompt(own_gradients_P)
    no_memory = any(group is None for group in groups_P)
    if groups_P and not no_memory:
        q_PG = np.stack([group.sq_norm_G for group in groups_P])
        gram_PP = gradient_gram(groups_P)
        law, tails = law_of_prompts(batch.rewards_PG, q_PG, gram_PP)
        intervals |= law.intervals(size)
        per_group = batch.prompt_lengths_P.mean() / size
        tokens = float(batch.lengths_PG.mean() + per_group)
        scale = intervals["noise_scale"]
        intervals["noise_scale_tokens"] = Interval(*(tokens * x for x in scale))
        intervals["noise_share"] = noise_share(scale, batch.rewards_PG.size)
        ghat_sq_P = np.array([group.ghat_sq for group in groups_P])
        intervals["corr"] = correlation(norm_moments(q_PG, batch.rewards_PG, ghat_sq_P))
        error, heavy = law.n_mse(size) / batch.rewards_PG.size, int(tails.heavy)
    row: dict[str, Any] = {}
    for name in REPORTED:
        keys = (f"monitor/{name}", f"monitor/{name}_low", f"monitor/{name}_high")
        values = [value if math.isfinite(value) else None for value in intervals[name]]
        row |= dict(zip(keys, values, strict=True))
        if None in values:
            row[f"monitor/{name}_reason"] = (
                "out of memory" if no_memory else _reason(name, intervals)
            )
    row["monitor/mse"] = error if math.isfinite(error) else None
    row["monitor/heavy_tails"] = heavy
    return row | {"monitor/seconds": time.perf_counter() - start}


def own_gradients(run: TrainContext, batch: Batch) -> Sequence[GroupGradient | None]:
    """Return score norms and the leave-one-out gradient for each of this rank's prompts, in order.

    If memory runs out, a prompt is read again with fewer completions at a time. If memory is too
    small for even one completion, all entries are None.
    """
    rollouts, budget = batch.own_rollouts, TokenBudget(run.token_budget.tokens)
    sketch = Sketch(parameter_sizes(run.policy.model), run.config.monitor.gradient_sketch)
    weights_PG = run.own_rows(pool_gradient_weights(batch.rewards_PG))

    def gradient_of(p: int) -> GroupGradient:
        """Compute the gradient of prompt `p` in passes that fit the token budget."""
        longest = len(rollouts.prompt_tokens[p]) + int(rollouts.lengths_PG[p].max())
        at_once = max(1, budget.tokens // longest)
        scores = group_scores(run.policy, rollouts, p, run.config.temperature, sketch, at_once)
        return scores.gradient(weights_PG[p])

    prompts = range(len(weights_PG))
    try:
        return [budget.attempt(partial(gradient_of, p), "the monitor") for p in prompts]
    except OutOfMemory:
        warn(
            "out of memory: the gradient error of this step is not measured "
            "(monitor.gradient_mse_every)"
        )
        return [None for _ in prompts]


def _reason(name: str, intervals: dict[str, Interval]) -> str:
    """Return the reason why an estimate or an end of its interval is not finite."""
    if math.isnan(intervals["c1"].estimate):
        return "every group has zero variance"
    if name == "corr":
        return "rewards, or score norms, vary within at most one group"
    if name in ("noise_scale", "noise_scale_tokens", "noise_share") or (
        name == "noise_scale_best" and math.isfinite(intervals["gstar"].estimate)
    ):
        return "the interval of ||grad J||^2 reaches 0: use more prompts per step, or average steps"
    unsure = [constant for constant in ("c1", "c3") if not intervals[constant].low > 0]
    return (
        f"the interval of {' and '.join(unsure)} reaches 0: use more prompts per step, or average "
        "steps"
    )
