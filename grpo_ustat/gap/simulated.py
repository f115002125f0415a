"""Framework for tests of theorems by simulations of Algorithm 1.

A test consists of two functions. The plan lists the simulations for a configuration. The judge
turns their trajectories into claims, curves and table rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from grpo_ustat.config.gap import Experiment, SimulatedConfig
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.gap.evidence import Evidence, Theorem
from grpo_ustat.gap.exact import problem_facts
from grpo_ustat.gap.problems import Problem, build_problem
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


def check_rates(experiment: Experiment, problem: Problem, curvature: float) -> None:
    """Refuse learning rates that violate the theorem's assumptions.

    A constant rate eta must be below 2/L. The c of the decaying rate c/t must satisfy 2 mu c > 1.

    Args:
        experiment: experiment that defines the learning rates.
        problem: test problem, which defines the smoothness constant L.
        curvature: the constant mu.
    """
    smoothness, least = problem.constants[1], 0.5 / curvature
    for rate in getattr(experiment.theorem, "constant_rates", []):
        if rate >= 2 / smoothness:
            raise ConfigError(
                f"theorem.constant_rates contains {rate}, but L of "
                f"problem={experiment.problem.name} is {smoothness:.4g}: use rates below "
                f"2/L = {2 / smoothness:.4g}"
            )
    if experiment.theorem.decaying_rate <= least:
        raise ConfigError(
            f"theorem.decaying_rate={experiment.theorem.decaying_rate} on "
            f"problem={experiment.problem.name} gives 2 mu c <= 1: use a rate above {least:.4g}"
        )


def check_limit_rates(experiment: Experiment) -> None:
    """Refuse learning rates that violate the assumptions of theorems about the limit as T grows.

    In the condition 2 mu c > 1 of `check_rates`, mu is the smallest curvature at the maximisers.
    """
    problem = build_problem(experiment.problem)
    check_rates(experiment, problem, problem.least_curvature)


def simulated(
    schema: type[SimulatedConfig],
    statement: str,
    plan: Plan,
    judge: Judge,
    check: Callable[[Experiment], None] = check_limit_rates,
) -> Theorem:
    """Return a theorem whose test runs the simulations of `plan` and evaluates them with `judge`.

    Args:
        schema, statement, check: see `Theorem`.
        plan: function that returns the simulations for an instance of `schema`.
        judge: function that turns the trajectories, in the order of the plan, into evidence.
            `run_and_judge` adds facts about the test problem and the number of completions.
    """

    def run(experiment: Experiment) -> Evidence:
        problem = build_problem(experiment.problem)
        return run_and_judge(
            plan, judge, problem, experiment.theorem, experiment.seed, experiment.workers
        )

    def completions(experiment: Experiment) -> int:
        of_a_replicate = sum(simulation.work for simulation in plan(experiment.theorem))
        return experiment.theorem.replicates * of_a_replicate

    return Theorem(schema, statement, run, check, completions)


def run_and_judge(
    plan: Plan, judge: Judge, problem: Problem, design: SimulatedConfig, seed: int, workers: int
) -> Evidence:
    """Run the planned simulations on a test problem and evaluate them; see `simulated`."""
    runs, rollouts = run_simulations(plan(design), problem, design.replicates, seed, workers)
    evidence = judge(problem, design, runs)
    return replace(
        evidence, problem={**problem_facts(problem), **evidence.problem}, rollouts=rollouts
    )
