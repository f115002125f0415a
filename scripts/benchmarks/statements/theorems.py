"""Verdicts of shortened theorem tests: false alarms, and detections of planted errors.

Each test is run with many seeds. In unchanged tests, the verdict "disagrees" is a false alarm. For
a tenth of the seeds, the test is also run with an error planted in its prediction; the verdict
"disagrees" then detects the error. The predictions of Lemma 11 and Theorem 12 are enumerated, so
each of these tests is run only once. Each claim that disagrees gets a separate row.

The predictions are limits for large T. At 400 steps the mean scaled gap of `theorem8` is still 1 to
3 % above its limit, so the shortened test uses few replicates of many steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from counting import Asked, Cell, Kind

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.gap.evidence import theorem

SHORT = {
    "lemma6": ["theorem=lemma6", "theorem.replicates=300", "theorem.steps=60",
               "theorem.constant_rates=[0.05,0.2]"],
    "theorem7": ["theorem=theorem7", "theorem.replicates=300", "theorem.steps=[40,100]",
                 "theorem.rollouts=[16]"],
    "theorem7_total": ["theorem=theorem7_total", "theorem.replicates=300", "theorem.totals=[1600]",
                       "theorem.steps=[50,100]"],
    "theorem8": ["theorem=theorem8", "theorem.replicates=100", "theorem.steps=[400,1600]"],
    "theorem8_mixture": ["theorem=theorem8_mixture", "theorem.replicates=200",
                         "theorem.steps=[100,400]"],
    "corollaries9_10": ["theorem=corollaries9_10", "theorem.replicates=600", "theorem.steps=60"],
    "proposition13": ["theorem=proposition13", "theorem.replicates=200", "theorem.steps=120"],
}  # fmt: skip
ONCE = {"lemma11": ["theorem=lemma11"], "theorem12": ["theorem=theorem12"]}


def times(factor: float) -> Callable[[Callable], Callable]:
    """Return a change that multiplies a prediction by a factor."""
    return lambda real: lambda *arguments: factor * real(*arguments)


def largest_size(real: Callable) -> Callable:
    """Replace every theory's prediction by the largest group size."""
    return lambda problem, point, sizes: dict.fromkeys(real(problem, point, sizes), max(sizes))


def other_group(real: Callable) -> Callable:
    """Replace the predicted field by the field at four times the group size."""
    return lambda value, group_size, epsilon: real(value, 4 * group_size, epsilon)


def one_optimum(real: Callable) -> Callable:
    """Replace every replicate's limit by the maximiser nearest to 0."""
    return lambda problem, estimator, rate, u_KR: real(problem, estimator, rate, 0 * u_KR)


PLANTED: dict[str, dict[str, tuple[str, Callable]]] = {
    "lemma6": {"bound x 0.5": ("lemma6.recursion", times(0.5)),
               "noise x 0.7": ("lemma6.noise_everywhere", times(0.7)),
               "noise x 0.9": ("lemma6.noise_everywhere", times(0.9))},
    "theorem7": {"G* is the largest G": ("theorem7.predicted_sizes", largest_size)},
    "theorem7_total": {"G* is the largest G": ("theorem7.predicted_sizes", largest_size)},
    "theorem8": {"weights x 0.6": ("theorem8.limit_weights", times(0.6)),
                 "weights x 0.8": ("theorem8.limit_weights", times(0.8))},
    "theorem8_mixture": {"weights x 0.6": ("theorem8.limit_weights", times(0.6)),
                         "one limit for all": ("theorem8.limit_weights_at", one_optimum)},
    "corollaries9_10": {"weights x 0.5": ("corollaries9_10.limit_weights", times(0.5))},
    "proposition13": {"the field of 4 G": ("proposition13.mean_weight", other_group)},
}  # fmt: skip


@contextmanager
def planted(name: str, error: Callable[[Callable], Callable]) -> Iterator[None]:
    """Replace a prediction in a module of `grpo_ustat.gap` by a wrong one within the block."""
    module_name, attribute = name.split(".")
    module = importlib.import_module(f"grpo_ustat.gap.{module_name}")
    real = getattr(module, attribute)
    setattr(module, attribute, error(real))
    try:
        yield
    finally:
        setattr(module, attribute, real)


def verdicts(words: list[str], seeds: range, wrong: bool) -> Iterator[dict[str, bool | float]]:
    """Yield each seed's verdict and the claims that disagree.

    Args:
        words: overrides of the configuration.
        seeds: seeds of the runs.
        wrong: True if the verdict "disagrees" is wrong.
    """
    config = compose_config("gap", [*words, "launch.workers=1"])
    for seed in seeds:
        evidence = theorem(config.theorem.kind).run(replace(config, seed=seed).experiment)
        disagree = [claim.what for claim in evidence.claims if claim.verdict == "disagrees"]
        statements: dict[str, bool | float] = dict.fromkeys(disagree, wrong)
        if evidence.verdict == "disagrees":
            statements["disagrees"] = wrong
        yield statements | {"not decided": float(evidence.verdict == "not decided")}


def theorems(name: str, asked: Asked) -> Iterator[Cell]:
    """Judge verdicts of theorem tests: false disagreements, and detected planted errors."""
    if name in ONCE:
        studies = verdicts(ONCE[name], range(1), True)
        yield Cell({"case": "as it is, enumerated"}, studies, statements=("disagrees",))
        return
    studies = verdicts(SHORT[name], range(asked.studies), True)
    yield Cell({"case": "as it is"}, studies, statements=("disagrees",))
    few = range(max(1, asked.studies // 10))
    for case, (place, error) in PLANTED[name].items():
        with planted(place, error):
            studies = verdicts(SHORT[name], few, False)
            yield Cell({"case": case}, studies, statements=("disagrees",))


KINDS = {"theorems": Kind(theorems, [*SHORT, *ONCE])}
