"""Frequency with which an answer of `mse` is wrong, given that it is printed, by simulation.

Every sentence on the group size and on the noise of a step, for studies of m prompts with N
completions of each, from populations whose constants are enumerated (`populations.py`):

    G                its error is not within the printed tolerance of the least one
    G*               the interval misses it
    costs            an interval of the neighbours' extra errors misses the true one
    worse            a size of 2, 4 ... 64 is said to be worse than the size to take, and is not
    at least         G* is below the printed lower bound
    noise            the interval of n_c(8) misses it
    noise at least   n_c(8) is below the printed lower bound
    share            the interval of the prompts' share of the noise at G = 8 misses it
    change           `advise` says raise or lower, from any of 4 to 64, to a size that is no better
    keep             `advise` keeps a size whose error is 30 % above the least one, or more

A cell has the share of studies that print the sentence, the share of these that are wrong, and the
95 % interval of the latter (Clopper & Pearson 1934). `--needs` compares the numbers of prompts that
an undecided study prints with those at which half and nine in ten of fresh studies decide.

    python scripts/benchmarks/decisions.py --csv docs/examples/decisions.csv
    python scripts/benchmarks/decisions.py --populations "few loud" opposed --studies 2000
    python scripts/benchmarks/decisions.py --needs
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from populations import FITTED, UNSEEN, clopper_pearson

from grpo_ustat.estimators.group_size import USUAL_SIZES
from grpo_ustat.estimators.scaling import LEAST_GSTAR, ScalingLaw
from grpo_ustat.measurements.group_size import NEIGHBOUR_OFFSETS
from grpo_ustat.pages.advice import (
    KEEP,
    LOWER,
    RAISE,
    TOLERABLE_EXTRA_ERROR,
    group_size_advice,
)

POPULATIONS = {**FITTED, **UNSEEN}
CELLS = ((16, 16), (20, 32), (40, 16), (40, 32), (60, 32), (100, 16), (100, 32), (200, 16))
SENTENCES = (
    "G", "G*", "costs", "worse", "at least", "noise", "noise at least", "share",
    "change", "keep",
)  # fmt: skip
SIZE = 8
# Share of a step of 256 rollouts below which "at least so much is noise" is not worth printing.
LEAST_SHARE, STEP = 0.05, 256
IN_USE = (4, 8, 16, 32, 64)


def judged(truth: ScalingLaw, study: ScalingLaw) -> Iterator[tuple[str, bool]]:
    """Each sentence that the study prints, and whether it is wrong."""
    errors = {size: truth.n_mse(size) for size in USUAL_SIZES}
    gstar = truth.best_size()
    size, tolerance = study.decide(USUAL_SIZES)
    interval = study.gstar()
    extra = {other: study.extra_error(other, size) for other in USUAL_SIZES if other <= 64}
    true = {other: errors[other] / errors[size] - 1 for other in USUAL_SIZES}
    if tolerance is not None:
        yield "G", errors[size] / min(errors.values()) - 1 > tolerance
        yield "G*", not interval.low <= gstar <= interval.high
        place = USUAL_SIZES.index(size)
        near = {
            USUAL_SIZES[place + step]
            for step in NEIGHBOUR_OFFSETS
            if 0 <= place + step < len(USUAL_SIZES)
        } & set(extra)
        yield "costs", any(not extra[x].low <= true[x] <= extra[x].high for x in near)
    elif interval.low > LEAST_GSTAR:
        yield "at least", gstar < interval.low
    worse = [other for other, (_, low, _) in extra.items() if low > 0]
    if worse:
        yield "worse", any(true[other] <= 0 for other in worse)
    scale, true_scale = study.noise_scale(SIZE), truth.noise_scale(SIZE).estimate
    if math.isfinite(scale.high):
        yield "noise", not scale.low <= true_scale <= scale.high
    elif scale.low / (scale.low + STEP) > LEAST_SHARE:
        yield "noise at least", true_scale < scale.low
    share = study.prompt_share(SIZE)
    if math.isfinite(share.low):
        yield "share", not share.low <= truth.prompt_share(SIZE).estimate <= share.high
    yield from advised(truth, study)


def advised(truth: ScalingLaw, study: ScalingLaw) -> Iterator[tuple[str, bool]]:
    """Whether any advice on a size in use is wrong, for steps of 256 rollouts."""
    verdicts = [judged_advice(truth, study, size, STEP) for size in IN_USE]
    for sentence, words in (("change", (RAISE, LOWER)), ("keep", (KEEP,))):
        wrong = [is_wrong for verdict, is_wrong in verdicts if verdict in words]
        if wrong:
            yield sentence, any(wrong)


def judged_advice(
    truth: ScalingLaw, measured: ScalingLaw, size: int, rollouts: int
) -> tuple[str, bool]:
    """The verdict of `advise` on a size in use, and whether it is wrong: "raise" or "lower" to a
    size that is no better, "keep" of one whose error is 30 % above the least one, or more.
    """
    verdict, _, numbers = group_size_advice(measured, measured.gstar(), size, rollouts)
    error = truth.n_mse(size)
    if verdict in (RAISE, LOWER):
        return verdict, truth.n_mse(numbers["best_num_generations"]) >= error
    sizes = (other for other in range(2, rollouts + 1) if rollouts % other == 0)
    least = min(map(truth.n_mse, sizes))
    return verdict, verdict == KEEP and error / least - 1 > TOLERABLE_EXTRA_ERROR


def rows_of(name: str, studies: int) -> list[dict[str, object]]:
    """A row for every size of study and sentence."""
    population = POPULATIONS[name]()
    rows = []
    for prompts, completions in CELLS:
        rng = np.random.default_rng([prompts, completions])
        counts = {sentence: [0, 0] for sentence in SENTENCES}
        for study in population.studies(prompts, completions, studies, rng):
            for sentence, wrong in judged(population.law, study):
                counts[sentence][0] += 1
                counts[sentence][1] += wrong
        for sentence, (printed, wrong) in counts.items():
            low, high = clopper_pearson(wrong, printed)
            rows.append({
                "population": name, "fitted": name in FITTED,
                "gstar": round(population.law.best_size(), 2), "prompts": prompts,
                "completions": completions, "sentence": sentence, "studies": studies,
                "printed": printed, "wrong": wrong,
                "wrong_given_printed": round(wrong / printed, 4) if printed else None,
                "low": round(low, 4) if printed else None,
                "high": round(high, 4) if printed else None,
            })  # fmt: skip
    return rows


def needs_of(name: str, pilots: int) -> str:
    """Rows of the second table: pilots of 16 and 40 prompts of 16 completions."""
    population = POPULATIONS[name]()
    rng = np.random.default_rng(7)

    def decided(count: int, studies: int) -> float:
        every = population.studies(count, 16, studies, rng)
        return float(np.mean([
            study.decide(USUAL_SIZES).tolerance is not None for study in every
        ]))  # fmt: skip

    counts = np.unique(np.geomspace(12, 2000, 22).round()).astype(int)
    shares: list[float] = []
    for count in counts:
        shares.append(decided(int(count), 100))
        if shares[-1] > 0.97:
            break
    rising = np.maximum.accumulate(shares)
    true = [float(np.interp(share, rising, counts[: len(rising)])) for share in (0.5, 0.9)]
    lines = []
    for prompts in (16, 40):
        numbers = []
        for study in population.studies(prompts, 16, pilots, rng):
            if study.decide(USUAL_SIZES).tolerance is None:
                numbers.append(study.prompts_to_decide(USUAL_SIZES))
        if len(numbers) < pilots / 20:
            continue
        half, most = np.median(np.array(numbers), axis=0)
        lines.append(
            f"| {name} | {prompts} x 16 | {len(numbers) / pilots:.2f} | {true[0]:.0f} | "
            f"{half:.0f} | {true[1]:.0f} | {most:.0f} |"
        )
    return "\n".join(lines)


def table(rows: list[Mapping[str, object]]) -> str:
    """The worst cell of each population and sentence among those that print it in 1 % or more."""
    lines = ["| population | " + " | ".join(SENTENCES) + " |", "|---" * (len(SENTENCES) + 1) + "|"]
    for name in dict.fromkeys(str(row["population"]) for row in rows):
        cells = []
        for sentence in SENTENCES:
            of = [
                row for row in rows
                if row["population"] == name and row["sentence"] == sentence
                and row["printed"] >= 0.01 * row["studies"]
            ]  # fmt: skip
            if not of:
                cells.append("-")
                continue
            worst = max(of, key=lambda row: row["wrong_given_printed"])
            cells.append(
                f"{worst['wrong_given_printed']:.3f} [{worst['low']:.3f}, {worst['high']:.3f}]"
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print a table, and write all cells as CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=1000, help="of a cell")
    parser.add_argument("--populations", nargs="+", default=list(POPULATIONS))
    parser.add_argument("--needs", action="store_true")
    parser.add_argument("--pilots", type=int, default=40)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.workers) as pool:
        if options.needs:
            print("| population | pilot | undecided | half | printed | nine in ten | printed |")
            print("|---|---|---|---|---|---|---|")
            names = options.populations
            for lines in pool.map(needs_of, names, [options.pilots] * len(names)):
                print(lines, flush=True)
            return
        rows: list[dict[str, object]] = []
        names = options.populations
        for of_population in pool.map(rows_of, names, [options.studies] * len(names)):
            rows += of_population
            print(table(of_population).splitlines()[-1], flush=True)
    print(table(rows))
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
