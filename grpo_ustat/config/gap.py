"""Typed schemas of the studies of the paper's theorems and of the policies that they run on.

A study's node is typed by its `kind`, see `STUDIES`, a bed's by its own, see `BEDS`. Values live in
`conf/`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from grpo_ustat.checks import ConfigError, distinct, one_of, positive
from grpo_ustat.meanings import key, part
from grpo_ustat.run_config import ProcessConfig, Shared

SIMULATED = ("none", "oracle", "optimal", "leave_one_out")


@dataclass
class BedConfig:
    """Fields of all kinds."""

    name: str = key("of the bed, in the run folder's name")
    kind: str = key(
        "of policy; choose by bed=NAME", choices=("coins", "softmax", "sequences", "none")
    )

    def check(self) -> None:
        """Refuse what is no policy.

        Raises:
            ConfigError: naming the values and the fix.
        """


@dataclass
class PlaneConfig(BedConfig):
    """A policy that sees its parameters theta through u = Q theta alone."""

    parameters: int = key("D, of theta; those beyond u's leave a flat set of maximisers", "numbers")
    start: list[float] = key("u of the first policy, which has as many coordinates")
    reach: float = key("J* - J at the border of the set where theory is asked to hold")
    seed: int = key("of the directions Q")

    def check(self) -> None:
        """See `BedConfig.check`."""
        if not self.start:
            raise ConfigError("bed.start=[] has no coordinate: give one number for each of u")
        if self.parameters < len(self.start):
            raise ConfigError(
                f"bed.parameters={self.parameters} with {len(self.start)} coordinates in bed.start"
                f": use bed.parameters={len(self.start)} or more"
            )
        positive(self, "reach", prefix="bed.")


@dataclass
class CoinsConfig(PlaneConfig):
    """Answers that are coins, see `policy.beds.Coins`."""

    values: list[float] = key("probability of a right answer at the maximiser, for each prompt")
    slopes: list[Any] = key("of that probability in u, for each prompt; their mean is 0")
    styles: list[Any] = key("slopes of what earns nothing, the score's noise, likewise")
    curvature: list[float] = key("of -J along each coordinate of u, above 0")

    def check(self) -> None:
        """See `BedConfig.check`."""
        super().check()
        shape = (len(self.values), len(self.start))
        for name in ("slopes", "styles"):
            setattr(self, name, _floats(name, getattr(self, name), shape))
        if len(self.curvature) != len(self.start) or min(self.curvature) <= 0:
            raise ConfigError(
                f"bed.curvature={self.curvature}: give a number above 0 for each of the "
                f"{len(self.start)} coordinates of bed.start"
            )
        wrong = [value for value in self.values if not 0 < value < 1]
        if wrong or not self.values:
            raise ConfigError(f"bed.values={self.values} must be between 0 and 1")


@dataclass
class SoftmaxConfig(PlaneConfig):
    """A tabular softmax policy, see `policy.beds.Softmax`."""

    features: list[Any] = key("of each outcome, as many as u has coordinates")
    centres: list[Any] = key("u at which a prompt's outcomes have equal probability")
    rewards: list[Any] = key("of each outcome, for each prompt")

    def check(self) -> None:
        """See `BedConfig.check`."""
        super().check()
        prompts, outcomes, width = len(self.centres), len(self.features), len(self.start)
        self.features = _floats("features", self.features, (outcomes, width))
        self.centres = _floats("centres", self.centres, (prompts, width))
        self.rewards = _floats("rewards", self.rewards, (prompts, outcomes))


@dataclass
class SequencesConfig(BedConfig):
    """A policy that writes token by token, see `policy.sequences`."""

    prompts: int = key("that share the parameters", "prompts")
    vocabulary: int = key("that can come next", "tokens")
    length: int = key("of every completion", "tokens")
    spread: float = key("standard deviation of the parameters, which are drawn")
    apart: float = key("of what the reference policy's parameters differ by")
    seed: int = key("of parameters and rewards")

    def check(self) -> None:
        """See `BedConfig.check`."""
        positive(self, "prompts", "vocabulary", "length", "spread", "apart", prefix="bed.")
        if self.vocabulary < 2 or self.vocabulary**self.length > 2**14:
            raise ConfigError(
                f"bed.vocabulary={self.vocabulary} bed.length={self.length}: use 2 tokens or more, "
                "and at most 16384 completions in all"
            )


def _floats(name: str, rows: list[Any], shape: tuple[int, int]) -> list[list[float]]:
    """Rows of numbers, whole ones too, which OmegaConf's typed lists of lists refuse."""
    try:
        found = [[float(number) for number in row] for row in rows]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"bed.{name}={rows}: use rows of numbers, [[..],[..]]") from error
    if len(found) != shape[0] or not found or any(len(row) != shape[1] for row in found):
        raise ConfigError(
            f"bed.{name} has {len(found)} rows of {sorted({len(row) for row in found})} numbers: "
            f"use {shape[0]} of {shape[1]}"
        )
    return found


