"""Loading of a causal language model and its tokenizer: a folder, embedded or cached, or a hub id.

A folder may hold LoRA adapters: on the model that they name, or merged into it.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils.memory import should_reduce_batch_size
from huggingface_hub import constants as hub_settings
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import logging as transformers_logging

from grpo_ustat.config.model import (
    ModelConfig,
    PromptConfig,
    adapter_base,
    check_stored_config,
    model_folder,
    weight_files,
)
from grpo_ustat.config.parts import PolicyOptions, SamplerOptions, TaskOptions
from grpo_ustat.config.schema import ConfigError, did_you_mean
from grpo_ustat.distributed.ranks import RefusedByRank, is_main, own_device
from grpo_ustat.policy.adapters import with_stored_adapters
from grpo_ustat.policy.chat import ChatFormat, unread_options, writes_turns
from grpo_ustat.policy.precision import set_tf32
from grpo_ustat.records import Prompt
from grpo_ustat.tasks.base import Task
from grpo_ustat.tasks.hub import go_offline_if_unreachable
from grpo_ustat.tasks.registry import make_task
from grpo_ustat.terminal.console import tell, warn
from grpo_ustat.terminal.progress import Progress
from grpo_ustat.terminal.streams import single_line

WEIGHT_DTYPES = ("F64", "F32", "BF16", "F16")  # of weights, as safetensors names them
EXTRA_OUTPUTS = ("output_router_logits", "output_attentions", "output_hidden_states")
CLASSES_OF_NO_MODEL = ("TokenizersBackend", "PreTrainedTokenizerFast")  # one, renamed in 5.0


@dataclass(frozen=True)
class Policy:
    """A model with what is needed to write and read its texts."""

    # The causal language model, in evaluation mode.
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    # Ids that end a completion.
    end_tokens: frozenset[int]
    # Id used for padding; masks, not this id, mark the padding.
    pad_token: int
    # True if it computes in bfloat16 over weights of a wider type, both in sampling and in scoring.
    bf16: bool = False
    # True if the tokenizer puts its special tokens around prompts; a chat format has written them
    # already.
    special_tokens: bool = True

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each prompt."""
        return encode(self.tokenizer, texts, special_tokens=self.special_tokens)

    def computing(self) -> torch.autocast:
        """Return the context of every forward pass: autocast to bfloat16 if `bf16` is set."""
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.bf16)


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special_tokens: bool
) -> list[list[int]]:
    """Return the token ids of each text, with or without the tokenizer's special tokens."""
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
    merge_adapters: bool = True,
) -> Policy:
    """Load a policy in evaluation mode, with all parameters or only LoRA adapters trainable.

    Args:
        model_name_or_path: `embedded:NAME`, `cached:NAME`, a folder in save_pretrained layout, also
            PEFT's of LoRA adapters, or `org/name`.
        revision: branch, tag or commit on the hub.
        dtype: torch dtype by name.
        device: torch device.
        attn_implementation: of transformers; None: its own choice.
        trust_remote_code: run code that comes with the model.
        tokenizer: the model's; None: it is loaded.
        merge_adapters: add a folder's LoRA adapters to the weights of their model, which are then
            trainable; else they stay on it and only they are trainable.
    """
    transformers_logging.disable_progress_bar()
    common = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = tokenizer or load_tokenizer(model_name_or_path, **common)
    with _one_line(model_name_or_path):
        options = dict(attn_implementation=attn_implementation, **common)
        model = _model(
            resolve(model_name_or_path), merge=merge_adapters, dtype=getattr(torch, dtype),
            **options,
        )  # fmt: skip
        for name, parameter in model.named_parameters():
            if not torch.isfinite(parameter).all():
                raise ConfigError(f"{name} is not finite: download the model again")
    configured = model.generation_config.eos_token_id
    listed = configured if isinstance(configured, list) else [configured]
    candidates = (*listed, cast("int | None", tokenizer.eos_token_id))
    end_tokens = frozenset(token for token in candidates if token is not None)
    if not end_tokens:
        raise ConfigError(
            "the model names no end token: set eos_token_id in generation_config.json"
        )
    pad = cast("int | None", tokenizer.pad_token_id)
    rows = len(cast(nn.Embedding, model.get_input_embeddings()).weight)
    rowless = [x for x, token in tokenizer.get_vocab().items() if token >= rows and token != pad]
    if rowless:
        raise ConfigError(
            f"no model could be loaded from model_name_or_path={model_name_or_path}: its tokenizer "
            f"has {len(tokenizer)} tokens and its embedding {rows} rows, none for {rowless[0]!r}"
            f"{_more(rowless)}: use the tokenizer that was saved with these weights"
        )
    if pad is not None and pad >= rows:  # often added by the trainer of a base model; masked here
        pad = None
    # transformers decorates `to` in a way that loses its `self`
    model.to(device).eval()  # pyright: ignore[reportArgumentType]
    return Policy(model, tokenizer, end_tokens, min(end_tokens) if pad is None else pad)


