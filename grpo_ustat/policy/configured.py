"""Creation of the configured policy and task, and checks that they fit together."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from grpo_ustat.config.model import ModelConfig, adapter_base, model_folder
from grpo_ustat.config.parts import PolicyOptions, SamplerOptions, TaskOptions
from grpo_ustat.config.schema import ConfigError, did_you_mean
from grpo_ustat.distributed.ranks import RefusedByRank, own_device
from grpo_ustat.policy.chat import chat_format, writes_turns
from grpo_ustat.policy.loading import Policy, load_policy
from grpo_ustat.policy.precision import set_tf32
from grpo_ustat.policy.source import context_length, crossed_switch, resolve
from grpo_ustat.policy.tokenizer import configured_tokenizer, encode, stop_tokens
from grpo_ustat.records import Prompt
from grpo_ustat.tasks.base import Task
from grpo_ustat.tasks.registry import make_task
from grpo_ustat.terminal.progress import Progress


def configured_policy(
    options: PolicyOptions,
    device: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Policy:
    """Load the configured policy, and set this process's number of threads and its use of TF32.

    Tokens that contain `prompt.stop` are added to the end-of-sequence tokens.

    Args:
        options: settings of the policy.
        device: device for the model; None for the device of this rank.
        tokenizer: tokenizer of the model, if it is already loaded; None to load it.
    """
    device = device or own_device(options.device)
    check_device(device)
    torch.set_num_threads(options.num_threads)
    set_tf32(options.tf32)
    model, prompt = options.model, options.prompt
    Progress(f"loading {model.name}")
    policy = load_policy(
        model.model_name_or_path, revision=model.revision, dtype=model.dtype, device=device,
        attn_implementation=model.attn_implementation, trust_remote_code=model.trust_remote_code,
        tokenizer=tokenizer, merge_adapters=options.merge_adapters,
    )  # fmt: skip
    if options.parameters is not None:
        train_only(policy.model, options.parameters)
    in_turns = writes_turns(prompt.chat, policy.tokenizer)
    policy = replace(policy, special_tokens=not in_turns)
    if prompt.stop is None:
        return policy
    stops = stop_tokens(policy.tokenizer, prompt.stop)
    return replace(policy, end_tokens=policy.end_tokens | stops)


def check_device(device: str) -> None:
    """Raise an error if the installed PyTorch cannot use the device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"launch.device={device} cannot be used ({reason}): use launch.device=cpu"
        ) from error


def check_parameters(options: PolicyOptions) -> None:
    """Raise an error if `study.parameters` matches no parameter of the configured model.

    To be fast, the check builds the model without weights. It skips folders of adapters and models
    that cannot be built in this way; `configured_policy` checks those after loading.
    """
    model = options.model
    name = model.model_name_or_path
    if options.parameters is None or adapter_base(model_folder(name)):
        return
    common: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    try:
        stored = AutoConfig.from_pretrained(resolve(name), revision=model.revision, **common)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(stored, **common)
    except Exception:
        # A damaged file can cause any exception. Loading the model will report it later.
        return
    train_only(empty, options.parameters)


def train_only(model: nn.Module, pattern: str) -> None:
    """Freeze all trainable parameters whose names do not match a regular expression."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    matches = {name for name in names if re.search(pattern, name)}
    if not matches:
        some = ", ".join(names[:: max(1, len(names) // 4)][:4])
        hint = did_you_mean(pattern, sorted({part for name in names for part in name.split(".")}))
        raise ConfigError(
            f"study.parameters={pattern} matches none of the model's {len(names)} trainable "
            f"parameters, such as {some}: {hint}use part of a name"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in matches)


def configured_task(
    options: TaskOptions,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    moment: datetime | None = None,
) -> Task:
    """Create the configured task, with prompts in the chat format if `prompt.chat` selects it.

    Prompts longer than `prompt.max_length` are dropped.

    Args:
        options: settings of the task.
        model: configured model, whose tokenizer and chat format are used.
        tokenizer: tokenizer of the model, if it is already loaded; None to load it when needed.
        moment: date and time for chat templates that write the date; None for the current time.
    """

    def lengths(texts: list[str]) -> list[int]:
        reader = tokenizer or configured_tokenizer(model)
        in_turns = writes_turns(options.prompt.chat, reader)
        return list(map(len, encode(reader, texts, special_tokens=not in_turns)))

    return make_task(options, chat_format(model, options.prompt, tokenizer, moment), lengths)


def check_lengths(
    policy: PolicyOptions,
    sampler: SamplerOptions,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
) -> None:
    """Raise an error if a prompt and its completion exceed the context of the model or of vLLM.

    For a model with LongRoPE, an error is also raised if some rows would be shorter and others
    longer than the length at which it changes its factors; see `crossed_switch`.
    """
    texts = [prompt.text for prompt in prompts]
    in_turns = writes_turns(policy.prompt.chat, tokenizer)
    lengths = list(map(len, encode(tokenizer, texts, special_tokens=not in_turns)))
    if not min(lengths):
        raise RefusedByRank(
            f"the tokenizer of {policy.model.model_name_or_path} produces no tokens for "
            f"{texts[lengths.index(0)]!r}: check that the model has its tokenizer files"
        )
    limits = [
        (context_length(policy.model), "the model's context of"),
        (sampler.rollout.max_model_len, "vLLM's rollout.max_model_len of"),
    ]
    longest, completion_length = max(lengths), sampler.max_completion_length
    switch = crossed_switch(policy.model, min(lengths), longest + completion_length)
    limits.append(
        (
            switch,
            "the length at which LongRoPE changes all rows, original_max_position_embeddings =",
        )
    )
    for limit, name in limits:
        if limit is not None and longest + completion_length > limit:
            fixes = []
            if limit > longest:
                fixes.append(f"max_completion_length={limit - longest} or less")
            if limit > completion_length:
                most = limit - completion_length
                fixes.append(f"prompt.max_length={most} to drop longer prompts")
            both = f"max_completion_length below {limit} and a prompt.max_length"
            raise RefusedByRank(
                f"a prompt of {longest} tokens and max_completion_length={completion_length} "
                f"exceed {name} {limit} tokens: use {', or '.join(fixes) or both}"
            )
