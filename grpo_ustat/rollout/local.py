"""In-process sampling: a prompt is read once per group and finished completions leave the batch.

Tokens are drawn from exactly the distribution that is scored, softmax(logits / temperature) over
the whole vocabulary, by inverting its cumulative distribution at a keyed uniform.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache

from grpo_ustat.config import Common
from grpo_ustat.pace import Pace
from grpo_ustat.policy.devices import out_of_memory
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.logprobs import left_padded, positions
from grpo_ustat.records import Prompt, Rollouts
from grpo_ustat.rollout.assemble import assemble
from grpo_ustat.rollout.cache import growing_cache
from grpo_ustat.rollout.draws import uniforms
from grpo_ustat.rollout.packed import packed_linears
from grpo_ustat.rollout.tokens import choose

COMPACT_BELOW = 0.8  # drop finished rows once fewer than this share are still writing


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Attributes:
        seed, stream: key the draws, with `step` of each call.
        max_completion_length: tokens after which a completion is cut.
        temperature: divides the logits.
        rows: completions written side by side; changes speed and memory, not draws.
        greedy: the likeliest token each time instead of a drawn one.
    """

    seed: int
    stream: str
    max_completion_length: int
    temperature: float = 1.0
    rows: int = 512
    greedy: bool = False

    @classmethod
    def of(cls, config: Common, stream: str, greedy: bool = False) -> Sampling:
        """The configured sampling for one stream of draws."""
        return cls(
            seed=config.seed,
            stream=stream,
            max_completion_length=config.max_completion_length,
            temperature=config.temperature,
            rows=config.rollout_batch_size,
            greedy=greedy,
        )


