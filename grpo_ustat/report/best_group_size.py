r"""Compare the group size with the smallest gradient error and the group size that trains best.

At a fixed number n of rollouts per step, the error of the gradient is

    n MSE(G) = G C1 + C2 + C3/(G-1) = C1 ( G + (G*-1)^2/(G-1) ) + C2      G* = 1 + sqrt(C3/C1)

For every n the error is smallest at G*. In the paper, a smaller error gives a smaller bound on the
sub-optimality gap (section 6 of the theory, Lemma 6 and Theorem 7). So the prediction is that the G
with the smallest error trains best. This module computes the error from C1, C2 and C3 of the
initial policy. Beside it, the table has held-out accuracy or mean reward of training runs that
differ only in G, n and seed.

The outcome of a run is the mean of its evaluations after step 0, which has less evaluation noise
than the last evaluation. A group size is significantly worse than the best group size if the
simultaneous 95 % interval of the difference, paired on seeds, lies below 0 (see
`accuracy.accuracy_cells`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.group_size import SCALING, Scaling
from grpo_ustat.pages.tables import Table
from grpo_ustat.records import joint_quantity
from grpo_ustat.report.accuracy import accuracy_cells
from grpo_ustat.runs.claims import comma_list
from grpo_ustat.runs.record import RunRecord, distinguishing_keys

# Minimum number of seeds that were run with every G.
MIN_SEEDS = 3
POLICY_KEYS = ("model.", "dataset.", "prompt.", "temperature", "max_completion_length", "weights")
CELL_KEYS = (
    "group_size", "seeds", "quantity", "mean_reward", "low", "high", "best", "difference",
    "difference_low", "difference_high", "distinct",
)  # fmt: skip
# Runs by n, G and seed.
Grid = dict[tuple[int, int, int], RunRecord]


def best_group_size(
    training: Sequence[RunRecord], studies: Sequence[RunRecord]
) -> tuple[Table, str]:
    """Return a table of predicted errors and training results by G, and a sentence on it.

    Args:
        training: Training runs; unfinished runs are ignored.
        studies: Finished `mse` studies; exactly one of them must have measured the initial policy.
    """
    grid: Grid = {}
    for run in training:
        if run.result is not None:
            config = run.config
            grid[config["budget"]["rollouts"], config["group_size"], config["seed"]] = run
    runs = list(grid.values())
    check_one_series(runs)
    scaling = initial_scaling(runs[0], studies)
    gstar = "{:.1f} [{:.1f}, {:.1f}]".format(*scaling.gstar)
    sizes = sorted({size for _, size, _ in grid})
    error_of = {size: scaling.law.n_mse(size) for size in sizes}
    predicted = min(sizes, key=lambda size: error_of[size])
    data = []
    for rollouts in sorted({n for n, _, _ in grid}):
        for cell in accuracy_cells(_mean_evaluations(grid, rollouts, sizes)):
            error = error_of[cell["group_size"]]
            row = {"n": rollouts} | {key: cell[key] for key in CELL_KEYS}
            row["predicted_n_mse"] = error
            data.append(row | {"predicted_error_ratio": error / error_of[predicted]})
    quantity = joint_quantity(row["quantity"] for row in data)
    table = Table(
        name="best_group_size",
        title=f"Does G* = {gstar} train best? Held-out {quantity}, mean of the evaluations",
        columns=["", "G", "predicted error\nrelative to\nthe smallest", f"held-out {quantity}",
                 "difference"],
        rows=[_cells(row) for row in data],
        notes=["The error is predicted from C1, C2 and C3 before training. The 95 % intervals of "
               f"{quantity} cover the variation between seeds, but not the variation from drawing "
               "other test questions. Differences from the largest mean are paired by seed. Their "
               "intervals hold simultaneously for all G (Bonferroni)."],
        data=data,
        headings=True,
    )  # fmt: skip
    answer = f"G* = {gstar} predicts that G = {predicted} trains best."
    for rollouts in dict.fromkeys(row["n"] for row in data):
        answer += f" {_comparison([row for row in data if row['n'] == rollouts])}"
    return table, answer


def _mean_evaluations(grid: Grid, rollouts: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the mean evaluation after step 0 of each run at one n.

    Only seeds that were run with every G are used.
    """
    seeds = sorted({seed for n, _, seed in grid if n == rollouts})
    seeds = [seed for seed in seeds if all((rollouts, size, seed) in grid for size in sizes)]
    if len(seeds) < MIN_SEEDS:
        raise ConfigError(
            f"n={rollouts} has {len(seeds)} seeds that were run with every G of {sizes}, but "
            f"{MIN_SEEDS} are needed"
        )
    rows = []
    for seed, size in product(seeds, sizes):
        evals = grid[rollouts, size, seed].evals
        row = {"series": "", "rollouts": rollouts, "group_size": size, "seed": seed, "step": None}
        row |= {key: evals[-1][key] for key in ("quantity", "low", "high", "n")}
        mean = np.mean([row["mean_reward"] for row in evals if row["step"] > 0])
        rows.append(row | {"mean_reward": float(mean)})
    return rows


