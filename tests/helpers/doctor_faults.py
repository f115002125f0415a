"""Checks that go wrong in every way in which a function can, and ranks that do."""

from __future__ import annotations

import os
import sys
import time

from grpo_ustat.doctor import cluster
from grpo_ustat.doctor.runner import ok


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


def rank_without_a_way(rank, backend, count, port, environment, answers):
    """The machine's own name leads nowhere; what `environment` names does."""
    if not environment:
        os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
    cluster._rank(rank, backend, count, port, environment, answers)


def rank_that_dies(*_):
    os._exit(9)


def rank_that_hangs(*_):
    time.sleep(30)