def sample(
    policy: Policy,
    prompts: list[Prompt],
    group_size: int,
    sampling: Sampling,
    *,
    step: int = 0,
    first: int = 0,
) -> Rollouts:
    """`group_size` completions of each prompt.

    Where memory runs out, half as many completions are written side by side, with a warning; the
    draws are the same.

    Args:
        policy: the model and tokenizer.
        prompts: P prompts.
        group_size: G.
        sampling: see `Sampling`.
        step: training step or replicate, part of the draws' key.
        first: index of the first completion; completions 0..3 and then 4..7 are the same eight as
            0..7 at once.

    Raises:
        RuntimeError: there is no memory for one completion.
    """
    encoded = policy.encode([prompt.text for prompt in prompts])
    order = sorted(range(len(prompts) * group_size), key=lambda r: len(encoded[r // group_size]))
    written = _Written.empty(len(order), sampling.max_completion_length, policy.model.dtype, "cpu")
    side, pace = min(sampling.rows, len(order)), Pace("writing", len(order))
    with policy.computing(), packed_linears(policy.model, side):
        while order:
            rows, reading, draws = order[:side], [], []
            for p, own in groupby(rows, key=lambda r: r // group_size):
                completions = [first + r % group_size for r in own]
                reading.append((encoded[p], len(completions)))
                draws.append(_draws(prompts[p].id, completions, step, sampling))
            part = _write_if_it_fits(policy, reading, np.concatenate(draws), sampling, pace)
            if part is None:
                side = len(rows) // 2
            else:
                written.put(rows, part)
                order = order[side:]
    columns = {name: value.numpy() for name, value in vars(written).items()}
    return assemble(policy, prompts, encoded, **columns)


def _draws(prompt_id: str, completions: list[int], step: int, sampling: Sampling) -> np.ndarray:
    own, count = range(completions[0], completions[-1] + 1), sampling.max_completion_length
    return uniforms(sampling.seed, sampling.stream, step, prompt_id, own, count)


@dataclass(frozen=True)
class _Written:
    """Completions of R rows, T columns; 0 after each one's end."""

    tokens_RT: torch.Tensor
    logprobs_RT: torch.Tensor
    entropy_RT: torch.Tensor
    lengths_R: torch.Tensor

    @classmethod
    def empty(cls, rows: int, width: int, dtype: torch.dtype, device) -> _Written:
        """No tokens yet; log-probabilities and entropies in float32 or wider."""
        tokens_RT = torch.zeros((rows, width), dtype=torch.int64, device=device)
        measured_RT = tokens_RT.to(torch.promote_types(dtype, torch.float32))
        return cls(tokens_RT, measured_RT, measured_RT.clone(), tokens_RT.sum(dim=1))

    def put(self, rows: list[int], part: _Written) -> None:
        """Take in what was written of some rows."""
        for mine, theirs in zip(vars(self).values(), vars(part).values(), strict=True):
            mine[rows] = theirs.to(mine.device)

    def append(self, t: int, rows_R: torch.Tensor, writing_R: torch.Tensor, chosen) -> None:
        """Column t of the given rows, where they are still writing."""
        columns = (self.tokens_RT, self.logprobs_RT, self.entropy_RT)
        for column_RT, value_R in zip(columns, chosen, strict=True):
            column_RT[rows_R, t] = value_R.where(writing_R, 0).to(column_RT.dtype)
        self.lengths_R[rows_R] += writing_R


def _write_if_it_fits(
    policy: Policy, prompts, draws_RT: np.ndarray, sampling: Sampling, pace: Pace
):
    """`_write`, or None and a warning where memory runs out on more than one row."""
    rows, before = len(draws_RT), (pace.done, pace.tokens)
    try:
        return _write(policy, prompts, draws_RT, sampling, pace)
    except RuntimeError as error:
        if rows == 1 or not out_of_memory(error):
            raise
    clear_device_cache(garbage_collection=True)
    pace.done, pace.tokens = before
    warnings.warn(
        f"no memory to write {rows} completions side by side, trying {rows // 2}: "
        f"rollout_batch_size={rows // 2} spares the failed attempt",
        stacklevel=3,
    )
    return None


@torch.inference_mode()
def _write(
    policy: Policy,
    prompts: list[tuple[list[int], int]],
    draws_RT: np.ndarray,
    sampling: Sampling,
    pace: Pace,
) -> _Written:
    """So many completions of each prompt, side by side."""
    device, width = policy.model.device, draws_RT.shape[1]
    written = _Written.empty(*draws_RT.shape, policy.model.dtype, device)
    draws_RT = torch.from_numpy(draws_RT).to(device)
    end_tokens = torch.tensor(sorted(policy.end_tokens), device=device)
    batch = _Batch(policy, prompts, width)
    for t in range(width):
        uniform_R = draws_RT[batch.rows_R, t]
        chosen = choose(batch.logits_RV, uniform_R, sampling.temperature, sampling.greedy)
        written.append(t, batch.rows_R, batch.writing_R, chosen)
        batch.writing_R &= ~torch.isin(chosen[0], end_tokens)
        before, tokens = batch.left, batch.left
        if t + 1 == width or not batch.advance(chosen[0]):
            pace.add(before, tokens)
            break
        pace.add(before - batch.left, tokens)
    return written


class _Batch:
    """Rows being written; finished ones leave.

    Attributes:
        rows_R: which of the rows at the start these are.
        writing_R: False on finished rows that have not left yet.
        left: how many were writing when the last token was read.
        logits_RV: of the next token.
    """

    def __init__(self, policy: Policy, prompts: list[tuple[list[int], int]], width: int):
        """Read each prompt once, then repeat it; every row has room for `width` tokens."""
        self.model, device = policy.model, policy.model.device
        ids_PL, mask_PL = left_padded([ids for ids, _ in prompts], policy.pad_token, device)
        self.seen, self.padded = ids_PL.shape[1], not bool(mask_PL.all())
        self.mask_RT = torch.nn.functional.pad(mask_PL, (0, width), value=1)
        self.positions_RT = positions(self.mask_RT)
        self.cache = growing_cache(self.model.config)
        self._forward(ids_PL)
        counts = torch.tensor([count for _, count in prompts], device=device)
        self._select(torch.arange(len(prompts), device=device).repeat_interleave(counts))
        self.rows_R = torch.arange(len(self.mask_RT), device=device)
        self.writing_R = torch.ones_like(self.rows_R, dtype=torch.bool)
        self.left = len(self.rows_R)

    def advance(self, token_R: torch.Tensor) -> bool:
        """Read each row's new token; False where none is left writing."""
        self.left = count = int(self.writing_R.sum())
        if count and count < COMPACT_BELOW * len(self.writing_R):
            keep = self.writing_R.nonzero().squeeze(1)
            self._select(keep)
            token_R, self.rows_R, self.writing_R = (
                x[keep] for x in (token_R, self.rows_R, self.writing_R)
            )
        self.seen += 1
        if count:
            self._forward(token_R[:, None])
        return count > 0

    def _select(self, index: torch.Tensor) -> None:
        self.cache.reorder_cache(index)
        self.mask_RT, self.positions_RT = self.mask_RT[index], self.positions_RT[index]
        self.logits_RV, self.padded = self.logits_RV[index], not bool(self.mask_RT.all())

    def _forward(self, ids: torch.Tensor) -> None:
        """Logits of the next token after `ids`, the last of the tokens seen."""
        mask_RT = self.mask_RT[:, : self.seen]
        self.logits_RV = self.model(
            input_ids=ids,
            attention_mask=mask_RT if self.padded else None,
            position_ids=self.positions_RT[:, self.seen - ids.shape[1] : self.seen],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
