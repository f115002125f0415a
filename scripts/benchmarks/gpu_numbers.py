"""Measure rows of the table in docs/numbers.md on a GPU within 40 minutes.

    python scripts/benchmarks/gpu_numbers.py --dry-run             # print composed commands
    python scripts/benchmarks/gpu_numbers.py                       # a second call continues
    python scripts/benchmarks/gpu_numbers.py --local Qwen/Qwen2.5-0.5B-Instruct=FOLDER
    python scripts/benchmarks/gpu_numbers.py --smoke --device cpu  # two rows of tiny_base, a minute

A row describes a policy. The command `train` makes the trained policies, and the command `mse`
measures each policy. See `numbers_table.py`, which also checks the rows. The most valuable rows are
measured first, and rows are written as JSON files to `--out`. A row is skipped if its time,
estimated from finished runs, exceeds the rest of `--minutes`. A row that is still in progress at
the end is stopped, and the next call continues it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from numbers_table import (
    ADAPTER,
    BASE,
    FULL,
    GROUP_SIZE,
    ROLLOUTS,
    ROOT,
    TRL,
    cell_text,
    command_text,
    file_name,
    folders_by_id,
    row_of,
    row_text,
)

from grpo_ustat.cli.compose import parse
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.costs.duration import Plan, duration, number_text, time_text
from grpo_ustat.runs.library import load_run

# Seconds that a stopped run has to finish its step and save.
GRACE_S = 300
# Overrides that choose the data set, the prompt and the completion length.
DATA = {
    "gsm8k": ("dataset=gsm8k", "prompt=gsm8k_chat"),
    "arithmetic": ("dataset=arithmetic", "prompt=plain", "max_completion_length=256"),
    "bare": ("dataset=arithmetic", "prompt=bare"),
}
STUDY = (
    f"objectives=[{TRL}]", f"study.rollouts={ROLLOUTS}", "budget.pool_completions=16",
    "launch.workers=1",
)  # fmt: skip
TRAIN = (f"group_size={GROUP_SIZE}", "log_completions=0")
SIZES = {"mse": ("study.questions=200",), "train": ("budget.rollouts=256", "dataset.test_size=64")}
SMOKE_SIZES = {
    "mse": ("budget=study_smoke", "study.questions=8"),
    "train": ("budget.rollouts=16", "dataset.test_size=8"),
}


@dataclass(frozen=True)
class Cell:
    """A row to be measured: a policy before training or after some training steps."""

    model: str
    data: str
    steps: int = 0
    lora: bool = False

    @property
    def name(self) -> str:
        """Name of the row's files."""
        stage = f"{self.steps}-steps" if self.steps else BASE
        return file_name(self.model, self.data, stage, ADAPTER if self.lora else FULL)

    def commands(self, device: str, smoke: bool) -> list[tuple[str, list[str]]]:
        """Return each run's command and words, the study last; paths are relative to `--out`."""
        common = [*DATA[self.data], f"launch.device={device}"]
        sizes = SMOKE_SIZES if smoke else SIZES
        study = [*STUDY, *sizes["mse"], f"hydra.run.dir=mse/{self.name}"]
        if not self.steps:
            return [("mse", [f"model={self.model}", *common, *study])]
        # Adapters need a learning rate ten times as high as full training.
        rate = 5e-5 if self.lora else 5e-6
        ends = [f"{key}={self.steps}" for key in ("max_steps", "eval_steps", "save_steps")]
        bf16 = ["bf16=true"] if device.startswith("cuda") else []
        adapters = ["lora=r16"] if self.lora else []
        train = [
            f"model={self.model}", *common, *TRAIN, *sizes["train"], *ends, *bf16, *adapters,
            f"learning_rate={rate}", f"hydra.run.dir=train/{self.name}",
        ]  # fmt: skip
        checkpoint = f"model=train/{self.name}/checkpoint-{self.steps}"
        return [("train", train), ("mse", [checkpoint, *common, *study])]


SMALL, LARGE = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"
# Rows in order of decreasing value.
CELLS = (
    Cell(SMALL, "gsm8k"),
    Cell(SMALL, "gsm8k", 20),
    Cell(SMALL, "gsm8k", 20, lora=True),
    Cell(LARGE, "gsm8k"),
    Cell(LARGE, "gsm8k", 20, lora=True),
    Cell(SMALL, "arithmetic"),
    Cell(SMALL, "arithmetic", 20),
    Cell(LARGE, "gsm8k", 20),
    Cell(LARGE, "arithmetic"),
)
SMOKE_CELLS = (Cell("tiny_base", "bare"), Cell("tiny_base", "bare", 2, lora=True))


