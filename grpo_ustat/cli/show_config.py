"""`--cfg`: configuration of a command line as YAML."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_ustat.cli.compose import whole_node
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.terminal.streams import tell


def show_config(entry: str, words: Namespace) -> None:
    """Print the part of the configuration that `--cfg` and `--package` select.

    This function replaces Hydra's own `--cfg`, which composes twice and ends with a traceback if
    one part of the configuration refers to another part.
    """
    node = whole_node(entry, words, sweep=False)
    OmegaConf.set_readonly(node.hydra, None)
    keys = [key for key in node if words.cfg in ("all", "hydra" if key == "hydra" else "job")]
    place = None if words.package == "_global_" else words.package
    nothing: Any = object()
    try:
        if place is None:
            part: Any = OmegaConf.masked_copy(node, [str(key) for key in keys])
            part._set_parent(node)
        elif place.split(".")[0] in keys:
            part = OmegaConf.select(node, place, default=nothing)
        else:
            part = nothing
        if part is nothing:
            raise ConfigError(f"--package={place}: --cfg {words.cfg} has no such part")
        if words.resolve and OmegaConf.is_config(part):
            OmegaConf.resolve(part)
    except OmegaConfBaseException as error:
        raise ConfigError(f"--cfg {words.cfg}: {str(error).splitlines()[0]}") from error
    if not OmegaConf.is_config(part):
        tell("null" if part is None else str(part))
        return
    if place is not None:
        tell(f"# @package {place}")
    tell(*OmegaConf.to_yaml(part).splitlines())
