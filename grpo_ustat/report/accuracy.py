"""Held-out accuracy or mean reward of training runs: cells over seeds, compared with the best.

Cells are compared within a family. In the table by steps a family is what was swept, of one line
and step (the G of the paper's Figure 5). In the table of budgets it is every (n, G) of one series
at one step (the paper's Table 2). In the table of settings it is the settings of one n, G and step.
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
# Keys of a family of cells, and of a cell in it.
BY_STEP: tuple[Keys, Keys] = ("series", "rollouts", "step"), ("group_size",)
BY_LINE: tuple[Keys, Keys] = ("line", "step"), ("x",)
BY_BUDGET: tuple[Keys, Keys] = ("series", "step"), ("rollouts", "group_size")
BY_SETTING: tuple[Keys, Keys] = ("test", "rollouts", "group_size", "step"), ("setting",)
EVALUATED = ("step", "decoding", "quantity", "mean_reward", "low", "high", "n")
CELL_KEYS = ("series", "rollouts", "step", "group_size", "line", "x", "test", "setting")
FEW_SEEDS = "(4 of 5): how many seeds of how many."
# Mark of a mean that is significantly less than the largest one.
LESS = "*"

AccuracyCell = dict[str, Any]


def accuracy_rows(
    runs: Sequence[RunRecord], series_keys: Sequence[str], axis: Axis
) -> list[dict[str, Any]]:
    """Make a row for every run and step.

    Args:
        runs: training runs.
        series_keys: configuration keys in which the series differ.
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
    """Make one row per cell: the mean over its seeds, and its difference from the family's best.

    `low` and `high` are over seeds, given the questions (t, seeds - 1 degrees of freedom); with one
    seed they are the run's own, over questions; `over` names the kind. `questions_low` and
    `questions_high` are over questions, given the seeds: the average of the runs' own intervals. It
    is not shorter than the interval of the mean, because a mean's standard deviation is at most the
    mean of the runs' standard deviations.

    `best` marks the largest mean of a family. The difference from it is paired on the seeds that
    both have. With one seed it is the difference of two independent samples of questions, wider
    than a paired one and without the variation of training. `distinct` is True if its interval lies
    below 0. The k - 1 differences of a family are each at 1 - 0.05 / (k - 1) (Bonferroni), so that
    a truly best cell is separated from the largest mean, whichever that is, in at most 2.5 % of
    families (Hsu 1984, of comparisons with the best). The best is chosen on the same seeds.
    `decided` is True if any cell of the family is distinct: if none is, the largest mean is no best
    one.

    Args:
        rows: see `accuracy_rows`.
        family: `BY_STEP`, `BY_LINE`, `BY_BUDGET` or `BY_SETTING`.
        pooled: differences of a family share one variance, see `residual_variance`, of
            `difference_dof` degrees of freedom; else each has its own.
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
    """Give cells intervals over seeds from one variance, pooled over the cells of a line and step.

    Cells with several seeds are pooled: the half-width is `t_dof s / sqrt(seeds)`, with `dof` the
    sum of their seeds - 1.

    Two seeds of one cell have t_1 = 12.7, six such cells together t_6 = 2.4. The cells' variances
    are taken to be equal. If they are not, the intervals of noisier cells are too short and others
    too long: with standard deviations from 1 to 2 over six cells of three seeds, intervals
    cover 94 % on average, 88 % for the noisiest cell and 99 % for the quietest (40 000 draws).

    Args:
        cells: of `BY_LINE`; cells of a single seed stay as they are, with `dof` None.
    """
    groups: dict[tuple, list[AccuracyCell]] = {}
    for cell in cells:
        groups.setdefault((cell["line"], cell["step"]), []).append(cell)
    # Variance of a run, and its degrees of freedom.
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
    """Return the mean of runs by seed, with its interval.

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
    """Clip the interval of an accuracy to [0, 1]; return a mean reward's interval as it is."""
    if joint_quantity(row["quantity"] for row in rows) == MEAN_REWARD:
        return interval
    return Interval(*(min(max(x, 0.0), 1.0) for x in interval))


