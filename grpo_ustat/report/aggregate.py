"""A report: tables, figures and their data of any runs, in one folder.

`grpo-ustat report` makes one of whatever folders it is given, a sweep with `report.name`
one of its own runs. Runs that differ in more than group size, seed and budget are apart; missing,
damaged and repeated runs are named.
"""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from pyarrow import compute, parquet
from rich.console import Console

from grpo_ustat.config.command_line import typed_command
from grpo_ustat.config.schema import ConfigError, flatten
from grpo_ustat.report import accuracy, figures, gradient_error
from grpo_ustat.report.accuracy import AccuracyCell, budget_name
from grpo_ustat.report.collect import RunSet, distinguishing_keys, entries_in, key_label, read_runs
from grpo_ustat.report.decision import WHY_FIXED_ROLLOUTS, decision_sentence
from grpo_ustat.report.learning import MONITORED, Learning, learning_figure, notes
from grpo_ustat.report.page import (
    NAME,
    Completions,
    Figure,
    Page,
    differences,
    made_text,
    render,
)
from grpo_ustat.report.published import published_table
from grpo_ustat.report.settings import ROLLOUTS, SIZE, Axis, setting_labels, swept_axis
from grpo_ustat.report.tables import Cell, Table, best_size, shorten
from grpo_ustat.report.verdicts import (
    claims_table,
    in_order,
    study_figures,
    theorems_table,
    verdict_sentence,
)
from grpo_ustat.runs import log
from grpo_ustat.runs.files import write_whole
from grpo_ustat.runs.record import CODE, CONFIG, RunRecord
from grpo_ustat.runs.status import Entry

FILES = re.compile(
    r"(accuracy|accuracy_runs|budget|claims|fixed_n|learning.*|mse|published_table2|runs|settings|theorems)"
    r"\.(csv|tex|pdf|svg|png)"
)
MOST_STEPS = 8  # with a panel each, where no steps are asked for
MOST_LINES = 12  # on the terminal, of what is missing
MOST_CURVES = 4  # of several G and settings, in one figure of learning
MOST_COMPLETIONS = 2000  # of all runs together


@dataclass
class Report:
    """What goes into a report's folder.

    Attributes:
        folder: where to.
        run_set: the runs, and lines on those that cannot be shown.
        steps: at which accuracy is shown, None: at every evaluation.
        tables: in the order of the page.
        notes: lines on what is missing, left out or apart.
        answers: a sentence on each kind of runs.
        study_figures: that studies of theorems drew themselves.
    """

    folder: Path
    run_set: RunSet
    steps: Sequence[int] | None
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    study_figures: list[Figure] = field(default_factory=list)

    @property
    def runs(self) -> list[RunRecord]:
        """All that can be shown in part or whole."""
        return self.run_set.runs

    @property
    def theorems(self) -> list[RunRecord]:
        """Finished studies of theorems, in the paper's order."""
        return [run for run in in_order(self.runs) if run.result is not None]

    @property
    def studies(self) -> list[RunRecord]:
        """Finished studies of the gradient's error."""
        return [run for run in self.runs if run.command == "mse" and run.result is not None]

    @property
    def training(self) -> list[RunRecord]:
        """Training runs with an evaluation or a step, finished or not."""
        runs = [run for run in self.runs if run.command == "train"]
        return [run for run in runs if run.evals or run.metrics]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.theorems or self.studies or self.training)

    @property
    def missing_notes(self) -> list[str]:
        """For below figures: what is unfinished, missing or damaged."""
        kinds = ("unfinished", "missing", "damaged")
        return shorten([line for line in self.notes if line.startswith(kinds)], 3, "runs.tex")

    @property
    def missing_captions(self) -> list[str]:
        """A line within a figure on how much is unfinished, missing or damaged."""
        kinds = ("unfinished", "missing", "damaged")
        count = sum(line.startswith(kinds) for line in self.notes)
        return [f"{count} lines on what is unfinished, missing or damaged: runs.tex."] * bool(count)


