"""Load a causal language model and its tokenizer: a folder, embedded or cached, or a hub id.

A folder may hold LoRA adapters, which are merged into the model that they name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import is_offline_mode
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import logging as transformers_logging

from grpo_ustat.checks import ConfigError, adapter_base, model_folder
from grpo_ustat.config import Common
from grpo_ustat.pace import Pace
from grpo_ustat.policy.adapters import merged
from grpo_ustat.policy.chat import ChatFormat
from grpo_ustat.policy.devices import check_device
from grpo_ustat.ranks import own_device
from grpo_ustat.tasks.base import Task
from grpo_ustat.tasks.registry import make_task


@dataclass(frozen=True)
class Policy:
    """A model with what is needed to write and read its texts.

    Attributes:
        model: the causal language model, in evaluation mode.
        tokenizer: its tokenizer.
        end_tokens: ids that end a completion.
        pad_token: id used for padding; masks, not this id, say what is padding.
        bf16: whether it computes in bfloat16 over weights of a wider type, in sampling and
            scoring alike.
        special_tokens: whether the tokenizer puts its special tokens around prompts; a chat format
            has written them already.
    """

    model: PreTrainedModel
    tokenizer: object
    end_tokens: frozenset[int]
    pad_token: int
    bf16: bool = False
    special_tokens: bool = True

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each prompt."""
        return encode(self.tokenizer, texts, special_tokens=self.special_tokens)

    def computing(self) -> torch.autocast:
        """The context of every forward pass."""
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.bf16)


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special_tokens: bool
) -> list[list[int]]:
    """Token ids of each text, between the tokenizer's special tokens or without them."""
    return [tokenizer(text, add_special_tokens=special_tokens)["input_ids"] for text in texts]


