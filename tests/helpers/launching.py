"""The command line as a fork of this process, with torchrun and its ranks as forks of that.

Nothing is imported again, so a run on two ranks takes two seconds. What starts the ranks, waits for
them and signals them is the real thing; only torchrun's own part is played here, as far as it
matters: it starts the ranks in sessions of their own and ends the others when one fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing import current_process, forkserver
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from forks import free_port

from grpo_ustat.cli import app
from grpo_ustat.distributed import ranks
from grpo_ustat.launch import rank as worker
from grpo_ustat.launch import torchrun
from grpo_ustat.launch.command import load_command


def without_figures(study):
    """Studies by this module draw nothing from now on, which takes longer than all the rest."""
    study.draw_figures = study.error_figures.draw = study.group_size.draw = lambda *_: None


class Command:
    """`python -m grpo_ustat.<entry> <arguments>` in a session of its own.

    Args:
        cwd: where it runs; what it prints goes to `cwd/said`, of earlier commands too.
        before: called first, in it and so in its ranks.
    """

    def __init__(self, entry, *arguments, cwd, before=lambda: None):
        self.said = Path(cwd) / "said"
        self.begun = time.monotonic()
        self.pid = _forked(lambda: _main(entry, arguments, Path(cwd), self.said, before))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in (*self.family(), self):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def family(self):
        """Every process that it started, directly or not."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).children(recursive=True)
        return []

    def ranks(self):
        with suppress(psutil.NoSuchProcess, IndexError):
            return psutil.Process(self.pid).children()[0].children()
        return []

    def end(self, seconds=120):
        """Its exit code, minus the signal that ended it; and what it printed."""
        until = time.monotonic() + seconds
        while (done := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            assert time.monotonic() < until, f"no end: {self.said.read_text()[-3000:]}"
            time.sleep(0.01)
        return os.waitstatus_to_exitcode(done[1]), self.said.read_text()


def finished(entry, *arguments, cwd, before=lambda: None, seconds=120):
    """See `Command.end`."""
    with Command(entry, *arguments, cwd=cwd, before=before) as command:
        return command.end(seconds)


def until(condition, seconds=120):
    """Wait for something to come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)


def alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def lines(file):
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def _forked(work):
    """Do the work in a fork that ends as a Python process would; returns its id."""
    sys.stdout.flush(), sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def _main(entry, arguments, cwd, said, before):
    os.setsid()
    cwd.mkdir(parents=True, exist_ok=True)
    os.chdir(cwd)
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1)
    torchrun.subprocess = SimpleNamespace(Popen=_Torchrun, TimeoutExpired=subprocess.TimeoutExpired)
    forkserver._forkserver.__init__()  # that of the tests' process is not its child,
    current_process()._config.pop("tempdir", None)  # nor is its folder
    sys.argv = [entry, *arguments]
    before()
    app.main(load_command(entry))


class _Torchrun:
    """subprocess.Popen of torchrun, as far as `parent` uses it."""

    def __init__(self, command, env, start_new_session, preexec_fn):
        (count,) = (int(word.split("=")[1]) for word in command if "--nproc_per_node" in word)
        words = command[command.index("grpo_ustat.launch.rank") + 1 :]

        def act():
            os.setsid() if start_new_session else None
            preexec_fn()
            os.environ.clear()
            os.environ.update(env)
            _play(count, words)

        self.pid, self.returncode = _forked(act), None

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout=None):
        end = time.monotonic() + (timeout or 1e9)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("torchrun", timeout)
            time.sleep(0.01)
        return self.returncode

    def kill(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()


def _play(count, words):
    known = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    numbers = [{"RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]
    pids = {_forked(lambda of=known | number: _rank(of, words)) for number in numbers}
    failed = False
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        if status and not failed:
            failed = True
            for other in pids:
                os.kill(other, signal.SIGTERM)
    raise SystemExit(int(failed))


def _rank(known, words):
    os.setsid()
    os.environ.update({name: str(value) for name, value in known.items()})
    for state in (AcceleratorState, PartialState, GradientState):
        state._shared_state.clear()
    ranks._join.cache_clear()
    torch.set_num_threads(1)
    sys.argv = ["worker", *words]
    worker.main()
