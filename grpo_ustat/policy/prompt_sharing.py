"""Forward and backward passes over completions that read the prompt of each group only once.

`SharedPromptReader` first reads the prompts. It then reads the completions in several parts, each
of which continues from copies of the prompts' keys and values. The backward pass of a part ends at
these copies. After all parts, one backward pass continues from the copies through the prompts. The
resulting gradient is that of passes over prompt and completion together, but only the activations
of the prompts and of one part are in memory at a time.

Some models cannot read a prompt in this way. `ContiguousReader` and `FullReader` read prompt and
completion together.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from itertools import islice
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.logprobs import left_padded, pack, pack_contiguous, positions, widen
from grpo_ustat.policy.memory import out_of_memory
from grpo_ustat.policy.output_layer import Head, Window, body, cache_name, causal
from grpo_ustat.policy.quantized import unpacked
from grpo_ustat.policy.source import rope_switch
from grpo_ustat.records import Rollouts


class SharedPromptReader:
    """Reader that reads each prompt once and reuses its cache for all of its completions.

    Args:
        policy: policy that reads.
        rollouts: prompts and their completions.
        prompts: indices of the prompts to read, in ascending order.
    """

    def __init__(self, policy: Policy, rollouts: Rollouts, prompts: np.ndarray):
        self.policy, self.rollouts, self.prompts = policy, rollouts, prompts
        self.below = body(causal(policy.model))
        rows = [rollouts.prompt_tokens[p] for p in prompts]
        ids_PL, self.mask_PL = left_padded(rows, policy.pad_token, policy.model.device)
        self.padded = len({len(row) for row in rows}) > 1
        self.cache = DynamicCache(config=causal(policy.model).config)
        hidden_PLD = self._read(ids_PL, self.mask_PL, self.cache)
        self.ends = [hidden_PLD[:, -1]]
        for layer in cast("list[DynamicLayer]", self.cache.layers):
            self.ends += cast("list[torch.Tensor]", [layer.keys, layer.values])
        self.leaves = [end.detach().requires_grad_(end.requires_grad) for end in self.ends]

    def window(self, index: np.ndarray) -> Window:
        """Return the hidden states that predict the completions with flat indices p*G + i."""
        place = np.searchsorted(self.prompts, index // self.rollouts.mask_PGT.shape[1])
        place_B = torch.from_numpy(place).to(self.mask_PL.device)
        rows = pack(self.rollouts, index, self.policy.pad_token, self.mask_PL.device)
        targets_BT = rows.input_ids_BT[:, -rows.width :]
        mask_BT = rows.completion_mask_BT[:, -rows.width :]
        hidden_BTD = self.leaves[0][place_B][:, None]
        if rows.width > 1:
            # Each completion has one row, with a copy of its prompt's keys and values.
            past = copy.copy(self.cache)
            past.layers = [copy.copy(layer) for layer in self.cache.layers]
            for number, layer in enumerate(cast("list[DynamicLayer]", past.layers)):
                layer.keys, layer.values = (x[place_B] for x in self.leaves[2 * number + 1 :][:2])
            mask = torch.nn.functional.pad(self.mask_PL[place_B], (0, rows.width - 1), value=1)
            later = self._read(targets_BT[:, :-1], mask, past)
            hidden_BTD = torch.cat([hidden_BTD, later], dim=1)
        return Window(hidden_BTD, targets_BT, mask_BT)

    def backward(self) -> None:
        """Continue the backward pass from the copied hidden states, keys and values to the prompts.

        This is called after the backward passes of all windows.
        """
        pairs = [(e, x.grad) for e, x in zip(self.ends, self.leaves, strict=True)]
        pairs = [(end, grad) for end, grad in pairs if grad is not None]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))

    def _read(self, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Return the hidden states of these tokens; leave out the mask if no prompt is padded.

        Args:
            ids: token ids.
            mask: 1 on real tokens of the cache and of `ids`, 0 on padding.
            cache: keys and values of earlier tokens, to which those of `ids` are added.
        """
        with self.policy.computing():
            output = self.below(
                input_ids=ids,
                attention_mask=mask if self.padded else None,
                position_ids=positions(mask)[:, -ids.shape[1] :],
                use_cache=True,
                **{str(cache_name(self.below)): cache},
            )
        self.output = type(output)
        return output.last_hidden_state


