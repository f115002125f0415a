"""What the entrypoints share: compose, check, run; errors in one line."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from grpo_ustat.checks import ConfigError
from grpo_ustat.composing import CONF, asked_for, check_trust, composed_alone
from grpo_ustat.config import SCHEMAS, typed
from grpo_ustat.launch.job import REFUSALS, run
from grpo_ustat.launch.parent import RanksFailed
from grpo_ustat.launch.requeue import leave
from grpo_ustat.launch.tasks import join_tasks
from grpo_ustat.ranks import RefusedByRank, barrier, is_main
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.points import Point
from grpo_ustat.signals import Stopped, StopRequest


def main(entry: str) -> None:
    """Compose `conf/<entry>.yaml`, check it, and run it, or the runs of a sweep.

    Everything that can be refused is refused before the first job starts, in one line and with
    exit code 2; in a sweep, for all of its points. A point that fails later does not end its sweep.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))
    try:
        join_tasks()
        if _told(entry):
            return
        asked = asked_for(entry, sys.argv[1:])
        if _shown(entry, asked.points):
            return
        if asked.sweep:
            from grpo_ustat.multirun import run_sweep

            raise SystemExit(run_sweep(entry, asked))
        task = hydra.main(version_base="1.3", config_path=str(CONF), config_name=entry)
        with StopRequest():
            task(_Alone(entry))()
    except ConfigError as error:
        _refuse(error)
    except KeyboardInterrupt:
        if is_main():
            print("interrupted; the same command goes on from there", file=sys.stderr)
        raise SystemExit(130) from None


def report() -> None:
    """Compose `conf/report.yaml`, check it, and report the runs that it names."""
    sys.argv[1:] = map(quoted, sys.argv[1:])
    try:
        if _told("report"):
            return
        composed_alone("report", sys.argv[1:])
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="report")(_report)()
    except ConfigError as error:
        _refuse(error)


def quoted(word: str) -> str:
    """`runs=` with its folders in quotes, which Hydra needs where their names hold `=`.

    >>> quoted("runs=a/seed=0"), quoted("runs=[a/seed=0,b]"), quoted("name=x")
    ("runs='a/seed=0'", "runs=['a/seed=0','b']", 'name=x')
    """
    key, _, value = word.partition("=")
    if key != "runs" or not value or "'" in value or '"' in value:
        return word
    if value[0] == "[" and value[-1] == "]":
        inside = [f"'{x.strip()}'" for x in value[1:-1].split(",") if x.strip()]
        return f"runs=[{','.join(inside)}]"
    return f"runs='{value}'"


def _report(node: DictConfig) -> None:
    from grpo_ustat.reports.report import report_runs

    config, folder = typed(node, SCHEMAS["report"]), Path(HydraConfig.get().runtime.output_dir)
    try:
        report_runs(config.patterns, folder, config.steps)
    except ConfigError as error:
        with suppress(OSError):  # Hydra has made them
            folder.rmdir()
            folder.parent.rmdir()
        _refuse(error)


@dataclass(frozen=True)
class _Alone:
    """The one run of a command line without a sweep, as Hydra's task."""

    entry: str

    def __call__(self, node: DictConfig) -> float | None:
        config = typed(node, SCHEMAS[self.entry])
        folder = RunFolder(Path(HydraConfig.get().runtime.output_dir), config)
        try:
            check_trust(config, get_args_parser().parse_args(sys.argv[1:]).overrides)
            return run(self.entry, config, folder)
        except Stopped as stopped:
            leave(stopped, config.on_existing)
        except REFUSALS as error:
            folder.leave()
            _refuse(error, code=1 if isinstance(error, RanksFailed) else 2)


def _refuse(error: Exception, code: int = 2) -> NoReturn:
    everywhere = isinstance(error, RefusedByRank)
    if is_main() or not everywhere:
        print(f"error: {error}", file=sys.stderr)
    if everywhere:
        barrier()  # a rank that ends earlier makes the launcher end rank 0 before it has printed
    raise SystemExit(code)


def _told(entry: str) -> bool:
    """Whether help or shell completion was asked for instead of a run; prints it."""
    words = get_args_parser().parse_args(sys.argv[1:])
    asked = words.help or words.shell_completion
    if asked and is_main():
        gc.disable()  # a quarter of the time, and the process ends before it matters
        if words.help:
            from grpo_ustat.help import show_help as tell
        else:
            from grpo_ustat.completion import complete as tell
        tell(entry, words)
    return asked


def _shown(entry: str, points: list[Point]) -> bool:
    """Whether prompts or costs were asked for instead of runs; prints them."""
    asked = [point.config for point in points if point.config.show_prompts]
    costs = any(point.config.dry_run for point in points)
    if asked and is_main():
        from grpo_ustat.runs.prompts import show_prompts

        for config in asked:
            show_prompts(config, {"train": "train", "mse": "study"}[entry])
    elif costs and is_main():
        if entry == "gap":
            from grpo_ustat.theorems.plan import show_plan as show_costs
        else:
            from grpo_ustat.runs.cost_table import show_costs
        show_costs(points)
    return bool(asked) or costs
