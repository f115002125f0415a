"""Time closed forms and brute force until they measure all curves of a study to +-5 %.

    python scripts/benchmarks/speed.py mse

The curves of the baselines none, leave_one_out and oracle are measured at every group size, on the
same questions, by these programs:

    closed_form  a pool of scored completions, extended until the intervals are narrow enough
    ordinary     fresh rollouts and a backward pass for every (baseline, group)
    weighted     the same, with all gradients of a replicate from one backward pass, like
                 monte_carlo

A program ends when the relative half-width of every curve's 95 % interval is at most the target.
The two brute-force programs stop measuring a curve as soon as it reaches the target. A replicate
draws the largest group of each question and splits it into disjoint groups for the smaller sizes.
The reference gradient and V are estimated from separate random streams. In `ordinary`, the
estimation error of V changes the oracle's curve by a share of about 1/K, where K =
budget.value_completions; `weighted` subtracts this error.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.config.mse import MseConfig
from grpo_ustat.estimators.closed_form import closed_form
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.moments import pool_gradient_weights
from grpo_ustat.mse import pool
from grpo_ustat.mse.monte_carlo import (
    MAX_ROWS,
    SKETCH_SIZE,
    _gradients,
    _value_excess,
    curve,
    group_weights,
)
from grpo_ustat.mse.result import closed_form_request
from grpo_ustat.mse.scoring import rows_that_fit
from grpo_ustat.policy.configured import configured_policy, configured_task
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.logprobs import completion_logprobs, pack
from grpo_ustat.policy.scores.backward import parameter_sizes, trainable
from grpo_ustat.policy.scores.sketch import Sketch
from grpo_ustat.records import BaselineContext, Prompt, Rollouts
from grpo_ustat.rollout.local import Sampling, sample
from grpo_ustat.tasks.base import summed_rewards

PROGRAMS = ("closed_form", "ordinary", "weighted")
BASELINES = ("none", "leave_one_out", "oracle")
MAX_POOL_COMPLETIONS = 8192
# Smallest number of replicates after which a curve can reach the target.
MIN_REPLICATES = 4
# A baseline and a group size.
Key = tuple[str, int]
Curves = Mapping[Key, Interval]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for the study and the target."""
    parser.add_argument("overrides", nargs="*", help="overrides for the configuration, key=value")
    parser.add_argument(
        "--model", default="tiny", help="name of an embedded model, or a model's folder"
    )
    parser.add_argument("--questions", type=int, default=25)
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--target", type=float, default=0.05, help="relative half-width")
    parser.set_defaults(turns=1)


def programs(options: argparse.Namespace) -> list[str]:
    """List all programs."""
    return list(PROGRAMS)


def configured(options: argparse.Namespace) -> MseConfig:
    """Compose the study's configuration."""
    model = [f"model={options.model}"]
    if Path(options.model).is_dir():
        model = ["model=hub", f"model.model_name_or_path={options.model}"]
    overrides = [
        *model, f"study.questions={options.questions}", f"baselines=[{','.join(BASELINES)}]",
        f"group_sizes={options.group_sizes}", "launch.workers=1", "launch.num_threads=1",
        "study.methods=[closed_form,monte_carlo]",
    ]  # fmt: skip
    return compose_config("mse", [*overrides, *options.overrides])


def prepare(options: argparse.Namespace, program: str) -> Callable[[], dict[str, Any]]:
    """Load the model; a run measures until all curves reach the target."""
    config = configured(options)
    policy = configured_policy(config.policy_options)
    task = configured_task(config.task_options, config.model)
    prompts = task.prompts("study")[: config.study.questions]

    def run() -> dict[str, Any]:
        if program == "closed_form":
            counts, curves = by_pools(config, policy, prompts, options.target)
        else:
            brute = BruteForce(program, config, prompts, policy, task)
            counts, curves = brute.run(options.target)
        worst = max(map(halfwidth, curves.values()))
        kept = [[*key, *x] for key, x in curves.items()]
        return {**counts, "worst half-width": worst, "curves": kept}

    return run


def halfwidth(point: Interval) -> float:
    """Return the relative half-width of an interval."""
    return (point.high - point.low) / 2 / point.estimate if point.estimate > 0 else math.inf


