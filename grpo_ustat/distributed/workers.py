"""Distribution of work among processes, each with its own copy of the model."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import signal
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from multiprocessing import forkserver, resource_tracker
from typing import Any

from grpo_ustat.distributed.ranks import (
    WORKER_VARIABLE,
    all_gather_call,
    is_main,
    rank,
    tally,
    world,
)
from grpo_ustat.distributed.signals import STOPPING, stop_if_requested
from grpo_ustat.terminal.progress import Activity, Meter, Notice, listening

# Largest length in bytes of the path of the temporary folder. A socket in it has the path
# FOLDER/pymp-XXXXXXXX/listener-XXXXXXXX, which is limited to 107 bytes.
LONGEST_TEMPORARY_PATH = 75
# Seconds between two checks that all workers are alive.
LOOK_SECONDS = 0.5
Work = Callable[..., Iterator[Any]]


@dataclass(frozen=True)
class WorkCost:
    """Cost of a piece of work.

    Seconds are summed over workers and can therefore exceed the wall time.
    """

    rollouts: int = 0
    # Total number of tokens in the completions.
    tokens: int = 0
    # Number of completions that were truncated at max_completion_length.
    clipped: int = 0
    # Number of answers whose judge took too long, and number of those whose judge failed.
    timeouts: int = 0
    failures: int = 0
    # Seconds spent on sampling completions, and seconds spent on computing their gradients.
    seconds_generate: float = 0.0
    seconds_score: float = 0.0

    def __add__(self, other: WorkCost) -> WorkCost:
        return WorkCost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def preload(modules: Sequence[str], device: str) -> None:
    """Start the server process that forks the workers, and let it import the workers' modules.

    Workers then start faster, because the server imports the modules while this process still does
    other work. The server is used by all later calls of `share` and ends with this process.

    If `device` is not the CPU, workers import the modules themselves, because a fork could not use
    a device that an import has initialised. This is also so outside Linux, where forks are not
    safe.

    Args:
        modules: names of the modules. If the server cannot import one of them, the workers do.
        device: device of the run, such as "cpu" or "cuda".
    """
    if device == "cpu" and sys.platform == "linux" and _context().get_start_method() != "spawn":
        mp.set_forkserver_preload([*modules])
        with _signals_held():
            forkserver.ensure_running()


def _context() -> Any:
    """Return how workers start: as forks of a server, or anew if its socket had too long a path."""
    fits = len(os.fsencode(tempfile.gettempdir())) <= LONGEST_TEMPORARY_PATH
    return mp.get_context("forkserver" if fits else "spawn")


def share(
    work: Work,
    items: list[Any],
    workers: int,
    title: str,
    total: int,
    *arguments: Any,
    weights: list[float] | None = None,
) -> tuple[list[Any], WorkCost]:
    """Divide items among several processes, and run the generator `work` on each part.

    If a launcher started several ranks, these are the processes. Otherwise `workers` local
    processes are started.

    Args:
        work: module-level generator function, called as `work(items, *arguments)`. It yields
            `WorkCost(...)` to report progress, `Notice(...)` to show a line to the user (only the
            first such line is shown), and anything else as a result.
        items: items to divide; the list must be the same on every rank.
        workers: number of local processes. If it is 1, the work is done in this process.
        title, total: title and total of the progress bar, which counts `WorkCost.rollouts`.
        arguments: further arguments of `work`.
        weights: expected amount of work for each item; None if it is equal for all.

    Returns:
        Results of all processes, in the order of the processes, and the total cost. Every rank
        returns the same.

    Raises:
        Stopped: a signal requested a stop. Files that workers have written are kept.
        RuntimeError: a worker was killed.
        Exception: error of a worker.
    """
    among = min(world() if world() > 1 else workers, len(items))
    shares = shares_of(items, [1.0] * len(items) if weights is None else weights, among)
    meter = Meter(title, total, "completions", visible=is_main())
    listener = listening(meter.hear if is_main() else None)
    with meter, listener, closing(_events(work, shares, arguments)) as events:
        parts = all_gather_call(_collect, events, meter)
        cost = sum((cost for _, cost in parts), WorkCost())
        meter.update(cost.rollouts, cost.tokens)
    return [result for results, _ in parts for result in results], cost


def shares_of(items: list[Any], weights: list[float], workers: int) -> list[list[Any]]:
    """Divide items among workers so that all have about the same amount of work.

    The items are assigned in order of decreasing weight, each to the worker with the least work so
    far. The items of a worker keep their original order.

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


