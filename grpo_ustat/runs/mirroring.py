"""The run's side of a mirror: start it, hear of it, and give it a last while at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from grpo_ustat.runs.journal import FOLDER as TRACKER
from grpo_ustat.runs.journal import Journal
from grpo_ustat.runs.sources import Source
from grpo_ustat.signals import STOPPING, seconds_since_asked

OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MILD = {  # what a mirror may use
    "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GOMAXPROCS": "1",
}  # fmt: skip
MARGIN = 10.0  # seconds of a stop's grace that are not the mirror's
PATIENCE = 2.0  # seconds after which waiting is said


class Mirroring:
    """A mirror of a run folder, as its run sees it; nothing here raises, or waits but in `finish`.

    Args:
        folder: the run folder, with its configuration.
        logger: a `LoggerConfig`, not `none`.
    """

    def __init__(self, folder: Path, logger: Any):
        self._folder, self._logger, self._owner = folder, logger, os.getpid()
        self._process, self._finishing, self._warned = None, False, False
        try:
            self._process = _started(folder, logger)
        except OSError as error:
            self._warn(f"cannot be started ({error})")
            return
        threading.Thread(target=self._listen, daemon=True).start()

    def finish(self, outcome: str, grace_seconds: float) -> None:
        """Wait until it has sent what there is, `finish_seconds` at most; then end it.

        Args:
            outcome: done, stopped, failed or interrupted.
            grace_seconds: between a signal to the run and its kill.
        """
        if self._process is None or os.getpid() != self._owner:
            return
        self._finishing = True
        with suppress(OSError):
            self._process.stdin.write(f"{outcome}\n".encode())
            self._process.stdin.flush()
        try:
            code = self._wait(self._patience(outcome, grace_seconds))
        finally:  # also where someone is tired of waiting
            _kill(self._process)
        if code != 0:
            log = self._folder / TRACKER / f"{self._logger.name}.log"
            self._warn(self._unsent("no answer in time" if code is None else f"see {log}"))

    def _patience(self, outcome: str, grace_seconds: float) -> float:
        asked = self._logger.finish_seconds
        if outcome != "stopped":
            return asked
        return max(0.0, min(asked, grace_seconds - seconds_since_asked() - MARGIN))

    def _wait(self, seconds: float) -> int | None:
        """Its exit code, None if it has not ended by then."""
        until = time.monotonic() + seconds
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(min(PATIENCE, seconds))
        print(
            f"waiting up to {seconds:.0f} s for logger={self._logger.name}; all files are written",
            file=sys.stderr,
        )
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(max(0.0, until - time.monotonic()))
        return None

    def _unsent(self, why: str) -> str:
        try:
            items = Source(self._folder).items()
            left = len(Journal(self._folder, self._logger.name).unsure(items))
        except (OSError, ValueError) as error:
            return f"was not told all ({error})"
        how = f"python -m grpo_ustat.mirror {self._folder} logger={self._logger.name}"
        return f"was not told {left} of {len(items)} ({why}); nothing is lost here, send it: {how}"

    def _listen(self) -> None:
        """Pass on what the mirror says, in lines of its own."""
        for line in self._process.stdout:
            with suppress(ValueError, KeyError):
                said = json.loads(line)
                print(("warning: " if said["warning"] else "") + said["text"], file=sys.stderr)
        code = self._process.wait()
        if code and not self._finishing:
            self._warn(f"its process ended with code {code}, see {self._folder}/tracker")

    def _warn(self, text: str) -> None:
        from grpo_ustat.runs.log import warn

        warn(f"logger={self._logger.name}: {text}")


def _started(folder: Path, logger: Any) -> subprocess.Popen:
    """In a group of its own, so that Ctrl-C is the run's alone, and deaf from the first moment."""
    given = {"name": logger.name, "project": logger.project}
    task = {"folder": str(folder.absolute()), "logger": given, "parent": os.getpid()}
    command = [sys.executable, "-m", "grpo_ustat.runs.mirror", json.dumps(task)]
    environment = {k: v for k, v in os.environ.items() if k not in OF_RANKS} | MILD
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPPING, signal.SIGINT, signal.SIGHUP))
    try:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=environment, process_group=0,
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(process: subprocess.Popen) -> None:
    """With what a tracker has started."""
    with suppress(psutil.NoSuchProcess):
        for one in [*psutil.Process(process.pid).children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
