"""Gradient errors by brute force, replicate by replicate: what `mse.py` times.

A replicate draws the largest group of every question and splits it into disjoint groups for the
smaller sizes. Each (baseline, group) has a gradient of its own, formed in one of two ways:

    ordinary  one backward each, as a user of autograd would, over no more than the group's rows
    weighted  all at once by `completion_scores` with weight vectors, as the method monte_carlo does

Reference gradient and V come from streams of their own. A (baseline, group size) that is known
well enough is left out of later replicates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import numpy as np
import torch

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.moments import pool_gradient_weights
from grpo_ustat.mse.monte_carlo import (
    MOST_ROWS,
    SKETCH_SIZE,
    _gradients,
    _value_excess,
    curve,
    group_weights,
)
from grpo_ustat.mse.scoring import rows_that_fit
from grpo_ustat.policy.logprobs import completion_logprobs, pack
from grpo_ustat.policy.scores.backward import parameter_sizes, trainable
from grpo_ustat.policy.scores.sketch import Sketch
from grpo_ustat.records import BaselineContext
from grpo_ustat.rollout.local import Sampling, sample
from grpo_ustat.tasks.base import summed_rewards

LEAST = 4  # replicates before a curve may count as known


@dataclass
class Spent:
    """What a method has taken: seconds of the process and of the clock, by what they went to."""

    rollouts: int = 0
    gradients: int = 0
    cpu: dict[str, float] = field(default_factory=dict)
    wall: float = 0.0

    @property
    def seconds(self) -> float:
        """Process time of everything."""
        return sum(self.cpu.values())

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Add the time of what is inside."""
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.cpu[what] = self.cpu.get(what, 0.0) + time.process_time() - cpu
        self.wall += time.perf_counter() - wall


@dataclass
class Sums:
    """Of one baseline and group size: ||ghat_r||^2, <ghat_r, ref_h> and sum_r ghat_r."""

    squared: list[float] = field(default_factory=list)
    products_H: list[np.ndarray] = field(default_factory=list)
    total_D: np.ndarray | float = 0.0

    def add(self, gradients_CD: np.ndarray, blocks_HD: np.ndarray) -> None:
        """Groups of one replicate."""
        self.squared.extend(np.square(gradients_CD).sum(axis=1))
        self.products_H.extend(gradients_CD @ blocks_HD.T)
        self.total_D = self.total_D + gradients_CD.sum(axis=0)


@dataclass
class State:
    """Everything a method has found; written to the state file."""

    spent: Spent = field(default_factory=Spent)
    value_P: np.ndarray | None = None
    blocks: list[np.ndarray] = field(default_factory=list)
    excess: list[float] = field(default_factory=list)
    sums: dict[tuple[str, int], Sums] = field(default_factory=dict)
    replicates: int = 0


def packed(state: State) -> tuple[dict[str, np.ndarray], dict]:
    """A state as arrays and plain values, for a file without code in it."""
    arrays = {"blocks": np.array(state.blocks), "excess": np.array(state.excess)}
    if state.value_P is not None:
        arrays["value_P"] = state.value_P
    for (name, size), sums in state.sums.items():
        if sums.squared:
            arrays[f"squared/{name}/{size}"] = np.array(sums.squared)
            arrays[f"products/{name}/{size}"] = np.array(sums.products_H)
            arrays[f"total/{name}/{size}"] = np.asarray(sums.total_D)
    return arrays, {"spent": asdict(state.spent), "replicates": state.replicates}


def unpacked(arrays: dict[str, np.ndarray], plain: dict, keys: list[tuple[str, int]]) -> State:
    """The state that `packed` took apart."""
    sums = {}
    for name, size in keys:
        place = f"{name}/{size}"
        sums[name, size] = Sums()
        if f"squared/{place}" in arrays:
            parts = (arrays[f"squared/{place}"].tolist(), list(arrays[f"products/{place}"]))
            sums[name, size] = Sums(*parts, arrays[f"total/{place}"])
    return State(
        spent=Spent(**plain["spent"]),
        value_P=arrays.get("value_P"),
        blocks=list(arrays["blocks"]),
        excess=arrays["excess"].tolist(),
        sums=sums,
        replicates=plain["replicates"],
    )


