"""In-process sampling: a prompt is read once per group and finished completions leave the batch.

Tokens are drawn from exactly the distribution that is scored, softmax(logits / temperature) over
the whole vocabulary, by inverting its cumulative distribution at a keyed uniform.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import groupby
from typing import cast

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache

from grpo_ustat.config.common import Common
from grpo_ustat.policy.loading import Policy, out_of_memory
from grpo_ustat.policy.logprobs import left_padded, positions
from grpo_ustat.progress import Progress
from grpo_ustat.records import Prompt, Rollouts
from grpo_ustat.rollout.cpu_decoding import growing_cache, packed_linears
from grpo_ustat.rollout.decoding import choose
from grpo_ustat.rollout.draws import uniforms

COMPACT_BELOW = 0.8  # drop finished rows once fewer than this share are unfinished


@dataclass(frozen=True)
class Sampling:
    """Options of sampling.

    Attributes:
        seed, stream: key the draws, with `step` of each call.
        max_completion_length: tokens after which a completion is cut.
        temperature: divides the logits.
        rows: completions sampled side by side; changes speed and memory, not draws.
        greedy: the most likely token each time instead of a drawn one.
    """

    seed: int
    stream: str
    max_completion_length: int
    temperature: float = 1.0
    rows: int = 512
    greedy: bool = False

    @classmethod
    def of(cls, config: Common, stream: str, greedy: bool = False) -> Sampling:
        """The configured options for one stream of draws."""
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

    Where memory runs out, half as many completions are sampled side by side, with a warning; the
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
    width = sampling.max_completion_length
    result = _Completions(len(order), width, policy.model.dtype, torch.device("cpu"))
    at_once, progress = min(sampling.rows, len(order)), Progress("writing", len(order))
    with policy.computing(), packed_linears(policy.model, at_once):
        while order:
            rows, prompt_counts, draws = order[:at_once], [], []
            for p, group in groupby(rows, key=lambda r: r // group_size):
                indices = [first + r % group_size for r in group]
                key = (sampling.seed, sampling.stream, step, prompts[p].id)
                draws.append(uniforms(*key, range(indices[0], indices[-1] + 1), width))
                prompt_counts.append((encoded[p], len(indices)))
            counts_before, part = (progress.completed, progress.tokens), None
            try:
                part = decode(policy, prompt_counts, np.concatenate(draws), sampling, progress)
            except RuntimeError as error:
                if len(rows) == 1 or not out_of_memory(error):
                    raise
            if part is None:  # outside the handler: the error holds all that was allocated
                clear_device_cache(garbage_collection=True)
                progress.completed, progress.tokens = counts_before
                at_once = len(rows) // 2
                warnings.warn(
                    f"no memory to write {len(rows)} completions side by side, trying {at_once}: "
                    f"rollout_batch_size={at_once} spares the failed attempt",
                    stacklevel=2,
                )
            else:
                for column, part_column in zip(result.columns(), part.columns(), strict=True):
                    column[rows] = part_column.to(column.device)
                order = order[at_once:]
    columns = (column.numpy() for column in result.columns())
    return assemble(policy, prompts, encoded, *columns)


class _Completions:
    """Completions of R rows, T columns; 0 after each one's end.

    Attributes:
        tokens_RT: token ids.
        logprobs_RT, entropy_RT: of each token and of its distribution, in float32 or wider.
        lengths_R: tokens of each row.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device):
        self.tokens_RT = torch.zeros((rows, width), dtype=torch.int64, device=device)
        self.logprobs_RT = self.tokens_RT.to(torch.promote_types(dtype, torch.float32))
        self.entropy_RT = self.logprobs_RT.clone()
        self.lengths_R = self.tokens_RT.sum(dim=1)

    def columns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The four tensors, in the order in which `assemble` takes them."""
        return self.tokens_RT, self.lengths_R, self.logprobs_RT, self.entropy_RT


@torch.inference_mode()
def decode(
    policy: Policy,
    prompt_counts: list[tuple[list[int], int]],
    draws_RT: np.ndarray,
    sampling: Sampling,
    progress: Progress,
) -> _Completions:
    """Sample completions side by side, one token of each unfinished row at a time.

    Args:
        policy: the model and tokenizer.
        prompt_counts: token ids of each prompt, and how many completions it gets.
        draws_RT: the uniforms of each row's tokens.
        sampling: see `Sampling`.
        progress: counts finished completions and tokens.
    """
    device, (rows, width) = policy.model.device, draws_RT.shape
    result = _Completions(rows, width, policy.model.dtype, device)
    uniforms_RT = torch.from_numpy(draws_RT).to(device)
    end_tokens = torch.tensor(sorted(policy.end_tokens), device=device)
    batch = _DecodingBatch(policy, prompt_counts, width)
    for t in range(width):
        rows_R, unfinished_R = batch.rows_R, batch.unfinished_R
        token_R, logprob_R, entropy_R = choose(
            batch.logits_RV, uniforms_RT[rows_R, t], sampling.temperature, sampling.greedy
        )
        for column_RT, value_R in (
            (result.tokens_RT, token_R),
            (result.logprobs_RT, logprob_R),
            (result.entropy_RT, entropy_R),
        ):
            column_RT[rows_R, t] = value_R.where(unfinished_R, 0).to(column_RT.dtype)
        result.lengths_R[rows_R] += unfinished_R
        batch.unfinished_R &= ~torch.isin(token_R, end_tokens)
        before = batch.count
        if t + 1 == width or not batch.advance(token_R):
            progress.add(before, before)
            break
        progress.add(before - batch.count, before)
    return result


class _DecodingBatch:
    """Rows that the model continues token by token; finished rows leave.

    Attributes:
        rows_R: which of the rows at the start these are.
        unfinished_R: False on finished rows that have not left yet.
        count: unfinished rows when the last token was read.
        length: columns read so far, padding of prompts included.
        logits_RV: of the next token.
    """

    def __init__(self, policy: Policy, prompt_counts: list[tuple[list[int], int]], width: int):
        """Read each prompt once, then repeat it; every row has room for `width` tokens."""
        self.model, device = policy.model, policy.model.device
        ids_PL, mask_PL = left_padded([ids for ids, _ in prompt_counts], policy.pad_token, device)
        self.length, self.padded = ids_PL.shape[1], not bool(mask_PL.all())
        self.mask_RT = torch.nn.functional.pad(mask_PL, (0, width), value=1)
        self.positions_RT = positions(self.mask_RT)
        self.cache = growing_cache(self.model.config)
        self._forward(ids_PL)
        counts = torch.tensor([count for _, count in prompt_counts], device=device)
        self._select(torch.arange(len(counts), device=device).repeat_interleave(counts))
        self.rows_R = torch.arange(len(self.mask_RT), device=device)
        self.unfinished_R = torch.ones_like(self.rows_R, dtype=torch.bool)
        self.count = len(self.rows_R)

    def advance(self, token_R: torch.Tensor) -> bool:
        """Read each row's new token; returns whether any row is unfinished."""
        self.count = int(self.unfinished_R.sum())
        if 0 < self.count < COMPACT_BELOW * len(self.unfinished_R):
            index = self.unfinished_R.nonzero().squeeze(1)
            self._select(index)
            token_R, self.rows_R, self.unfinished_R = (
                x[index] for x in (token_R, self.rows_R, self.unfinished_R)
            )
        self.length += 1
        if self.count:
            self._forward(token_R[:, None])
        return self.count > 0

    def _select(self, index: torch.Tensor) -> None:
        """Keep these rows alone, in this order; a row may be repeated."""
        self.cache.reorder_cache(cast(torch.LongTensor, index))
        self.mask_RT, self.positions_RT = self.mask_RT[index], self.positions_RT[index]
        self.logits_RV, self.padded = self.logits_RV[index], not bool(self.mask_RT.all())

    def _forward(self, ids: torch.Tensor) -> None:
        """Read `ids` [R, L], the last columns, and compute the logits of the next token."""
        mask_RT = self.mask_RT[:, : self.length]
        self.logits_RV = self.model(
            input_ids=ids,
            attention_mask=mask_RT if self.padded else None,
            position_ids=self.positions_RT[:, self.length - ids.shape[1] : self.length],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]


