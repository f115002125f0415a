"""Schemas of the settings with which the paper's theorems are tested.

The `kind` of a theorem's node determines its schema; see `THEOREMS`. Values are in `conf/theorem/`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_ustat.config.problems import MAX_COMPLETIONS
from grpo_ustat.config.run import ProcessConfig, Shared
from grpo_ustat.config.schema import ConfigError, field, node

# Commands that test the paper's other results, which `gap` does not test.
OTHER_COMMANDS = {
    **dict.fromkeys(("lemma1", "theorem2", "proposition3"), "mse experiment=monte_carlo_check"),
    **dict.fromkeys(("assumption2", "corollary4", "corollary5"), "mse"),
    "figure4": "mse experiment=figure4_offline",
    "figure5": "train experiment=figure5_offline",
    "table2": "train experiment=table2_math",
    "best_group_size": "report runs=[outputs/best_group_size,outputs/best_group_size_start]",
}
NORMALISATIONS = ("none", "group_std")
SIMULATED_BASELINES = ("none", "oracle", "optimal", "leave_one_out")


@dataclass
class TheoryConfig:
    """Fields that all theorems have."""

    # Title in pages, figures and tables; a class attribute, not a configuration field.
    title: ClassVar[str] = ""
    # Kinds of test problems on which the theorem can be tested.
    problems: ClassVar[tuple[str, ...]] = ("coins", "softmax")

    kind: str = field("name of the paper's result; set by theorem=NAME")

    def check(self) -> None:
        """Refuse settings with which the theorem cannot be tested."""


@dataclass
class SimulatedConfig(TheoryConfig):
    """Fields of theorems that are tested by simulations of Algorithm 1."""

    replicates: int = field(
        "of Algorithm 1 from which each number is estimated", "runs", at_least=10
    )
    decaying_rate: float = field(
        "number c in the falling learning rate c / (t + offset) of step t", positive=True
    )
    offset: int = field(
        "added to t in the falling learning rate c / (t + offset)", "steps", at_least=0
    )


def _check_divisors(key: str, group_sizes: list[int], rollouts: int) -> None:
    if not group_sizes or any(rollouts % size for size in group_sizes):
        typed = group_sizes if key.endswith("s") else group_sizes[0]
        raise ConfigError(
            f"{key}={typed} with theorem.rollouts={rollouts}: use divisors of theorem.rollouts"
        )


def _check_steps(steps: list[int]) -> None:
    if not steps or steps != sorted(set(steps)):
        raise ConfigError(f"theorem.steps={steps}: use positive steps in ascending order")


def _check_minibatches(num_prompts: int, minibatches: int) -> None:
    if num_prompts % minibatches:
        raise ConfigError(
            f"theorem.num_prompts={num_prompts} with theorem.minibatches={minibatches}: "
            "use a multiple of theorem.minibatches"
        )


def _check_doubling(sizes: list[int]) -> None:
    first = min(sizes, default=0)
    if first < 2 or sizes != [first, 2 * first, 4 * first]:
        raise ConfigError(
            f"theorem.limit_sizes={sizes}: use three sizes of at least 2, each twice the "
            "previous size"
        )


@dataclass
class Lemma6Config(SimulatedConfig):
    """Comparison of the mean optimality gap with its recursion and bounds."""

    title = "Lemma 6, the gap under constant and falling learning rates"

    baselines: list[str] = field("baselines of the runs to compare", choices=SIMULATED_BASELINES)
    rollouts: int = field("per step, n = B G", "completions", positive=True)
    group_size: int = field("per group, G", "completions", at_least=2)
    constant_rates: list[float] = field(
        "constant learning rates, each below 2 / L; L is the smoothness of the objective J",
        positive=True,
    )
    steps: int = field("of each run, T", "steps", positive=True)

    def check(self) -> None:
        """Refuse a group size that does not divide n, and an empty list of baselines."""
        super().check()
        _check_divisors("theorem.group_size", [self.group_size], self.rollouts)
        if not self.baselines:
            raise ConfigError(
                f"theorem.baselines=[]: name at least one of {', '.join(SIMULATED_BASELINES)}"
            )


@dataclass
class Theorem7Config(SimulatedConfig):
    """Best group size at a fixed number of rollouts."""

    title = "Theorem 7, the best group size"

    rollouts: list[int] = field(
        "per step, n = B G: the values at which group sizes are compared, for each T",
        "completions",
        positive=True,
        distinct=True,
    )
    totals: list[int] = field(
        "in a whole run, n T; for each number of steps T, a step has n = total / T completions",
        "completions",
        positive=True,
        distinct=True,
    )
    group_sizes: list[int] = field(
        "per group: the values of G; values that do not divide n are skipped",
        "completions",
        at_least=2,
        distinct=True,
    )
    constant_rates: list[float] = field(
        "constant learning rates, each below 2 / L; L is the smoothness of the objective J",
        positive=True,
    )
    steps: list[int] = field(
        "after which gaps are compared: the values of T", "steps", positive=True
    )

    def check(self) -> None:
        """Refuse totals and numbers of completions that cannot be split.

        Each total must be a multiple of each T. Each n must be a multiple of two or more group
        sizes, because at least two sizes are compared.
        """
        super().check()
        _check_steps(self.steps)
        if not self.rollouts and not self.totals:
            raise ConfigError(
                "theorem.rollouts=[] theorem.totals=[]: set completions per step "
                "(theorem.rollouts) or per run (theorem.totals)"
            )
        for total in self.totals:
            odd = [step for step in self.steps if total % step]
            if odd:
                raise ConfigError(
                    f"theorem.totals={self.totals}: {total} is not a multiple of the numbers of "
                    f"steps T={odd}"
                )
        for n in [*self.rollouts, *(total // t for total in self.totals for t in self.steps)]:
            if sum(n % size == 0 for size in self.group_sizes) < 2:
                raise ConfigError(
                    f"theorem.group_sizes={self.group_sizes} with "
                    f"theorem.rollouts={self.rollouts} theorem.totals={self.totals}: at least "
                    f"two group sizes must divide the n={n} completions per step (theorem.totals / "
                    "T if totals are set)"
                )


@dataclass
class Theorem8Config(SimulatedConfig):
    """Probability distribution of the gap after T steps, multiplied by T."""

    title = "Theorem 8, the law of the gap"
    problems = ("coins", "ridge_coins", "softmax")

    rollouts: int = field("per step, n = B G", "completions", positive=True)
    group_sizes: list[int] = field(
        "per group of GRPO: the values of G; other baselines use only the first value",
        "completions",
        at_least=2,
        distinct=True,
    )
    steps: list[int] = field(
        "after which distributions are compared; the verdict uses the largest number of steps",
        "steps",
        positive=True,
    )

    def check(self) -> None:
        """Refuse group sizes that do not divide n, and steps that are not in ascending order."""
        super().check()
        _check_divisors("theorem.group_sizes", self.group_sizes, self.rollouts)
        _check_steps(self.steps)


@dataclass
class CorollariesConfig(SimulatedConfig):
    """Comparison of the limiting gaps of GRPO, the oracle and other baselines."""

    title = "Corollaries 9 and 10, GRPO, the oracle and other baselines"

    rollouts: int = field("per step, n = B G", "completions", positive=True)
    group_sizes: list[int] = field(
        "per group: the values of G", "completions", at_least=2, distinct=True
    )
    steps: int = field("of each run, T; 4 or more", "steps", at_least=4)

    def check(self) -> None:
        """Refuse group sizes that do not divide n."""
        super().check()
        _check_divisors("theorem.group_sizes", self.group_sizes, self.rollouts)


@dataclass
class Proposition13Config(SimulatedConfig):
    """Maximisers to which training with normalised advantages converges."""

    title = "Proposition 13, what normalised advantages maximise"
    problems = ("coins",)

    num_prompts: int = field("per step, B", "prompts", positive=True)
    group_sizes: list[int] = field(
        "per group: the values of G, ascending", "completions", at_least=2
    )
    epsilon: float = field("added to a group's standard deviation", at_least=0)
    limit_sizes: list[int] = field(
        "per group: three values of G, each twice the previous value, from which results are "
        "extrapolated to infinite G",
        "completions",
    )
    beta: float = field("weight of the KL term in the variants with a KL term", positive=True)
    reference: list[float] = field(
        "coordinate u of the KL term's reference policy, as a list with one number"
    )
    minibatches: int = field(
        "into which a batch is split, in the variants with minibatches", "minibatches", at_least=2
    )
    variant_sizes: list[int] = field(
        "per group: the values of G for the variants with a KL term, with minibatches or with both",
        "completions",
        at_least=2,
        distinct=True,
    )
    steps: int = field("of each run, T; 4 or more", "steps", at_least=4)

    def check(self) -> None:
        """Refuse invalid group sizes, and numbers of minibatches that do not divide the prompts."""
        super().check()
        if not self.group_sizes or self.group_sizes != sorted(set(self.group_sizes)):
            raise ConfigError(f"theorem.group_sizes={self.group_sizes}: use ascending sizes")
        _check_doubling(self.limit_sizes)
        _check_minibatches(self.num_prompts, self.minibatches)


@dataclass
class Lemma11Config(TheoryConfig):
    """Comparison of the normalised estimator with its U-statistic."""

    title = "Lemma 11, normalised advantages as a U-statistic"

    group_sizes: list[int] = field("per group: the values of G", "completions", at_least=2)
    epsilon: float = field("added to a group's standard deviation", at_least=0)

    def check(self) -> None:
        """Refuse fewer than three group sizes."""
        if len(set(self.group_sizes)) < 3:
            raise ConfigError(
                f"theorem.group_sizes={self.group_sizes}: use at least three group sizes"
            )


@dataclass
class Theorem12Config(TheoryConfig):
    """Squared bias and variance of Algorithm 2's estimate, with and without normalisation."""

    title = "Theorem 12, the error of Algorithm 2"
    problems = ("sequences",)

    normalisations: list[str] = field(
        "divisors of the advantages in the updates: none, or group_std, which is the group's "
        "standard deviation + epsilon",
        choices=NORMALISATIONS,
        distinct=True,
    )
    epsilon: float = field("added to a group's standard deviation", positive=True)
    floor: float = field(
        "lower bound of the standard deviation, one of the compared safeguards against division "
        "by 0",
        positive=True,
    )
    learning_rates: list[float] = field(
        "learning rates of the updates, three or more", positive=True
    )
    num_prompts: int = field("per batch, B", "prompts", positive=True)
    minibatches: int = field(
        "into which a batch is split; there is one pass, with an update on each minibatch",
        "minibatches",
        at_least=2,
    )
    group_size: int = field(
        "in a group during updates, G; must be one of group_sizes", "completions", at_least=2
    )
    group_sizes: list[int] = field(
        "per group: the values of G at learning rate 0", "completions", at_least=2, distinct=True
    )
    limit_sizes: list[int] = field(
        "per group: three values of G, each twice the previous value, from which results are "
        "extrapolated to infinite G",
        "completions",
    )
    beta: float = field(
        "weight of the KL term; bias and variance are also shown without the KL term", at_least=0
    )
    replicates: int = field(
        "to draw at random; a path is the sequence of updates on one batch", "paths", at_least=3
    )
    lengths: list[int] = field(
        "in a completion: the lengths at which bias and variance of importance ratios are computed",
        "tokens",
        positive=True,
    )
    shift: float = field(
        "difference of a token's logit between the two policies whose importance ratio is computed"
    )

    def check(self) -> None:
        """Refuse inconsistent sizes, and an empty list of normalisations."""
        if not self.normalisations:
            raise ConfigError(
                f"theorem.normalisations=[]: name at least one of {', '.join(NORMALISATIONS)}"
            )
        if len(set(self.learning_rates)) < 3:
            raise ConfigError(
                f"theorem.learning_rates={self.learning_rates}: use at least three rates, all "
                "above 0"
            )
        longest = MAX_COMPLETIONS.bit_length() - 1
        if len(set(self.lengths)) < 2 or max(self.lengths) > longest:
            raise ConfigError(
                f"theorem.lengths={self.lengths}: use at least two lengths, all from 1 to {longest}"
            )
        _check_minibatches(self.num_prompts, self.minibatches)
        if self.group_size not in self.group_sizes:
            raise ConfigError(
                f"theorem.group_size={self.group_size} with "
                f"theorem.group_sizes={self.group_sizes}: use one of theorem.group_sizes"
            )
        _check_doubling(self.limit_sizes)


