"""Typed schemas of the test problems (`problem=`): policies that theorems are tested on.

A test problem's node is typed by its `kind`, see `PROBLEMS`. Values live in `conf/problem/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_ustat.config.schema import ConfigError, field

# Completions of `sequences`, which are enumerated.
MAX_COMPLETIONS = 2**14


@dataclass
class ProblemConfig:
    """Fields that every kind of test problem has."""

    name: str = field("name of the test problem, in the run folder's name")
    kind: str = field(
        "kind of the policy; choose by problem=NAME",
        choices=("coins", "ridge_coins", "softmax", "sequences"),
    )

    def check(self) -> None:
        """Refuse values that define no policy."""


@dataclass
class PlaneConfig(ProblemConfig):
    """A policy that depends on its parameters theta only through u = Q theta."""

    parameters: int = field(
        "dimension D of theta; if u has fewer coordinates, the maximisers form a flat set"
    )
    start: list[float] = field("u of the first policy, a number for each coordinate")
    reach: float = field(
        "J* - J at the border of the set on which the theory is tested", positive=True
    )

    def check(self) -> None:
        """Refuse a start that the parameters cannot have."""
        if not self.start:
            raise ConfigError("problem.start=[] has no coordinate: give one number for each of u")
        if self.parameters < len(self.start):
            raise ConfigError(
                f"problem.parameters={self.parameters} with {len(self.start)} coordinates in "
                f"problem.start: use problem.parameters={len(self.start)} or more"
            )


@dataclass
class CoinPlaneConfig(PlaneConfig):
    """A policy whose answers are coins: each is right, reward 1, or wrong, reward 0."""

    values: list[float] = field("probability of a right answer at the maximisers, for each prompt")

    def check(self) -> None:
        """Refuse probabilities that are not between 0 and 1."""
        super().check()
        if not self.values or not all(0 < value < 1 for value in self.values):
            raise ConfigError(f"problem.values={self.values} must be between 0 and 1")


@dataclass
class CoinsConfig(CoinPlaneConfig):
    """Answers that are coins, see `gap.problems.CoinProblem`."""

    slopes: list[Any] = field(
        "slopes in u of the probability of a right answer, for each prompt; their mean is 0"
    )
    styles: list[Any] = field(
        "slopes in u of choices that earn nothing (noise of the score), for each prompt"
    )
    curvature: list[float] = field("curvature of -J along each coordinate of u, above 0")

    def check(self) -> None:
        """Refuse slopes, styles and curvatures of wrong shapes."""
        super().check()
        shape = (len(self.values), len(self.start))
        for name in ("slopes", "styles"):
            setattr(self, name, _floats(name, getattr(self, name), shape))
        if len(self.curvature) != len(self.start) or min(self.curvature) <= 0:
            raise ConfigError(
                f"problem.curvature={self.curvature}: give a number above 0 for each of the "
                f"{len(self.start)} coordinates of problem.start"
            )


@dataclass
class RidgeCoinsConfig(CoinPlaneConfig):
    """Coins whose maximisers are a ridge, see `gap.problems.RidgeCoinProblem`; u = (v, w)."""

    slopes: list[float] = field(
        "slopes in v of the probability of a right answer, for each prompt; their mean is 0"
    )
    styles: list[float] = field(
        "slopes in v, at w = 0, of choices that earn nothing (noise of the score), for each prompt"
    )
    along: list[float] = field("slopes in w of choices that earn nothing, for each prompt")
    curvature: float = field("curvature of -J along v at w = 0, above 0", positive=True)
    bend: float = field("growth of the curvature with w, as a share of it")
    spread: float = field("growth of styles with w, as a share of them")
    width: float = field("width of the ridge: the largest |w|", positive=True)

    def check(self) -> None:
        """Refuse numbers of wrong shapes, and a start outside the ridge."""
        super().check()
        if len(self.start) != 2:
            raise ConfigError(f"problem.start={self.start}: give v and w, two numbers")
        for name in ("slopes", "styles", "along"):
            if len(getattr(self, name)) != len(self.values):
                raise ConfigError(
                    f"problem.{name} has {len(getattr(self, name))} numbers, problem.values has "
                    f"{len(self.values)}: give one for each prompt"
                )
        if abs(self.start[1]) > self.width:
            raise ConfigError(
                f"problem.start={self.start} has a w larger than problem.width={self.width}: "
                "start within"
            )


@dataclass
class SoftmaxConfig(PlaneConfig):
    """A tabular softmax policy, see `gap.problems.SoftmaxProblem`."""

    features: list[Any] = field("features of each outcome, as many as u has coordinates")
    centres: list[Any] = field("u at which a prompt's outcomes have equal probability")
    rewards: list[Any] = field("reward of each outcome, for each prompt")

    def check(self) -> None:
        """Refuse features, centres and rewards of wrong shapes."""
        super().check()
        prompts, outcomes, width = len(self.centres), len(self.features), len(self.start)
        self.features = _floats("features", self.features, (outcomes, width))
        self.centres = _floats("centres", self.centres, (prompts, width))
        self.rewards = _floats("rewards", self.rewards, (prompts, outcomes))


@dataclass
class SequencesConfig(ProblemConfig):
    """A policy that writes token by token, see `gap.sequences`."""

    prompts: int = field("that share the parameters", "prompts", positive=True)
    vocabulary: int = field("that can come next", "tokens", positive=True)
    length: int = field("of every completion", "tokens", positive=True)
    spread: float = field("standard deviation of the parameters, which are drawn", positive=True)
    apart: float = field(
        "standard deviation of the differences between the reference policy's parameters and these",
        positive=True,
    )
    reward_levels: int = field("of rewards, evenly spaced from 0 to 1; 2: right or wrong", "levels")
    difficulties: list[float] = field(
        "difficulty of each prompt: a completion's reward is its rank among all, to this power"
    )
    seed: int = field("seed of parameters and rewards")

    def check(self) -> None:
        """Refuse sizes that are too small or too large to enumerate."""
        if self.vocabulary < 2 or self.vocabulary**self.length > MAX_COMPLETIONS:
            raise ConfigError(
                f"problem.vocabulary={self.vocabulary} problem.length={self.length}: use 2 tokens "
                f"or more, and at most {MAX_COMPLETIONS} completions in all"
            )
        if not 2 <= self.reward_levels <= self.vocabulary**self.length:
            raise ConfigError(
                f"problem.reward_levels={self.reward_levels}: use 2 to as many as there are "
                f"completions, {self.vocabulary**self.length}"
            )
        if len(self.difficulties) != self.prompts or min(self.difficulties) <= 0:
            raise ConfigError(
                f"problem.difficulties={self.difficulties} with problem.prompts={self.prompts}: "
                "give a number above 0 for each prompt"
            )


def _floats(name: str, rows: list[Any], shape: tuple[int, int]) -> list[list[float]]:
    """Return rows of numbers as floats; OmegaConf's typed lists of lists refuse whole numbers."""
    try:
        floats = [[float(number) for number in row] for row in rows]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"problem.{name}={rows}: use rows of numbers, [[..],[..]]") from error
    if len(floats) != shape[0] or not floats or any(len(row) != shape[1] for row in floats):
        raise ConfigError(
            f"problem.{name} has {len(floats)} rows of {sorted({len(row) for row in floats})} "
            f"numbers: use {shape[0]} of {shape[1]}"
        )
    return floats


PROBLEMS = {
    "coins": CoinsConfig,
    "ridge_coins": RidgeCoinsConfig,
    "softmax": SoftmaxConfig,
    "sequences": SequencesConfig,
}