class ContiguousReader:
    """Reader that reads prompt and completion together, in rows padded only at the end.

    Such rows need no attention mask, so the model can use fast kernels for causal attention.
    """

    def __init__(self, policy: Policy, rollouts: Rollouts, prompts: np.ndarray):
        self.policy, self.rollouts = policy, rollouts

    def window(self, index: np.ndarray) -> Window:
        """Return the hidden states that predict the completions with flat indices p*G + i."""
        rows = pack_contiguous(
            self.rollouts, index, self.policy.pad_token, self.policy.model.device
        )
        below = body(causal(self.policy.model))
        with self.policy.computing():
            output = below(input_ids=rows.input_ids_BL, use_cache=False)
        self.output = type(output)
        row_B1 = torch.arange(len(index), device=rows.columns_BT.device)[:, None]
        hidden_BTD = output.last_hidden_state[row_B1, rows.columns_BT]
        return Window(hidden_BTD, rows.targets_BT, rows.mask_BT)

    def backward(self) -> None:
        """Do nothing, because the backward pass of the window reached all parameters."""


class FullReader:
    """Reader that reads prompt and completion together, with an attention mask."""

    def __init__(self, policy: Policy, rollouts: Rollouts, prompts: np.ndarray):
        self.policy, self.rollouts = policy, rollouts

    def window(self, index: np.ndarray) -> Window:
        """Return the hidden states that predict the completions with flat indices p*G + i."""
        rows = pack(self.rollouts, index, self.policy.pad_token, self.policy.model.device)
        below = body(causal(self.policy.model))
        parameters = inspect.signature(below.forward).parameters
        mask = rows.attention_mask_BT
        extra = {"position_ids": positions(mask)} if "position_ids" in parameters else {}
        with self.policy.computing():
            output = below(
                input_ids=rows.input_ids_BT, attention_mask=mask, use_cache=False, **extra
            )
        self.output = type(output)
        return Window(
            output.last_hidden_state[:, -rows.width - 1 : -1],
            rows.input_ids_BT[:, -rows.width :],
            rows.completion_mask_BT[:, -rows.width :],
        )

    def backward(self) -> None:
        """Do nothing, because the backward pass of the window reached all parameters."""


Reader = SharedPromptReader | ContiguousReader | FullReader
# Results of `can_read_contiguous`, by model.
_contiguous: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
# In a 16-bit type or TF32, two ways of reading may give log-probabilities of sampled tokens that
# differ by this much, in nats and on average, because of rounding. The mean difference is 0.07 for
# SmolLM2-135M in bfloat16.
MAX_NARROW_GAP = 0.3
# Exceptions that a model can raise if it does not support a reader.
OTHER_WAYS_OF_READING = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)
# Largest number of tokens of prompt and completion in a trial.
TRIAL_TOKENS = 20
# Token ids of the prompts in trials: two of unequal lengths, and two of equal lengths.
UNEQUAL_PROMPTS, EQUAL_PROMPTS = [[2, 3, 4, 5], [3, 2]], [[2, 3], [3, 2]]


def can_share(policy: Policy) -> bool:
    """Return True if the model can read a prompt once for all completions of its group.

    There are two conditions. Every layer must keep only keys and values of earlier tokens. A trial
    must give completions the same log-probabilities as reading prompt and completion together.
    """
    below = body(causal(policy.model))
    takes = cache_name(below) and "position_ids" in inspect.signature(below.forward).parameters
    layers = DynamicCache(config=causal(policy.model).config).layers
    plain = all(type(x) in (DynamicLayer, DynamicSlidingWindowLayer) for x in layers)
    if not plain or not layers or not takes:
        return False
    return all(
        _agrees(policy, SharedPromptReader, prompts, at_once=2)
        for prompts in (UNEQUAL_PROMPTS, EQUAL_PROMPTS)
    )


