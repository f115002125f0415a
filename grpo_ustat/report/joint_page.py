"""Contents of a report on several runs, its table of runs, and its page."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyarrow import compute, parquet

from grpo_ustat.config.command_line import typed_command
from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.group_size import SCALING
from grpo_ustat.measurements.next_step import next_step
from grpo_ustat.pages.page import (
    Completions,
    Figure,
    Page,
    provenance_line,
)
from grpo_ustat.pages.tables import Cell, Table, shorten
from grpo_ustat.records import joint_quantity
from grpo_ustat.report.collect import RunSet
from grpo_ustat.report.verdicts import (
    in_order,
)
from grpo_ustat.runs import log
from grpo_ustat.runs.record import RunRecord

# Maximum number of completions on the page for all runs together.
MAX_COMPLETIONS = 2000


@dataclass
class Report:
    """Contents of a report folder."""

    folder: Path
    # Runs in the report, and lines on runs that cannot be shown.
    run_set: RunSet
    # Steps at which evaluations are shown; None for all steps.
    steps: Sequence[int] | None
    # Tables, in the order in which the page shows them.
    tables: list[Table] = field(default_factory=list)
    # Remarks, for example on runs and steps that are missing or left out.
    notes: list[str] = field(default_factory=list)
    # Sentences with the main results, by kind of run.
    answers: list[str] = field(default_factory=list)
    # Figures from the folders of theorem runs.
    theorem_figures: list[Figure] = field(default_factory=list)

    @property
    def runs(self) -> list[RunRecord]:
        """Runs of which at least a part can be shown."""
        return self.run_set.runs

    @property
    def theorems(self) -> list[RunRecord]:
        """Finished runs of `gap`, in the order of the theorems in the paper."""
        return [run for run in in_order(self.runs) if run.result is not None]

    @property
    def studies(self) -> list[RunRecord]:
        """Finished studies of the gradient error, except those in which all rewards are equal."""
        return [run for run in self._finished_studies if "equal_rewards" not in run.final_result]

    @property
    def equal_rewards(self) -> list[RunRecord]:
        """Finished studies in which all rewards are equal, so that no error could be measured."""
        return [run for run in self._finished_studies if "equal_rewards" in run.final_result]

    @property
    def _finished_studies(self) -> list[RunRecord]:
        return [run for run in self.runs if run.command == "mse" and run.result is not None]

    @property
    def next_step(self) -> str:
        """Next command for the first study in which G* is undecided; "" if there is none."""
        studies = map(Study, self.studies)
        undecided = (study for study in studies if not study.need(SCALING).is_decided)
        return next(map(next_step, undecided), "")

    @property
    def training(self) -> list[RunRecord]:
        """Finished and unfinished training runs with at least one evaluation or step."""
        runs = [run for run in self.runs if run.command == "train"]
        return [run for run in runs if run.evals or run.metrics]

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to show."""
        return not (self.theorems or self.studies or self.equal_rewards or self.training)

    @property
    def missing_notes(self) -> list[str]:
        """Notes on unfinished, missing or damaged runs, for use below figures."""
        kinds = ("unfinished", "missing", "damaged")
        return shorten([line for line in self.notes if line.startswith(kinds)], 3, "runs.tex")

    @property
    def missing_captions(self) -> list[str]:
        """Line with the number of unfinished, missing or damaged items, for use below figures."""
        kinds = ("unfinished", "missing", "damaged")
        count = sum(line.startswith(kinds) for line in self.notes)
        return [f"Unfinished, missing or damaged: {count}; see runs.tex."] * bool(count)


def runs_table(report: Report) -> Table:
    """Return a table of all runs and their progress, with counts and all notes below the table."""
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
                "quantity": state.quantity,
                "mean_reward": state.mean_reward,
                "low": state.low,
                "high": state.high,
                "verdict": result.get("verdict"),
                "commit": run.commit,
                "detail": state.detail,
            }
        )
    names = ["run", "entry", "state", "step", "steps", "mean_reward", "verdict"]
    names = [name for name in names if any(row[name] is not None for row in data)]
    quantity = joint_quantity(row["quantity"] for row in data if row["quantity"] is not None)

    def text(value: Any) -> str:
        return f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value)

    counts = Counter(run.state.name for run in report.runs)
    counts |= Counter(damaged=len(report.run_set.damaged), missing=len(report.run_set.absent))
    summary = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return Table(
        name="runs",
        title="Runs",
        columns=[quantity if name == "mean_reward" else name for name in names],
        rows=[[text(row[name]) for name in names] for row in data],
        notes=[f"{summary}.", *report.notes],
        data=data,
        headings=True,
    )


