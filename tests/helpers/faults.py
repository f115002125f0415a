"""Checks that go wrong in every way in which a process can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from grpo_ustat.doctor.runner import ok


def well(folder):
    print("a library prints something")
    return ok(f"well in {folder}; WANDB_API_KEY={os.environ.get('WANDB_API_KEY')}")


def crash(_):
    raise RuntimeError("Bearer hf_abcdefghijklmnop was refused")


def segfault(_):
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # holds the pipes
    time.sleep(60)


def silence(_):
    os._exit(0)


def nonsense(_):
    return "not a finding"


def missing(_):
    import no_such_package  # noqa: F401
