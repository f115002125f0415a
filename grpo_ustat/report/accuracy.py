"""Held-out accuracy or mean reward of training runs, averaged over seeds and compared.

Runs that differ only in the seed form a cell, and their mean is an entry of a table. Cells that are
compared with each other form a family: each cell is compared with the best cell of its family.
Which cells form a family depends on the table:

- Table by steps: all swept values on one line of the figure at one step, for example all G (the
  paper's Figure 5).
- Table of budgets: all pairs (n, G) of one series at one step (the paper's Table 2). A series
  consists of the runs that differ only in n, G and seed.
- Table of settings: all settings with the same n, G and step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from grpo_ustat.estimators.intervals import CONFIDENCE, Interval, t_interval
from grpo_ustat.pages.tables import Table
from grpo_ustat.records import MEAN_REWARD, joint_quantity
from grpo_ustat.report.settings import Axis, setting_labels
from grpo_ustat.runs.record import RunRecord

Keys = tuple[str, ...]
# Keys that identify a family of cells, then keys that identify a cell within its family.
BY_STEP: tuple[Keys, Keys] = ("series", "rollouts", "step"), ("group_size",)
BY_LINE: tuple[Keys, Keys] = ("line", "step"), ("x",)
BY_BUDGET: tuple[Keys, Keys] = ("series", "step"), ("rollouts", "group_size")
BY_SETTING: tuple[Keys, Keys] = ("test", "rollouts", "group_size", "step"), ("setting",)
EVALUATED = ("step", "decoding", "quantity", "mean_reward", "low", "high", "n")
CELL_KEYS = ("series", "rollouts", "step", "group_size", "line", "x", "test", "setting")
FEW_SEEDS = (
    "(4 of 5), for example, marks a mean over 4 seeds if the mean with the most seeds is over 5."
)
# Mark on a mean that is significantly less than the largest mean.
LESS = "*"

AccuracyCell = dict[str, Any]


def accuracy_rows(
    runs: Sequence[RunRecord], series_keys: Sequence[str], axis: Axis
) -> list[dict[str, Any]]:
    """Return one row for each run and evaluated step.

    Args:
        runs: Training runs.
        series_keys: Configuration keys in which the series differ.
    """
    return [
        {
            "run": run.label,
            **setting_labels(run, series_keys, axis),
            "dataset": run.dataset,
            "rollouts": run.config["budget"]["rollouts"],
            "group_size": run.config["group_size"],
            "seed": run.config["seed"],
        }
        | {key: row[key] for key in EVALUATED}
        for run in runs
        for row in run.evals
    ]


def accuracy_cells(
    rows: Sequence[dict[str, Any]], family: tuple[Keys, Keys] = BY_STEP, pooled: bool = False
) -> list[AccuracyCell]:
    """Return a row per cell, with its mean over seeds and its difference from the best cell.

    `low` and `high` are the ends of a t interval over seeds, conditional on the questions, with
    (seeds - 1) degrees of freedom; `over` is then "seeds". If a cell has one seed, they are the
    ends of the run's interval over questions, and `over` is "questions". `questions_low` and
    `questions_high` are the ends of an interval over questions, conditional on the seeds. Each end
    is the average of this end over the runs' intervals. This interval is conservative, because the
    standard deviation of a mean is at most the mean of the runs' standard deviations.

    `best` is True for the cell with the largest mean in its family. Every other cell is compared
    with this cell on the seeds that both cells have. If each of the two cells has only one seed,
    the questions of the two runs are treated as independent samples. The interval of the difference
    is then wider than a paired interval, and it does not include variation between training runs.
    `distinct` is True if the interval of the difference lies below 0. The k - 1 differences of a
    family each have the confidence level 1 - 0.05 / (k - 1) (Bonferroni). So the truly best cell is
    declared different from the largest mean in at most 2.5 % of families (Hsu 1984, comparisons
    with the best), although the largest mean is chosen on the same seeds. `decided` is True if at
    least one cell of the family is distinct. If it is False, any cell of the family may be the
    best.

    Args:
        rows: See `accuracy_rows`.
        family: One of `BY_STEP`, `BY_LINE`, `BY_BUDGET` and `BY_SETTING`.
        pooled: If True, all differences in a family share one variance with `difference_dof`
            degrees of freedom (see `residual_variance`). If False, each difference has a separate
            variance.
    """
    within, by = family
    families: dict[tuple, dict[tuple, dict[int, dict]]] = {}
    for row in rows:
        cells = families.setdefault(tuple(row[key] for key in within), {})
        cells.setdefault(tuple(row[key] for key in by), {})[row["seed"]] = row
    compared = []
    for cells in families.values():
        law = residual_variance(list(cells.values())) if pooled else None
        means = {key: over_seeds(runs) for key, runs in cells.items()}
        best = max(means, key=lambda key: means[key].estimate)
        level = 1 - (1 - CONFIDENCE) / max(len(means) - 1, 1)
        of_family = []
        for key, runs in cells.items():
            gap = None if key == best else difference(runs, cells[best], level, law)
            first = next(iter(runs.values()))
            row = {name: first[name] for name in CELL_KEYS if name in first}
            row |= {"quantity": joint_quantity(run["quantity"] for run in runs.values())}
            row |= dict(zip(("mean_reward", "low", "high"), means[key], strict=True))
            row |= {"over": "seeds" if len(runs) > 1 else "questions", "seeds": len(runs)}
            row |= {"questions": first["n"], "sd": None}
            if len(runs) > 1:
                row["sd"] = float(np.std([run["mean_reward"] for run in runs.values()], ddof=1))
            for end in ("low", "high"):
                row[f"questions_{end}"] = float(np.mean([run[end] for run in runs.values()]))
            row |= {"best": key == best, "shared_seeds": len(runs.keys() & cells[best].keys())}
            names = ("difference", "difference_low", "difference_high")
            row |= dict(zip(names, gap or (None, None, None), strict=True))
            row["difference_dof"] = law[1] if law and row["shared_seeds"] > 1 else None
            of_family.append(row | {"distinct": None if gap is None else gap.high < 0})
        decided = any(row["distinct"] for row in of_family)
        compared += [row | {"decided": decided} for row in of_family]
    return compared


def pooled_cells(cells: Sequence[AccuracyCell]) -> list[AccuracyCell]:
    """Recompute intervals over seeds with a variance pooled over the cells of each line and step.

    The variance s^2 is pooled over the cells that have several seeds. The half-width is `t_dof s /
    sqrt(seeds)`, with `dof` the sum of (seeds - 1) over these cells.

    Pooling shortens the intervals. For example, the t quantile is 12.7 for one cell with two seeds
    (1 degree of freedom), but 2.4 for six pooled cells with two seeds each (6 degrees of freedom).

    Pooling assumes that the variances of all cells are equal. If they differ, the intervals of
    noisy cells are too short, and those of the other cells are too long. A simulation with 40 000
    draws had six cells of three seeds, with standard deviations from 1 to 2. There, the mean
    coverage of the 95 % intervals was 94 %. The coverage was 88 % for the noisiest cell and 99 %
    for the least noisy cell.

    Args:
        cells: Cells of `BY_LINE`. Intervals of cells with a single seed stay unchanged, and their
            `dof` is None.
    """
    groups: dict[tuple, list[AccuracyCell]] = {}
    for cell in cells:
        groups.setdefault((cell["line"], cell["step"]), []).append(cell)
    # Variance between runs and its degrees of freedom, by line and step.
    laws = {}
    for key, group in groups.items():
        several = [cell for cell in group if cell["sd"] is not None]
        dof = sum(cell["seeds"] - 1 for cell in several)
        if dof:
            variance = sum((cell["seeds"] - 1) * cell["sd"] ** 2 for cell in several) / dof
            laws[key] = max(variance, _rounding_variance(several, "questions")), dof
    pooled = []
    for cell in cells:
        if cell["sd"] is None:
            pooled.append(cell | {"dof": None})
            continue
        variance, dof = laws[cell["line"], cell["step"]]
        interval = t_interval(cell["mean_reward"], variance / cell["seeds"], dof)
        _, low, high = _bounded(interval, [cell])
        pooled.append(cell | {"low": low, "high": high, "dof": dof})
    return pooled


def over_seeds(runs: dict[int, dict[str, Any]]) -> Interval:
    """Return the mean over runs with different seeds, and its interval.

    >>> runs = {i: {"mean_reward": x, "n": 500} for i, x in enumerate((0.5, 0.6, 0.7))}
    >>> _ = [run.update(quantity="accuracy") for run in runs.values()]
    >>> [round(x, 3) for x in over_seeds(runs)]  # t_2 = 4.303 times 0.1 / sqrt(3)
    [0.6, 0.352, 0.848]
    """
    if len(runs) == 1:
        (run,) = runs.values()
        return Interval(run["mean_reward"], run["low"], run["high"])
    means = [run["mean_reward"] for run in runs.values()]
    interval = _seeds_interval(means, _rounding_variance(runs.values()), CONFIDENCE)
    return _bounded(interval, runs.values())


def _bounded(interval: Interval, rows: Iterable[dict[str, Any]]) -> Interval:
    """Clip the interval of an accuracy to [0, 1]; return other intervals unchanged."""
    if joint_quantity(row["quantity"] for row in rows) == MEAN_REWARD:
        return interval
    return Interval(*(min(max(x, 0.0), 1.0) for x in interval))


def residual_variance(cells: Sequence[dict[int, dict[str, Any]]]) -> tuple[float, int] | None:
    """Estimate the variance of run means that remains after the effects of cell and seed.

    The estimate is `sum_cs (y_cs - y_c. - y_.s + y_..)^2 / ((C - 1) (S - 1))`, the residual
    variance of a randomised block design. Here C is the number of cells with several seeds, and S
    is the number of seeds that these cells share. The residual variance is assumed to be equal in
    all cells. The difference between two cell means over S seeds has the variance 2/S times this
    estimate. If there are only two cells, twice the estimate is the variance of the paired
    differences.

    Args:
        cells: Runs by seed, for each cell.

    Returns:
        Variance and degrees of freedom; None if C < 2 or S < 2.

    >>> runs = [[0.5, 0.75], [0.25, 1.0]]
    >>> cells = [{seed: {"mean_reward": x} for seed, x in enumerate(own)} for own in runs]
    >>> residual_variance(cells)  # differences 0.25 and -0.25: variance 0.125
    (0.0625, 1)
    """
    several = [runs for runs in cells if len(runs) > 1]
    shared = sorted(set.intersection(*map(set, several))) if several else []
    if len(several) < 2 or len(shared) < 2:
        return None
    y_CS = np.array([[runs[seed]["mean_reward"] for seed in shared] for runs in several])
    residual_CS = y_CS - y_CS.mean(axis=1, keepdims=True) - y_CS.mean(axis=0) + y_CS.mean()
    dof = (len(several) - 1) * (len(shared) - 1)
    return float(np.square(residual_CS).sum() / dof), dof


def difference(
    runs: dict[int, dict[str, Any]],
    best: dict[int, dict[str, Any]],
    level: float = CONFIDENCE,
    law: tuple[float, int] | None = None,
) -> Interval | None:
    """Return a cell's mean minus the best cell's mean; None if the cells share too few seeds.

    `accuracy_cells` explains the interval.

    Args:
        runs, best: Runs of the two cells, by seed.
        level: Confidence level.
        law: Variance and degrees of freedom from `residual_variance`; None: use the variance of the
            differences between the two cells.
    """
    shared = sorted(runs.keys() & best.keys())
    if len(shared) > 1:
        changes = [runs[seed]["mean_reward"] - best[seed]["mean_reward"] for seed in shared]
        rounding = _rounding_variance(runs.values()) + _rounding_variance(best.values())
        if law is not None:
            variance = max(2 * law[0], rounding) / len(shared)
            return t_interval(float(np.mean(changes)), variance, law[1], level)
        return _seeds_interval(changes, rounding, level)
    if len(runs) > 1 or len(best) > 1:
        return None
    (single,), (largest,) = runs.values(), best.values()
    variance = sum(((x["high"] - x["low"]) / 2 / 1.96) ** 2 for x in (single, largest))
    return t_interval(single["mean_reward"] - largest["mean_reward"], variance, math.inf, level)


def _rounding_variance(rows: Iterable[dict[str, Any]], questions: str = "n") -> float:
    """Return the variance due to rounding an accuracy to a multiple of 1/n: 1 / (12 n^2).

    n is the smallest number of questions in the rows. For a mean reward the result is 0, because
    the step between possible values is unknown.

    Args:
        rows: Rows of runs or cells.
        questions: Column with the number of questions.
    """
    rows = list(rows)
    if joint_quantity(row["quantity"] for row in rows) == MEAN_REWARD:
        return 0.0
    return 1 / (12 * min(row[questions] for row in rows) ** 2)


def _seeds_interval(values: Sequence[float], rounding: float, level: float) -> Interval:
    """Return the mean of values and its t interval.

    The variance is at least the rounding variance, because with few seeds and few questions all
    accuracies are often equal although their true variance is not 0.

    >>> [round(x, 3) for x in _seeds_interval([0.3, 0.3, 0.3], 1 / (12 * 60**2), 0.95)]
    [0.3, 0.288, 0.312]
    """
    variance = max(np.var(values, ddof=1), rounding) / len(values)
    return t_interval(float(np.mean(values)), float(variance), len(values) - 1, level)


def accuracy_table(
    cells: Sequence[AccuracyCell], data: Sequence[AccuracyCell], axis: Axis
) -> Table:
    """Return a table with a row per line and step, and a column per value on the axis.

    Args:
        cells: Cells of `BY_LINE` at the steps to show.
        data: Cells of all steps.
    """
    name = joint_quantity(cell["quantity"] for cell in [*cells, *data])
    present = {cell["x"] for cell in cells}
    values = [value for value in axis.values if value in present]
    names = [axis.text(value) for value in values]
    places = [(cell["line"], values.index(cell["x"]), cell) for cell in cells]
    return Table(
        name=name.replace(" ", "_"),
        title=f"Held-out {name}",
        columns=["", *names],
        rows=_grid(places, names),
        notes=notes(cells, LESS, "in the same row"),
        data=data,
        figure_notes=notes(cells, "Hollow markers", "on the same line"),
        headings=True,
    )


def budget_table(cells: Sequence[AccuracyCell]) -> Table:
    """Return the paper's Table 2: a row per series and budget, and a column per group size.

    Args:
        cells: Cells of `BY_BUDGET`.
    """
    name = joint_quantity(cell["quantity"] for cell in cells)
    sizes = sorted({cell["group_size"] for cell in cells})
    names = [f"G = {size}" for size in sizes]
    places = [(budget_name(cell), sizes.index(cell["group_size"]), cell) for cell in cells]
    return Table(
        name="budget",
        title=f"Held-out {name} by rollouts per step (n) and group size (G)",
        columns=["", *names],
        rows=_grid(places, names),
        notes=notes(cells, LESS, "in the same series"),
        data=cells,
        headings=True,
    )


def settings_table(cells: Sequence[AccuracyCell]) -> Table:
    """Return a table with a row per setting, with its difference from the largest mean.

    The largest mean is taken over the settings with the same n and G.

    Args:
        cells: Cells of `BY_SETTING`.
    """
    rows = []
    quantity = joint_quantity(cell["quantity"] for cell in cells)
    most = max(cell["seeds"] for cell in cells)
    names = {cell["setting"].partition("=")[0] for cell in cells}
    single = len(names) == 1 and not any(" " in cell["setting"] for cell in cells)
    for cell in cells:
        heading = " ".join(
            filter(None, (budget_name(cell | {"series": cell["test"]}), f"G={cell['group_size']}"))
        )
        verdict = "significantly less" if cell["distinct"] else "not significantly different"
        difference = "-"
        if cell["difference"] is None:
            verdict = "largest mean" if cell["best"] else "not compared"
        else:
            difference = "{difference:+.3f} [{difference_low:+.3f}, {difference_high:+.3f}]".format(
                **cell
            )
        name = cell["setting"].partition("=")[2] if single else cell["setting"] or "-"
        heading = f"{heading}, step {cell['step']}"
        rows.append([heading, name, _cell_text(cell, most), difference, verdict])
    return Table(
        name="settings",
        title=f"Held-out {quantity} by setting, and difference from the largest mean",
        columns=["", *(names if single else ("setting",)), quantity, "difference", "verdict"],
        rows=rows,
        notes=notes(cells, LESS, "at the same n and G"),
        data=cells,
        headings=True,
    )


def budget_name(cell: AccuracyCell) -> str:
    """Return text that names a cell's budget and series."""
    return " ".join(filter(None, (f"n={cell['rollouts']}", cell["series"])))


