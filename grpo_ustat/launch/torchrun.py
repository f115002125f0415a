"""Start of the processes (ranks) of a run on this machine with torchrun.

torchrun starts `python -m grpo_ustat.launch.run` once for each rank. A rank takes the checked
configuration from an environment variable, so that it does not need Hydra. The process that starts
torchrun, the parent, forwards stop signals to the ranks but not to torchrun. The ranks can then
save and end by themselves, and torchrun reports no failure. If the parent ends, the ranks end too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import psutil

from grpo_ustat.distributed.signals import STOPPING, Stopped, StopRequest
from grpo_ustat.runs import history
from grpo_ustat.runs.folder import RunFolder

# Environment variable with the command, the folder and the configuration of the run of a rank.
RUN_VARIABLE = "GRPO_USTAT_RUN"


def run_ranks(name: str, config: Any, folder: RunFolder) -> None:
    """Execute a run in `launch.num_processes` ranks on this machine.

    Args:
        name: name of the command.
        config: checked configuration of the run.
        folder: folder of the run.

    Raises:
        Stopped: a signal stopped the ranks.
        SystemExit: a rank failed; its message is on standard error.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={config.launch.num_processes}", "-m", "grpo_ustat.launch.run"]
    run = json.dumps([name, str(folder.path.absolute()), asdict(config)])
    before = history.launches(folder.path)[-1:]
    with SignalRelay() as relay:
        code = relay.wait_for(command, os.environ | {RUN_VARIABLE: run})
    rows = history.launches(folder.path)[-1:]
    end = rows[0] if rows and rows != before else {}
    if end.get("outcome") == "stopped":
        raise Stopped(end["reason"])
    if relay.received and end.get("outcome") != "done":
        raise Stopped(f"stopped by {relay.name} before the ranks could save")
    if code:
        error = SystemExit(f"error: the ranks ended with code {code}: see their output above")
        if folder.path.is_dir():
            history.note_failure(folder.path, error, folder.config_hash, before)
        raise error


class SignalRelay(StopRequest):
    """Stop request that forwards signals to the ranks."""

    _torchrun: subprocess.Popen | None = None

    def on_signal(self, number: int) -> None:
        """Forward a stop signal to the ranks."""
        if self._torchrun is not None:
            with suppress(psutil.NoSuchProcess):
                for rank in psutil.Process(self._torchrun.pid).children():
                    rank.send_signal(number)

    def wait_for(self, command: list[str], environment: dict[str, str]) -> int:
        """Start torchrun, wait until it has ended, and return its exit code."""
        # torchrun ignores the stop signals, because the ranks handle them. Each rank reads from the
        # pipe, which is closed when this process ends for any reason.
        with subprocess.Popen(
            command,
            env=environment | {"PET_SIGNALS_TO_HANDLE": "SIGHUP"},
            stdin=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_ignore_stopping,
        ) as self._torchrun:
            try:
                while True:
                    with suppress(subprocess.TimeoutExpired):
                        return self._torchrun.wait(timeout=1)
                    if self.received:
                        # Repeated for ranks that were still starting and ignored the signal.
                        self.on_signal(self.received)
            finally:
                self._torchrun.kill()


def _ignore_stopping() -> None:
    for number in (*STOPPING, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