class BruteForce:
    """Values, then reference blocks, then replicates, one step at a time.

    Args:
        way: `ordinary` or `weighted`, see the module; also the name of the draws' streams.
        config, prompts, policy, task: of the study.
        state: to go on from.
    """

    def __init__(self, way: str, config, prompts, policy, task, state: State | None):
        self.way, self.gradients = way, WAYS[way]
        self.config, self.prompts, self.policy, self.task = config, prompts, policy, task
        self.keys = [(name, size) for name in config.baselines for size in config.group_sizes]
        self.state = state or State(sums={key: Sums() for key in self.keys})

    @property
    def ready(self) -> bool:
        """Whether the reference is there."""
        return len(self.state.blocks) == self.config.budget.reference_blocks

    def step(self, target: float) -> None:
        """One piece of work."""
        if self.state.value_P is None:
            _, rewards_PK = self._draw("value", self.config.budget.value_completions)
            self.state.value_P = rewards_PK.mean(axis=1)
        elif not self.ready:
            self._block(len(self.state.blocks))
        else:
            self._replicate(self.left(target))

    def left(self, target: float) -> list[tuple[str, int]]:
        """The pairs whose relative half-width is above the target, or that have hardly begun."""
        if self.state.replicates < LEAST:
            return self.keys
        return [key for key, x in self.curves().items() if halfwidth(x) > target]

    def curves(self) -> dict[tuple[str, int], Interval]:
        """Mean squared errors so far."""
        blocks_HD = np.array(self.state.blocks)
        gram_HH, excess = blocks_HD @ blocks_HD.T, float(np.mean(self.state.excess))
        found = {}
        for (name, size), sums in self.state.sums.items():
            of_value = excess / size if name == "oracle" else 0.0
            numbers = np.array(sums.squared), np.array(sums.products_H), gram_HH
            total_sq = float(sums.total_D @ sums.total_D)
            found[name, size] = curve(*numbers, total_sq, of_value).mse
        return found

    def groups_needed(self, target: float) -> dict[tuple[str, int], float]:
        """(1.96 sd / (target mean))^2 of every pair, from the groups it has."""
        needed = {}
        for key, point in self.curves().items():
            sums = self.state.sums[key]
            each = np.array(sums.squared) - 2 * np.mean(sums.products_H, axis=1)
            needed[key] = (1.96 * each.std(ddof=1) / (target * point.estimate)) ** 2
        return needed

    def _draw(self, stream: str, size: int, **key):
        with self.state.spent.on("draw" if stream == "replicate" else "reference"):
            sampling = Sampling.of(self.config.sampler_options, f"{self.way} {stream}")
            rollouts = sample(self.policy, self.prompts, size, sampling, **key)
            self.state.spent.rollouts += rollouts.lengths_PG.size
            return rollouts, summed_rewards(self.task, rollouts)

    def _block(self, h: int) -> None:
        budget, state = self.config.budget, self.state
        size = budget.reference_completions // budget.reference_blocks
        rollouts, rewards_PN = self._draw("reference", size, first=h * size)
        with state.spent.on("reference"):
            weights_PN = pool_gradient_weights(rewards_PN) / len(self.prompts)
            gradients, q_PN = self._form(rollouts, weights_PN[None], size)
            state.blocks.append(gradients[0])
            of_value = 0.0 if q_PN is None else _value_excess(q_PN, rewards_PN, state.value_P)
            state.excess.append(of_value)

    def _replicate(self, keys: list[tuple[str, int]]) -> None:
        state, sizes = self.state, self.config.group_sizes
        rollouts, rewards_PG = self._draw("replicate", max(sizes), step=state.replicates)
        with state.spent.on("gradients"):
            context = BaselineContext(value_P=state.value_P, lengths_PG=rollouts.lengths_PG)
            options = {name: rule.options for name, rule in self.config.rules.items()}
            weights = [
                group_weights(rewards_PG, *key, context, options.get(key[0], {})) for key in keys
            ]
            gradients_CD, _ = self._form(rollouts, np.concatenate(weights), min(sizes))
            ends = np.cumsum([len(w) for w in weights])[:-1]
            for key, part_CD in zip(keys, np.split(gradients_CD, ends), strict=True):
                state.sums[key].add(part_CD, np.array(state.blocks))
        state.replicates += 1

    def _form(self, rollouts, weights_CPG: np.ndarray, width: int):
        self.state.spent.gradients += len(weights_CPG)
        return self.gradients(self.policy, rollouts, weights_CPG, self.config.temperature, width)


def halfwidth(point: Interval) -> float:
    """Relative half-width of an interval."""
    return (point.high - point.low) / 2 / point.estimate if point.estimate > 0 else float("inf")


def ordinary(policy, rollouts, weights_CPG: np.ndarray, temperature: float, width: int):
    """Plain autograd: a forward for every `width` completions of each question, and for every
    gradient a backward through those that it weighs. Sketches beyond `SKETCH_SIZE` parameters.

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
            whole = dict(zip(names, open_sums.pop(c), strict=True))
            result[c] = sketch.of(whole).numpy()
    return result, None


def _add_block(
    policy, rollouts, weights_CPG, temperature, block, inside, parameters, open_sums
) -> None:
    count, size = rollouts.mask_PGT.shape[:2]
    tokens = max(map(len, rollouts.prompt_tokens)) + rollouts.mask_PGT.shape[-1]
    per_call = max(1, min(MOST_ROWS, rows_that_fit(policy, tokens) // 4) // len(block))
    for first in range(0, count, per_call) if inside else ():
        questions = np.arange(first, min(first + per_call, count))
        index = (questions[:, None] * size + block).ravel()
        rows = pack(rollouts, index, policy.pad_token, policy.model.device)
        logprob_B = completion_logprobs(policy.model, rows, temperature)
        for c in inside:
            weights_B = torch.from_numpy(weights_CPG[c][np.ix_(questions, block)].ravel())
            loss = (weights_B.to(logprob_B) * logprob_B).sum()
            found = torch.autograd.grad(loss, parameters, retain_graph=c != inside[-1])
            if c in open_sums:
                torch._foreach_add_(open_sums[c], found)
            else:
                open_sums[c] = list(found)


def weighted(policy, rollouts, weights_CPG: np.ndarray, temperature: float, width: int):
    """All gradients from one backward through `completion_scores`, and squared score norms."""
    return _gradients(policy, rollouts, weights_CPG, temperature)


WAYS: dict[str, Callable] = {"ordinary": ordinary, "weighted": weighted}