def _grid(
    places: Sequence[tuple[str, int, AccuracyCell]], columns: Sequence[str]
) -> list[list[str]]:
    """Return the rows of a table.

    Args:
        places: Tuples of row heading (without the step), index of the column, and cell.
        columns: Names of the columns.
    """
    most = max(cell["seeds"] for *_, cell in places)
    rows: dict[str, list[str]] = {}
    for name, column, cell in places:
        heading = f"{name}, step {cell['step']}"
        rows.setdefault(heading, ["-"] * len(columns))[column] = _cell_text(cell, most)
    return [[name, *row] for name, row in rows.items()]


def _cell_text(cell: AccuracyCell, most: int) -> str:
    """Format a mean above its interval, and add the number of seeds if some seeds are missing.

    A mean significantly below the largest mean is marked with a star. If the family contains such a
    mean, a mean that could not be compared is marked with a question mark.
    """
    mark = LESS if cell["distinct"] else ""
    if cell["decided"] and cell["distinct"] is None and not cell["best"]:
        mark = "?"
    few = f"\n({cell['seeds']} of {most})" if cell["seeds"] < most else ""
    return f"{cell['mean_reward']:.3f}{mark}\n[{cell['low']:.3f}, {cell['high']:.3f}]{few}"


def notes(cells: Sequence[AccuracyCell], mark: str, among: str) -> list[str]:
    """Return notes on what the intervals cover and on the meaning of the mark.

    Args:
        cells: Cells that the table shows.
        mark: Mark on means that are significantly less than the largest mean.
        among: Words that say which means are compared, for example "in the same row".
    """
    counts = sorted({cell["questions"] for cell in cells})
    questions = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    quantity = joint_quantity(cell["quantity"] for cell in cells).capitalize()
    lines = [f"{quantity} is measured on {questions} test questions. {_interval_source(cells)}"]
    if len({cell["quantity"] for cell in cells}) > 1:
        lines.append("The mean reward equals the accuracy if all rewards are 0 or 1.")
    compared = [cell for cell in cells if cell["distinct"] is not None]
    if compared:
        kinds = {cell["shared_seeds"] > 1 for cell in compared}
        pairing = "paired by shared seed" if True in kinds else "not paired"
        if any(cell["difference_dof"] for cell in compared):
            pairing += " and use a pooled variance"
        if len(kinds) > 1:
            pairing += ", except between two means with one seed each"
        intervals = (
            "The test uses 95 % intervals of the differences, which hold simultaneously "
            f"(Bonferroni). Differences are {pairing}."
        )
        if any(cell["decided"] for cell in compared):
            lines.append(
                f"{mark}: mean significantly below the largest mean {among}. {intervals} The "
                "largest mean was selected on the same data, so it tends to be too high."
            )
        else:
            lines.append(f"The means {among} do not differ significantly. {intervals}")
    if any(cell["distinct"] is None and not cell["best"] for cell in cells):
        lines.append(
            "A mean that shares fewer than two seeds with the largest mean is not compared with "
            "it. It is marked '?' if another mean is significantly below the largest."
        )
    if len({cell["seeds"] for cell in cells}) > 1:
        lines.append(FEW_SEEDS)
    return lines


