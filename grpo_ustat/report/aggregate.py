"""Report on any set of runs: one folder with tables, figures and their data.

`grpo-ustat report` writes a report on the runs in the given folders. A sweep with `report.name`
writes a report on its runs. Runs that differ in keys other than group size, seed and budget are
shown separately. Notes list missing, damaged and repeated runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.measurements import error_figures, errors, group_size
from grpo_ustat.measurements.base import Study, by_pool
from grpo_ustat.measurements.group_size import SCALING, WHY_FIXED_ROLLOUTS, decision_sentence
from grpo_ustat.measurements.registry import (
    MEASUREMENTS,
    draw_report_figures,
    report_answers,
    report_tables,
)
from grpo_ustat.pages.learning import MONITORED, Learning, learning_figure, notes
from grpo_ustat.pages.page import (
    NAME,
    render,
)
from grpo_ustat.pages.run_page import spaced
from grpo_ustat.pages.tables import Table, count_text, shorten
from grpo_ustat.records import joint_quantity
from grpo_ustat.report import accuracy
from grpo_ustat.report.accuracy import AccuracyCell
from grpo_ustat.report.accuracy_answer import (
    at_last,
    best_sentence,
    missing_cells,
    setting_sentence,
)
from grpo_ustat.report.accuracy_figure import accuracy_figure
from grpo_ustat.report.best_group_size import best_group_size
from grpo_ustat.report.collect import RunSet, entries_in, read_runs
from grpo_ustat.report.joint_page import Report, page, runs_table
from grpo_ustat.report.settings import ROLLOUTS_KEY, SIZE_KEY, Axis, setting_labels, swept_axis
from grpo_ustat.report.verdicts import (
    claims_table,
    in_order,
    theorem_figures,
    theorems_table,
    verdict_sentence,
)
from grpo_ustat.runs.files import write_whole
from grpo_ustat.runs.record import (
    CODE,
    CONFIG,
    RunRecord,
    distinguishing_keys,
    key_label,
    study_rollouts,
)
from grpo_ustat.runs.status import Entry
from grpo_ustat.terminal.console import Console
from grpo_ustat.terminal.streams import best_size, single_line, tell, wrapped

MEASURED = "|".join(measurement.name for measurement in MEASUREMENTS)
TABLE_FILE = re.compile(
    r"(accuracy|mean_reward|best_group_size|budget|claims|fixed_n|lag|learning.*"
    rf"|mse|runs|settings|theorems|({MEASURED})(_\d)?)\.(csv|tex|pdf|svg|png)"
)
# Maximum number of evaluated steps that are shown, each in a panel, if the user selects no steps.
MAX_STEPS = 8
# Maximum number of notes printed on the terminal.
MAX_LINES = 12


def report_runs(patterns: Sequence[str], folder: Path, steps: Sequence[int] | None) -> None:
    """Write a report on the runs that match the patterns."""
    if (folder / CONFIG).exists() or (folder / CODE).exists():
        raise ConfigError(f"{folder} is the folder of a run: choose another folder with name=NAME")
    run_set = read_runs(entries_in(patterns))
    # Runs are shown in the order in which they were started.
    run_set.runs.sort(key=lambda run: (run.launches or [{}])[0].get("time", ""))
    report = Report(folder, run_set, steps)
    if report.is_empty:
        reasons = [*(run.unfinished for run in report.runs), *report.run_set.damaged]
        raise ConfigError(
            f"runs={','.join(patterns)} has nothing to show yet: {'; '.join(reasons[:3])}"
        )
    evaluated = sorted({row["step"] for run in report.training for row in run.evals})
    if steps is not None and evaluated and not set(steps) & set(evaluated):
        raise ConfigError(f"steps={steps}: the runs were evaluated at steps {evaluated}")
    write_report(report)


def report_sweep(entries: Sequence[Entry], folder: Path, steps: Sequence[int] | None) -> None:
    """Write a report on the runs of a sweep, in the sweep's order."""
    report = Report(folder, read_runs(entries), steps)
    if report.is_empty:
        tell(f"No run of {folder.name} has results to report.")
    else:
        write_report(report)