def can_read_contiguous(policy: Policy) -> bool:
    """Return True if the model can read rows that are padded at the end without a mask.

    A trial must give the same log-probabilities as reading one row at a time. The result is stored
    for each model. If memory runs out during the trial, the result is False and is not stored.
    """
    if policy.model not in _contiguous:
        agrees = _agrees(policy, ContiguousReader, UNEQUAL_PROMPTS, at_once=1)
        if agrees is None:
            return False
        _contiguous[policy.model] = agrees
    return _contiguous[policy.model]


def check_reading(
    policy: Policy, prompts: list[list[int]], completions: list[list[int]]
) -> torch.Tensor:
    """Raise an error if padding changes the log-probabilities of a row.

    If a model does not read the position ids that it is given, padding shifts the positions of a
    prompt. Scores would then be gradients of the wrong log-probabilities.

    Args:
        policy: policy with the model.
        prompts: tokens of P prompts of unequal lengths.
        completions: T tokens of one completion per prompt. If the model computes in bfloat16,
            float16 or TF32, pass only tokens that it sampled, because rounding can change the
            log-probabilities of unlikely tokens by several nats.

    Returns:
        Log-probabilities of the completions if each row is read separately, [P, T].
    """
    width = len(completions[0])
    rows = [[*prompt, *tokens] for prompt, tokens in zip(prompts, completions, strict=True)]
    alone_PT = torch.stack([row_logprobs(policy, row, width) for row in rows])
    try:
        padded_PT = _trial(policy, FullReader, prompts, len(prompts), completions)
    except OTHER_WAYS_OF_READING:
        # Computing scores will fail in the same way and report the reason.
        return alone_PT
    if gap := gap_beyond_rounding(policy, padded_PT, alone_PT):
        raise ConfigError(
            f"{policy.model.config.model_type} reads rows of a batch differently from separate "
            f"rows: log-probabilities differ by up to {gap:.2g} nats, so gradients would be wrong: "
            "use another model"
        )
    return alone_PT


def check_rows(policy: Policy) -> None:
    """Apply `check_reading` to a model whose completions are sampled by another program.

    Models that compute in bfloat16, float16 or TF32 are skipped, because their check needs tokens
    that the model itself has sampled.
    """
    if computes_narrowly(policy):
        return
    prompts, width = trial(policy)
    check_reading(policy, prompts, [trial_tokens(policy, width)] * len(prompts))


@torch.inference_mode()
def row_logprobs(policy: Policy, tokens: list[int], last: int) -> torch.Tensor:
    """Return the log-probabilities of the last tokens of a single row.

    The row is read without a cache, and with the mask and positions that are transformers' default.

    Args:
        policy: policy with the model.
        tokens: token ids of the row.
        last: number of tokens at the end whose log-probabilities are returned.
    """
    ids_1L = torch.tensor([tokens], device=policy.model.device)
    with policy.computing():
        logits_TV = policy.model(input_ids=ids_1L, use_cache=False).logits[0, -last - 1 : -1]
    logprobs_TV = widen(logits_TV).log_softmax(dim=-1)
    return logprobs_TV.gather(1, ids_1L[0, -last:, None])[:, 0].cpu()


def computes_narrowly(policy: Policy) -> bool:
    """Return True if the policy computes matrix products in bfloat16, float16 or TF32."""
    on_cuda = policy.model.device.type == "cuda"
    tf32 = on_cuda and bool(torch.backends.cuda.matmul.allow_tf32)
    return policy.bf16 or policy.model.dtype.itemsize == 2 or tf32


