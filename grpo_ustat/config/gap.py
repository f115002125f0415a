"""Settings with which the paper's theorems are tested; `theorem.x=` replaces a default.

The `kind` of a theorem's node determines its schema. `THEOREMS` contains the choices of `theorem=`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from grpo_ustat.config.run import ProcessConfig, Shared
from grpo_ustat.config.schema import ConfigError, check_choice, check_distinct, field, node

# Commands that test the paper's other results, which `gap` does not test.
OTHER_COMMANDS = {
    **dict.fromkeys(("lemma1", "theorem2", "proposition3"), "mse experiment=monte_carlo_check"),
    **dict.fromkeys(("assumption2", "corollary4", "corollary5"), "mse"),
    "figure4": "mse experiment=figure4_offline",
    "figure5": "train experiment=figure5_offline",
    "table2": "train experiment=table2_math",
    "best_group_size": "report runs=[outputs/best_group_size,outputs/best_group_size_start]",
}
SIMULATED_BASELINES = ("none", "oracle", "optimal", "leave_one_out")
# Smallest values of numbers that may be 0 or must be larger than 1. The others must be above 0.
SMALLEST = {
    **dict.fromkeys(("epsilon", "beta", "offset"), 0),
    **dict.fromkeys(
        ("group_size", "group_sizes", "limit_sizes", "variant_sizes", "minibatches"), 2
    ),
    "replicates": 10,
}

MAY_BE_EMPTY = ("constant_rates", "rollouts", "totals", "variant_sizes")


def listed(*values: Any) -> Any:
    """Declare a list of numbers or words with its default values."""
    return dataclasses.field(default_factory=lambda: list(values))


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, and any other value as the only one of a list."""
    return cast(list[Any], value) if isinstance(value, list) else [value]


@dataclass
class TheoryConfig:
    """Fields that all theorems have."""

    # Title in pages, figures and tables.
    title: ClassVar[str] = ""
    # Names of the test problems on which the theorem can be tested.
    problems: ClassVar[tuple[str, ...]] = ("coins", "uneven_coins", "unequal_coins", "softmax")
    # Pairs of fields; the values of the second must divide those of the first.
    divisors: ClassVar[tuple[tuple[str, str], ...]] = ()
    # List that needs three values or more.
    three: ClassVar[str] = ""

    kind: str
    problem: str

    @property
    def words(self) -> str:
        """Description in the help."""
        return f"{self.title}, on {self.problem}"

    def check(self) -> None:
        """Refuse settings with which the theorem cannot be tested."""
        check_choice("theorem.problem", self.problem, self.problems)
        for declared in dataclasses.fields(self):
            name, value = declared.name, getattr(self, declared.name)
            values = as_list(value)
            numbers = [x for x in values if isinstance(x, int | float) and name != "reference"]
            least = SMALLEST.get(name)
            for x in numbers:
                if not (x > 0 if least is None else x >= least) or x == float("inf"):
                    rule = "above 0" if least is None else f"{least} or more"
                    raise ConfigError(f"theorem.{name}={value} must be {rule} and finite")
            check_distinct(f"theorem.{name}", values)
            if not values and name not in MAY_BE_EMPTY:
                raise ConfigError(f"theorem.{name}=[] is empty: use at least one value")
            if name == "limit_sizes" and value != [value[0], 2 * value[0], 4 * value[0]]:
                raise ConfigError(
                    f"theorem.limit_sizes={value}: use three sizes, each twice the previous size"
                )
            if name == "steps" and values != sorted(values):
                raise ConfigError(f"theorem.steps={value}: use ascending steps")
            if name == self.three and len(values) < 3:
                raise ConfigError(f"theorem.{name}={value}: use three values or more")
        for number, divisor in self.divisors:
            value, typed = getattr(self, number), getattr(self, divisor)
            if any(n % x for n in as_list(value) for x in as_list(typed)):
                raise ConfigError(
                    f"theorem.{divisor}={typed} with theorem.{number}={value}: use divisors of "
                    f"theorem.{number}"
                )


@dataclass
class SimulatedConfig(TheoryConfig):
    """Theorem that is tested by simulations of Algorithm 1."""

    problem: str = "coins"
    # Numbers c and offset of the falling learning rate c / (t + offset) at step t.
    decaying_rate: float = 2.5
    offset: int = 20
    # Runs of Algorithm 1 from which each number is estimated.
    replicates: int = 4000


