"""Comparison of the gradient that TRL applies with the gradient that its arguments declare.

The applied gradient is read before clipping. The declared gradient is a weighted sum of scores
(gradients of the log-probability of each completion), with the weights that the documentation of
the loss gives. Both are compared as sketches, which are random projections to a few thousand
dimensions. The letter R in shapes is the dimension of a sketch.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.applied_gradient import (
    Fault,
    GradientAudit,
    advantages_by_baseline,
    divided,
    judged,
    other_losses,
    rounding,
)
from grpo_ustat.estimators.row_weights import BY_TOKENS_OF_ALL, Loss, token_weights
from grpo_ustat.integrations.trl.applied import add_applied, is_deepspeed
from grpo_ustat.integrations.trl.generation import Group, completions_of, tokenizer_of
from grpo_ustat.integrations.trl.scoring import from_all_ranks, reason_of
from grpo_ustat.policy.audit import epsilon_of
from grpo_ustat.policy.dropout import RandomStates, random_states
from grpo_ustat.policy.scores.sketch import Sketch
from grpo_ustat.records import Array, BaselineContext

Key = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a prompt and of a completion."""
MicroBatch = tuple[Mapping[str, Any], RandomStates]
"""Inputs of a call of TRL's loss, and states of the random generators before this call."""
UpdateScores = Callable[[Sequence[tuple[MicroBatch, Array]]], Mapping[str, Array]]
"""Function that returns sketches of the scores of an update's B rows on this rank, [B, R].

The argument is a list of micro-batches, each with the signs of the declared weights of its rows.
The result maps "" to the scores under the model as the arguments declare it. Every other key
describes a change of the model, for example other token positions, and maps to the scores under the
changed model. All ranks must call the function together."""
OWN_NORMALISER = "a loss that divides by the tokens of each generation batch"


class UpdateResult(NamedTuple):
    """Result of the comparison for one update."""

    # Number of updates before this update.
    step: int
    # Length of the applied gradient relative to the declared gradient, and cosine of the angle
    # between them; NaN if they were not compared.
    ratio: float
    cosine: float
    # True if rounding explains the difference; None if the gradients were not compared.
    agrees: bool | None
    # Result in words, or the reason why there is no result.
    sentence: str


class Row(NamedTuple):
    """Row (prompt and completion) on which an update trained."""

    # Digest of the row's tokens.
    key: bytes
    # Number of tokens that contribute to the loss; 0 for a row that is completely masked.
    tokens: int
    # Number of tokens in the row's generation batch, as TRL counts them.
    batch_tokens: float


class Consumed(NamedTuple):
    """Rows on which an update trained, on one rank."""

    # Rows of each micro-batch.
    rows: list[list[Row]]
    # Digests of the completions for which this rank has scores.
    scored: set[bytes]


