"""A real SLURM of one node, for tests: its own munge, ports and state, no systemd, no cgroups."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

PACKAGES = ("slurm-wlm", "munge")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol")
CONF = """\
ClusterName=toy
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=5,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobRequeue=1
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=localhost NodeAddr=127.0.0.1 NodeHostname={host} Sockets=1 CoresPerSocket={cpus} \
ThreadsPerCore=1 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=localhost Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=15
PartitionName=high Nodes=localhost MaxTime=INFINITE State=UP PriorityTier=10
"""


def missing() -> str | None:
    """Why no cluster can be started here, in words; installs SLURM where apt-get can."""
    if os.geteuid() != 0:
        return "SLURM's daemons are started by root"
    with open(__file__) as this:
        fcntl.flock(this, fcntl.LOCK_EX)  # tests side by side install it once
        absent = [program for program in PROGRAMS if not shutil.which(program)]
        if absent and not shutil.which("apt-get"):
            return f"no {', '.join(absent)}, and no apt-get to install {' and '.join(PACKAGES)}"
        return _install() if absent else None


def _install() -> str | None:
    options = dict(capture_output=True, text=True, timeout=600)
    options["env"] = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    wanted = ["install", "-qy", "--no-install-recommends", *PACKAGES]
    for words in (["update", "-q"], wanted):
        done = subprocess.run(["apt-get", *words], **options)
    return f"apt-get {' '.join(wanted)}: {done.stderr.strip()}" if done.returncode else None


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Cluster:
    """One node of fake CPUs; partition `high` preempts jobs of `main` by requeueing them.

    Attributes:
        folder: of its state, gone with it; sockets there allow of short names alone.
        environment: what a process needs to speak to this cluster.
    """

    def __init__(self, cpus: int = 8) -> None:
        self.cpus, self.folder = cpus, Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> Cluster:
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True)
        host = socket.gethostname().split(".")[0]
        ports = {"controller": _free_port(), "daemon": _free_port()}
        text = CONF.format(folder=self.folder, host=host, cpus=self.cpus, **ports)
        (self.folder / "slurm.conf").write_text(text)
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def _start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        named = {"key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
        files = [f"--{option}={self.folder}/munge.{end}" for option, end in named.items()]
        self._daemon("munged", "-F", "--force", f"--socket={self.folder}/munge.socket", *files)
        wait_for((self.folder / "munge.socket").exists, "munge's socket", 60)
        self._daemon("slurmctld", "-D", "-c")
        self._daemon("slurmd", "-D")
        wait_for(lambda: self.run("sinfo", "-h", "-o", "%T", check=False) == "idle", "a node", 120)

    def _daemon(self, *words: str) -> None:
        with (self.folder / f"{words[0]}.out").open("w") as out:
            self._daemons.append(
                subprocess.Popen(words, env=self.environment, stdout=out, stderr=out)
            )

    def __exit__(self, *failure: object) -> None:
        self.run("scancel", "--user=root", check=False)
        try:
            wait_for(lambda: not self.run("squeue", "-h"), "the last jobs' end", 60)
        finally:
            self._end()

    def _end(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for log in self.folder.glob("slurm*.log"):
            print(f"--- {log.name}", *log.read_text().splitlines()[-20:], sep="\n")
        shutil.rmtree(self.folder)

    def run(self, *words: str, check: bool = True) -> str:
        """Output of one of SLURM's commands.

        Raises:
            RuntimeError: it failed; with what it said.
        """
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout.strip()


def wait_for(look, what: str, seconds: float):
    """What `look()` finds; it looks five times a second until that is something.

    Raises:
        TimeoutError: nothing within so many seconds.
    """
    end = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds} s for {what}")
        time.sleep(0.2)
    return found