def measure(options: argparse.Namespace) -> int:
    """Measure missing rows until the time is over; return the number of rows that failed."""
    out, until = options.out.resolve(), time.monotonic() + 60 * options.minutes
    failures = 0
    for cell in SMOKE_CELLS if options.smoke else CELLS:
        file = out / f"{cell.name}.json"
        commands = cell.commands(options.device, options.smoke)
        if file.is_file():
            print(f"{cell.name}: already in {options.out}", flush=True)
            continue
        left = until - time.monotonic()
        plans = [priced(cell, command, words, options) for command, words in commands]
        estimates = [duration(plan).seconds for plan in plans]
        if options.dry_run:
            show(cell, commands, plans)
            continue
        if left <= 0 or sum(filter(None, estimates)) > left:
            needs = time_text(sum(filter(None, estimates)) or None)
            print(f"{cell.name}: skipped; needs {needs}, left: {time_text(max(left, 0))}")
            continue
        print(f"{cell.name}: measuring, {time_text(left)} left; log in {options.out}", flush=True)
        reason = ""
        for command, words in commands:
            words = with_local(words, options.local)
            reason = reason or finish(command, words, out, cell.name, until)
        if reason and time.monotonic() >= until:
            print(
                f"{cell.name}: stopped after {options.minutes:g} minutes; repeat the command to "
                "continue"
            )
            continue
        try:
            if reason:
                raise ValueError(f"{reason} ({cell.name}.log)")
            row = row_of(out / "mse" / cell.name, options.local)
        except ValueError as error:
            failures += 1
            print(f"{cell.name}: failed, {error}", flush=True)
            continue
        file.write_text(row_text(row))
        print(f"{cell.name}: accuracy {cell_text(row, 'accuracy')}, G* {cell_text(row, 'gstar')}",
              flush=True)  # fmt: skip
    return failures


def priced(cell: Cell, command: str, words: list[str], options: argparse.Namespace) -> Plan:
    """Plan a command to check it and estimate its cost; a checkpoint costs as much as its model."""
    base = [word for word in words if not word.startswith(("model=", "hydra.run.dir="))]
    place = f"hydra.run.dir={options.out.resolve() / command}/dry"
    overrides = with_local([f"model={cell.model}", *base, place, "dry_run=true"], options.local)
    planner = importlib.import_module(f"grpo_ustat.{command}.plan")
    return planner.plan(parse(command, overrides).planned_runs[0])


def show(cell: Cell, commands: list[tuple[str, list[str]]], plans: Sequence[Plan]) -> None:
    """Print a row's commands with upper bounds of their costs."""
    print(f"\n{cell.name}")
    for (command, words), plan in zip(commands, plans, strict=True):
        cost, estimate = plan.cost, duration(plan)
        print(f"  {command_text(command, words)}")
        print(f"    {number_text(cost.rollouts)} completions, at most {cost.tokens / 1e6:.1f} M "
              f"tokens, time {time_text(estimate.seconds)}")  # fmt: skip


def finish(command: str, words: list[str], out: Path, name: str, until: float) -> str:
    """Run a command unless it has a result; return the reason for a failure, or an empty text.

    Args:
        command, words: command and words as a user would type them.
        out: working folder.
        name: name of the run's folder and log.
        until: deadline on the monotonic clock, at which the run is told to save and stop.
    """
    folder = out / command / name
    if (folder / "result.json").is_file() and load_run(folder).result is not None:
        return ""
    out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.getenv('PYTHONPATH', '')}"}
    with (out / f"{name}.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "grpo_ustat", command, *words],
            cwd=out, env=environment, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            process.wait(max(until - time.monotonic(), 0))
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as stop:
            process.terminate()
            try:
                process.wait(GRACE_S)
            finally:
                process.kill()
            if isinstance(stop, KeyboardInterrupt):
                raise
    if process.returncode == 0:
        return ""
    lines = (out / f"{name}.log").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {process.returncode}"


def with_local(words: list[str], local: dict[str, str]) -> list[str]:
    """Replace the ids of models and data sets in the words by local folders."""
    words = [
        f"model={local.get(word.partition('=')[2], word.partition('=')[2])}"
        if word.startswith("model=") else word
        for word in words
    ]  # fmt: skip
    if "dataset=gsm8k" in words and "openai/gsm8k" in local:
        words.append(f"dataset.path={local['openai/gsm8k']}")
    return words


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=40.0, help="time limit (default: 40)")
    add("--out", type=Path, default=Path("outputs/numbers"), help="folder of rows, runs and logs")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add(
        "--local",
        nargs="+",
        default=[],
        metavar="ID=FOLDER",
        help="local folders of models and of openai/gsm8k",
    )
    add("--dry-run", action="store_true", help="print each command with its cost and run nothing")
    add("--smoke", action="store_true", help="measure two small rows of tiny_base as a test")
    options = parser.parse_args()
    options.local = folders_by_id(options.local)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(bool(measure(options)))
    except (ConfigError, OSError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "stopped; repeat the command to continue\n")


if __name__ == "__main__":
    main()
