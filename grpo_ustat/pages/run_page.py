"""The page of a run folder, `report.html`: the folder's content, finished or not.

It is made only from files, so the same folder makes the same page wherever it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo_ustat.config.reward_funcs import reward_text
from grpo_ustat.pages.page import (
    NAME,
    Completions,
    Figure,
    Page,
    provenance_line,
    read_figure,
    render,
)
from grpo_ustat.pages.tables import (
    Cell,
    Table,
    count_text,
    rows_table,
)
from grpo_ustat.runs import history
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.record import RunRecord
from grpo_ustat.runs.status import duration_text
from grpo_ustat.terminal.console import warn

PREDICTED_CAPTION = "Predictions are lines, measurements markers with 95 % intervals"


def nothing_follows(run: RunRecord) -> str:
    """Return no command to type next."""
    return ""


def no_overview(run: RunRecord) -> Table | None:
    """Return no table of the main result."""
    return None


@dataclass(frozen=True)
class RunView:
    """The parts of a page that depend on the command whose run it shows."""

    title: Callable[[RunRecord], str]
    # The answer in one sentence, of an unfinished run its progress.
    answer: Callable[[RunRecord], str]
    # Settings and costs by name.
    facts: Callable[[RunRecord], list[tuple[str, Cell]]]
    tables: Callable[[RunRecord], list[Table]]
    # Sentences beside the answer.
    notes: Callable[[RunRecord], list[str]]
    # Of the figures that the command draws, by the name of the file: title, caption, data.
    figures: Mapping[str, tuple[str, str, str | None]]
    # The command to type next; "" where there is none.
    following: Callable[[RunRecord], str] = nothing_follows
    # The table of the main result, and the name of its picture; "" where there is none.
    overview: Callable[[RunRecord], Table | None] = no_overview
    lead: str = ""


def leave_page(folder: RunFolder, view: RunView, result: dict[str, Any] | None = None) -> None:
    """Write the run's `report.html`; a failure is a warning, and never costs the run.

    Args:
        result: content of `result.json`, which is written last of all; None while it is unfinished.
    """
    try:
        final = result and result | {"config_hash": folder.config_hash}
        folder.write(NAME, render(run_page(folder.path, view, final, datetime.now(UTC))))
    except Exception as error:
        # The page is a view of the run's files: no failure of it may end the run.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        warn(f"{folder.path / NAME} could not be made, the run goes on without it: {reason}")


def run_page(
    folder: Path,
    view: RunView,
    result: dict[str, Any] | None = None,
    now: datetime | None = None,
) -> Page:
    """Return the page of a run folder of `train`, `mse` or `gap`.

    Args:
        result: content of `result.json`, where that is not written yet.
        now: the end of the launch under way; None where none is.
    """
    run = RunRecord(folder, result=result)
    figures = _figures(run, view.figures)
    lead = figures.pop(view.lead, None)
    rows, sentence = run.completions()
    final = run.result or {}
    if final.get("pool_completions"):
        sentence += (
            f" The pool holds {final['pool_completions']} of each of {final.get('questions')} "
            "questions."
        )
    facts: list[tuple[str, Cell]] = []
    if run.command != "gap":
        value = run.value
        model = f"{value('model.name')} ({value('model.model_name_or_path')})"
        facts = [
            ("Model", f"{model}, {value('model.dtype')} on {value('launch.device')}"),
            ("Data set", str(value("dataset.name"))),
            ("Prompt", str(value("prompt.name"))),
            ("Seed", str(value("seed"))),
        ]
        functions, weights = value("reward_funcs"), value("reward_weights")
        if isinstance(functions, list) and isinstance(weights, list | None):
            facts.append(("Reward", reward_text(list(map(str, functions)), weights) or "task"))
    facts += view.facts(run)
    page_tables, provenance = view.tables(run), ""
    starts = [row for row in run.launches if row.get("event") == "start"]
    if timed := [row for row in starts if "time" in row]:
        last = timed[-1]
        provenance = provenance_line("started", last["time"], last.get("host"), last.get("command"))
    if len(starts) > 1:
        page_tables.append(rows_table("Starts and ends", run.launches))
    return Page(
        title=view.title(run),
        answer=view.answer(run),
        next_step=view.following(run),
        # The run's own notes are complete once all files are read.
        notes=[*view.notes(run), *run.notes],
        facts=[*facts, *_provenance(run, now)],
        lead=lead,
        overview=view.overview(run),
        figures=[*figures.values()],
        tables=page_tables,
        completions=Completions(rows, sentence) if rows else None,
        configurations={run.label: run.config},
        provenance=provenance,
    )


def _figures(
    run: RunRecord, catalogue: Mapping[str, tuple[str, str, str | None]]
) -> dict[str, Figure]:
    """Return every SVG of the folder by its name, those that our runs draw first."""
    files = {file.stem: file for file in sorted(run.folder.glob("*.svg"))}
    figures: dict[str, Figure] = {}
    for name in [name for name in catalogue if name in files] + sorted(set(files) - set(catalogue)):
        title, caption, data = catalogue.get(name, (name, "", None))
        if data is None or not (run.folder / data).is_file():
            caption, data = "", None
        figure, wrong = read_figure(files[name], title, caption, data)
        if figure is None:
            run.add_note(f"{name}.svg is not shown: {wrong}")
        else:
            figures[name] = figure
    return figures


def _provenance(run: RunRecord, now: datetime | None) -> list[tuple[str, Cell]]:
    """Return wall and worker time, starts, commit, versions and fingerprint."""
    result = run.result or {}
    cost = result.get("cost") or {}
    wall, own_time = history.wall_seconds(run.launches, now), []
    if "seconds" in result:
        own_time = [("Wall time of training steps", duration_text(result["seconds"]))]
    elif "seconds_generate" in cost:
        own_time = [
            (
                "Worker time, summed over workers",
                f"{cost['seconds_generate']:.1f} s generating, "
                f"{cost['seconds_score']:.1f} s scoring",
            )
        ]
    elif wall is None:
        wall = cost.get("seconds")
    starts = sum(row.get("event") == "start" for row in run.launches)
    resumed = [str(row.get("step")) for row in run.launches if row.get("event") == "resumed"]
    again = f"; resumed from step {', '.join(resumed)}" if resumed else ""
    commit = run.commit or "not from a git repository"
    diff = run.code.get("diff") or ""
    if diff:
        commit += f", with {len(diff.splitlines())} lines of uncommitted changes"
    versions = run.code.get("versions") or {}
    return [
        ("Wall time", None if wall is None else duration_text(wall)),
        *own_time,
        ("Started", f"{count_text(starts, 'time')}{again}"),
        ("Commit", commit),
        ("Versions", "\n".join(f"{name} {number}" for name, number in versions.items())),
        ("Hash of the configuration", result.get("config_hash")),
        ("Folder", "/".join(run.folder.absolute().parts[-2:])),
    ]


def spaced(count: int, most: int) -> list[int]:
    """Return at most so many places of `count`, evenly spaced, with the first and the last.

    >>> spaced(3, 5), spaced(9, 3)
    ([0, 1, 2], [0, 4, 8])
    """
    number = min(count, most)
    return [round(i * (count - 1) / max(number - 1, 1)) for i in range(number)]
