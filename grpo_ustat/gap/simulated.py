"""Frame of a theorem's test by runs of Algorithm 1.

A test of this kind consists of a plan, which lists the simulations of a configuration, and a judge,
which makes claims, curves and rows of their trajectories.
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
    """Return every learning rate of a theorem, the falling one last."""
    constant = [Rate("constant", rate) for rate in getattr(theorem, "constant_rates", [])]
    return [*constant, Rate("decaying", theorem.decaying_rate, theorem.offset)]


def check_rates(experiment: Experiment, problem: Problem, curvature: float) -> None:
    """Refuse learning rates outside the theorems: eta >= 2/L, 2 mu c <= 1.

    Args:
        experiment: its theorem has the rates.
        problem: with L.
        curvature: mu of the falling rate.
    """
    smoothness, least = problem.constants[1], 0.5 / curvature
    for rate in getattr(experiment.theorem, "constant_rates", []):
        if rate >= 2 / smoothness:
            raise ConfigError(
                f"theorem.constant_rates has {rate}, L of problem={experiment.problem.name} is "
                f"{smoothness:.4g}: use rates below {2 / smoothness:.4g}"
            )
    if experiment.theorem.decaying_rate <= least:
        raise ConfigError(
            f"theorem.decaying_rate={experiment.theorem.decaying_rate} on "
            f"problem={experiment.problem.name}: use more than {least:.4g}, so that 2 mu c > 1"
        )


def check_limit_rates(experiment: Experiment) -> None:
    """Check rates for theorems on the limit, where the curvature at the maximisers counts."""
    problem = build_problem(experiment.problem)
    check_rates(experiment, problem, problem.least_curvature)


def simulated(
    schema: type[SimulatedConfig],
    statement: str,
    plan: Plan,
    judge: Judge,
    check: Callable[[Experiment], None] = check_limit_rates,
) -> Theorem:
    """Return the record of a theorem that `judge` tests by the runs of `plan`.

    Args:
        schema, statement, check: see `Theorem`.
        plan: the simulations of a theorem's configuration, the instance of `schema`.
        judge: the evidence of their trajectories, which come in the order of the plan; the frame
            adds the facts of the test problem and the number of completions.
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
    """Run the planned simulations on a test problem, and judge them; see `simulated`."""
    runs, rollouts = run_simulations(plan(design), problem, design.replicates, seed, workers)
    evidence = judge(problem, design, runs)
    return replace(
        evidence, problem={**problem_facts(problem), **evidence.problem}, rollouts=rollouts
    )
