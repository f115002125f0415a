"""Share work among processes, each with its own copy of the model, and watch them."""

from __future__ import annotations

import multiprocessing as mp
import queue
import traceback
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

from grpo_ustat.checks import ConfigError
from grpo_ustat.runs.log import progress_bar

Work = Callable[..., Iterator[Any]]


@dataclass(frozen=True)
class Done:
    """What a piece of work took; seconds are a worker's own, so their sum exceeds the clock's."""

    rollouts: int = 0
    tokens: int = 0
    clipped: int = 0
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
    weights=None,
) -> tuple[list[Any], Done]:
    """Run `work(items, *arguments)`, a generator, over the items split among workers.

    `work` yields `Done(...)` for progress and anything else as a result. Worker w takes items
    w, w + workers, ...; the results are returned in the order of workers, with what all took.

    Args:
        work: a module-level generator function.
        items: what to share out.
        workers: number of processes; 1 runs in this one.
        title, total: of the progress bar, in completions.
        arguments: passed on to every worker.

    Raises:
        ConfigError: a worker refused the configuration.
        RuntimeError: a worker failed; its traceback is the message.
    """
    workers = min(workers, len(items))
    shares = [items[w::workers] for w in range(workers)]
    results: list[list[Any]] = [[] for _ in shares]
    spent = Done()
    with progress_bar("{task.description}  completions") as bar:
        task = bar.add_task(title, total=total)
        for worker, event in _events(work, shares, arguments):
            if isinstance(event, Done):
                spent += event
                bar.advance(task, event.rollouts)
            else:
                results[worker].append(event)
    return [result for found in results for result in found], spent


def _events(work: Work, shares: list[list[Any]], arguments: tuple) -> Iterator[tuple[int, Any]]:
    if len(shares) == 1:
        yield from ((0, event) for event in work(shares[0], *arguments))
        return
    context = mp.get_context("spawn")
    events = context.Queue()
    processes = [
        context.Process(target=_worker, args=(events, w, work, share, arguments), daemon=True)
        for w, share in enumerate(shares)
    ]
    for process in processes:
        process.start()
    try:
        yield from _listen(events, processes)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _listen(events, processes) -> Iterator[tuple[int, Any]]:
    running = set(range(len(processes)))
    while running:
        try:
            worker, kind, event = events.get(timeout=5)
        except queue.Empty:
            dead = [w for w in running if processes[w].exitcode is not None]
            if dead:
                code = processes[dead[0]].exitcode
                raise RuntimeError(f"worker {dead[0]} ended with exit code {code}") from None
            continue
        if kind == "refused":
            raise ConfigError(event)
        if kind == "error":
            raise RuntimeError(f"worker {worker} failed:\n{event}")
        if kind == "end":
            running.discard(worker)
        else:
            yield worker, event


def _worker(events, number: int, work: Work, items: list[Any], arguments: tuple) -> None:
    try:
        for event in work(items, *arguments):
            events.put((number, "event", event))
        events.put((number, "end", None))
    except ConfigError as error:
        events.put((number, "refused", str(error)))
    except Exception:
        events.put((number, "error", traceback.format_exc()))
