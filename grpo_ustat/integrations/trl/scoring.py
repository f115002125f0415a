"""Scores of a run's groups, computed without changing the model, and communication between ranks.

The score of a completion is the gradient of its log-probability. Scores of different prompts are
compared as sketches, which are random projections to R dimensions.
"""

from __future__ import annotations

import inspect
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.integrations.trl.generation import Group, tokenizer_of
from grpo_ustat.integrations.trl.in_step import LayersInStep
from grpo_ustat.integrations.trl.objective import ratio_factors
from grpo_ustat.policy.dropout import (
    RandomStates,
    active_dropout,
    dropping,
    same_draws,
    seeded_states,
)
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.logprobs import Rows, pack, positions, token_logprobs
from grpo_ustat.policy.memory import GRAPH_MEMORY_SHARE, free_bytes, out_of_memory, score_bytes
from grpo_ustat.policy.output_layer import body, causal
from grpo_ustat.policy.prompt_sharing import can_read_contiguous
from grpo_ustat.policy.scores.backward import completion_scores, parameter_sizes
from grpo_ustat.policy.scores.check import check_scores
from grpo_ustat.policy.scores.groups import GroupScores, group_scores
from grpo_ustat.policy.scores.sketch import Sketch
from grpo_ustat.records import Array, Rollouts
from grpo_ustat.terminal.streams import single_line

UNCHECKED = (
    "Scores that are computed layer by layer are not checked against plain differentiation, which "
    "needs the full weights."
)


