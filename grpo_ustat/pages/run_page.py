"""The page `report.html` of a run folder, for finished and unfinished runs.

The page depends only on files in the folder, so it is the same on every machine.
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

PREDICTED_CAPTION = "Predictions (lines) and measurements (markers with 95 % intervals)"


def nothing_follows(run: RunRecord) -> str:
    """Return "" for commands that suggest no next step."""
    return ""


def no_overview(run: RunRecord) -> Table | None:
    """Return None for commands without a table of the main result."""
    return None


@dataclass(frozen=True)
class RunView:
    """Parts of a page that depend on the command that started the run."""

    title: Callable[[RunRecord], str]
    # Returns the answer in one sentence, or the progress of a run that has not finished.
    answer: Callable[[RunRecord], str]
    # Returns settings and costs as pairs of name and value.
    facts: Callable[[RunRecord], list[tuple[str, Cell]]]
    tables: Callable[[RunRecord], list[Table]]
    # Returns sentences shown beside the answer.
    notes: Callable[[RunRecord], list[str]]
    # Title, caption and data file of each figure that the command draws, keyed by the figure's
    # name.
    figures: Mapping[str, tuple[str, str, str | None]]
    # Returns the command to run next; "" if there is none.
    following: Callable[[RunRecord], str] = nothing_follows
    # Returns the table of the main result.
    # `lead` is the name of the figure beside this table; "" if there is no such figure.
    overview: Callable[[RunRecord], Table | None] = no_overview
    lead: str = ""


def leave_page(folder: RunFolder, view: RunView, result: dict[str, Any] | None = None) -> None:
    """Write a run's `report.html`; if this fails, only warn.

    Args:
        result: Content of `result.json`, which is written after the page; None if the run is
            unfinished.
    """
    try:
        final = result and result | {"config_hash": folder.config_hash}
        folder.write(NAME, render(run_page(folder.path, view, final, datetime.now(UTC))))
    except Exception as error:
        # The page only displays the run's files, so an error here must not end the run.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        warn(f"{folder.path / NAME} could not be written; the run continues without it: {reason}")


def run_page(
    folder: Path,
    view: RunView,
    result: dict[str, Any] | None = None,
    now: datetime | None = None,
) -> Page:
    """Return the page of a run folder of `train`, `mse` or `gap`.

    Args:
        result: Content for `result.json`, if the file has not been written yet.
        now: Current time, which counts as the end of the current launch; None if no launch is
            running.
    """
    run = RunRecord(folder, result=result)
    figures = _figures(run, view.figures)
    lead = figures.pop(view.lead, None)
    rows, sentence = run.completions()
    final = run.result or {}
    if final.get("pool_completions"):
        sentence += (
            f" The pool has {final['pool_completions']} completions for each of "
            f"{final.get('questions')} questions."
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
        # `run.notes` is complete only after all files have been read.
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
    """Return the folder's SVG figures by name, those in the catalogue first.

    Args:
        catalogue: Title, caption and data file of known figures, by name.
    """
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
    """Return facts on time, starts, commit, versions, configuration hash and folder."""
    result = run.result or {}
    cost = result.get("cost") or {}
    wall, own_time = history.wall_seconds(run.launches, now), []
    if "seconds" in result:
        own_time = [("Wall time of training steps", duration_text(result["seconds"]))]
    elif "seconds_generate" in cost:
        own_time = [
            (
                "Total worker time",
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
    """Return up to `most` evenly spaced indices into `count` items, including the first and last.

    >>> spaced(3, 5), spaced(9, 3)
    ([0, 1, 2], [0, 4, 8])
    """
    number = min(count, most)
    return [round(i * (count - 1) / max(number - 1, 1)) for i in range(number)]