def _collect(events: Iterator[tuple[int, Any]], meter: Meter) -> tuple[list[Any], WorkCost]:
    """Return the results of the workers of this rank, in the workers' order, and the total cost."""
    results, cost, noticed = defaultdict(list), WorkCost(), False
    for worker, event in events:
        stop_if_requested()
        if isinstance(event, WorkCost):
            cost += event
            if world() > 1:
                meter.update(tally(event.rollouts))
            else:
                meter.update(cost.rollouts, cost.tokens)
        elif isinstance(event, Notice):
            if not noticed:
                meter.print(event.text, style="bold red")
            noticed = True
        elif isinstance(event, Activity):
            meter.hear(event, worker)
        else:
            results[worker].append(event)
    return [result for worker in sorted(results) for result in results[worker]], cost


def _events(
    work: Work, shares: list[list[Any]], arguments: tuple
) -> Generator[tuple[int, Any], None, None]:
    """Do the work and yield pairs (number of the worker, event).

    An event is anything that `work` yields. In a run with several ranks, this rank does its part
    itself. Otherwise local workers do the work; they are killed when this generator ends.
    """
    if world() > 1 or len(shares) < 2:
        for part in shares[rank() : rank() + 1]:
            yield from ((rank(), event) for event in work(part, *arguments))
        return

    context, others = _context(), mp.active_children()
    events = context.Queue()
    with ProcessPoolExecutor(
        len(shares), context, initializer=_start_worker, initargs=(events, dict(os.environ))
    ) as pool:
        try:
            with _signals_held():
                futures = [
                    pool.submit(_work, number, work, part, arguments)
                    for number, part in enumerate(shares)
                ]
            working = len(futures)
            while working:
                for future in futures:
                    if future.done():
                        # Raises an error if a worker failed or was killed.
                        future.result()
                try:
                    number, event = events.get(timeout=LOOK_SECONDS)
                except queue.Empty:
                    continue
                if event is not None:
                    yield number, event
                    continue
                working -= 1
                for result in futures[number].result():
                    yield number, result
        except BrokenProcessPool as error:
            raise RuntimeError("a worker was killed, perhaps because memory ran out") from error
        finally:
            for process in mp.active_children():
                if process not in others:
                    process.kill()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Delay Ctrl-C and stop signals to the end of the block.

    This process receives the signals after the block. Processes that start in the block inherit the
    delay, until they ignore the signals themselves.
    """
    # The resource tracker is started first, because its start would remove the signal mask.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *STOPPING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# Queue to which this process, a worker, sends events.
_events_of_worker: Any = None


def _start_worker(events: Any, environment: dict[str, str]) -> None:
    """Prepare a worker process for its work."""
    global _events_of_worker
    _events_of_worker = events
    # A forked worker starts with the environment of the server instead of the parent's.
    os.environ.update(environment)
    # A terminal and a scheduler send these signals to all processes, but only the parent responds
    # to them. The mask is removed, so that programs that the worker starts can receive them.
    for stop in (signal.SIGINT, *STOPPING):
        signal.signal(stop, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, *STOPPING})
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when the process that started it has ended."""
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(number: int, work: Work, items: list[Any], arguments: tuple) -> list[Any]:
    """Do the work of a worker; send its events to the parent, and None at the end."""
    os.environ[WORKER_VARIABLE] = str(number)
    send, results = partial(_send, number), []
    try:
        with listening(send):
            for event in work(items, *arguments):
                if isinstance(event, WorkCost | Notice):
                    send(event)
                else:
                    results.append(event)
        return results
    finally:
        send(None)


def _send(number: int, event: Any) -> None:
    _events_of_worker.put((number, event))