class GroupScorer:
    """Scorer for the groups of a `GRPOTrainer`.

    The scores of two completions of the first group are checked against plain differentiation.

    If the model has dropout, scores are computed with active dropout and with separate masks for
    each completion, as in TRL's loss. The masks of different groups are independent, whichever
    ranks score the groups. The masks of the update are drawn later, so they are different masks
    with the same distribution. Only `update_scores` repeats the exact masks of the update.

    Args:
        trainer: trainer whose groups are scored.
        completions_at_once: number of completions per pass through the model; halved if memory
            runs out.
        sketch_size: dimension of the sketch of a completion's score.
    """

    def __init__(self, trainer: Any, completions_at_once: int, sketch_size: int):
        self.trainer, self.at_once, self.sketch_size = trainer, completions_at_once, sketch_size
        # Sketch of scores; None before the first group.
        self.sketch: Sketch | None = None
        # Remarks for the user, each a sentence.
        self.notes: list[str] = []
        # Sums over tokens that `update_scores` adds up if pi and pi_old have different dropout
        # masks: |log pi/pi_old|, the number of clipped tokens, and the number of tokens.
        self.ratio_gaps = np.zeros(3)
        self._checked = False
        # Number of calls of `all_scores`, equal on all ranks; used in the seed of dropout masks.
        self._batches = 0

    def sketch_of(self, model: Any) -> Sketch:
        """Return the sketch for the scores of a model; each call returns the same sketch."""
        if self.sketch is None:
            self.sketch = Sketch(parameter_sizes(model), self.sketch_size)
        return self.sketch

    def all_scores(
        self, model: Any, groups: Mapping[int, Group], layers: LayersInStep | None
    ) -> dict[int, GroupScores]:
        """Score each group on one of the ranks; return all scores on all ranks.

        Args:
            model: model with full weights on this rank, or with weights that are gathered layer by
                layer.
            groups: groups, keyed by index in the batch; equal on all ranks.
            layers: layers whose weights all ranks gather together, so that each rank scores one
                group per round; None if the model has full weights.

        Returns:
            Scores, keyed by index of the group.
        """
        accelerator, places = self.trainer.accelerator, list(groups)
        self._batches += 1
        rank, world = accelerator.process_index, accelerator.num_processes
        if layers is None:
            rank_places = places[rank::world]
            return dict(
                from_all_ranks(lambda: [(p, self.scores(model, groups[p], p)) for p in rank_places])
            )
        # Earlier scoring with full weights can have halved `at_once` on some of the ranks.
        self.at_once = min(from_all_ranks(lambda: [self.at_once]))
        scores: dict[int, GroupScores] = {}
        while len(scores) < len(places):
            rank_places = places[len(scores) :][:world][rank : rank + 1]

            def attempt(
                group_places: Sequence[int] = rank_places,
            ) -> list[tuple[int, GroupScores] | None]:
                """Score this rank's group of the round; return [None] if memory ran out."""
                with layers.round(self._passes()):
                    try:
                        return [
                            (p, self._scores(model, groups[p], p, layers)) for p in group_places
                        ]
                    except RuntimeError as error:
                        if not out_of_memory(error):
                            raise
                return [None]

            scored = from_all_ranks(attempt)
            if None in scored:
                self._halve()
            else:
                scores |= dict(scored)
        return scores

    def scores(self, model: Any, group: Group, place: int) -> GroupScores:
        """Score a group; if memory runs out, try again with half as many completions per pass."""
        while True:
            try:
                return self._scores(model, group, place, None)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
            # This is done outside the handler, in which the error would keep its memory allocated.
            self._halve()

    def _scores(
        self, model: Any, group: Group, place: int, layers: LayersInStep | None
    ) -> GroupScores:
        """Score a group with dropout masks seeded by its index; the first call checks the scores.

        The check is skipped if weights are gathered layer by layer.
        """
        trainer = self.trainer
        tokenizer = tokenizer_of(trainer)
        policy = Policy(model, tokenizer, frozenset(), tokenizer.pad_token_id)
        rollouts = group.rollouts()
        images = group.completions[0].images
        if layers is None and not self._checked:
            self._check(policy, rollouts, images)
            self._checked = True
        if layers is not None and UNCHECKED not in self.notes:
            self.notes.append(UNCHECKED)
        sketch, drops = self.sketch_of(model), active_dropout(model) is not None
        with dropping(model, self._states(model, place)) if drops else nullcontext():
            return group_scores(
                policy, rollouts, 0, trainer.temperature, sketch, self.at_once, images,
                None if layers is None else layers.weights, drops,
            )  # fmt: skip

    def _states(self, model: Any, place: int) -> RandomStates:
        """Return random states for the dropout masks of the group at index `place` of the batch."""
        seeds = [self.trainer.args.seed, self._batches, place]
        (seed,) = np.random.SeedSequence(seeds).generate_state(1, np.uint64)
        return seeded_states(model.device, int(seed))

    def update_scores(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        states: RandomStates,
        sign_B: Array,
        trl_positions: bool,
    ) -> Array:
        """Sketch the scores of a micro-batch's B rows with the dropout masks of the loss, [B, R].

        If pi_old was computed with other dropout masks, the gradient of each token is multiplied by
        the factor that TRL's loss applies because of pi/pi_old; see `ratio_factors`.

        Args:
            model: model with full weights that have the same values as in the loss.
            inputs: inputs of TRL's loss.
            states: states of the random generators before TRL computed the loss.
            sign_B: sign of each row's advantage, -1 or 1.
            trl_positions: True to use the positions of TRL's loss, which passes no positions to
                the model.
        """
        if inputs.get("pixel_values") is not None:
            raise ConfigError("the rows of a micro-batch have images of several prompts")
        ids_BT = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask_BT = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        counts_BT = inputs["completion_mask"]
        if inputs.get("tool_mask") is not None:
            counts_BT = counts_BT * inputs["tool_mask"]
        width, drops = counts_BT.shape[1], active_dropout(model) is not None

        def again() -> AbstractContextManager[None]:
            """Repeat the random draws of the loss within the block."""
            return dropping(model, states) if drops else same_draws(model.device)

        def padded(values_BT: torch.Tensor) -> torch.Tensor:
            """Pad values with 0 for the tokens of the prompt."""
            return torch.nn.functional.pad(values_BT, (ids_BT.shape[1] - width, 0))

        weights_BT, old_BT = counts_BT, inputs.get("old_per_token_logps")
        read = score_bytes(model, ids_BT.numel(), by_layer=False)
        with _trl_positions(model) if trl_positions else nullcontext():
            if drops and old_BT is not None:
                with again(), torch.no_grad():
                    rows = Rows(ids_BT, mask_BT, padded(counts_BT), width)
                    log_ratio_BT = token_logprobs(model, rows, self.trainer.temperature) - old_BT
                sign = torch.from_numpy(sign_B).to(log_ratio_BT)
                factors_BT = ratio_factors(self.trainer, log_ratio_BT, counts_BT, sign)
                if factors_BT is None:
                    raise ConfigError("pi and pi_old of the loss have different dropout masks")
                weights_BT = counts_BT * factors_BT
                gap_BT, cut_BT = log_ratio_BT.abs(), (weights_BT == 0) * counts_BT
                sums = (gap_BT * counts_BT).sum(), cut_BT.sum(), counts_BT.sum()
                self.ratio_gaps += [float(x) for x in sums]
            with again():
                features_BR = completion_scores(
                    model, ids_BT, mask_BT, padded(weights_BT),
                    temperature=self.trainer.temperature, features=self.sketch_of(model),
                    by_layer=read > GRAPH_MEMORY_SHARE * free_bytes(model.device),
                    drops=drops, all_columns=True,
                ).features_BR  # fmt: skip
        assert features_BR is not None
        return features_BR.cpu().numpy()

    def shifts_positions(self, model: Any) -> bool:
        """Return True if padding before a prompt changes the model's output in TRL's loss.

        TRL's loss passes no positions to the model, so padding shifts the positions of all later
        tokens. The shift changes the output if positions are absolute, as in GPT-2.
        """
        ids_BT = torch.tensor([[0, 2, 3, 4]], device=model.device)
        mask_BT = torch.tensor([[0, 1, 1, 1]], device=model.device)
        places: list[dict[str, Any]] = [{"position_ids": positions(mask_BT)}, {}]
        if "position_ids" not in inspect.signature(body(causal(model)).forward).parameters:
            return False
        with torch.no_grad():
            with_positions, without_positions = (
                body(causal(model))(
                    input_ids=ids_BT, attention_mask=mask_BT, use_cache=False, **where
                ).last_hidden_state[:, 1:].double()
                for where in places
            )  # fmt: skip
        share = (with_positions - without_positions).norm() / with_positions.norm()
        return bool(share > (1e-3 if model.dtype.itemsize >= 4 else 0.1))

    def _passes(self) -> int:
        """Return the number of passes through the model that one group takes."""
        return math.ceil(self.trainer.num_generations / self.at_once)

    def _halve(self) -> None:
        """Halve the number of completions per pass, and free cached GPU memory."""
        if self.at_once == 1:
            raise ConfigError("out of memory with one completion at a time")
        self.at_once //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _check(self, policy: Policy, rollouts: Rollouts, images: Mapping[str, Any] | None) -> None:
        """Check the scores of a group's two shortest completions against plain differentiation."""
        shortest = np.argsort(rollouts.lengths_PG[0], kind="stable")[:2]
        few = pack(rollouts, shortest, policy.pad_token, policy.model.device)
        try:
            check_scores(
                policy.model,
                few.input_ids_BT,
                few.attention_mask_BT,
                few.completion_mask_BT,
                contiguous=can_read_contiguous(policy),
                images=images,
            )
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            self.notes.append(
                "Scores were not compared with plain differentiation: not enough memory."
            )


