"""The configuration an entrypoint would run with, for scripts."""

from __future__ import annotations

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from grpo_ustat.cli import CONF, _job_part, _resolver
from grpo_ustat.config import typed


def composed(entry: str, schema: type, overrides: list[str]):
    """`conf/<entry>.yaml` with overrides, checked.

    Args:
        entry: `train` or `mse`.
        schema: its schema, see `grpo_ustat.config`.
        overrides: as on the command line.

    Raises:
        ConfigError: it cannot be run.
    """
    ConfigStore.instance().store(name=f"{entry}_schema", node=schema)
    OmegaConf.register_new_resolver("folder_name", _resolver(schema), replace=True)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3", job_name=entry):
        return typed(_job_part(hydra.compose(entry, overrides, return_hydra_config=True)), schema)