def report_runs(patterns: Sequence[str], folder: Path, steps: Sequence[int] | None) -> None:
    """Report the runs that the patterns match.

    Raises:
        ConfigError: they match nothing that can be shown, or the folder is a run's own.
    """
    if (folder / CONFIG).exists() or (folder / CODE).exists():
        raise ConfigError(f"{folder} is a run's folder: choose another with name=NAME")
    run_set = read_runs(entries_in(patterns))
    run_set.runs.sort(key=lambda run: (run.launches or [{}])[0].get("time", ""))  # as typed
    report = Report(folder, run_set, steps)
    if report.is_empty:
        reasons = [*(run.unfinished for run in report.runs), *report.run_set.damaged]
        raise ConfigError(
            f"runs={','.join(patterns)}: nothing to show yet: {'; '.join(reasons[:3])}"
        )
    evaluated = sorted({row["step"] for run in report.training for row in run.evals})
    if steps is not None and evaluated and not set(steps) & set(evaluated):
        raise ConfigError(f"steps={steps}: evaluated are {evaluated}")
    write_report(report)


def report_sweep(entries: Sequence[Entry], folder: Path, steps: Sequence[int] | None) -> None:
    """Report the runs of a sweep, in its order."""
    report = Report(folder, read_runs(entries), steps)
    if report.is_empty:
        print(f"No run of {folder.name} has anything to report.")
    else:
        write_report(report)


def write_report(report: Report) -> None:
    """Write tables, figures and page, then print the answers, the main tables and the notes."""
    report.folder.mkdir(parents=True, exist_ok=True)
    if (report.folder / NAME).is_file():  # an earlier report, parts of which this one may not have
        for file in report.folder.iterdir():
            if FILES.fullmatch(file.name):
                file.unlink()
    report.notes += run_set_notes(report.run_set)
    if report.theorems:
        _add_theorems(report)
    if report.studies:
        _add_studies(report)
    if report.training:
        _add_training(report)
    report.tables.append(_runs_table(report))
    for table in report.tables:
        table.write(report.folder)
    write_whole(report.folder / NAME, render(page(report)))

    console = Console(highlight=False)
    for line in report.answers:
        console.print(line, markup=False, soft_wrap=True)
    main_tables = {"theorems", "mse", "fixed_n", "accuracy", "settings", "published_table2"}
    if len({run.config["budget"]["rollouts"] for run in report.training}) > 1:
        main_tables.add("budget")
    for table in report.tables:
        if table.name in main_tables:
            console.print(table.terminal())
    for line in shorten(report.notes, MOST_LINES, "runs.tex"):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"Wrote {report.folder}", soft_wrap=True, markup=False)


def run_set_notes(run_set: RunSet) -> list[str]:
    """Lines on what is not whole, and on what is left out."""
    lines = [f"unfinished: {run.unfinished}" for run in run_set.runs if run.unfinished]
    lines += [f"missing: {line}" for line in run_set.absent]
    lines += [f"damaged: {line}" for line in run_set.damaged]
    lines += [f"damaged: {run.label}: {note}" for run in run_set.runs for note in run.notes]
    lines += [f"twice: {line}" for line in run_set.twins]
    commits = Counter((run.commit or "unknown")[:8] for run in run_set.runs)
    if len(commits) > 1:
        counts = ", ".join(f"{name} ({count} runs)" for name, count in commits.items())
        lines.append(f"the runs are of several commits: {counts}")
    return lines


def _add_theorems(report: Report) -> None:
    finished = report.theorems
    report.tables += [theorems_table(in_order(report.runs)), claims_table(finished)]
    report.study_figures, damaged = study_figures(finished)
    report.notes += damaged
    report.answers.append(verdict_sentence(finished))


def _add_studies(report: Report) -> None:
    studies = report.studies
    keys = distinguishing_keys([run.keys for run in studies], ignored=())
    mse_table = gradient_error.mse_table(studies, keys)
    scaling_table = gradient_error.scaling_table(studies, keys)
    for table, draw in (
        (scaling_table, figures.joint_fixed_n_figure),
        (mse_table, figures.joint_mse_figure),
    ):
        lines = [*(table.figure_notes or ()), *report.missing_notes]
        if draw is figures.joint_mse_figure:
            paired = any(run.final_result.get("ratio_to_oracle") for run in studies)
            lines = [" ".join([figures.BANDS[paired], *report.missing_captions])]
        draw(report.folder, table.name, studies, lines)
        report.tables.append(table)
    report.answers += [
        f"{run.policy} on {run.dataset}: {decision_sentence(run.final_result)}" for run in studies
    ]
    report.notes.append(WHY_FIXED_ROLLOUTS)


