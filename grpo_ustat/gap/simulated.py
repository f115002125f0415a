"""Frame of a theorem's study that runs Algorithm 1.

A study of this kind is a plan, the simulations that a configuration asks for, and a judge, which
makes claims, curves and rows of their trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from grpo_ustat.config.gap import Experiment, SimulatedConfig
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.gap.evidence import Evidence, Theorem
from grpo_ustat.gap.exact import bed_facts
from grpo_ustat.gap.simulate import Rate, Simulation, Trajectories, run_simulations
from grpo_ustat.gap.testbeds import Testbed, build_testbed

Plan = Callable[[Any], list[Simulation]]
Judge = Callable[[Testbed, Any, Sequence[Trajectories]], Evidence]


def learning_rates(study: SimulatedConfig) -> list[Rate]:
    """Return every learning rate of a study, the falling one last."""
    constant = [Rate("constant", rate) for rate in getattr(study, "constant_rates", [])]
    return [*constant, Rate("decaying", study.decaying_rate, study.offset)]


def check_rates(experiment: Experiment, bed: Testbed, curvature: float) -> None:
    """Refuse learning rates that theorems say nothing about: eta >= 2/L, 2 mu c <= 1.

    Args:
        experiment: its study has the rates.
        bed: with L.
        curvature: mu of the falling rate.
    """
    smoothness, least = bed.constants[1], 0.5 / curvature
    for rate in getattr(experiment.study, "constant_rates", []):
        if rate >= 2 / smoothness:
            raise ConfigError(
                f"study.constant_rates has {rate}, L of bed={experiment.bed.name} is "
                f"{smoothness:.4g}: use rates below {2 / smoothness:.4g}"
            )
    if experiment.study.decaying_rate <= least:
        raise ConfigError(
            f"study.decaying_rate={experiment.study.decaying_rate} on bed={experiment.bed.name}: "
            f"use more than {least:.4g}, so that 2 mu c > 1"
        )


def check_limit_rates(experiment: Experiment) -> None:
    """Check rates for theorems on the limit, where the curvature at the maximisers counts."""
    bed = build_testbed(experiment.bed)
    check_rates(experiment, bed, bed.least_curvature)


def simulated(
    schema: type[SimulatedConfig],
    statement: str,
    plan: Plan,
    judge: Judge,
    check: Callable[[Experiment], None] = check_limit_rates,
) -> Theorem:
    """Return the record of a theorem that `judge` studies by the runs of `plan`.

    Args:
        schema, statement, check: see `Theorem`.
        plan: the simulations of a study's configuration, the instance of `schema`.
        judge: the evidence of their trajectories, which come in the order of the plan; the frame
            adds the facts of the test problem and the number of completions.
    """

    def study(experiment: Experiment) -> Evidence:
        bed = build_testbed(experiment.bed)
        return run_and_judge(
            plan, judge, bed, experiment.study, experiment.seed, experiment.workers
        )

    def completions(experiment: Experiment) -> int:
        of_a_replicate = sum(simulation.work for simulation in plan(experiment.study))
        return experiment.study.replicates * of_a_replicate

    return Theorem(schema, statement, study, check, completions)


def run_and_judge(
    plan: Plan, judge: Judge, bed: Testbed, design: SimulatedConfig, seed: int, workers: int
) -> Evidence:
    """Run the planned simulations on a test problem, and judge them; see `simulated`."""
    runs, rollouts = run_simulations(plan(design), bed, design.replicates, seed, workers)
    evidence = judge(bed, design, runs)
    return replace(evidence, bed={**bed_facts(bed), **evidence.bed}, rollouts=rollouts)
