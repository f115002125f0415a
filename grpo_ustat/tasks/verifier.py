r"""Judging of answers with math-verify (Hugging Face), in worker processes that can be killed.

The answers come from a policy, so judging an answer such as `\boxed{9^{9^{9^9}}}` can hang or
exhaust memory. The time limits of math-verify work only in the main thread, and the caller does not
learn that a limit was reached. Here, every answer has a hard deadline and a memory limit, and the
verdict says if a limit was reached.

The processes are started by `subprocess` and communicate in JSON. They must not import the parent's
main module, must not see its keys, and must end if the parent is killed. Judging processes from the
fork server of `multiprocessing` were tried (Python 3.11, three alternated runs). They took 1.5
times as long (median), and a process that was judging when its parent was killed went on without a
deadline.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from enum import Enum
from functools import partial
from multiprocessing import Pipe
from pathlib import Path

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.terminal.progress import Progress

SCRIPT = Path(__file__).with_name("verify_worker.py")
# Time limit in seconds for a worker to start; its imports are slow on a busy machine.
START_SECONDS = 120.0
# Interval in seconds at which the start of a worker is checked, and whether it is still needed.
LOOK_SECONDS = 0.02
# Additional seconds after the deadline, in which the worker can report the timeout itself. After
# them it is killed.
GRACE_SECONDS = 1.0
# Number of pairs after which a worker is replaced, because the memory that the libraries use for
# their caches grows.
MAX_PAIRS_OF_A_WORKER = 1000
# Environment variables that are passed to a worker.
JUDGE_VARIABLES = re.compile(
    r"PATH|HOME|LANG|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|VIRTUAL_ENV|PYTHON[A-Z]+"
)
# Maximum number of pairs whose verdicts are cached.
MAX_REMEMBERED_PAIRS = 20_000

# Gold (correct) answer and model answer, each as \boxed{...}, the form that math-verify reads.
Pair = tuple[str, str]


class Verdict(Enum):
    """Verdict on an answer; `TIMEOUT` and `FAILURE` mean that the answer was not judged."""

    RIGHT = "right"
    WRONG = "wrong"
    # The deadline passed.
    TIMEOUT = "timeout"
    # The worker died, ran out of memory or raised an error.
    FAILURE = "failure"


JUDGED_VERDICTS = (Verdict.RIGHT, Verdict.WRONG)
# Pairs with known verdicts, with which each worker is tested.
CANARIES: Mapping[Pair, Verdict] = {
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\boxed{\sqrt{3}/2}"): Verdict.RIGHT,
    (r"\boxed{2x+2}", r"\boxed{2(x+1)}"): Verdict.RIGHT,
    (r"\boxed{\frac{\pi}{2}}", r"\boxed{\frac{\pi}{3}}"): Verdict.WRONG,
    (r"\boxed{2\sqrt{3}}", r"\boxed{\sqrt{13}}"): Verdict.WRONG,
}


class JudgeError(ConfigError):
    """Failure of the judge itself, which would make all rewards wrong.

    The error is shown in one line, like a configuration error.
    """


class Verifier:
    """Judge that compares pairs of texts with math-verify; it can be used by threads and forks.

    Workers start at the first call. Verdicts are cached. In every batch with a new pair, each
    worker must first judge the canaries correctly, which are pairs with known verdicts. Cached
    verdicts are therefore always from a tested worker. Workers end when this object is deleted, or
    when its process ends for any reason.

    Args:
        workers: number of processes.
        deadline: time limit in seconds for judging one answer, after which the judging process is
            killed.
        memory_gb: limit on the address space of each process, in GiB.
        canaries: pairs and their correct verdicts.
        max_tasks: number of pairs after which a worker is restarted.
    """

    def __init__(
        self,
        workers: int,
        deadline: float,
        memory_gb: float,
        canaries: Mapping[Pair, Verdict] = CANARIES,
        max_tasks: int = MAX_PAIRS_OF_A_WORKER,
    ) -> None:
        self._limits = (deadline, int(memory_gb * 2**30), max_tasks)
        self._places, self._canaries = workers, canaries
        self._cache: dict[Pair, Verdict] = {}
        self._begin()

    def _begin(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._lock, self._process = threading.Lock(), os.getpid()
        weakref.finalize(self, _end, self._workers, self._process)

    def judge(self, pairs: Sequence[Pair]) -> list[Verdict]:
        """Return the verdict on each pair of a gold answer and an answer; judge equal pairs once.

        Raises:
            JudgeError: a worker and its replacement both fail to start or misjudge a canary.
        """
        if self._process != os.getpid():
            # This process is a fork; the workers and the lock belong to its parent.
            self._begin()
        with self._lock:
            verdicts = {pair: self._cache[pair] for pair in pairs if pair in self._cache}
            new = [pair for pair in dict.fromkeys(pairs) if pair not in verdicts]
            verdicts |= self._judged(new) if new else {}
            # A timeout or a failure is not cached, so that a later call tries again.
            self._cache |= {k: v for k, v in verdicts.items() if v in JUDGED_VERDICTS}
            for pair in list(self._cache)[:-MAX_REMEMBERED_PAIRS]:
                del self._cache[pair]
        return [verdicts[pair] for pair in pairs]

    def close(self) -> None:
        """End the workers; a later call of `judge` starts new ones."""
        with self._lock:
            _end(self._workers, self._process)

    def _judged(self, pairs: list[Pair]) -> dict[Pair, Verdict]:
        """Judge distinct pairs in parallel, with one thread per worker."""
        waiting, verdicts, progress = deque(pairs), {}, Progress("judging", len(pairs))
        with ThreadPoolExecutor(self._places) as threads:
            try:
                serve = partial(self._serve, waiting=waiting, verdicts=verdicts, progress=progress)
                places = [threads.submit(serve, place) for place in range(self._places)]
                # The first failure is raised immediately.
                for served in as_completed(places):
                    served.result()
            except BaseException:
                # The workers are killed, so that the threads that wait for them stop at once. This
                # is also done after Ctrl-C.
                waiting.clear()
                for worker in list(self._workers.values()):
                    worker.kill()
                raise
        return verdicts

    def _serve(
        self, place: int, waiting: deque[Pair], verdicts: dict[Pair, Verdict], progress: Progress
    ) -> None:
        """Let worker number `place` judge waiting pairs until there are none; fill `verdicts`."""
        worker = None
        while waiting and (worker := worker or self._proved(place, waiting)):
            try:
                pair = waiting.popleft()
            except IndexError:
                return
            verdicts[pair] = worker.ask(pair)
            progress.add(1)
            worker = None if worker.lost else worker

    def _proved(self, place: int, waiting: deque[Pair]) -> _Worker | None:
        """Return worker number `place` after it has judged the canaries correctly.

        The result is None if no pair is waiting.
        """
        for last in (False, True):
            worker = self._workers.get(place)
            if worker is None or worker.lost or worker.process.poll() is not None:
                worker = self._replaced(place)
            try:
                return worker if worker.ready(waiting) and worker.prove(self._canaries) else None
            except JudgeError:
                if last:
                    raise
                self._replaced(place)
        return None

    def _replaced(self, place: int) -> _Worker:
        """Replace worker number `place` with a new worker, and return the new worker."""
        if place in self._workers:
            self._workers[place].end()
        self._workers[place] = _Worker(*self._limits)
        return self._workers[place]


class _Worker:
    """Process that runs `verify_worker.py`, in a session that Ctrl-C does not reach."""

    def __init__(self, deadline: float, memory_bytes: int, max_tasks: int) -> None:
        self.pipe, worker_end = Pipe()
        self.deadline, self.started, self.lost = deadline, False, False
        arguments = (worker_end.fileno(), os.getpid(), deadline, memory_bytes, max_tasks)
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT), *map(str, arguments)],
            pass_fds=[worker_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=judge_environment(os.environ),
            start_new_session=True,
        )
        # Only the worker has this end of the pipe now, so the pipe closes when the worker ends.
        worker_end.close()

    def ready(self, waiting: Sequence[Pair]) -> bool:
        """Wait until the worker has started; return False if all pairs are taken before it starts.

        Raises:
            JudgeError: the worker does not start.
        """
        until = time.monotonic() + START_SECONDS
        while not self.started and waiting:
            if self.pipe.poll(LOOK_SECONDS):
                try:
                    word = json.loads(self.pipe.recv_bytes())
                except (EOFError, OSError):
                    word = f"its process ended with exit code {self.process.wait()}"
                if word != "ready":
                    raise JudgeError(f"the judge of answers does not start: {word}")
                self.started = True
            elif time.monotonic() > until:
                raise JudgeError(f"the judge of answers did not start in {START_SECONDS:g} s")
        return self.started

    def prove(self, canaries: Mapping[Pair, Verdict]) -> bool:
        """Return True if the worker judges every canary correctly.

        Raises:
            JudgeError: the worker judges a canary wrongly or too slowly.
        """
        for pair, expected in canaries.items():
            judged, (gold, answer) = self.ask(pair), pair
            if judged is expected:
                continue
            if judged is Verdict.TIMEOUT:
                raise JudgeError(
                    f"the judge of answers is too slow: gold {gold} and answer {answer}, which "
                    "usually take milliseconds, were not judged within the deadline of "
                    f"{self.deadline:g} s: raise dataset.judge_seconds, or reduce the load on "
                    "this machine"
                )
            raise JudgeError(
                f"the judge of answers is broken: with gold {gold}, answer {answer} is "
                f"{expected.value}, but the verdict was {judged.value}: install math-verify, sympy "
                "and latex2sympy2_extended in the versions of constraints.txt"
            )
        return True

    def ask(self, pair: Pair) -> Verdict:
        """Return the verdict on one pair; mark the worker as `lost` if it returns no verdict."""
        try:
            self.pipe.send_bytes(json.dumps(pair).encode())
            if self.pipe.poll(self.deadline + GRACE_SECONDS):
                return Verdict(json.loads(self.pipe.recv_bytes()))
        except (EOFError, OSError):
            self.lost = True
            return Verdict.FAILURE
        self.lost = True
        return Verdict.TIMEOUT

    def kill(self) -> None:
        """Kill the worker's processes, which closes the pipe for any thread waiting on it."""
        self.lost = True
        # macOS raises PermissionError for zombies.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the worker's processes and close its pipe."""
        self.kill()
        self.process.wait()
        self.pipe.close()


def _end(workers: dict[int, _Worker], process: int) -> None:
    """End all workers if this process started them; do nothing in a fork."""
    while workers and process == os.getpid():
        workers.popitem()[1].end()


def judge_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a judging process: search paths and locale, but no credentials.

    >>> judge_environment({"PATH": "/bin", "HF_TOKEN": "x", "PYTHONPATH": "y"})
    {'PATH': '/bin', 'PYTHONPATH': 'y', 'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'}
    """
    kept = {name: text for name, text in environ.items() if JUDGE_VARIABLES.fullmatch(name)}
    return kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