def _add_training(report: Report) -> None:
    runs = report.training
    keys = distinguishing_keys([run.keys for run in runs])
    if keys:
        series = {key_label(run.keys, keys) for run in runs}
        report.notes.append(f"{len(series)} series, apart and never averaged, by {', '.join(keys)}")
    report.notes += missing_cells(runs, keys)
    axis = swept_axis(runs, keys)
    rows = accuracy.accuracy_rows(runs, keys, axis)
    if rows:
        _add_accuracy(report, rows, axis)
    _add_learning(report, runs, keys, axis)


def _add_accuracy(report: Report, rows: list[dict[str, Any]], axis: Axis) -> None:
    """Accuracy by step, by setting and by budget at the last step, and on MATH beside the published
    ones.
    """
    evaluated = sorted({row["step"] for row in rows})
    steps = evaluated if report.steps is None else list(report.steps)
    absent = [step for step in steps if step not in evaluated]
    if absent:
        report.notes.append(f"no run was evaluated at step {', '.join(map(str, absent))}")
    if report.steps is None and len(evaluated) > MOST_STEPS:
        places = [round(i * (len(evaluated) - 1) / (MOST_STEPS - 1)) for i in range(MOST_STEPS)]
        steps = [evaluated[place] for place in places]
        report.notes.append(
            f"{MOST_STEPS} of {len(evaluated)} evaluated steps shown, all in accuracy.csv"
        )

    def compared(of: Sequence[dict[str, Any]], family: tuple) -> list[AccuracyCell]:
        return accuracy.pooled_cells(accuracy.accuracy_cells(of, family, pooled=True))

    cells = compared(rows, accuracy.BY_LINE)
    cells_at_steps = [cell for cell in cells if cell["step"] in steps]
    if not cells_at_steps:
        return
    table = accuracy.accuracy_table(cells_at_steps, cells, axis)
    report.tables.append(table)
    gstar, lines = _measured_gstar(report, axis)
    captions = accuracy.captions(cells_at_steps, f"the {axis.symbol} of a line")
    figures.accuracy_figure(
        report.folder, table.name, cells_at_steps, rows, axis,
        [*captions, *lines, *report.missing_captions], gstar,
    )  # fmt: skip
    budget_cells = compared(at_last(rows, steps), accuracy.BY_BUDGET)
    if axis.key in (SIZE, ROLLOUTS):
        report.tables.append(accuracy.budget_table(budget_cells))
        report.answers.append(best_sentence(budget_cells))
    if len({(row["test"], row["setting"]) for row in rows}) > len({row["test"] for row in rows}):
        cells_by_setting = compared(at_last(rows, steps, "test"), accuracy.BY_SETTING)
        report.tables.append(accuracy.settings_table(cells_by_setting))
        report.answers.append(setting_sentence(cells_by_setting))
    on_math = {run.label for run in report.training if run.config["dataset"]["kind"] == "math"}
    if on_math:
        math_rows = [row for row in at_last(rows, steps) if row["run"] in on_math]
        report.tables.append(published_table(compared(math_rows, accuracy.BY_BUDGET)))


def _measured_gstar(
    report: Report, axis: Axis
) -> tuple[tuple[float | None, float, float | None] | None, list[str]]:
    """G* of the policy that all training runs start from and its interval, where a study among the
    runs has measured it, and a line that says so.
    """

    def start(run: RunRecord) -> list[Any]:
        return [run.policy, run.dataset, run.code.get("weights"), run.config.get("temperature")]

    starts = [start(run) for run in report.training]
    if axis.key == SIZE and all(own == starts[0] for own in starts):
        for run in report.studies:
            scaling = run.final_result["scaling"]
            best, low, high = (scaling[f"gstar{end}"] for end in ("", "_low", "_high"))
            text = best_size(best, low, high)
            if start(run) == starts[0] and text is not None:
                return (best, low, high), [f"Grey: G* = {text} of the gradient before training."]
    return None, []


