"""Input rows of the model, and log-probabilities of completions.

There are two kinds of rows. In `Rows`, a row is a left-padded prompt followed by a right-padded
completion, so that all completions start in the same column. Position ids are passed to the model,
so padding does not shift the positions of a prompt. In `ContiguousRows`, all padding is at the end
of a row. A causal model needs no attention mask for them, because no token reads the padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from grpo_ustat.records import Rollouts


@dataclass(frozen=True)
class Rows:
    """B rows of left-padded prompts followed by right-padded completions, T columns in all."""

    input_ids_BT: torch.Tensor
    # 1 on prompt and completion tokens.
    attention_mask_BT: torch.Tensor
    # 1 on completion tokens that the policy generated; see `Rollouts.scored_PGT`.
    completion_mask_BT: torch.Tensor
    # Number of columns at the end that contain completions.
    width: int


def pack(rollouts: Rollouts, index: np.ndarray, pad_token: int, device: torch.device) -> Rows:
    """Pack completions into rows, in the order of `index`.

    Args:
        rollouts: prompts and their completions.
        index: flat indices p*G + i, for completion i of prompt p.
        pad_token: token id for padded positions.
        device: device of the rows.
    """
    group_size = rollouts.mask_PGT.shape[1]
    prompts = [rollouts.prompt_tokens[i // group_size] for i in index]
    prompt_BL, mask_BL = left_padded(prompts, pad_token, device)
    longest = rollouts.mask_PGT.shape[-1]
    written_BT = rollouts.mask_PGT.reshape(-1, longest)[index]
    width = int(written_BT.sum(axis=1).max())
    written_BT = written_BT[:, :width]
    tokens_BT = rollouts.tokens_PGT.reshape(-1, longest)[index, :width]
    tokens_BT = np.where(written_BT, tokens_BT, pad_token).astype(np.int64)
    mask_BT = torch.from_numpy(written_BT.astype(np.int64)).to(device)
    scored_BT = mask_BT
    if rollouts.scored_PGT is not None:
        own_BT = rollouts.scored_PGT.reshape(-1, longest)[index, :width]
        scored_BT = mask_BT * torch.from_numpy(own_BT.astype(np.int64)).to(device)
    return Rows(
        input_ids_BT=torch.cat([prompt_BL, torch.from_numpy(tokens_BT).to(device)], dim=1),
        attention_mask_BT=torch.cat([mask_BL, mask_BT], dim=1),
        completion_mask_BT=torch.cat([torch.zeros_like(mask_BL), scored_BT], dim=1),
        width=width,
    )


@dataclass(frozen=True)
class ContiguousRows:
    """B rows, each a prompt and its completion without a gap, padded only at the end.

    L is the length of the longest row, and T that of the longest completion.
    """

    input_ids_BL: torch.Tensor
    # Column of `input_ids_BL` at which the model predicts each completion token. For padding after
    # a completion, columns beyond the row are replaced by the last column.
    columns_BT: torch.Tensor
    # Token ids of the completions.
    targets_BT: torch.Tensor
    # 1 on completion tokens that the policy generated; see `Rollouts.scored_PGT`.
    mask_BT: torch.Tensor


def pack_contiguous(
    rollouts: Rollouts, index: np.ndarray, pad_token: int, device: torch.device
) -> ContiguousRows:
    """Pack completions into contiguous rows, in the order of `index`; arguments as in `pack`."""
    group_size, longest = rollouts.mask_PGT.shape[1:]
    written_BT = rollouts.mask_PGT.reshape(-1, longest)[index]
    lengths_B = written_BT.sum(axis=1)
    width = int(lengths_B.max())
    prompts = [rollouts.prompt_tokens[i // group_size] for i in index]
    heads_B = np.array([len(prompt) for prompt in prompts])
    tokens_BT = rollouts.tokens_PGT.reshape(-1, longest)[index, :width]
    targets_BT = np.where(written_BT[:, :width], tokens_BT, pad_token).astype(np.int64)
    ids_BL = np.full((len(index), int((heads_B + lengths_B).max())), pad_token, dtype=np.int64)
    for row, (prompt, length) in enumerate(zip(prompts, lengths_B, strict=True)):
        ids_BL[row, : len(prompt)] = prompt
        ids_BL[row, len(prompt) : len(prompt) + length] = targets_BT[row, :length]
    columns_BT = (heads_B[:, None] - 1 + np.arange(width)).clip(max=ids_BL.shape[1] - 1)
    mask_BT = written_BT[:, :width]
    if rollouts.scored_PGT is not None:
        mask_BT = mask_BT & rollouts.scored_PGT.reshape(-1, longest)[index, :width]
    columns = (ids_BL, columns_BT, targets_BT, mask_BT.astype(np.int64))
    return ContiguousRows(*(torch.from_numpy(column).to(device) for column in columns))


def left_padded(
    prompts: list[list[int]], pad_token: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids and the mask of left-padded prompts, [P, L] with longest length L."""
    ids_PL = np.full((len(prompts), max(map(len, prompts))), pad_token, dtype=np.int64)
    mask_PL = np.zeros_like(ids_PL)
    for row, prompt in enumerate(prompts):
        start = ids_PL.shape[1] - len(prompt)
        ids_PL[row, start:], mask_PL[row, start:] = prompt, 1
    return torch.from_numpy(ids_PL).to(device), torch.from_numpy(mask_PL).to(device)


def positions(attention_mask_BT: torch.Tensor) -> torch.Tensor:
    """Return position ids, which are 0 at the first real token of each row."""
    return (attention_mask_BT.cumsum(-1) - 1).clamp(min=0)


def completion_logprobs(
    model: PreTrainedModel, rows: Rows, temperature: float = 1.0
) -> torch.Tensor:
    """Compute the log-probability of each row's completion, [B], in float32 or a wider type."""
    return token_logprobs(model, rows, temperature).sum(dim=1)


def token_logprobs(model: PreTrainedModel, rows: Rows, temperature: float = 1.0) -> torch.Tensor:
    """Compute log-probabilities of completion tokens, in float32 or a wider type.

    Args:
        model: causal language model.
        rows: rows of prompts and completions.
        temperature: temperature that divides the logits.

    Returns:
        Array [B, rows.width], with 0 for tokens that `completion_mask_BT` excludes.
    """
    logits = model(
        input_ids=rows.input_ids_BT,
        attention_mask=rows.attention_mask_BT,
        position_ids=positions(rows.attention_mask_BT),
        logits_to_keep=rows.width + 1,
        use_cache=False,
    ).logits[:, :-1]
    logits = widen(logits) / temperature
    targets = rows.input_ids_BT[:, -rows.width :]
    logprobs = -torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    ).view_as(targets)
    return logprobs * rows.completion_mask_BT[:, -rows.width :]


def widen(values: torch.Tensor) -> torch.Tensor:
    """Convert values of a 16-bit type to float32, so that sums of them are precise."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
