"""Checks of the number of ranks (processes) of a run, and configurations of Accelerate by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from grpo_ustat.distributed.ranks import RefusedByRank, world

ACCELERATE_FOLDER = Path(__file__).parent / "accelerate"


def check_ranks(config: Any, tasks: int = 1) -> None:
    """Refuse contradictory numbers of processes, and steps with fewer prompts than processes.

    Args:
        config: configuration of the run.
        tasks: number of processes that a scheduler will start for this run.
    """
    num_processes, others = config.launch.num_processes, max(world(), tasks)
    if num_processes > 1 and (tasks > 1 or ("RANK" in os.environ and num_processes != others)):
        raise RefusedByRank(
            f"launch.num_processes={num_processes}, but a launcher sets the number of processes "
            f"to {others}: set launch.num_processes=1, or do not use a launcher"
        )
    ranks = max(num_processes, others)
    if getattr(config.launch, "accelerate", None) is not None:
        check_sharing(config.launch.accelerate, ranks)
    prompts = getattr(config, "prompts_per_step", ranks)
    if prompts < ranks:
        raise RefusedByRank(
            f"{prompts} prompts per step (budget.rollouts / group_size) for {ranks} processes, "
            "which need at least one each: raise budget.rollouts, or lower group_size or the "
            "number of processes"
        )


def check_sharing(name: str, ranks: int) -> None:
    """Refuse a value of launch.accelerate that is unknown or set for a single process."""
    presets = sorted(file.stem for file in ACCELERATE_FOLDER.glob("*.yaml"))
    if name not in presets:
        raise RefusedByRank(f"unknown launch.accelerate {name!r}: choose from {', '.join(presets)}")
    if ranks == 1:
        raise RefusedByRank(
            f"launch.accelerate={name} needs several processes: set launch.num_processes=2 or more"
        )


def export_sharing(name: str) -> None:
    """Set the environment variables that `accelerate launch --config_file` would set.

    Args:
        name: name of a file in `launch/accelerate/`, the value of launch.accelerate.
    """
    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        raise RefusedByRank(
            f"launch.accelerate={name} under accelerate launch, which has its own configuration: "
            "remove launch.accelerate, or start the ranks with launch.num_processes"
        )
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--config_file", str(ACCELERATE_FOLDER / f"{name}.yaml"), "none"]
    parsed = launch_command_parser().parse_args(words)
    os.environ.update(prepare_multi_gpu_env(_validate_launch_command(parsed)[0]))