def by_pools(
    config: MseConfig, policy: Policy, prompts: list[Prompt], target: float
) -> tuple[dict[str, int], Curves]:
    """Extend a pool until all curves reach the target; return counts and curves."""
    pool.configured_policy = lambda *_: policy
    facts, size = pool.model_facts(config.policy_options, prompts), config.budget.pool_completions
    with tempfile.TemporaryDirectory() as folder:
        while True:
            scored, _ = pool.build_pool(config, prompts, Path(folder), size)
            request = closed_form_request(config, scored, facts)
            statistics = closed_form(scored, request)
            points = [x for name, x in statistics.statistics.items() if name.startswith("mse/")]
            worst = max(map(halfwidth, points))
            if worst <= target or size >= MAX_POOL_COMPLETIONS:
                break
            size = min(next_pool_size(worst, target, size), MAX_POOL_COMPLETIONS)
    keys = [(name, size) for name in config.baselines for size in config.group_sizes]
    counts = {"rollouts": scored.rewards_PN.size, "gradients": 0}
    return counts, dict(zip(keys, points, strict=True))


def next_pool_size(worst: float, target: float, size: int) -> int:
    """Predict the completions per question that bring the worst half-width to the target.

    A half-width falls like 1/sqrt(N). The prediction is raised by a tenth to compensate for the
    error of the pilot's half-width.
    """
    factor = min(4.0, 1.1 * (worst / target) ** 2) if math.isfinite(worst) else 4.0
    return int(np.ceil(size * max(factor, 1.2)))


@dataclass
class Sums:
    """Sums for a baseline and group size: ||ghat_r||^2, <ghat_r, ref_h> and sum_r ghat_r."""

    squared: list[float] = field(default_factory=list)
    products_H: list[np.ndarray] = field(default_factory=list)
    total_D: np.ndarray | float = 0.0

    def add(self, gradients_CD: np.ndarray, blocks_HD: np.ndarray) -> None:
        """Add the gradients of a replicate's groups."""
        self.squared.extend(np.square(gradients_CD).sum(axis=1))
        self.products_H.extend(gradients_CD @ blocks_HD.T)
        self.total_D = self.total_D + gradients_CD.sum(axis=0)


class BruteForce:
    """Brute-force study, which measures values, then reference blocks, then replicates.

    Args:
        way: `ordinary` or `weighted`, see the module's docstring; also part of the names of the
            random streams.
        config: configuration of the study.
        prompts: prompts of the study.
        policy: policy from which completions are sampled and whose gradients are computed.
        task: task that computes the rewards.
    """

    def __init__(self, way: str, config: MseConfig, prompts: list[Prompt], policy: Policy, task):
        self.way, self.form = way, {"ordinary": ordinary, "weighted": weighted}[way]
        self.config, self.prompts, self.policy, self.task = config, prompts, policy, task
        keys = [(name, size) for name in config.baselines for size in config.group_sizes]
        self.sums = {key: Sums() for key in keys}
        self.counts = {"rollouts": 0, "gradients": 0}

    def run(self, target: float) -> tuple[dict[str, int], Curves]:
        """Measure until all curves reach the target; return counts and curves."""
        budget = self.config.budget
        _, rewards_PK = self._draw("value", budget.value_completions)
        self.value_P = rewards_PK.mean(axis=1)
        size = budget.reference_completions // budget.reference_blocks
        blocks = [self._block(h, size) for h in range(budget.reference_blocks)]
        self.blocks_HD = np.array([block for block, _ in blocks])
        self.excess = float(np.mean([excess for _, excess in blocks]))
        left, replicates = list(self.sums), 0
        while left:
            self._replicate(left, replicates)
            replicates += 1
            if replicates >= MIN_REPLICATES:
                left = [key for key, x in self.curves().items() if halfwidth(x) > target]
        return self.counts, self.curves()

    def curves(self) -> Curves:
        """Return the mean squared errors measured so far."""
        gram_HH = self.blocks_HD @ self.blocks_HD.T
        curves = {}
        for (name, size), sums in self.sums.items():
            of_value = self.excess / size if name == "oracle" else 0.0
            numbers = np.array(sums.squared), np.array(sums.products_H), gram_HH
            total_sq = float(sums.total_D @ sums.total_D)
            curves[name, size] = curve(*numbers, total_sq, of_value).mse
        return curves

    def _draw(self, stream: str, size: int, **key: int) -> tuple[Rollouts, np.ndarray]:
        sampling = Sampling.of(self.config.sampler_options, f"{self.way} {stream}")
        rollouts = sample(self.policy, self.prompts, size, sampling, **key)
        self.counts["rollouts"] += rollouts.lengths_PG.size
        return rollouts, summed_rewards(self.task, rollouts)

    def _block(self, h: int, size: int) -> tuple[np.ndarray, float]:
        """Compute a reference gradient, and the amount by which V's error raises squared norms."""
        rollouts, rewards_PN = self._draw("reference", size, first=h * size)
        weights_PN = pool_gradient_weights(rewards_PN) / len(self.prompts)
        gradients, q_PN = self._form(rollouts, weights_PN[None], size)
        excess = 0.0 if q_PN is None else _value_excess(q_PN, rewards_PN, self.value_P)
        return gradients[0], excess

    def _replicate(self, keys: list[Key], number: int) -> None:
        sizes = self.config.group_sizes
        rollouts, rewards_PG = self._draw("replicate", max(sizes), step=number)
        context = BaselineContext(value_P=self.value_P, lengths_PG=rollouts.lengths_PG)
        options = self.config.baseline_options
        weights = [
            group_weights(rewards_PG, *key, context, options.get(key[0], {})) for key in keys
        ]
        gradients_CD, _ = self._form(rollouts, np.concatenate(weights), min(sizes))
        ends = np.cumsum([len(w) for w in weights])[:-1]
        for key, part_CD in zip(keys, np.split(gradients_CD, ends), strict=True):
            self.sums[key].add(part_CD, self.blocks_HD)

    def _form(self, rollouts: Rollouts, weights_CPG: np.ndarray, width: int):
        self.counts["gradients"] += len(weights_CPG)
        return self.form(self.policy, rollouts, weights_CPG, self.config.temperature, width)


