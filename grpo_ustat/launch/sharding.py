"""Distribution of a run over ranks: the number of ranks, and named accelerate configurations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from grpo_ustat.distributed.ranks import RefusedByRank, world

ACCELERATE_FOLDER = Path(__file__).parent / "accelerate"


def check_ranks(config: Any, tasks: int = 1) -> None:
    """Refuse contradictory numbers of processes, and more processes than prompts per step.

    A step must have at least one prompt for each process.

    Args:
        tasks: number of processes that a scheduler will start for this run.
    """
    num_processes, others = config.launch.num_processes, max(world(), tasks)
    if num_processes > 1 and (tasks > 1 or ("RANK" in os.environ and num_processes != others)):
        raise RefusedByRank(
            f"launch.num_processes={num_processes} in each of {others} processes that a launcher "
            "starts: set launch.num_processes=1, or do not use a launcher"
        )
    ranks = max(num_processes, others)
    if getattr(config.launch, "accelerate", None) is not None:
        check_sharing(config.launch.accelerate, ranks)
    prompts = getattr(config, "prompts_per_step", ranks)
    if prompts < ranks:
        raise RefusedByRank(
            f"{prompts} prompts a step (budget.rollouts / group_size) for {ranks} processes: "
            "raise budget.rollouts, or lower group_size or the number of processes"
        )


def check_sharing(name: str, ranks: int) -> None:
    """Refuse an unknown accelerate configuration, and any such configuration for one process."""
    presets = sorted(file.stem for file in ACCELERATE_FOLDER.glob("*.yaml"))
    if name not in presets:
        raise RefusedByRank(f"unknown launch.accelerate {name!r}: choose from {', '.join(presets)}")
    if ranks == 1:
        raise RefusedByRank(
            f"launch.accelerate={name} for one process: add launch.num_processes=2 or more"
        )


def export_sharing(name: str) -> None:
    """Set the same environment variables for this rank as `accelerate launch --config_file`."""
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
