"""Command lines in Hydra's syntax: flags, overrides, and the runs of a sweep."""

from __future__ import annotations

import argparse
import itertools
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, ValueType
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from grpo_ustat import __version__
from grpo_ustat.cli.errors import unknown_flag
from grpo_ustat.config.load import CONF
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.terminal.streams import SURROGATE, tell

INTERPOLATION = re.compile(r"\$\{[^}]*\}")


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """Parse a command line into `overrides`, `help`, `multirun`, `cfg` and `config_dir`.

    In contrast to Hydra, overrides can contain paths with `=` (see `quote_plain`), and
    `model=FOLDER` is allowed (see `model_place`).

    Raises:
        SystemExit: after the version is printed for `--version`.
    """
    for word in arguments:
        if SURROGATE.search(word):
            raise ConfigError(f"{word!r} is not valid UTF-8: type it in UTF-8")
    if "--version" in arguments:
        tell(f"grpo-ustat {__version__}, Hydra {hydra.__version__}")
        raise SystemExit(0)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = _refuse_arguments
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--config-dir")
    words, unknown = parser.parse_known_intermixed_args(list(arguments))
    # Words that begin with a dash and that argparse took for values.
    unknown += [word for word in words.overrides if word.startswith("-")]
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        raise ConfigError(unknown_flag(unknown[0].partition("=")[0], flags))
    if words.multirun and words.cfg:
        raise ConfigError("--multirun and --cfg cannot be combined: use only one of them")
    words.overrides = hydra_overrides(words.overrides, words.config_dir)
    if words.config_dir and not Path(words.config_dir).is_dir():
        raise ConfigError(f"--config-dir={words.config_dir}: there is no such folder")
    return words


def _refuse_arguments(message: str) -> NoReturn:
    """Raise an error of argparse as a ConfigError."""
    raise ConfigError(f"{message}: see --help")


def hydra_overrides(typed: Iterable[str], config_dir: str | None = None) -> list[str]:
    """Return overrides in Hydra's syntax; see `quote_plain` and `model_place`."""
    quoted = map(quote_plain, typed)
    return [override for word in quoted for override in model_place(word, config_dir)]


def quote_plain(override: str) -> str:
    """Return the override with quotes around each value that contains `=` or `~`, as paths can.

    Hydra accepts these characters only in quotes. Existing quotes, calls, dictionaries and
    interpolations are not changed.

    >>> quote_plain("pool=runs/lr=1/x"), quote_plain("runs=[~/a,b]"), quote_plain("seed=0")
    ("pool='runs/lr=1/x'", "runs=['~/a',b]", 'seed=0')
    """

    def quoted(value: re.Match[str]) -> str:
        return f"'{value[0]}'" if re.search("[=~]", INTERPOLATION.sub("", value[0])) else value[0]

    key, equals, values = override.partition("=")
    if re.search(r"^=|['\"()]|(?<!\$)\{", values):
        return override
    return key + equals + re.sub(rf"(?!\s)(?:{INTERPOLATION.pattern}|[^,[\]])+", quoted, values)


def model_place(override: str, config_dir: str | None = None) -> list[str]:
    """Rewrite `model=org/name` or `model=FOLDER` as `model=hub` with the name or folder.

    Other overrides are unchanged, including names of files in `conf/model/` and lists of values for
    a sweep.

    >>> model_place("model=org/name"), model_place("model=tiny")
    (['model=hub', "model.model_name_or_path='org/name'"], ['model=tiny'])
    """
    key, _, value = override.partition("=")
    quoted = re.fullmatch(r"(['\"])(?:\\.|(?!\1).)*\1", value)
    several = not quoted and ("," in value or re.match(r"\w+\(", value))
    if key != "model" or several:
        return [override]
    place = re.sub(r"\\(['\"\\])", r"\1", value[1:-1]) if quoted else value
    folders = [CONF, *([Path(config_dir)] if config_dir else [])]
    choice = any((folder / "model" / f"{place}.yaml").is_file() for folder in folders)
    # OmegaConf resolves the escaped text to this literal text.
    literal = place.replace("\\${", "${")
    folder = bool(place) and os.path.isdir(os.path.expanduser(literal))
    if choice or not (folder or "/" in place or place[:1] in ("~", ".")):
        return [override]
    place = os.path.normpath(place) if folder else place
    escaped = place.replace("\\", "\\\\").replace("'", "\\'").replace("\\\\${", "\\${")
    return ["model=hub", f"model.model_name_or_path='{escaped}'"]


class OwnFolder(SearchPathPlugin):
    """Search path of Hydra with the folder of `--config-dir`, whose files override `conf/`."""

    folder: str | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Put the folder first."""
        if self.folder:
            folder = f"file://{Path(self.folder).resolve()}"
            search_path.prepend("command-line", folder, anchor="main")


@contextmanager
def hydra_session(entry: str, config_dir: str | None = None) -> Iterator[None]:
    """Open a Hydra session that reads the folder of `--config-dir` and then `conf/`."""
    Plugins.instance().register(OwnFolder)
    OwnFolder.folder = config_dir
    with hydra.initialize_config_dir(str(CONF), version_base="1.3", job_name=entry):
        yield


class _Choices(dict[str, Any]):
    """Files of a config group in Hydra's store; each is built only when Hydra loads it."""

    def __getitem__(self, file: str) -> Any:
        """Return the configuration in a file of this name, or the files of a nested group."""
        content = super().__getitem__(file)
        if isinstance(content, dict):
            return content
        return ConfigNode(file, OmegaConf.structured(content()), None, None, None)


def store_group(group: str, choices: Mapping[str, Callable[[], Any]]) -> None:
    """Register the choices of a config group with Hydra.

    Args:
        group: name of the config group; a nested group is written as `parent/group`.
        choices: functions that return the content of each choice, keyed by name.
    """
    *above, name = group.split("/")
    place = ConfigStore.instance().repo
    for each in above:
        place = place[each]
    place[name] = _Choices({f"{choice}.yaml": content for choice, content in choices.items()})


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Return parsed overrides.

    Within a Hydra session, each override can also look up the choices of its config group.
    """
    session = GlobalHydra.instance()
    loader = session.config_loader() if session.is_initialized() else None
    return OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))


def split_sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each run of a sweep over the product of all values.

    The last key varies fastest. A later override of a key replaces an earlier one.

    Raises:
        HydraException: If an override cannot be parsed.
    """
    words: dict[str, list[str]] = {}
    for override in parse_overrides(overrides):
        key = override.get_key_element()
        if not override.is_sweep_override():
            words[key] = [f"{key}={override.get_value_element_as_str()}"]
            continue
        value = override.value()
        if override.value_type is ValueType.INTERVAL_SWEEP:
            raise ConfigError(
                f"{override.input_line}: a sweep needs a list of values, not an interval: write "
                "the values, as in seed=0,1, or range(...)"
            )
        if isinstance(value, ChoiceSweep) and any(isinstance(x, Glob) for x in value.list):
            raise ConfigError(
                f"{override.input_line}: write one glob([PATTERN,NAME]) for all values"
            )
        words[key] = [f"{key}={text}" for text in override.sweep_string_iterator()]
        if not words[key]:
            loader = override.config_loader
            choices = ", ".join(loader.get_group_options(key)) if loader else ""
            reason = f"matches none of {choices}" if choices else "contains no values"
            raise ConfigError(f"{override.input_line} {reason}")
    return [list(run) for run in itertools.product(*words.values())]
