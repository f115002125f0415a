"""Every check by name, in the order in which they are shown."""

from __future__ import annotations

from dataclasses import dataclass

HERE = "grpo_ustat.checkup"


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: how it is called.
        target: `module:function`, from the output folder to a `Finding`; imported only in the
            process that runs it.
        deadline: seconds after which that process is killed.
    """

    name: str
    target: str
    deadline: float = 10.0


CHECKS = (  # the ones that import torch wait for slow disks
    Check("code", f"{HERE}.packages:code", 20.0),
    Check("python", f"{HERE}.packages:python"),
    Check("packages", f"{HERE}.packages:packages"),
    Check("torch", f"{HERE}.devices:torch_devices", 30.0),
    Check("bf16", f"{HERE}.devices:bf16", 30.0),
    Check("attention", f"{HERE}.attention:attention", 40.0),
    Check("threads", f"{HERE}.machine:threads"),
    Check("memory", f"{HERE}.machine:memory"),
    Check("disk", f"{HERE}.storage:disk", 20.0),
    Check("locks", f"{HERE}.storage:locks", 20.0),
    Check("cache", f"{HERE}.hub:cache"),
    Check("judge", f"{HERE}.judging:judge", 30.0),
    Check("slurm", f"{HERE}.cluster:slurm", 20.0),
    Check("ranks", f"{HERE}.cluster:ranks", 40.0),
    Check("trackers", f"{HERE}.trackers:trackers"),
)


def chosen(names: list[str] | None) -> list[Check]:
    """The checks of these names, None: all."""
    return [check for check in CHECKS if names is None or check.name in names]
