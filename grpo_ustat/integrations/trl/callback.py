"""Gradient noise of a TRL run, measured from the completions on which the run trains."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import TrainerCallback

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.groups import NoiseEstimate, noise_estimate
from grpo_ustat.estimators.scaling import CONSTANTS_AND_GRADIENT
from grpo_ustat.integrations.trl.audit import MicroBatch, UpdateAudit
from grpo_ustat.integrations.trl.generation import (
    Completion,
    Group,
    completions_of,
    logged_rewards,
    sampler_difference,
    tokenizer_of,
    whole_groups,
)
from grpo_ustat.integrations.trl.images import row_images
from grpo_ustat.integrations.trl.in_step import LayersInStep
from grpo_ustat.integrations.trl.lines import end_lines, step_line
from grpo_ustat.integrations.trl.objective import (
    EACH_REWARD,
    OwnLoss,
    described,
    loss_of,
    own_loss,
    rollouts_of,
    unmeasured,
    with_functions,
)
from grpo_ustat.integrations.trl.sampling import (
    mean_score_share,
    mean_score_warning,
    sampling_warnings,
)
from grpo_ustat.integrations.trl.scoring import (
    GroupScorer,
    from_all_ranks,
    only_these,
    reason_of,
    unchanged,
)
from grpo_ustat.integrations.trl.sharding import (
    narrow_loss,
    precision_of,
    scored_weights,
    sharding_of,
)
from grpo_ustat.integrations.trl.support import check_parameters, check_trainer
from grpo_ustat.integrations.trl.windows import (
    OpenWindow,
    ScoredGroup,
    Window,
    score_pool,
    scored_group,
    window_of,
)
from grpo_ustat.policy.dropout import active_dropout
from grpo_ustat.policy.scores.groups import GroupScores
from grpo_ustat.records import Array
from grpo_ustat.terminal.streams import visible

# An average uses at least this many windows, or all windows if the run has fewer so far.
MIN_WINDOWS = 4
# Maximum total size in bytes of the sketches (random projections) of scores that are kept. The
# efficiency of the run's loss is computed from them.
POOL_BYTES = 2**27
PREFIX = "grpo_ustat"
NO_GROUPS = (
    "training did not generate 2 groups in which every completion has a finite reward: use more "
    "steps or prompts, and rewards that are numbers"
)
TRL_POSITIONS = (
    "positions that count the padding before a prompt: TRL's loss passes no positions to the "
    "model, so absolute positions are shifted, unlike during sampling. Use "
    "per_device_train_batch_size=1 and prompts of equal length, or a model with rotary positions"
)
# Estimates that are ratios, so that their intervals can have an infinite upper end.
RATIOS = ("gstar", "noise_scale", "noise_scale_best")


@dataclass(frozen=True)
class Options:
    """Options of the measurement; see `GradientNoiseCallback`."""

    every: int
    audit_every: int | None
    parameters: str | None
    by_layer: bool

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(
                f"every={self.every} is below 1: use every=1 to measure every generation batch"
            )
        if self.audit_every is not None and self.audit_every < 1:
            raise ConfigError(
                f"audit_every={self.audit_every} is below 1: use 1 to compare every measured "
                "update, or None to compare only the first"
            )


@dataclass
class AuditProgress:
    """State of the comparisons between the gradient that TRL applies and the declared gradient."""

    # The next comparison is made at this update or later.
    due: float = 0
    # Latest update whose comparison was scheduled.
    step: int = -1
    # Number of finished comparisons that were already logged.
    logged: int = 0
    # True if a result was printed, or the reason why there is no result.
    was_printed: bool = False
    # True if padding before a prompt shifts the token positions in TRL's loss, because the loss
    # passes no positions to the model.
    shifts: bool = False


class GradientNoiseCallback(TrainerCallback):
    """Callback that measures the gradient noise of a `GRPOTrainer` during training.

    The callback reports the noise of the gradient, the relative efficiency of the run's loss and
    the best group size. It also compares two gradients and reports any difference: the gradient
    that TRL applies, and the declared gradient, which follows from the trainer's arguments.

    The callback measures one in `every` generation batches. It computes the score of each
    completion, which is the gradient of its log-probability. This takes one additional forward and
    backward pass over the completions of groups whose rewards differ. No additional completions
    are sampled. If a generation batch has fewer than four groups, its groups are collected with
    later ones into a window of 16 groups; see `windows`.

    C1, C2, C3 and the noise scale describe the leave-one-out gradient of the summed reward. They
    are computed in the precision of the weights and with the same dropout as TRL's loss. Training
    does not change: random states, gradients, modes and parameters are preserved. If an error
    occurs, the callback prints it and stops measuring; training continues.

    The callback adds these metrics to TRL's metrics, with the prefix `grpo_ustat/`:

    - `c1`, `c2`, `c3`, `grad_sq` (||grad J||^2), `gstar`, `noise_scale` (in rollouts, at the run's
      group size), `noise_scale_best` (at G*) and `zero_variance` (share of groups with equal
      rewards). They are averages over the windows in the second half of the steps so far, and over
      at least four windows.
    - `step/...`: the constants of the latest window alone.
    - `loss/...`: the relative efficiency of the run's loss.
    - `audit/ratio`, `audit/cosine`: comparison of the applied and the declared gradient.
    - `sampler_gap`: absolute difference between vLLM's and the model's log-probability of a token
      in nats, averaged over the batch.
    - `seconds`: time spent on measuring.

    Args:
        trainer: `trl.GRPOTrainer` before `train()`; its method `_generate_and_score_completions` is
            wrapped.
        every: 1 to measure every generation batch, 10 to measure one in ten, and so on.
        audit_every: number of updates between two comparisons of the applied and the declared
            gradient; None to compare only the first measured update.
        completions_at_once: number of completions per pass through the model, halved if memory runs
            out; None for a whole group.
        sketch: dimension of the sketch, a random projection of a completion's score. Sketches
            replace the scores in inner products between different prompts.
        parameters: regular expression, for example "norm". Only parameters whose names contain a
            match are measured, which takes less time. None to measure all parameters.
        by_layer: True to gather weights and build graphs layer by layer. If False, this is done
            only for a sharded model whose full weights do not fit in a rank's memory.
        strict: True to raise an error if the trainer cannot be measured. If False, the callback
            prints the reason, and the run continues without measuring.
    """

    def __init__(
        self,
        trainer: Any,
        every: int = 10,
        *,
        audit_every: int | None = None,
        completions_at_once: int | None = None,
        sketch: int = 4093,
        parameters: str | None = None,
        by_layer: bool = False,
        strict: bool = False,
    ):
        self.trainer = trainer
        self.options = Options(every, audit_every, parameters, by_layer)
        # Results.
        self.windows: list[Window] = []
        self.own_loss: OwnLoss | None = None
        self.audit: UpdateAudit | None = None
        # Warnings about sampling, and the reason why the measurement ended.
        self.warnings: list[str] = []
        self.fault = ""
        # How the last measurement was made: the precision of the weights, and how a sharded
        # model's weights were gathered.
        self.precision = self.way = ""
        self.seconds = 0.0
        self._begin = time.perf_counter()
        # `_seen` counts the generation batches. A batch is measured if its number is above `_due`.
        self._seen = self._due = 0
        self._open, self._audit = OpenWindow(), AuditProgress()
        # Groups of the recent windows; only on the main process.
        self._kept: list[ScoredGroup] = []
        try:
            check_trainer(trainer)
            check_parameters(trainer.model, parameters)
        except ConfigError as error:
            if strict:
                raise
            self.fault = reason_of(error)
            self._print(f"{PREFIX}: this run is not measured: {self.fault}")
            return
        self.warnings += sampling_warnings(trainer)
        for sentence in self.warnings:
            self._print(f"{PREFIX}: {sentence}")
        self.scorer = GroupScorer(trainer, completions_at_once or trainer.num_generations, sketch)
        self._generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = self._measured

    def on_train_begin(self, args, state, control, **kwargs):
        """Start the clock, and schedule the first generation batch for measurement."""
        self._seen = self._due = 0
        self._audit.due = state.global_step
        self._begin = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        """Log new comparisons; print the first one and each one in which the gradients differ."""
        results = self.audit.results[self._audit.logged :] if self.audit is not None else []
        for result in results:
            self._audit.logged += 1
            # Both gradients are 0, so the comparison is repeated at a later update.
            if result.agrees and np.isnan(result.cosine):
                self._audit.due = state.global_step
                continue
            for name in ("ratio", "cosine"):
                if np.isfinite(value := getattr(result, name)):
                    self.trainer._metrics["train"][f"{PREFIX}/audit/{name}"].append(value)
            if not self._audit.was_printed or result.agrees is False:
                self._audit.was_printed = True
                self._print(f"{PREFIX} step {result.step}: {result.sentence}{self._ratios()}")

    def on_train_end(self, args, state, control, **kwargs):
        """Print a summary of the measurement."""
        try:
            if not self.fault:
                self._close()
            if self.windows or not self.fault:
                self._print(*self.summary())
        # An error here must not prevent the user's script from saving the trained model.
        except Exception as error:
            self._print(f"{PREFIX}: no summary: {reason_of(error)}")

    def _measured(self, inputs: Any) -> dict[str, Any]:
        """Call TRL's generation, and score the completions if a measurement is due."""
        output = self._generate(inputs)
        step = self.trainer.state.global_step
        if not self.trainer.model.training or self.fault:
            return output
        self._seen += 1
        if self._seen <= self._due and step != self._audit.step:
            return output
        start = time.perf_counter()
        try:
            with (
                scored_weights(self.trainer, self.options.by_layer) as (model, layers),
                unchanged(model),
                only_these(model, self.options.parameters),
            ):
                self.precision = precision_of(model)
                gathering = "with full weights" if sharding_of(self.trainer) else ""
                self.way = gathering if layers is None else "layer by layer"
                self._measure(model, layers, output, step)
            self._open.batches += 1
            self.seconds += time.perf_counter() - start
            if self._open.is_full:
                self._due = self._seen + (self.options.every - 1) * self._open.batches
                self._close()
        # The error is the same on all ranks; see `from_all_ranks`.
        except Exception as error:
            self.fault = reason_of(error)
            self._print(f"{PREFIX}: stopped measuring at step {step}: {self.fault}")
        return output

    def _measure(
        self, model: Any, layers: LayersInStep | None, output: Mapping[str, Any], step: int
    ) -> None:
        """Add the groups of a generation batch to the window, and schedule a comparison if due.

        A group can be spread over two ranks. All completions are therefore sent to all ranks, so
        that the rank that scores a group has all of its completions.
        """
        trainer = self.trainer
        rows = from_all_ranks(lambda: self._own_rows(output))
        gaps, tokens = np.sum(from_all_ranks(lambda: [sampler_difference(output)]), axis=0)
        if tokens:
            trainer._metrics["train"][f"{PREFIX}/sampler_gap"].append(gaps / tokens)
        logged = {name: trainer._logs["rewards"][name] for name in trainer.reward_func_names}
        rewards = logged_rewards(logged, trainer.reward_weights, len(rows))
        groups, unknown = whole_groups(rows, *rewards, trainer.num_generations)
        places = [place for place, group in enumerate(groups) if self._is_scored(group)]
        scored = self.scorer.all_scores(model, {place: groups[place] for place in places}, layers)
        # An update can use several generation batches. The comparison then needs all of them.
        if step >= self._audit.due or step == self._audit.step:
            audit_every, self._audit.step = self.options.audit_every, step
            self._audit.due = step + audit_every if audit_every else float("inf")
            self._announce(model, layers, groups, scored)
        self._open.groups += [
            scored_group(step, group, scored.get(place)) for place, group in enumerate(groups)
        ]
        self._open.unknown += unknown

    def _announce(
        self,
        model: Any,
        layers: LayersInStep | None,
        groups: Sequence[Group],
        scored: Mapping[int, GroupScores],
    ) -> None:
        """Schedule the comparison of the next update's gradient with the declared gradient.

        If TRL computes its loss in a lower precision than the weights, for example in bfloat16,
        this method computes the scores a second time in that precision.

        Args:
            model, layers: scored model; see `scored_weights`.
            groups: all groups of the generation batch.
            scored: scores of the scored groups, keyed by index in `groups`; equal on all ranks.
        """
        trainer = self.trainer
        chosen = self.options.parameters is not None
        reason = "only some parameters are measured" if chosen else unmeasured(trainer)
        shifts = from_all_ranks(lambda: [layers is None and self.scorer.shifts_positions(model)])
        self._audit.shifts = any(shifts)
        again = self._audit.shifts or active_dropout(trainer.model) is not None
        narrow = None if again else narrow_loss(trainer, model)
        if reason is None and narrow is not None:
            try:
                with torch.autocast(model.device.type, narrow):
                    same = {place: groups[place] for place in scored}
                    scored = self.scorer.all_scores(model, same, layers)
            # All ranks raise the same error.
            except ConfigError as error:
                reason = str(error)
        if reason is not None:
            if not self._audit.was_printed:
                self._audit.was_printed = True
                self._print(f"{PREFIX}: the applied gradient is not compared: {reason}")
            return
        if self.audit is None:
            sketch, rescored = self.scorer.sketch_of(model), self._rescored if again else None
            self.audit = UpdateAudit(trainer, sketch, loss_of(trainer), rescored)
        rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
        sketches = {
            completion.key: sketch_R
            for place in list(scored)[rank::world]
            for completion, sketch_R in zip(
                groups[place].completions, scored[place].features_GR, strict=True
            )
        }
        self.audit.expect(sketches, groups)

    def _rescored(self, micro_batches: Sequence[tuple[MicroBatch, Array]]) -> Mapping[str, Array]:
        """Score rows with the inputs and dropout masks of TRL's loss; see `audit.UpdateScores`."""
        start, trainer = time.perf_counter(), self.trainer
        self.scorer.ratio_gaps[:] = 0
        with (
            scored_weights(trainer, self.options.by_layer) as (model, layers),
            unchanged(model),
            nullcontext() if (narrow := narrow_loss(trainer, model)) is None
            else torch.autocast(model.device.type, narrow),
        ):  # fmt: skip
            if layers is not None:
                raise ConfigError(
                    "scores are computed layer by layer, without the loss's dropout masks"
                )
            scores = {
                text: np.concatenate(
                    [
                        self.scorer.update_scores(model, *micro_batch, sign_B, text != "")
                        for micro_batch, sign_B in micro_batches
                    ]
                )
                for text in ["", *([TRL_POSITIONS] if self._audit.shifts else [])]
            }
        self.seconds += time.perf_counter() - start
        return scores

    def _ratios(self) -> str:
        """Return a sentence on how far the dropout masks move the ratio pi/pi_old away from 1.

        The sentence has no full stop, because it is appended to a printed line. It is empty unless
        the loss has dropout. All ranks must call this method.
        """
        if self.audit is None or self.audit.rescored is None:
            return ""
        gap, cut, tokens = np.sum(from_all_ranks(lambda: [self.scorer.ratio_gaps]), axis=0)
        if not tokens:
            return ""
        return (
            f". TRL draws dropout masks for pi_old too: |log pi/pi_old| is {gap / tokens:.3f} nats "
            f"per token on average, and {100 * cut / tokens:.1f} % of tokens are clipped. C1, C2 "
            "and C3 do not include this effect"
        )

    def _own_rows(self, output: Mapping[str, Any]) -> list[Completion]:
        """Return this rank's rows; only the first row of a group includes the prompt's images."""
        trainer = self.trainer
        rows = completions_of(output, tokenizer_of(trainer).pad_token_id)
        before = trainer.accelerator.process_index * len(rows)
        return [
            replace(row, images=row_images(output, i) or None)
            if (before + i) % trainer.num_generations == 0
            else row
            for i, row in enumerate(rows)
        ]

    def _is_scored(self, group: Group) -> bool:
        """Return True if the scores of a group are needed.

        A group whose summed rewards are equal has the gradient 0 and normally needs no scores.
        There are two exceptions. If the loss normalises the rewards of each reward function
        separately, a group also needs scores if the rewards of some function differ. After a
        warning about sampling, all groups of the first window need scores, because their mean
        score shows whether the scored policy wrote the completions.
        """
        if self.warnings and not self.windows:
            return True
        each = getattr(self.trainer, "multi_objective_aggregation", "") == EACH_REWARD
        return group.varies or (each and group.varies_by_function)

    def _close(self) -> None:
        """Close the open window and log the estimates; discard a window of fewer than 2 groups."""
        ended, self._open = self._open, OpenWindow()
        groups = ended.groups
        if len(groups) < 2:
            return
        if self.warnings and not self.windows:
            share = mean_score_share([group.scores.gram_GG for group in groups if group.scores])
            for sentence in mean_score_warning(share):
                self.warnings.append(sentence)
                self._print(f"{PREFIX}: {sentence}")
        self.windows.append(window_of(groups, ended.unknown, not self.warnings))
        if self.trainer.accelerator.is_main_process:
            sizes = [
                group.scores.features_GR.nbytes for group in groups if group.scores is not None
            ]
            most = max(1, POOL_BYTES // max(sizes, default=1))
            first = self.recent()[0].first
            recent = [group for group in [*self._kept, *groups] if group.step >= first]
            self._kept = recent[-most:]
            count = len(self.windows)
            if count >= MIN_WINDOWS and count & (count - 1) == 0:
                self.judge_own_loss()
        self._log(self.windows[-1])

    def judge_own_loss(self, draws: int = 100) -> None:
        """Estimate the relative efficiency of the run's loss from the groups of recent windows.

        Only the main process calls this method. It stores an error as the reason why the efficiency
        is unknown and does not raise it, because the other ranks continue training.

        Args:
            draws: number of random pairs of batches that are drawn from the groups if a row's
                weight in the loss depends on all rows of its batch; other losses need no draws.
        """
        if not self._kept:
            return
        start = time.perf_counter()
        trainer, rollouts = self.trainer, rollouts_of(self.trainer)
        words, reason = "as its arguments define it", unmeasured(trainer)
        try:
            if reason is None:
                words = described(trainer)
                pool = score_pool(self._kept)
                if trainer.args.multi_objective_aggregation == EACH_REWARD:
                    pool = with_functions(pool, trainer.reward_weights.double().cpu().numpy())
                self.own_loss = own_loss(pool, loss_of(trainer), rollouts, words, draws)
        except Exception as error:
            reason = reason_of(error)
        if reason is not None:
            self.own_loss = OwnLoss(words, rollouts, len(self._kept), reason)
        self.seconds += time.perf_counter() - start

    def recent(self) -> list[Window]:
        """Return the windows in the second half of the steps so far, but at least the last four."""
        if not self.windows:
            return []
        last = self.windows[-1].last
        half = [window for window in self.windows if 2 * window.first >= last]
        return max(half, self.windows[-MIN_WINDOWS:], key=len)

    def estimate(self) -> NoiseEstimate | None:
        """Return averages over `recent()` with intervals; None if nothing was measured."""
        steps = [window.terms for window in self.recent()]
        return noise_estimate(steps, self.trainer.num_generations) if steps else None

    def _log(self, window: Window) -> None:
        """Write to TRL's metrics and print a line on the main process."""
        estimate = self.estimate()
        # There is at least one window.
        assert estimate is not None
        step_intervals = noise_estimate([window.terms], self.trainer.num_generations).intervals
        values = {
            name: interval.estimate
            for name, interval in estimate.intervals.items()
            if np.isfinite(interval.high) or name not in RATIOS
        }
        values |= {f"step/{name}": step_intervals[name].estimate for name in CONSTANTS_AND_GRADIENT}
        values |= self.own_loss.numbers() if self.own_loss else {}
        values["seconds"] = self.seconds
        metrics = self.trainer._metrics["train"]
        for name, value in values.items():
            if np.isfinite(value):
                # TRL averages the list of each metric. The list has a single item, because the
                # average of several ratios would not be the ratio of their averages.
                metrics[f"{PREFIX}/{name}"] = [float(value)]
        line = step_line(estimate.intervals, self.own_loss)
        way = f"scored {self.way}; " if self.way else ""
        self._print(f"{PREFIX} step {window.last}: {line}; {way}{self._cost()} so far")

    def _cost(self) -> str:
        """Return the time spent on measuring, and its share of the time since training began."""
        share = 100 * self.seconds / (time.perf_counter() - self._begin)
        return f"{self.seconds:.1f} s, {share:.0f} % of the time"

    def summary(self) -> list[str]:
        """Return lines that summarise the current estimates.

        The lines advise the user to keep, raise or lower the group size. They also give the
        estimates behind the advice, the time spent on measuring and, on the main process, the
        relative efficiency of the run's loss.
        """
        estimate = self.estimate()
        if estimate is None:
            return [f"{PREFIX}: nothing was measured: {self.fault or NO_GROUPS}."]
        if self.trainer.accelerator.is_main_process:
            self.judge_own_loss(draws=400)
        under = f" under {sharding}" if (sharding := sharding_of(self.trainer)) else ""
        under += f" {self.way}" if self.way else ""
        chosen = self.options.parameters
        part = "" if chosen is None else f" of parameters that match {chosen!r}"
        first, *others = end_lines(
            estimate, self.recent(), self.own_loss, self.trainer.num_generations,
            rollouts_of(self.trainer), f"scores{part} in {self.precision}{under}", self._cost(),
        )  # fmt: skip
        return [f"{PREFIX}: {first}", *others, *self.scorer.notes]

    def _print(self, *lines: str) -> None:
        # An object that `check_trainer` refused may have no accelerator.
        accelerator = getattr(self.trainer, "accelerator", None)
        if accelerator is None or accelerator.is_main_process:
            # tqdm.write keeps progress bars intact; print does not.
            tqdm.write("\n".join(map(visible, lines)))