def from_all_ranks(make: Callable[[], Sequence[Any]]) -> list[Any]:
    """Call a function on each rank, and return the items of all ranks in rank order.

    If the function fails on one rank, the error is raised on all ranks. No rank then waits forever.
    """
    try:
        made = list(make())
    except Exception as error:
        made = [_Failure(reason_of(error))]
    items = gather_object(made)
    if failures := [item for item in items if isinstance(item, _Failure)]:
        raise ConfigError(failures[0].reason)
    return items


@contextmanager
def _trl_positions(model: Any) -> Iterator[None]:
    """Pass column indices as positions within the block, which is the default of the model."""

    def counting(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Add the column indices to the model's arguments as positions."""
        ids_BT = args[0] if args else kwargs["input_ids"]
        columns_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        return args, {**kwargs, "position_ids": columns_BT}

    handle = body(causal(model)).register_forward_pre_hook(counting, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


class _Failure(NamedTuple):
    """Reason why `from_all_ranks` got no items from a rank."""

    reason: str


def reason_of(error: Exception) -> str:
    """Return a description of an error in one line."""
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return single_line(f"{kind}{error}")


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Switch the model to evaluation mode, without autocast, within the block.

    Modes and random states are restored afterwards. The `grad` of parameters, in which training
    accumulates its gradients, is not changed.
    """
    modes = {module: module.training for module in model.modules()}
    generators = random.getstate(), np.random.get_state()
    device = torch.device(getattr(model, "device", "cpu"))
    # Forward function without accelerate's autocast.
    original: Any = getattr(model, "_original_forward", None)
    wrapped: Any = model.forward
    with (
        same_draws(device),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        try:
            model.eval()
            if original is not None:
                model.forward = original
            yield
        finally:
            if original is not None:
                model.forward = wrapped
            for module, mode in modes.items():
                module.training = mode
            random.setstate(generators[0])
            np.random.set_state(generators[1])


@contextmanager
def only_these(model: torch.nn.Module, pattern: str | None) -> Iterator[None]:
    """Freeze all parameters whose names do not contain a match of a pattern, within the block.

    If the pattern is None, all parameters stay trainable.
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