@dataclass
class TheoryConfig:
    """Fields of all studies."""

    kind: str = key("which of the paper's results; choose by study=NAME")

    beds = ("coins", "softmax")  # not a field: kinds of beds that the study can run on

    def check(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ConfigError: naming the values and the fix.
        """


@dataclass
class SimulatedConfig(TheoryConfig):
    """Fields of studies that run Algorithm 1."""

    replicates: int = key("runs of Algorithm 1 behind each number", "replicates")
    decaying_rate: float = key("c of the learning rate c / (t + offset)")
    offset: int = key("of it", "steps")

    def check(self) -> None:
        """See `TheoryConfig.check`."""
        positive(self, "replicates", "decaying_rate", prefix="study.")
        if self.replicates < 10 or self.offset < 0:
            raise ConfigError(
                f"study.replicates={self.replicates} study.offset={self.offset}: use 10 replicates "
                "or more, and an offset of 0 or more"
            )


def _divided(rollouts: int, group_sizes: list[int], least: int = 2) -> None:
    distinct("study.group_sizes", group_sizes)
    wrong = [size for size in group_sizes if size < least or rollouts % size]
    if wrong or not group_sizes:
        raise ConfigError(
            f"study.group_sizes={group_sizes} with study.rollouts={rollouts}: use sizes of at "
            f"least {least} that divide it"
        )


def _steps(steps: list[int]) -> None:
    if not steps or min(steps) < 1 or steps != sorted(set(steps)):
        raise ConfigError(f"study.steps={steps}: name steps above 0, ascending")


@dataclass
class Lemma6Config(SimulatedConfig):
    """The mean gap against its recursion and bounds."""

    baselines: list[str] = key("whose estimators are run", choices=SIMULATED)
    rollouts: int = key("of a step, n = B G", "completions")
    group_size: int = key("in a group, G", "completions")
    constant_rates: list[float] = key("learning rates, each below 2 / L")
    steps: int = key("of each run, T", "steps")

    def check(self) -> None:
        """See `TheoryConfig.check`."""
        super().check()
        _divided(self.rollouts, [self.group_size])
        positive(self, "steps", prefix="study.")
        for name in self.baselines:
            one_of("study.baselines", name, SIMULATED)
        wrong = [rate for rate in self.constant_rates if rate <= 0]
        if wrong or not self.baselines:
            raise ConfigError(
                f"study.constant_rates={self.constant_rates} study.baselines={self.baselines}: use "
                "rates above 0 and at least one baseline"
            )


@dataclass
class Theorem7Config(SimulatedConfig):
    """The best group size at a fixed number of rollouts."""

    rollouts: list[int] = key("of a step, every n = B G", "completions")
    group_sizes: list[int] = key("in a group, every G; those count that divide n", "completions")
    constant_rates: list[float] = key("learning rates, each below 2 / L")
    steps: list[int] = key("at which gaps are compared", "steps")

    def check(self) -> None:
        """See `TheoryConfig.check`."""
        super().check()
        _steps(self.steps)
        distinct("study.rollouts", self.rollouts)
        distinct("study.group_sizes", self.group_sizes)
        for n in self.rollouts:
            there = [size for size in self.group_sizes if n % size == 0]
            if len(there) < 2 or min(there) < 2:
                raise ConfigError(
                    f"study.rollouts={n} with study.group_sizes={self.group_sizes}: at least two "
                    "of 2 or more must divide it"
                )


@dataclass
class Theorem8Config(SimulatedConfig):
    """The law of T times the gap."""

    rollouts: int = key("of a step, n = B G", "completions")
    group_sizes: list[int] = key("of GRPO, in a group; the first also of the others", "completions")
    steps: list[int] = key("at which laws are compared; the last decides", "steps")

    def check(self) -> None:
        """See `TheoryConfig.check`."""
        super().check()
        _divided(self.rollouts, self.group_sizes)
        _steps(self.steps)


@dataclass
class CorollariesConfig(SimulatedConfig):
    """GRPO's limit beside the oracle's, and that beside other baselines'."""

    rollouts: int = key("of a step, n = B G", "completions")
    group_sizes: list[int] = key("in a group, every G", "completions")
    steps: int = key("of each run, T; 4 or more", "steps")

    def check(self) -> None:
        """See `TheoryConfig.check`."""
        super().check()
        _divided(self.rollouts, self.group_sizes)
        if self.steps < 4:
            raise ConfigError(f"study.steps={self.steps}: use 4 or more")


@dataclass
class Proposition13Config(SimulatedConfig):
    """Where normalised advantages lead."""

    num_prompts: int = key("of a step, B", "prompts")
    group_sizes: list[int] = key("in a group, every G, ascending", "completions")
    epsilon: float = key("added to a group's standard deviation")
    steps: int = key("of each run, T; 4 or more", "steps")

    beds = ("coins",)

    def check(self) -> None:
        """See `TheoryConfig.check`."""
        super().check()
        positive(self, "num_prompts", prefix="study.")
        if self.steps < 4 or self.group_sizes != sorted(set(self.group_sizes)):
            raise ConfigError(
                f"study.steps={self.steps} study.group_sizes={self.group_sizes}: use 4 steps or "
                "more, and ascending sizes"
            )
        if min(self.group_sizes, default=0) < 2 or self.epsilon < 0:
            raise ConfigError(
                f"study.group_sizes={self.group_sizes} study.epsilon={self.epsilon}: use sizes of "
                "2 or more, and an epsilon of 0 or more"
            )


@dataclass
class Lemma11Config(TheoryConfig):
    """The normalised estimator against its U-statistic."""

    group_sizes: list[int] = key("in a group, every G of the curves", "completions")
    epsilon: float = key("added to a group's standard deviation")

    def check(self) -> None:
        """See `TheoryConfig.check`."""
        if len(set(self.group_sizes)) < 3 or min(self.group_sizes) < 2 or self.epsilon < 0:
            raise ConfigError(
                f"study.group_sizes={self.group_sizes} study.epsilon={self.epsilon}: use at least "
                "three sizes, each of 2 or more, and an epsilon of 0 or more"
            )


@dataclass
class Theorem12Config(TheoryConfig):
    """Squared bias and variance after some updates on one batch."""

    learning_rates: list[float] = key("of the updates, three or more above 0")
    updates: int = key("between sampling and the estimate, k", "updates")
    group_size: int = key("in a group, G", "completions")
    num_prompts: int = key("of a minibatch, B", "prompts")
    beta: float = key("weight of the KL term")
    replicates: int = key("random paths of updates", "paths")
    lengths: list[int] = key("of completions, for what ratios cost", "tokens")
    shift: float = key("of a token's logit there")

    beds = ("sequences",)


@dataclass
class BestGroupSizeConfig(TheoryConfig):
    """Whether the measured G* predicts the G that trains best, from finished runs."""

    trained: list[str] = key("folders of runs of train, or patterns of them")
    measured: list[str] = key("folder of the study of mse, or a pattern of it")

    beds = ("none",)

    def check(self) -> None:
        """See `TheoryConfig.check`."""
        for name in ("trained", "measured"):
            if not all(getattr(self, name)) or not getattr(self, name):
                raise ConfigError(f"study.{name}={getattr(self, name)}: name folders of runs")


BEDS = {
    "coins": CoinsConfig,
    "softmax": SoftmaxConfig,
    "sequences": SequencesConfig,
    "none": BedConfig,
}
STUDIES = {
    "lemma6": Lemma6Config,
    "theorem7": Theorem7Config,
    "theorem8": Theorem8Config,
    "corollaries9_10": CorollariesConfig,
    "lemma11": Lemma11Config,
    "theorem12": Theorem12Config,
    "proposition13": Proposition13Config,
    "best_group_size": BestGroupSizeConfig,
}


@dataclass
class GapLaunch(ProcessConfig):
    """As `ProcessConfig`, of studies of theorems."""

    workers: int = key(
        "that share the replicates, with the same results; under torchrun its ranks do", "processes"
    )


@dataclass
class GapConfig(Shared):
    """What `python -m grpo_ustat.gap` runs."""

    launch: GapLaunch = part(GapLaunch, "processes; none of it changes results")
    study: Any = key("which result; fields of other studies: study=NAME --help")
    bed: Any = key("the policy, whose truth is enumerated; fields of others: bed=NAME --help")

    @property
    def run_name(self) -> str:
        """What was studied, in words."""
        bed = "" if self.bed.kind == "none" else f"-{self.bed.name}"
        return re.sub(r"[^\w.=-]+", "_", f"{self.study.kind}{bed}")

    def check(self) -> None:
        """See `Shared.check`."""
        super().check()
        positive(self.launch, "workers", prefix="launch.")
        if self.bed.kind not in self.study.beds:
            raise ConfigError(
                f"study={self.study.kind} with bed.kind={self.bed.kind}: it runs on a bed of kind "
                f"{' or '.join(self.study.beds)}"
            )
        self.bed.check()
        self.study.check()
