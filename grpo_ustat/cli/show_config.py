"""`--cfg job`: configuration of a command line as YAML."""

from __future__ import annotations

from argparse import Namespace

from omegaconf import OmegaConf

from grpo_ustat.cli.compose import whole_node
from grpo_ustat.terminal.streams import tell


def show_config(entry: str, words: Namespace) -> None:
    """Print the configuration without Hydra's node."""
    node = whole_node(entry, words)
    part = OmegaConf.masked_copy(node, [str(key) for key in node if key != "hydra"])
    tell(*OmegaConf.to_yaml(part).splitlines())
