r"""Whether the group size that estimates the gradient best also trains best.

At a fixed number n of rollouts a step the error of the gradient is

    n MSE(G) = G C1 + C2 + C3/(G-1) = C1 ( G + (G*-1)^2/(G-1) ) + C2      G* = 1 + sqrt(C3/C1)

and the paper bounds the sub-optimality gap by it, whatever n (section 6 of the theory, Lemma 6 and
Theorem 7). Here C1, C2, C3 of the policy that training starts from are held against held-out
accuracy of training runs that differ in G, n and seed alone.

What counts was fixed before any of the compared runs: the mean of a run's evaluations after step 0,
which carries less noise of evaluation than the last one alone; that is reported beside it. A G is
told from the best where the simultaneous 95 % interval of their difference, paired on seeds, lies
below 0 (see `reports.accuracy.accuracy_cells`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.reports.accuracy import Cell, accuracy_cells
from grpo_ustat.reports.found import Run
from grpo_ustat.rollout.draws import generator
from grpo_ustat.theorems.finding import AGREES, DISAGREES, OPEN, Claim, Curve, Finding, Panel
from grpo_ustat.theorems.finding import decided as verdict_of
from grpo_ustat.theorems.trained_runs import (
    Measured,
    Trained,
    check_same_start,
    measured_policy,
    named,
    trained_runs,
)

MEAN, LAST = "mean of the evaluations", "last evaluation"  # the first counts
RESAMPLES = 4000
STATEMENT = (
    "At a fixed number n of rollouts a step the gradient's error is smallest at "
    "G* = 1 + sqrt(C3/C1), whatever n; the bounds on training depend on G through that error alone."
)


@dataclass(frozen=True)
class Budget:
    """What training found at one n.

    Attributes:
        rollouts: n.
        seeds: on which every G was trained.
        cells: of each outcome, a cell for each G, ascending.
        accuracy_SG: what counts, of each seed and G.
    """

    rollouts: int
    seeds: list[int]
    cells: dict[str, list[Cell]]
    accuracy_SG: np.ndarray

    @property
    def sizes(self) -> list[int]:
        """Every G, ascending."""
        return [cell["group_size"] for cell in self.cells[MEAN]]

    def best(self, outcome: str = MEAN) -> int:
        """The G of the largest mean."""
        return next(cell["group_size"] for cell in self.cells[outcome] if cell["best"])

    def alike(self, outcome: str = MEAN) -> list[int]:
        """The best G and those that are not told from it."""
        return [cell["group_size"] for cell in self.cells[outcome] if not cell["distinct"]]

    def told(self, outcome: str = MEAN) -> list[int]:
        """Those that are told from the best."""
        return [cell["group_size"] for cell in self.cells[outcome] if cell["distinct"]]

    def verdict(self, predicted: int, outcome: str = MEAN) -> str:
        """Whether a predicted G trains best: not decided where no G is told from the best."""
        told = self.told(outcome)
        return verdict_of(predicted not in told if told else None)


def best_group_size(trained: Sequence[str], measured: Sequence[str]) -> Finding:
    """Training at several G, n and seeds beside the G* of the policy that it starts from.

    Args:
        trained: patterns of run folders of `train`, or of folders that they are in.
        measured: the same of one study of `mse`, of the policy before training.

    Raises:
        ConfigError: no finished run of either kind, fewer than three seeds with every G at some n,
            runs of several series, or a study of another policy.
    """
    study, runs = measured_policy(measured), trained_runs(trained)
    check_same_start(runs, study)
    budgets = [_budget(runs, rollouts) for rollouts in runs.budgets]
    claims = [_best_claim(budget, study) for budget in budgets]
    claims += [_same_claim(budgets)] if len(budgets) > 1 else []
    claims += [_order_claim(budget, study) for budget in budgets]
    return Finding(
        statement=STATEMENT,
        bed=_bed(runs, study),
        claims=claims,
        panels=_panels(budgets, study),
        rows=[row for budget in budgets for row in _rows(budget, study)],
        answer=_answer(budgets, study),
        notes=_notes(runs, budgets, study),
        rollouts=_rollouts(runs, study),
    )


def nearest(gstar: float, sizes: Sequence[int]) -> int:
    """The G of least predicted error among some, which depends on G* alone.

    >>> nearest(8.9, [2, 4, 8, 16]), nearest(2.5, [2, 4, 8]), nearest(11.0, [8, 16])
    (8, 2, 8)
    """
    return min(sizes, key=lambda size: size + (gstar - 1) ** 2 / (size - 1))


def error_at(study: Measured, size: int) -> float:
    """Predicted n MSE(G)."""
    return study.law.mse(num_prompts=1, group_size=size) * size


def rank_correlation(accuracy_SG: np.ndarray, error_G: np.ndarray, level: float = 0.95) -> Interval:
    """Spearman correlation over G of the seeds' mean accuracy with minus the predicted error.

    The interval is the percentile bootstrap's over seeds, whole rows of G drawn again. Noise in the
    means weakens a rank correlation, so the interval leans towards 0.

    Args:
        accuracy_SG: accuracy of each seed and group size.
        error_G: predicted error of each group size.
        level: coverage.

    >>> accuracy_SG = np.array([[0.3, 0.5, 0.4]] * 3)
    >>> [round(float(x), 3) for x in rank_correlation(accuracy_SG, np.array([2.0, 1.0, 3.0]))]
    [0.5, 0.5, 0.5]
    """
    count = len(accuracy_SG)
    drawn_RS = generator(0, "best_group_size", count).integers(count, size=(RESAMPLES, count))
    mean_RG = np.concatenate([accuracy_SG.mean(axis=0)[None], accuracy_SG[drawn_RS].mean(axis=1)])
    mine_RG, its_G = _centred(mean_RG), _centred(-np.asarray(error_G, dtype=float)[None])[0]
    length_R = np.linalg.norm(mine_RG, axis=1) * np.linalg.norm(its_G)
    found_R = np.divide(mine_RG @ its_G, length_R, out=np.zeros(len(mine_RG)), where=length_R > 0)
    low, high = np.quantile(found_R[1:], [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(found_R[0]), float(low), float(high))


def _centred(values_RG: np.ndarray) -> np.ndarray:
    """Ranks less their mean; equal values share theirs."""
    ranks_RG = rankdata(values_RG.round(12), axis=1)
    return ranks_RG - ranks_RG.mean(axis=1, keepdims=True)


def _budget(runs: Trained, rollouts: int) -> Budget:
    seeds, sizes = runs.seeds(rollouts), runs.sizes
    found = {(size, seed): runs.runs[rollouts, size, seed] for seed in seeds for size in sizes}
    rows = [_row(*key, run, rollouts, outcome) for key, run in found.items() for outcome in MADE]
    cells = accuracy_cells(rows)
    by_outcome = {name: [cell for cell in cells if cell["step"] == name] for name in MADE}
    accuracy_SG = [[MADE[MEAN](found[size, seed]) for size in sizes] for seed in seeds]
    return Budget(rollouts, seeds, by_outcome, np.array(accuracy_SG))


def _mean(run: Run) -> float:
    return float(np.mean([row["accuracy"] for row in run.evals if row["step"] > 0]))


def _last(run: Run) -> float:
    return float(run.evals[-1]["accuracy"])


MADE = {MEAN: _mean, LAST: _last}


def _row(size: int, seed: int, run: Run, rollouts: int, outcome: str) -> dict:
    """As `accuracy_cells` takes it, the outcome in place of a step."""
    last = {key: run.evals[-1][key] for key in ("low", "high", "n")}
    of = {"series": "", "rollouts": rollouts, "step": outcome, "group_size": size, "seed": seed}
    return of | last | {"accuracy": MADE[outcome](run)}


def _best_claim(budget: Budget, study: Measured) -> Claim:
    predicted, alike = nearest(study.gstar.estimate, budget.sizes), budget.alike()
    return Claim(
        what=f"the G of {_listed(budget.sizes)} that trains best at n = {budget.rollouts}",
        predicted=float(predicted),
        measured=float(budget.best()),
        low=float(min(alike)),
        high=float(max(alike)),
        verdict=budget.verdict(predicted),
        how=f"held-out accuracy, {MEAN} after step 0, {len(budget.seeds)} seeds; not told from the "
        f"best: G = {_listed(alike)}; paired t intervals of the differences, 95 % simultaneous "
        f"(Bonferroni over {len(budget.sizes) - 1}); the predicted G is the trained one of least "
        f"predicted error, of G* = {_interval(study)}",
    )


def _same_claim(budgets: Sequence[Budget]) -> Claim:
    """Whether one G can be the best at every n."""
    first, last = budgets[0], budgets[-1]
    shared = set.intersection(*(set(budget.alike()) for budget in budgets))
    told = all(budget.told() for budget in budgets)
    return Claim(
        what=f"G that trains best at n = {last.rollouts} over that at n = {first.rollouts}",
        predicted=1.0,
        measured=last.best() / first.best(),
        low=min(last.alike()) / max(first.alike()),
        high=max(last.alike()) / min(first.alike()),
        verdict=DISAGREES if not shared else AGREES if told else OPEN,
        how="agrees where one G is told from the best at no n, and others are at every n; shared: "
        f"G = {_listed(sorted(shared)) or 'none'}",
    )


def _order_claim(budget: Budget, study: Measured) -> Claim:
    error_G = np.array([error_at(study, size) for size in budget.sizes])
    found = rank_correlation(budget.accuracy_SG, error_G)
    signs = True if found.low > 0 else False if found.high < 0 else None
    return Claim(
        what=f"rank correlation over G of less error with more accuracy, n = {budget.rollouts}",
        predicted="> 0",
        measured=found.estimate,
        low=found.low,
        high=found.high,
        verdict=verdict_of(signs),
        how=f"Spearman, {len(budget.sizes)} G; 95 % percentile bootstrap over {len(budget.seeds)} "
        f"seeds, {RESAMPLES} resamples",
    )


def _start(runs: Trained) -> float:
    """Held-out accuracy before training, the mean over all runs."""
    return float(np.mean([run.evals[0]["accuracy"] for run in runs.runs.values()]))


def _bed(runs: Trained, study: Measured) -> dict[str, float | str]:
    config, result = runs.any.config, study.run.result
    return {
        "policy": study.run.policy,
        "dataset": config["dataset"]["name"],
        "accuracy, study questions": result["policy"]["accuracy"],
        "held-out accuracy at step 0": _start(runs),
        "C1": study.law.c1,
        "C2": study.law.c2,
        "C3": study.law.c3,
        "G*": study.gstar.estimate,
        "G* low": study.gstar.low,
        "G* high": study.gstar.high,
        "questions": float(result["questions"]),
        "optimizer": config["optimizer"]["name"],
        "learning rate": config["learning_rate"],
        "steps": float(runs.any.evals[-1]["step"]),
    }


def _panels(budgets: Sequence[Budget], study: Measured) -> list[Panel]:
    curves = [
        Curve(
            f"n = {budget.rollouts}",
            budget.sizes,
            *([cell[key] for cell in budget.cells[MEAN]] for key in ("accuracy", "low", "high")),
        )
        for budget in budgets
    ]
    sizes, points = budgets[0].sizes, study.run.result["scaling"]["curve"]
    shown = [point for point in points if sizes[0] <= point["group_size"] <= sizes[-1]]
    law = [[point[key] for point in shown] for key in ("group_size", "n_mse", "low", "high")]
    return [
        Panel("Training", "group size G", f"held-out accuracy, {MEAN}", curves, "x"),
        Panel(
            "Predicted", "group size G", "n x MSE", [Curve("predicted", *law, predicted=True)], "xy"
        ),
    ]


def _rows(budget: Budget, study: Measured) -> list[dict]:
    """A row for every outcome and G, the predicted error beside it."""
    least = min(error_at(study, size) for size in budget.sizes)
    kept = ("group_size", "seeds", "accuracy", "low", "high", "best", "difference")
    kept += ("difference_low", "difference_high", "distinct")
    return [
        {"n": budget.rollouts, "outcome": name}
        | {key: cell[key] for key in kept}
        | {"predicted_n_mse": error_at(study, cell["group_size"])}
        | {"predicted_error_ratio": error_at(study, cell["group_size"]) / least}
        for name, cells in budget.cells.items()
        for cell in cells
    ]


def _answer(budgets: Sequence[Budget], study: Measured) -> str:
    predicted = nearest(study.gstar.estimate, budgets[0].sizes)
    said = {AGREES: "cannot be told from the best", DISAGREES: "is told from the best"}
    found = [
        f"at n = {budget.rollouts} it "
        f"{said.get(budget.verdict(predicted), 'cannot be judged, as no G is told from the best')} "
        f"(best G = {budget.best()}, not told from it {_listed(budget.alike())}, told "
        f"{_listed(budget.told()) or 'none'})"
        for budget in budgets
    ]
    return f"G* = {_interval(study)} predicts G = {predicted}: {'; '.join(found)}."


def _notes(runs: Trained, budgets: Sequence[Budget], study: Measured) -> list[str]:
    config, sizes = runs.any.config, budgets[0].sizes
    decoding = config["eval"]["decoding"][0]
    ends = sorted({nearest(end, sizes) for end in study.gstar})
    notes = [
        f"Accuracy is of {decoding} completions on {runs.any.evals[-1]['n']} test questions, "
        "intervals over seeds given these; C1, C2, C3 are of the study questions, intervals "
        f"{study.over}; training draws from the train questions.",
        f"Over the interval of G* the predicted G of {_listed(sizes)} is {_listed(ends)}.",
        "C1, C2, C3 are those of the policy before training, and change with it; the theorem on "
        "the gap is of a policy near a maximiser with rates c/t, this is the beginning of training "
        "at one constant rate, the same for all G and n.",
        f"A step has n / G prompts: {_prompts(budgets)}; they are drawn without replacement, which "
        "shifts the error of all G alike.",
        *(_by_last(budget, nearest(study.gstar.estimate, sizes)) for budget in budgets),
        f"Held-out accuracy was {_start(runs):.3f} before training; the mean after step 0 is below "
        f"it {_below(runs, budgets)}.",
    ]
    if config["optimizer"]["name"] != "sgd":
        name = config["optimizer"]["name"]
        notes.append(f"The theory is of theta + eta g; {name} scales each coordinate by its noise.")
    if runs.missing:
        notes.append(
            f"Missing, their seeds left out at that n: {named(runs.missing)} (each as n, G, seed)."
        )
    return notes + runs.notes


def _prompts(budgets: Sequence[Budget]) -> str:
    ranges = ((b.rollouts, b.rollouts // b.sizes[0], b.rollouts // b.sizes[-1]) for b in budgets)
    return ", ".join(f"{most} to {least} at n = {n}" for n, most, least in ranges)


def _below(runs: Trained, budgets: Sequence[Budget]) -> str:
    start = _start(runs)
    lost = {
        budget.rollouts: [c["group_size"] for c in budget.cells[MEAN] if c["accuracy"] < start]
        for budget in budgets
    }
    return "; ".join(f"at n = {n} with G = {_listed(found) or 'none'}" for n, found in lost.items())


def _by_last(budget: Budget, predicted: int) -> str:
    return (
        f"By the {LAST} alone, n = {budget.rollouts}: best G = {budget.best(LAST)}, not told from "
        f"it {_listed(budget.alike(LAST))}, told {_listed(budget.told(LAST)) or 'none'}: "
        f"{budget.verdict(predicted, LAST)}."
    )


def _rollouts(runs: Trained, study: Measured) -> int:
    """Of training and of the study, without those of evaluations."""
    trained = sum(run.result["rollouts"] for run in runs.runs.values())
    return int(trained + study.run.result["cost"]["rollouts"])


def _interval(study: Measured) -> str:
    estimate, low, high = study.gstar
    return f"{estimate:.1f} [{low:.1f}, {high:.1f}]"


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