def captions(cells: Sequence[AccuracyCell], among: str) -> list[str]:
    """Return a line that explains the dots, bars and hollow markers of a figure.

    Args:
        cells: Cells of `BY_LINE`; see `pooled_cells`.
        among: Words that say which means are compared, for example "on the same line".
    """
    dofs = sorted({cell["dof"] for cell in cells if cell["dof"] is not None})
    bars = "Bars are 95 % intervals for new questions; each mean has one seed."
    if dofs:
        dof = f"{dofs[0]}" if len(dofs) == 1 else f"{dofs[0]} to {dofs[-1]}"
        bars = (
            "Each dot is one seed. Bars are 95 % t intervals over seeds, with a pooled variance "
            f"({dof} degrees of freedom)."
        )
    difference = ""
    if any(cell["decided"] for cell in cells):
        difference = " Hollow markers are means significantly below the largest mean."
    elif any(not cell["best"] for cell in cells):
        difference = f" The means {among} do not differ significantly."
    return [f"{bars}{difference}"]


def _interval_source(cells: Sequence[AccuracyCell]) -> str:
    """Describe the variation that the intervals cover: between seeds, questions, or a mixture."""
    counts = sorted({cell["seeds"] for cell in cells if cell["seeds"] > 1})
    over_questions = (
        "cover the variation from drawing other test questions, but not the variation between "
        "training runs"
    )
    if not counts:
        return f"All means have one seed. Their 95 % intervals {over_questions}."
    several = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    seeds = (
        f"The 95 % t intervals cover the variation between {several} seeds, but not the variation "
        "from drawing other questions."
    )
    dofs = sorted({cell["dof"] for cell in cells if cell.get("dof") is not None})
    if dofs:
        dof = f"{dofs[0]}" if len(dofs) == 1 else f"{dofs[0]} to {dofs[-1]}"
        seeds += (
            f" Their variance has {dof} degrees of freedom: it is pooled over all means that are "
            "on the same line of the figure at the same step."
        )
    single = [cell for cell in cells if cell["seeds"] == 1]
    if not single:
        return seeds
    sizes = sorted({cell["group_size"] for cell in single})
    where = f"one seed (at G = {', '.join(map(str, sizes))})"
    return f"{seeds} The intervals of means with {where} {over_questions}."
