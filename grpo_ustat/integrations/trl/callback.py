"""C1, C2, C3, G* and the noise scale of a TRL run, from the completions that it trains on."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.moments import pool_gradient_weights
from grpo_ustat.estimators.noise import (
    CONSTANTS_AND_GRADIENT,
    GroupTerms,
    NoiseEstimate,
    group_terms,
    noise_estimate,
)
from grpo_ustat.integrations.trl.generation import (
    Group,
    completions_of,
    summed_rewards,
    whole_groups,
)
from grpo_ustat.integrations.trl.sharding import precision_of, sharding_of, whole_weights
from grpo_ustat.integrations.trl.support import check_trainer
from grpo_ustat.pages.advice import group_size_advice, other_sizes
from grpo_ustat.pages.findings import group_size_costs
from grpo_ustat.policy.loading import Policy, out_of_memory
from grpo_ustat.policy.logprobs import pack
from grpo_ustat.policy.prompt_sharing import can_read_contiguous
from grpo_ustat.policy.scores.backward import check_scores, parameter_sizes
from grpo_ustat.policy.scores.groups import GroupScores, gradient_gram, group_scores
from grpo_ustat.policy.scores.sketch import Sketch
from grpo_ustat.records import Rollouts
from grpo_ustat.terminal.streams import single_line, visible

LEAST_STEPS = 4  # that an average is over, where there are so many
PREFIX = "grpo_ustat"


class Measurement(NamedTuple):
    """One generation batch.

    Attributes:
        step: updates of the policy that wrote it.
        terms: of its groups.
        unknown: groups that were left out, with a completion that no function rewarded.
    """

    step: int
    terms: GroupTerms
    unknown: int


class GradientNoiseCallback(TrainerCallback):
    """Logs how noisy the gradient of a `GRPOTrainer` is, and which group size would be best.

    Every `every` updates the completions of one generation batch are scored: one more forward and
    backward pass over those whose group's rewards differ, nothing else is sampled. What is measured
    is the leave-one-out gradient of the summed reward, in the weights' own precision and without
    dropout. Training is not changed: random states, gradients, modes and parameters stay as they
    are.

    Into TRL's own metrics go `grpo_ustat/c1`, `c2`, `c3`, `grad_sq`, `gstar`, `noise_scale` (in
    rollouts, at the run's own group size), `noise_scale_best` (at G*), `zero_variance` and
    `seconds`; all but the last are of running means over the second half of the measured steps, at
    least four of them. `grpo_ustat/step/...` are the constants of one batch alone.

    Args:
        trainer: a `trl.GRPOTrainer`, before `train()`; its method
            `_generate_and_score_completions` is wrapped.
        every: updates between two measurements, at least 1.
        completions_at_once: of a pass of the model; None: `per_device_train_batch_size`. Halved
            where memory runs out.
        sketch: numbers that are kept of a prompt's gradient, for products between prompts.

    Raises:
        ConfigError: the trainer cannot be measured, see `grpo_ustat.integrations.trl.support`.
    """

    def __init__(
        self,
        trainer: Any,
        every: int = 10,
        *,
        completions_at_once: int | None = None,
        sketch: int = 16381,
    ):
        check_trainer(trainer)
        if every < 1:
            raise ConfigError(f"every={every}: at least 1 update is needed between measurements")
        self.trainer, self.every, self.sketch_size = trainer, every, sketch
        self.at_once = completions_at_once or trainer.args.per_device_train_batch_size
        self.measurements: list[Measurement] = []
        self.seconds = 0.0
        self.fault = self.precision = ""
        self._due = 0
        self._begin = time.perf_counter()
        self._sketch: Sketch | None = None
        self._checked = False
        self._generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = self._measured

    def on_train_begin(self, args, state, control, **kwargs):
        """Count time from here, and measure the first batch."""
        self._due, self._begin = state.global_step, time.perf_counter()

    def on_train_end(self, args, state, control, **kwargs):
        """Say in words what was measured."""
        self._print(*self.summary())

    def _measured(self, inputs: Any) -> dict[str, Any]:
        """TRL's own generation; its completions are scored where it is time."""
        output = self._generate(inputs)
        step = self.trainer.state.global_step
        if not self.trainer.model.training or self.fault or step < self._due:
            return output
        start = time.perf_counter()
        measurement = None
        try:
            with whole_weights(self.trainer) as model, unchanged(model):
                self.precision = precision_of(model)
                measurement = self._measure(model, output, step)
        except ConfigError as error:  # the same on all ranks
            self.fault = single_line(error)
        self._due = step + self.every
        spent = time.perf_counter() - start
        self.seconds += spent
        if self.fault:
            self._print(f"{PREFIX}: measures no more at step {step}: {self.fault}")
        if measurement is not None:
            self.measurements.append(measurement)
            self._log(measurement, spent)
        return output

    def _measure(self, model: Any, output: Mapping[str, Any], step: int) -> Measurement | None:
        """The terms of a generation batch's groups; None where fewer than two can be measured.

        Completions travel to where their group is scored, so that every group is whole.

        Raises:
            ConfigError: the batch cannot be measured; on all ranks.
        """
        trainer, accelerator = self.trainer, self.trainer.accelerator
        if "pixel_values" in output:
            raise ConfigError("images have no score rules")
        pad_token = trainer.processing_class.pad_token_id
        rows = gather_object(completions_of(output, pad_token))
        logged = {name: trainer._logs["rewards"][name] for name in trainer.reward_func_names}
        rewards_R = summed_rewards(logged, trainer.reward_weights, len(rows))
        groups, unknown = whole_groups(rows, rewards_R, trainer.num_generations)
        if len(groups) < 2:
            return None
        varied = [place for place, group in enumerate(groups) if group.varies]
        own = varied[accelerator.process_index :: accelerator.num_processes]
        try:
            scored: list[Any] = [(place, self._scores(model, groups[place])) for place in own]
        except Exception as error:  # of any kind: other ranks wait, and training goes on
            scored = [f"{type(error).__name__}: {error}"]
        scored = gather_object(scored)
        if faults := [one for one in scored if isinstance(one, str)]:
            raise ConfigError(faults[0])
        rewards_PG = np.stack([group.rewards_G for group in groups])
        sq_norm_PG, gram_PP = np.zeros(rewards_PG.shape), np.zeros((len(groups), len(groups)))
        if varied:
            scores = dict(scored)
            sq_norm_PG[varied] = [scores[place].sq_norm_G for place in varied]
            gram_PP[np.ix_(varied, varied)] = gradient_gram([scores[place] for place in varied])
        return Measurement(step, group_terms(rewards_PG, sq_norm_PG, gram_PP), unknown)

    def _scores(self, model: Any, group: Group) -> GroupScores:
        """Scores of one group; where memory runs out again, with half as many completions at once.

        Raises:
            ConfigError: not even one completion fits, or a layer's score rule is wrong.
        """
        trainer = self.trainer
        policy = Policy(
            model, trainer.processing_class, frozenset(), trainer.processing_class.pad_token_id
        )  # fmt: skip
        rollouts, weights_G = group.rollouts(), pool_gradient_weights(group.rewards_G)
        if self._sketch is None:
            self._sketch = Sketch(parameter_sizes(policy.model), self.sketch_size)
        if not self._checked:
            self._check(policy, rollouts)
            self._checked = True
        while True:
            try:
                return group_scores(
                    policy, rollouts, 0, weights_G, trainer.temperature, self._sketch, self.at_once
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

    def recent(self) -> list[Measurement]:
        """Those of the second half of the measured steps, at least the last four."""
        if not self.measurements:
            return []
        last = self.measurements[-1].step
        half = [one for one in self.measurements if 2 * one.step >= last]
        return max(half, self.measurements[-LEAST_STEPS:], key=len)

    def estimate(self) -> NoiseEstimate | None:
        """Averages over `recent()`, with intervals; None where nothing was measured."""
        steps = [one.terms for one in self.recent()]
        return noise_estimate(steps, self.trainer.num_generations) if steps else None

    def _log(self, measurement: Measurement, spent: float) -> None:
        """Write to TRL's metrics, and print a line on the main process."""
        estimate = self.estimate()
        assert estimate is not None  # there is this measurement
        alone = noise_estimate([measurement.terms], self.trainer.num_generations).intervals
        values = {name: interval.estimate for name, interval in estimate.intervals.items()}
        values |= {f"step/{name}": alone[name].estimate for name in CONSTANTS_AND_GRADIENT}
        values["seconds"] = spent
        metrics = self.trainer._metrics["train"]
        for name, value in values.items():
            if np.isfinite(value):
                metrics[f"{PREFIX}/{name}"] = [
                    float(value)
                ]  # TRL averages lists: a ratio stays one
        self._print(
            f"{PREFIX} step {measurement.step}: {_numbers(estimate.intervals)}; {spent:.1f} s, "
            f"{self._share()} of the time so far"
        )

    def _share(self) -> str:
        """The time spent on measuring, of all since training began."""
        return f"{100 * self.seconds / (time.perf_counter() - self._begin):.0f} %"

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
        lines = [f"{PREFIX}: {sentence}"]
        if verdict != "not enough data":
            lines.append(other_sizes(group_size_costs(result, rollouts)))
        groups = sum(len(one.terms.g_sq_P) for one in recent)
        lines.append(
            f"{_numbers(estimate.intervals)}. From {groups} groups of {len(recent)} batches, steps "
            f"{recent[0].step} to {recent[-1].step}, of their policies together."
        )
        if estimate.heavy:
            lines.append("Few groups decide: the intervals may cover less than 90 %.")
        if unknown := sum(one.unknown for one in recent):
            lines.append(f"Groups left out, since a completion of theirs has no reward: {unknown}.")
        under = f" under {sharding}" if (sharding := sharding_of(self.trainer)) else ""
        lines.append(f"Scores in {self.precision}, the weights' own precision{under}.")
        lines.append(f"Measuring took {self.seconds:.1f} s, {self._share()} of the time.")
        return lines

    def _print(self, *lines: str) -> None:
        if self.trainer.accelerator.is_main_process:
            print(*map(visible, lines), sep="\n", flush=True)


def _numbers(intervals: Mapping[str, Interval]) -> str:
    """G*, the noise scale at both group sizes and zero-variance groups, in words."""
    share = intervals["zero_variance"]
    if share.estimate == 1:
        return "all groups have equal rewards, so there is no gradient to measure"
    best = _text(intervals["gstar"], least=1, digits=1)
    own, at_best = (_text(intervals[name]) for name in ("noise_scale", "noise_scale_best"))
    silent, low, high = (100 * x for x in share)
    return (
        f"G* {best}, noise scale {own} rollouts (at G* {at_best}), zero-variance groups "
        f"{silent:.0f} [{low:.0f}, {high:.0f}] %"
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
