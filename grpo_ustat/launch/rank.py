"""Entry point of a rank, one of the processes of a run: `python -m grpo_ustat.launch.rank`.

The command that the user typed, the parent process, composes the configuration and starts the
ranks. Ranks read the composed configuration and do not need Hydra.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from grpo_ustat.config.load import SCHEMAS, build_config
from grpo_ustat.distributed.processes import end_with_parent
from grpo_ustat.distributed.ranks import PARENT_VARIABLE, RefusedByRank, barrier, is_main, rank
from grpo_ustat.distributed.signals import Stopped, StopRequest
from grpo_ustat.launch.command import Command, load_command
from grpo_ustat.launch.run import ONE_LINE_ERRORS, run_here
from grpo_ustat.runs.files import write_whole
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.history import last_line
from grpo_ustat.terminal.streams import lasting_output


def main() -> None:
    """Run this rank.

    The command-line arguments are the name of the command, the configuration file, the run folder,
    and the file to which rank 0 writes the outcome for the parent process.
    """
    name, config_file, folder, outcome_file = sys.argv[1:]
    of_parent = Path(config_file).parent
    end_with_parent(os.getppid(), ancestor=int(os.environ[PARENT_VARIABLE]), folder=of_parent)
    with lasting_output(), StopRequest():
        config = build_config(yaml.safe_load(Path(config_file).read_text()), SCHEMAS[name])
        try:
            outcome, code = _run(load_command(name), config, RunFolder(Path(folder), config))
        except Exception as error:
            Path(outcome_file).with_name(f"rank-{rank()}.txt").write_text(last_line(error))
            raise
    if is_main():
        write_whole(Path(outcome_file), json.dumps(outcome))
    raise SystemExit(code)


def _run(command: Command, config: Any, folder: RunFolder) -> tuple[dict[str, Any], int]:
    """Run the command on this rank; return its outcome for the parent process and the exit code.

    If other ranks may be waiting for this rank, the exit code is nonzero, so that torchrun ends
    them.
    """
    try:
        return {"value": run_here(command, config, folder)}, 0
    except Stopped as stopped:
        return {"stopped": str(stopped)}, 0
    except RefusedByRank as error:
        # The barrier cannot block, because all ranks raise this error.
        barrier()
        return {"refused": str(error)}, 0
    except ONE_LINE_ERRORS as error:
        if not is_main():
            # This rank prints the error itself, because rank 0 may not have the same error.
            raise SystemExit(f"error: {error}") from None
        return {"refused": str(error)}, 1


if __name__ == "__main__":
    main()
