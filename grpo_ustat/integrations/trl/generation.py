"""Complete groups of completions from a TRL generation batch, with rewards.

TRL returns the rows of a generation batch in rank order, with the G completions of a prompt in
consecutive rows. A group can begin on one rank and end on the next one, so the rows of all ranks
must be gathered before they are divided into groups. TRL gathers the rewards itself.
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
    """Row of a generation batch, without padding."""

    # Token ids including the end-of-sequence token.
    prompt_ids: list[int]
    completion_ids: list[int]
    # True for each completion token that the policy wrote, False for a tool's tokens; None if the
    # policy wrote all tokens.
    written: list[bool] | None = None
    # True if the row contributes to TRL's loss; False if `mask_truncated_completions` masked it.
    counted: bool = True
    # Images of the prompt, see `images.row_images`; present only in the first row of a group.
    images: dict[str, torch.Tensor] | None = None

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids of the prompt and of the completion."""
        return tuple(self.prompt_ids), tuple(self.completion_ids)

    @property
    def length(self) -> int:
        """Number of tokens that the policy wrote."""
        return len(self.completion_ids) if self.written is None else sum(self.written)


@dataclass(frozen=True)
class Group:
    """The G completions of a prompt with their rewards."""

    completions: list[Completion]
    # Weighted sum of the rewards of each completion.
    rewards_G: Array
    # Rewards from each reward function; NaN if the function returned None.
    rewards_GF: Array

    @property
    def varies(self) -> bool:
        """True if the summed rewards differ; the gradient is 0 if they are equal."""
        return bool((self.rewards_G != self.rewards_G[0]).any())

    @property
    def varies_by_function(self) -> bool:
        """True if the rewards of at least one function differ, even if the sums are equal."""
        same_GF = (self.rewards_GF == self.rewards_GF[0]) | np.isnan(self.rewards_GF)
        return not same_GF.all()

    def rollouts(self) -> Rollouts:
        """Return the completions as a batch with one prompt."""
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

    With `mask_truncated_completions`, TRL sets the mask of a truncated completion to 0. Such a
    completion is recovered here: it has no end-of-sequence token, so it ends at its last token that
    is not padding. It is needed because the estimators assume that the expected score over the
    completions of a prompt is 0. The assumption would fail if truncated completions had the score
    0.

    Args:
        output: dictionary with `prompt_ids` and `prompt_mask` (padded on the left),
            `completion_ids` and `completion_mask` (padded on the right), and possibly `tool_mask`,
            which is 1 for the tokens that the policy wrote and 0 for the tokens of tools.
        pad_token: id of the padding token.
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
    """Return the weighted sum of each row's rewards, as in TRL, and each function's rewards.

    The sum is NaN if no function gave the row a reward. The rewards of the functions have the shape
    [rows, functions].

    Args:
        logged: rewards that TRL logged, keyed by reward function: the most recent rows of all
            ranks, in row order. A value is None or NaN if the function returned None.
        weights: weights of the reward functions.
        rows: number of rows of this generation batch on all ranks.
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
    """Return the tokenizer of a trainer, even if it is part of an image processor."""
    return getattr(trainer, "_tokenizer", trainer.processing_class)


def sampler_difference(output: Mapping[str, Any]) -> tuple[float, int]:
    """Return the sum of |log p_sampler - log p_model| over tokens, and the number of tokens.

    Only tokens that the policy wrote are included. TRL returns the sampler's log-probabilities only
    if it samples with vLLM; without vLLM the number of tokens is 0.

    Args:
        output: result of `_generate_and_score_completions`. Tokens whose log-probability from vLLM
            is NaN are left out.
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
    """Return the groups whose rewards are all finite, and the number of the remaining groups.

    Args:
        completions: rows of all ranks, in rank order.
        rewards_R, rewards_RF: rewards of the rows; see `logged_rewards`.
        group_size: G.
    """
    if len(completions) % group_size:
        raise ConfigError(
            f"{len(completions)} completions are not a multiple of num_generations={group_size}"
        )
    groups, unknown = [], 0
    for start in range(0, len(completions), group_size):
        rows = list(completions[start : start + group_size])
        if any(row.prompt_ids != rows[0].prompt_ids for row in rows):
            raise ConfigError(
                f"rows {start} to {start + group_size - 1} are one group but have several prompts: "
                "a run with environments that change the prompt cannot be measured"
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
