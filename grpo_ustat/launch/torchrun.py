"""Start of the processes (ranks) of a run on this machine with torchrun.

Each rank runs `python -m grpo_ustat.launch.rank`, which reads the composed configuration from a
file and does not use Hydra. This process, the parent, forwards stop signals to the ranks but not to
torchrun. The ranks can then save and end by themselves, and torchrun reports no failure. If the
parent ends, the ranks end too.
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

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed.processes import children, kill_children
from grpo_ustat.distributed.ranks import PARENT_VARIABLE
from grpo_ustat.distributed.signals import STOPPING, Stopped, StopRequest
from grpo_ustat.runs.folder import RunFolder


class RanksFailed(RuntimeError):
    """Failure of ranks without a reason from rank 0. The output of the ranks shows the reason."""


def run_ranks(name: str, config: Any, folder: RunFolder) -> float | None:
    """Execute a run in `launch.num_processes` ranks on this machine.

    Args:
        name: name of the command.
        config: checked configuration of the run.
        folder: folder of the run.

    Returns:
        Number that a sweep shows for the run; None if there is none.

    Raises:
        Stopped: a signal stopped the ranks.
        RanksFailed: a rank failed; its message is on standard error.
    """
    with tempfile.TemporaryDirectory(prefix="grpo_ustat-") as place:
        config_file, outcome_file = Path(place, "config.yaml"), Path(place, "outcome.json")
        config_file.write_text(yaml.safe_dump(asdict(config), sort_keys=False))
        words = (name, str(config_file), str(folder.path.absolute()), str(outcome_file))
        relay = SignalRelay(config.launch.grace_seconds)
        with relay, start_torchrun(config.launch.num_processes, words) as torchrun:
            code = relay.wait(torchrun)
        outcome = json.loads(outcome_file.read_text()) if outcome_file.is_file() else {}
        # Each failed rank wrote its reason to a file, unless it was killed.
        failures = sorted(Path(place).glob("rank-*.txt"))
        reasons = [f"{file.stem.replace('-', ' ')}: {file.read_text()}" for file in failures]
    if "value" in outcome:
        return outcome["value"]
    if "stopped" in outcome:
        raise Stopped(outcome["stopped"])
    if "refused" in outcome:
        raise ConfigError(outcome["refused"])
    if relay.received:
        raise Stopped(f"stopped by {relay.name} before the ranks could save")
    raise RanksFailed(
        "; ".join(reasons) or f"the ranks ended with code {code}: see their output above"
    )


class SignalRelay(StopRequest):
    """Stop request that forwards signals to the ranks and kills ranks that do not end in time.

    Args:
        grace_seconds: seconds from the first signal until the ranks are killed.
    """

    def __init__(self, grace_seconds: int):
        super().__init__()
        self._grace = grace_seconds
        # Time on the monotonic clock at which the ranks are killed; None before the first signal.
        self._until: float | None = None
        self._torchrun: subprocess.Popen | None = None

    def on_signal(self, number: int) -> None:
        """Forward the first stopping signal to the ranks immediately."""
        if self._until is None:
            self._pass_on()

    def wait(self, torchrun: subprocess.Popen) -> int:
        """Wait until torchrun has ended, and return its exit code.

        After a stop signal, torchrun is killed if it does not end within the grace period.
        """
        self._torchrun = torchrun
        while True:
            try:
                return torchrun.wait(timeout=1)
            except subprocess.TimeoutExpired:
                if self.received:
                    # The signal is repeated for ranks that were still starting and did not handle
                    # it yet.
                    self._pass_on()
            if self._until is not None and time.monotonic() > self._until:
                print(
                    f"ranks still running {self._grace} s after {self.name} are killed: raise "
                    "launch.grace_seconds if they need longer to save",
                    file=sys.stderr,
                )
                _kill(torchrun)

    def _pass_on(self) -> None:
        if self._torchrun is None:
            return
        self._until = self._until or time.monotonic() + self._grace
        ranks = children(self._torchrun.pid)
        for process in ranks:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(self.received)
        if not ranks:
            _kill(self._torchrun)


@contextmanager
def start_torchrun(count: int, words: tuple[str, ...]) -> Iterator[subprocess.Popen]:
    """Start torchrun and its ranks, and kill them all at the end of the block.

    Args:
        count: number of ranks.
        words: command-line arguments of each rank; see `grpo_ustat.launch.rank`.
    """

    def ignore_stopping() -> None:
        """Ignore the stop signals in torchrun, because the ranks handle them."""
        for number in (*STOPPING, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    # torchrun does not remove its files if it is killed. They are therefore put into the parent's
    # temporary folder.
    own_files = Path(words[1]).parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--log-dir={own_files / 'torchrun'}"]
    command += [f"--nproc_per_node={count}", "-m", "grpo_ustat.launch.rank", *words]
    environment = os.environ | {
        PARENT_VARIABLE: str(os.getpid()),
        "PET_SIGNALS_TO_HANDLE": "SIGHUP",
    }
    with subprocess.Popen(
        command, env=environment, start_new_session=True, preexec_fn=ignore_stopping
    ) as torchrun:
        try:
            yield torchrun
        finally:
            _kill(torchrun)


def _kill(torchrun: subprocess.Popen) -> None:
    """Kill the ranks and then torchrun; in the opposite order, the ranks would survive."""
    if torchrun.poll() is None:
        kill_children(torchrun.pid)
        torchrun.kill()
