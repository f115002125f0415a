"""How often studies of theorems disagree where nothing is wrong, and how often they find an error.

Every study is run shortened at many seeds: as it is, where a verdict of `disagrees` is a false one,
and with an error planted in what it predicts, which `disagrees` finds. Lemma 11 and Theorem 12
predict what is enumerated, at no seed but their bed's, and are run once.

    python scripts/benchmarks/false_disagreements.py --seeds 200 --planted 50
    python scripts/benchmarks/false_disagreements.py --only theorem8 theorem8_mixture

Limits are of T: at 400 steps the mean scaled gap of `theorem8` is still 1 to 3 % above its limit,
so the shortened study has few replicates of many steps.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from scipy import stats

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.gap.evidence import theorem

SHORT = {
    "lemma6": ["study=lemma6", "study.replicates=300", "study.steps=60",
               "study.constant_rates=[0.05,0.2]"],
    "theorem7": ["study=theorem7", "study.replicates=300", "study.steps=[40,100]",
                 "study.rollouts=[16]"],
    "theorem7_total": ["study=theorem7_total", "study.replicates=300", "study.totals=[1600]",
                       "study.steps=[50,100]"],
    "theorem8": ["study=theorem8", "study.replicates=100", "study.steps=[400,1600]"],
    "theorem8_mixture": ["study=theorem8_mixture", "study.replicates=200",
                         "study.steps=[100,400]"],
    "corollaries9_10": ["study=corollaries9_10", "study.replicates=600", "study.steps=60"],
    "proposition13": ["study=proposition13", "study.replicates=200", "study.steps=120"],
}  # fmt: skip
ONCE = {"lemma11": ["study=lemma11"], "theorem12": ["study=theorem12"]}


def times(factor: float) -> Callable[[Callable], Callable]:
    """A prediction, so many times larger."""
    return lambda real: lambda *arguments: factor * real(*arguments)


def largest_size(real: Callable) -> Callable:
    """Every theory predicts the largest group size."""
    return lambda bed, point, sizes: dict.fromkeys(real(bed, point, sizes), max(sizes))


def other_group(real: Callable) -> Callable:
    """The field of four times the group size."""
    return lambda size, epsilon, value: real(4 * size, epsilon, value)


def one_optimum(real: Callable) -> Callable:
    """Every replicate's limit is the maximiser next to 0."""
    return lambda bed, estimator, rate, u_KR: real(bed, estimator, rate, 0 * u_KR)


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
    "proposition13": {"the field of 4 G": ("proposition13.weight", other_group)},
}  # fmt: skip


@contextmanager
def planted(name: str, error: Callable[[Callable], Callable]) -> Iterator[None]:
    """What a module of `grpo_ustat.gap` predicts by, wrong for a while."""
    module_name, attribute = name.split(".")
    module = importlib.import_module(f"grpo_ustat.gap.{module_name}")
    real = getattr(module, attribute)
    setattr(module, attribute, error(real))
    try:
        yield
    finally:
        setattr(module, attribute, real)


def row(name: str, case: str, words: list[str], seeds: range) -> dict[str, Any]:
    """Verdicts over seeds, and the claims that disagreed, most often first."""
    start, verdicts, claims = time.process_time(), Counter(), Counter()
    config = compose_config("gap", [*words, "launch.workers=1"])
    for seed in seeds:
        evidence = theorem(config.study.kind).study(replace(config, seed=seed).experiment)
        verdicts[evidence.verdict] += 1
        claims.update(claim.what for claim in evidence.claims if claim.verdict == "disagrees")
    rate = stats.binomtest(verdicts["disagrees"], len(seeds)).proportion_ci(method="exact")
    return {
        "study": name, "case": case, "seeds": len(seeds), "claims": len(evidence.claims),
        "disagrees": verdicts["disagrees"], "low": rate.low, "high": rate.high,
        "not decided": verdicts["not decided"], "which": claims.most_common(2),
        "seconds": time.process_time() - start,
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    """A line of the table."""
    share = row["disagrees"] / row["seeds"]
    print(
        f"{row['study']:17} {row['case']:20} {row['disagrees']:4} of {row['seeds']:3} "
        f"= {share:6.1%} [{row['low']:.1%}, {row['high']:.1%}]  not decided "
        f"{row['not decided']:3}  ({row['claims']} claims, {row['seconds']:.0f} s)  "
        + "; ".join(f"{what}: {count}" for what, count in row["which"]),
        flush=True,
    )


def main() -> None:
    """Print the table, a line as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200, help="of each study as it is")
    parser.add_argument("--planted", type=int, default=50, help="seeds with each planted error")
    parser.add_argument("--only", nargs="*", choices=[*SHORT, *ONCE], help="these studies")
    options = parser.parse_args()
    print("study, case, disagrees of seeds with exact 95 % interval (Clopper-Pearson)")
    for name in options.only or [*SHORT, *ONCE]:
        if name in ONCE:
            show(row(name, "as it is, enumerated", ONCE[name], range(1)))
            continue
        if options.seeds:
            show(row(name, "as it is", SHORT[name], range(options.seeds)))
        for case, (place, error) in PLANTED[name].items():
            if options.planted:
                with planted(place, error):
                    show(row(name, case, SHORT[name], range(options.planted)))


if __name__ == "__main__":
    main()
