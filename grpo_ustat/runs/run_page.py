"""The page of a run folder, `report.html`: what the folder holds, finished or not.

It is made from files alone, so the same folder makes the same page wherever it is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_ustat.runs.contents import Contents
from grpo_ustat.runs.entries import entry_of
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.gap_page import gap_answer, gap_facts, gap_tables, gap_title
from grpo_ustat.runs.log import warn
from grpo_ustat.runs.mse_page import mse_answer, mse_facts, mse_tables, mse_title
from grpo_ustat.runs.page import NAME, Cell, Completions, Figure, Page, Table, render
from grpo_ustat.runs.svg import inlined
from grpo_ustat.runs.train_page import (
    rows_table,
    train_answer,
    train_facts,
    train_tables,
    train_title,
)

PARTS = {  # title, answer, facts, tables
    "train": (train_title, train_answer, train_facts, train_tables),
    "mse": (mse_title, mse_answer, mse_facts, mse_tables),
    "gap": (gap_title, gap_answer, gap_facts, gap_tables),
}
ERRORS = "Mean squared error of the gradient against group size"
PREDICTED = "Predictions are lines, measurements markers with 95 % intervals"
FIGURES = {  # that our runs draw: title, caption, data
    "train": {"learning": ("How training went", "Numbers:", "metrics.jsonl")},
    "mse": {
        "figure": (ERRORS, "Numbers:", "curves.csv"),
        "scaling": ("Error at a fixed number of rollouts against group size", "", None),
    },
    "gap": {"figure": (PREDICTED, "Numbers:", "curves.csv")},
}


def leave_page(folder: RunFolder, result: dict[str, Any] | None = None) -> None:
    """Write the run's `report.html`; whatever goes wrong is said, and never costs the run.

    Args:
        folder: of the run.
        result: what it found, as `result.json` will say last of all; None while it is unfinished.
    """
    try:
        found = result and result | {"config_hash": folder.config_hash}
        folder.write(NAME, render(run_page(folder.path, found)))
    except Exception as error:  # of any kind: the page is a view of what the run is
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        warn(f"{folder.path / NAME} could not be made, the run goes on without it: {reason}")


def run_page(folder: Path, result: dict[str, Any] | None = None) -> Page:
    """The page of a run folder of `train`, `mse` or `gap`.

    Args:
        folder: of the run.
        result: what it found, where `result.json` is not written yet.
    """
    run = Contents(folder, result)
    entry = entry_of(run.config)
    title, answer, facts, tables = PARTS[entry]
    figures, (rows, which) = _figures(run), run.completions()
    which += _of_pool(run)
    own = _notes(run) if entry == "gap" else _summary(run, entry == "train")
    return Page(
        title=title(run),
        answer=answer(run),
        notes=[*own, *run.notes],
        facts=[*([] if entry == "gap" else _asked(run)), *facts(run), *_provenance(run)],
        figures=figures,
        tables=[*tables(run), *_launches(run)],
        completions=Completions(rows, which) if rows else None,
        configuration=run.config,
    )


def _notes(run: Contents) -> list[str]:
    """Of a study of a theorem."""
    result = run.result or {}
    return [*filter(None, [result.get("statement")]), *result.get("notes", [])]


def _summary(run: Contents, train: bool) -> list[str]:
    """The run's own words, but for what the answer says; warnings apart."""
    text = (run.result or {}).get("summary", "")
    first, *warnings = text.split(" WARNING: ")
    left_out = (run.result or {}).get("left_out") or {}
    dropped = [f"WARNING: {count} questions left out: {why}" for why, count in left_out.items()]
    own = [first] if first and not train else []
    return own + [f"WARNING: {warning}" for warning in warnings] + dropped


def _figures(run: Contents) -> list[Figure]:
    """Every SVG of the folder, ours first."""
    files = {file.stem: file for file in sorted(run.path.glob("*.svg"))}
    found, known = [], FIGURES[entry_of(run.config)]
    for name in [name for name in known if name in files] + sorted(set(files) - set(known)):
        title, caption, data = known.get(name, (name, "", None))
        try:
            svg = files[name].read_text()
            inlined(svg, "figure")
        except (OSError, ValueError) as error:
            run.notes.append(f"{name}.svg is not shown: {' '.join(str(error).split())[:200]}")
            continue
        there = data if data and (run.path / data).is_file() else None
        found.append(Figure(title, svg, caption if there else "", there))
    return found


def _of_pool(run: Contents) -> str:
    result = run.result or {}
    size, questions = result.get("pool_completions"), result.get("questions")
    return f" The pool holds {size} of each of {questions} questions." if size else ""


def _asked(run: Contents) -> list[tuple[str, Cell]]:
    """Model and questions."""
    value = run.value
    model = f"{value('model.name')} ({value('model.model_name_or_path')})"
    precision = f"{value('model.dtype')} on {value('launch.device')}"
    return [
        ("Model", f"{model}, {precision}"),
        ("Questions of", str(value("dataset.name"))),
        ("Prompt", str(value("prompt.name"))),
        ("Seed", str(value("seed"))),
    ]


def _provenance(run: Contents) -> list[tuple[str, Cell]]:
    """Time, commit, versions and identity."""
    diff = run.code.get("diff") or ""
    commit = run.code.get("commit") or "not from a git repository"
    changed = f", with {len(diff.splitlines())} lines of uncommitted changes" if diff else ""
    versions = run.code.get("versions") or {}
    starts = sum(row.get("event") == "start" for row in run.launches)
    resumed = [str(row.get("step")) for row in run.launches if row.get("event") == "resumed"]
    again = f"; went on from step {', '.join(resumed)}" if resumed else ""
    return [
        ("Time", _duration(run)),
        ("Starts", f"{starts}{again}"),
        ("Commit", f"{commit}{changed}" if diff else commit),
        ("Versions", "\n".join(f"{name} {number}" for name, number in versions.items())),
        ("Fingerprint", (run.result or {}).get("config_hash")),
        ("Folder", "/".join(run.path.absolute().parts[-2:])),
    ]


def _duration(run: Contents) -> str | None:
    result = run.result or {}
    cost = result.get("cost") or {}
    if "seconds" in result:
        return f"{result['seconds']:.1f} s of steps"
    if "seconds" in cost:
        return f"{cost['seconds']:.1f} s"
    if cost:
        return "{seconds_generate:.1f} s generating, {seconds_score:.1f} s scoring".format(**cost)
    return None


def _launches(run: Contents) -> list[Table]:
    """The story of a run that was started more than once."""
    if sum(row.get("event") == "start" for row in run.launches) < 2:
        return []
    return [rows_table("Starts and ends", run.launches)]
