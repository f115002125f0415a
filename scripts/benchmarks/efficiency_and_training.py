r"""Test whether a loss's relative efficiency predicts the gain from training with the loss.

    python scripts/benchmarks/efficiency_and_training.py --results runs.jsonl
    python scripts/benchmarks/efficiency_and_training.py --only-analysis runs.jsonl \
        --record runs.csv
    python scripts/benchmarks/efficiency_and_training.py --only-analysis \
        docs/examples/efficiency_and_training.csv

The experiment combines six losses, two policies (`tiny` on sums with a digit, `tiny_base` on
arithmetic), two optimizers (SGD and AdamW), three learning rates, and five seeds. This gives 360
runs with equal numbers of rollouts, in a single process with a single thread. Runs that are already
in the file are not repeated. For each policy, optimizer, learning rate and seed, only the loss
differs. Every run has one update per batch, no penalty and no gradient clipping. For each seed,
runs at the same G share the order of prompts and the keyed random numbers for completions. Every
run is evaluated before and after training on all test questions, with several completions each. If
a run's numbers become infinite or NaN, its accuracy after training is set to 0.

The efficiency is relative to the unbiased leave-one-out gradient at G = 8. It is measured at the
initial policy and the n of training, from the study questions with 32 completions each. For a loss
at another G the efficiency therefore includes the effect of that G.

Learning rates are multiples of a rate that was good for the reference loss in pilot runs with other
seeds. With SGD, a loss's rate is multiplied by the reference's sqrt(E||ghat||^2) and divided by the
loss's sqrt(E||ghat||^2), as measured in the pool. All losses therefore start with steps of the same
root mean square length. With AdamW, all losses have the same rates.

    gain        held-out accuracy after training minus before. Each seed uses the learning rate that
                is best by the mean of the other seeds, so no seed selects its own rate.
    difference  gain of a loss minus gain of the reference, by seed, with a t interval and Holm's
                correction over all differences
    rank        Spearman correlation of the losses' mean gain with their efficiency, with an
                interval from resampled seeds and the exact two-sided permutation p value,
                uncorrected and after Holm's correction over policies and optimizers. This is the
                only p value for which the losses are the sample.
    slope       slope of gain on log2 efficiency for each seed, with a t interval and a p value
                after Holm's correction over policies and optimizers. The seeds are the sample,
                given these losses.
    pairs       pairs of losses in which the more efficient loss has the larger mean gain, counted
                separately for pairs whose relative efficiencies differ by a quarter or more, and
                for the other pairs
    could see   loss of efficiency that 80 % of such experiments would detect at the 5 % level,
                uncorrected and at Holm's first step, if gains were proportional to efficiency

The 360 runs took 56 minutes on one core of an x86 CPU that other programs also used. Sampling and
scoring the pools took two more minutes.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.estimators.efficiency import relative_efficiency
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.losses import UNBIASED, loss_errors
from grpo_ustat.estimators.row_weights import Loss
from grpo_ustat.mse.pool import build_pool
from grpo_ustat.policy.configured import configured_task
from grpo_ustat.policy.tokenizer import configured_tokenizer
from grpo_ustat.runs.claims import holm_adjust
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.train import setup, trainer
from grpo_ustat.train.evaluate import sample_eval

# Reference loss, and the G at which the unbiased gradient has efficiency 1.
REFERENCE, UNIT = "trl_dr_grpo", 8
LOSSES = {
    REFERENCE: ["objective=trl_dr_grpo"],
    "trl_dapo": ["objective=trl_dapo"],
    "trl_grpo": ["objective=trl_grpo"],
    "no baseline, G = 2": ["objective=algorithm1", "baseline=none", "group_size=2"],
    "trl_dr_grpo, G = 32": ["objective=trl_dr_grpo", "group_size=32"],
    "trl_dr_grpo, filter .2": ["objective=trl_dr_grpo", "objective.reward_variance_share=0.2"],
}
# Learning rates, as multiples of the loss's middle rate.
FACTORS = (0.5, 1.0, 2.0)
# Smallest ratio of two relative efficiencies that counts as distinct.
MIN_RATIO = 1.25
# Columns of the record that contain the efficiency.
EFFICIENCIES = ("efficiency", "efficiency_low", "efficiency_high")
# Number of pairs of batches drawn to measure losses that couple the rows of a batch.
DRAWS = 1000


@dataclass(frozen=True)
class Setting:
    """A policy on a data set, and the length of its training."""

    # Overrides for both `mse` and `train`.
    data: list[str]
    # n
    rollouts: int
    # Number of updates.
    steps: int
    # Number of completions per test question.
    evaluations: int
    # Middle learning rate of the reference loss, by optimizer.
    rates: dict[str, float]


POLICIES = {
    "tiny": Setting(
        ["model=tiny", "dataset=plus_digit", "max_completion_length=48"],
        rollouts=128, steps=14, evaluations=16, rates={"sgd": 0.2, "adamw": 3e-4},
    ),
    "tiny_base": Setting(
        ["model=tiny_base", "dataset=arithmetic"],
        rollouts=128, steps=22, evaluations=4, rates={"sgd": 0.4, "adamw": 2e-4},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A training run."""

    # Names.
    policy: str
    optimizer: str
    loss: str
    # Item of `FACTORS`.
    factor: float
    seed: int

    def overrides(self, lengths: dict[str, float]) -> list[str]:
        """Return the run's overrides for `train`.

        Args:
            lengths: root of E||ghat||^2 by loss.
        """
        policy = POLICIES[self.policy]
        rate = self.factor * policy.rates[self.optimizer]
        if self.optimizer == "sgd":
            rate *= lengths[REFERENCE] / lengths[self.loss]
        return [
            *policy.data, *LOSSES[self.loss], f"optimizer={self.optimizer}",
            f"learning_rate={rate:g}", f"seed={self.seed}", f"budget.rollouts={policy.rollouts}",
            f"max_steps={policy.steps}", f"eval.num_generations={policy.evaluations}",
            "rollout_batch_size=1024",
        ]  # fmt: skip


