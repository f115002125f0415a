"""Parts of a configuration that other rooms need: options of a policy, a task and a sampler.

A command's configuration makes them (`Common.policy_options` and its neighbours), so that policy,
rollout, tasks and costs never see a whole configuration, nor ask which command it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_ustat.config.model import ModelConfig, PromptConfig
from grpo_ustat.config.rollout import RolloutConfig


@dataclass(frozen=True)
class PolicyOptions:
    """Options of the policy: its weights and its computation."""

    model: ModelConfig
    prompt: PromptConfig
    # Torch device, as configured.
    device: str
    # Threads of OpenMP, in this process.
    num_threads: int
    # True if float32 products are TF32.
    tf32: bool = False
    # Regular expression of the names of parameters that have a gradient; None: all.
    parameters: str | None = None
    # True if LoRA adapters are added to the weights, which then have the gradient.
    merge_adapters: bool = True


@dataclass(frozen=True)
class TaskOptions:
    """Options of the task: its questions, their format, and the judges of answers."""

    # The questions, a class of `config.data`.
    dataset: Any
    prompt: PromptConfig
    # Functions that judge a completion, the data set's own first.
    reward_funcs: list[str]
    reward_weights: list[float]
    # Tokens after which a completion is cut.
    max_completion_length: int
    judge_workers: int


@dataclass(frozen=True)
class SamplerOptions:
    """Options of sampling completions: the engine and its draws."""

    rollout: RolloutConfig
    # Keys the draws.
    seed: int
    # Divides the logits.
    temperature: float
    # In tokens; None: a prompt of any length.
    max_prompt_length: int | None
    max_completion_length: int
    # Completions written side by side.
    rows: int


@dataclass(frozen=True)
class StudySampling:
    """Options with which every process of a study samples, scores and judges."""

    policy: PolicyOptions
    sampler: SamplerOptions
    task: TaskOptions
    # Local processes that share the work.
    workers: int
