"""What a tracker that fails does to a run: to its results, its rows, its steps and its end.

    python scripts/bench_trackers.py
    python scripts/bench_trackers.py --steps 20 --rounds 1 --only "hangs in log" "server: 401"

Runs without a tracker and runs with one take turns, fault by fault, each a fork of this process.
The real wandb speaks to a server on loopback that refuses, fails or hangs; where a tracker itself
is to fail, a stub of wandb does. Same seed, so the same step does the same work in both: ratios are
medians over steps of its time with the tracker over its time without, of wall time and of the run's
own CPU time (on a busy machine the second says more), with distribution-free 95 % intervals (order
statistics). `equal`: metrics, evaluations, result and final weights, bit by bit but for the clock.
`waited`: seconds at the end, `logger.finish_seconds` at most.
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
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy.stats import binom

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from wandb_server import WandbServer  # noqa: E402

from grpo_ustat.composing import composed  # noqa: E402
from grpo_ustat.runs import log, mirroring  # noqa: E402
from grpo_ustat.runs.folder import RunFolder  # noqa: E402
from grpo_ustat.training import trainer  # noqa: E402

WARM = 2  # first steps of a run, which do not count
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
    """What one run left: its exit code, times of its steps, seconds waited, folder."""

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
    import psutil

    mirrors = []
    while not mirrors:
        time.sleep(0.2)
        mirrors = [
            x for x in psutil.Process().children() if "grpo_ustat.runs.mirror" in x.cmdline()
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
    wall, cpu = np.diff(np.array(times["steps"]), axis=0)[WARM:].T
    return Ran(code, wall, cpu, times["waited"], folder)


def _train(case: Case, folder: Path, asked: argparse.Namespace) -> None:
    folder.mkdir(parents=True)
    output = os.open(folder / "said", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1), os.dup2(output, 2)
    os.environ.update(case.environment)
    times = {"steps": [], "waited": 0.0}
    _timed(times)
    if case.during is not None:
        threading.Thread(target=case.during, daemon=True).start()
    config = composed("train", [
        f"logger={case.logger}", f"max_steps={asked.steps}", f"eval_steps={asked.steps}",
        "model=tiny_direct", "max_completion_length=6", "group_size=4", "log_completions=2",
        f"save_steps={asked.steps}", "dataset.test_size=10", f"budget.rollouts={asked.rollouts}",
        *([] if case.logger == "none" else [f"logger.finish_seconds={asked.finish_seconds}"]),
    ])  # fmt: skip
    trainer.fit(config, RunFolder(folder, config))
    (folder / "times.json").write_text(json.dumps(times))


def _timed(times: dict) -> None:
    """Have steps and the wait for the mirror timed."""
    write, finish = log.RunLog.write, mirroring.Mirroring.finish

    def timed_write(self, *arguments):
        write(self, *arguments)
        times["steps"].append((time.perf_counter(), time.process_time()))

    def timed_finish(self, *arguments):
        start = time.perf_counter()
        finish(self, *arguments)
        times["waited"] = time.perf_counter() - start

    log.RunLog.write, mirroring.Mirroring.finish = timed_write, timed_finish


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


def row(case: Case, pairs: list[tuple[Ran, Ran]], steps: int) -> str:
    """A line of the table."""
    runs = [run for pair in pairs for run in pair]
    equal = all(content(a.folder) == content(b.folder) for a, b in pairs)
    lost = sum(steps - len(content(a.folder)["rows"]) for a, _ in pairs)
    codes = ",".join(sorted({str(run.code) for run in runs}))
    waited = max(a.waited for a, _ in pairs)
    said = f"{codes:>5}{'yes' if equal else 'NO':>7}{lost:>6}{ratios(pairs)}{waited:>9.1f}"
    return f"{case.name:28}{said}"


def ratios(pairs: list[tuple[Ran, Ran]]) -> str:
    """Of wall time and of CPU time."""
    return "".join(
        "{:8.3f} [{:.3f}, {:.3f}]".format(
            *median(np.concatenate([getattr(a, kind) / getattr(b, kind) for a, b in pairs]))
        )
        for kind in ("wall", "cpu")
    )


def main() -> None:
    """Take turns and print the table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--finish-seconds", type=float, default=3)
    parser.add_argument("--only", nargs="*", help="names of rows")
    asked = parser.parse_args()
    print(f"{'fault':28}{'exit':>5}{'equal':>7}{'lost':>6}{'wall time ratio':>24}", end="")
    print(f"{'CPU time ratio':>24}{'waited':>9}", flush=True)
    server, every = WandbServer(), []
    with tempfile.TemporaryDirectory() as place:
        for number, case in enumerate(cases(server, Path(place) / "seen")):
            if asked.only and case.name not in asked.only:
                continue
            pairs = []
            if not number:
                run(Case("none", "none"), Path(place) / "warm", asked)
            for turn in range(asked.rounds):
                server.fault = case.fault
                folders = [Path(place) / f"{number}-{turn}-{side}" for side in ("with", "without")]
                order = (case, Case("none", "none")) if turn % 2 else (Case("none", "none"), case)
                ran = {one is case: run(one, folders[one is not case], asked) for one in order}
                pairs.append((ran[True], ran[False]))
            print(row(case, pairs, asked.steps), flush=True)
            every += pairs if case.logger != "none" else []
        if every:
            print(f"{'all trackers together':46}{ratios(every)}")
    server.close()


if __name__ == "__main__":
    main()