def measured_losses(name: str, folder: Path) -> dict[str, dict]:
    """Measure the efficiency and sqrt(E||ghat||^2) of all losses at a policy, from a pool."""
    policy, names = POLICIES[name], list(LOSSES)
    study = compose_config("mse", [*policy.data, "launch.workers=1"])
    task = configured_task(study.task_options, study.model, configured_tokenizer(study.model))
    pool, _ = build_pool(study, task.prompts("study"), folder / name)
    runs = [compose_config("train", [*policy.data, *LOSSES[loss]]) for loss in names]
    losses = [
        replace(run.objective.loss(run.baseline, run.max_completion_length), name=loss)
        for run, loss in zip(runs, names, strict=True)
    ]
    keys = {loss: [run.group_size] for loss, run in zip(losses, runs, strict=True)}
    measured: dict[Loss, list[int]] = {UNBIASED: [UNIT]} | keys
    errors = loss_errors(pool, measured, policy.rollouts, DRAWS, seed=0)
    unit = {UNIT: errors[UNBIASED, UNIT].error_D}
    results = {}
    for loss, (size,) in keys.items():
        error = errors[loss, size]
        of_loss = relative_efficiency(error, UNIT, unit)
        results[loss.name] = {
            # The estimate is stored even if the study does not decide the efficiency.
            "efficiency": float(unit[UNIT][0] / error.error_D[0]),
            "interval": list(of_loss.efficiency_same_g),
            "noise": list(of_loss.noise),
            "length": math.sqrt(error.energy_D[0]),
        }
    return results


