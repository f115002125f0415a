"""Completions that TRL generated in a batch, in complete groups, with their rewards.

TRL returns the rows of a generation batch in rank order, the G completions of a prompt one after
another; a group may begin on one rank and end on the next. TRL itself gathers the rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.records import Array, Prompt, Rollouts


@dataclass(frozen=True)
class Completion:
    """One row of a generation batch, without padding."""

    # Token ids, end token included.
    prompt_ids: list[int]
    completion_ids: list[int]
    # True for each token of the completion that the policy wrote; None: it wrote all.
    written: list[bool] | None = None
    # True if TRL's loss counts it; False if `mask_truncated_completions` masked it.
    counted: bool = True
    # Images of its prompt, see `images.row_images`; only a group's first row has them.
    images: dict[str, torch.Tensor] | None = None

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids of the prompt, and of the completion."""
        return tuple(self.prompt_ids), tuple(self.completion_ids)

    @property
    def length(self) -> int:
        """Tokens that the policy wrote."""
        return len(self.completion_ids) if self.written is None else sum(self.written)


@dataclass(frozen=True)
class Group:
    """The G completions of a prompt and their rewards."""

    completions: list[Completion]
    # The weighted sums of their rewards.
    rewards_G: Array
    # Rewards by reward function, NaN where it returned None.
    rewards_GF: Array

    @property
    def varies(self) -> bool:
        """True if its rewards differ; if not, its gradient is 0 for any scores."""
        return bool((self.rewards_G != self.rewards_G[0]).any())

    @property
    def varies_by_function(self) -> bool:
        """True if the rewards of some function differ, though their sums may not."""
        same_GF = (self.rewards_GF == self.rewards_GF[0]) | np.isnan(self.rewards_GF)
        return not same_GF.all()

    def rollouts(self) -> Rollouts:
        """Return its completions as a batch of one prompt."""
        lengths = [len(completion.completion_ids) for completion in self.completions]
        tokens_GT = np.zeros((len(lengths), max(lengths)), dtype=np.int64)
        mask_GT = np.arange(max(lengths)) < np.array(lengths)[:, None]
        scored_GT = mask_GT.copy()
        for i, completion in enumerate(self.completions):
            tokens_GT[i, : lengths[i]] = completion.completion_ids
            if completion.written is not None:
                scored_GT[i, : lengths[i]] = completion.written
        return Rollouts(
            prompts=[Prompt("", "", "", "", "")],
            prompt_tokens=[self.completions[0].prompt_ids],
            tokens_PGT=tokens_GT[None],
            mask_PGT=mask_GT[None],
            ended_PG=np.ones((1, len(lengths)), dtype=bool),
            texts_PG=[[""] * len(lengths)],
            scored_PGT=scored_GT[None],
        )


def completions_of(output: Mapping[str, Any], pad_token: int) -> list[Completion]:
    """Parse the rows that `_generate_and_score_completions` returned.

    A completion that `mask_truncated_completions` has masked completely is recovered as it was
    written: a truncated completion ends in neither an end token nor padding, so it ends at its last
    token that is not padding. Its score counts: all formulas here need scores whose mean over a
    prompt's completions is 0, and scores that are set to 0 by length have another mean.

    Args:
        output: `prompt_ids`, `prompt_mask` (padded on the left), `completion_ids`,
            `completion_mask` (on the right) and perhaps `tool_mask`, 1 on the policy's tokens.
        pad_token: id of the padding.
    """
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    prompts, prompt_masks, completions, masks = (output[name].cpu() for name in names)
    tools = output.get("tool_mask")
    rows = []
    for i, ids_T in enumerate(completions):
        length = int(masks[i].sum())
        counted = length > 0
        if not counted:
            not_padding = (ids_T != pad_token).nonzero()
            length = int(not_padding.max()) + 1 if len(not_padding) else 0
        written = None if tools is None else tools[i, :length].bool().tolist()
        prompt_ids = prompts[i][prompt_masks[i].bool()].tolist()
        rows.append(Completion(prompt_ids, ids_T[:length].tolist(), written, counted))
    return rows


def logged_rewards(
    logged: Mapping[str, Sequence[float]], weights: torch.Tensor, rows: int
) -> tuple[Array, Array]:
    """Compute the weighted sum of each row's rewards, as TRL adds them up, and the rewards.

    The sum is NaN if a row has no reward. The rewards by function are [rows, functions].

    Args:
        logged: rewards of all ranks' last rows by reward function, in their order; NaN where it
            returned None.
        weights: weights of the reward functions.
        rows: number of rows of this generation batch, all ranks together.
    """
    columns = []
    for name, values in logged.items():
        last = [math.nan if value is None else float(value) for value in values][-rows:]
        if len(last) != rows:
            raise ConfigError(
                f"{len(last)} rewards of {name} are logged for {rows} completions: "
                "generation_batch_size is smaller than the number of generated completions"
            )
        columns.append(last)
    values_RF = np.array(columns).T
    none_R = np.isnan(values_RF).all(axis=1)
    sums_R = np.nansum(values_RF * weights.double().cpu().numpy(), axis=1)
    return np.where(none_R, np.nan, sums_R), values_RF


def tokenizer_of(trainer: Any) -> Any:
    """Return the tokenizer of a trainer, also if it is inside a processor of images."""
    return getattr(trainer, "_tokenizer", trainer.processing_class)


def sampler_difference(output: Mapping[str, Any]) -> tuple[float, int]:
    """Sum |log-probability of the sampler - log-probability of the model| over the policy's tokens.

    The second value is their number; it is 0 if TRL logs no sampler, which it does only for vLLM.

    Args:
        output: from `_generate_and_score_completions`. A token that vLLM could not score is NaN,
            and left out.
    """
    sampled_BT, own_BT = (
        output.get(name) for name in ("sampling_per_token_logps", "old_per_token_logps")
    )
    if sampled_BT is None or own_BT is None:
        return 0.0, 0
    counts_BT = output["completion_mask"].bool() & ~sampled_BT.isnan()
    if output.get("tool_mask") is not None:
        counts_BT &= output["tool_mask"].bool()
    difference = (sampled_BT - own_BT).abs()[counts_BT].double().sum()
    return float(difference), int(counts_BT.sum())


def whole_groups(
    completions: Sequence[Completion], rewards_R: Array, rewards_RF: Array, group_size: int
) -> tuple[list[Group], int]:
    """Form the groups of a generation batch with finite rewards, and count the others.

    Args:
        completions: all ranks' rows, in rank order.
        rewards_R, rewards_RF: their rewards, see `logged_rewards`.
        group_size: G.
    """
    if len(completions) % group_size:
        raise ConfigError(
            f"{len(completions)} completions are no multiple of num_generations={group_size}"
        )
    groups, unknown = [], 0
    for start in range(0, len(completions), group_size):
        rows = list(completions[start : start + group_size])
        if any(row.prompt_ids != rows[0].prompt_ids for row in rows):
            raise ConfigError(
                f"rows {start} to {start + group_size - 1} are one group but have several prompts: "
                "environments that change the prompt cannot be measured"
            )
        if not all(row.prompt_ids and row.completion_ids for row in rows):
            raise ConfigError(
                f"a prompt or completion of rows {start} to {start + group_size - 1} has no token"
            )
        members = slice(start, start + group_size)
        if np.isfinite(rewards_R[members]).all():
            groups.append(Group(rows, rewards_R[members], rewards_RF[members]))
        else:
            unknown += 1
    return groups, unknown