def residual_variance(cells: Sequence[dict[int, dict[str, Any]]]) -> tuple[float, int] | None:
    """Estimate the variance of a run's mean that neither its cell nor its seed explains.

    The result is `sum_cs (y_cs - y_c. - y_.s + y_..)^2 / ((C - 1) (S - 1))` and its degrees of
    freedom, from a randomised block design with the S seeds that all C cells of several seeds have;
    None with fewer than two of either.

    A difference of two cells over S seeds has twice this variance over S: with two cells it is that
    of their own differences. The cells' residuals are taken to have one variance.

    Args:
        cells: runs by seed, of every cell.

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
    """Return a cell's mean minus the best cell's mean; None if too few seeds are shared.

    See `accuracy_cells`.

    Args:
        runs, best: runs of the two cells, by seed.
        level: coverage.
        law: see `residual_variance`; None: the variance of the two cells' differences.
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
    """Return the variance of rounding an accuracy to a multiple of 1/n: 1 / (12 n^2).

    n is the smallest number of questions. The variance is 0 for a mean reward, whose steps are
    unknown.

    Args:
        rows: rows of runs or of cells.
        questions: column with the number of questions.
    """
    rows = list(rows)
    if joint_quantity(row["quantity"] for row in rows) == MEAN_REWARD:
        return 0.0
    return 1 / (12 * min(row[questions] for row in rows) ** 2)


def _seeds_interval(values: Sequence[float], rounding: float, level: float) -> Interval:
    """Return the mean and its t interval.

    Few values of few questions are often all equal, which does not mean a variance of 0: the
    variance is never taken to be less than the variance of their rounding.

    >>> [round(x, 3) for x in _seeds_interval([0.3, 0.3, 0.3], 1 / (12 * 60**2), 0.95)]
    [0.3, 0.288, 0.312]
    """
    variance = max(np.var(values, ddof=1), rounding) / len(values)
    return t_interval(float(np.mean(values)), float(variance), len(values) - 1, level)


def accuracy_table(
    cells: Sequence[AccuracyCell], data: Sequence[AccuracyCell], axis: Axis
) -> Table:
    """Make a table with a row per line and step, and a column per value of the axis.

    Args:
        cells: of `BY_LINE`, of the steps to show.
        data: of all steps.
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
        notes=notes(cells, LESS, f"the {axis.symbol} of a row"),
        data=data,
        figure_notes=notes(cells, "hollow", f"the {axis.symbol} of a line"),
        headings=True,
    )


def budget_table(cells: Sequence[AccuracyCell]) -> Table:
    """Make the paper's Table 2: a row per series and budget, a column per group size.

    Args:
        cells: of `BY_BUDGET`.
    """
    name = joint_quantity(cell["quantity"] for cell in cells)
    sizes = sorted({cell["group_size"] for cell in cells})
    names = [f"G = {size}" for size in sizes]
    places = [(budget_name(cell), sizes.index(cell["group_size"]), cell) for cell in cells]
    return Table(
        name="budget",
        title=f"Held-out {name} by rollouts a step (n) and group size (G)",
        columns=["", *names],
        rows=_grid(places, names),
        notes=notes(cells, LESS, "the (n, G) of a series"),
        data=cells,
        headings=True,
    )


def settings_table(cells: Sequence[AccuracyCell]) -> Table:
    """Make a table with a row per setting and its difference from the largest mean.

    Settings of one n and G stand below each other and are compared among themselves.

    Args:
        cells: of `BY_SETTING`.
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
        title=f"Held-out {quantity} by setting, and its difference from the largest mean",
        columns=["", *(names if single else ("setting",)), quantity, "difference", "verdict"],
        rows=rows,
        notes=notes(cells, LESS, "the settings of one n and G"),
        data=cells,
        headings=True,
    )


def budget_name(cell: AccuracyCell) -> str:
    """Return a cell's budget and series in words."""
    return " ".join(filter(None, (f"n={cell['rollouts']}", cell["series"])))


def _grid(
    places: Sequence[tuple[str, int, AccuracyCell]], columns: Sequence[str]
) -> list[list[str]]:
    """Return the rows of a table.

    Args:
        places: each cell with the heading of its row, to which its step is added, and the index of
            its column.
        columns: names of the columns.
    """
    most = max(cell["seeds"] for *_, cell in places)
    rows: dict[str, list[str]] = {}
    for name, column, cell in places:
        heading = f"{name}, step {cell['step']}"
        rows.setdefault(heading, ["-"] * len(columns))[column] = _cell_text(cell, most)
    return [[name, *row] for name, row in rows.items()]