def page(report: Report) -> Page:
    """Return the page of a report; the figures must have been drawn before."""
    runs = report.runs
    table_figures: dict[str, Figure] = {}
    for table in report.tables:
        if table.figure_notes is not None:
            svg = (report.folder / f"{table.name}.svg").read_text()
            caption = " ".join(table.figure_notes)
            table_figures[table.name] = Figure(table.title, svg, caption, f"{table.name}.csv")
    tables = {table.name: table for table in report.tables}
    # The page shows the report's notes above the tables.
    tables["runs"] = replace(tables["runs"], notes=tables["runs"].notes[:1])
    overview, lead = tables.pop("theorems", None), None
    if overview is None and table_figures:
        # The first table that has a figure contains the main result, so both are at the top.
        name = next(iter(table_figures))
        overview, lead = tables.pop(name), table_figures.pop(name)
    rows = _last_completions(report.training)
    sentence = (
        "Logged completions from the last logged step of each run, at most "
        f"{MAX_COMPLETIONS} in total."
    )
    return Page(
        title=f"Report {report.folder.name}: {len(runs)} runs",
        answer="\n".join(report.answers),
        notes=report.notes,
        facts=_facts(runs),
        next_step=report.next_step,
        lead=lead,
        overview=overview,
        figures=[*report.theorem_figures, *table_figures.values()],
        tables=list(tables.values()),
        completions=Completions(rows, sentence) if rows else None,
        configurations={run.label: run.config for run in runs},
        provenance=provenance_line(
            "made", datetime.now(UTC).isoformat(), socket.gethostname(), typed_command()
        ),
    )


def _facts(runs: Sequence[RunRecord]) -> list[tuple[str, Cell]]:
    """Describe runs and their costs; runs on test problems (without a model) have own entries."""

    def counts(names: Iterable[str | None]) -> str:
        """List each name once; if there are several items, add the number of occurrences."""
        counter = Counter(names)
        several = len(counter) > 1 or sum(counter.values()) > 1
        return "; ".join(f"{x} ({count})" if several else f"{x}" for x, count in counter.items())

    def total(of: Sequence[RunRecord], key: str) -> int:
        """Return the sum of a cost over the finished runs."""
        results = [run.result for run in of if run.result is not None]
        return sum(result.get("cost", result).get(key) or 0 for result in results)

    of_models = [run for run in runs if run.command != "gap"]
    of_problems = [run for run in runs if run.command == "gap"]
    facts: list[tuple[str, Cell]] = [
        ("Runs", counts(run.state.name for run in runs)),
        ("Commands", counts(run.command for run in runs)),
    ]
    if of_models:
        facts += [
            ("Policies", counts(run.policy for run in of_models)),
            ("Data sets", counts(run.dataset for run in of_models)),
            ("Completions sampled by finished runs", total(of_models, "rollouts")),
            ("Tokens sampled by finished runs", total(of_models, "tokens")),
        ]
    if of_problems:
        facts += [
            ("Test problems", counts(run.policy for run in of_problems)),
            ("Completions drawn from test problems", total(of_problems, "rollouts")),
        ]
    versions = [run.result.get("versions", {}) for run in runs if run.result is not None]
    packages = [
        f"grpo-ustat {packages_of_run.get('grpo-ustat', 'of unknown version')}"
        for packages_of_run in versions
    ]
    return [
        *facts,
        ("Commits of the code", counts((run.commit or "unknown")[:12] for run in runs)),
        ("Version", counts(packages)),
    ]


def _last_completions(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Read the completions from the last logged step of each run.

    A run with a missing or damaged log contributes no completions. The page of that run reports the
    damage.
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
            rows += [{"run": run.label} | row for row in last[: MAX_COMPLETIONS - len(rows)]]
    return rows
