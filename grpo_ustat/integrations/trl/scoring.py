"""Scores of a run's groups, in a model that is left as it is, and what ranks tell each other."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.integrations.trl.generation import Group, tokenizer_of
from grpo_ustat.integrations.trl.in_step import LayersInStep
from grpo_ustat.policy.loading import Policy, out_of_memory
from grpo_ustat.policy.logprobs import pack, token_logprobs
from grpo_ustat.policy.prompt_sharing import can_read_contiguous
from grpo_ustat.policy.scores.backward import check_scores, parameter_sizes
from grpo_ustat.policy.scores.groups import GroupScores, group_scores
from grpo_ustat.policy.scores.sketch import Sketch
from grpo_ustat.records import Array, Rollouts
from grpo_ustat.terminal.streams import single_line

UNCHECKED = (
    "Layer by layer scores are not compared with plain differentiation, which needs whole weights."
)


class GroupScorer:
    """Scores groups of a `GRPOTrainer`, two completions of which it differentiates plainly too.

    Args:
        trainer: whose.
        completions_at_once: of a pass of the model; halved where memory runs out.
        sketch_size: numbers that are kept of a completion's score.

    Attributes:
        sketch: of scores; None before the first group.
        notes: what there is to say, in sentences.
    """

    def __init__(self, trainer: Any, completions_at_once: int, sketch_size: int):
        self.trainer, self.at_once, self.sketch_size = trainer, completions_at_once, sketch_size
        self.sketch: Sketch | None = None
        self.notes: list[str] = []
        self._checked = False

    def sketch_of(self, model: Any) -> Sketch:
        """The sketch of scores of a model, the same whenever it is asked for."""
        if self.sketch is None:
            self.sketch = Sketch(parameter_sizes(model), self.sketch_size)
        return self.sketch

    def all_scores(
        self, model: Any, groups: Mapping[int, Group], layers: LayersInStep | None
    ) -> dict[int, GroupScores]:
        """Scores of groups by place, each from one of the ranks; on all.

        Args:
            model: whose weights are whole, or in its layers in step.
            groups: by place, the same on all ranks.
            layers: those in step, for which ranks score a group each in one round; or None.

        Raises:
            ConfigError: a rank could not score one of its groups; on all ranks.
        """
        accelerator, places = self.trainer.accelerator, list(groups)
        rank, world = accelerator.process_index, accelerator.num_processes
        if layers is None:
            own = places[rank::world]
            return dict(from_all_ranks(lambda: [(p, self.scores(model, groups[p])) for p in own]))
        self.at_once = min(from_all_ranks(lambda: [self.at_once]))  # with whole weights of its own
        scores: dict[int, GroupScores] = {}
        while len(scores) < len(places):
            own = places[len(scores) :][:world][rank : rank + 1]

            def attempt(own: Sequence[int] = own) -> list[tuple[int, GroupScores] | None]:
                """Scores of this rank's group of the round; None where its memory ran out."""
                with layers.round(self._passes()):
                    try:
                        return [(p, self._scores(model, groups[p], layers)) for p in own]
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

    def scores(self, model: Any, group: Group) -> GroupScores:
        """Scores of one group; where memory runs out again, with half as many completions at once.

        Raises:
            ConfigError: not even one completion fits, or a layer's score rule is wrong.
        """
        while True:
            try:
                return self._scores(model, group, None)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
            self._halve()  # not in the handler: the error holds all that was allocated

    def _scores(self, model: Any, group: Group, layers: LayersInStep | None) -> GroupScores:
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
        return group_scores(
            policy, rollouts, 0, trainer.temperature, self.sketch_of(model), self.at_once, images,
            None if layers is None else layers.weights,
        )  # fmt: skip

    def _passes(self) -> int:
        """Passes of the model through a group."""
        return math.ceil(self.trainer.num_generations / self.at_once)

    def _halve(self) -> None:
        """Half as many completions of a pass.

        Raises:
            ConfigError: it is one.
        """
        if self.at_once == 1:
            raise ConfigError("out of memory with one completion at a time")
        self.at_once //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @contextmanager
    def reads_group(self, layers: LayersInStep | None) -> Iterator[None]:
        """Within, `logprobs` can be asked for once; layers in step need it on all ranks."""
        if layers is None:
            yield
            return
        with layers.round(self._passes(), backward=False), layers.forward():
            yield

    def logprobs(self, model: Any, group: Group) -> Array:
        """Log-probabilities of the tokens of a group's completions, [G, T], 0 on padding."""
        rollouts, pad_token = group.rollouts(), tokenizer_of(self.trainer).pad_token_id
        size = len(group.completions)
        parts = np.split(np.arange(size), range(self.at_once, size, self.at_once))
        with torch.no_grad():
            logprobs = [
                token_logprobs(
                    model, pack(rollouts, part, pad_token, model.device), self.trainer.temperature
                )
                for part in parts
            ]
        width = rollouts.mask_PGT.shape[2]
        return np.concatenate(
            [
                np.pad(part.double().cpu().numpy(), ((0, 0), (0, width - part.shape[1])))
                for part in logprobs
            ]
        )

    def _check(self, policy: Policy, rollouts: Rollouts, images: Mapping[str, Any] | None) -> None:
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
                images=images,
            )
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            self.notes.append("No memory to compare scores with plain differentiation.")


def from_all_ranks(make: Callable[[], Sequence[Any]]) -> list[Any]:
    """The items that all ranks make, in rank order.

    Raises:
        ConfigError: making them failed on some rank, for whatever reason; on all ranks, since the
            others wait for its items, and training goes on.
    """
    try:
        own = list(make())
    except Exception as error:
        own = [_Failure(reason_of(error))]
    items = gather_object(own)
    if failures := [item for item in items if isinstance(item, _Failure)]:
        raise ConfigError(failures[0].reason)
    return items


class _Failure(NamedTuple):
    """Why a rank has no items."""

    reason: str


def reason_of(error: Exception) -> str:
    """What went wrong, in one line."""
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return single_line(f"{kind}{error}")


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
