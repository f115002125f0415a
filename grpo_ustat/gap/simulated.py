"""Framework for tests of theorems by simulations of Algorithm 1.

A test consists of two functions. The plan lists the simulations for a configuration. The judge
turns their trajectories into claims, curves and table rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from grpo_ustat.config.gap import GapConfig, SimulatedConfig
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.gap.evidence import Evidence, Theorem
from grpo_ustat.gap.exact import problem_facts
from grpo_ustat.gap.problems import PROBLEMS, Problem
from grpo_ustat.gap.simulate import Rate, Simulation, Trajectories, run_simulations

Plan = Callable[[Any], list[Simulation]]
Judge = Callable[[Problem, Any, Sequence[Trajectories]], Evidence]


def learning_rates(theorem: SimulatedConfig) -> list[Rate]:
    """Return the learning rates at which a theorem is tested.

    The constant rates of the configuration come first, and the decaying rate c / (t + offset) is
    last.
    """
    constant = [Rate("constant", rate) for rate in getattr(theorem, "constant_rates", [])]
    return [*constant, Rate("decaying", theorem.decaying_rate, theorem.offset)]


def check_rates(theorem: SimulatedConfig) -> None:
    """Refuse learning rates that violate the theorem's assumptions.

    A constant rate eta must be below 2/L. The c of the decaying rate c/t must satisfy 2 mu c > 1.
    Lemma 6 needs the constant mu of the Polyak-Lojasiewicz inequality, and the theorems about the
    limit as T grows need the smallest curvature at the maximisers.
    """
    problem = PROBLEMS[theorem.problem]
    curvature = problem.constants[0] if theorem.kind == "lemma6" else problem.least_curvature
    highest, least = 2 / problem.constants[1], 0.5 / curvature
    for rate in getattr(theorem, "constant_rates", []):
        if rate >= highest:
            raise ConfigError(
                f"theorem.constant_rates contains {rate} on {theorem.problem}: use rates below "
                f"2/L = {highest:.4g}"
            )
    if theorem.decaying_rate <= least:
        raise ConfigError(
            f"theorem.decaying_rate={theorem.decaying_rate} on {theorem.problem} gives "
            f"2 mu c <= 1: use a rate above {least:.4g}"
        )


def simulated(statement: str, plan: Plan, judge: Judge) -> Theorem:
    """Return a theorem whose test runs the simulations of `plan` and evaluates them with `judge`.

    Args:
        statement: see `Theorem`.
        plan: function that returns the simulations for a theorem's settings.
        judge: function that turns the trajectories, in the order of the plan, into evidence.
            `run_and_judge` adds facts about the test problem and the number of completions.
    """

    def run(config: GapConfig) -> Evidence:
        problem = PROBLEMS[config.theorem.problem]
        return run_and_judge(
            plan, judge, problem, config.theorem, config.seed, config.launch.workers
        )

    def completions(theorem: SimulatedConfig) -> int:
        return theorem.replicates * sum(simulation.work for simulation in plan(theorem))

    return Theorem(statement, run, check_rates, completions)


def run_and_judge(
    plan: Plan, judge: Judge, problem: Problem, design: SimulatedConfig, seed: int, workers: int
) -> Evidence:
    """Run the planned simulations on a test problem and evaluate them; see `simulated`."""
    runs, rollouts = run_simulations(plan(design), problem, design.replicates, seed, workers)
    evidence = judge(problem, design, runs)
    return replace(evidence, problem=problem_facts(problem), rollouts=rollouts)