def assemble(
    policy: Policy,
    prompts: list[Prompt],
    prompt_tokens: list[list[int]],
    tokens_RT: np.ndarray,
    lengths_R: np.ndarray,
    logprobs_RT: np.ndarray | None = None,
    entropy_RT: np.ndarray | None = None,
) -> Rollouts:
    """Rollouts of R = P x G rows, prompt after prompt; columns beyond the longest are left out.

    Args:
        policy: decodes the texts and says what ends a completion.
        prompts, prompt_tokens: the P prompts.
        tokens_RT: completion tokens, 0 beyond a row's length.
        lengths_R: tokens of each row, at least 1.
        logprobs_RT, entropy_RT: the sampler's log-probabilities and entropies, 0 beyond a row's
            length; None where it has none.
    """
    width, size = int(lengths_R.max()), len(lengths_R) // len(prompts)
    shape = (len(prompts), size, width)
    last_R = tokens_RT[np.arange(len(tokens_RT)), lengths_R - 1]
    texts = policy.tokenizer.batch_decode(
        [row[:length] for row, length in zip(tokens_RT, lengths_R, strict=True)],
        skip_special_tokens=True,
    )

    def columns(values_RT: np.ndarray) -> np.ndarray:
        return values_RT[:, :width].reshape(shape)

    return Rollouts(
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        tokens_PGT=columns(tokens_RT),
        mask_PGT=(np.arange(width) < lengths_R[:, None]).reshape(shape),
        ended_PG=np.isin(last_R, list(policy.end_tokens)).reshape(shape[:2]),
        texts_PG=[texts[i : i + size] for i in range(0, len(texts), size)],
        logprobs_PGT=None if logprobs_RT is None else columns(logprobs_RT),
        entropy_PGT=None if entropy_RT is None else columns(entropy_RT),
    )
