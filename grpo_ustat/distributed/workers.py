"""Share work among processes, each with its own copy of the model, and watch them."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from grpo_ustat.checks import ConfigError
from grpo_ustat.pace import State, heard_by
from grpo_ustat.ranks import is_main, rank, tally, together, world
from grpo_ustat.runs.lock import check_own
from grpo_ustat.runs.meter import Meter
from grpo_ustat.signals import STOPPING, stop_if_asked

Work = Callable[..., Iterator[Any]]


@dataclass(frozen=True)
class Done:
    """What a piece of work took; seconds are a worker's own, so their sum exceeds the clock's.

    Attributes:
        rollouts, tokens, clipped: completions, their tokens, those that were cut.
        timeouts, failures: answers that could not be judged.
        seconds_generate, seconds_score: of writing and of reading them.
    """

    rollouts: int = 0
    tokens: int = 0
    clipped: int = 0
    timeouts: int = 0
    failures: int = 0
    seconds_generate: float = 0.0
    seconds_score: float = 0.0

    def __add__(self, other: Done) -> Done:
        return Done(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def share(
    work: Work,
    items: list[Any],
    workers: int,
    title: str,
    total: int,
    *arguments: Any,
    weights: list[float] | None = None,
    unit: str = "completions",
) -> tuple[list[Any], Done]:
    """Run `work(items, *arguments)`, a generator, over the items shared out among processes.

    `work` yields `Done(...)` for progress and anything else as a result. The processes are the
    ranks of the run where a launcher started several, otherwise `workers` local ones; the results
    are returned in their order, with what all took, on every rank.

    Args:
        work: a module-level generator function.
        items: what to share out, the same on every rank.
        workers: number of local processes; 1 runs in this one.
        title, total, unit: of the progress bar; what `Done.rollouts` counts.
        arguments: passed on to every worker.
        weights: expected work of each item; equal unless given.

    Raises:
        ConfigError: a worker refused the configuration, or another process took the folder over.
        Stopped: a signal asked for it; whatever the work has kept on disk is kept.
        RuntimeError: a worker failed; its traceback is the message.
    """
    among = min(world() if world() > 1 else workers, len(items))
    shares = shares_of(items, [1.0] * len(items) if weights is None else weights, among)
    meter = Meter(title, total, unit, shown=is_main())
    heard = heard_by(meter.hear if is_main() else None)
    with meter, heard, closing(_events(work, shares, arguments)) as events:
        parts = together(_collect, events, meter)
        spent = sum((done for _, done in parts), Done())
        meter.update(spent.rollouts, spent.tokens)
    return [result for found, _ in parts for result in found], spent


def shares_of(items: list[Any], weights: list[float], workers: int) -> list[list[Any]]:
    """Items shared out, the heaviest first, each to the worker with the least; order is kept.

    >>> shares_of(["a", "b", "c", "d"], [1, 2, 5, 1], 2)
    [['c'], ['a', 'b', 'd']]
    """
    loads, shares = [0.0] * workers, [[] for _ in range(workers)]
    order = sorted(zip(weights, range(len(items)), strict=True), key=lambda pair: -pair[0])
    for weight, item in order:
        least = min(range(workers), key=lambda w: (loads[w], len(shares[w])))
        loads[least] += weight
        shares[least].append(item)
    return [[items[i] for i in sorted(share)] for share in shares]


def _collect(events: Iterator[tuple[int, Any]], meter: Meter) -> tuple[list[Any], Done]:
    results, spent = defaultdict(list), Done()
    for worker, event in events:
        check_own()
        stop_if_asked()
        if isinstance(event, Done):
            spent += event
            if world() > 1:
                meter.update(tally(event.rollouts))
            else:
                meter.update(spent.rollouts, spent.tokens)
        elif isinstance(event, State):
            meter.hear(event, worker)
        else:
            results[worker].append(event)
    return [result for worker in sorted(results) for result in results[worker]], spent


def _events(work: Work, shares: list[list[Any]], arguments: tuple) -> Iterator[tuple[int, Any]]:
    if world() > 1 or len(shares) < 2:
        for own in shares[rank() : rank() + 1]:
            yield from ((rank(), event) for event in work(own, *arguments))
        return
    workers: list[tuple[mp.Process, Connection]] = []
    try:
        with _signals_held():
            for own in shares:
                workers.append(_start(work, own, arguments))
        yield from _listen(workers)
    finally:
        for process, _ in workers:
            process.kill()
        for process, _ in workers:
            process.join()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Processes started in here never see Ctrl-C, which a terminal sends to all, and no request to
    stop before they ignore it; this process sees both afterwards.
    """
    resource_tracker.ensure_running()  # starting it later would lift the mask
    held: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *STOPPING})  # children inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if held:
        signal.raise_signal(signal.SIGINT)


def _start(work: Work, items: list[Any], arguments: tuple) -> tuple[mp.Process, Connection]:
    context = mp.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_worker, args=(there, work, items, arguments), daemon=True)
    process.start()
    there.close()  # so that the pipe ends with the worker
    return process, here


def _listen(workers: list[tuple[mp.Process, Connection]]) -> Iterator[tuple[int, Any]]:
    running = {pipe: number for number, (_, pipe) in enumerate(workers)}
    while running:
        for pipe in wait(running):
            worker = running[pipe]
            kind, event = _received(worker, *workers[worker])
            if kind == "end":
                del running[pipe]
            elif kind == "refused":
                raise ConfigError(event)
            elif kind == "failed":
                raise RuntimeError(f"worker {worker} failed:\n{event}")
            else:
                yield worker, event


def _received(number: int, process: mp.Process, pipe: Connection) -> tuple[str, Any]:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        process.join()
        raise RuntimeError(f"worker {number} ended with exit code {process.exitcode}") from None


def _worker(pipe: Connection, work: Work, items: list[Any], arguments: tuple) -> None:
    threading.Thread(target=_follow_parent, daemon=True).start()
    for number in STOPPING:  # which a scheduler sends to all; the parent answers
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # what it starts may listen
    sending = threading.Lock()  # judges tell from threads of their own

    def send(kind: str, event: Any) -> None:
        with sending:
            pipe.send((kind, event))

    try:
        with heard_by(partial(send, "event")):
            for event in work(items, *arguments):
                send("event", event)
        send("end", None)
    except ConfigError as error:
        pipe.send(("refused", str(error)))
    except Exception:
        pipe.send(("failed", traceback.format_exc()))


def _follow_parent() -> None:
    """End with the parent, which has no chance to say so when it is killed."""
    mp.parent_process().join()
    os._exit(1)
