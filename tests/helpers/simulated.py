"""Ranks played one after the other, as if each were a process of its own."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

from grpo_ustat.train import batch as batch_module


class Heard(Exception):
    """A rank has given what it gathers."""


def on_ranks(monkeypatch, run, world, work):
    """`work(run)` on every rank: what each ends with, where all gather what each one gave.

    Only for work that gathers once, by `batch.gather_object`: played twice, first to hear what
    every rank gives.
    """
    given = []
    ranks = [
        dataclasses.replace(run, accelerator=SimpleNamespace(process_index=r, num_processes=world))
        for r in range(world)
    ]

    def listen(mine):
        given.extend(mine)
        raise Heard

    monkeypatch.setattr(batch_module, "gather_object", listen)
    for own in ranks:
        try:
            work(own)
        except Heard:
            continue
        raise AssertionError("a rank gathered nothing: the others would wait for ever")
    monkeypatch.setattr(batch_module, "gather_object", lambda mine: list(given))
    return [work(own) for own in ranks]
