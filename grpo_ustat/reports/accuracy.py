"""Held-out accuracy of training runs against G: cells over seeds, the best and those like it.

Cells are compared within a family: in the table by steps the G of one series, budget and step (the
paper's Figure 5), in the table of budgets every (n, G) of one series at one step (its Table 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_ustat.estimators.intervals import (
    LEVEL,
    Interval,
    t_interval,
)
from grpo_ustat.reports.found import Run
from grpo_ustat.reports.series import label
from grpo_ustat.reports.sheets import Sheet

BY_STEP = ("series", "rollouts", "step"), ("group_size",)  # family, cell
BY_BUDGET = ("series", "step"), ("rollouts", "group_size")
GAP = ("difference", "difference_low", "difference_high")

Cell = dict[str, Any]


def accuracy_rows(runs: Sequence[Run], asked: Sequence[str]) -> list[dict[str, Any]]:
    """A row for every run and step.

    Args:
        runs: of `train`.
        asked: keys that tell series apart.
    """
    return [_of(run, asked) | row for run in runs for row in map(_row, run.evals)]


def _of(run: Run, asked: Sequence[str]) -> dict[str, Any]:
    config = run.config
    of = {"run": run.label, "series": label(run.keys, asked), "dataset": config["dataset"]["name"]}
    of |= {"rollouts": config["budget"]["rollouts"]}
    return of | {"group_size": config["group_size"], "seed": config["seed"]}


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("step", "decoding", "accuracy", "low", "high", "n")}


def accuracy_cells(rows: Sequence[dict[str, Any]], family=BY_STEP) -> list[Cell]:
    """One row per cell: mean over its seeds, and how far it is from the best of its family.

    `low` and `high` are over seeds, given the questions (t, seeds - 1 degrees of freedom); with one
    seed they are the run's own, over questions, and `over` says which. `questions_low` and
    `questions_high` are over questions, given the seeds: the mean of the runs' own, which is not
    shorter than the mean's, as a mean's standard deviation is at most the mean of theirs.

    `best` marks the largest mean of a family. The difference from it is paired on the seeds that
    both have; with one seed it is of two independent samples of questions, wider than a paired one
    and without the variation of training. `distinct` says whether its interval lies below 0: the
    k - 1 differences of a family are each at 1 - 0.05 / (k - 1) (Bonferroni), so that a truly best
    cell is told from the largest mean, whichever that is, in at most 2.5 % of families (Hsu 1984,
    of comparisons with the best). The best is chosen on the same seeds.

    Args:
        rows: see `accuracy_rows`.
        family: `BY_STEP` or `BY_BUDGET`.
    """
    within, by = family
    families: dict[tuple, dict[tuple, dict[int, dict]]] = {}
    for row in rows:
        cells = families.setdefault(tuple(row[key] for key in within), {})
        cells.setdefault(tuple(row[key] for key in by), {})[row["seed"]] = row
    return [cell for cells in families.values() for cell in _compared(cells, (*within, *by))]


def _compared(cells: dict[tuple, dict[int, dict]], keys: Sequence[str]) -> list[Cell]:
    """The cells of one family."""
    means = {key: over_seeds(runs) for key, runs in cells.items()}
    best = max(means, key=lambda key: means[key].estimate)
    level = 1 - (1 - LEVEL) / max(len(means) - 1, 1)
    found = []
    for key, runs in cells.items():
        gap = None if key == best else difference(runs, cells[best], level)
        first = next(iter(runs.values()))
        found.append(
            {name: first[name] for name in keys}
            | dict(zip(("accuracy", "low", "high"), means[key], strict=True))
            | {"over": "seeds" if len(runs) > 1 else "questions", "seeds": len(runs)}
            | {"questions": first["n"]}
            | {f"questions_{end}": _mean(runs, end) for end in ("low", "high")}
            | {"best": key == best, "shared_seeds": len(runs.keys() & cells[best].keys())}
            | dict(zip(GAP, gap or (None, None, None), strict=True))
            | {"distinct": None if gap is None else gap.high < 0}
        )
    return found


def _mean(runs: dict[int, dict[str, Any]], key: str) -> float:
    return float(np.mean([run[key] for run in runs.values()]))


def over_seeds(runs: dict[int, dict[str, Any]]) -> Interval:
    """Mean accuracy of runs by seed, with its interval.

    >>> runs = {seed: {"accuracy": x, "n": 500} for seed, x in enumerate((0.5, 0.6, 0.7))}
    >>> [round(x, 3) for x in over_seeds(runs)]  # t_2 = 4.303 times 0.1 / sqrt(3)
    [0.6, 0.352, 0.848]
    """
    if len(runs) == 1:
        (run,) = runs.values()
        return Interval(run["accuracy"], run["low"], run["high"])
    found = _of_shares([run["accuracy"] for run in runs.values()], _grain(runs), LEVEL)
    return Interval(*(min(max(x, 0.0), 1.0) for x in found))


def difference(
    runs: dict[int, dict[str, Any]], best: dict[int, dict[str, Any]], level: float = LEVEL
) -> Interval | None:
    """Accuracy less the best one, see `accuracy_cells`; None where too few seeds are shared."""
    shared = sorted(runs.keys() & best.keys())
    if len(shared) > 1:
        changes = [runs[seed]["accuracy"] - best[seed]["accuracy"] for seed in shared]
        return _of_shares(changes, _grain(runs) + _grain(best), level)
    if len(runs) > 1 or len(best) > 1:
        return None
    (mine,), (its,) = runs.values(), best.values()
    variance = sum(((x["high"] - x["low"]) / 2 / 1.96) ** 2 for x in (mine, its))
    return t_interval(mine["accuracy"] - its["accuracy"], variance, math.inf, level)


def _grain(runs: dict[int, dict[str, Any]]) -> float:
    """Variance of what lies between the multiples of 1/n that accuracies are: 1 / (12 n^2)."""
    return 1 / (12 * min(run["n"] for run in runs.values()) ** 2)


def _of_shares(values: Sequence[float], grain: float, level: float) -> Interval:
    """Mean and t interval. Few values of few questions are often all alike, which no variance of 0
    explains: it is never taken to be less than that of their rounding.

    >>> [round(x, 3) for x in _of_shares([0.3, 0.3, 0.3], 1 / (12 * 60**2), 0.95)]
    [0.3, 0.288, 0.312]
    """
    variance = max(np.var(values, ddof=1), grain) / len(values)
    return t_interval(float(np.mean(values)), float(variance), len(values) - 1, level)


def accuracy_sheet(cells: Sequence[Cell], data: Sequence[Cell]) -> Sheet:
    """A row per series, budget and step, a column per group size.

    Args:
        cells: of `BY_STEP`, of the steps to show.
        data: of all steps.
    """
    lines = dict.fromkeys((c["series"], c["rollouts"], c["step"]) for c in cells)
    heads = {line: "\n".join(filter(None, (_series(*line), f"step {line[2]}"))) for line in lines}
    return Sheet(
        name="accuracy",
        title="Held-out accuracy",
        columns=["", *_sizes(cells)],
        rows=_grid(cells, lambda c: heads[c["series"], c["rollouts"], c["step"]]),
        notes=[*notes(cells, ("*", "~"), "the G of a row"), OVER],
        data=data,
        drawn=notes(cells, ("ring", "filled"), "the G of a line"),
    )


def budget_sheet(cells: Sequence[Cell]) -> Sheet:
    """The paper's Table 2, a row per series and budget, a column per group size.

    Args:
        cells: of `BY_BUDGET`.
    """
    return Sheet(
        name="budget",
        title="Held-out accuracy by rollouts a step (n) and group size (G)",
        columns=["", *_sizes(cells)],
        rows=_grid(cells, lambda c: f"{_series(c['series'], c['rollouts'])}\nstep {c['step']}"),
        notes=[*notes(cells, ("*", "~"), "the (n, G) of a series"), OVER],
        data=cells,
    )


def _series(series: str, rollouts: int, *_: Any) -> str:
    return " ".join(filter(None, (f"n={rollouts}", series)))


def _sizes(cells: Sequence[Cell]) -> list[str]:
    return [f"G = {size}" for size in sorted({cell["group_size"] for cell in cells})]


OVER = (
    "±: half the interval's width, its ends are in the CSV file; s: over seeds, given the "
    "questions; q: over questions, given the seeds, the mean of the runs' own, which is not too "
    "short; 4 of 5: seeds."
)


def _grid(cells: Sequence[Cell], head) -> list[list[str]]:
    """A line for every head, a text for every group size."""
    sizes = sorted({cell["group_size"] for cell in cells})
    most = max(cell["seeds"] for cell in cells)
    lines: dict[str, dict[int, str]] = {}
    for cell in cells:
        lines.setdefault(head(cell), {})[cell["group_size"]] = _text(cell, most)
    return [[name, *(line.get(size, "-") for size in sizes)] for name, line in lines.items()]


def _text(cell: Cell, most: int) -> str:
    mark = "*" if cell["best"] else {False: "~", True: "", None: "?"}[cell["distinct"]]
    lines = [f"{cell['accuracy']:.3f}{mark}"]
    if cell["over"] == "seeds":
        lines.append(f"s {_half(cell['low'], cell['high'])}")
    lines.append(f"q {_half(cell['questions_low'], cell['questions_high'])}")
    if cell["seeds"] < most:
        lines.append(f"{cell['seeds']} of {most}")
    return "\n".join(lines)


def _half(low: float, high: float) -> str:
    return f"±{(high - low) / 2:.3f}"


def notes(cells: Sequence[Cell], marks: tuple[str, str], among: str) -> list[str]:
    """What the numbers are of, for captions; `marks` of the best and of those not told from it."""
    best, alike = marks
    counts = sorted({cell["questions"] for cell in cells})
    questions = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    found = [f"{questions} test questions; 95 % intervals {_over(cells)}."]
    if not all(cell["best"] for cell in cells):
        found.append(
            f"{best}: largest mean; {alike}: not told from it, the interval of the difference "
            f"({_pairing(cells)}) reaches 0; these intervals are 95 % simultaneous over {among} "
            "(Bonferroni), the best chosen on the same data."
        )
    if any(cell["distinct"] is None and not cell["best"] for cell in cells):
        found.append("Where fewer than two seeds are shared nothing is compared (?).")
    return found


def _over(cells: Sequence[Cell]) -> str:
    """What the intervals of the means are over; of both kinds, which is which."""
    counts = sorted({cell["seeds"] for cell in cells if cell["seeds"] > 1})
    one = sorted({cell["group_size"] for cell in cells if cell["seeds"] == 1})
    alone = "over questions, without the variation of training (one seed"
    if not counts:
        return f"{alone})"
    several = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    seeds = f"over seeds ({several}), given the questions"
    return f"{seeds}; {alone}: G = {', '.join(map(str, one))})" if one else seeds


def _pairing(cells: Sequence[Cell]) -> str:
    """How the differences from the best were taken."""
    compared = [cell for cell in cells if cell["distinct"] is not None]
    kinds = {cell["shared_seeds"] > 1 for cell in compared}
    paired, alone = "paired on shared seeds", "of one seed not paired"
    return {(True,): paired, (False,): "not paired"}.get(tuple(kinds), f"{paired}; {alone}")