def write_report(report: Report) -> None:
    """Write the tables, figures and page, then print the answers, the main tables and the notes."""
    report.folder.mkdir(parents=True, exist_ok=True)
    # Delete the files of an earlier report, because this report may not replace all of them.
    if (report.folder / NAME).is_file():
        for file in report.folder.iterdir():
            if TABLE_FILE.fullmatch(file.name):
                file.unlink()
    report.notes += run_set_notes(report.run_set)
    if report.theorems:
        _add_section(report, "theorems", _add_theorems)
    if report.studies:
        _add_section(report, "studies", _add_studies)
    report.answers += [
        f"{run.policy} on {run.dataset} (this study is not in the tables and figures): "
        f"{decision_sentence(Study(run), study_rollouts(run.config))}"
        for run in report.equal_rewards
    ]
    if report.training:
        _add_section(report, "training runs", _add_training)
    if report.studies and len({run.config["group_size"] for run in report.training}) > 1:
        _add_best_group_size(report)
    report.tables.append(runs_table(report))
    for table in report.tables:
        table.write(report.folder)
    write_whole(report.folder / NAME, render(page(report)))

    console = Console()
    for line in report.answers:
        console.print(f"{wrapped(line)}\n", soft_wrap=True)
    main_tables = {"theorems", "fixed_n", "accuracy", "mean_reward", "settings"}
    main_tables.add("best_group_size")
    if len({run.config["budget"]["rollouts"] for run in report.training}) > 1:
        main_tables.add("budget")
    for table in report.tables:
        if table.name in main_tables:
            console.print(table)
    for line in shorten(report.notes, MAX_LINES, "runs.tex"):
        console.print(wrapped(line), soft_wrap=True)
    if report.next_step:
        console.print(f"next: {report.next_step}", soft_wrap=True)
    console.print(f"page: {report.folder / NAME}", soft_wrap=True)


def run_set_notes(run_set: RunSet) -> list[str]:
    """Return lines on runs that are incomplete, damaged or left out, and on differing versions."""
    lines = [f"unfinished: {run.unfinished}" for run in run_set.runs if run.unfinished]
    lines += [f"missing: {line}" for line in run_set.absent]
    lines += [f"damaged: {line}" for line in run_set.damaged]
    lines += [f"damaged: {run.label}: {note}" for run in run_set.runs for note in run.notes]
    lines += [f"duplicate: {line}" for line in run_set.twins]
    commits = Counter((run.commit or "unknown")[:8] for run in run_set.runs)
    if len(commits) > 1:
        counts = ", ".join(
            f"{name} ({count_text(count, 'run')})" for name, count in commits.items()
        )
        lines.append(f"the runs used different commits: {counts}")
    packages = [run.code.get("versions") or {} for run in run_set.runs]
    for package in dict.fromkeys(name for versions in packages for name in versions):
        of = Counter(str(versions.get(package, "unknown")) for versions in packages)
        if len(of) > 1:
            counts = ", ".join(f"{name} ({count_text(count, 'run')})" for name, count in of.items())
            lines.append(f"the runs used different versions of {package}: {counts}")
    return lines


def _add_section(report: Report, name: str, add: Callable[[Report], None]) -> None:
    """Add a section; if this fails, only note the reason."""
    tables, answers = list(report.tables), list(report.answers)
    try:
        add(report)
    except Exception as error:
        # A damaged folder can have any content, so any exception may occur.
        report.tables, report.answers = tables, answers
        reason = single_line(f"{type(error).__name__}: {error}", 200)
        report.notes.append(f"damaged: the {name} cannot be shown ({reason})")


def _add_theorems(report: Report) -> None:
    report.tables += [theorems_table(in_order(report.runs)), claims_table(report.theorems)]
    report.theorem_figures, damaged = theorem_figures(report.theorems)
    report.notes += damaged
    report.answers.append(verdict_sentence(report.theorems))


def _add_studies(report: Report) -> None:
    measured = [Study(run) for run in report.studies]
    # Studies with the same pool of rollouts have the same errors, so each pool is shown once.
    studies = [members[0] for members in by_pool(measured)]
    keys = distinguishing_keys([study.run.keys for study in studies], ignored=())
    table = group_size.joint_table(studies, keys)
    lines = [*(table.figure_notes or ()), *report.missing_notes]
    group_size.draw_joint(report.folder, table.name, studies, lines)
    report.tables.append(table)
    table = errors.joint_table(studies, keys)
    lines = [" ".join([error_figures.bands_text(studies), *report.missing_captions])]
    lines += shorten(errors.missing_in(studies), 3, "mse.csv")
    error_figures.draw_joint(report.folder, table.name, studies, lines)
    report.tables.append(table)
    for study in studies:
        decision = decision_sentence(study, study.rollouts)
        report.answers.append(f"{study.run.policy} on {study.run.dataset}: {decision}")
    draw_report_figures(report.folder, measured, report.missing_captions)
    report.tables += report_tables(measured, keys)
    report.answers += report_answers(measured)
    report.notes.append(WHY_FIXED_ROLLOUTS)


def _add_training(report: Report) -> None:
    runs = report.training
    keys = distinguishing_keys([run.keys for run in runs])
    if keys:
        series = {key_label(run.keys, keys) for run in runs}
        report.notes.append(
            f"the training runs form {len(series)} series, which differ in {', '.join(keys)}: each "
            "series is shown separately"
        )
    report.notes += missing_cells(runs, keys)
    axis = swept_axis(runs, keys)
    rows = accuracy.accuracy_rows(runs, keys, axis)
    if rows:
        _add_accuracy(report, rows, axis)
    _add_learning(report, runs, keys, axis)


