"""Batch of completions that are sampled in parallel, token by token.

The batch is a table. A row contains the tokens of a prompt and its completion, one per column. All
rows end in the same column. A shorter row starts in a later column, and its mask hides the columns
before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from transformers import DynamicCache

from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.logprobs import left_padded, positions
from grpo_ustat.policy.output_layer import cache_name, causal
from grpo_ustat.rollout.cache import growing_cache, replaceable_rows
from grpo_ustat.rollout.decoding import choose
from grpo_ustat.rollout.sampling import Sampling
from grpo_ustat.terminal.progress import Progress

# Finished rows leave the batch when the share of unfinished rows falls below this value.
COMPACT_BELOW = 0.8
# Tensors of `DecodingBatch` with one entry per row.
ROW_TENSORS = (
    *("prompt_lengths_R", "lengths_R", "unfinished_R", "token_R"),
    *("mask_RT", "uniforms_RT", "tokens_RT", "logprobs_RT", "entropy_RT"),
)


@dataclass(frozen=True)
class Work:
    """Completions to sample; completion i of prompt p has the index r = p G + i."""

    # Token ids of each prompt.
    encoded: list[list[int]]
    group_size: int
    # Function that takes indices of completions and returns their random numbers, as an array
    # [completions, T]. Each number is uniform in [0, 1) and selects one token.
    draws: Callable[[list[int]], np.ndarray]

    def prompt(self, r: int) -> list[int]:
        """Return the token ids of the prompt of completion r."""
        return self.encoded[r // self.group_size]


class Completions:
    """Finished completions, stored in main memory: R rows of at most T tokens.

    Columns after the end of a completion are 0, and so are rows that are not sampled yet.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype):
        self.tokens_RT = torch.zeros((rows, width), dtype=torch.int64)
        # Log-probability of each token, and entropy of the distribution from which it was drawn, in
        # float32 or a wider type.
        self.logprobs_RT = self.tokens_RT.to(torch.promote_types(dtype, torch.float32))
        self.entropy_RT = self.logprobs_RT.clone()
        # Number of tokens of each row.
        self.lengths_R = self.tokens_RT.sum(dim=1)

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the tokens, lengths, log-probabilities and entropies."""
        return self.tokens_RT, self.lengths_R, self.logprobs_RT, self.entropy_RT


@dataclass
class ReadPrompts:
    """Prompts of completions that start later; the model has read all but their last tokens."""

    # Keys and values of P prompts.
    cache: DynamicCache
    # Row of each prompt in the cache.
    index: dict[int, int]


class DecodingBatch:
    """R rows that the model continues token by token.

    Tensors of sampled values, [R, T + 1], have one column more than a completion. Finished rows
    that are still in the batch write a zero into it.
    """

    def __init__(self, policy: Policy, work: Work, rows: list[int], sampling: Sampling):
        """Read each prompt once, copy its keys and values to its rows, and draw the first tokens.

        Args:
            policy: policy that writes the completions.
            work: all completions that must be sampled.
            rows: indices of the completions in this batch.
            sampling: options of sampling.
        """
        self.policy, self.work, self.sampling = policy, work, sampling
        self.model, self.device = policy.model, policy.model.device
        # Name of the argument through which the model takes its cache.
        self.cache_name = str(cache_name(causal(policy.model)))
        self.width = sampling.max_completion_length
        # Index of the completion in each row; -1 after the completion was copied out of the batch.
        self.rows = np.array(rows)
        # Number of tokens that the batch has drawn in each row, and the value of this number when
        # the row started.
        self.drawn = 0
        self.began = np.zeros_like(self.rows)
        prompts, index = np.unique(self.rows // work.group_size, return_inverse=True)
        # `length` is the number of columns that the model has read.
        self.cache, self.length, logits_PV = self._read_prompts([work.encoded[p] for p in prompts])
        lengths = np.array([len(work.prompt(r)) for r in rows])
        # True if a finished row can be replaced by a new completion; see `replaceable_rows`.
        self.replaceable = replaceable_rows(self.cache, self.length)
        # First column of each row.
        self.starts, self.prompt_lengths_R = self.length - lengths, self._on_device(lengths)
        self.mask_RT = self._mask(self.starts, self.length + self.width)
        self.lengths_R = torch.zeros_like(self.prompt_lengths_R)
        self.unfinished_R = torch.ones_like(self.lengths_R, dtype=torch.bool)
        self.uniforms_RT = self._uniforms(rows)
        self.tokens_RT = torch.zeros(self.uniforms_RT.shape, dtype=torch.int64, device=self.device)
        self.logprobs_RT = self.tokens_RT.to(torch.promote_types(self.model.dtype, torch.float32))
        self.entropy_RT = self.logprobs_RT.clone()
        goes_on_V = np.ones(logits_PV.shape[1], dtype=bool)
        goes_on_V[[token for token in policy.end_tokens if token < len(goes_on_V)]] = False
        self.goes_on_V = self._on_device(goes_on_V)
        index_R = self._on_device(index)
        self.cache.reorder_cache(cast(torch.LongTensor, index_R))
        # Unfinished rows, and number of tokens in finished rows, at the last call of `look`.
        self.unfinished, self.finished_tokens = np.ones(len(rows), dtype=bool), 0
        self.read_ahead: ReadPrompts | None = None
        self.draw(logits_PV[index_R])
        self.drawn = 1

    def write(self, count: int) -> None:
        """Read the last drawn tokens and draw the next tokens, `count` times."""
        for _ in range(count):
            self.draw(self.read())
            self.drawn, self.length = self.drawn + 1, self.length + 1
            missing = self.length + 1 - self.mask_RT.shape[1]
            if missing > 0:
                self.mask_RT = torch.nn.functional.pad(self.mask_RT, (0, missing + 64), value=1)

    def draw(self, logits_RV: torch.Tensor) -> None:
        """Draw each row's next token and store it."""
        place_R1 = self.lengths_R[:, None]
        uniform_R = self.uniforms_RT.gather(1, place_R1)[:, 0]
        self.token_R, logprob_R, entropy_R = choose(
            logits_RV, uniform_R, self.sampling.temperature, self.sampling.greedy
        )
        for column_RT, value_R in (
            (self.tokens_RT, self.token_R),
            (self.logprobs_RT, logprob_R),
            (self.entropy_RT, entropy_R),
        ):
            value_R = value_R.where(self.unfinished_R, 0).to(column_RT.dtype)
            column_RT.scatter_(1, place_R1, value_R[:, None])
        self.lengths_R += self.unfinished_R
        self.unfinished_R &= self.goes_on_V[self.token_R]
        self.unfinished_R &= self.lengths_R < self.width

    def read(self) -> torch.Tensor:
        """Let the model read the last drawn tokens, and return the next tokens' logits, [R, V]."""
        return self.model(
            input_ids=self.token_R[:, None],
            attention_mask=self.mask_RT[:, : self.length + 1] if self.starts.any() else None,
            position_ids=(self.prompt_lengths_R + self.lengths_R - 1)[:, None],
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_name: self.cache},
        ).logits[:, -1]

    def until_look(self, interval: int) -> int:
        """Return the number of tokens until the next call of `look`, or until all rows are full.

        Args:
            interval: number of tokens between two calls of `look`.
        """
        return min(
            interval - self.drawn % interval, self.width - self.drawn + int(self.began.max())
        )

    def all_at_the_limit(self) -> bool:
        """Return True if every row has drawn the maximum number of tokens of a completion."""
        return self.drawn - int(self.began.max()) >= self.width

    def look(self, progress: Progress) -> int:
        """Report progress and return the number of unfinished rows.

        On a GPU the call waits until the device has drawn all tokens.
        """
        state_2R = torch.stack([self.unfinished_R.to(torch.int64), self.lengths_R]).cpu().numpy()
        written = self.rows >= 0
        before, self.unfinished = self.unfinished, (state_2R[0] > 0) & written
        tokens, self.finished_tokens = self.finished_tokens, int(state_2R[1, written].sum())
        finished = int(before.sum()) - int(self.unfinished.sum())
        progress.add(finished, self.finished_tokens - tokens)
        return int(self.unfinished.sum())

    def take(self, written: Completions) -> None:
        """Copy finished completions from the batch into `written`."""
        slots = np.flatnonzero(~self.unfinished & (self.rows >= 0))
        index_B, rows = self._on_device(slots), self.rows[slots]
        lengths_B = self.lengths_R[index_B].cpu()
        self.finished_tokens -= int(lengths_B.sum())
        for stored, part in zip(
            written.columns(),
            (self.tokens_RT, self.lengths_R, self.logprobs_RT, self.entropy_RT),
            strict=True,
        ):
            part_B = part[index_B].cpu()
            stored[rows] = part_B if part.ndim == 1 else part_B[:, : self.width]
        self.rows[slots] = -1

    def fewer_rows(self, count: int) -> int:
        """Return the number of rows to keep, given the number of unfinished rows.

        It is `count` if so many rows have finished that a smaller batch is faster, else all rows.
        """
        return count if count < COMPACT_BELOW * len(self.rows) else len(self.rows)

    def keep_rows(self, count: int) -> None:
        """Keep only `count` rows: all unfinished rows, and as many finished rows as needed."""
        slots = np.sort(np.argsort(~self.unfinished, kind="stable")[:count])
        index_B = self._on_device(slots)
        self.cache.reorder_cache(cast(torch.LongTensor, index_B))
        for name in ROW_TENSORS:
            setattr(self, name, getattr(self, name)[index_B])
        for name in ("rows", "starts", "began", "unfinished"):
            setattr(self, name, getattr(self, name)[slots])

    def refill(self, waiting: list[int]) -> None:
        """Start waiting completions in the place of finished rows.

        The model has read the prompt of a new row except for its last token. This token is stored
        as the row's last drawn token, so the next call of `read` reads it.

        Args:
            waiting: indices of the completions that have not started. Those that start are removed.
        """
        slots = np.flatnonzero(~self.unfinished)
        while len(slots) and waiting:
            prompt = waiting[0] // self.work.group_size
            if self.read_ahead is None or prompt not in self.read_ahead.index:
                rows = waiting[: len(self.rows)]
                prompts = list(dict.fromkeys(row // self.work.group_size for row in rows))
                # A prompt of a single token is read as a whole, because the model cannot read an
                # empty text.
                ids = [self.work.encoded[p][:-1] or self.work.encoded[p] for p in prompts]
                cache, _, _ = self._read_prompts(ids)
                self.read_ahead = ReadPrompts(cache, {p: i for i, p in enumerate(prompts)})
            count = 0
            while (
                count < min(len(slots), len(waiting))
                and waiting[count] // self.work.group_size in self.read_ahead.index
            ):
                count += 1
            self._replace(slots[:count], waiting[:count], self.read_ahead)
            slots = slots[count:]
            del waiting[:count]
        if len(slots):
            self.keep_rows(len(self.rows) - len(slots))
        self._drop_columns()

    def _drop_columns(self) -> None:
        """Drop the first columns that no unfinished row uses."""
        first = int(self.starts[self.unfinished].min())
        if first > 0:
            for layer in self.cache.layers:
                cast(Any, layer).drop(first)
            self.length, self.starts = self.length - first, self.starts - first
            self.mask_RT = self.mask_RT[:, first:]

    def _replace(self, slots: np.ndarray, rows: list[int], read: ReadPrompts) -> None:
        """Start new completions in existing rows.

        Args:
            slots: positions of the finished rows in the batch.
            rows: index of the new completion for each of these positions.
            read: prompts of the new completions.
        """
        prompts = [self.work.prompt(r) for r in rows]
        lengths = np.array([len(prompt) for prompt in prompts])
        slots_B, lengths_B = self._on_device(slots), self._on_device(lengths)
        index_B = self._on_device(np.array([read.index[r // self.work.group_size] for r in rows]))
        for layer, other in zip(self.cache.layers, read.cache.layers, strict=True):
            cast(Any, layer).replace(slots_B, other, index_B, int(lengths.max()) - 1)
        self.rows[slots], self.began[slots], self.unfinished[slots] = rows, self.drawn, True
        self.starts[slots] = self.length - lengths + 1
        mask_BT = self._mask(self.starts[slots], self.mask_RT.shape[1])
        self.token_R[slots_B] = self._on_device(np.array([prompt[-1] for prompt in prompts]))
        self.mask_RT[slots_B] = mask_BT
        self.prompt_lengths_R[slots_B] = lengths_B
        self.uniforms_RT[slots_B] = self._uniforms(rows)
        self.lengths_R.index_fill_(0, slots_B, 0)
        self.unfinished_R.index_fill_(0, slots_B, True)
        for column_RT in (self.tokens_RT, self.logprobs_RT, self.entropy_RT):
            column_RT.index_fill_(0, slots_B, 0)

    def _read_prompts(self, ids: list[list[int]]) -> tuple[DynamicCache, int, torch.Tensor]:
        """Read P prompts; return their cache, its number of columns, and next logits, [P, V]."""
        ids_PL, mask_PL = left_padded(ids, self.policy.pad_token, self.device)
        length = ids_PL.shape[1]
        cache = growing_cache(self.model.config, length + self.width)
        output = self.model(
            input_ids=ids_PL,
            attention_mask=mask_PL if min(map(len, ids)) < length else None,
            position_ids=positions(mask_PL),
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_name: cache},
        )
        return cache, length, output.logits[:, -1]

    def _mask(self, starts: np.ndarray, columns: int) -> torch.Tensor:
        """Return a mask that is 0 before the first column of each row and then 1."""
        return self._on_device((np.arange(columns) >= starts[:, None]).astype(np.int64))

    def _uniforms(self, rows: list[int]) -> torch.Tensor:
        """Return the completions' random numbers, plus a column of zeros for finished rows."""
        return self._on_device(np.pad(self.work.draws(rows), ((0, 0), (0, 1))))

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)