def _model(source: str, *, revision: str | None, merge: bool, **options: Any) -> PreTrainedModel:
    """Load the causal language model at a source.

    LoRA adapters are merged into the base model that they name, or stay on it. Adapters of the base
    model itself are merged into it.
    """
    adapters = adapter_base(Path(source))
    if adapters is not None:
        base, revision = adapters
        model = _model(resolve(base), revision=revision, merge=True, **options)
        # a PeftModel passes on what it is asked for to the model below it
        return cast(PreTrainedModel, with_stored_adapters(model, source, merge=merge))
    stored, _ = PretrainedConfig.get_config_dict(source, revision=revision)
    check_stored_config(stored, source, trusted=options.get("trust_remote_code", False))
    folder = Path(source)
    files = weight_files(folder) if folder.is_dir() else []
    if (file := folder / "generation_config.json").is_file():
        json.loads(file.read_text(encoding="utf-8"))  # transformers passes over a damaged one
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # `report` holds what it would print
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, revision=revision, use_safetensors=True, output_loading_info=True,
            ignore_mismatched_sizes=True, **options,
        )  # fmt: skip
    finally:
        transformers_logging.set_verbosity(verbosity)
    model, report = loaded
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError("the hub has adapters under this name: download them to a folder")
    _check_weights(model, report, files)
    for part in (model.config, model.config.get_text_config()):
        for name in EXTRA_OUTPUTS:  # fields that change what a forward pass returns, not its logits
            if getattr(part, name, False):
                setattr(part, name, False)
        part.return_dict = True
    return model


def _check_weights(model: PreTrainedModel, report: dict[str, Any], files: list[Path]) -> None:
    """Refuse a model whose checkpoint lacks some of its weights, or holds others.

    transformers draws missing weights at random. Buffers, such as masks, are no weights: the model
    makes its own.

    Args:
        model: as loaded.
        report: transformers' report of names that are in only one of the two, or in two shapes.
        files: files of the checkpoint, whose types of weights are checked; none for the hub.
    """
    names = [name for name, _ in model.named_parameters()]
    if differing := sorted(report["mismatched_keys"]):
        name, in_file, in_model = differing[0]
        raise ConfigError(
            f"{name} is {list(in_file)} in the checkpoint, {list(in_model)} by config.json"
            f" ({len(differing)} weights differ): use the config.json that was saved with these"
        )
    if lacking := sorted(report["missing_keys"], key=[*names, *report["missing_keys"]].index):
        tied = " (with tie_word_embeddings=true it would be the embedding's)"
        raise ConfigError(
            f"the checkpoint lacks {lacking[0]}{_more(lacking)}, which config.json asks for"
            f"{tied if lacking[0] == 'lm_head.weight' else ''}: download the model again, or use "
            "the config.json that was saved with these weights"
        )
    for file in files:
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118, it is no mapping
                kind = tensors.get_slice(key).get_dtype()
                if kind not in WEIGHT_DTYPES and any(name.endswith(key) for name in names):
                    raise ConfigError(
                        f"{key} is of {kind}: weights of {', '.join(WEIGHT_DTYPES)} are read"
                    )
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    unexpected = [
        x for x in sorted(report["unexpected_keys"]) if x.rpartition(".")[2] not in buffers
    ]
    modules = {name.rpartition(".")[0] for name in names}
    layers = {re.sub(r"\d+", "0", name) for name in names}  # a name of any layer
    placeless = [
        name
        for name in unexpected
        if name.rpartition(".")[0] in modules or re.sub(r"\d+", "0", name) in layers
    ]
    if placeless:
        raise ConfigError(
            f"the checkpoint holds {placeless[0]}{_more(placeless)}, for which the model of "
            "config.json has no place: use the config.json that was saved with these weights"
        )
    if unexpected:
        warnings.warn(
            f"left out of the checkpoint: {unexpected[0]}{_more(unexpected)}, for which the model "
            "of config.json has no place",
            stacklevel=2,
        )


