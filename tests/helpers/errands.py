"""Small pieces of work for `share`, and a script that shares them out: errands.py WORK WORKERS.

Under torchrun every rank runs it. It prints the results as JSON, on rank 0 only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from grpo_ustat.cli.app import main
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed.ranks import barrier, is_main, main_only
from grpo_ustat.distributed.workers import WorkCost, share
from grpo_ustat.launch import run
from grpo_ustat.launch.command import load_command
from grpo_ustat.terminal.progress import Progress

ITEMS, WEIGHTS = list(range(7)), [1, 1, 9, 1, 4, 1, 3]


def square(items):
    progress = Progress("squaring", len(items))
    for item in items:
        progress.add(1, tokens=item)
        yield WorkCost(rollouts=1, tokens=item)
        yield item, item**2


def refuse(items):
    yield WorkCost(rollouts=1)
    if 2 in items:
        raise ConfigError("item=2 is above 1: use item=1")
    yield from sleep(items)


def fail(items):
    yield WorkCost(rollouts=1)
    if 2 in items:
        raise ZeroDivisionError("item 2")
    yield from sleep(items)


def die(items):
    yield WorkCost(rollouts=1)
    if 2 in items:
        os.kill(os.getpid(), signal.SIGKILL)
    yield from sleep(items)


def sleep(items):
    Path(os.environ["PIDS"], str(os.getpid())).touch()
    for _ in range(600):
        time.sleep(0.1)
        yield WorkCost()


def origin(items):
    """Which process forked or started it, its environment, and what it does with a signal."""
    for item in items:
        yield item, os.getppid(), os.environ["OF_PARENT"], signal.getsignal(signal.SIGUSR1)


def work(_, config, folder):
    main_only(folder.open)
    barrier()
    found, spent = share(
        globals()[os.environ["WORK"]], ITEMS, config.launch.workers, "errand", len(ITEMS),
        weights=WEIGHTS,
    )  # fmt: skip
    folder.finish({"found": found, "spent": vars(spent)})
    barrier()
    if is_main():
        print(json.dumps(found))
    elsewhere = json.loads((folder.path / "result.json").read_text())
    assert [tuple(pair) for pair in elsewhere["found"]] == found  # on every rank


if __name__ == "__main__":
    sys.argv[0] = "mse"
    run.make_run = work
    main(load_command("mse"))
