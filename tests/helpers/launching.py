"""The command line as a fork of this process, so that nothing is imported again."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing import current_process, forkserver
from pathlib import Path

import psutil

from grpo_ustat.cli import app
from grpo_ustat.launch.command import load_command


def without_figures(study):
    """Studies by this module draw nothing from now on, which takes longer than all the rest."""
    study.draw_figures = study.error_figures.draw = study.group_size.draw = lambda *_: None


class Command:
    """`python -m grpo_ustat.<entry> <arguments>` in a session of its own.

    Args:
        cwd: where it runs; what it prints goes to `cwd/said`, of earlier commands too.
        before: called first, in it.
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
    forkserver._forkserver.__init__()  # that of the tests' process is not its child,
    current_process()._config.pop("tempdir", None)  # nor is its folder
    sys.argv = [entry, *arguments]
    before()
    app.main(load_command(entry))
