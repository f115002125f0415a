"""Stands in for math-verify: an answer says what happens when it is judged."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

CALLS = os.open(os.environ["PYTHONCALLS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


class LatexExtractionConfig:
    def __init__(self, **settings):
        pass


def parse(text, *config, **settings):
    if text == "unreadable":
        return []
    if text == "raises while read":
        raise RecursionError
    return [text]


def verify(gold, answer, **settings):
    os.write(CALLS, f"{os.getpid()} {answer}\n".encode())
    act = ACTS.get(answer.partition(" ")[0], lambda gold, answer: gold == answer)
    return act(gold, answer)


def _sleep(gold, answer):
    time.sleep(float(answer.split()[1]))
    return True


def _compute(gold, answer):  # in C, where Python hears no signal
    return 9 ** (9**9) == 1


def _eat(gold, answer):
    eaten = []
    try:
        while True:
            eaten.append(bytearray(10**7))
    except MemoryError:  # as the libraries do
        return False


def _raise(gold, answer):
    raise TypeError("no such comparison")


def _die(gold, answer):
    os.kill(os.getpid(), signal.SIGKILL)


def _done(act):
    return lambda gold, answer: act(answer.partition(" ")[2]) is not None


def _answer(word):
    return lambda gold, answer: word


ACTS = {
    "sleep": _sleep, "compute": _compute, "eat": _eat, "raise": _raise, "die": _die,
    "always": _answer(True), "never": _answer(False), "import": _done(importlib.import_module),
    "read": _done(lambda path: Path(path).read_bytes()),
    "write": _done(lambda path: Path(path).write_text("x")),
    "remove": _done(lambda path: [os.remove(path)]),
    "connect": _done(lambda _: socket.socket()),
    "start": _done(lambda command: subprocess.run([command])),
    "fork": _done(lambda _: [os.fork()]),
}  # fmt: skip
