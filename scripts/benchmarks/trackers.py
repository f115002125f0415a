"""What a tracker that fails does to a run: to its results, its rows, its steps and its end.

    python scripts/benchmarks/trackers.py
    python scripts/benchmarks/trackers.py --steps 40 --only "hangs in log" "server: 401"

A run without a tracker and runs with one, fault by fault, each a fork of this process. The real
wandb speaks to a server on loopback that refuses, fails or hangs; where a tracker itself is to
fail, a stub of wandb does. `equal`: metrics, evaluations, result and final weights of both, bit by
bit but for the clock. `waited`: seconds at the end, `logger.finish_seconds` at most.

Two runs one after the other differ by 10 % and more in the machine's own speed, so times are
compared within a run: the tracker's processes, which are not the run's, stand still (SIGSTOP) in
half of the blocks of steps and do all of their work in the others. Ratios are medians over four
neighbouring blocks, awake over asleep, of wall time and of the run's own CPU time, with
distribution-free 95 % intervals (order statistics); the control has no process to stop.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from scipy.stats import binom

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from wandb_server import WandbServer  # noqa: E402

from grpo_ustat.cli.compose import compose_config  # noqa: E402
from grpo_ustat.mirror import follow  # noqa: E402
from grpo_ustat.runs import log  # noqa: E402
from grpo_ustat.runs.folder import RunFolder  # noqa: E402
from grpo_ustat.train import trainer  # noqa: E402

WARM, BLOCK = 4, 4  # first steps of a run, which do not count; steps between turns
STUBBED = (
    "raises in import", "raises in init", "raises in log", "slow in log", "hangs in init",
    "hangs in log", "exits in log", "fills memory in log", "prints in log",
)  # fmt: skip
SERVER = {"healthy": None, "401": 401, "500": 500, "drops": "drop", "hangs": "hang"}
CLOCK = ("seconds", "step_time", "versions", "config_hash")


@dataclass
class Case:
    """One row of the table."""

    name: str
    logger: str = "wandb"
    environment: dict[str, str] = field(default_factory=dict)
    fault: int | str | None = None  # of the server
    during: Callable[[], None] | None = None


@dataclass
class Ran:
    """What one run left: its exit code, ratios of its blocks' times, seconds waited, folder."""

    code: int
    wall: np.ndarray
    cpu: np.ndarray
    waited: float
    folder: Path


def cases(server: WandbServer, seen: Path) -> list[Case]:
    """All faults, healthy trackers first."""
    stub = {"PYTHONPATH": f"{ROOT / 'tests' / 'stub_trackers'}{os.pathsep}{_path()}"}
    stub |= {"SEEN": str(seen)}
    online = {"PYTHONPATH": _path()} | server.environment
    refused = online | {"WANDB_BASE_URL": "http://127.0.0.1:9"}
    return [
        Case("no tracker (control)", "none"),
        Case("tensorboard", "tensorboard", {"PYTHONPATH": _path()}),
        Case("wandb offline", environment={"PYTHONPATH": _path(), "WANDB_MODE": "offline"}),
        *(Case(f"server: {name}", "wandb", online, fault) for name, fault in SERVER.items()),
        Case("server: connection refused", "wandb", refused),
        *(Case(name, "wandb", stub | {"FAULT": name}) for name in STUBBED),
        Case("mirror killed", "wandb", stub | {"FAULT": ""}, during=_kill_mirror),
    ]


def _path() -> str:
    return os.pathsep.join(path for path in sys.path if path)


def _kill_mirror() -> None:
    mirrors = []
    while not mirrors:
        time.sleep(0.2)
        mirrors = [
            x for x in psutil.Process().children() if "grpo_ustat.mirror.follow" in x.cmdline()
        ]
    mirrors[0].send_signal(signal.SIGKILL)


def run(case: Case, folder: Path, asked: argparse.Namespace) -> Ran:
    """Train once in a fork."""
    pid = os.fork()
    if not pid:
        try:
            _train(case, folder, asked)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    times = json.loads((folder / "times.json").read_text())
    wall, cpu = (awake_over_asleep(x) for x in np.diff(np.array(times["steps"]), axis=0).T)
    return Ran(code, wall, cpu, times["waited"], folder)


def awake_over_asleep(times: np.ndarray) -> np.ndarray:
    """A ratio for each four blocks: awake, asleep, asleep, awake, so that no trend counts.

    >>> awake_over_asleep(np.array([9.0] * 3 + [2.0] * 4 + [1.0] * 8 + [2.0] * 4 + [5.0]))
    array([2.])
    """
    times = times[WARM - 1 :]  # the first time is between the first two steps
    fours = len(times) // (4 * BLOCK)
    blocks = times[: 4 * BLOCK * fours].reshape(fours, 4, BLOCK).mean(axis=2)
    return (blocks[:, 0] + blocks[:, 3]) / (blocks[:, 1] + blocks[:, 2])


