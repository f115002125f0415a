"""Rollout engines: they sample the completions that are learnt from or measured."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Protocol

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from grpo_ustat.config.model import ModelConfig
from grpo_ustat.config.parts import SamplerOptions
from grpo_ustat.config.rollout import TrainRollout
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.loading import Policy, context_length
from grpo_ustat.policy.output_layer import cache_name, causal
from grpo_ustat.records import Prompt, Rollouts
from grpo_ustat.rollout.local import Sampling, sample
from grpo_ustat.rollout.vllm import VllmEngine
from grpo_ustat.rollout.vllm_server import VllmServerEngine

MODELS_WITH_OWN_CACHE = ("recurrent_gemma",)  # which is no transformers.Cache


class Engine(Protocol):
    """Samples from the policy as it was at the last `refresh`."""

    def sample(
        self,
        prompts: list[Prompt],
        group_size: int,
        sampling: Sampling,
        *,
        step: int = 0,
        first: int = 0,
    ) -> Rollouts:
        """`group_size` completions of each prompt; see `grpo_ustat.rollout.local.sample`."""
        ...

    def refresh(self) -> None:
        """Take over the policy's weights; to be called after every update, on all ranks."""
        ...


class LocalEngine:
    """The policy's own model: exactly the distribution that is scored, always up to date.

    Raises:
        ConfigError: the model cannot go on with a text that it has begun, see `check_cache`.
    """

    def __init__(self, policy: Policy):
        check_cache(policy.model)
        self.sample = partial(sample, policy)

    def refresh(self) -> None:
        """Nothing to do: the weights are the policy's own."""


def check_cache(model: PreTrainedModel) -> None:
    """Refuse a model that ignores the cache it is called with, when every token after the first
    would be drawn as if nothing stood before it; and one of recurrent layers alone, which would
    take the mask of all tokens for that of the new ones (Mamba).

    Raises:
        ConfigError: naming the architecture.
    """
    kind = model.config.model_type
    layers = DynamicCache(config=model.config).layers
    recurrent = layers and not any(isinstance(layer, DynamicLayer) for layer in layers)
    if cache_name(causal(model)) and not recurrent and kind not in MODELS_WITH_OWN_CACHE:
        return
    raise ConfigError(
        f"rollout=local cannot sample from {kind}, which continues no text from a cache: "
        "use rollout=vllm, or study rollouts that were made elsewhere (pool=FILE.parquet)"
    )


def make_engine(sampler: SamplerOptions, model: ModelConfig, policy: Policy) -> Engine:
    """The configured engine, which samples from `policy`, loaded from `model`.

    Raises:
        ConfigError: vLLM is missing or cannot run this model, or its server is not as it must be.
    """
    options, longest = sampler.rollout, sampler.max_prompt_length
    if options.name == "local":
        return LocalEngine(policy)
    if isinstance(options, TrainRollout) and options.name == "vllm_server":
        return VllmServerEngine(policy, options, rows=sampler.rows)
    if options.max_model_len is None and longest is not None:
        room, limit = longest + sampler.max_completion_length, context_length(model)
        options = replace(options, max_model_len=min(room, limit or room))
    return VllmEngine(policy, options, rows=sampler.rows)
