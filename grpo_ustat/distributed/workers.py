"""Distribution of work among processes, each with its own copy of the model."""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import astuple, dataclass
from functools import partial
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed import server
from grpo_ustat.distributed.processes import end_with_parent
from grpo_ustat.distributed.ranks import (
    WORKER_VARIABLE,
    all_gather_call,
    is_main,
    rank,
    tally,
    world,
)
from grpo_ustat.distributed.signals import STOPPING, stop_if_requested
from grpo_ustat.estimators.baselines import UnfitRewards
from grpo_ustat.terminal.progress import Activity, Meter, Notice, listening

# Largest length in bytes of the path of the temporary folder. A socket in it has the path
# FOLDER/pymp-XXXXXXXX/listener-XXXXXXXX, which is limited to 107 bytes.
LONGEST_TEMPORARY_PATH = 75
Work = Callable[..., Iterator[Any]]
# The key `owner` has the id of the process that started the server. Empty without a server.
_FORK_SERVER: dict[str, int] = {}


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
    """Start a server process that imports the workers' modules and later forks the workers.

    Workers then start faster, because the server imports the modules while this process still does
    other work. The server is used by all later calls of `share` and ends with this process.

    Without a server, every worker starts as a new process. This is the case if

    - `device` is not the CPU, because a fork could not use the device;
    - the system is not Linux, because forks are not safe;
    - the path of the temporary folder is too long for a socket;
    - this process is a fork of a process with a server.

    Args:
        modules: names of the modules. If the server cannot import one of them, the workers do.
        device: device of the run, such as "cpu" or "cuda".
    """
    _FORK_SERVER.clear()
    fits = len(os.fsencode(tempfile.gettempdir())) <= LONGEST_TEMPORARY_PATH
    if device != "cpu" or sys.platform != "linux" or not fits:
        return
    mp.set_forkserver_preload([server.__name__, *modules])
    os.environ[server.FOLDER_VARIABLE] = util.get_temp_dir()
    try:
        # The server must ignore stop signals, because its workers would end with it.
        with _signals_held():
            forkserver.ensure_running()
    except ChildProcessError:
        return
    finally:
        del os.environ[server.FOLDER_VARIABLE]
    _FORK_SERVER["owner"] = os.getpid()
    atexit.register(_end_server)


def _end_server() -> None:
    """Kill the server when this process ends; otherwise it would not end while it imports."""
    pid = vars(forkserver._forkserver)["_forkserver_pid"]
    if _FORK_SERVER.get("owner") == os.getpid() and pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


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
        RuntimeError: a worker failed. The message contains its traceback.
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

    forked = _FORK_SERVER.get("owner") == os.getpid()
    context = mp.get_context("forkserver") if forked else mp.get_context("spawn")
    processes: list[BaseProcess] = []
    numbers: dict[Connection, int] = {}
    try:
        with _signals_held():
            for number, part in enumerate(shares):
                pipe, far_end = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run_worker,
                    args=(far_end, number, dict(os.environ), work, part, arguments),
                    daemon=True,
                )
                process.start()
                # Only the worker now has this end of the pipe, so the pipe closes when it ends.
                far_end.close()
                processes.append(process)
                numbers[pipe] = number
        while numbers:
            for pipe in cast(list[Connection], wait(list(numbers))):
                number = numbers[pipe]
                try:
                    kind, event = pipe.recv()
                except (EOFError, OSError):
                    process = processes[number]
                    process.join()
                    raise RuntimeError(
                        f"worker {number} ended with exit code {process.exitcode}"
                    ) from None
                if kind == "end":
                    del numbers[pipe]
                elif kind == "refused":
                    raise ConfigError(event)
                elif kind == "failed":
                    raise RuntimeError(f"worker {number} failed:\n{event}")
                else:
                    yield number, event
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Delay Ctrl-C and stop signals to the end of the block.

    This process receives the signals after the block. Processes that start in the block inherit the
    delay, until they ignore the signals themselves.
    """
    # The resource tracker is started first, because its start would remove the signal mask.
    resource_tracker.ensure_running()
    interrupts: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    # The mask blocks the signals. Child processes inherit it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *STOPPING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if interrupts:
        signal.raise_signal(signal.SIGINT)


def _run_worker(
    pipe: Connection,
    number: int,
    environment: dict[str, str],
    work: Work,
    items: list[Any],
    arguments: tuple,
) -> None:
    """Do the work of one worker process, and send its events and then its outcome to the parent."""
    # A forked worker starts with the environment of the server instead of the parent's.
    os.environ.update(environment)
    os.environ[WORKER_VARIABLE] = str(number)
    parent = mp.parent_process()
    assert parent is not None and parent.pid is not None
    # Two processes are watched: the direct parent, which may be a server, and the process
    # `parent.pid`, which started this worker or the server.
    end_with_parent(os.getppid(), ancestor=parent.pid)
    # A scheduler sends these signals to all processes, but only the parent responds to them.
    for stop in STOPPING:
        signal.signal(stop, signal.SIG_IGN)
    # The mask is removed, so that programs that the worker starts can receive these signals.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    # A lock is needed, because threads of a judge also send events.
    sending = threading.Lock()

    def send(kind: str, event: Any) -> None:
        with sending:
            pipe.send((kind, event))

    try:
        with listening(partial(send, "event")):
            for event in work(items, *arguments):
                send("event", event)
        send("end", None)
    except (ConfigError, UnfitRewards) as error:
        pipe.send(("refused", str(error)))
    except Exception:
        pipe.send(("failed", traceback.format_exc()))
