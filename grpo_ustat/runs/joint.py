"""What the points of a sweep found, together: tables, CSV files and a figure.

They go to `report.name` in the sweep's folder and are made again whenever the sweep is typed again.
Points without a result are named, never averaged over.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_ustat.estimators.intervals import (
    LEVEL,
    Interval,
    clustered_mean,
    paired_difference,
    t_interval,
)
from grpo_ustat.runs.points import Point
from grpo_ustat.runs.summary import csv_text, mse_cell

SWEPT = ("group_size=", "seed=", "budget=", "budget.rollouts=")  # shown by columns of their own


def report(entry: str, points: list[Point]) -> None:
    """Write and show what the finished points of a sweep found.

    Args:
        entry: `train` or `mse`.
        points: of the sweep, in its order.
    """
    folder = points[0].sweep / points[0].config.report.name
    console = Console(highlight=False)
    found = [(point, result) for point in points if (result := point.result()) is not None]
    missing = [point.name for point in points if point.result() is None]
    if not found:
        console.print(f"No point of {folder.name} has finished: nothing to report.", markup=False)
        return
    folder.mkdir(parents=True, exist_ok=True)
    (_mse if entry == "mse" else _train)(folder, found, missing, console)
    for name in missing:
        console.print(f"missing: {name}", markup=False)
    console.print(f"Wrote {folder}", soft_wrap=True, markup=False)


def _mse(folder: Path, found: list, missing: list[str], console: Console) -> None:
    from grpo_ustat.runs.figures import joint_mse_figure

    rows = [row for point, result in found for row in mse_rows(point, result)]
    (folder / "curves.csv").write_text(csv_text(rows))
    joint_mse_figure(folder, found, missing)
    console.print(mse_table(rows))


def mse_rows(point: Point, result: dict[str, Any]) -> list[dict[str, Any]]:
    """A study's curves beside what they are of."""
    config, policy = point.config, result["policy"]
    of = {"point": point.name, "policy": point.policy, "dataset": config.dataset.name}
    of |= {"seed": config.seed, "questions": result["questions"]}
    of |= {"pool_completions": result["pool_completions"]}
    of |= {key: policy[key] for key in ("accuracy", "accuracy_low", "accuracy_high")}
    return [of | row for row in result["curves"]]


def mse_table(rows: list[dict[str, Any]]) -> Table:
    """A section per policy, method and setting, a row per group size, a column per baseline."""
    names = list(dict.fromkeys(row["baseline"] for row in rows))
    table = Table(title="MSE of the gradient", caption="95 % intervals")
    for column in ("policy", "G", *names):
        table.add_column(column, justify="left" if column == "policy" else "right")
    keys = ("point", "method", "target", "setting", "num_prompts")
    for key in dict.fromkeys(tuple(row[k] for k in keys) for row in rows):
        mine = [row for row in rows if tuple(row[k] for k in keys) == key]
        cells = {(row["group_size"], row["baseline"]): mse_cell(row) for row in mine}
        label = _of_study(mine[0])
        for size in dict.fromkeys(row["group_size"] for row in mine):
            table.add_row(label, str(size), *(cells.get((size, name), "-") for name in names))
            label = ""
        table.add_section()
    return table


def _of_study(row: dict[str, Any]) -> str:
    interval = f"[{row['accuracy_low']:.2f}, {row['accuracy_high']:.2f}]"
    return escape(
        f"{row['policy']}\n{row['dataset']}, {row['questions']}x{row['pool_completions']}\n"
        f"{row['accuracy']:.2f} {interval}\n{row['method']}\n{row['setting'].replace('_', ' ')}"
    )


def _train(folder: Path, found: list, missing: list[str], console: Console) -> None:
    from grpo_ustat.runs.figures import joint_accuracy_figure

    rows = [row for point, result in found for row in accuracy_rows(point, result)]
    cells = accuracy_cells(rows)
    (folder / "runs.csv").write_text(csv_text(rows))
    (folder / "accuracy.csv").write_text(csv_text(cells))
    joint_accuracy_figure(folder, cells, notes(cells, ("ring", "filled"), missing))
    console.print(accuracy_table(cells))


def accuracy_rows(point: Point, result: dict[str, Any]) -> list[dict[str, Any]]:
    """A run's held-out accuracy at the steps asked for, by its first decoding."""
    config = point.config
    other = [x for x in point.name.split(" ") if not x.startswith(SWEPT)]
    series = " ".join([f"n={config.budget.rollouts}", *filter(None, other)])
    of = {"series": series, "group_size": config.group_size, "seed": config.seed}
    steps = config.report.steps
    return [
        of | {key: row[key] for key in ("step", "decoding", "accuracy", "low", "high", "n")}
        for row in result["evals"]
        if row["decoding"] == config.eval.decoding[0] and (steps is None or row["step"] in steps)
    ]