def at_last(
    rows: Sequence[dict[str, Any]], steps: Sequence[int], within: str = "series"
) -> list[dict[str, Any]]:
    """Of each series the rows at the last of the steps that the most (n, G) have reached.

    Args:
        rows: see `accuracy.accuracy_rows`.
        steps: among which.
        within: the column whose values each have a last step of their own.
    """
    last_rows = []
    for name in dict.fromkeys(row[within] for row in rows):
        own = [row for row in rows if row[within] == name and row["step"] in steps]
        cells = {(row["step"], row["series"], row["rollouts"], row["group_size"]) for row in own}
        counts = Counter(step for step, *_ in cells)
        last = max(counts, key=lambda step: (counts[step], step), default=None)
        last_rows += [row for row in own if row["step"] == last]
    return last_rows


def best_sentence(cells: Sequence[AccuracyCell]) -> str:
    """The best cell of each series and how many others are not significantly different; where no
    difference is significant the range of all.

    Args:
        cells: of `accuracy.BY_BUDGET`.
    """
    several = len({cell["rollouts"] for cell in cells}) > 1
    sentences = []
    for series in dict.fromkeys(cell["series"] for cell in cells):
        own = [cell for cell in cells if cell["series"] == series]
        (best,) = (cell for cell in own if cell["best"])
        least = min(own, key=lambda cell: cell["accuracy"])
        step, text = best["step"], _accuracy_text(best)
        if len(own) == 1:
            sentence = f"held-out accuracy at step {step} is {text} at G = {best['group_size']}"
        elif best["decided"]:
            alike = sum(cell["distinct"] is False for cell in own)
            sentence = (
                f"held-out accuracy at step {step} is largest at G = {best['group_size']}, "
                f"{text}; {alike} of the {len(own) - 1} other cells are not significantly "
                "different from it"
            )
        else:
            names = [
                f"n = {cell['rollouts']}, G = {cell['group_size']}" if several
                else f"G = {cell['group_size']}"
                for cell in (least, best)
            ]  # fmt: skip
            sentence = (
                f"no significant difference in held-out accuracy at step {step} between the "
                f"{len(own)} cells, from {least['accuracy']:.3f} ({names[0]}) to "
                f"{best['accuracy']:.3f} ({names[1]})"
            )
        sentences.append(f"{budget_name(best)}: {sentence}.")
    return " ".join(sentences)


def setting_sentence(cells: Sequence[AccuracyCell]) -> str:
    """Whether the settings of an n and G differ significantly.

    Args:
        cells: of `accuracy.BY_SETTING`.
    """
    families: dict[tuple, list[AccuracyCell]] = {}
    for cell in cells:
        key = tuple(cell[name] for name in accuracy.BY_SETTING[0])
        families.setdefault(key, []).append(cell)
    several = [family for family in families.values() if len(family) > 1]
    sentences = []
    for family in several:
        first = family[0]
        (best,) = (cell for cell in family if cell["best"])
        least = min(family, key=lambda cell: cell["accuracy"])
        name = budget_name(first | {"series": first["test"]})
        where = f"{name} G={first['group_size']}, step {first['step']}"
        below = [cell["setting"] for cell in family if cell["distinct"]]
        if below:
            sentences.append(
                f"{where}: held-out accuracy is largest with {best['setting']}, "
                f"{_accuracy_text(best)}, and significantly less with {', '.join(below)}."
            )
        else:
            sentences.append(
                f"{where}: no significant difference in held-out accuracy between the "
                f"{len(family)} settings, from "
                f"{least['accuracy']:.3f} ({least['setting']}) to {best['accuracy']:.3f} "
                f"({best['setting']})."
            )
    decided = sum(family[0]["decided"] for family in several)
    if len(sentences) > 3:
        return f"Settings differ significantly at {decided} of {len(several)} (n, G)."
    return " ".join(sentences)


def _accuracy_text(cell: AccuracyCell) -> str:
    return "{accuracy:.3f} [{low:.3f}, {high:.3f}] over {over}".format(**cell)


