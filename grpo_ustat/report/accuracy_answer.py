"""Sentences that compare accuracies or mean rewards of group sizes and settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

from grpo_ustat.pages.tables import enumeration
from grpo_ustat.records import joint_quantity
from grpo_ustat.report import accuracy
from grpo_ustat.report.accuracy import AccuracyCell, budget_name
from grpo_ustat.runs.record import RunRecord, key_label


def at_last(
    rows: Sequence[dict[str, Any]], steps: Sequence[int], within: str = "series"
) -> list[dict[str, Any]]:
    """Select each series' rows at one step, the last step at which the most pairs (n, G) have rows.

    Args:
        rows: See `accuracy.accuracy_rows`.
        steps: Steps to choose from.
        within: Column that defines the series; a step is chosen for each of its values.
    """
    last_rows = []
    for name in dict.fromkeys(row[within] for row in rows):
        of_series = [row for row in rows if row[within] == name and row["step"] in steps]
        cells = {
            (row["step"], row["series"], row["rollouts"], row["group_size"]) for row in of_series
        }
        counts = Counter(step for step, *_ in cells)
        last = max(counts, key=lambda step: (counts[step], step), default=None)
        last_rows += [row for row in of_series if row["step"] == last]
    return last_rows


def best_sentence(cells: Sequence[AccuracyCell]) -> str:
    """Name each series' best cell and the cells with significantly smaller means.

    If no difference is significant, the sentence gives the range of means over all cells.

    Args:
        cells: Cells of `accuracy.BY_BUDGET`.
    """
    several = len({cell["rollouts"] for cell in cells}) > 1
    sentences = []
    for series in dict.fromkeys(cell["series"] for cell in cells):
        of_series = [cell for cell in cells if cell["series"] == series]
        name = joint_quantity(cell["quantity"] for cell in of_series)
        (best,) = (cell for cell in of_series if cell["best"])
        least = min(of_series, key=lambda cell: cell["mean_reward"])
        step, text = best["step"], _mean_text(best)
        if len(of_series) == 1:
            sentence = f"held-out {name} at step {step} and G = {best['group_size']} is {text}"
        elif best["decided"]:
            less = [cell for cell in of_series if cell["distinct"]]
            not_different = [cell for cell in of_series if cell["distinct"] is False]
            sentence = (
                f"held-out {name} at step {step} is largest at {_cell_names([best], several)}: "
                f"{text}. It is significantly lower at {_cell_names(less, several)}"
            )
            if not_different:
                sentence += (
                    f", but not significantly different at {_cell_names(not_different, several)}"
                )
        else:
            lowest, highest = (_cell_names([cell], several) for cell in (least, best))
            sentence = (
                f"held-out {name} at step {step} does not differ significantly between the "
                f"{len(of_series)} {'pairs (n, G)' if several else 'group sizes'}. It ranges from "
                f"{least['mean_reward']:.3f} ({lowest}) to {best['mean_reward']:.3f} ({highest})"
            )
        sentences.append(f"{budget_name(best)}: {sentence}.")
    return " ".join(sentences)


def _cell_names(cells: Sequence[AccuracyCell], several: bool) -> str:
    """Name cells by group size, and by n if it varies; give only the count if it exceeds 4."""
    if len(cells) > 4:
        return f"{len(cells)} others"
    if several:
        return " and ".join(f"n = {cell['rollouts']}, G = {cell['group_size']}" for cell in cells)
    return f"G = {enumeration([str(cell['group_size']) for cell in cells])}"


def setting_sentence(cells: Sequence[AccuracyCell]) -> str:
    """State whether the settings with the same n and G differ significantly.

    Args:
        cells: Cells of `accuracy.BY_SETTING`.
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
        least = min(family, key=lambda cell: cell["mean_reward"])
        name = joint_quantity(cell["quantity"] for cell in family)
        budget = budget_name(first | {"series": first["test"]})
        where = f"{budget} G={first['group_size']}, step {first['step']}"
        below = [cell["setting"] for cell in family if cell["distinct"]]
        if below:
            sentences.append(
                f"{where}: held-out {name} is largest with {best['setting']}: "
                f"{_mean_text(best)}. It is significantly lower with {', '.join(below)}."
            )
        else:
            sentences.append(
                f"{where}: held-out {name} does not differ significantly between the "
                f"{len(family)} settings. It ranges from "
                f"{least['mean_reward']:.3f} ({least['setting']}) to {best['mean_reward']:.3f} "
                f"({best['setting']})."
            )
    decided = sum(family[0]["decided"] for family in several)
    if len(sentences) > 3:
        return (
            f"Settings were compared at {len(several)} pairs (n, G). They differ significantly at "
            f"{decided} of these pairs."
        )
    return " ".join(sentences)


def _mean_text(cell: AccuracyCell) -> str:
    return "{mean_reward:.3f} [{low:.3f}, {high:.3f}] (interval over {over})".format(**cell)


def missing_cells(runs: Sequence[RunRecord], keys: Sequence[str]) -> list[str]:
    """Return a line for each pair (n, G) without some seeds that its series has at other pairs.

    Args:
        runs: Training runs.
        keys: Configuration keys in which the series differ.
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