def accuracy_cells(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per series, step and group size: mean over its seeds, and how far from the best G.

    The interval is over seeds, given the questions (t, seeds - 1 degrees of freedom); with one
    seed it is the run's own, over questions. `best` marks the largest mean of a series and step.
    The difference from it is paired on the seeds that both have; with one seed it is of two
    independent samples of questions, wider than a paired one and without the variation of training.
    `distinct` says whether its interval lies below 0: the k - 1 differences of a row are each at
    1 - 0.05 / (k - 1) (Bonferroni), so that a truly best G is told from the largest mean, whichever
    that is, in at most 2.5 % of rows (Hsu 1984, of comparisons with the best). The best is chosen
    on the same seeds.
    """
    cells = []
    for series, step in dict.fromkeys((row["series"], row["step"]) for row in rows):
        mine = [row for row in rows if (row["series"], row["step"]) == (series, step)]
        by_size: dict[int, dict[int, dict]] = {}
        for row in mine:
            by_size.setdefault(row["group_size"], {})[row["seed"]] = row
        means = {size: over_seeds(runs) for size, runs in by_size.items()}
        best = max(means, key=lambda size: means[size].estimate)
        level = 1 - (1 - LEVEL) / max(len(means) - 1, 1)
        for size, runs in by_size.items():
            gap = None if size == best else difference(runs, by_size[best], level)
            cells.append(
                {"series": series, "step": step, "group_size": size}
                | dict(zip(("accuracy", "low", "high"), means[size], strict=True))
                | {"seeds": len(runs), "questions": next(iter(runs.values()))["n"]}
                | {"best": size == best, "shared_seeds": len(runs.keys() & by_size[best].keys())}
                | dict(zip(GAP, gap or (None, None, None), strict=True))
                | {"distinct": None if gap is None else gap.high < 0}
            )
    return cells


GAP = ("difference", "difference_low", "difference_high")


def over_seeds(runs: dict[int, dict[str, Any]]) -> Interval:
    """Mean accuracy of runs by seed, with its interval.

    >>> runs = {seed: {"accuracy": x} for seed, x in enumerate((0.5, 0.6, 0.7))}
    >>> [round(x, 3) for x in over_seeds(runs)]  # t_2 = 4.303 times 0.1 / sqrt(3)
    [0.6, 0.352, 0.848]
    """
    if len(runs) == 1:
        (run,) = runs.values()
        return Interval(run["accuracy"], run["low"], run["high"])
    return clustered_mean(np.array([[run["accuracy"]] for run in runs.values()]))


def difference(
    runs: dict[int, dict[str, Any]], best: dict[int, dict[str, Any]], level: float = LEVEL
) -> Interval | None:
    """Accuracy less the best one, see `accuracy_cells`; None where too few seeds are shared."""
    shared = sorted(runs.keys() & best.keys())
    if len(shared) > 1:
        mine, its = (np.array([x[seed]["accuracy"] for seed in shared]) for x in (runs, best))
        return paired_difference(mine, its, level)
    if len(runs) > 1 or len(best) > 1:
        return None
    (mine,), (its,) = runs.values(), best.values()
    variance = sum(((x["high"] - x["low"]) / 2 / 1.96) ** 2 for x in (mine, its))
    return t_interval(mine["accuracy"] - its["accuracy"], variance, math.inf, level)


def accuracy_table(cells: list[dict[str, Any]]) -> Table:
    """A row per series and step, a column per group size."""
    sizes = sorted({cell["group_size"] for cell in cells})
    table = Table(
        title="Held-out accuracy", caption=escape("\n".join(notes(cells, ("*", "~"), [])))
    )
    table.add_column("")
    for size in sizes:
        table.add_column(f"G = {size}", justify="right")
    for series, step in dict.fromkeys((cell["series"], cell["step"]) for cell in cells):
        mine = [cell for cell in cells if (cell["series"], cell["step"]) == (series, step)]
        shown = {cell["group_size"]: _accuracy_cell(cell) for cell in mine}
        table.add_row(f"{series}\nstep {step}", *(shown.get(size, "-") for size in sizes))
    return table


def _accuracy_cell(cell: dict[str, Any]) -> str:
    mark = "*" if cell["best"] else {False: "~", True: "", None: "?"}[cell["distinct"]]
    return f"{cell['accuracy']:.3f}{mark}\n[{cell['low']:.3f}, {cell['high']:.3f}]"


def notes(cells: list[dict[str, Any]], marks: tuple[str, str], missing: list[str]) -> list[str]:
    """What the numbers are of, for captions; `marks` of the best and of those not told from it."""
    best, alike = marks
    found = [
        f"{cells[0]['questions']} test questions; 95 % intervals {_over(cells)}.",
        f"{best}: largest mean; {alike}: not told from it, the interval of the difference "
        f"({_pairing(cells)}) reaches 0; these intervals are 95 % simultaneous over the G of a row "
        "(Bonferroni), the best chosen on the same data.",
    ]
    if any(cell["distinct"] is None and not cell["best"] for cell in cells):
        found.append("Where fewer than two seeds are shared nothing is compared (?).")
    return found + ([f"Missing: {'; '.join(missing)}."] if missing else [])


def _over(cells: list[dict[str, Any]]) -> str:
    """What the intervals of the means are over; of both kinds, which is which."""
    counts = sorted({cell["seeds"] for cell in cells if cell["seeds"] > 1})
    one = sorted({cell["group_size"] for cell in cells if cell["seeds"] == 1})
    alone = "over questions, without the variation of training (one seed"
    if not counts:
        return f"{alone})"
    several = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    seeds = f"over seeds ({several}), given the questions"
    return f"{seeds}; {alone}: G = {', '.join(map(str, one))})" if one else seeds


def _pairing(cells: list[dict[str, Any]]) -> str:
    """How the differences from the best were taken."""
    compared = [cell for cell in cells if cell["distinct"] is not None]
    kinds = {cell["shared_seeds"] > 1 for cell in compared}
    paired, alone = "paired on shared seeds", "of one seed not paired"
    return {(True,): paired, (False,): "not paired"}.get(tuple(kinds), f"{paired}; {alone}")