def missing_cells(runs: Sequence[RunRecord], keys: Sequence[str]) -> list[str]:
    """A line for every (n, G) of a series that lacks seeds which others of the series have.

    Args:
        runs: of training.
        keys: by which series differ.
    """
    grids: dict[str, set[tuple[int, int, int]]] = {}
    for run in runs:
        config = run.config
        cell = (config["budget"]["rollouts"], config["group_size"], config["seed"])
        grids.setdefault(key_label(run.keys, keys), set()).add(cell)
    lines = []
    for series, cells in grids.items():
        budgets, sizes, seeds = (sorted(set(axis)) for axis in zip(*cells, strict=True))
        for n, size in product(budgets, sizes):
            lost = [seed for seed in seeds if (n, size, seed) not in cells]
            if lost:
                cell_name = " ".join(filter(None, (f"n={n} G={size}", series)))
                lines.append(f"missing: {cell_name}: no run of seed {', '.join(map(str, lost))}")
    return lines


def _add_learning(
    report: Report, runs: Sequence[RunRecord], keys: Sequence[str], axis: Axis
) -> None:
    """A figure and a table per budget and data set, a line per group size and setting; where these
    are many, a figure for each value along the axis and for each line of the other figures.
    """
    budgets: dict[str, list[RunRecord]] = {}
    for run in runs:
        test = setting_labels(run, keys, axis)["test"]
        budget = f"n={run.config['budget']['rollouts']}"
        budgets.setdefault(" ".join(filter(None, (budget, test))), []).append(run)
    curves: dict[str, list[Learning]] = {}
    for budget, members in budgets.items():
        several_sizes = len({run.config["group_size"] for run in members}) > 1
        members = sorted(members, key=lambda run: run.config["group_size"])
        labels = []  # of each run: size and setting
        for run in members:
            setting = setting_labels(run, keys, axis)["setting"]
            labels.append((f"G={run.config['group_size']}", setting))
        several_settings = len({setting for _, setting in labels}) > 1
        few = len(set(labels)) <= MOST_CURVES
        for run, (size, setting) in zip(members, labels, strict=True):
            if few or not (several_sizes and several_settings):
                parts = [size if several_sizes or not several_settings else "",
                         setting if several_settings else ""]  # fmt: skip
                shared = [] if several_sizes else [size]
                figures_of_run = [([budget, *shared], parts)]
            else:
                figures_of_run = [([budget, setting], [size]), ([budget, size], [setting])]
            for title, parts in figures_of_run:
                line = Learning(" ".join(filter(None, parts)), run.metrics, run.evals)
                curves.setdefault(" ".join(filter(None, title)), []).append(line)
    for place, (series, lines) in enumerate(curves.items(), 1):
        slug = re.sub(r"[^\w.=-]+", "_", series)
        slug = slug if len(slug) <= 80 else f"{slug[:76]}-{place}"  # names of files have an end
        name = "learning" if len(curves) == 1 else f"learning-{slug}"
        rows = learning_figure(report.folder, name, lines)
        if rows:
            report.tables.append(_learning_table(name, series, rows))


