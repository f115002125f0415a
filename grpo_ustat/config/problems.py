"""Schemas of the test problems (`problem=`): small policies on which theorems are tested.

The `kind` of a problem's node determines its schema; see `PROBLEMS`. Values are in `conf/problem/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_ustat.config.schema import ConfigError, field

# Largest number of possible completions in a `sequences` problem, which enumerates all of them.
MAX_COMPLETIONS = 2**14


@dataclass
class ProblemConfig:
    """Fields that all kinds of test problems have."""

    name: str = field("name of the test problem, part of the run folder's name")
    kind: str = field(
        "kind of the policy; set by problem=NAME",
        choices=("coins", "ridge_coins", "softmax", "sequences"),
    )

    def check(self) -> None:
        """Refuse values that do not define a policy."""


@dataclass
class PlaneConfig(ProblemConfig):
    """Policy that depends on its parameters theta only through u = Q theta."""

    parameters: int = field(
        "number D of the policy's parameters theta; if u has fewer coordinates than theta, the "
        "maximisers form a flat set"
    )
    start: list[float] = field("u of the initial policy, with one number per coordinate")
    reach: float = field(
        "largest gap J* - J of the policies for which the theory is tested", positive=True
    )

    def check(self) -> None:
        """Refuse a start without coordinates or with more coordinates than parameters."""
        if not self.start:
            raise ConfigError(
                "problem.start=[] has no coordinates: use one number per coordinate of u"
            )
        if self.parameters < len(self.start):
            raise ConfigError(
                f"problem.parameters={self.parameters} with {len(self.start)} coordinates in "
                f"problem.start: use problem.parameters={len(self.start)} or more"
            )


@dataclass
class CoinPlaneConfig(PlaneConfig):
    """Policy that tosses a coin for each answer: right answers have reward 1, wrong answers 0."""

    values: list[float] = field("probability of a right answer at the maximisers, for each prompt")

    def check(self) -> None:
        """Refuse probabilities that are not between 0 and 1."""
        super().check()
        if not self.values or not all(0 < value < 1 for value in self.values):
            raise ConfigError(f"problem.values={self.values} must be between 0 and 1")


@dataclass
class CoinsConfig(CoinPlaneConfig):
    """Coin problem; see `gap.problems.CoinProblem`."""

    slopes: list[Any] = field(
        "slopes in u of the probability of a right answer, for each prompt; their mean is 0"
    )
    styles: list[Any] = field(
        "slopes in u of choices that do not affect the reward, for each prompt; these choices only "
        "add noise to the gradient"
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
                f"problem.curvature={self.curvature}: use a positive number for each of the "
                f"{len(self.start)} coordinates of problem.start"
            )


@dataclass
class RidgeCoinsConfig(CoinPlaneConfig):
    """Coin problem with a ridge of maximisers, u = (v, w); see `gap.problems.RidgeCoinProblem`."""

    slopes: list[float] = field(
        "slopes in v of the probability of a right answer, for each prompt; their mean is 0"
    )
    styles: list[float] = field(
        "slopes in v, at w = 0, of choices that do not affect the reward, for each prompt; these "
        "choices only add noise to the gradient"
    )
    along: list[float] = field(
        "slopes in w of choices that do not affect the reward, for each prompt"
    )
    curvature: float = field("curvature of -J along v at w = 0, above 0", positive=True)
    bend: float = field("growth of the curvature with w, as a share of the curvature at w = 0")
    spread: float = field("growth of styles with w, as a share of styles at w = 0")
    width: float = field("width of the ridge: the largest |w|", positive=True)

    def check(self) -> None:
        """Refuse values of wrong shapes and a start outside the ridge."""
        super().check()
        if len(self.start) != 2:
            raise ConfigError(f"problem.start={self.start}: use two numbers, v and w")
        for name in ("slopes", "styles", "along"):
            if len(getattr(self, name)) != len(self.values):
                raise ConfigError(
                    f"problem.{name} has {len(getattr(self, name))} numbers, but problem.values "
                    f"has {len(self.values)}: use one number per prompt"
                )
        if abs(self.start[1]) > self.width:
            raise ConfigError(
                f"problem.start={self.start} has |w| above problem.width={self.width} (w is the "
                "second number): use a smaller |w|"
            )


@dataclass
class SoftmaxConfig(PlaneConfig):
    """Tabular softmax policy; see `gap.problems.SoftmaxProblem`."""

    features: list[Any] = field("features of each outcome, one for each coordinate of u")
    centres: list[Any] = field(
        "point u at which all outcomes of a prompt have equal probability, for each prompt"
    )
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
    """Autoregressive policy; see `gap.sequences`."""

    prompts: int = field("that share the parameters", "prompts", positive=True)
    vocabulary: int = field("in the vocabulary", "tokens", positive=True)
    length: int = field("in every completion", "tokens", positive=True)
    spread: float = field("standard deviation of the randomly drawn parameters", positive=True)
    apart: float = field(
        "standard deviation of the randomly drawn differences between the reference policy's "
        "parameters and the policy's parameters",
        positive=True,
    )
    reward_levels: int = field(
        "of the reward, evenly spaced from 0 to 1; 2: right or wrong", "levels"
    )
    difficulties: list[float] = field(
        "difficulty of each prompt; a completion's reward is r to the power of the difficulty, "
        "where r is the completion's rank among all completions, scaled to [0, 1]"
    )
    seed: int = field("random seed of the parameters and rewards")

    def check(self) -> None:
        """Refuse sizes that are too small or too large to enumerate."""
        if self.vocabulary < 2 or self.vocabulary**self.length > MAX_COMPLETIONS:
            raise ConfigError(
                f"problem.vocabulary={self.vocabulary} problem.length={self.length}: use at least "
                f"2 tokens and at most {MAX_COMPLETIONS} completions in total"
            )
        if not 2 <= self.reward_levels <= self.vocabulary**self.length:
            raise ConfigError(
                f"problem.reward_levels={self.reward_levels}: use 2 to "
                f"{self.vocabulary**self.length}, the number of completions"
            )
        if len(self.difficulties) != self.prompts or min(self.difficulties) <= 0:
            raise ConfigError(
                f"problem.difficulties={self.difficulties} with problem.prompts={self.prompts}: "
                "use a positive number per prompt"
            )


def _floats(name: str, rows: list[Any], shape: tuple[int, int]) -> list[list[float]]:
    """Return rows of numbers as floats, because OmegaConf's typed nested lists refuse integers."""
    try:
        floats = [[float(number) for number in row] for row in rows]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"problem.{name}={rows}: use rows of numbers, [[..],[..]]") from error
    if len(floats) != shape[0] or not floats or any(len(row) != shape[1] for row in floats):
        raise ConfigError(
            f"problem.{name} has {len(floats)} rows of {sorted({len(row) for row in floats})} "
            f"numbers: use {shape[0]} rows of {shape[1]} numbers"
        )
    return floats


PROBLEMS = {
    "coins": CoinsConfig,
    "ridge_coins": RidgeCoinsConfig,
    "softmax": SoftmaxConfig,
    "sequences": SequencesConfig,
}
