"""Stands in for math-verify: an answer says what happens when it is judged."""

from __future__ import annotations

import os
import signal
import time


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
    with open(os.environ["PYTHONCALLS"], "a") as calls:
        calls.write(f"{os.getpid()} {answer}\n")
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


def _answer(word):
    return lambda gold, answer: word


ACTS = {
    "sleep": _sleep, "compute": _compute, "eat": _eat, "raise": _raise, "die": _die,
    "always": _answer(True), "never": _answer(False),
}  # fmt: skip