@dataclass
class Lemma6Config(SimulatedConfig):
    """Comparison of the mean gap with its recursion and bounds."""

    title = "Lemma 6, the gap under constant and falling learning rates"
    divisors = (("rollouts", "group_size"),)

    kind: str = "lemma6"
    baselines: list[str] = listed("none", "leave_one_out", "oracle")
    # Completions per step, n = B G.
    rollouts: int = 16
    group_size: int = 4
    constant_rates: list[float] = listed(0.05, 0.2)
    decaying_rate: float = 2.0
    steps: int = 1000
    replicates: int = 2000

    def check(self) -> None:
        """Refuse unknown baselines."""
        super().check()
        for baseline in self.baselines:
            check_choice("theorem.baselines", baseline, SIMULATED_BASELINES)


@dataclass
class Theorem7Config(SimulatedConfig):
    """Best group size at a fixed number of rollouts."""

    title = "Theorem 7, the best group size"
    divisors = (("totals", "steps"),)

    kind: str = "theorem7"
    # Completions per step, n = B G, at which group sizes are compared for each T.
    rollouts: list[int] = listed(16, 32, 64)
    # Completions in a whole run, n T. For each T, a step has total / T completions.
    totals: list[int] = listed()
    # Values of G; those that do not divide n are skipped.
    group_sizes: list[int] = listed(2, 4, 8, 16)
    constant_rates: list[float] = listed(0.1)
    steps: list[int] = listed(50, 200, 800)
    replicates: int = 2000

    def check(self) -> None:
        """Refuse numbers of completions with fewer than two G."""
        super().check()
        batches = [*self.rollouts, *(total // t for total in self.totals for t in self.steps)]
        for n in batches or [0]:
            if n == 0 or sum(n % size == 0 for size in self.group_sizes) < 2:
                raise ConfigError(
                    f"theorem.group_sizes={self.group_sizes} theorem.rollouts={self.rollouts} "
                    f"theorem.totals={self.totals}: at least two group sizes must divide the n={n} "
                    "completions of a step"
                )


@dataclass
class Theorem8Config(SimulatedConfig):
    """Probability distribution of the gap after T steps, multiplied by T."""

    title = "Theorem 8, the law of the gap"
    divisors = (("rollouts", "group_sizes"),)
    problems = (*SimulatedConfig.problems, "ridge_coins")

    kind: str = "theorem8"
    rollouts: int = 16
    # GRPO is tested at each size, the baselines none and oracle only at the first.
    group_sizes: list[int] = listed(4, 2, 16)
    # The verdict uses the last number of steps.
    steps: list[int] = listed(100, 400, 1600)
    replicates: int = 5000


@dataclass
class CorollariesConfig(SimulatedConfig):
    """Comparison of the limiting gaps of GRPO, the oracle and other baselines."""

    title = "Corollaries 9 and 10, GRPO, the oracle and other baselines"
    divisors = (("rollouts", "group_sizes"),)

    kind: str = "corollaries9_10"
    rollouts: int = 16
    group_sizes: list[int] = listed(2, 4, 8, 16)
    steps: int = 1000


@dataclass
class Lemma11Config(TheoryConfig):
    """Comparison of the normalised estimator with its U-statistic."""

    title = "Lemma 11, normalised advantages as a U-statistic"
    three = "group_sizes"

    kind: str = "lemma11"
    problem: str = "softmax"
    # Three or more.
    group_sizes: list[int] = listed(2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    # Added to a group's standard deviation.
    epsilon: float = 0.0


@dataclass
class Theorem12Config(TheoryConfig):
    """Squared bias and variance of Algorithm 2's estimate, with and without normalisation."""

    title = "Theorem 12, the error of Algorithm 2"
    problems = ("sequences",)
    divisors = (("num_prompts", "minibatches"),)
    three = "learning_rates"

    kind: str = "theorem12"
    problem: str = "sequences"
    # Added to a group's standard deviation, as in baseline=group_std.
    epsilon: float = 1e-4
    # Lower bound of the standard deviation in two guards against division by 0.
    floor: float = 0.1
    # Learning rates of the updates, three or more.
    learning_rates: list[float] = listed(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    # Prompts of a batch and minibatches into which it is split; the last one is tested.
    num_prompts: int = 40
    minibatches: int = 5
    # G during updates, and the values of G at learning rate 0, which must include it.
    group_size: int = 8
    group_sizes: list[int] = listed(2, 4, 8, 16, 32)
    # Sizes from which limits are extrapolated.
    limit_sizes: list[int] = listed(256, 512, 1024)
    # Weight of the KL term.
    beta: float = 0.1

    def check(self) -> None:
        """Refuse a group size that is not among the group sizes."""
        super().check()
        if self.group_size not in self.group_sizes:
            raise ConfigError(
                f"theorem.group_size={self.group_size} with theorem.group_sizes={self.group_sizes}"
                ": use one of theorem.group_sizes"
            )


@dataclass
class Proposition13Config(SimulatedConfig):
    """Maximisers to which training with normalised advantages converges."""

    title = "Proposition 13, what normalised advantages maximise"
    problems = ("unequal_coins",)
    divisors = (("num_prompts", "minibatches"),)

    kind: str = "proposition13"
    problem: str = "unequal_coins"
    num_prompts: int = 4
    group_sizes: list[int] = listed(2, 4, 8, 16, 32)
    # The proposition adds no constant to the standard deviation.
    epsilon: float = 0.0
    limit_sizes: list[int] = listed(256, 512, 1024)
    # Weight of the KL term in the variants. It moves the maximiser about as far as normalisation.
    beta: float = 1.0
    # Coordinate u of the reference policy. The initial policy has u = 0.1.
    reference: float = 0.3
    # Minibatches of a batch, with two prompts each, in the variants.
    minibatches: int = 2
    variant_sizes: list[int] = listed(2, 16)
    decaying_rate: float = 4.0
    steps: int = 1000


# Choices of `theorem=`.
THEOREMS: Mapping[str, TheoryConfig] = {
    "lemma6": Lemma6Config(),
    "theorem7": Theorem7Config(),
    # The best group size depends on T and the learning rate.
    "theorem7_uneven": Theorem7Config(
        problem="uneven_coins", rollouts=[24], group_sizes=[2, 3, 4, 6, 8], decaying_rate=8.0,
        # Enough replicates to detect the predicted 6 % difference between the gaps at G = 3 and 4.
        offset=40, steps=[10, 800], replicates=15000,
    ),
    # At the three T, n is 64, 32 and 16.
    "theorem7_total": Theorem7Config(
        rollouts=[], totals=[12800], steps=[200, 400, 800], replicates=4000
    ),
    "theorem8": Theorem8Config(),
    # Many best policies: the law given the one that is reached. Large early steps, from a small
    # offset, make replicates reach different ones.
    "theorem8_mixture": Theorem8Config(
        problem="ridge_coins", rollouts=8, group_sizes=[4, 2, 8], offset=10
    ),
    "corollaries9_10": CorollariesConfig(),
    "lemma11": Lemma11Config(),
    "theorem12": Theorem12Config(),
    "proposition13": Proposition13Config(),
}  # fmt: skip
# Schema of each kind of theorem.
KINDS = {theory.kind: type(theory) for theory in THEOREMS.values()}


@dataclass
class GapLaunch(ProcessConfig):
    """Processes that run a theorem's test."""

    workers: int = field(
        "that share the replicates, without affecting results; under torchrun the ranks share "
        "the replicates",
        "processes",
        positive=True,
    )


@dataclass
class GapConfig(Shared):
    """Configuration of `grpo-ustat gap`."""

    launch: GapLaunch = node(  # pyright: ignore[reportIncompatibleVariableOverride]  # narrower
        GapLaunch, "processes, which do not affect results"
    )
    theorem: Any = field(
        "the result of the paper to test; --help theorem=NAME lists the fields of another result"
    )

    @property
    def run_name(self) -> str:
        """Name of the run, made from the names of the theorem and the test problem."""
        return re.sub(r"[^\w.=-]+", "_", f"{self.theorem.kind}-{self.theorem.problem}")

    @property
    def plan(self) -> str:
        """Text that states the theorem, the test problem and the number of replicates."""
        replicates = getattr(self.theorem, "replicates", None)
        words = f"gap: {self.theorem.kind} on {self.theorem.problem}"
        return words + (f", {replicates} replicates" if replicates else "")

    def check(self) -> None:
        """Refuse settings with which the theorem cannot be tested."""
        super().check()
        self.theorem.check()
