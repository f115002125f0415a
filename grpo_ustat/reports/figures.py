"""Figures over several runs: errors per policy, errors at a fixed n, accuracy against G."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_ustat.reports.found import Run
from grpo_ustat.runs.figures import (
    FIXED_N,
    FONTS,
    line_style,
    log_sizes,
    mse_panel,
    note,
    plt,
    save,
    scaling_panel,
)

Cell = dict[str, Any]
WIDEST = 4  # panels in a line


def mse_figure(folder: Path, name: str, studies: Sequence[Run], notes: Sequence[str]) -> None:
    """The paper's Figure 4: a panel per policy, of each its first setting, against the expected
    reward; `<name>.{pdf,svg,png}`.

    Args:
        folder, name: where to.
        studies: finished ones.
        notes: lines under the figure.
    """
    _studies(folder, name, studies, notes, _mse_panel, "MSE of the gradient")


def fixed_n_figure(folder: Path, name: str, studies: Sequence[Run], notes: Sequence[str]) -> None:
    """MSE against G at a fixed number of rollouts with G* and its interval, a panel per policy."""
    _studies(folder, name, studies, notes, _scaling_panel, FIXED_N.replace(", any n", ",\nany n"))


def _studies(
    folder: Path,
    name: str,
    studies: Sequence[Run],
    notes: Sequence[str],
    panel: Callable[[Any, Run], None],
    what: str,
) -> None:
    """A panel per study, a line or more per data set."""
    of = [run.config["dataset"]["name"] for run in studies]
    grid = [
        [x for x, data in zip(studies, of, strict=True) if data == one] for one in dict.fromkeys(of)
    ]
    grid = [line[i : i + WIDEST] for line in grid for i in range(0, len(line), WIDEST)]
    wide, high = max(map(len, grid)), len(grid)
    with plt.rc_context(FONTS):
        size = (0.6 + 3.6 * wide, 0.8 + 3.6 * high)
        figure, panels = plt.subplots(high, wide, figsize=size, squeeze=False, layout="constrained")
        for line, mine in zip(panels, grid, strict=True):
            for axes, run in zip(line, mine, strict=False):
                panel(axes, run)
                axes.set_title(_policy(run), fontsize=8, loc="left")
            for axes in line[len(mine) :]:
                axes.set_visible(False)
            line[0].set_ylabel(f"{what}\n{mine[0].config['dataset']['name']}")
        if panels[0, 0].get_legend_handles_labels()[1]:
            panels[0, 0].legend(frameon=False, fontsize=8)
        note(figure, list(notes), size[0])
        save(figure, folder, name)


def _mse_panel(axes, run: Run) -> None:
    rows = [row for row in run.result["curves"] if row["target"].endswith("expected reward")]
    first = (rows[0]["setting"], rows[0]["num_prompts"])
    mse_panel(axes, [row for row in rows if (row["setting"], row["num_prompts"]) == first])


def _scaling_panel(axes, run: Run) -> None:
    scaling_panel(axes, run.result["scaling"])


def _policy(run: Run) -> str:
    policy, result = run.result["policy"], run.result
    seed = f", seed {run.config['seed']}" if run.config["seed"] else ""
    return (
        f"{run.policy}{seed}\naccuracy {policy['accuracy']:.3f} "
        f"[{policy['accuracy_low']:.3f}, {policy['accuracy_high']:.3f}]\n"
        f"{result['questions']} questions x {result['pool_completions']} completions"
    )


def accuracy_figure(folder: Path, name: str, cells: Sequence[Cell], notes: Sequence[str]) -> None:
    """The paper's Figure 5: held-out accuracy against G, a panel per step, a line per series.

    Args:
        folder, name: where to, as `<name>.{pdf,svg,png}`.
        cells: of `BY_STEP`, see `accuracy.accuracy_cells`.
        notes: lines under the figure.
    """
    lines = list(dict.fromkeys(map(line_of, cells)))
    steps = sorted({cell["step"] for cell in cells})
    wide = min(WIDEST, len(steps))
    high = -(-len(steps) // wide)
    with plt.rc_context(FONTS):
        size = (0.8 + 3.0 * wide, 1.2 + 2.8 * high)
        figure, panels = plt.subplots(
            high, wide, figsize=size, squeeze=False, sharey=True, layout="constrained"
        )
        for axes, step in zip(panels.flat, steps, strict=False):
            _accuracy_panel(axes, [cell for cell in cells if cell["step"] == step], lines)
            axes.set_title(f"step {step}", fontsize=9)
        for axes in list(panels.flat)[len(steps) :]:
            axes.set_visible(False)
        for line in panels:
            line[0].set_ylabel("held-out accuracy")
        handles, labels = _legend(panels.flat[: len(steps)])
        if len(lines) > 1:
            columns = max(1, int(size[0] / 3))
            figure.legend(handles, labels, loc="outside upper left", ncols=columns, fontsize=7)
        note(figure, ([lines[0]] if len(lines) == 1 else []) + list(notes), size[0])
        save(figure, folder, name)


def line_of(cell: Cell) -> str:
    """A cell's series and budget in words."""
    return " ".join(filter(None, (f"n={cell['rollouts']}", cell["series"])))


def _legend(panels) -> tuple[list, list]:
    """Every line once, whatever panels it is in."""
    found = {}
    for axes in panels:
        found |= {
            text: handle for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
    return list(found.values()), list(found)


def _accuracy_panel(axes, cells: Sequence[Cell], lines: list[str]) -> None:
    """One step: means with intervals, the largest ringed, those surely below it hollow."""
    for i, name in enumerate(lines):
        mine = sorted((c for c in cells if line_of(c) == name), key=lambda c: c["group_size"])
        colour, marker = line_style(i)
        sizes = [cell["group_size"] * 1.04**i for cell in mine]  # apart, so that bars show
        heights = [cell["accuracy"] for cell in mine]
        below = [cell["accuracy"] - cell["low"] for cell in mine]
        above = [cell["high"] - cell["accuracy"] for cell in mine]
        if mine:
            axes.errorbar(
                sizes, heights, (below, above), color=colour, marker=marker, markersize=4,
                linewidth=1, capsize=2, label=name,
            )  # fmt: skip
        for x, y, cell in zip(sizes, heights, mine, strict=True):
            if cell["best"]:
                axes.plot(x, y, "o", color="black", fillstyle="none", markersize=11)
            if cell["distinct"]:
                hollow = dict(markerfacecolor="white", markersize=5, zorder=4)
                axes.plot(x, y, marker, color=colour, **hollow)
    log_sizes(axes, sorted({cell["group_size"] for cell in cells}))
    axes.set_xlabel("group size G")
    axes.grid(alpha=0.3, linewidth=0.5)