def _cells(row: dict[str, Any]) -> list[Any]:
    difference = "-"
    if not row["best"]:
        difference = "{difference:+.3f} [{difference_low:+.3f}, {difference_high:+.3f}]".format(
            **row
        )
    mean = "{mean_reward:.3f} [{low:.3f}, {high:.3f}]".format(**row)
    error = f"{row['predicted_error_ratio']:.3g}"
    return [f"n={row['n']}", row["group_size"], error, mean, difference]


def _comparison(rows: Sequence[dict[str, Any]]) -> str:
    """Name the G with the largest mean at one n, and the G that are significantly less or not."""
    best = next(row["group_size"] for row in rows if row["best"])
    alike = [row["group_size"] for row in rows if not row["distinct"] and not row["best"]]
    worse = [row["group_size"] for row in rows if row["distinct"]]
    return (
        f"At n = {rows[0]['n']}, the mean is largest at G = {best} (not significantly less: "
        f"{comma_list(alike) or 'no other G'}; significantly less: {comma_list(worse) or 'no G'})."
    )


def check_one_series(runs: Sequence[RunRecord]) -> None:
    """Raise an error if the runs cannot be compared, or if G* does not apply to their baseline."""
    if not runs:
        raise ConfigError("no training run is finished")
    sizes = sorted({run.config["group_size"] for run in runs})
    if len(sizes) < 2:
        raise ConfigError(f"all finished training runs have the same G={sizes}")
    keys = distinguishing_keys([run.keys for run in runs])
    if keys:
        raise ConfigError(
            f"the training runs differ not only in n, G and seed but also in {', '.join(keys)}: "
            "name only folders of runs that agree in all other settings"
        )
    steps = sorted({tuple(row["step"] for row in run.evals) for run in runs})
    if len(steps) > 1:
        raise ConfigError(
            f"the training runs were evaluated at steps {list(steps[0])} and {list(steps[1])}: "
            "name folders with the same max_steps and eval_steps"
        )
    if not any(steps[0]):
        raise ConfigError("the training runs were not evaluated after step 0")
    baseline = runs[0].config["baseline"]["name"]
    if baseline != "leave_one_out":
        raise ConfigError(f"baseline={baseline}: G* applies only to leave_one_out")


def initial_scaling(trained: RunRecord, studies: Sequence[RunRecord]) -> Scaling:
    """Return the scaling law of a run's initial policy from the study that measured this policy."""
    policy_keys = {key: value for key, value in trained.keys.items() if key.startswith(POLICY_KEYS)}
    differing = [
        [key for key in policy_keys if policy_keys[key] != run.keys.get(key)] for run in studies
    ]
    same = [run for run, keys in zip(studies, differing, strict=True) if not keys]
    if studies and not same:
        key = differing[0][0]
        raise ConfigError(
            f"{key} is {policy_keys[key]} in training and {studies[0].keys.get(key)} in the study: "
            "measure the policy that training starts from"
        )
    if len(same) != 1:
        raise ConfigError(f"{len(same)} finished studies measured the policy before training, but "
                          "exactly one is needed")  # fmt: skip
    scaling = Study(same[0]).need(SCALING)
    if not scaling.is_decided:
        raise ConfigError(
            f"{same[0].label} has no G* with an interval (C1 = {scaling.c1.estimate}, C3 = "
            f"{scaling.c3.estimate}): raise its budget.pool_completions"
        )
    return scaling
