"""A rank that a parent has started: `python -m grpo_ustat.launch.worker`, without Hydra."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from grpo_ustat.config import SCHEMAS, typed
from grpo_ustat.launch.job import REFUSALS, run_here
from grpo_ustat.ranks import PARENT, RefusedByRank, barrier, is_main, rank
from grpo_ustat.runs.folder import RunFolder, write_whole
from grpo_ustat.runs.history import last_line
from grpo_ustat.signals import Stopped, StopRequest


def main() -> None:
    """Run this rank; rank 0 tells the parent how it ended, in a file."""
    entry, told, folder, outcome = sys.argv[1:]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with StopRequest():
        config = typed(yaml.safe_load(Path(told).read_text()), SCHEMAS[entry])
        try:
            found, code = _outcome(entry, config, RunFolder(Path(folder), config))
        except Exception as error:
            Path(outcome).with_name(f"rank-{rank()}.txt").write_text(last_line(error))
            raise
    if is_main():
        write_whole(Path(outcome), json.dumps(found))
    raise SystemExit(code)


def _outcome(entry: str, config: Any, folder: RunFolder) -> tuple[dict[str, Any], int]:
    """What to tell the parent, and this rank's exit code: not 0 where others may wait for it."""
    try:
        return {"value": run_here(entry, config, folder)}, 0
    except Stopped as stopped:
        return {"stopped": str(stopped)}, 0
    except RefusedByRank as error:
        barrier()  # the others are on their way to it
        return {"refused": str(error)}, 0
    except REFUSALS as error:
        if not is_main():
            raise SystemExit(f"error: {error}") from None  # rank 0 does not know of it
        return {"refused": str(error)}, 1


def _end_with_parent() -> None:
    """Neither the parent nor torchrun has a chance to say so when it is killed."""
    torchrun = os.getppid()
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(int(os.environ[PARENT]))
        while os.getppid() == torchrun and _lives(parent):
            time.sleep(0.5)
    os._exit(1)


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


if __name__ == "__main__":
    main()
