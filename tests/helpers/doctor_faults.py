"""Checks that go wrong in every way in which a function can."""

from __future__ import annotations

import os
import sys
import time

from grpo_ustat.doctor.checks import ok


def well(folder):
    print("a library prints something")
    return ok(f"well in {folder}; WANDB_API_KEY={os.environ.get('WANDB_API_KEY')}")


def crash(_):
    raise RuntimeError("Bearer hf_abcdefghijklmnop was refused")


def leave(_):
    sys.exit(3)


def hang(_):
    time.sleep(5)


def missing(_):
    import no_such_package  # noqa: F401
