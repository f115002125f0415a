"""Finished runs of a sweep over G, n and seed, and the study of the policy that they start from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from grpo_ustat.checks import ConfigError
from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.reports.found import Found, Run, entries_in, read
from grpo_ustat.reports.series import telling

TRAIN = "python -m grpo_ustat.train experiment=best_group_size"
STUDY = "python -m grpo_ustat.mse study=best_group_size_start"
FEWEST = 3  # seeds over which differences are compared
SHOWN = 8  # missing runs that are named one by one
OF_POLICY = ("model.", "dataset.", "prompt.", "temperature", "max_completion_length", "weights")

Cell = tuple[int, int, int]  # n, G, seed


@dataclass(frozen=True)
class Trained:
    """Runs that differ in n, G and seed alone.

    Attributes:
        runs: finished ones, by n, G and seed.
        notes: what is unfinished, damaged, or there twice, a line each.
    """

    runs: dict[Cell, Run]
    notes: list[str]

    @property
    def any(self) -> Run:
        """One of them, for what they share."""
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
    def missing(self) -> list[Cell]:
        """(n, G, seed) that others lead to expect."""
        seeds = sorted({seed for _, _, seed in self.runs})
        every = product(self.budgets, self.sizes, seeds)
        return [cell for cell in every if cell not in self.runs]

    def seeds(self, rollouts: int) -> list[int]:
        """Seeds that have every G at this n, on which all G can be compared.

        Raises:
            ConfigError: there are fewer than three, naming the runs that are missing.
        """
        lacking = {seed for n, _, seed in self.missing if n == rollouts}
        found = sorted({s for n, _, s in self.runs if n == rollouts} - lacking)
        if len(found) < FEWEST:
            raise ConfigError(
                f"n={rollouts} has {len(found)} seeds with every G of {self.sizes}, {FEWEST} are "
                f"needed; missing: {named(self.missing)}: go on with {TRAIN}"
            )
        return found


def named(missing: Sequence[Cell]) -> str:
    """Missing runs in a line.

    >>> named([(128, 2, 0), (128, 2, 1)])
    'n=128 G=2 seed=0, n=128 G=2 seed=1'
    """
    told = [f"n={n} G={size} seed={seed}" for n, size, seed in missing[:SHOWN]]
    rest = len(missing) - SHOWN
    return ", ".join(told) + (f" and {rest} more" if rest > 0 else "")


def trained_runs(patterns: Sequence[str]) -> Trained:
    """The finished training runs that the patterns match.

    Raises:
        ConfigError: there are none, or of several series, or of one G alone; the line names the
            command that makes them.
    """
    found = _read("trained", patterns, TRAIN)
    every = [run for run in found.runs if run.entry == "train"]
    done = [run for run in every if run.result is not None]
    if not done:
        raise ConfigError(f"trained={list(patterns)} holds no finished training run: {TRAIN}")
    _check_one_series(done)
    runs = {_cell(run): run for run in done}
    unfinished = [f"unfinished: {run.lacking}" for run in every if run.result is None]
    trained = Trained(runs, [*unfinished, *found.damaged, *found.twins])
    if len(trained.sizes) < 2:
        raise ConfigError(f"trained={list(patterns)} has G={trained.sizes} alone: {TRAIN}")
    return trained


def _cell(run: Run) -> Cell:
    config = run.config
    return config["budget"]["rollouts"], config["group_size"], config["seed"]


def _check_one_series(runs: Sequence[Run]) -> None:
    """Refuse runs that cannot be compared, or whose error is not the one that is predicted."""
    asked = telling([run.keys for run in runs])
    if asked:
        raise ConfigError(
            f"the training runs differ in {', '.join(asked)} too, not in n, G and seed alone: "
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
class Measured:
    """What a study found at the policy that training starts from.

    Attributes:
        run: the study.
        law: its C1, C2, C3.
        gstar: 1 + sqrt(C3/C1), with its interval.
    """

    run: Run
    law: ScalingLaw
    gstar: Interval

    @property
    def over(self) -> str:
        """What the interval is over."""
        of_questions = self.run.config["study"]["interval"] == "questions"
        return "over questions" if of_questions else "given the questions"


def measured_policy(patterns: Sequence[str]) -> Measured:
    """The finished study that the patterns match.

    Raises:
        ConfigError: there is none, or more than one, or it has no G*; the line names the command
            that makes one.
    """
    found = _read("measured", patterns, STUDY)
    runs = [run for run in found.runs if run.entry == "mse" and run.result is not None]
    if len(runs) != 1:
        text = f"holds {len(runs)} finished studies, one is needed: {STUDY}"
        raise ConfigError(f"measured={list(patterns)} {text}")
    scaling = runs[0].result["scaling"]
    gstar = [scaling[f"gstar{end}"] for end in ("", "_low", "_high")]
    if None in gstar:
        raise ConfigError(
            f"{runs[0].folder} has no G* with an interval (C1 = {scaling['c1']}, C3 = "
            f"{scaling['c3']}): raise budget.pool_completions of {STUDY}"
        )
    law = ScalingLaw(*(scaling[name] for name in ("c1", "c2", "c3")))
    return Measured(runs[0], law, Interval(*gstar))


def check_same_start(trained: Trained, measured: Measured) -> None:
    """Refuse a study of another policy than the one that training starts from.

    Raises:
        ConfigError: naming what differs, and both values.
    """
    start, studied = trained.any.keys, measured.run.keys
    for key in (key for key in start if key.startswith(OF_POLICY)):
        if start[key] != studied.get(key):
            raise ConfigError(
                f"{key} is {start[key]} in training and {studied.get(key)} in the study: measure "
                "the policy that training starts from"
            )


def _read(what: str, patterns: Sequence[str], command: str) -> Found:
    try:
        return read(entries_in(list(patterns)))
    except ConfigError as error:
        raise ConfigError(f"{what}={list(patterns)} holds no run: {command}") from error