def _add_accuracy(report: Report, rows: list[dict[str, Any]], axis: Axis) -> None:
    """Add accuracy or mean reward by step and, at the last step, by budget and setting."""
    name = joint_quantity(row["quantity"] for row in rows).replace(" ", "_")
    evaluated = sorted({row["step"] for row in rows})
    steps = evaluated if report.steps is None else list(report.steps)
    absent = [step for step in steps if step not in evaluated]
    if absent:
        report.notes.append(f"no run was evaluated at step {', '.join(map(str, absent))}")
    if report.steps is None and len(evaluated) > MAX_STEPS:
        steps = [evaluated[place] for place in spaced(len(evaluated), MAX_STEPS)]
        report.notes.append(
            f"{MAX_STEPS} of {len(evaluated)} evaluated steps are shown; {name}.csv has all"
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
    captions = accuracy.captions(cells_at_steps, "on the same line")
    accuracy_figure(
        report.folder, table.name, cells_at_steps, rows, axis,
        [*captions, *lines, *report.missing_captions], gstar,
    )  # fmt: skip
    budget_cells = compared(at_last(rows, steps), accuracy.BY_BUDGET)
    if axis.key in (SIZE_KEY, ROLLOUTS_KEY):
        report.tables.append(accuracy.budget_table(budget_cells))
        report.answers.append(best_sentence(budget_cells))
    if len({(row["test"], row["setting"]) for row in rows}) > len({row["test"] for row in rows}):
        cells_by_setting = compared(at_last(rows, steps, "test"), accuracy.BY_SETTING)
        report.tables.append(accuracy.settings_table(cells_by_setting))
        report.answers.append(setting_sentence(cells_by_setting))


def _add_best_group_size(report: Report) -> None:
    """Compare the G with the smallest error before training and the G that trains best.

    If the comparison is not possible, a note gives the reason.
    """
    try:
        table, answer = best_group_size(report.training, report.studies)
    except (ConfigError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        report.notes.append(
            f"the report does not compare G* with training, because {single_line(error, 200)}"
        )
        return
    report.tables.append(table)
    report.answers.append(answer)


def _measured_gstar(report: Report, axis: Axis) -> tuple[Interval | None, list[str]]:
    """Return G* of the initial policy of all training runs, and a line for the figure.

    G* is None if the initial policies differ or if no study in the report measured the policy.
    """

    def start(run: RunRecord) -> list[Any]:
        return [run.policy, run.dataset, run.code.get("weights"), run.config.get("temperature")]

    starts = [start(run) for run in report.training]
    if axis.key == SIZE_KEY and all(other == starts[0] for other in starts):
        for run in report.studies:
            gstar = Study(run).need(SCALING).gstar
            text = best_size(*gstar)
            if start(run) == starts[0] and text is not None:
                return gstar, [f"Grey band: best group size before training, G* = {text}."]
    return None, []


def _add_learning(
    report: Report, runs: Sequence[RunRecord], keys: Sequence[str], axis: Axis
) -> None:
    """Add a figure and a table per budget and data set, with a line per group size and setting."""
    figures: dict[tuple[int, str], list[tuple[RunRecord, str]]] = {}
    for run in sorted(runs, key=lambda run: run.config["group_size"]):
        labels = setting_labels(run, keys, axis)
        figure = run.config["budget"]["rollouts"], labels["test"]
        figures.setdefault(figure, []).append((run, labels["setting"]))
    tests = list(dict.fromkeys(test for _, test in figures))
    for (rollouts, test), members in sorted(figures.items()):
        sizes = {run.config["group_size"] for run, _ in members}
        several_settings = len({setting for _, setting in members}) > 1
        lines = []
        for run, setting in members:
            parts = [setting] * several_settings
            if len(sizes) > 1 or not several_settings:
                parts.insert(0, f"G={run.config['group_size']}")
            lines.append(Learning(" ".join(parts), run.metrics, run.evals))
        name = "learning"
        if len(figures) > 1:
            name += f"-n={rollouts}" + f"-{tests.index(test) + 1}" * (len(tests) > 1)
        title = [f"n={rollouts}", test, *(f"G={size}" for size in sizes if len(sizes) == 1)]
        rows = learning_figure(report.folder, name, lines)
        if rows:
            report.tables.append(_learning_table(name, " ".join(filter(None, title)), rows))


def _learning_table(name: str, series: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table with each quantity at the first and the last step of each line."""
    quantities = list(dict.fromkeys(row["quantity"] for row in rows))
    means: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        by_quantity = means.setdefault(row["series"], {})
        if row["mean"] is not None:
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
        notes=[
            "Each entry is the mean over seeds at the first step -> the mean at the last step. "
            "Only steps that all runs of a series have are used."
        ],
        data=rows,
        figure_notes=notes(rows),
        headings=True,
    )
