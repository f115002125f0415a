"""Ranks that SLURM started, a task for each: what torchrun would have told them."""

from __future__ import annotations

import os
import subprocess

from grpo_ustat import slurm
from grpo_ustat.checks import ConfigError


def join_tasks() -> None:
    """Become a rank where this process is one of several tasks; otherwise nothing.

    Raises:
        ConfigError: the first host cannot be found.
    """
    if "RANK" in os.environ or _of_submitit() or not slurm.is_task_of_several():
        return
    job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
    os.environ.update(
        RANK=os.environ["SLURM_PROCID"],
        WORLD_SIZE=os.environ["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK=os.environ["SLURM_LOCALID"],
        MASTER_ADDR=_first_host(os.environ["SLURM_STEP_NODELIST"]),
        MASTER_PORT=str(20000 + (7919 * job + step) % 12000),  # below the ports of connections
    )


def _of_submitit() -> bool:
    """Whether submitit started this task; if there are several, it becomes one of the ranks."""
    if "SUBMITIT_EXECUTOR" not in os.environ:
        return False
    import submitit

    if submitit.JobEnvironment().num_tasks > 1:
        # accelerate chooses the device, by the local rank among those that are visible
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    return True


def _first_host(nodes: str) -> str:
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"the first of the hosts {nodes} cannot be found ({error}): start the ranks with "
            "torchrun and --master_addr"
        ) from error
    return said.stdout.split()[0]
