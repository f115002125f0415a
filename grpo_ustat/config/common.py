"""Fields that `train` and `mse` share: model, data set, prompt, processes and sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_ustat.config.model import ModelConfig, PromptConfig
from grpo_ustat.config.parts import PolicyOptions, SamplerOptions, TaskOptions
from grpo_ustat.config.reward_funcs import check_reward_funcs, reward_text, summed_weights
from grpo_ustat.config.rollout import RolloutConfig
from grpo_ustat.config.run import ProcessConfig, Shared
from grpo_ustat.config.schema import ConfigError, check_choice, field, node

# Device types of torch. A device number can follow, as in cuda:1.
DEVICES = ("cpu", "cuda", "mps", "xpu", "npu", "hpu")


@dataclass
class LaunchConfig(ProcessConfig):
    """Processes and devices, which do not affect results."""

    num_threads: int = field("that OpenMP uses in each process", "threads", positive=True)
    device: str = field("cpu, cuda, mps, xpu, npu or hpu; cuda:1 is the second GPU")
    judge_workers: int = field(
        "that judge answers, started by each process of the run; used by data sets such as MATH",
        "processes",
        positive=True,
    )


@dataclass
class Common(Shared):
    """Fields that `train` and `mse` share."""

    model: ModelConfig = node(ModelConfig, "the policy")
    dataset: Any = field("the questions; --help dataset=NAME lists the fields of another data set")
    prompt: PromptConfig = node(PromptConfig, "how a question is formatted for the model")
    launch: LaunchConfig = node(  # pyright: ignore[reportIncompatibleVariableOverride]  # narrower
        LaunchConfig, "processes and devices, which do not affect results"
    )
    reward_funcs: list[str] = field(
        "functions that score a completion; the first must be task, the data set's reward; each "
        "further one can be format (1 if an answer can be read), termination (1 if not "
        "truncated), brevity (1 - length/max_completion_length), FILE.py:FUNCTION or the name of "
        "an entry point; example: [task,brevity,my.py:score]"
    )
    reward_weights: list[float] | None = field(
        "weights of reward_funcs, in the same order; the reward is the weighted sum; a function "
        "with weight 0 appears only in the metrics; null: all weights are 1"
    )
    temperature: float = field(
        "number by which logits are divided, in sampling and in log-probabilities", positive=True
    )
    max_completion_length: int = field(
        "after which a completion is truncated; metrics count truncated completions",
        "tokens",
        positive=True,
    )
    rollout_batch_size: int = field(
        "sampled at once; affects only memory and speed", "completions", positive=True
    )
    show_prompts: int = field(
        "to print, each with the answer that was read from its reference solution, and then end; "
        "0: start the run",
        "prompts",
    )

    @property
    def weights(self) -> list[float]:
        """Weight of each reward function."""
        return summed_weights(self.reward_funcs, self.reward_weights)

    @property
    def rewards_plan(self) -> str:
        """Weighted sum of reward functions as text; "" if only the task's reward is used."""
        return reward_text(self.reward_funcs, self.reward_weights)

    @property
    def policy_options(self) -> PolicyOptions:
        """Options for loading the policy."""
        return PolicyOptions(self.model, self.prompt, self.launch.device, self.launch.num_threads)

    @property
    def task_options(self) -> TaskOptions:
        """Options for building the task."""
        return TaskOptions(
            dataset=self.dataset,
            prompt=self.prompt,
            reward_funcs=self.reward_funcs,
            reward_weights=self.weights,
            max_completion_length=self.max_completion_length,
            judge_workers=self.launch.judge_workers,
        )

    @property
    def shared_settings(self) -> dict[str, str | float | None]:
        """Settings that a dry run of `train` or `mse` shows, keyed by field name.

        The key "length" stands for max_completion_length.
        """
        return {
            "model": self.model.name,
            "dataset": self.dataset.name,
            "prompt": self.prompt.name,
            "prompt.max_length": self.prompt.max_length,
            "length": self.max_completion_length,
            "temperature": self.temperature,
        }

    def sampling_by(self, rollout: RolloutConfig) -> SamplerOptions:
        """Return the sampling options for the given engine."""
        return SamplerOptions(
            rollout=rollout,
            seed=self.seed,
            temperature=self.temperature,
            max_prompt_length=self.prompt.max_length,
            max_completion_length=self.max_completion_length,
            rows=self.rollout_batch_size,
        )

    @property
    def most_questions(self) -> int | None:
        """Number of questions to use, counted from the start of a split; None means all."""
        return None

    def check(self) -> None:
        """Refuse rewards, data, prompts and models that cannot be used."""
        super().check()
        check_reward_funcs(self.reward_funcs, self.reward_weights)
        check_choice("launch.device", self.launch.device.partition(":")[0], DEVICES)
        self.dataset.check()
        self.prompt.check()
        data, prompt = self.dataset, self.prompt
        boxed = "boxed" in f"{prompt.system} {prompt.template}"
        # A model that is not asked for \boxed{} does not write it and always gets reward 0.
        if data.kind == "math" and data.reward is None and not prompt.shots and not boxed:
            raise ConfigError(
                f"dataset={data.name} reads answers in \\boxed{{}}, but prompt={prompt.name} does "
                "not ask for \\boxed{}: use prompt=qwen_math_cot, prompt=chat_boxed, or a template "
                "that asks for \\boxed{}"
            )
        # Conversations in imported rollouts always use the chat template, whatever prompt.chat is.
        imports = getattr(self, "imports_pool", False)
        if prompt.template_options and prompt.chat is False and not imports:
            raise ConfigError(
                f"prompt.template_options={prompt.template_options} are options of a chat "
                f"template, but prompt={prompt.name} uses no chat template: use prompt.chat=true "
                "or remove the options"
            )
        self.model.check(cached=not self.dry_run)
