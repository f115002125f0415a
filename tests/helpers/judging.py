"""A process that judges and then ends in the way that it is told; run by test_verifier.py."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import threading
import time

from grpo_ustat.tasks.verifier import Verdict, Verifier


def judged(deadline=3.0):
    verifier = Verifier(1, deadline, 2.0, canaries={})
    assert verifier.judge([("3", "3"), ("3", "4")]) == [Verdict.RIGHT, Verdict.WRONG]
    return verifier


def hang():
    judge = judged().judge
    threading.Thread(target=judge, args=([("3", "compute")],), daemon=True).start()
    time.sleep(0.3)
    print("busy", flush=True)
    time.sleep(60)


def in_daemon():
    process = multiprocessing.get_context("spawn").Process(target=hang, daemon=True)
    process.start()
    time.sleep(60)


def fork():
    verifier = judged()
    child = os.fork()
    right = verifier.judge([("5", "5"), ("5", "6")]) == [Verdict.RIGHT, Verdict.WRONG]
    if child == 0:
        os._exit(0 if right else 1)
    assert right and os.waitpid(child, 0)[1] == 0
    assert verifier.judge([("7", "7")]) == [Verdict.RIGHT]


def limited():
    """As a shell's `ulimit -v` or a scheduler limits the address space to less than asked for."""
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    verifier = Verifier(1, 20.0, 2.0, canaries={})
    assert verifier.judge([("3", "eat"), ("3", "3")]) == [Verdict.FAILURE, Verdict.RIGHT]


def end():
    global kept
    kept = judged()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