def gap_beyond_rounding(policy: Policy, first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the largest difference of log-probabilities in nats, or 0 if rounding explains it.

    The result is also 0 if a value is NaN, because sampling and scoring report NaN values.
    """
    gaps = (first.double().cpu() - second.double().cpu()).abs()
    if computes_narrowly(policy):
        differ = float(gaps.mean()) > MAX_NARROW_GAP
    else:
        # The float32 tolerance also applies to float64 models, because some of their layers compute
        # in float32.
        largest = max(1.0, float(second.abs().max()))
        differ = float(gaps.max()) > 1000 * torch.finfo(torch.float32).eps * largest
    return float(gaps.max()) if differ else 0.0


def trial(policy: Policy) -> tuple[list[list[int]], int]:
    """Return three short prompts of unequal lengths, and the length of completions, for a trial.

    Lengths are in tokens. Prompt and completion together fit into the model's context, and into the
    length up to which LongRoPE uses its short factors.
    """
    config = policy.model.config.get_text_config(decoder=True)
    limits = (getattr(config, "max_position_embeddings", None), rope_switch(config))
    room = min(TRIAL_TOKENS, *(limit or TRIAL_TOKENS for limit in limits))
    longest = max(1, 3 * room // 5)
    lengths = (longest, max(1, longest // 3), max(1, 2 * longest // 3))
    return [trial_tokens(policy, length) for length in lengths], max(1, room - longest)


def trial_tokens(policy: Policy, count: int) -> list[int]:
    """Return `count` token ids from the vocabulary, without padding or end-of-sequence tokens."""
    vocabulary = policy.model.config.get_text_config(decoder=True).vocab_size
    plain = (t for t in range(2, vocabulary) if t not in {policy.pad_token, *policy.end_tokens})
    tokens = list(islice(plain, 8)) or [0]
    return [tokens[(3 * place + count) % len(tokens)] for place in range(count)]


def _agrees(
    policy: Policy, way: Callable[..., Reader], prompts: list[list[int]], at_once: int
) -> bool | None:
    """Return True if a reader and `FullReader` agree up to rounding; None if memory runs out.

    Args:
        policy: policy with the model.
        way: class of the reader.
        prompts: token ids of two prompts.
        at_once: number of rows that `FullReader` reads at a time.
    """
    try:
        tried, reference = (
            _trial(policy, way, prompts, 2),
            _trial(policy, FullReader, prompts, at_once),
        )
    except OTHER_WAYS_OF_READING as error:
        no_memory = isinstance(error, RuntimeError) and out_of_memory(error)
        return None if no_memory else False
    if policy.bf16 or policy.model.dtype.itemsize == 2:
        # The tolerance in nats covers rounding in bfloat16.
        return torch.allclose(tried, reference, rtol=0.0, atol=0.2)
    largest = max(1.0, float(reference.abs().max()))
    return torch.allclose(
        tried, reference, rtol=0.0, atol=1000 * torch.finfo(tried.dtype).eps * largest
    )


def _trial(
    policy: Policy,
    way: Callable[..., Reader],
    prompts: list[list[int]],
    at_once: int,
    completions: list[list[int]] | None = None,
) -> torch.Tensor:
    """Return the log-probabilities of one completion per prompt, [P, T], read by a reader.

    Args:
        policy: policy with the model.
        way: class of the reader.
        prompts: token ids of the prompts.
        at_once: number of rows that the reader reads at a time.
        completions: token ids of the completions; None for two completions of three tokens.
    """
    vocabulary = policy.model.config.get_text_config(decoder=True).vocab_size
    tokens = np.array(completions or [[2, 3, 4], [5, 6, 7]], dtype=np.int64)[:, None] % vocabulary
    rollouts = Rollouts(
        prompts=[],
        prompt_tokens=prompts,
        tokens_PGT=tokens,
        mask_PGT=np.ones_like(tokens, dtype=bool),
        ended_PG=np.ones((len(prompts), 1), dtype=bool),
        texts_PG=[[""]] * len(prompts),
    )
    logprobs = []
    with torch.no_grad(), unpacked(policy.model):
        for start in range(0, len(prompts), at_once):
            index = np.arange(start, start + at_once)
            reader = way(policy, rollouts, index)
            window = reader.window(index)
            logprobs.append(Head(policy, reader.output, 1.0).logprobs(window))
    return torch.cat(logprobs)
