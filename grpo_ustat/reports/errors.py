"""Errors of the gradient that studies found: MSE against G, and at a fixed number of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_ustat.reports.found import Run
from grpo_ustat.reports.series import label
from grpo_ustat.reports.sheets import Sheet
from grpo_ustat.runs.summary import mse_cell

KINDS = ("method", "target", "setting", "num_prompts")  # of a curve, beside its baseline
ENDS = ("", "_low", "_high")


def mse_sheet(studies: Sequence[Run], asked: Sequence[str]) -> Sheet:
    """A row per policy, kind of curve and group size, a column per baseline.

    Args:
        studies: finished ones.
        asked: keys that tell them apart.
    """
    data = [row for run in studies for row in mse_rows(run, asked)]
    names = list(dict.fromkeys(row["baseline"] for row in data))
    rows = [line for kind in _kinds(data) for line in _lines(kind, names)]
    notes = [_given(data), *_lacking(studies)]
    return Sheet(
        name="mse",
        title="MSE of the gradient",
        columns=["policy", "G", *names],
        rows=rows,
        notes=notes,
        data=data,
        drawn=notes,
    )


def _kinds(data: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows of every study and kind of curve."""
    kinds: dict[tuple, list[dict[str, Any]]] = {}
    for row in data:
        kinds.setdefault((row["run"], *(row[key] for key in KINDS)), []).append(row)
    return list(kinds.values())


def _lines(kind: list[dict[str, Any]], names: list[str]) -> list[list[str]]:
    """A line per group size."""
    cells = {(row["group_size"], row["baseline"]): mse_cell(row) for row in kind}
    sizes = sorted({row["group_size"] for row in kind})
    head = _head(kind[0])
    return [[head, str(size), *(cells.get((size, name), "-") for name in names)] for size in sizes]


def mse_rows(run: Run, asked: Sequence[str]) -> list[dict[str, Any]]:
    """A study's curves beside what they are of."""
    config, result = run.config, run.result
    of = {"run": run.label, "differs_in": label(run.keys, asked), "policy": run.policy}
    of |= {"dataset": config["dataset"]["name"], "seed": config["seed"]}
    of |= {key: result[key] for key in ("questions", "pool_completions")}
    of |= {key: result["policy"][key] for key in ("accuracy", "accuracy_low", "accuracy_high")}
    return [of | row for row in result["curves"]]


def _head(row: dict[str, Any]) -> str:
    interval = f"[{row['accuracy_low']:.2f}, {row['accuracy_high']:.2f}]"
    return (
        f"{row['policy']}\n{row['dataset']}, {row['questions']}x{row['pool_completions']}\n"
        f"{row['accuracy']:.2f} {interval}\n{row['method']}\n{row['setting'].replace('_', ' ')}"
    )


def _given(data: Sequence[dict[str, Any]]) -> str:
    """What the intervals are over."""
    said = {"completions": "given the questions", "questions": "over questions"}
    found = dict.fromkeys(said[row["interval"]] for row in data)
    return f"95 % intervals {' or '.join(found)}, of one seed; accuracy [over questions]."


def _lacking(studies: Sequence[Run]) -> list[str]:
    """Baselines and group sizes that one study has and another has not."""
    has = {
        run.label: {(r["baseline"], r["group_size"]) for r in run.result["curves"]}
        for run in studies
    }
    every = set().union(*has.values())
    return [
        f"Missing in {name}: {', '.join(f'{b} at G = {g}' for b, g in sorted(every - mine))}."
        for name, mine in has.items()
        if every - mine
    ]


def scaling_sheet(studies: Sequence[Run], asked: Sequence[str]) -> Sheet:
    """A row per policy: the scaling law, G* and when GRPO passes vanilla (paper, section 6).

    Args:
        studies: finished ones.
        asked: keys that tell them apart.
    """
    columns = ["policy", "accuracy", "corr(q, Z)", "A_V - A_0", "crossover G", "G*"]
    given = _given([row for run in studies for row in run.result["curves"]])
    law = "G* = 1 + sqrt(C3/C1), whatever n; leave_one_out, questions drawn independently."
    crossover = "Above the crossover G leave_one_out beats none. -: no finite number."
    return Sheet(
        name="fixed_n",
        title="At a fixed number n = B G of rollouts: n MSE = G C1 + C2 + C3/(G - 1)",
        columns=columns,
        rows=[_law(run) for run in studies],
        notes=[law, crossover, given],
        data=[row for run in studies for row in _scaling_rows(run, asked)],
        drawn=[law, given],
    )


def _law(run: Run) -> list[str]:
    scaling, assumption, policy = (run.result[k] for k in ("scaling", "assumption2", "policy"))
    return [
        f"{run.policy}\n{run.config['dataset']['name']}",
        _interval(policy, "accuracy", 2),
        _interval(assumption, "corr", 2),
        _interval(assumption, "av_minus_a0", 0),
        _interval(assumption, "crossover_group_size", 1),
        _interval(scaling, "gstar", 1),
    ]


def _interval(of: dict[str, Any], name: str, digits: int) -> str:
    value, low, high = (of.get(f"{name}{end}") for end in ("", "_low", "_high"))
    if value is None or low is None or high is None:
        return "-" if value is None else f"{value:.{digits}f}\n-"
    return f"{value:.{digits}f}\n[{low:.{digits}f}, {high:.{digits}f}]"


def _scaling_rows(run: Run, asked: Sequence[str]) -> list[dict[str, Any]]:
    scaling = run.result["scaling"]
    of = {"run": run.label, "differs_in": label(run.keys, asked), "policy": run.policy}
    of |= {"dataset": run.config["dataset"]["name"]}
    of |= {f"{x}{end}": scaling[f"{x}{end}"] for x in ("c1", "c2", "c3", "gstar") for end in ENDS}
    return [of | point for point in scaling["curve"]]