def _cell_text(cell: AccuracyCell, most: int) -> str:
    """Format a mean with its interval below, and the number of seeds if some are missing.

    A mean that is significantly less than the largest one has a mark, and one that is not compared
    with it a question mark if others are.
    """
    mark = LESS if cell["distinct"] else ""
    if cell["decided"] and cell["distinct"] is None and not cell["best"]:
        mark = "?"
    few = f"\n({cell['seeds']} of {most})" if cell["seeds"] < most else ""
    return f"{cell['mean_reward']:.3f}{mark}\n[{cell['low']:.3f}, {cell['high']:.3f}]{few}"


def notes(cells: Sequence[AccuracyCell], mark: str, among: str) -> list[str]:
    """Write lines for captions: the source of intervals and the meaning of the mark.

    Args:
        cells: the cells shown.
        mark: of a mean that is significantly less than the largest one.
        among: the cells that are compared with each other, in words.
    """
    counts = sorted({cell["questions"] for cell in cells})
    questions = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    lines = [f"{questions} test questions; 95 % intervals {_interval_source(cells)}."]
    if len({cell["quantity"] for cell in cells}) > 1:
        lines.append("Mean reward: where all rewards are 0 or 1, the accuracy.")
    compared = [cell for cell in cells if cell["distinct"] is not None]
    if compared:
        kinds = {cell["shared_seeds"] > 1 for cell in compared}
        pairing = {(True,): "paired on shared seeds", (False,): "not paired"}.get(
            tuple(kinds), "paired on shared seeds; of one seed not paired"
        )
        if any(cell["difference_dof"] for cell in compared):
            pairing += ", one variance for all that are compared"
        simultaneous = f"intervals of differences ({pairing}) are 95 % simultaneous (Bonferroni)"
        if any(cell["decided"] for cell in compared):
            lines.append(
                f"{mark}: significantly less than the largest mean among {among}; {simultaneous}, "
                "the largest chosen on the same data."
            )
        else:
            lines.append(f"No significant difference between {among}; {simultaneous}.")
    if any(cell["distinct"] is None and not cell["best"] for cell in cells):
        lines.append("Where fewer than two seeds are shared nothing is compared (?).")
    if len({cell["seeds"] for cell in cells}) > 1:
        lines.append(FEW_SEEDS)
    return lines


def captions(cells: Sequence[AccuracyCell], among: str) -> list[str]:
    """Write one line for within the figure: the meaning of dots, bars and hollow markers.

    Args:
        cells: of `BY_LINE`, see `pooled_cells`.
        among: the cells that are compared with each other, in words.
    """
    dofs = sorted({cell["dof"] for cell in cells if cell["dof"] is not None})
    bars = "bars: 95 % intervals generalising to new questions, one seed"
    if dofs:
        dof = f"{dofs[0]}" if len(dofs) == 1 else f"{dofs[0]} to {dofs[-1]}"
        bars = f"dots: seeds; bars: 95 % intervals over seeds, pooled variance (t, {dof} dof)"
    difference = ""
    if any(cell["decided"] for cell in cells):
        difference = "; hollow: significantly less than the largest mean"
    elif any(not cell["best"] for cell in cells):
        difference = f"; no significant difference between {among}"
    return [f"{bars}{difference}."]


def _interval_source(cells: Sequence[AccuracyCell]) -> str:
    """Describe the population of the intervals of the means; of both kinds if there are both."""
    counts = sorted({cell["seeds"] for cell in cells if cell["seeds"] > 1})
    over_questions = "generalising to new questions, without the variation of training (one seed"
    if not counts:
        return f"{over_questions})"
    several = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    seeds = f"over seeds ({several}), conditional on these questions"
    dofs = sorted({cell["dof"] for cell in cells if cell.get("dof") is not None})
    if dofs:
        dof = f"{dofs[0]}" if len(dofs) == 1 else f"{dofs[0]} to {dofs[-1]}"
        seeds += f", from their variance pooled over a line's cells of a step (t, {dof} degrees of "
        seeds += "freedom)"
    single = [cell for cell in cells if cell["seeds"] == 1]
    if not single:
        return seeds
    sizes = sorted({cell["group_size"] for cell in single})
    return f"{seeds}; {over_questions}: G = {', '.join(map(str, sizes))})"