def _learning_table(name: str, series: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Every quantity at the first and the last step of each line."""
    quantities = list(dict.fromkeys(row["quantity"] for row in rows))
    means: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        by_quantity = means.setdefault(row["series"], {})
        by_quantity.setdefault(row["quantity"], []).append(row["mean"])
    texts = [
        [
            line,
            *(f"{of[q][0]:.3g} -> {of[q][-1]:.3g}" if q in of else "-" for q in quantities),
        ]
        for line, of in means.items()
    ]
    return Table(
        name=name,
        title=f"Learning, {series}",
        columns=["first -> last step", *(MONITORED.get(name) or name for name in quantities)],
        rows=texts,
        notes=notes(rows),
        data=rows,
        figure_notes=notes(rows),
        headings=True,
    )


def _runs_table(report: Report) -> Table:
    """Every run and how far it is; below it counts and all notes."""
    data = []
    for run in report.runs:
        state, result = run.state, run.result or {}
        data.append(
            {
                "run": run.label,
                "entry": run.command,
                "state": state.name,
                "step": state.step,
                "steps": state.steps,
                "policy": run.policy,
                "dataset": run.dataset,
                "seed": run.config["seed"],
                "group_size": run.config.get("group_size"),
                "rollouts": run.config.get("budget", {}).get("rollouts"),
                "accuracy": state.accuracy,
                "low": state.low,
                "high": state.high,
                "verdict": result.get("verdict"),
                "commit": run.commit,
                "detail": state.detail,
            }
        )
    names = ["run", "entry", "state", "step", "steps", "accuracy", "verdict"]
    names = [name for name in names if any(row[name] is not None for row in data)]

    def text(value: Any) -> str:
        return f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value)

    counts = Counter(run.state.name for run in report.runs)
    counts |= Counter(damaged=len(report.run_set.damaged), missing=len(report.run_set.absent))
    summary = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return Table(
        name="runs",
        title="Runs",
        columns=names,
        rows=[[text(row[name]) for name in names] for row in data],
        notes=[f"{summary}.", *report.notes],
        data=data,
        headings=True,
    )


def page(report: Report) -> Page:
    """The report's page.

    Args:
        report: one whose figures are drawn.
    """
    runs = report.runs
    table_figures = []
    for table in report.tables:
        if table.figure_notes is not None:
            svg = (report.folder / f"{table.name}.svg").read_text()
            caption = " ".join(table.figure_notes)
            table_figures.append(Figure(table.title, svg, caption, f"{table.name}.csv"))
    tables = {table.name: table for table in report.tables}
    overview = tables.pop("theorems", None)
    rows = _last_completions(report.training)
    sentence = f"Those kept of the last logged step of each run, at most {MOST_COMPLETIONS} in all."
    configs = [flatten(run.config) for run in runs]
    shared = None
    if configs:
        first, *others = configs
        shared = {k: x for k, x in first.items() if all(k in o and o[k] == x for o in others)}
    return Page(
        title=f"Report {report.folder.name}: {len(runs)} runs",
        answer="\n".join(report.answers),
        notes=report.notes,
        facts=_facts(runs),
        overview=overview,
        figures=[*report.study_figures, *table_figures],
        tables=list(tables.values()),
        completions=Completions(rows, sentence) if rows else None,
        difference=differences({run.label: run.config for run in runs}) if len(runs) > 1 else None,
        configuration=shared,
        made=made_text(
            "made", datetime.now(UTC).isoformat(), socket.gethostname(), typed_command()
        ),
    )


def _facts(runs: Sequence[RunRecord]) -> list[tuple[str, Cell]]:
    """What was run and what it took; those of test problems are no model's, and counted apart."""

    def counts(names: Iterable[str | None]) -> str:
        """Each name once, with how often it comes where there are several."""
        counter = Counter(names)
        several = len(counter) > 1 or sum(counter.values()) > 1
        return "; ".join(f"{x} ({count})" if several else f"{x}" for x, count in counter.items())

    def total(of: Sequence[RunRecord], key: str) -> int:
        """A cost of the finished runs."""
        results = [run.result for run in of if run.result is not None]
        return sum(result.get("cost", result).get(key) or 0 for result in results)

    of_models = [run for run in runs if run.command != "gap"]
    of_beds = [run for run in runs if run.command == "gap"]
    facts: list[tuple[str, Cell]] = [
        ("Runs", counts(run.state.name for run in runs)),
        ("Entries", counts(run.command for run in runs)),
    ]
    if of_models:
        facts += [
            ("Policies", counts(run.policy for run in of_models)),
            ("Questions of", counts(run.dataset for run in of_models)),
            ("Rollouts of the finished", total(of_models, "rollouts")),
            ("Tokens of the finished", total(of_models, "tokens")),
        ]
    if of_beds:
        facts += [
            ("Test problems", counts(run.policy for run in of_beds)),
            ("Completions drawn from test problems", total(of_beds, "rollouts")),
        ]
    versions = [run.result.get("versions", {}) for run in runs if run.result is not None]
    packages = [f"grpo-ustat {own.get('grpo-ustat', 'of unknown version')}" for own in versions]
    return [
        *facts,
        ("Commits", counts((run.commit or "unknown")[:12] for run in runs)),
        ("Package", counts(packages)),
    ]


def _last_completions(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Completions of every run's last logged step; none of a run whose log is missing or damaged,
    which the run's own page says.
    """
    rows: list[dict[str, Any]] = []
    for run in runs:
        try:
            table = parquet.read_table(run.folder / log.NAME, schema=log.COLUMNS)
        except (OSError, ValueError):
            continue
        steps = [step for step in table["step"].to_pylist() if step is not None]
        if steps:
            last = table.filter(compute.field("step") == max(steps)).to_pylist()
            rows += [{"run": run.label} | row for row in last[: MOST_COMPLETIONS - len(rows)]]
    return rows
