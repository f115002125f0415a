"""C1, C2, C3, G* and the noise scale of a TRL run, from the completions that it trains on."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object
from tqdm.auto import tqdm
from transformers import TrainerCallback

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.noise import CONSTANTS_AND_GRADIENT, NoiseEstimate, noise_estimate
from grpo_ustat.integrations.trl.generation import (
    Group,
    completions_of,
    logged_rewards,
    sampler_difference,
    whole_groups,
)
from grpo_ustat.integrations.trl.sharding import precision_of, sharding_of, whole_weights
from grpo_ustat.integrations.trl.support import check_parameters, check_trainer
from grpo_ustat.integrations.trl.windows import (
    ScoredGroup,
    Window,
    scored_group,
    window_batches,
    window_of,
)
from grpo_ustat.pages.advice import UNKNOWN, group_size_advice, other_sizes, pair_advice
from grpo_ustat.pages.findings import group_size_costs
from grpo_ustat.policy.loading import Policy, out_of_memory
from grpo_ustat.policy.logprobs import pack
from grpo_ustat.policy.prompt_sharing import can_read_contiguous
from grpo_ustat.policy.scores.backward import check_scores, parameter_sizes
from grpo_ustat.policy.scores.groups import GroupScores, group_scores
from grpo_ustat.policy.scores.sketch import Sketch
from grpo_ustat.records import Rollouts
from grpo_ustat.terminal.streams import single_line, visible

LEAST_WINDOWS = 4  # that an average is over, where there are so many
PREFIX = "grpo_ustat"


class GradientNoiseCallback(TrainerCallback):
    """Logs how noisy the gradient of a `GRPOTrainer` is, and which group size would be best.

    One of every `every` generation batches is scored: one more forward and backward pass over the
    completions of groups whose rewards differ, nothing else is sampled. Batches of fewer than four
    groups are pooled with the next ones into windows of 16 groups, see `windows`. What is measured
    is the leave-one-out gradient of the summed reward, in the weights' own precision and without
    dropout. Training is not changed: random states, gradients, modes and parameters stay as they
    are, and whatever fails is said in a line and ends the measuring alone.

    Into TRL's own metrics go `grpo_ustat/c1`, `c2`, `c3`, `grad_sq`, `gstar`, `noise_scale` (in
    rollouts, at the run's own group size), `noise_scale_best` (at G*), `zero_variance` and
    `seconds`; all but the last are of running means over the second half of the windows, at least
    four of them. `grpo_ustat/step/...` are the constants of one window alone, `sampler_gap` is the
    mean difference of vLLM's and the model's log-probabilities of a token of the batch, in nats.

    Args:
        trainer: a `trl.GRPOTrainer`, before `train()`; its method
            `_generate_and_score_completions` is wrapped.
        every: of how many generation batches one is measured, at least 1.
        completions_at_once: of a pass of the model; None: a group. Halved where memory runs out.
        sketch: numbers that are kept of a completion's score, for products between prompts.
        parameters: a regular expression; what is measured is the gradient of the parameters in
            whose names it occurs, such as "norm", in less time. None: of all.
        strict: whether a trainer that cannot be measured is an error; otherwise a line says why,
            and the run goes on without measuring.

    Raises:
        ConfigError: `every` is below 1; with `strict`, see `grpo_ustat.integrations.trl.support`.
    """

    def __init__(
        self,
        trainer: Any,
        every: int = 10,
        *,
        completions_at_once: int | None = None,
        sketch: int = 16381,
        parameters: str | None = None,
        strict: bool = False,
    ):
        if every < 1:
            raise ConfigError(f"every={every}: at least 1 update is needed between measurements")
        self.trainer, self.every, self.sketch_size = trainer, every, sketch
        self.parameters = parameters
        self.windows: list[Window] = []
        self.seconds = 0.0
        self.fault = self.precision = ""
        self._groups: list[ScoredGroup] = []  # of the window that is open
        self._batches = self._unknown = self._due = 0
        self._begin = time.perf_counter()
        self._sketch: Sketch | None = None
        self._checked = False
        try:
            check_trainer(trainer)
            check_parameters(trainer.model, parameters)
        except ConfigError as error:
            if strict:
                raise
            self.fault = _reason(error)
            self._print(f"{PREFIX}: this run is not measured: {self.fault}")
            return
        self.at_once = completions_at_once or trainer.num_generations
        self._generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = self._measured

    def on_train_begin(self, args, state, control, **kwargs):
        """Count time from here, and measure the first batch."""
        self._due, self._begin = state.global_step, time.perf_counter()

    def on_train_end(self, args, state, control, **kwargs):
        """Say in words what was measured."""
        if not self.fault:
            self._close()
        if self.windows or not self.fault:
            self._print(*self.summary())

    def _measured(self, inputs: Any) -> dict[str, Any]:
        """TRL's own generation; its completions are scored where it is time."""
        output = self._generate(inputs)
        step = self.trainer.state.global_step
        if not self.trainer.model.training or self.fault or step < self._due:
            return output
        start = time.perf_counter()
        try:
            with (
                whole_weights(self.trainer) as model,
                unchanged(model),
                only_these(model, self.parameters),
            ):
                self.precision = precision_of(model)
                self._measure(model, output, step)
            self._batches += 1
            self.seconds += time.perf_counter() - start
            if self._batches >= window_batches(max(1, len(self._groups) // self._batches)):
                self._due = step + 1 + (self.every - 1) * self._batches
                self._close()
        except Exception as error:  # the same on all ranks, see `_from_all_ranks`
            self.fault = _reason(error)
            self._print(f"{PREFIX}: measures no more at step {step}: {self.fault}")
        return output

    def _measure(self, model: Any, output: Mapping[str, Any], step: int) -> None:
        """Add a generation batch's groups to the window.

        Completions travel to where their group is scored, so that every group is whole.

        Raises:
            ConfigError: the batch cannot be measured; on all ranks.
        """
        trainer, accelerator = self.trainer, self.trainer.accelerator
        pad_token = trainer.processing_class.pad_token_id
        rows = _from_all_ranks(lambda: completions_of(output, pad_token))
        gaps, tokens = np.sum(_from_all_ranks(lambda: [sampler_difference(output)]), axis=0)
        if tokens:
            trainer._metrics["train"][f"{PREFIX}/sampler_gap"].append(gaps / tokens)
        logged = {name: trainer._logs["rewards"][name] for name in trainer.reward_func_names}
        rewards = logged_rewards(logged, trainer.reward_weights, len(rows))
        groups, unknown = whole_groups(rows, *rewards, trainer.num_generations)
        varied = [place for place, group in enumerate(groups) if group.varies]
        own = varied[accelerator.process_index :: accelerator.num_processes]
        scored = dict(
            _from_all_ranks(lambda: [(place, self._scores(model, groups[place])) for place in own])
        )
        self._groups += [
            scored_group(step, group, scored.get(place)) for place, group in enumerate(groups)
        ]
        self._unknown += unknown

    def _close(self) -> None:
        """End the window: the terms of its groups, if it has two, join the others, and what is
        known now is logged.
        """
        groups, unknown = self._groups, self._unknown
        self._groups, self._batches, self._unknown = [], 0, 0
        if len(groups) > 1:
            self.windows.append(window_of(groups, unknown))
            self._log(self.windows[-1])

    def _scores(self, model: Any, group: Group) -> GroupScores:
        """Scores of one group; where memory runs out again, with half as many completions at once.

        Raises:
            ConfigError: not even one completion fits, or a layer's score rule is wrong.
        """
        trainer = self.trainer
        policy = Policy(
            model, trainer.processing_class, frozenset(), trainer.processing_class.pad_token_id
        )  # fmt: skip
        rollouts = group.rollouts()
        if self._sketch is None:
            self._sketch = Sketch(parameter_sizes(policy.model), self.sketch_size)
        if not self._checked:
            self._check(policy, rollouts)
            self._checked = True
        while True:
            try:
                return group_scores(
                    policy, rollouts, 0, trainer.temperature, self._sketch, self.at_once
                )
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
            # Not in the handler: the error holds all that was allocated.
            if self.at_once == 1:
                raise ConfigError("out of memory with one completion at a time")
            self.at_once //= 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _check(self, policy: Policy, rollouts: Rollouts) -> None:
        """Compare a group's two shortest completions with plain differentiation, once a run.

        Raises:
            ConfigError: a layer's score rule is wrong.
        """
        shortest = np.argsort(rollouts.lengths_PG[0], kind="stable")[:2]
        few = pack(rollouts, shortest, policy.pad_token, policy.model.device)
        try:
            check_scores(
                policy.model,
                few.input_ids_BT,
                few.attention_mask_BT,
                few.completion_mask_BT,
                contiguous=can_read_contiguous(policy),
            )
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            self._print(f"{PREFIX}: no memory to compare scores with plain differentiation")

    def recent(self) -> list[Window]:
        """Those of the second half of the measured steps, at least the last four."""
        if not self.windows:
            return []
        last = self.windows[-1].last
        half = [one for one in self.windows if 2 * one.first >= last]
        return max(half, self.windows[-LEAST_WINDOWS:], key=len)

    def estimate(self) -> NoiseEstimate | None:
        """Averages over `recent()`, with intervals; None where nothing was measured."""
        steps = [one.terms for one in self.recent()]
        return noise_estimate(steps, self.trainer.num_generations) if steps else None

    def _log(self, window: Window) -> None:
        """Write to TRL's metrics, and print a line on the main process."""
        estimate = self.estimate()
        assert estimate is not None  # there is this window
        alone = noise_estimate([window.terms], self.trainer.num_generations).intervals
        values = {name: interval.estimate for name, interval in estimate.intervals.items()}
        values |= {f"step/{name}": alone[name].estimate for name in CONSTANTS_AND_GRADIENT}
        values["seconds"] = self.seconds
        metrics = self.trainer._metrics["train"]
        for name, value in values.items():
            if np.isfinite(value):
                metrics[f"{PREFIX}/{name}"] = [
                    float(value)
                ]  # TRL averages lists: a ratio stays one
        self._print(
            f"{PREFIX} step {window.last}: {_numbers(estimate.intervals)}; {self._cost()} so far"
        )

    def _cost(self) -> str:
        """The time spent on measuring, and its share of all since training began."""
        share = 100 * self.seconds / (time.perf_counter() - self._begin)
        return f"{self.seconds:.1f} s, {share:.0f} % of the time"

    def summary(self) -> list[str]:
        """What is known now in lines: keep, raise or lower the group size, and what it cost."""
        estimate, size = self.estimate(), self.trainer.num_generations
        if estimate is None:
            return [f"{PREFIX}: nothing was measured{self.fault and ': '}{self.fault}."]
        args, recent = self.trainer.args, self.recent()
        rollouts = (
            args.per_device_train_batch_size * args.gradient_accumulation_steps
            * self.trainer.accelerator.num_processes
        )  # fmt: skip
        result = estimate.as_result()
        verdict, sentence, _ = group_size_advice(result, size, rollouts)
        if estimate.assumption2:
            verdict, sentence = pair_advice(estimate.intervals["gstar"])
        lines = [f"{PREFIX}: {sentence}"]
        if verdict != UNKNOWN and not estimate.assumption2:
            lines.append(other_sizes(group_size_costs(result, rollouts)))
        groups = sum(len(one.terms.g_sq_P) for one in recent)
        lines.append(
            f"{_numbers(estimate.intervals)}. From {groups} groups, steps {recent[0].first} to "
            f"{recent[-1].last}, of their policies together."
        )
        if estimate.heavy:
            lines.append("Few groups decide: the intervals may cover less than 90 %.")
        if unknown := sum(one.unknown for one in recent):
            lines.append(f"Groups left out, since a completion of theirs has no reward: {unknown}.")
        under = f" under {sharding}" if (sharding := sharding_of(self.trainer)) else ""
        part = "" if self.parameters is None else f" of the parameters named {self.parameters!r}"
        lines.append(f"Scores{part} in {self.precision}, the weights' own precision{under}.")
        lines.append(f"Measuring took {self._cost()}.")
        return lines

    def _print(self, *lines: str) -> None:
        if self.trainer.accelerator.is_main_process:
            tqdm.write("\n".join(map(visible, lines)))  # above a progress bar


def _from_all_ranks(make: Callable[[], Sequence[Any]]) -> list[Any]:
    """The items that all ranks make, in rank order.

    Raises:
        ConfigError: making them failed on some rank, for whatever reason; on all ranks, since the
            others wait for its items, and training goes on.
    """
    try:
        own = list(make())
    except Exception as error:
        own = [_Failure(_reason(error))]
    items = gather_object(own)
    if failures := [item for item in items if isinstance(item, _Failure)]:
        raise ConfigError(failures[0].reason)
    return items


class _Failure(NamedTuple):
    """Why a rank has no items."""

    reason: str


def _reason(error: Exception) -> str:
    """What went wrong, in one line."""
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return single_line(f"{kind}{error}")


def _numbers(intervals: Mapping[str, Interval]) -> str:
    """G*, the noise scale and the share of groups of equal rewards, in words."""
    silent = intervals["zero_variance"]
    if silent.estimate == 1:
        return "all groups have equal rewards, so there is no gradient to measure"
    best = _text(intervals["gstar"], least=1, digits=1)
    if "gstar_assumption2" in intervals and math.isfinite(intervals["gstar"].high):
        _, low, high = intervals["gstar"]  # of bounds: pairs tell no more
        assumed = intervals["gstar_assumption2"].estimate
        best = f"in [{low:.1f}, {high:.1f}] ({assumed:.1f} if A_V = D)"
    return (
        f"G* {best}, noise scale {_text(intervals['noise_scale'])} rollouts, "
        f"{100 * silent.estimate:.0f} % of groups of equal rewards"
    )


def _text(interval: Interval, least: float = 0, digits: int = 0) -> str:
    """An estimate with its interval, or what is known of it: nothing, or that it is not less.

    >>> _text(Interval(5.25, 4.31, 9.8), 1, 1), _text(Interval(math.nan, 32, math.inf))
    ('5.2 [4.3, 9.8]', 'at least 32')
    >>> _text(Interval(8.7, 1.0, math.inf), 1, 1)
    'unknown'
    """
    estimate, low, high = interval
    if math.isfinite(high) and math.isfinite(estimate):
        return f"{estimate:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
    return f"at least {low:.{digits}f}" if low > least else "unknown"


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode and its own precision for the block, and restore modes and
    random states after it. Scores are formed outside of `grad`.
    """
    modes = {module: module.training for module in model.modules()}
    generators = random.getstate(), np.random.get_state()
    device = torch.device(getattr(model, "device", "cpu"))
    own: Any = getattr(model, "_original_forward", None)  # without accelerate's autocast
    wrapped: Any = model.forward
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        try:
            model.eval()
            if own is not None:
                model.forward = own
            yield
        finally:
            if own is not None:
                model.forward = wrapped
            for module, mode in modes.items():
                module.training = mode
            random.setstate(generators[0])
            np.random.set_state(generators[1])


@contextmanager
def only_these(model: torch.nn.Module, pattern: str | None) -> Iterator[None]:
    """Within, of the trainable parameters only those are in whose names a regular expression
    occurs, or all.
    """
    others = [
        p
        for name, p in model.named_parameters()
        if p.requires_grad and pattern is not None and not re.search(pattern, name)
    ]
    try:
        for parameter in others:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