def train(
    cell: Cell,
    overrides: Sequence[str],
    starts: dict[tuple[str, int], float],
    take_steps: Callable[[trainer.TrainContext], dict[str, float]],
) -> dict[str, float]:
    """Train once; return the held-out accuracy before and after training, and the seconds.

    Args:
        cell: the run.
        overrides: overrides for `train`.
        starts: accuracy before training by policy and seed, which is the same for all their runs;
            missing values are measured and added.
        take_steps: function that trains the run's policy and returns further results.
    """
    start = time.perf_counter()
    config = compose_config("train", list(overrides))
    # The run needs a folder, but nothing is written to it.
    with tempfile.TemporaryDirectory() as folder:
        run = setup.set_up(config, RunFolder(Path(folder), config))
        before = starts[cell.policy, cell.seed] = starts.get((cell.policy, cell.seed)) or accuracy(
            run
        )
        results = {}
        try:
            results = take_steps(run)
            after = accuracy(run)
        except FloatingPointError:
            after = 0.0
    return {
        "learning_rate": config.learning_rate, "before": before, "after": after, **results,
        "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def take_all_steps(run: trainer.TrainContext) -> dict[str, float]:
    """Take `max_steps` steps of the trainer, and return the number of generated tokens."""
    progress = trainer.TrainProgress()
    while progress.step < run.config.max_steps:
        trainer.train_step(run, progress)
    return {"tokens": progress.tokens}


def accuracy(run: trainer.TrainContext) -> float:
    """Measure the held-out accuracy of the current policy."""
    return float(sample_eval(run, "sampled").rewards_PG.mean())


def run_missing(
    file: Path, cells: Sequence[Cell], train_cell: Callable[[Cell], dict[str, float]]
) -> None:
    """Train the runs that are missing in the file, and append a line when each run ends."""
    done = {cell for cell, _ in read(file)} if file.exists() else set()
    with file.open("a") as out:
        for cell in cells:
            if cell not in done:
                print(json.dumps(vars(cell) | train_cell(cell)), file=out, flush=True)


def recorded(
    file: Path, kind: str = "loss", others: Sequence[str] = ()
) -> tuple[list[tuple[Cell, dict[str, float]]], dict]:
    """Read runs and relative efficiencies from a record that `record` wrote."""
    runs, efficiencies = [], {policy: {} for policy in POLICIES}
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            cell = Cell(
                row["policy"], row["optimizer"], row[kind], float(row["rate"]), int(row["seed"])
            )
            runs.append((
                cell,
                {"before": 0.0, "after": float(row["gain"]), "seconds": 0.0,
                 "learning_rate": float(row["learning_rate"])}
                | {name: float(row[name]) for name in others},
            ))  # fmt: skip
            interval = [float(row[name]) for name in EFFICIENCIES]
            efficiencies[cell.policy][cell.loss] = {"efficiency": interval[0], "interval": interval}
    return runs, efficiencies


def record(
    file: Path,
    runs: list[tuple[Cell, dict[str, float]]],
    efficiencies: dict,
    kind: str = "loss",
    others: Sequence[str] = (),
) -> None:
    """Write a line for each run with its loss's efficiency, its learning rate and its gain.

    Args:
        file: file to write.
        runs: runs with their results.
        efficiencies: relative efficiencies by policy and loss.
        kind: name of the column with `Cell.loss`.
        others: further results to write, which are integers.
    """
    with file.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(
            ["policy", "optimizer", kind, *EFFICIENCIES, "learning_rate", "rate", "seed", "gain",
             *others]
        )  # fmt: skip
        for cell, row in runs:
            of_loss = efficiencies[cell.policy][cell.loss]
            numbers = [of_loss["efficiency"], *of_loss["interval"][1:], row["learning_rate"]]
            writer.writerow(
                [cell.policy, cell.optimizer, cell.loss, *(f"{x:.4g}" for x in numbers),
                 f"{cell.factor:g}", cell.seed, f"{row['after'] - row['before']:.4g}",
                 *(int(row.get(name, 0)) for name in others)]
            )  # fmt: skip


def read(file: Path) -> Iterator[tuple[Cell, dict[str, float]]]:
    """Yield the runs of a file with their results."""
    names = [field.name for field in fields(Cell)]
    for line in file.read_text().splitlines():
        row = json.loads(line)
        yield Cell(**{name: row.pop(name) for name in names}), row


@dataclass(frozen=True)
class Side:
    """All runs with one policy and one optimizer. Axes: L loss, M factor, S seed."""

    # Names.
    policy: str
    optimizer: str
    losses: list[str]
    # Gain in accuracy.
    gain_LMS: np.ndarray
    # Efficiency of each loss at the initial policy.
    efficiency_L: np.ndarray

    @property
    def chosen_LS(self) -> np.ndarray:
        """Index of the factor with the largest mean gain over the other seeds."""
        others_LMS = self.gain_LMS.sum(axis=2, keepdims=True) - self.gain_LMS
        return others_LMS.argmax(axis=1)

    @property
    def gain_LS(self) -> np.ndarray:
        """Gain of each loss and seed at the chosen learning rate."""
        return np.take_along_axis(self.gain_LMS, self.chosen_LS[:, None], axis=1)[:, 0]

    @property
    def difference_LS(self) -> np.ndarray:
        """Gain of each other loss minus the gain of the reference loss."""
        return self.gain_LS[1:] - self.gain_LS[0]

    @property
    def slope_S(self) -> np.ndarray:
        """Slope of gain on log2 efficiency over the losses, for each seed."""
        x_L = np.log2(self.efficiency_L) - np.log2(self.efficiency_L).mean()
        return x_L @ self.gain_LS / (x_L @ x_L)


def sides(rows: list[tuple[Cell, dict[str, float]]], efficiencies: dict) -> list[Side]:
    """Group runs by policy and optimizer, using only seeds with runs at all losses and rates.

    The losses of a policy, and their order, are those of `efficiencies`.
    """
    gains = {cell: row["after"] - row["before"] for cell, row in rows}
    groups = []
    for policy, optimizer in itertools.product(POLICIES, ("sgd", "adamw")):
        losses = efficiencies[policy]
        cells = list(itertools.product(losses, FACTORS))
        seeds = sorted({cell.seed for cell in gains})
        seeds = [
            seed
            for seed in seeds
            if all(Cell(policy, optimizer, loss, factor, seed) in gains for loss, factor in cells)
        ]
        if len(seeds) < 3:
            continue
        gain_LMS = np.array([
            [[gains[Cell(policy, optimizer, loss, factor, seed)] for seed in seeds]
             for factor in FACTORS]
            for loss in losses
        ])  # fmt: skip
        efficiency_L = np.array([result["efficiency"] for result in losses.values()])
        groups.append(Side(policy, optimizer, list(losses), gain_LMS, efficiency_L))
    return groups


def t_interval(values_S: np.ndarray, level: float = 0.95) -> Interval:
    """Return the mean of independent values with Student's interval."""
    mean, error = values_S.mean(), stats.sem(values_S)
    half = error * stats.t.ppf((1 + level) / 2, len(values_S) - 1)
    return Interval(mean, mean - half, mean + half)


def rank_correlation(side: Side, draws: int = 5000) -> tuple[Interval, float]:
    """Return the Spearman correlation of mean gain and efficiency, and its exact p-value."""
    rank_L = stats.rankdata(side.efficiency_L)
    orders = list(itertools.permutations(rank_L))

    def correlation(gain_LX: np.ndarray) -> np.ndarray:
        return np.array([stats.spearmanr(rank_L, gain_L)[0] for gain_L in gain_LX.T])

    estimate = correlation(side.gain_LS.mean(axis=1, keepdims=True))[0]
    gain_rank_L = stats.rankdata(side.gain_LS.mean(axis=1))
    of_orders = np.array([np.corrcoef(order, gain_rank_L)[0, 1] for order in orders])
    p_value = float((np.abs(of_orders) >= abs(estimate) - 1e-12).mean())
    seeds = side.gain_LS.shape[1]
    drawn_XS = np.random.default_rng(0).integers(seeds, size=(draws, seeds))
    low, high = np.quantile(correlation(side.gain_LS[:, drawn_XS].mean(axis=2)), [0.025, 0.975])
    return Interval(float(estimate), float(low), float(high)), p_value


def ordered_pairs(side: Side) -> tuple[str, str]:
    """Count pairs in which the more efficient loss gains more, for distinct and close pairs."""
    right: dict[bool, list[bool]] = {True: [], False: []}
    gain_L = side.gain_LS.mean(axis=1)
    for first, second in itertools.combinations(range(len(gain_L)), 2):
        ratio = side.efficiency_L[first] / side.efficiency_L[second]
        right[max(ratio, 1 / ratio) >= MIN_RATIO].append(
            (ratio > 1) == (gain_L[first] > gain_L[second])
        )
    distinct, close = (f"{sum(right[kind])} of {len(right[kind])}" for kind in (True, False))
    return distinct, close


def detectable(side: Side, alpha: float) -> float:
    """Return the difference in gain that 80 % of such experiments would detect at level `alpha`.

    The median standard deviation of the paired differences is used.
    """
    seeds = side.gain_LS.shape[1]
    deviation = float(np.median(side.difference_LS.std(axis=1, ddof=1)))
    quantiles = float(np.sum(stats.t.ppf([1 - alpha / 2, 0.8], seeds - 1)))
    return quantiles * deviation / math.sqrt(seeds)


def number(value: float, digits: int = 3) -> str:
    """Format a number without a zero before the decimal point.

    >>> number(0.12345), number(-0.5, 1), number(1.25, 2)
    ('.123', '-.5', '1.25')
    """
    text = f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 and text.lstrip("-")[0] == "0" else text


def p_text(p_value: float) -> str:
    """Format a p-value; values below .001 become `< .001`."""
    return "< .001" if p_value < 0.001 else number(p_value)


def span(interval: Sequence[float], digits: int = 3) -> str:
    """Format an estimate with its interval."""
    estimate, low, high = (number(value, digits) for value in interval)
    return f"{estimate} [{low}, {high}]"


def tests(groups: Sequence[Side]) -> list[dict[str, Any]]:
    """Test rank correlation and slope of gain on efficiency, for each policy and optimizer.

    Each test has an uncorrected p-value and a p-value after Holm's correction over policies and
    optimizers.
    """
    ranks = [rank_correlation(side) for side in groups]
    slopes = [float(stats.ttest_1samp(side.slope_S, 0).pvalue) for side in groups]
    corrected = zip(holm_adjust([p for _, p in ranks]), holm_adjust(slopes), strict=True)
    return [
        {"rank": rank, "rank_p": p, "rank_holm": rank_holm, "slope": t_interval(side.slope_S),
         "slope_p": slope_p, "slope_holm": slope_holm, "pairs": ordered_pairs(side)}
        for side, (rank, p), slope_p, (rank_holm, slope_holm)
        in zip(groups, ranks, slopes, corrected, strict=True)
    ]  # fmt: skip


def report(
    rows: list[tuple[Cell, dict[str, float]]], efficiencies: dict[str, dict[str, dict]]
) -> None:
    """Print the tables as Markdown."""
    groups = sides(rows, efficiencies)
    seconds = sum(row["seconds"] for _, row in rows)
    print(f"{len(rows)} runs, {seconds / 60:.0f} minutes\n")
    print_gains(groups, efficiencies, "loss")
    print(
        "\n| policy, optimizer | rank | p, corrected | slope | p, corrected | pairs apart, others "
        "| could see | at an end |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for side, of_side in zip(groups, tests(groups), strict=True):
        base, family = float(side.gain_LS[0].mean()), 4 * (len(LOSSES) - 1)
        lost = [detectable(side, alpha) / base for alpha in (0.05, 0.05 / family)]
        seen = [number(1 - share, 2) if share < 1 else "none" for share in lost]
        low, high = ((side.chosen_LS == end).mean() for end in (0, len(FACTORS) - 1))
        print(
            f"| {side.policy}, {side.optimizer} | {span(of_side['rank'], 2)} | "
            f"{p_text(of_side['rank_p'])}, {p_text(of_side['rank_holm'])} | "
            f"{span(of_side['slope'])} | {p_text(of_side['slope_holm'])} | "
            f"{', '.join(of_side['pairs'])} | "
            f"{', '.join(seen)} | "
            f"lowest {low:.0%}, highest {high:.0%} |"
        )
    print_rates(groups, rows, "loss")


def print_gains(
    groups: Sequence[Side], efficiencies: dict[str, dict[str, dict]], kind: str
) -> None:
    """Print the gain of each loss, and its difference from the gain of the first loss.

    Args:
        groups: runs by policy and optimizer.
        efficiencies: relative efficiencies by policy and loss.
        kind: heading of the column with losses.
    """
    p_values = [
        float(stats.ttest_1samp(difference_S, 0).pvalue)
        for side in groups
        for difference_S in side.difference_LS
    ]
    holm = iter(holm_adjust(p_values))
    print(f"| policy, optimizer | {kind} | efficiency | gain | gain - reference's | p, corrected |")
    print("|---|---|---|---|---|---|")
    for side in groups:
        for row, loss in enumerate(side.losses):
            of_loss, gain = efficiencies[side.policy][loss], t_interval(side.gain_LS[row])
            decided = math.isfinite(of_loss["interval"][2])
            unit = (
                span(of_loss["interval"], 2) if decided else f"({number(of_loss['efficiency'], 2)})"
            )
            text = f"| {side.policy}, {side.optimizer} | `{loss}` | {unit} | {span(gain)} |"
            if row:
                text += f" {span(t_interval(side.difference_LS[row - 1]))} |"
                text += f" {p_text(p_values.pop(0))}, {p_text(next(holm))} |"
            else:
                text += " | |"
            print(text)


def print_rates(
    groups: Sequence[Side], rows: list[tuple[Cell, dict[str, float]]], kind: str
) -> None:
    """Print the gain of every run, by loss and learning rate; see `print_gains`."""
    print(
        f"\n| policy, optimizer | {kind} | middle rate | "
        + " | ".join(f"{x:g} x" for x in FACTORS),
        "|",
    )
    print("|---" * (3 + len(FACTORS)) + "|")
    rates = {cell: row["learning_rate"] for cell, row in rows}
    for side in groups:
        for loss, gain_MS in zip(side.losses, side.gain_LMS, strict=True):
            rate = rates[Cell(side.policy, side.optimizer, loss, 1.0, rows[0][0].seed)]
            gains = " | ".join(" ".join(map(number, gain_S)) for gain_S in gain_MS)
            print(f"| {side.policy}, {side.optimizer} | `{loss}` | {rate:.3g} | {gains} |")


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="file of JSON lines, one per run; only missing runs are trained",
    )
    parser.add_argument(
        "--only-analysis", type=Path, metavar="FILE", help="file of finished runs to analyse"
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE.csv", help="write a record with one line per run"
    )
    parser.add_argument(
        "--pools", type=Path, help="folder of scored pools (default: a temporary folder)"
    )
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    asked = parser.parse_args()
    file = asked.only_analysis or asked.results
    if file is None:
        parser.error("give --results FILE or --only-analysis FILE")
    torch.set_num_threads(1)
    if file.suffix == ".csv":
        runs, efficiencies = recorded(file)
        report([(cell, row) for cell, row in runs if cell.seed in asked.seeds], efficiencies)
        return
    measured = file.with_suffix(".efficiency.json")
    if not measured.exists():
        with tempfile.TemporaryDirectory() as folder:
            pools = asked.pools or Path(folder)
            results = {policy: measured_losses(policy, pools) for policy in POLICIES}
        measured.write_text(json.dumps(results, indent=1))
    efficiencies = json.loads(measured.read_text())
    if not asked.only_analysis:
        cells = [
            Cell(policy, optimizer, loss, factor, seed)
            for seed in asked.seeds
            for policy in asked.policies
            for optimizer in ("sgd", "adamw")
            for loss in asked.losses
            for factor in FACTORS
        ]
        starts: dict[tuple[str, int], float] = {}

        def train_cell(cell: Cell) -> dict[str, float]:
            """Train with the cell's loss."""
            lengths = {loss: row["length"] for loss, row in efficiencies[cell.policy].items()}
            return train(cell, cell.overrides(lengths), starts, take_all_steps)

        run_missing(file, cells, train_cell)
    runs = list(read(file))
    if asked.record:
        record(asked.record, runs, efficiencies)
    report([(cell, row) for cell, row in runs if cell.seed in asked.seeds], efficiencies)


if __name__ == "__main__":
    main()
