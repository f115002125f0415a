"""Construction of a task from its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from grpo_ustat.config.own_functions import REWARDS, TASKS, reward_file
from grpo_ustat.config.parts import TaskOptions
from grpo_ustat.tasks.arithmetic import Arithmetic, Ranges
from grpo_ustat.tasks.base import Fitting, Judge, NumberJudge, Source, Task
from grpo_ustat.tasks.gsm8k import gsm8k
from grpo_ustat.tasks.jsonl import ExactJudge, JsonlSource
from grpo_ustat.tasks.math import math
from grpo_ustat.tasks.math_answers import MathJudge
from grpo_ustat.tasks.one_step import OneStep
from grpo_ustat.tasks.plugins import (
    OwnJudge,
    OwnSource,
    check_method,
    describe,
    entry_point,
    file_function,
    user_errors,
)
from grpo_ustat.tasks.prompts import Prompting, Turn
from grpo_ustat.tasks.reward_funcs import make_reward_funcs
from grpo_ustat.tasks.verifier import Verifier


def make_task(
    options: TaskOptions,
    chat: Callable[[list[Turn]], str] | None = None,
    lengths: Callable[[list[str]], list[int]] | None = None,
) -> Task:
    """Create the configured task.

    Args:
        options: task options of the configuration.
        chat: function that formats the messages of a chat for a chat model, see
            `policy.chat.chat_format`; None for plain text.
        lengths: function that returns the number of tokens of each text; required if
            `prompt.max_length` is set.
    """
    source, prompt = make_source(options), options.prompt
    examples = tuple(source.questions("examples")) if prompt.shots else ()
    prompting = Prompting(prompt.template, prompt.reply, examples, prompt.system, chat)
    judge = make_judge(options, source)
    if prompt.max_length is not None:
        assert lengths is not None, "prompt.max_length needs the lengths of prompts"
        source = Fitting(source, prompting, lengths, prompt.max_length)
    further = make_reward_funcs(options.reward_funcs, options.max_completion_length, judge)
    return Task(source, prompting, judge, further, options.reward_weights)


def make_source(options: TaskOptions) -> Source:
    """Create the configured data set."""
    dataset, prompt = options.dataset, options.prompt
    sizes = {split: getattr(dataset, f"{split}_size") for split in ("train", "test", "study")}
    sizes["examples"] = prompt.shots
    if dataset.kind == "one_step":
        return OneStep(dataset.tables, sizes, dataset.seed, prompt.seed)
    if dataset.kind == "gsm8k":
        return gsm8k(dataset, sizes, prompt.seed, verbatim=prompt.verbatim)
    if dataset.kind == "math":
        return math(dataset, sizes, prompt.seed, verbatim=prompt.verbatim)
    if dataset.kind == "jsonl":
        return JsonlSource(dataset, sizes, prompt.seed, verbatim=prompt.verbatim)
    if dataset.kind == "own":
        return OwnSource(dataset.name, dataset.options, sizes)
    ranges = Ranges(
        dataset.min_term, dataset.max_term, dataset.min_factor, dataset.max_factor,
        dataset.min_digit, dataset.max_digit,
    )  # fmt: skip
    return Arithmetic(ranges, sizes, dataset.seed, prompt.seed)


def make_judge(options: TaskOptions, source: Source) -> Judge:
    """Create the configured judge.

    If the user sets `dataset.reward`, this function computes the rewards, but the judge of the data
    set still extracts the answers.
    """
    dataset = options.dataset
    if dataset.kind == "own":
        assert isinstance(source, OwnSource)
        user_task, description = source.task, describe(TASKS, dataset.name)
        if dataset.reward is None:
            check_method(description, user_task, "reward", "prompt", "completion")
        if hasattr(user_task, "extract"):
            check_method(description, user_task, "extract", "completion")
        # The task's own reward function is not called if dataset.reward is set.
        reward = cast(Any, getattr(user_task, "reward", None))
        judge = OwnJudge(reward, getattr(user_task, "extract", None), description)
    elif dataset.kind == "math":
        limits = (options.judge_workers, dataset.judge_seconds, dataset.judge_memory_gb)
        judge = MathJudge(Verifier(*limits), dataset.max_answer_length)
    elif dataset.kind == "jsonl":
        judge = ExactJudge()
    else:
        judge = NumberJudge()
    if dataset.reward is None:
        return judge
    if reward_file(dataset.reward):
        reward = file_function(dataset.reward, "dataset.reward")
        return OwnJudge(reward, judge.extract, f"dataset.reward={dataset.reward}")
    description = describe(REWARDS, dataset.reward)
    with user_errors(description):
        reward = entry_point(REWARDS, dataset.reward)
    return OwnJudge(reward, judge.extract, description)