class UpdateAudit:
    """Comparison of an update's gradient with `sum_r W_r s_r`, based on sketches of both vectors.

    The sum is over the rows r of the update. W_r is the weight of row r in the declared loss. It is
    computed from the rewards and not from TRL's advantages, so that an error in the advantages is
    found too. s_r is the score of row r, which `expect` receives.

    The rows of an update are read from the micro-batches that reach `compute_loss`. The comparison
    therefore includes the effects of shuffling, of `steps_per_generation` and of a last update with
    fewer micro-batches. The gradient is read when it is complete but not yet clipped: immediately
    before the accelerator clips it, or before the step of a DeepSpeed engine, which clips inside
    its step.

    Training does not change. Ranks communicate only at updates that follow a call of `expect`, so
    `expect` must be called on all ranks or on no rank.

    Args:
        trainer: `trl.GRPOTrainer` before `train()`. Its `compute_loss` is wrapped, and also its
            accelerator's `clip_grad_norm_` or the `step` of a DeepSpeed engine.
        sketch: sketch of the scores; its parameter names do not contain the names of wrappers.
        loss: declared loss.
        rescored: function that scores the rows again with the inputs of the update, for example
            with the dropout masks of the loss. Its scores replace the scores from `expect`. None to
            use the scores from `expect`.
    """

    def __init__(
        self, trainer: Any, sketch: Sketch, loss: Loss, rescored: UpdateScores | None = None
    ):
        self.trainer, self.sketch, self.loss = trainer, sketch, loss
        self.rescored = rescored
        # Results of the scheduled comparisons in order, equal on all ranks.
        self.results: list[UpdateResult] = []
        self._step = -1
        self._inputs: list[MicroBatch] = []
        # Step of the scheduled comparison, with the scores and the groups from `expect`.
        self._expected_at = -1
        self._scores: dict[bytes, np.ndarray] = {}
        self._batches: list[Sequence[Group]] = []
        self._engine: Any = None
        self._compute_loss = trainer.compute_loss
        trainer.compute_loss = self._recording
        if not is_deepspeed(trainer):
            self._clip = trainer.accelerator.clip_grad_norm_
            trainer.accelerator.clip_grad_norm_ = self._clipping

    def expect(self, scores: Mapping[Key, np.ndarray], groups: Sequence[Group]) -> None:
        """Schedule a comparison at the next update, which trains on a measured generation batch.

        Args:
            scores: sketches of the scores that this rank has, keyed by completion. Scores are not
                needed for groups with equal rewards, or if `rescored` was given.
            groups: all groups of the generation batch, equal on all ranks.
        """
        if self._expected_at != self.trainer.state.global_step:
            self._forget()
        self._expected_at = self.trainer.state.global_step
        self._scores |= {digest(*key): sketch_R for key, sketch_R in scores.items()}
        if groups:
            self._batches.append(groups)

    def _recording(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute TRL's loss for a micro-batch, and keep its inputs until the update."""
        if self.trainer.model.training:
            if self._step != self.trainer.state.global_step:
                self._step, self._inputs = self.trainer.state.global_step, []
            self._inputs.append((inputs, random_states(self.trainer.accelerator.device)))
            engine = getattr(self.trainer.accelerator, "deepspeed_engine_wrapped", None)
            if engine is not None and self._engine is not engine.engine:
                self._engine, self._engine_step = engine.engine, engine.engine.step
                engine.engine.step = self._stepping
        return self._compute_loss(model, inputs, *args, **kwargs)

    def _clipping(self, *args: Any, **kwargs: Any) -> Any:
        self._update()
        return self._clip(*args, **kwargs)

    def _stepping(self, *args: Any, **kwargs: Any) -> Any:
        if self._engine.is_gradient_accumulation_boundary():
            self._update()
        return self._engine_step(*args, **kwargs)

    def _update(self) -> None:
        """Compare the gradients if a comparison is scheduled; then discard the update's inputs."""
        if self._inputs and self._expected_at == self._step:
            try:
                audit = self._compare()
                finding = (audit.ratio, audit.cosine, audit.agrees, audit.sentence())
            # All ranks raise the same error, and training continues.
            except Exception as error:
                text = f"The gradient was not compared: {reason_of(error)}"
                finding = (math.nan, math.nan, None, text)
            self.results.append(UpdateResult(self._step, *finding))
        self._inputs = []
        self._forget()

    def _forget(self) -> None:
        """Cancel a scheduled comparison."""
        self._expected_at = -1
        self._scores.clear()
        self._batches.clear()

    def _compare(self) -> GradientAudit:
        """Audit the current update.

        Raises:
            ConfigError: a rank cannot compare the gradients; raised on all ranks.
        """
        accelerator = self.trainer.accelerator
        consumed_by_rank = from_all_ranks(lambda: [self._consumed()])
        rows = [micro_batch for on_rank in consumed_by_rank for micro_batch in on_rank.rows]
        row_N = [row for micro_batch in rows for row in micro_batch]
        weights = self._weights(rows, row_N)
        # Rank that has the scores of each row; -1 if no rank has them.
        if self.rescored is not None:
            counts = [sum(map(len, on_rank.rows)) for on_rank in consumed_by_rank]
            scorer_N = np.repeat(range(len(counts)), counts)
        else:
            scorers = {key: k for k, one in enumerate(consumed_by_rank) for key in one.scored}
            scorer_N = np.array([scorers.get(row.key, -1) for row in row_N])
        is_here_N = scorer_N == accelerator.process_index
        declared_N = weights.pop(self.loss.name)
        if missing := int(((scorer_N < 0) & (declared_N != 0)).sum()):
            raise ConfigError(f"{missing} of the update's {len(row_N)} completions have no scores")
        weights = {
            text: weights_N for text, weights_N in weights.items()
            if not ((scorer_N < 0) & (weights_N != 0)).any()
        }  # fmt: skip
        scores: dict[str, Array] = {}

        def score() -> list[None]:
            """Score this rank's rows; return no items for the other ranks."""
            here = [row for row, is_here in zip(row_N, is_here_N, strict=True) if is_here]
            scores.update(self._own_scores(here, declared_N[is_here_N]))
            return []

        from_all_ranks(score)
        changed = [text for text in scores if text]
        share_SR = torch.zeros(
            (2 + len(weights) + len(changed), self.sketch.dimension), dtype=torch.float64,
            device=accelerator.device,
        )  # fmt: skip
        rows_sq_1 = torch.zeros(1, dtype=torch.float64, device=accelerator.device)

        def add_shares() -> list[None]:
            """Add this rank's parts of all gradients; return no items for the other ranks."""
            add_applied(share_SR[:1], self.trainer, self.sketch)
            if is_here_N.any():
                weights_WO = np.stack([declared_N, *weights.values()])[:, is_here_N]
                others_CR = [weights_WO[:1] @ scores[text] for text in changed]
                share_SR[1:] = torch.from_numpy(
                    np.concatenate([weights_WO @ scores[""], *others_CR])
                )
                rows_sq_1.add_(float(weights_WO[0] ** 2 @ np.square(scores[""]).sum(axis=1)))
            return []

        from_all_ranks(add_shares)
        if accelerator.num_processes > 1:
            share_SR = accelerator.reduce(share_SR, reduction="sum")
            rows_sq_1 = accelerator.reduce(rows_sq_1, reduction="sum")
        applied_R, declared_R, *others = share_SR.cpu().numpy()
        epsilon = epsilon_of(
            torch.bfloat16 if accelerator.mixed_precision != "no" else None,
            *(p.dtype for p in self.trainer.model.parameters() if p.requires_grad),
        )
        tolerance = rounding(epsilon, float(declared_R @ declared_R), float(rows_sq_1))
        others_by_text = dict(zip([*weights, *changed], others, strict=True))
        return judged(applied_R, declared_R, others_by_text, tolerance, self._faults())

    def _own_scores(self, rows: Sequence[Row], declared_O: Array) -> Mapping[str, Array]:
        """Return the scores of this rank's O rows, [O, R], for each model; see `UpdateScores`.

        Args:
            rows: rows whose scores this rank contributes.
            declared_O: weights of the rows in the declared loss.
        """
        if self.rescored is None:
            return {"": np.array([self._scores[row.key] for row in rows], dtype=np.float64)}
        signs = np.split(np.where(declared_O < 0, -1.0, 1.0), len(self._inputs))
        return self.rescored(list(zip(self._inputs, signs, strict=True)))

    def _consumed(self) -> Consumed:
        """Return the rows on which the update trained, on this rank."""
        pad_token = tokenizer_of(self.trainer).pad_token_id
        rows = []
        for inputs, _ in self._inputs:
            mask_BT = inputs["completion_mask"]
            if inputs.get("tool_mask") is not None:
                mask_BT = mask_BT * inputs["tool_mask"]
            items = inputs.get("num_items_in_batch")
            rows.append(
                [
                    Row(
                        digest(completion.prompt_ids, completion.completion_ids),
                        int(tokens),
                        float(items or 0),
                    )
                    for completion, tokens in zip(
                        completions_of(inputs, pad_token), mask_BT.sum(dim=1).tolist(), strict=True
                    )
                ]
            )
        return Consumed(rows, set(self._scores))

    def _weights(self, rows: list[list[Row]], row_N: list[Row]) -> dict[str, Array]:
        """Compute the weights of the rows for the declared loss and for similar other losses.

        If the gradients differ, the other losses are tried as explanations. The keys are the name
        of the declared loss and descriptions of the other losses.
        """
        advantages = self._advantages()
        if unknown := sum(row.key not in advantages for row in row_N):
            raise ConfigError(
                f"{unknown} of the update's {len(row_N)} completions are not in a measured group"
            )
        # Equal completions take their advantages in turn.
        by_row = [of_key.pop(0) if len(of_key := advantages[row.key]) > 1 else of_key[0]
                  for row in row_N]  # fmt: skip
        advantage_N = {
            baseline: np.array([by_baseline[baseline] for by_baseline in by_row])
            for baseline in by_row[0]
        }
        size, loss = len(rows[0]), self.loss
        if any(len(micro_batch) != size for micro_batch in rows):
            raise ConfigError("the update's micro-batches have different sizes")
        length_N = np.array([row.tokens for row in row_N])
        weight_N = token_weights(
            loss.loss_type, length_N, loss.max_completion_length,
            size if loss.loss_type == "bnpo" else None,
        )  # fmt: skip
        weights = {loss.name: advantage_N[loss.baseline] * weight_N}
        args = self.trainer.args
        if loss.loss_type in BY_TOKENS_OF_ALL:
            share = len(rows) / self.trainer.accelerator.num_processes / args.steps_per_generation
            factor_N = np.array([1 / max(row.batch_tokens, 1) / share for row in row_N])
            description = (
                f"{OWN_NORMALISER} ({args.steps_per_generation} micro-batches, as set by "
                "steps_per_generation), not by the tokens of the update "
                f"({len(rows) // self.trainer.accelerator.num_processes} micro-batches)"
            )
            weights[description] = advantage_N[loss.baseline] * factor_N * (length_N > 0)
        return weights | other_losses(loss, advantage_N, weight_N, length_N)

    def _advantages(self) -> dict[bytes, list[dict[str, float]]]:
        """Compute the advantages of the measured completions by baseline, keyed by `digest`."""
        found: dict[bytes, list[dict[str, float]]] = defaultdict(list)
        for groups in self._batches:
            context = BaselineContext(
                lengths_PG=np.array(
                    [[row.length for row in group.completions] for group in groups]
                ),
                rewards_PGF=np.stack([group.rewards_GF for group in groups]),
                reward_weights_F=self.trainer.reward_weights.double().cpu().numpy(),
            )
            rewards_PG = np.stack([group.rewards_G for group in groups])
            by_baseline = advantages_by_baseline(self.loss, rewards_PG, context)
            for p, group in enumerate(groups):
                for i, completion in enumerate(group.completions):
                    found[digest(*completion.key)].append(
                        {baseline: float(values[p, i]) for baseline, values in by_baseline.items()}
                    )
        return found

    def _faults(self) -> list[Fault]:
        """List known trainer faults that multiply the gradient by a constant."""
        trainer, faults = self.trainer, []
        args, window = trainer.args, len(self._inputs)
        high = getattr(trainer, "epsilon_high", math.inf)
        if self.loss.loss_type == "cispo" and high < 1:
            typed = getattr(args, "epsilon_high", None)
            setting = "without epsilon_high" if typed is None else f"with epsilon_high={typed:g}"
            faults.append(Fault(high, f"loss_type='cispo' {setting} caps every weight at {high:g}"))
        steps = args.gradient_accumulation_steps
        faults += divided(window, "gradient_accumulation_steps")
        if window != steps:
            sentence = (
                f"a window of {window} micro-batches is divided by {steps}, as if it were full"
            )
            faults.append(Fault(window / steps, sentence))
        return faults + divided(trainer.accelerator.num_processes, "processes")


def digest(prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> bytes:
    """Return a 16-byte digest of a prompt and its completion."""
    parts = [np.array([len(prompt_ids)]), np.array(prompt_ids), np.array(completion_ids)]
    tokens = np.concatenate([part.astype(np.int64) for part in parts])
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