def _more(names: list[Any]) -> str:
    return f" and {len(names) - 1} more" * (len(names) > 1)


def load_tokenizer(
    model_name_or_path: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    key: str = "model_name_or_path",
) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer by AutoTokenizer, unless tokenizer.json names no class.

    Such a tokenizer.json is used unchanged: AutoTokenizer would put the model type's usual
    splitting of words in its place. Adapters without a tokenizer have that of the model that they
    name. `key` is the name of the place in errors.
    """
    source = resolve(model_name_or_path)
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    adapters = adapter_base(Path(source))
    if adapters is not None and not (Path(source) / "tokenizer_config.json").is_file():
        base, revision = adapters
        return load_tokenizer(base, revision=revision, trust_remote_code=trust_remote_code, key=key)
    with _one_line(model_name_or_path, key):
        config = get_tokenizer_config(source, **common)
        plain = config.get("tokenizer_class") in CLASSES_OF_NO_MODEL
        loader = PreTrainedTokenizerFast if plain else AutoTokenizer
        return loader.from_pretrained(source, padding_side="left", **common)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer's files like `save_pretrained`, with a class that any transformers knows.

    Versions before 5.0 have no TokenizersBackend.
    """
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    text = file.read_text(encoding="utf-8")
    newer, older = (f'"tokenizer_class": "{name}"' for name in CLASSES_OF_NO_MODEL)
    file.write_text(text.replace(newer, older), encoding="utf-8")


@contextmanager
def _one_line(model_name_or_path: str, key: str = "model_name_or_path") -> Iterator[None]:
    of_hub = not Path(resolve(model_name_or_path)).exists()
    unreachable = of_hub and go_offline_if_unreachable()
    try:
        yield
    except Exception as error:  # transformers raises whatever a damaged file leads to
        if isinstance(error, RuntimeError) and out_of_memory(error):
            raise
        plain = isinstance(error, OSError | ValueError | ImportError | StrictDataclassError)
        reason = single_line(error if plain else f"{type(error).__name__}: {error}", 300)
        if isinstance(error, json.JSONDecodeError):
            reason = f"one of its JSON files is cut or damaged ({reason}): download it again"
        if isinstance(error, SafetensorError):
            reason = f"a file of its weights is cut or damaged ({reason}): download it again"
        if unreachable:
            reason = (
                "it is not in the hub's local cache, and the hub does not answer: download it "
                "where there is a network and set HF_HUB_OFFLINE=1, or name a folder"
            )
        elif hub_settings.HF_HUB_OFFLINE and of_hub:
            reason = (
                "it is not in the hub's local cache, and HF_HUB_OFFLINE=1 keeps it from being "
                "fetched: unset that, or name a folder"
            )
        if "trust_remote_code" in str(error):
            reason = (
                "it needs code that comes with it; read that code, and if you trust it add "
                "model.trust_remote_code=true to the command line"
            )
        raise ConfigError(
            f"no model could be loaded from {key}={model_name_or_path}: {reason}"
        ) from error


