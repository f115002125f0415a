"""Parts of a configuration that other packages need: policy, task and sampler options.

Properties of a command's configuration, such as `Common.policy_options`, build these parts. The
packages policy, rollout, tasks and costs therefore do not depend on whole configurations or
commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_ustat.config.model import ModelConfig, PromptConfig
from grpo_ustat.config.rollout import RolloutConfig


@dataclass(frozen=True)
class PolicyOptions:
    """Options for loading the policy and computing with it."""

    model: ModelConfig
    prompt: PromptConfig
    # Configured torch device.
    device: str
    # Number of OpenMP threads in this process.
    num_threads: int
    # True if float32 products use TF32.
    tf32: bool = False
    # Regular expression for the names of the parameters to differentiate; None means all
    # parameters.
    parameters: str | None = None
    # True if LoRA adapters are added to the weights, and gradients are taken with respect to these
    # merged weights.
    merge_adapters: bool = True


@dataclass(frozen=True)
class TaskOptions:
    """Options for a task's questions, their prompts and the scoring of answers."""

    # Data set: an instance of a class in `config.data`.
    dataset: Any
    prompt: PromptConfig
    # Functions that score a completion; the first is the data set's reward.
    reward_funcs: list[str]
    reward_weights: list[float]
    # Number of tokens after which a completion is truncated.
    max_completion_length: int
    judge_workers: int


@dataclass(frozen=True)
class SamplerOptions:
    """Options for sampling completions."""

    rollout: RolloutConfig
    # Random seed.
    seed: int
    # Divisor of the logits.
    temperature: float
    # Maximum length of a prompt in tokens; None means no limit.
    max_prompt_length: int | None
    max_completion_length: int
    # Number of completions generated at once.
    rows: int


@dataclass(frozen=True)
class StudySampling:
    """Options for the processes of a study, which sample and judge completions.

    The processes also compute the gradient of each completion's log-probability.
    """

    policy: PolicyOptions
    sampler: SamplerOptions
    task: TaskOptions
    # Number of local processes that share the work.
    workers: int