def _train(case: Case, folder: Path, asked: argparse.Namespace) -> None:
    folder.mkdir(parents=True)
    output = os.open(folder / "said", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1), os.dup2(output, 2)
    os.environ.update(case.environment)
    times = {"steps": [], "waited": 0.0}
    _timed(times)
    if case.during is not None:
        threading.Thread(target=case.during, daemon=True).start()
    config = compose_config("train", [
        f"logger={case.logger}", f"max_steps={asked.steps}", f"eval_steps={asked.steps}",
        "model=tiny_direct", "max_completion_length=6", "group_size=4", "log_completions=2",
        f"save_steps={asked.steps}", "dataset.test_size=10", f"budget.rollouts={asked.rollouts}",
        *([] if case.logger == "none" else [f"logger.finish_seconds={asked.finish_seconds}"]),
    ])  # fmt: skip
    trainer.fit(config, RunFolder(folder, config))
    (folder / "times.json").write_text(json.dumps(times))


def _timed(times: dict) -> None:
    """Have steps and the wait for the mirror timed, and the mirror stand still in turns."""
    write, finish = log.RunLog.write, follow.Mirroring.finish

    def timed_write(self, *arguments):
        write(self, *arguments)
        done = len(times["steps"]) + 1
        if done >= WARM and (done - WARM) % BLOCK == 0:
            awake = (done - WARM) // BLOCK % 4 in (0, 3)
            _tell_others(signal.SIGCONT if awake else signal.SIGSTOP)
        times["steps"].append((time.perf_counter(), time.process_time()))

    def timed_finish(self, *arguments):
        _tell_others(signal.SIGCONT)
        start = time.perf_counter()
        finish(self, *arguments)
        times["waited"] = time.perf_counter() - start

    log.RunLog.write, follow.Mirroring.finish = timed_write, timed_finish


def _tell_others(number: int) -> None:
    """Send a signal to all processes that this one has started, and to theirs."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.send_signal(number)


def content(folder: Path) -> dict:
    """What a run found, without the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    weights = sorted(folder.glob("checkpoint-*/model.safetensors"))
    return {
        "rows": [_timeless(row) for row in rows],
        "evals": (folder / "eval.csv").read_text(),
        "result": _timeless(json.loads((folder / "result.json").read_text())),
        "weights": [file.read_bytes() for file in weights],
    }


def _timeless(values: dict) -> dict:
    return {k: x for k, x in values.items() if not any(word in k for word in CLOCK)}


def median(values: np.ndarray) -> tuple[float, float, float]:
    """The median with the interval of order statistics that covers it with 95 % or more.

    >>> median(np.arange(1.0, 11.0))
    (5.5, 2.0, 9.0)
    """
    ranked, n = np.sort(values), len(values)
    out = max(0, int(binom.ppf(0.025, n, 0.5)) - 1) if n > 5 else 0
    return float(np.median(ranked)), float(ranked[out]), float(ranked[n - 1 - out])


def row(case: Case, ran: list[Ran], without: Ran, steps: int) -> str:
    """A line of the table."""
    held = [content(one.folder) for one in ran]
    equal, expected = all(one == content(without.folder) for one in held), steps * len(ran)
    lost = expected - sum(len(one["rows"]) for one in held)
    codes = ",".join(sorted({str(one.code) for one in ran}))
    waited = max(one.waited for one in ran)
    said = f"{codes:>5}{'yes' if equal else 'NO':>7}{lost:>6}{ratios(ran)}{waited:>9.1f}"
    return f"{case.name:28}{said}"


def ratios(ran: list[Ran]) -> str:
    """Of wall time and of CPU time."""
    return "".join(
        "{:8.3f} [{:.3f}, {:.3f}]".format(*median(np.concatenate([getattr(x, kind) for x in ran])))
        for kind in ("wall", "cpu")
    )


def main() -> None:
    """Print the table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--finish-seconds", type=float, default=3)
    parser.add_argument("--only", nargs="*", help="names of rows")
    asked = parser.parse_args()
    print(f"{'fault':28}{'exit':>5}{'equal':>7}{'lost':>6}{'wall time ratio':>24}", end="")
    print(f"{'CPU time ratio':>24}{'waited':>9}", flush=True)
    server, every = WandbServer(), []
    with tempfile.TemporaryDirectory() as place:
        without = run(Case("none", "none"), Path(place) / "without", asked)
        for number, case in enumerate(cases(server, Path(place) / "seen")):
            if asked.only and case.name not in asked.only:
                continue
            server.fault = case.fault
            folders = [Path(place) / f"{number}-{turn}" for turn in range(asked.rounds)]
            ran = [run(case, folder, asked) for folder in folders]
            print(row(case, ran, without, asked.steps), flush=True)
            every += ran if case.logger != "none" else []
        if every:
            print(f"{'all trackers together':46}{ratios(every)}")
    server.close()


if __name__ == "__main__":
    main()
