"""What a run writes while it runs: metrics.jsonl, and progress on the terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from grpo_ustat.runs.completions import CompletionLog


class MetricsLog:
    """`metrics.jsonl`, one row a step, flushed at once.

    Args:
        folder: the run folder.
        keep_up_to: rows of later steps are dropped: a resumed run writes them again.
    """

    def __init__(self, folder: Path, keep_up_to: int):
        self._file = folder / "metrics.jsonl"
        text = self._file.read_text() if self._file.is_file() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()  # a killed run may leave half a line
        kept = [line for line in whole if json.loads(line)["step"] <= keep_up_to]
        staged = self._file.with_name(".metrics.jsonl.tmp")
        staged.write_text("".join(line + "\n" for line in kept))
        os.replace(staged, self._file)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row."""
        with self._file.open("a") as file:
            file.write(json.dumps({"step": row["step"], **row}, allow_nan=False) + "\n")


class RunLog:
    """What rank 0 writes as training goes: metrics.jsonl and completions.parquet.

    Args:
        folder: the run folder.
        keep_up_to: rows of later steps are dropped: a resumed run writes them again.
    """

    def __init__(self, folder: Path, keep_up_to: int):
        self._metrics = MetricsLog(folder, keep_up_to)
        self._completions = CompletionLog(folder, keep_up_to)

    def write(self, row: dict[str, Any], completions: list[dict[str, Any]]) -> None:
        """A step's metrics, at once, and its completions, until they are kept."""
        self._metrics.write(row)
        self._completions.add(completions)

    def sync(self) -> None:
        """Put what waits on the disk; before each checkpoint, which then has all rows up to it.

        Raises:
            OSError: it is not; nothing is lost, the next call tries again.
        """
        self._completions.sync()


def progress_bar(text: str, shown: bool = True) -> Progress:
    """A bar on standard error with counts and the time left; without a terminal it stays quiet."""
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not shown)


class TrainingBar:
    """Steps done, mean reward, time left; a plain line for each evaluation.

    Args:
        max_steps: where training ends.
        done: steps done before.
        shown: False on ranks other than 0.
    """

    def __init__(self, max_steps: int, done: int, shown: bool):
        self._bar = progress_bar("reward {task.fields[reward]:.3f}  step", shown)
        self._task = self._bar.add_task("train", total=max_steps, completed=done, reward=0.0)

    def __enter__(self) -> TrainingBar:
        self._bar.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._bar.stop()

    def step(self, reward: float) -> None:
        """One step more."""
        self._bar.update(self._task, advance=1, reward=reward)

    def evaluated(self, row: dict[str, Any]) -> None:
        """Show an evaluation."""
        self._print(
            f"step {row['step']}: held-out accuracy {row['accuracy']:.3f} "
            f"[{row['low']:.3f}, {row['high']:.3f}], n = {row['n']}, {row['decoding']}"
        )

    def alarm(self, line: str) -> None:
        """Show what goes wrong, in red."""
        self._print(f"ALARM {line}", style="bold red")

    def _print(self, line: str, **options: Any) -> None:
        if not self._bar.disable:
            plain = dict(highlight=False, markup=False, soft_wrap=True)
            self._bar.console.print(line, **plain, **options)
