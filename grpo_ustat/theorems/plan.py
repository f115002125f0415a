"""`dry_run=true` of a study of a theorem: what it would draw, and how long that takes."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from grpo_ustat.gap_config import GapConfig
from grpo_ustat.runs.duration import Span, said
from grpo_ustat.runs.points import Point

RATE = Span(
    1.5e6, 2e7
)  # completions a second and worker, beds of 2 to 5 outcomes, groups of 2 to 32
ENUMERATED = Span(1.0, 60.0)  # seconds of a study that draws next to nothing


def show_plan(points: list[Point]) -> None:
    """Print a line for each run, and their total."""
    table = Table(box=SIMPLE, pad_edge=False)
    for name in ("study", "bed", "replicates", "steps", "completions", "time"):
        side = "left" if name in ("study", "bed") else "right"
        table.add_column(name, justify=side, no_wrap=name in ("completions", "time"))
    spans = []
    for point in points:
        config, drawn = point.config, completions(point.config)
        spans.append(seconds(config, drawn))
        asked = [getattr(config.study, name, None) for name in ("replicates", "steps")]
        cells = [*map(_said, asked), f"{drawn / 1e6:,.1f} M" if drawn else "-"]
        table.add_row(config.study.kind, config.bed.name, *cells, said(spans[-1]))
    if len(points) > 1:
        table.add_section()
        table.add_row("one after the other", *[""] * 4, said(sum(spans[1:], spans[0])))
    console = Console(highlight=False)
    console.print(table)
    workers = points[0].config.launch.workers
    console.print(
        f"Time: assumed, {RATE.low:.1e} to {RATE.high:.0e} completions a second for each of "
        f"{workers} workers on a core of its own; folders hold less than 10 MB each.",
        markup=False,
    )


def completions(config: GapConfig) -> int:
    """That a study draws; 0 where it enumerates."""
    asked = config.study
    runs = {
        "lemma6": lambda: len(asked.baselines) * (len(asked.constant_rates) + 1) * asked.rollouts,
        "theorem7": lambda: (len(asked.constant_rates) + 1) * sum(
            n for n in asked.rollouts for size in asked.group_sizes if n % size == 0
        ),
        "theorem8": lambda: (len(asked.group_sizes) + 2) * asked.rollouts,
        "corollaries9_10": lambda: 2 * len(asked.group_sizes) * asked.rollouts,
        "proposition13": lambda: asked.num_prompts
        * (sum(asked.group_sizes) + max(asked.group_sizes)),
    }  # fmt: skip
    if asked.kind not in runs:
        return 0
    steps = max(asked.steps) if isinstance(asked.steps, list) else asked.steps
    return runs[asked.kind]() * steps * asked.replicates


def seconds(config: GapConfig, drawn: int) -> Span:
    """Of a study."""
    if not drawn:
        return ENUMERATED
    least, most = (drawn / rate / config.launch.workers for rate in (RATE.high, RATE.low))
    return Span(least, most)


def _said(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "-" if value is None else f"{value:,}".replace(",", " ")
