"""A report as one page: the answer, what is missing, figures, tables, how the runs differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
from pyarrow import compute, parquet

from grpo_ustat.nested import flat
from grpo_ustat.reports.accuracy import Cell
from grpo_ustat.reports.figures import line_of
from grpo_ustat.reports.found import Run
from grpo_ustat.reports.sheets import Sheet
from grpo_ustat.runs import completions
from grpo_ustat.runs.page import Completions, Figure, Page, Table, differences

if TYPE_CHECKING:
    from grpo_ustat.reports.report import Report

MOST_COMPLETIONS = 2000  # of all runs together


def page(made: Report) -> Page:
    """What `page.render` is given.

    Args:
        made: a report whose files are written.
    """
    runs = made.found.runs
    figures = [_figure(made.folder, sheet) for sheet in made.sheets if sheet.drawn is not None]
    tables = {sheet.name: _table(sheet) for sheet in made.sheets}
    overview = tables.pop("theorems", None)
    rows, which = _completions(made.trained)
    return Page(
        title=f"Report {made.folder.name}: {len(runs)} runs",
        answer=" ".join(made.answers),
        notes=made.said,
        facts=_facts(made),
        overview=overview,
        figures=[*made.pictures, *figures],
        tables=list(tables.values()),
        completions=Completions(rows, which) if rows else None,
        difference=differences({run.label: run.config for run in runs}) if len(runs) > 1 else None,
        configuration=_shared([flat(run.config) for run in runs]),
    )


def _table(sheet: Sheet) -> Table:
    return Table(sheet.title, sheet.columns, sheet.rows, " ".join(sheet.notes))


def _figure(folder: Path, sheet: Sheet) -> Figure:
    svg = (folder / f"{sheet.name}.svg").read_text()
    return Figure(sheet.title, svg, " ".join(sheet.drawn), f"{sheet.name}.csv")


def _facts(made: Report) -> list[tuple[str, str | int | float | None]]:
    """What was run and what it took; completions of beds are no model's, and counted apart."""
    runs = made.found.runs
    of_models = [run for run in runs if run.entry != "gap"]
    of_beds = [run for run in runs if run.entry == "gap"]
    facts = [
        ("Runs", _counted(run.state.name for run in runs)),
        ("Entries", _counted(run.entry for run in runs)),
    ]
    if of_models:
        facts += [
            ("Policies", _counted(run.policy for run in of_models)),
            ("Questions of", _counted(run.dataset for run in of_models)),
            ("Rollouts of the finished", _spent(of_models, "rollouts")),
            ("Tokens of the finished", _spent(of_models, "tokens")),
        ]
    if of_beds:
        facts += [
            ("Beds", _counted(run.policy for run in of_beds)),
            ("Completions drawn from beds", _spent(of_beds, "rollouts")),
        ]
    return [
        *facts,
        ("Commits", _counted((run.commit or "unknown")[:12] for run in runs)),
        ("Package", _counted(_version(run.result) for run in runs if run.result is not None)),
    ]


def _counted(names) -> str:
    """Each name once, with how often it comes where there are several."""
    counts = Counter(names)
    several = len(counts) > 1 or sum(counts.values()) > 1
    return "; ".join(f"{name} ({count})" if several else name for name, count in counts.items())


def _spent(runs: Sequence[Run], name: str) -> int:
    """By the finished."""
    results = [run.result for run in runs if run.result is not None]
    return sum(result.get("cost", result).get(name) or 0 for result in results)


def _version(result: dict[str, Any]) -> str:
    return f"grpo-ustat {result.get('versions', {}).get('grpo-ustat', 'of unknown version')}"


def _shared(configs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What all runs have in common, by dotted key."""
    if not configs:
        return None
    first, *others = configs
    return {key: x for key, x in first.items() if all(key in o and o[key] == x for o in others)}


def _completions(runs: Sequence[Run]) -> tuple[list[dict[str, Any]], str]:
    """Those of every run's last logged step, and which they are."""
    rows: list[dict[str, Any]] = []
    for run in runs:
        table = _last_step(run.folder / completions.NAME)
        room = MOST_COMPLETIONS - len(rows)
        rows += [
            {"run": run.label} | row for row in (table or pyarrow.table({})).to_pylist()[:room]
        ]
    which = f"Those kept of the last logged step of each run, at most {MOST_COMPLETIONS} in all."
    return rows, which


def _last_step(file: Path) -> pyarrow.Table | None:
    """None where the file is not there or not whole, which the run's own page says."""
    try:
        table = parquet.read_table(file, schema=completions.COLUMNS)
    except (OSError, ValueError):
        return None
    return table.filter(compute.equal(table["step"], compute.max(table["step"])))


def best_sentence(cells: Sequence[Cell]) -> str:
    """The best cell of each series, and how many others are not told from it.

    Args:
        cells: of `BY_BUDGET`.
    """
    said = []
    for series in dict.fromkeys(cell["series"] for cell in cells):
        mine = [cell for cell in cells if cell["series"] == series]
        (best,) = (cell for cell in mine if cell["best"])
        alike = sum(cell["distinct"] is False for cell in mine)
        others = f"; {alike} of the {len(mine) - 1} other cells are not told from it"
        said.append(
            f"{line_of(best)}: held-out accuracy at step {best['step']} is largest at "
            f"G = {best['group_size']}, {best['accuracy']:.3f} [{best['low']:.3f}, "
            f"{best['high']:.3f}] over {best['over']}{others if len(mine) > 1 else ''}."
        )
    return " ".join(said)


def scaling_sentence(studies: Sequence[Run]) -> str:
    """G* of every policy."""
    said = []
    for run in studies:
        best, low, high = (run.result["scaling"][f"gstar{end}"] for end in ("", "_low", "_high"))
        found = "has no finite interval" if low is None else f"= {best:.1f} [{low:.1f}, {high:.1f}]"
        said.append(f"{run.policy} on {run.config['dataset']['name']}: G* {found}.")
    return " ".join(said)
