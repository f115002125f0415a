"""What parts take of a configuration: the options of a policy, of a task and of a sampler.

A command's configuration makes them (`Common.policy_options` and its neighbours), so that policy,
rollout, tasks and costs never see a whole one, nor ask which command it is of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_ustat.config.model import ModelConfig, PromptConfig
from grpo_ustat.config.rollout import RolloutConfig


@dataclass(frozen=True)
class PolicyOptions:
    """Which policy is loaded, and how it computes.

    Attributes:
        model: its weights.
        prompt: how questions are put to it.
        device: torch device, as configured.
        num_threads: of OpenMP, in this process.
        tf32: whether float32 products are TF32.
        parameters: regular expression of the names of those that have a gradient; None: all.
        merge_adapters: whether LoRA adapters are added to the weights, which then have it.
    """

    model: ModelConfig
    prompt: PromptConfig
    device: str
    num_threads: int
    tf32: bool = False
    parameters: str | None = None
    merge_adapters: bool = True


@dataclass(frozen=True)
class TaskOptions:
    """Which questions are asked, how, and what judges their answers.

    Attributes:
        dataset: the questions, a class of `config.data`.
        prompt: how a question is put to the model.
        reward_funcs: that judge a completion, the data set's own first.
        reward_weights: of each in the weighted sum.
        max_completion_length: tokens after which a completion is cut.
        judge_workers: processes of a judge that needs them.
    """

    dataset: Any
    prompt: PromptConfig
    reward_funcs: list[str]
    reward_weights: list[float]
    max_completion_length: int
    judge_workers: int


@dataclass(frozen=True)
class SamplerOptions:
    """What writes completions, and from which draws.

    Attributes:
        rollout: the engine.
        seed: keys the draws.
        temperature: divides the logits.
        max_prompt_length, max_completion_length: tokens; a prompt of any length where None.
        rows: completions written side by side.
    """

    rollout: RolloutConfig
    seed: int
    temperature: float
    max_prompt_length: int | None
    max_completion_length: int
    rows: int


@dataclass(frozen=True)
class StudySampling:
    """What every process of a study samples with, scores and judges.

    Attributes:
        policy, sampler, task: their options.
        workers: local processes that share it out.
    """

    policy: PolicyOptions
    sampler: SamplerOptions
    task: TaskOptions
    workers: int
