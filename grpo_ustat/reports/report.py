"""A report: what any run folders found, as tables, figures and their data in one folder.

`python -m grpo_ustat.report` makes one of whatever folders it is given, a sweep with `report.name`
one of its own runs. Runs that differ in more than group size, seed and budget are apart; what is
missing, damaged or there twice is named.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_ustat.checks import ConfigError
from grpo_ustat.reports import accuracy, errors, figures
from grpo_ustat.reports.found import CONFIG, Found, Run, entries_in, read
from grpo_ustat.reports.html import best_sentence, page, scaling_sentence
from grpo_ustat.reports.series import label, telling
from grpo_ustat.reports.sheets import Sheet, shorter
from grpo_ustat.reports.theorems import (
    claims_sheet,
    in_order,
    study_figures,
    theorems_sheet,
    verdict_sentence,
)
from grpo_ustat.runs.folder import write_whole
from grpo_ustat.runs.learning import Learning, learning_figure, notes
from grpo_ustat.runs.page import NAME, Figure, render
from grpo_ustat.runs.sweeps import Entry

FILES = re.compile(
    r"(accuracy|accuracy_runs|budget|claims|fixed_n|learning.*|mse|runs|theorems)"
    r"\.(csv|tex|pdf|svg|png)"
)
PANELS = 8  # steps drawn where none are asked for
LINES = 12  # of what is missing, on the terminal and below figures


@dataclass
class Report:
    """What goes into a report's folder.

    Attributes:
        folder: where to.
        found: the runs.
        steps: at which accuracy is shown, None: at every evaluation.
        sheets: its tables, in the order of the page.
        said: lines on what is missing, left out or apart.
        answers: what was found, a sentence each.
        pictures: that studies of theorems drew themselves.
    """

    folder: Path
    found: Found
    steps: Sequence[int] | None
    sheets: list[Sheet] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    pictures: list[Figure] = field(default_factory=list)

    @property
    def theorems(self) -> list[Run]:
        """Finished studies of theorems, as the paper has them."""
        return [run for run in in_order(self.found.runs) if run.result is not None]

    @property
    def studies(self) -> list[Run]:
        """Finished studies."""
        return [run for run in self.found.runs if run.entry == "mse" and run.result is not None]

    @property
    def trained(self) -> list[Run]:
        """Training runs with an evaluation or a step, finished or not."""
        runs = [run for run in self.found.runs if run.entry == "train"]
        return [run for run in runs if run.evals or run.metrics]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.theorems or self.studies or self.trained)


def report_runs(patterns: Sequence[str], folder: Path, steps: Sequence[int] | None) -> None:
    """Report the runs that the patterns match.

    Raises:
        ConfigError: they match nothing that can be shown, or the folder is a run's own.
    """
    if (folder / CONFIG).exists() or (folder / "code.json").exists():
        raise ConfigError(f"{folder} is a run's folder: choose another with name=NAME")
    found = read(entries_in(list(patterns)))
    made = Report(folder, found, steps)
    if made.empty:
        why = [*(run.lacking for run in found.runs), *found.damaged]
        raise ConfigError(f"runs={','.join(patterns)}: nothing to show yet: {'; '.join(why[:3])}")
    there = sorted({row["step"] for run in made.trained for row in run.evals})
    if steps is not None and there and not set(steps) & set(there):
        raise ConfigError(f"steps={steps}: evaluated are {there}")
    write(made)


def report_sweep(entries: Sequence[Entry], folder: Path, steps: Sequence[int] | None) -> None:
    """Report the runs of a sweep, in its order."""
    made = Report(folder, read(list(entries)), steps)
    if made.empty:
        print(f"No run of {folder.name} has anything to report.")
    else:
        write(made)


def write(made: Report) -> None:
    """Make the report: files first, then the terminal."""
    made.folder.mkdir(parents=True, exist_ok=True)
    if (made.folder / NAME).is_file():  # an earlier report, parts of which this one may not have
        for file in made.folder.iterdir():
            if FILES.fullmatch(file.name):
                file.unlink()
    made.said += _said(made.found)
    if made.theorems:
        _report_theorems(made)
    if made.studies:
        _report_studies(made)
    if made.trained:
        _report_training(made)
    made.sheets.append(_runs_sheet(made))
    for sheet in made.sheets:
        sheet.write(made.folder)
    write_whole(made.folder / NAME, render(page(made)))
    _show(made)


def _report_theorems(made: Report) -> None:
    finished = made.theorems
    made.sheets += [theorems_sheet(in_order(made.found.runs)), claims_sheet(finished)]
    made.pictures, unshown = study_figures(finished)
    made.said += unshown
    made.answers.append(verdict_sentence(finished))


def _report_studies(made: Report) -> None:
    studies = made.studies
    asked = telling([run.keys for run in studies], but=())
    found = errors.mse_sheet(studies, asked), errors.scaling_sheet(studies, asked)
    draw = figures.mse_figure, figures.fixed_n_figure
    for sheet, figure in zip(found, draw, strict=True):
        figure(made.folder, sheet.name, studies, [*sheet.drawn, *_missing(made)])
    made.sheets += found
    made.answers.append(scaling_sentence(studies))


def _report_training(made: Report) -> None:
    runs = made.trained
    asked = telling([run.keys for run in runs])
    if asked:
        series = dict.fromkeys(label(run.keys, asked) for run in runs)
        made.said.append(f"{len(series)} series, apart and never averaged, by {', '.join(asked)}")
    made.said += missing_cells(runs, asked)
    rows = accuracy.accuracy_rows(runs, asked)
    if rows:
        _report_accuracy(made, rows)
    _report_learning(made, runs, asked)


def _report_accuracy(made: Report, rows: list[dict[str, Any]]) -> None:
    steps = _steps(made, rows)
    cells = accuracy.accuracy_cells(rows)
    shown = [cell for cell in cells if cell["step"] in steps]
    if not shown:
        return
    sheet = accuracy.accuracy_sheet(shown, cells)
    figures.accuracy_figure(made.folder, sheet.name, shown, [*sheet.drawn, *_missing(made)])
    last = accuracy.accuracy_cells(at_last(rows, steps), accuracy.BY_BUDGET)
    budget = accuracy.budget_sheet(last)
    made.sheets += [sheet, budget]
    made.answers.append(best_sentence(last))


def _report_learning(made: Report, runs: list[Run], asked: Sequence[str]) -> None:
    """A figure per series and budget, a line per group size."""
    lines: dict[str, list[tuple[str, Run]]] = {}
    for run in sorted(runs, key=lambda run: run.config["group_size"]):
        series = " ".join(
            filter(None, (f"n={run.config['budget']['rollouts']}", label(run.keys, asked)))
        )
        lines.setdefault(series, []).append((f"G={run.config['group_size']}", run))
    for place, (series, mine) in enumerate(lines.items(), 1):
        slug = re.sub(r"[^\w.=-]+", "_", series)
        slug = slug if len(slug) <= 80 else f"{slug[:76]}-{place}"  # names of files have an end
        name = "learning" if len(lines) == 1 else f"learning-{slug}"
        drawn = [Learning(line, run.metrics, run.evals) for line, run in mine]
        rows = learning_figure(made.folder, name, drawn)
        if rows:
            made.sheets.append(_learning_sheet(name, series, rows))


def _learning_sheet(name: str, series: str, rows: list[dict[str, Any]]) -> Sheet:
    """Every quantity at the first and the last step that a series has."""
    quantities = list(dict.fromkeys(row["quantity"] for row in rows))
    lines = []
    for one in dict.fromkeys(row["series"] for row in rows):
        ends = [
            [row for row in rows if (row["series"], row["quantity"]) == (one, q)]
            for q in quantities
        ]
        lines.append(
            [one, *(f"{x[0]['mean']:.3g} -> {x[-1]['mean']:.3g}" if x else "-" for x in ends)]
        )
    said = notes(rows)
    return Sheet(
        name=name,
        title=f"Learning, {series}",
        columns=["first -> last step", *quantities],
        rows=lines,
        notes=said,
        data=rows,
        drawn=said,
    )


def _runs_sheet(made: Report) -> Sheet:
    """Every run, how far it is."""
    data = [_run_row(run) for run in made.found.runs]
    names = ["run", "entry", "state", "step", "steps", "accuracy", "verdict"]
    names = [name for name in names if any(row[name] is not None for row in data)]
    rows = [[_plain(row[name]) for name in names] for row in data]
    counts = Counter(run.state.name for run in made.found.runs)
    counts |= Counter(damaged=len(made.found.damaged), missing=len(made.found.absent))
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return Sheet("runs", "Runs", names, rows, [f"{told}.", *made.said], data)


def _run_row(run: Run) -> dict[str, Any]:
    config, state = run.config, run.state
    row = {"run": run.label, "entry": run.entry, "state": state.name}
    row |= {"step": state.step, "steps": state.steps, "policy": run.policy}
    row |= {"dataset": run.dataset, "seed": config["seed"]}
    row |= {"group_size": config.get("group_size")}
    row |= {"rollouts": config.get("budget", {}).get("rollouts")}
    row |= {"accuracy": state.accuracy, "low": state.low, "high": state.high}
    row |= {"verdict": (run.result or {}).get("verdict")}
    return row | {"commit": run.commit, "detail": state.detail}


def _plain(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value)


def _steps(made: Report, rows: Sequence[dict[str, Any]]) -> list[int]:
    """The steps to show; where none are asked for, so many that a reader takes in."""
    there = sorted({row["step"] for row in rows})
    if made.steps is not None:
        lacking = [step for step in made.steps if step not in there]
        if lacking:
            made.said.append(f"no run was evaluated at step {', '.join(map(str, lacking))}")
        return list(made.steps)
    if len(there) <= PANELS:
        return there
    made.said.append(f"{PANELS} of {len(there)} evaluated steps shown, all in accuracy.csv")
    return [there[round(i * (len(there) - 1) / (PANELS - 1))] for i in range(PANELS)]


def at_last(rows: Sequence[dict[str, Any]], steps: Sequence[int]) -> list[dict[str, Any]]:
    """Of each series the rows at the last of the steps that the most (n, G) have reached."""
    found = []
    for series in dict.fromkeys(row["series"] for row in rows):
        mine = [row for row in rows if row["series"] == series and row["step"] in steps]
        cells = {(row["step"], row["rollouts"], row["group_size"]) for row in mine}
        reached = Counter(step for step, *_ in cells)
        last = max(reached, key=lambda step: (reached[step], step), default=None)
        found += [row for row in mine if row["step"] == last]
    return found


def missing_cells(runs: Sequence[Run], asked: Sequence[str]) -> list[str]:
    """A line for every (n, G) of a series that lacks seeds which others of the series have."""
    grids: dict[str, set[tuple[int, int, int]]] = {}
    for run in runs:
        config = run.config
        cell = (config["budget"]["rollouts"], config["group_size"], config["seed"])
        grids.setdefault(label(run.keys, asked), set()).add(cell)
    lines = []
    for series, there in grids.items():
        sizes, groups, seeds = (sorted(set(axis)) for axis in zip(*there, strict=True))
        for n, size in product(sizes, groups):
            lost = [seed for seed in seeds if (n, size, seed) not in there]
            if lost:
                of = " ".join(filter(None, (f"n={n} G={size}", series)))
                lines.append(f"missing: {of}: no run of seed {', '.join(map(str, lost))}")
    return lines


def _said(found: Found) -> list[str]:
    """What is not whole, and what is left out, a line each."""
    lines = [f"unfinished: {run.lacking}" for run in found.runs if run.lacking]
    lines += [f"missing: {line}" for line in found.absent]
    lines += [f"damaged: {line}" for line in found.damaged]
    lines += [f"damaged: {note}" for run in found.runs for note in run.notes]
    lines += [f"twice: {line}" for line in found.twins]
    commits = Counter((run.commit or "unknown")[:8] for run in found.runs)
    if len(commits) > 1:
        told = ", ".join(f"{name} ({count} runs)" for name, count in commits.items())
        lines.append(f"the runs are of several commits: {told}")
    return lines


def _missing(made: Report) -> list[str]:
    """What figures say of it."""
    lines = [line for line in made.said if line.startswith(("unfinished", "missing", "damaged"))]
    return shorter(lines, 3, "runs.tex")


def _show(made: Report) -> None:
    """Tables on the terminal, then what is missing."""
    console = Console(highlight=False)
    budgets = {run.config["budget"]["rollouts"] for run in made.trained}
    for sheet in made.sheets:
        if sheet.name in ("theorems", "mse", "fixed_n", "accuracy") or (
            sheet.name == "budget" and len(budgets) > 1
        ):
            console.print(sheet.table())
    for line in [*made.answers, *shorter(made.said, LINES, "runs.tex")]:
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"Wrote {made.folder}", soft_wrap=True, markup=False)
