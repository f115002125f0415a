"""Samplers of completions for training and measurement, called rollout engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from grpo_ustat.config.model import ModelConfig
from grpo_ustat.config.parts import SamplerOptions
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.memory import out_of_memory
from grpo_ustat.policy.output_layer import cache_name, causal
from grpo_ustat.policy.prompt_sharing import (
    check_reading,
    check_rows,
    gap_beyond_rounding,
    trial,
)
from grpo_ustat.policy.source import context_length
from grpo_ustat.records import Prompt, Rollouts
from grpo_ustat.rollout.batch import Work
from grpo_ustat.rollout.local import Sampling, sample, write
from grpo_ustat.rollout.vllm import VllmEngine
from grpo_ustat.terminal.progress import Progress
from grpo_ustat.terminal.streams import single_line

# Errors that a model can raise if it does not accept the arguments of a call.
WRONG_CALLS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
OTHER_WAYS = "use rollout=vllm, or study rollouts from another sampler (pool=FILE.parquet)"


class Engine(Protocol):
    """Sampler of completions from the policy, with the weights that `refresh` loaded last."""

    def sample(
        self,
        prompts: list[Prompt],
        group_size: int,
        sampling: Sampling,
        *,
        step: int = 0,
        first: int = 0,
    ) -> Rollouts:
        """Sample `group_size` completions of each prompt; see `grpo_ustat.rollout.local.sample`."""
        ...

    def refresh(self) -> None:
        """Load the policy's current weights; call this after every update, on all ranks."""
        ...


class LocalEngine:
    """Sampler that runs the policy's own model.

    Completions are therefore drawn from exactly the distribution whose log-probabilities are
    trained.
    """

    def __init__(self, policy: Policy):
        check_cache(policy.model)
        check_sampling(policy)
        self.sample = partial(sample, policy)

    def refresh(self) -> None:
        """Do nothing, because the engine always uses the policy's current weights."""


def check_cache(model: PreTrainedModel) -> None:
    """Raise an error for a model that ignores its cache or has only recurrent layers.

    The sampler passes only the newest token to the model and relies on the cache for the text
    before it. A model without a cache would not see this text. A recurrent model (Mamba) would
    apply the mask of all tokens to the new token.

    Raises:
        ConfigError: If the model cannot be sampled with a cache.
    """
    kind = model.config.model_type
    layers = DynamicCache(config=model.config).layers
    recurrent = layers and not any(isinstance(layer, DynamicLayer) for layer in layers)
    if not cache_name(causal(model)) or recurrent:
        raise ConfigError(
            f"rollout=local cannot sample from {kind}, which cannot continue a text from a "
            f"cache: {OTHER_WAYS}"
        )


def check_sampling(policy: Policy) -> None:
    """Raise an error if a model cannot be sampled correctly with a transformers cache.

    The check samples a few short completions of prompts of unequal lengths in one batch. It then
    reads each row separately. The tokens must have the same probabilities both times. The check
    also fails if the model reads a row differently in a batch than separately; see `check_reading`.
    Its random numbers are fixed and do not affect the run.

    Raises:
        ConfigError: If the model does not accept the cache, or if the probabilities differ.
    """
    kind = policy.model.config.model_type
    prompts, width = trial(policy)
    draws_RT = np.random.default_rng(0).random((len(prompts), width))
    work = Work(prompts, 1, lambda rows: draws_RT[rows])
    sampling = Sampling(seed=0, stream="trial", max_completion_length=width)
    endless = replace(policy, end_tokens=frozenset())
    with _one_line(kind):
        written = write(endless, work, sampling, Progress("trying the sampler"))
    alone_RT = check_reading(policy, prompts, written.tokens_RT.tolist())
    if gap := gap_beyond_rounding(policy, written.logprobs_RT, alone_RT):
        raise ConfigError(
            f"rollout=local cannot sample from {kind} correctly: in a batch, log-probabilities of "
            f"tokens differ by up to {gap:.2g} nats from those in rows read separately: "
            f"{OTHER_WAYS}, or use another model"
        )


@contextmanager
def _one_line(kind: str) -> Iterator[None]:
    """Convert an error in the block, raised by a model that rejects the cache, to a ConfigError."""
    try:
        yield
    except WRONG_CALLS as error:
        if isinstance(error, RuntimeError) and out_of_memory(error):
            raise
        reason = single_line(f"{type(error).__name__}: {error}", 200)
        raise ConfigError(
            f"rollout=local cannot sample from {kind}, which does not accept the general cache of "
            f"transformers ({reason}): {OTHER_WAYS}"
        ) from error


def make_engine(sampler: SamplerOptions, model: ModelConfig, policy: Policy) -> Engine:
    """Create the sampler that the configuration names.

    Args:
        sampler: options of sampling.
        model: configuration from which `policy` was loaded.
        policy: policy from which the engine samples.
    """
    options, longest = sampler.rollout, sampler.max_prompt_length
    if options.name == "local":
        return LocalEngine(policy)
    check_rows(policy)
    if options.max_model_len is None and longest is not None:
        room, limit = longest + sampler.max_completion_length, context_length(model)
        options = replace(options, max_model_len=min(room, limit or room))
    return VllmEngine(policy, options, rows=sampler.rows)
