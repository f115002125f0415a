"""Work in forks of this process, and kills before calls that change a folder."""

from __future__ import annotations

import os
import signal
import sys
import traceback

CALLS = ("fsync", "replace", "unlink", "rmdir", "mkdir", "link")


def forked(work, log, before=lambda: None):
    """Start `work` in a fork, which has imported everything already; returns its id.

    What it prints goes to the file `log`; it ends with the code that `work` returns, None as 0.
    """
    if pid := os.fork():
        return pid
    code = 1
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w")
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w")
        before()
        code = work() or 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    sys.stdout.flush()
    os._exit(code)


def end_of(pid):
    """The exit code, or the negative number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def at_each_call(act):
    """Have `act` called with the number of each call that changes a folder, before it is made."""
    count = iter(range(10**9))

    def wrapped(call):
        def counted(*arguments, **options):
            act(next(count))
            return call(*arguments, **options)

        return counted

    for name in CALLS:
        setattr(os, name, wrapped(getattr(os, name)))


def kill_before_call(number):
    """A function that has this process killed before its call of that number."""

    def act(n):
        if n == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: at_each_call(act)
