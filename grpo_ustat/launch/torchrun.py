"""The parent of ranks on this machine: it starts torchrun on the worker and passes signals on.

Each rank is `python -m grpo_ustat.launch.worker`, which reads the resolved configuration from a
file and knows nothing of Hydra. A stopping signal goes to the ranks, not to torchrun: they save
and end by themselves, and torchrun has nothing to report. Ranks end with this process, whatever
ends it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import yaml

from grpo_ustat.checks import ConfigError
from grpo_ustat.ranks import PARENT
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.signals import STOPPING, Stopped, StopRequest


class RanksFailed(RuntimeError):
    """Ranks ended without saying how; what they printed says why."""


def run_ranks(entry: str, config: Any, folder: RunFolder) -> float | None:
    """One run on `launch.num_processes` ranks of this machine.

    Raises:
        ConfigError, Stopped: as the ranks did, which have told.
        RanksFailed: a rank failed; its own message is on standard error.
    """
    with tempfile.TemporaryDirectory(prefix="grpo_ustat-") as place:
        told, outcome = Path(place, "config.yaml"), Path(place, "outcome.json")
        told.write_text(yaml.safe_dump(asdict(config), sort_keys=False))
        words = (entry, str(told), str(folder.path.absolute()), str(outcome))
        ranks = _started(config.launch.num_processes, words)
        with _Passing(config.launch.grace_seconds) as passing, ranks as torchrun:
            code = passing.wait(torchrun)
        return _concluded(outcome, code, passing)


def _concluded(outcome: Path, code: int, passing: _Passing) -> float | None:
    """What the ranks' first one told, or what can be said without it."""
    told = json.loads(outcome.read_text()) if outcome.is_file() else {}
    if "value" in told:
        return told["value"]
    if "stopped" in told:
        raise Stopped(told["stopped"])
    if "refused" in told:
        raise ConfigError(told["refused"])
    if passing.received:
        raise Stopped(f"stopped by {passing.name} before the ranks could save")
    said = [f"{file.stem.replace('-', ' ')}: {file.read_text()}" for file in _failures(outcome)]
    raise RanksFailed("; ".join(said) or f"the ranks ended with code {code}, see what they printed")


def _failures(outcome: Path) -> list[Path]:
    """Of ranks that had the time to say why they failed."""
    return sorted(outcome.parent.glob("rank-*.txt"))


class _Passing(StopRequest):
    """Passes the first stopping signal on to the ranks, and sees that they end."""

    def __init__(self, grace_seconds: int):
        super().__init__()
        self._grace, self._until, self._torchrun = grace_seconds, None, None

    def noted(self, number: int) -> None:
        if self._until is None:
            self._pass_on()

    def wait(self, torchrun: subprocess.Popen) -> int:
        """Its exit code; past the grace it is killed."""
        self._torchrun = torchrun
        while True:
            try:
                return torchrun.wait(timeout=1)
            except subprocess.TimeoutExpired:
                if self.received:
                    self._pass_on()  # again: a rank that was still starting had not listened
            if self._until is not None and time.monotonic() > self._until:
                print(
                    f"the ranks had not ended {self._grace} s after {self.name} "
                    "(launch.grace_seconds) and are killed",
                    file=sys.stderr,
                )
                _kill(torchrun)

    def _pass_on(self) -> None:
        if self._torchrun is None:
            return
        self._until = self._until or time.monotonic() + self._grace
        ranks = _children(self._torchrun.pid)
        for process in ranks:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(self.received)
        if not ranks:
            _kill(self._torchrun)


@contextmanager
def _started(count: int, words: tuple[str, ...]) -> Iterator[subprocess.Popen]:
    """torchrun with its ranks, none of which is left behind."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={count}", "-m", "grpo_ustat.launch.worker", *words]
    environment = os.environ | {PARENT: str(os.getpid()), "PET_SIGNALS_TO_HANDLE": "SIGHUP"}
    options = dict(env=environment, start_new_session=True, preexec_fn=_deafened)
    with subprocess.Popen(command, **options) as torchrun:
        try:
            yield torchrun
        finally:
            _kill(torchrun)


def _deafened() -> None:
    """torchrun leaves stopping to the ranks, also where a scheduler signals every process."""
    for number in (*STOPPING, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _kill(torchrun: subprocess.Popen) -> None:
    if torchrun.poll() is None:
        for process in _children(torchrun.pid):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        torchrun.kill()


def _children(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children()
    return []