THEOREMS = {
    "lemma6": Lemma6Config,
    "theorem7": Theorem7Config,
    "theorem8": Theorem8Config,
    "corollaries9_10": CorollariesConfig,
    "lemma11": Lemma11Config,
    "theorem12": Theorem12Config,
    "proposition13": Proposition13Config,
}


@dataclass
class GapLaunch(ProcessConfig):
    """Processes that run a theorem's test."""

    workers: int = field(
        "that share the replicates, without affecting results; under torchrun the ranks share "
        "the replicates",
        "processes",
        positive=True,
    )


@dataclass(frozen=True)
class Experiment:
    """Inputs of a theorem's test."""

    # Settings of the theorem to test, an instance of a class in this module.
    theorem: Any
    # Settings of the test problem, an instance of a class in `config.problems`.
    problem: Any
    seed: int
    # Number of local processes.
    workers: int


@dataclass
class GapConfig(Shared):
    """Configuration of `grpo-ustat gap`."""

    launch: GapLaunch = node(  # pyright: ignore[reportIncompatibleVariableOverride]  # narrower
        GapLaunch, "processes, which do not affect results"
    )
    theorem: Any = field(
        "the result of the paper to test; --help theorem=NAME lists the fields of another result"
    )
    problem: Any = field(
        "the test problem, a policy whose exact values are computed by enumeration; --help "
        "problem=NAME lists the fields of another problem"
    )

    @property
    def experiment(self) -> Experiment:
        """Inputs of the theorem's test."""
        return Experiment(self.theorem, self.problem, self.seed, self.launch.workers)

    @property
    def run_name(self) -> str:
        """Name of the run, made from the names of the theorem and the test problem."""
        return re.sub(r"[^\w.=-]+", "_", f"{self.theorem.kind}-{self.problem.name}")

    @property
    def plan(self) -> str:
        """Text that states the theorem, the test problem and the number of replicates."""
        replicates = getattr(self.theorem, "replicates", None)
        words = f"gap: {self.theorem.kind} on {self.problem.name}"
        return words + (f", {replicates} replicates" if replicates else "")

    def check(self) -> None:
        """Refuse a test problem on which the theorem cannot be tested."""
        super().check()
        if self.problem.kind not in self.theorem.problems:
            raise ConfigError(
                f"theorem={self.theorem.kind} with problem.kind={self.problem.kind}: choose a test "
                f"problem of kind {' or '.join(self.theorem.problems)}"
            )
        self.problem.check()
        self.theorem.check()
