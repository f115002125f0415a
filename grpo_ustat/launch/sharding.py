"""Sharing of a policy among ranks: configurations of accelerate, by name."""

from __future__ import annotations

import os
from pathlib import Path

from grpo_ustat.distributed.ranks import RefusedByRank

ACCELERATE_FOLDER = Path(__file__).parent / "accelerate"


def check_sharing(name: str, ranks: int) -> None:
    """Refuse an unknown configuration of accelerate, or one process, which can share nothing."""
    presets = sorted(file.stem for file in ACCELERATE_FOLDER.glob("*.yaml"))
    if name not in presets:
        raise RefusedByRank(f"unknown launch.accelerate {name!r}: choose from {', '.join(presets)}")
    if ranks == 1:
        raise RefusedByRank(
            f"launch.accelerate={name} for one process: add launch.num_processes=2 or more"
        )


def export_sharing(name: str) -> None:
    """Give this rank the environment that `accelerate launch --config_file` would give it."""
    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        raise RefusedByRank(
            f"launch.accelerate={name} under accelerate launch, which has a configuration of its "
            "own: leave launch.accelerate out, or start the ranks with launch.num_processes"
        )
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--config_file", str(ACCELERATE_FOLDER / f"{name}.yaml"), "none"]
    parsed = launch_command_parser().parse_args(words)
    os.environ.update(prepare_multi_gpu_env(_validate_launch_command(parsed)[0]))
