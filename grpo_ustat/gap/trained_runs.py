"""Finished runs of a sweep over G, n and seed, and the study of the policy that they start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from grpo_ustat.config.command_line import command_line
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.records import joint_quantity
from grpo_ustat.report.collect import RunSet, distinguishing_keys, entries_in, read_runs
from grpo_ustat.runs.record import RunRecord

TRAIN = command_line("train", "experiment=best_group_size")
STUDY = command_line("mse", "study=best_group_size_start")
FEWEST = 3  # seeds over which differences are compared
MOST_NAMES = 8  # missing runs that are named one by one
POLICY_KEYS = ("model.", "dataset.", "prompt.", "temperature", "max_completion_length", "weights")

RunKey = tuple[int, int, int]  # n, G, seed


@dataclass(frozen=True)
class RunGrid:
    """Runs that differ in n, G and seed alone.

    Attributes:
        runs: finished ones, by n, G and seed.
        notes: what is unfinished, damaged, or there twice, a line each.
    """

    runs: dict[RunKey, RunRecord]
    notes: list[str]

    @property
    def any(self) -> RunRecord:
        """One of the runs, for what they share."""
        return next(iter(self.runs.values()))

    @property
    def sizes(self) -> list[int]:
        """Every G, ascending."""
        return sorted({size for _, size, _ in self.runs})

    @property
    def budgets(self) -> list[int]:
        """Every n, ascending."""
        return sorted({rollouts for rollouts, _, _ in self.runs})

    @property
    def rollouts(self) -> int:
        """Completions of all training, without those of evaluations."""
        return sum(run.result["rollouts"] for run in self.runs.values() if run.result)

    @property
    def quantity(self) -> str:
        """What its evaluations are means of, see `joint_quantity`."""
        return joint_quantity(row["quantity"] for run in self.runs.values() for row in run.evals)

    @property
    def start_mean(self) -> float:
        """Held-out accuracy or mean reward before training, the mean over all runs."""
        return float(np.mean([run.evals[0]["mean_reward"] for run in self.runs.values()]))

    @property
    def missing(self) -> list[RunKey]:
        """The (n, G, seed) without a run, which the other runs lead one to expect."""
        seeds = sorted({seed for _, _, seed in self.runs})
        keys = product(self.budgets, self.sizes, seeds)
        return [key for key in keys if key not in self.runs]

    def seeds(self, rollouts: int) -> list[int]:
        """Seeds that have every G at this n, on which all G can be compared.

        Raises:
            ConfigError: there are fewer than three, naming the runs that are missing.
        """
        incomplete = {seed for n, _, seed in self.missing if n == rollouts}
        seeds = sorted({s for n, _, s in self.runs if n == rollouts} - incomplete)
        if len(seeds) < FEWEST:
            raise ConfigError(
                f"n={rollouts} has {len(seeds)} seeds with every G of {self.sizes}, {FEWEST} are "
                f"needed; missing: {run_names(self.missing)}: go on with {TRAIN}"
            )
        return seeds


def run_names(keys: Sequence[RunKey]) -> str:
    """Runs in a line, the first few by name.

    >>> run_names([(128, 2, 0), (128, 2, 1)])
    'n=128 G=2 seed=0, n=128 G=2 seed=1'
    """
    names = [f"n={n} G={size} seed={seed}" for n, size, seed in keys[:MOST_NAMES]]
    rest = len(keys) - MOST_NAMES
    return ", ".join(names) + (f" and {rest} more" if rest > 0 else "")


def trained_runs(patterns: Sequence[str]) -> RunGrid:
    """The finished training runs that the patterns match.

    Raises:
        ConfigError: there are none, or of several series, or of one G alone; the line names the
            command that makes them.
    """
    folders = _read("trained", patterns, TRAIN)
    runs = [run for run in folders.runs if run.command == "train"]
    complete = [run for run in runs if run.result is not None]
    if not complete:
        raise ConfigError(f"trained={list(patterns)} holds no finished training run: {TRAIN}")
    check_one_series(complete)
    grid, notes = {}, [f"unfinished: {run.unfinished}" for run in runs if run.result is None]
    for run in complete:
        config = run.config
        grid[config["budget"]["rollouts"], config["group_size"], config["seed"]] = run
    trained = RunGrid(grid, [*notes, *folders.damaged, *folders.twins])
    if len(trained.sizes) < 2:
        raise ConfigError(f"trained={list(patterns)} has G={trained.sizes} alone: {TRAIN}")
    return trained


def check_one_series(runs: Sequence[RunRecord]) -> None:
    """Refuse runs that cannot be compared, or whose error is not the one that is predicted.

    Raises:
        ConfigError: naming what differs.
    """
    keys = distinguishing_keys([run.keys for run in runs])
    if keys:
        raise ConfigError(
            f"the training runs differ in {', '.join(keys)} too, not in n, G and seed alone: "
            "name folders of one series"
        )
    steps = sorted({tuple(row["step"] for row in run.evals) for run in runs})
    if len(steps) > 1:
        raise ConfigError(
            f"the training runs were evaluated at steps {list(steps[0])} and {list(steps[1])}: "
            "name folders of one max_steps and eval_steps"
        )
    rule = runs[0].config["baseline"]["name"]
    if rule != "leave_one_out":
        raise ConfigError(f"baseline={rule}: G* is that of leave_one_out: {TRAIN}")


@dataclass(frozen=True)
class StartLaw:
    """The scaling law of a study at the policy that training starts from.

    Attributes:
        run: the study.
        result: of its `result.json`.
        law: its C1, C2, C3.
        gstar: 1 + sqrt(C3/C1), with its interval.
    """

    run: RunRecord
    result: dict[str, Any]
    law: ScalingLaw
    gstar: Interval

    @property
    def over(self) -> str:
        """What the interval speaks of."""
        over_questions = self.run.config["study"]["interval"] == "questions"
        return (
            "generalising to new questions" if over_questions else "conditional on these questions"
        )

    @property
    def gstar_text(self) -> str:
        """G* with its interval."""
        estimate, low, high = self.gstar
        return f"{estimate:.1f} [{low:.1f}, {high:.1f}]"

    def error_at(self, size: int) -> float:
        """Predicted n MSE(G)."""
        return self.law.mse(num_prompts=1, group_size=size) * size


def start_law(patterns: Sequence[str]) -> StartLaw:
    """The finished study that the patterns match.

    Raises:
        ConfigError: there is none, or more than one, or it has no G*; the line names the command
            that makes one.
    """
    folders = _read("measured", patterns, STUDY)
    runs = [run for run in folders.runs if run.command == "mse" and run.result is not None]
    if len(runs) != 1:
        text = f"holds {len(runs)} finished studies, one is needed: {STUDY}"
        raise ConfigError(f"measured={list(patterns)} {text}")
    (run,), result = runs, runs[0].result or {}
    if "equal_rewards" in result:
        raise ConfigError(f"{run.folder} has no G*: {result['summary']}")
    scaling = result["scaling"]
    gstar = [scaling[f"gstar{end}"] for end in ("", "_low", "_high")]
    if None in gstar:
        raise ConfigError(
            f"{run.folder} has no G* with an interval (C1 = {scaling['c1']}, C3 = "
            f"{scaling['c3']}): raise budget.pool_completions of {STUDY}"
        )
    law = ScalingLaw(*(scaling[name] for name in ("c1", "c2", "c3")))
    return StartLaw(run, result, law, Interval(*gstar))


def check_same_start(trained: RunGrid, study: StartLaw) -> None:
    """Refuse a study of another policy than the one that training starts from.

    Raises:
        ConfigError: naming what differs, and both values.
    """
    in_training, in_study = trained.any.keys, study.run.keys
    for key in (key for key in in_training if key.startswith(POLICY_KEYS)):
        if in_training[key] != in_study.get(key):
            raise ConfigError(
                f"{key} is {in_training[key]} in training and {in_study.get(key)} in the study: "
                "measure the policy that training starts from"
            )


def _read(key: str, patterns: Sequence[str], command: str) -> RunSet:
    """The runs that patterns match; `key` and `command` are for the error's line."""
    try:
        return read_runs(entries_in(list(patterns)))
    except ConfigError as error:
        raise ConfigError(f"{key}={list(patterns)} holds no run: {command}") from error