def ordinary(policy, rollouts, weights_CPG: np.ndarray, temperature: float, width: int):
    """Compute gradients by plain autograd.

    There is a forward pass for every `width` completions of each question and, for each gradient, a
    backward pass through the completions with nonzero weights. Gradients with more than
    `SKETCH_SIZE` parameters are sketched.

    Returns:
        Gradients [C, D], and None in place of squared score norms, which autograd does not yield.
    """
    sketch = Sketch(parameter_sizes(policy.model), SKETCH_SIZE)
    names, parameters = zip(*trainable(policy.model), strict=True)
    columns = np.arange(weights_CPG.shape[2])
    weighed_CG = weights_CPG.any(axis=1)
    last_C = np.where(weighed_CG, columns, -1).max(axis=1)
    result, open_sums = np.zeros((len(weights_CPG), sketch.dimension)), {}
    for block in np.split(columns, len(columns) // width):
        inside = [c for c in range(len(weights_CPG)) if weighed_CG[c, block].any()]
        _add_block(policy, rollouts, weights_CPG, temperature, block, inside, parameters, open_sums)
        for c in [c for c in inside if last_C[c] in block]:
            gradient = dict(zip(names, open_sums.pop(c), strict=True))
            result[c] = sketch.of(gradient).numpy()
    return result, None


def _add_block(
    policy, rollouts, weights_CPG, temperature, block, inside, parameters, open_sums
) -> None:
    count, size = rollouts.mask_PGT.shape[:2]
    tokens = max(map(len, rollouts.prompt_tokens)) + rollouts.mask_PGT.shape[-1]
    per_call = max(1, min(MAX_ROWS, rows_that_fit(policy, tokens) // 4) // len(block))
    for first in range(0, count, per_call) if inside else ():
        questions = np.arange(first, min(first + per_call, count))
        index = (questions[:, None] * size + block).ravel()
        rows = pack(rollouts, index, policy.pad_token, policy.model.device)
        logprob_B = completion_logprobs(policy.model, rows, temperature)
        for c in inside:
            weights_B = torch.from_numpy(weights_CPG[c][np.ix_(questions, block)].ravel())
            loss = (weights_B.to(logprob_B) * logprob_B).sum()
            gradients = torch.autograd.grad(loss, parameters, retain_graph=c != inside[-1])
            if c in open_sums:
                torch._foreach_add_(open_sums[c], gradients)
            else:
                open_sums[c] = list(gradients)


def weighted(policy, rollouts, weights_CPG: np.ndarray, temperature: float, width: int):
    """Compute all gradients and squared score norms in one call of `completion_scores`."""
    return _gradients(policy, rollouts, weights_CPG, temperature)


def compare(measured: Mapping[str, list[dict[str, Any]]]) -> None:
    """Print closed form minus brute force in standard errors, with the simultaneous limit."""
    curves = {
        name: {tuple(row[:2]): Interval(*row[2:]) for row in turns[0]["rows"][0]["curves"]}
        for name, turns in measured.items()
    }
    closed = curves.pop("closed_form")
    limit = stats.norm.ppf(1 - 0.025 / len(closed))
    for name, brute in curves.items():
        differences = [
            (x.estimate - brute[key].estimate) / np.hypot(error_of(x), error_of(brute[key]))
            for key, x in closed.items()
        ]
        print(
            f"closed_form - {name}, in standard errors of the difference: largest "
            f"{max(map(abs, differences)):.2f}, simultaneous 95 % limit of {len(differences)}: "
            f"{limit:.2f}"
        )


def error_of(point: Interval) -> float:
    """Return the standard error that belongs to a 95 % interval."""
    return (point.high - point.low) / 2 / 1.96
