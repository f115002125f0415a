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

# Device types of torch. A number may follow, as in cuda:1.
DEVICES = ("cpu", "cuda", "mps", "xpu", "npu", "hpu")


@dataclass
class LaunchConfig(ProcessConfig):
    """Processes and devices; none of it changes results."""

    num_threads: int = field("of OpenMP in each process", "threads", positive=True)
    device: str = field("cpu, cuda, mps, xpu, npu or hpu; cuda:1 is the second GPU")
    judge_workers: int = field(
        "for judging answers, beside each process of the run; data sets such as MATH use them",
        "processes",
        positive=True,
    )


@dataclass
class Common(Shared):
    """Fields of the commands that have a model and questions."""

    model: ModelConfig = node(ModelConfig, "the policy")
    dataset: Any = field("the questions; for fields of another kind: --help dataset=NAME")
    prompt: PromptConfig = node(PromptConfig, "how a question is put to the model")
    launch: LaunchConfig = node(  # pyright: ignore[reportIncompatibleVariableOverride]  # narrower
        LaunchConfig, "processes and devices; none of it changes results"
    )
    reward_funcs: list[str] = field(
        "functions that judge a completion: first task, the data set's own; then any of format "
        "(an answer can be read), termination (not cut), brevity (1 - "
        "length/max_completion_length), FILE.py:FUNCTION or the name of an entry point, such as "
        "[task,brevity,my.py:score]"
    )
    reward_weights: list[float] | None = field(
        "weights of reward_funcs, in their order; the reward is the weighted sum; null: 1 each; "
        "a function of weight 0 is in the metrics only"
    )
    temperature: float = field("divides the logits, in sampling and in scoring", positive=True)
    max_completion_length: int = field(
        "of a completion at most; a longer one is cut and counted as cut", "tokens", positive=True
    )
    rollout_batch_size: int = field(
        "sampled at a time; changes memory and speed only", "completions", positive=True
    )
    show_prompts: int = field(
        "to print instead of a run, with the way their answers are read; 0: run", "prompts"
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
        """Settings that a dry run of `train` or `mse` shows, by their names on the command line.

        The key "length" is max_completion_length.
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
        """Return the sampling options with the given engine."""
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
        """Number of questions to use from the start of a split; None means all."""
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
        # Replies that follow a prompt without a box would all get reward 0.
        if data.kind == "math" and data.reward is None and not prompt.shots and not boxed:
            raise ConfigError(
                f"dataset={data.name} reads answers in \\boxed{{}}, but prompt={prompt.name} does "
                "not ask for it: use prompt=qwen_math_cot, prompt=chat_boxed, or a template that "
                "asks for it"
            )
        # Conversations in imported rollouts always go through the chat template.
        imports = getattr(self, "imports_pool", False)
        if prompt.template_options and prompt.chat is False and not imports:
            raise ConfigError(
                f"prompt.template_options={prompt.template_options} need a chat template, but "
                f"prompt={prompt.name} uses none: use prompt.chat=true or remove the options"
            )
        self.model.check(cached=not self.dry_run)