def load_policy(
    model_name_or_path: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Policy:
    """Load a policy in evaluation mode, all parameters trainable.

    Args:
        model_name_or_path: `embedded:NAME`, `cached:NAME`, a folder in save_pretrained layout, also
            PEFT's of LoRA adapters, or `org/name`.
        revision: branch, tag or commit on the hub.
        dtype: torch dtype by name.
        device: torch device.
        attn_implementation: of transformers, None: its own choice.
        trust_remote_code: whether to run code that comes with the model.
        tokenizer: the model's, None: it is loaded.

    Raises:
        ConfigError: no model or tokenizer can be loaded from there.
    """
    transformers_logging.disable_progress_bar()
    common = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = tokenizer or load_tokenizer(model_name_or_path, **common)
    with _one_line(model_name_or_path):
        options = dict(attn_implementation=attn_implementation, **common)
        model = _model(resolve(model_name_or_path), dtype=getattr(torch, dtype), **options)
    end_tokens = _end_tokens(model, tokenizer)
    pad = tokenizer.pad_token_id
    model.to(device).eval()
    return Policy(model, tokenizer, end_tokens, min(end_tokens) if pad is None else pad)


def _model(source: str, *, revision: str | None, **options: Any) -> PreTrainedModel:
    """A model as it is; adapters merged into the model that they name."""
    adapters = adapter_base(Path(source))
    if adapters is not None:
        base, revision = adapters
        return merged(_model(resolve(base), revision=revision, **options), source)
    model = AutoModelForCausalLM.from_pretrained(
        source, revision=revision, use_safetensors=True, **options
    )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError("the hub has adapters under this name: download them to a folder")
    return model


def load_tokenizer(
    model_name_or_path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """AutoTokenizer, but a tokenizer.json that names no class of its own is taken as it is.

    AutoTokenizer would put the model type's usual splitting of words in its place. Adapters
    without a tokenizer have that of the model that they name.

    Raises:
        ConfigError: none can be loaded from there.
    """
    source = resolve(model_name_or_path)
    common = {"revision": revision, "trust_remote_code": trust_remote_code}
    adapters = adapter_base(Path(source))
    if adapters is not None and not (Path(source) / "tokenizer_config.json").is_file():
        return load_tokenizer(adapters[0], **common | {"revision": adapters[1]})
    with _one_line(model_name_or_path):
        config = get_tokenizer_config(source, **common)
        plain = config.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
        loader = PreTrainedTokenizerFast if plain else AutoTokenizer
        return loader.from_pretrained(source, padding_side="left", **common)


@contextmanager
def _one_line(model_name_or_path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        if is_offline_mode() and not Path(resolve(model_name_or_path)).exists():
            reason = (
                "it is not in the hub's local cache, and HF_HUB_OFFLINE keeps it from being "
                "fetched: unset that, or name a folder"
            )
        if "trust_remote_code" in str(error):
            reason = (
                "it needs code that comes with it; read that code, and if you trust it add "
                "model.trust_remote_code=true to the command line"
            )
        raise ConfigError(
            f"no model could be loaded from model_name_or_path={model_name_or_path}: {reason}"
        ) from error


def configured_policy(
    config: Common,
    device: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Policy:
    """The configured policy on the given or this rank's device, ending completions at
    `prompt.stop` too; sets this process's threads. The tokenizer is loaded unless it is given.
    """
    device = device or own_device(config.launch.device)
    check_device(device)
    torch.set_num_threads(config.launch.num_threads)
    model = config.model
    Pace(f"loading {model.name}")
    policy = load_policy(
        model.model_name_or_path, revision=model.revision, dtype=model.dtype, device=device,
        attn_implementation=model.attn_implementation, trust_remote_code=model.trust_remote_code,
        tokenizer=tokenizer,
    )  # fmt: skip
    policy = replace(policy, special_tokens=not config.prompt.chat)
    if config.prompt.stop is None:
        return policy
    stops = stop_tokens(policy.tokenizer, config.prompt.stop)
    return replace(policy, end_tokens=policy.end_tokens | stops)


def configured_tokenizer(config: Common) -> PreTrainedTokenizerBase:
    """The configured model's tokenizer.

    Raises:
        ConfigError: none can be loaded.
    """
    model = config.model
    return load_tokenizer(
        model.model_name_or_path, revision=model.revision, trust_remote_code=model.trust_remote_code
    )


def context_length(config: Common) -> int | None:
    """Tokens of prompt and completion that the configured model has positions for; None: unknown.

    Raises:
        ConfigError: its config.json cannot be loaded.
    """
    trust = config.model.trust_remote_code
    name, revision = config.model.model_name_or_path, config.model.revision
    while adapters := adapter_base(model_folder(name)):
        name, revision = adapters
    with _one_line(name):
        found = AutoConfig.from_pretrained(
            resolve(name), revision=revision, trust_remote_code=trust
        )
    return getattr(found.get_text_config(decoder=True), "max_position_embeddings", None)


def chat_format(
    config: Common, tokenizer: PreTrainedTokenizerBase | None = None
) -> ChatFormat | None:
    """What writes turns in the configured model's chat format, up to where its answer begins; None
    unless `prompt.chat` asks for it. The tokenizer is loaded unless it is given.

    Raises:
        ConfigError: the model has no chat format, as base models have none.
    """
    if not config.prompt.chat:
        return None
    return ChatFormat(tokenizer or configured_tokenizer(config), config.model.model_name_or_path)


def configured_task(config: Common, tokenizer: PreTrainedTokenizerBase | None = None) -> Task:
    """The configured task, its prompts in the model's chat format where `prompt.chat` asks for it,
    without those longer than `prompt.max_length`. The tokenizer is loaded where it is needed and
    not given.

    Raises:
        ConfigError: see `make_task` and `chat_format`.
    """

    def lengths(texts: list[str]) -> list[int]:
        found = tokenizer or configured_tokenizer(config)
        return list(map(len, encode(found, texts, special_tokens=not config.prompt.chat)))

    return make_task(config, chat_format(config, tokenizer), lengths)


def stop_tokens(tokenizer: object, stop: str) -> frozenset[int]:
    """Ids of all tokens whose text contains `stop`; one spelt out over two tokens is not seen.

    Raises:
        ConfigError: no token contains it.
    """
    texts = tokenizer.batch_decode([[t] for t in range(len(tokenizer))], skip_special_tokens=False)
    found = frozenset(t for t, text in enumerate(texts) if stop in text)
    if not found:
        raise ConfigError(
            f"prompt.stop={stop!r} is in none of the tokenizer's {len(texts)} tokens: "
            "use a shorter string, or null"
        )
    return found


def resolve(model_name_or_path: str) -> str:
    """The folder or hub id that a configured name stands for."""
    folder = model_folder(model_name_or_path)
    return str(folder.absolute()) if folder.exists() else model_name_or_path


def _end_tokens(model: PreTrainedModel, tokenizer: object) -> frozenset[int]:
    configured = model.generation_config.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    found = frozenset(t for t in (*listed, tokenizer.eos_token_id) if t is not None)
    if not found:
        raise ConfigError(
            "the model names no end token: set eos_token_id in generation_config.json"
        )
    return found
