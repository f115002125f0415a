"""In-process sampling: a prompt is read once per group and finished completions leave the batch.

Tokens are drawn from exactly the distribution that is scored, softmax(logits / temperature) over
the whole vocabulary, by inverting its cumulative distribution at a keyed uniform.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache

from grpo_ustat.config import Common
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.logprobs import positions
from grpo_ustat.records import Prompt, Rollouts
from grpo_ustat.rollout.draws import uniforms

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

    Args:
        policy: the model and tokenizer.
        prompts: P prompts.
        group_size: G.
        sampling: see `Sampling`.
        step: training step or replicate, part of the draws' key.
        first: index of the first completion; completions 0..3 and then 4..7 are the same eight as
            0..7 at once.
    """
    encoded = [policy.tokenizer(prompt.text)["input_ids"] for prompt in prompts]
    width = sampling.max_completion_length
    tokens_RT = np.zeros((len(prompts) * group_size, width), dtype=np.int64)
    lengths_R = np.zeros(len(tokens_RT), dtype=np.int64)
    order = sorted(range(len(prompts)), key=lambda p: len(encoded[p]))
    side = min(group_size, sampling.rows)
    per_batch = max(1, sampling.rows // group_size)
    batches = [order[i : i + per_batch] for i in range(0, len(order), per_batch)]
    for batch in batches:
        for low in range(0, group_size, side):
            inside = range(low, min(low + side, group_size))
            keyed = range(first + inside.start, first + inside.stop)
            draws = [
                uniforms(sampling.seed, sampling.stream, step, prompts[p].id, keyed, width)
                for p in batch
            ]
            rows = np.concatenate([p * group_size + np.array(inside) for p in batch])
            tokens_RT[rows], lengths_R[rows] = _write(
                policy, [encoded[p] for p in batch], np.concatenate(draws), sampling
            )
    return _rollouts(policy, prompts, encoded, tokens_RT, lengths_R)


def _rollouts(policy, prompts, encoded, tokens_RT, lengths_R) -> Rollouts:
    width = int(lengths_R.max())
    tokens_RT = tokens_RT[:, :width]
    mask_RT = np.arange(width) < lengths_R[:, None]
    last_R = tokens_RT[np.arange(len(tokens_RT)), lengths_R - 1]
    texts = policy.tokenizer.batch_decode(
        [row[:length] for row, length in zip(tokens_RT, lengths_R, strict=True)],
        skip_special_tokens=True,
    )
    count = len(prompts)
    return Rollouts(
        prompts=prompts,
        prompt_tokens=encoded,
        tokens_PGT=tokens_RT.reshape(count, -1, width),
        mask_PGT=mask_RT.reshape(count, -1, width),
        ended_PG=np.isin(last_R, list(policy.end_tokens)).reshape(count, -1),
        texts_PG=[
            texts[i : i + len(texts) // count] for i in range(0, len(texts), len(texts) // count)
        ],
    )


@torch.inference_mode()
def _write(policy: Policy, prompts: list[list[int]], draws_RT: np.ndarray, sampling: Sampling):
    """Token ids [R, T] and lengths [R] of the rows, G = R / len(prompts) per prompt."""
    device = policy.model.device
    rows, width = draws_RT.shape
    tokens_RT = torch.zeros((rows, width), dtype=torch.int64, device=device)
    lengths_R = torch.full((rows,), width, dtype=torch.int64, device=device)
    draws_RT = torch.from_numpy(draws_RT).to(device)
    end_tokens = torch.tensor(sorted(policy.end_tokens), device=device)
    logits, cache, mask = _read(policy, prompts, rows // len(prompts))
    alive = torch.arange(rows, device=device)
    writing = torch.ones(rows, dtype=torch.bool, device=device)
    for t in range(width):
        token = _choose(logits, draws_RT[alive, t], sampling)
        tokens_RT[alive[writing], t] = token[writing]
        ended = writing & torch.isin(token, end_tokens)
        lengths_R[alive[ended]] = t + 1
        writing &= ~ended
        share = writing.float().mean().item()
        if share == 0 or t + 1 == width:
            break
        if share < COMPACT_BELOW:
            keep = writing.nonzero().squeeze(1)
            cache.batch_select_indices(keep)
            alive, token, mask, writing = alive[keep], token[keep], mask[keep], writing[keep]
        mask = torch.cat([mask, mask.new_ones((len(mask), 1))], dim=1)
        logits = _next_logits(policy, token[:, None], mask, cache)
    return tokens_RT.cpu().numpy(), lengths_R.cpu().numpy()


def _read(policy: Policy, prompts: list[list[int]], group_size: int):
    """Read each prompt once; logits, cache and mask of its group's rows."""
    device, head = policy.model.device, max(map(len, prompts))
    ids = torch.tensor([[policy.pad_token] * (head - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (head - len(p)) + [1] * len(p) for p in prompts], device=device)
    cache = DynamicCache(config=policy.model.config)
    logits = _next_logits(policy, ids, mask, cache)
    cache.batch_repeat_interleave(group_size)
    repeat = dict(repeats=group_size, dim=0)
    return logits.repeat_interleave(**repeat), cache, mask.repeat_interleave(**repeat)


def _next_logits(policy: Policy, ids, mask, cache) -> torch.Tensor:
    """Logits of the token after `ids`, which extend `cache`; `mask` covers both."""
    padded = not bool(mask.all())
    return policy.model(
        input_ids=ids,
        attention_mask=mask if padded else None,
        position_ids=positions(mask)[:, -ids.shape[1] :],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]


def _choose(logits_RV: torch.Tensor, uniform_R: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    if sampling.greedy:
        return logits_RV.argmax(dim=-1)
    return _invert(logits_RV, uniform_R, sampling.temperature)


def _invert(logits_RV: torch.Tensor, uniform_R: torch.Tensor, temperature: float) -> torch.Tensor:
    """The token at which the cumulative distribution passes the uniform, in float64."""
    cumulative = torch.softmax(logits_RV.double() / temperature, dim=-1).cumsum(dim=-1)
    threshold = (uniform_R * cumulative[:, -1]).unsqueeze(1)
    return (
        torch.searchsorted(cumulative, threshold, right=True)
        .squeeze(1)
        .clamp(max=logits_RV.shape[1] - 1)
    )