def configured_policy(
    options: PolicyOptions,
    device: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Policy:
    """Load the configured policy on a device, by default this rank's.

    Completions also end at `prompt.stop`. Sets this process's number of threads and the use of TF32
    products; loads the tokenizer unless it is an argument.
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


def check_parameters(options: PolicyOptions) -> None:
    """Refuse a regular expression that fits no parameter of the configured model.

    This is before its weights are loaded. For adapters, and for a model that cannot be made without
    its weights, only the loaded model tells.
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
    except Exception:  # whatever a damaged file leads to; loading says it
        return
    train_only(empty, options.parameters)


def train_only(model: nn.Module, pattern: str) -> None:
    """Freeze all trainable parameters whose names contain no match of a regular expression."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    matches = {name for name in names if re.search(pattern, name)}
    if not matches:
        some = ", ".join(names[:: max(1, len(names) // 4)][:4])
        hint = did_you_mean(pattern, sorted({part for name in names for part in name.split(".")}))
        raise ConfigError(
            f"study.parameters={pattern} fits none of the model's {len(names)} trainable "
            f"parameters, such as {some}: {hint}use part of a name"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in matches)


def configured_tokenizer(
    model: ModelConfig, key: str = "model_name_or_path"
) -> PreTrainedTokenizerBase:
    """Load the configured model's tokenizer; `key` is the name of the model's place in errors."""
    return load_tokenizer(
        model.model_name_or_path, revision=model.revision,
        trust_remote_code=model.trust_remote_code, key=key,
    )  # fmt: skip


def context_length(model: ModelConfig) -> int | None:
    """Return the tokens of prompt and completion for which there are positions; None: unknown."""
    return getattr(_text_config(model), "max_position_embeddings", None)


def rope_switch(config: PretrainedConfig) -> int | None:
    """Return the length up to which LongRoPE uses its short factors; None: the model has one set.

    It is compared with the longest row of a pass. Beyond it, all rows are read with the long
    factors, also the tokens before. See `dynamic_rope_update` of transformers. Its other kind,
    `dynamic`, changes beyond `max_position_embeddings`, which no row of ours exceeds.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # a model with layers of several kinds has parameters of each
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    switches = [
        kind.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        for kind in kinds
        if "longrope" in (kind.get("rope_type"), kind.get("type"))
    ]
    return min((switch for switch in switches if switch is not None), default=None)


def crossed_switch(model: ModelConfig, shortest: int, longest: int) -> int | None:
    """Return the model's `rope_switch` if some passes are on either side of it, else None.

    A token's log-probability would then depend on the rows beside it and on the content of the
    cache.

    Args:
        shortest: tokens of the shortest prompt; the sampler may read all but the last of them.
        longest: tokens of the longest row, its completion included.
    """
    switch = rope_switch(_text_config(model))
    return switch if switch is not None and shortest <= switch + 1 and longest > switch else None


def _text_config(model: ModelConfig) -> PretrainedConfig:
    """Load the configured model's config.json; of several parts, that of its text."""
    name, revision = model.model_name_or_path, model.revision
    while adapters := adapter_base(model_folder(name)):
        name, revision = adapters
    with _one_line(name):
        stored = AutoConfig.from_pretrained(
            resolve(name), revision=revision, trust_remote_code=model.trust_remote_code
        )
    return stored.get_text_config(decoder=True)


def chat_format(
    model: ModelConfig,
    prompt: PromptConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    moment: datetime | None = None,
) -> ChatFormat | None:
    """Return the function that writes turns in the configured model's chat format.

    It writes up to the beginning of the answer. None if `prompt.chat` is false, or null and the
    model has no such format. The tokenizer is loaded unless it is an argument. `moment`: see
    `ChatFormat`.
    """
    if prompt.chat is False:
        return None
    tokenizer, name = tokenizer or configured_tokenizer(model), model.model_name_or_path
    if not writes_turns(prompt.chat, tokenizer):
        if prompt.template_options:
            raise ConfigError(
                f"prompt.template_options={prompt.template_options} are of a chat template, and "
                f"{name} has none: leave them out, or use the instruct model"
            )
        return None
    return ChatFormat(tokenizer, name, prompt.template_options, moment)


def tell_date(moment: datetime | None) -> None:
    """Say on rank 0 if prompts keep the date of an earlier day."""
    if moment is not None and moment.date() != datetime.now().date() and is_main():
        tell(
            f"note: the model's chat template writes the date; prompts keep {moment:%Y-%m-%d}, "
            "when this run or its pool was begun",
            file=sys.stderr,
        )


def warn_of_options(prompt: PromptConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn on rank 0 of options that the model's chat template never reads."""
    for name in unread_options(tokenizer, prompt.template_options or {}) if is_main() else ():
        names = set(re.findall(r"\w+", str(tokenizer.chat_template)))
        warn(
            f"prompt.template_options has {name}, which the model's chat template never reads: "
            f"{did_you_mean(name, names)}it changes nothing"
        )


def configured_task(
    options: TaskOptions,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    moment: datetime | None = None,
) -> Task:
    """Make the configured task, with prompts in the model's chat format if configured.

    `prompt.chat` asks for the format. Prompts longer than `prompt.max_length` are left out. The
    tokenizer is loaded if it is needed and not given. `moment`: see `ChatFormat`.
    """

    def lengths(texts: list[str]) -> list[int]:
        reader = tokenizer or configured_tokenizer(model)
        in_turns = writes_turns(options.prompt.chat, reader)
        return list(map(len, encode(reader, texts, special_tokens=not in_turns)))

    return make_task(options, chat_format(model, options.prompt, tokenizer, moment), lengths)


def stop_tokens(tokenizer: PreTrainedTokenizerBase, stop: str) -> frozenset[int]:
    """Return the ids of all tokens whose text contains `stop`.

    A `stop` that spans two tokens is not seen.
    """
    texts = tokenizer.batch_decode([[t] for t in range(len(tokenizer))], skip_special_tokens=False)
    stops = frozenset(t for t, text in enumerate(texts) if stop in text)
    if not stops:
        raise ConfigError(
            f"prompt.stop={stop!r} is in none of the tokenizer's {len(texts)} tokens: "
            "use a shorter string, or null"
        )
    return stops


def resolve(model_name_or_path: str) -> str:
    """Return the folder or hub id for which a configured name stands."""
    folder = model_folder(model_name_or_path)
    return str(folder.absolute()) if folder.exists() else model_name_or_path


def check_device(device: str) -> None:
    """Refuse a device that this PyTorch cannot use."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"launch.device={device} cannot be used ({reason}): use launch.device=cpu"
        ) from error


def out_of_memory(error: RuntimeError) -> bool:
    """Return True if an accelerator's or the CPU's memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)


def check_lengths(
    policy: PolicyOptions,
    sampler: SamplerOptions,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Prompt],
) -> None:
    """Refuse prompts that, with a completion, exceed the positions of the model or of vLLM.

    They must also be on one side of the length at which LongRoPE changes.
    """
    texts = [prompt.text for prompt in prompts]
    in_turns = writes_turns(policy.prompt.chat, tokenizer)
    lengths = list(map(len, encode(tokenizer, texts, special_tokens=not in_turns)))
    if not min(lengths):
        raise RefusedByRank(
            f"the tokenizer of {policy.model.model_name_or_path} makes no token of "
            f"{texts[lengths.index(0)]!r}: does it have its tokenizer files?"
        )
    limits = [
        (context_length(policy.model), "the model's"),
        (sampler.rollout.max_model_len, "rollout.max_model_len, vLLM's"),
    ]
    longest, completion_length = max(lengths), sampler.max_completion_length
    switch = crossed_switch(policy.model, min(lengths), longest + completion_length)
    limits.append((switch, "original_max_position_embeddings, where LongRoPE changes all rows,"))
    for limit, name in limits:
        if limit is not None and longest + completion_length > limit:
            fixes = []
            if limit > longest:
                fixes.append(f"max_completion_length={limit - longest} or less")
            if limit > completion_length:
                most = limit - completion_length
                fixes.append(f"prompt.max_length={most} to leave longer prompts out")
            both = f"max_completion_length below {limit} and a prompt.max_length"
            raise RefusedByRank(
                f"a prompt of {longest} tokens and max_completion_length={completion_length} "
                f"exceed {name} {limit} tokens: use {', or '.join(fixes) or both}"
            )
