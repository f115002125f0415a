"""Forward passes over completions, with gradients, that read each group's prompt only once.

A reader first reads the prompts. It then reads the completions in several parts, which continue
from copies of the prompts' keys and values. The backward passes of the parts leave gradients at
these copies. At the end, the gradients at the copies are propagated through the prompts. The result
equals the gradient of a pass over prompt and completion, but only the activations of the prompts
and of one part are in memory at a time.
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
        prompts: ascending indices of the prompts to read.
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
        """Return the window that predicts the completions with these flat indices."""
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
        """Propagate the gradients at the copied hidden states, keys and values to the prompts."""
        pairs = [(e, x.grad) for e, x in zip(self.ends, self.leaves, strict=True)]
        pairs = [(end, grad) for end, grad in pairs if grad is not None]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))

    def _read(self, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Return the hidden states at these token ids; pass no mask if no prompt is padded."""
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
    """Reader that reads prompt and completion in one pass, in rows padded only at the end.

    It passes no mask, so the model can use fast kernels for causal attention.
    """

    def __init__(self, policy: Policy, rollouts: Rollouts, prompts: np.ndarray):
        self.policy, self.rollouts = policy, rollouts

    def window(self, index: np.ndarray) -> Window:
        """Return the window that predicts the completions with these flat indices."""
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
    """Reader that reads prompt and completion in one pass, with an attention mask."""

    def __init__(self, policy: Policy, rollouts: Rollouts, prompts: np.ndarray):
        self.policy, self.rollouts = policy, rollouts

    def window(self, index: np.ndarray) -> Window:
        """Return the window that predicts the completions with these flat indices."""
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
_contiguous: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
# Largest mean absolute difference between log-probabilities of sampled tokens, in nats, that is
# attributed to rounding in narrow types. It is 0.07 for SmolLM2-135M in bfloat16.
MAX_NARROW_GAP = 0.3
# Exceptions that a model can raise if it does not support a reader.
OTHER_WAYS_OF_READING = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)
# Largest number of tokens in a trial's row, which consists of a prompt and its completion.
TRIAL_TOKENS = 20
# Token ids of the prompts used in trials, with unequal and with equal lengths.
UNEQUAL_PROMPTS, EQUAL_PROMPTS = [[2, 3, 4, 5], [3, 2]], [[2, 3], [3, 2]]


def can_share(policy: Policy) -> bool:
    """Return True if the model can read a prompt once for all completions of its group.

    The state of every layer must consist of keys and values. Completions that are read from copies
    of this state must have the same log-probabilities as in a single pass.
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
    """Return True if rows padded at the end and read without a mask give correct log-probabilities.

    A trial compares them with the log-probabilities of rows that are read one at a time. Each model
    is tried only once. If memory runs out during the trial, the result is False, and the next
    call tries again.
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

    Padding does so if it shifts the positions. Scores would then be gradients of the wrong
    log-probabilities.

    Args:
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
        # Scoring will report the failure.
        return alone_PT
    if gap := gap_beyond_rounding(policy, padded_PT, alone_PT):
        raise ConfigError(
            f"{policy.model.config.model_type} reads rows of a batch differently from separate "
            f"rows: log-probabilities differ by up to {gap:.2g} nats, so scores would be wrong: "
            "use another model"
        )
    return alone_PT


def check_rows(policy: Policy) -> None:
    """Apply `check_reading` to a model whose tokens are sampled by another program.

    Models that compute in bfloat16, float16 or TF32 are not checked, because their check needs
    tokens that the model itself has sampled.
    """
    if computes_narrowly(policy):
        return
    prompts, width = trial(policy)
    check_reading(policy, prompts, [trial_tokens(policy, width)] * len(prompts))


@torch.inference_mode()
def row_logprobs(policy: Policy, tokens: list[int], last: int) -> torch.Tensor:
    """Return the log-probabilities of the last T tokens of a single row, [T].

    The row is read without a cache and with the default mask and positions of transformers.
    """
    ids_1L = torch.tensor([tokens], device=policy.model.device)
    with policy.computing():
        logits_TV = policy.model(input_ids=ids_1L, use_cache=False).logits[0, -last - 1 : -1]
    logprobs_TV = widen(logits_TV).log_softmax(dim=-1)
    return logprobs_TV.gather(1, ids_1L[0, -last:, None])[:, 0].cpu()


def computes_narrowly(policy: Policy) -> bool:
    """Return True if products are computed in bfloat16, float16 or TF32."""
    on_cuda = policy.model.device.type == "cuda"
    tf32 = on_cuda and bool(torch.backends.cuda.matmul.allow_tf32)
    return policy.bf16 or policy.model.dtype.itemsize == 2 or tf32


def gap_beyond_rounding(policy: Policy, first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the largest difference between log-probabilities, or 0 if rounding explains it.

    The unit is nats. The result is also 0 if a value is NaN, because sampling and scoring report
    NaN values.
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
    """Return three short prompts of unequal lengths, and the length of their completions in tokens.

    No row is longer than the model's context or than the length up to which LongRoPE uses its short
    factors.
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

    `FullReader` reads `at_once` rows at a time.
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
    """Return the log-probabilities of one completion per prompt, [P, T].

    The reader reads `at_once` rows at a time. The default completions have three tokens.
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
