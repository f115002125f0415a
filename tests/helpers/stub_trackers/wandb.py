"""A wandb that fails as the environment's FAULT says; what it was given goes to the file SEEN."""

import json
import os
import sys
import time
from types import SimpleNamespace

FAULT = os.environ.get("FAULT", "")


def at(place):
    if f"raises in {place}" == FAULT:
        raise RuntimeError(f"\x1b[31mno {place}\nhere")
    if f"exits in {place}" == FAULT:
        os._exit(5)
    if f"hangs in {place}" == FAULT:
        time.sleep(10**6)
    if f"slow in {place}" == FAULT:
        time.sleep(30)
    if f"fills memory in {place}" == FAULT:
        hoard = [bytearray(2**26) for _ in range(10**6)]
        raise AssertionError(len(hoard))
    if f"prints in {place}" == FAULT:
        for stream in (sys.stdout, sys.stderr):
            print("rubbish \x1b[2J" * 100, file=stream, flush=True)
            os.write(stream.fileno(), b"\xff\x00rubbish\n")


def note(**seen):
    with open(os.environ["SEEN"], "a") as file:
        file.write(json.dumps(seen, default=str) + "\n")


at("import")


class Settings:
    model_fields = ()


class Table:
    def __init__(self, columns, data, allow_mixed_types):
        self.text = f"table of {len(data)}"

    def __str__(self):
        return self.text


Image = str


class Run:
    offline, starting_step, url = True, 0, "http://nowhere"
    settings = SimpleNamespace(sync_dir="nowhere")
    summary: dict = {}

    def define_metric(self, *_, **__):
        pass

    def log(self, values, step):
        at("log")
        note(step=step, values=values)

    def mark_preempting(self):
        note(preempting=True)

    def finish(self, exit_code):
        at("finish")
        note(exit_code=exit_code)


def init(**about):
    at("init")
    note(id=about["id"], config=about["config"])
    return Run()


def teardown():
    at("teardown")
    note(written=True)
