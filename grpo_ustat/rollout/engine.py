"""Rollout engines: they sample the completions that are learnt from or measured."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Protocol

from grpo_ustat.config.mse import MseConfig
from grpo_ustat.config.train import TrainConfig
from grpo_ustat.policy.loading import Policy, context_length
from grpo_ustat.records import Prompt, Rollouts
from grpo_ustat.rollout.local import Sampling, sample
from grpo_ustat.rollout.vllm import VllmEngine
from grpo_ustat.rollout.vllm_server import VllmServerEngine


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
    """The policy's own model: exactly the distribution that is scored, always up to date."""

    def __init__(self, policy: Policy):
        self.sample = partial(sample, policy)

    def refresh(self) -> None:
        """Nothing to do: the weights are the policy's own."""


def make_engine(config: TrainConfig | MseConfig, policy: Policy) -> Engine:
    """The configured engine.

    Raises:
        ConfigError: vLLM is missing or cannot run this model, or its server is not as it must be.
    """
    if config.rollout.name == "local":
        return LocalEngine(policy)
    if isinstance(config, TrainConfig) and config.rollout.name == "vllm_server":
        return VllmServerEngine(policy, config.rollout, rows=config.rollout_batch_size)
    options, longest = config.rollout, config.prompt.max_length
    if options.max_model_len is None and longest is not None:
        room, limit = longest + config.max_completion_length, context_length(config)
        options = replace(options, max_model_len=min(room, limit or room))
    return VllmEngine(policy, options, rows=config.rollout_batch_size)
