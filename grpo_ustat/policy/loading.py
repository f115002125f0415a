"""Load a causal language model and its tokenizer: a folder, a hub id or an embedded policy.

A folder may hold LoRA adapters, which are merged into the model that they name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import logging as transformers_logging

from grpo_ustat.checks import ASSETS, EMBEDDED, ConfigError, adapter_base
from grpo_ustat.config import Common
from grpo_ustat.policy.adapters import merged
from grpo_ustat.policy.devices import check_device
from grpo_ustat.ranks import own_device
from grpo_ustat.tasks.base import Task
from grpo_ustat.tasks.prompts import Turn
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
        return [
            self.tokenizer(text, add_special_tokens=self.special_tokens)["input_ids"]
            for text in texts
        ]

    def computing(self) -> torch.autocast:
        """The context of every forward pass."""
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.bf16)


def load_policy(
    model_name_or_path: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
) -> Policy:
    """Load a policy in evaluation mode, all parameters trainable.

    Args:
        model_name_or_path: `embedded:NAME`, a folder in save_pretrained layout, also PEFT's of
            LoRA adapters, or `org/name`.
        revision: branch, tag or commit on the hub.
        dtype: torch dtype by name.
        device: torch device.

    Raises:
        ConfigError: no model or tokenizer can be loaded from there.
    """
    transformers_logging.disable_progress_bar()
    tokenizer = load_tokenizer(model_name_or_path, revision=revision)
    with _one_line(model_name_or_path):
        model = _model(resolve(model_name_or_path), revision, getattr(torch, dtype))
    end_tokens = _end_tokens(model, tokenizer)
    pad = tokenizer.pad_token_id
    model.to(device).eval()
    return Policy(model, tokenizer, end_tokens, min(end_tokens) if pad is None else pad)


def _model(source: str, revision: str | None, dtype: torch.dtype) -> PreTrainedModel:
    """A model as it is; adapters merged into the model that they name."""
    adapters = adapter_base(Path(source))
    if adapters is not None:
        base, revision = adapters
        return merged(_model(resolve(base), revision, dtype), source)
    model = AutoModelForCausalLM.from_pretrained(
        source, revision=revision, dtype=dtype, use_safetensors=True, trust_remote_code=False
    )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError("the hub has adapters under this name: download them to a folder")
    return model


def load_tokenizer(model_name_or_path: str, *, revision: str | None = None):
    """AutoTokenizer, but a tokenizer.json that names no class of its own is taken as it is.

    AutoTokenizer would put the model type's usual splitting of words in its place. Adapters
    without a tokenizer have that of the model that they name.

    Raises:
        ConfigError: none can be loaded from there.
    """
    source = resolve(model_name_or_path)
    adapters = adapter_base(Path(source))
    if adapters is not None and not (Path(source) / "tokenizer_config.json").is_file():
        return load_tokenizer(adapters[0], revision=adapters[1])
    common = {"revision": revision, "trust_remote_code": False}
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
        raise ConfigError(
            f"no model could be loaded from model_name_or_path={model_name_or_path}: {reason}"
        ) from error


def configured_policy(config: Common, device: str | None = None) -> Policy:
    """The configured policy on the given or this rank's device, ending completions at
    `prompt.stop` too; sets this process's threads.
    """
    device = device or own_device(config.launch.device)
    check_device(device)
    torch.set_num_threads(config.launch.num_threads)
    policy = load_policy(
        config.model.model_name_or_path,
        revision=config.model.revision,
        dtype=config.model.dtype,
        device=device,
    )
    policy = replace(policy, special_tokens=not config.prompt.chat)
    if config.prompt.stop is None:
        return policy
    stops = stop_tokens(policy.tokenizer, config.prompt.stop)
    return replace(policy, end_tokens=policy.end_tokens | stops)


def chat_format(config: Common) -> Callable[[list[Turn]], str] | None:
    """What writes turns in the configured model's chat format, up to where its answer begins; None
    unless `prompt.chat` asks for it.

    Raises:
        ConfigError: the model has no chat format, as base models have none.
    """
    if not config.prompt.chat:
        return None
    name = config.model.model_name_or_path
    tokenizer = load_tokenizer(name, revision=config.model.revision)
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"prompt.chat=true, but {name} has no chat format, as base models have none: "
            "use prompt.chat=false (prompt=plain), or the instruct model"
        )
    return partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)


def configured_task(config: Common) -> Task:
    """The configured task, its prompts in the model's chat format where `prompt.chat` asks for it.

    Raises:
        ConfigError: see `make_task` and `chat_format`.
    """
    return make_task(config, chat_format(config))


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
    if model_name_or_path.startswith(EMBEDDED):
        return str(ASSETS / model_name_or_path.removeprefix(EMBEDDED))
    folder = Path(model_name_or_path).expanduser()
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
