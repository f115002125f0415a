r"""Whether the group size that estimates the gradient best also trains best.

At a fixed number n of rollouts a step the error of the gradient is

    n MSE(G) = G C1 + C2 + C3/(G-1) = C1 ( G + (G*-1)^2/(G-1) ) + C2      G* = 1 + sqrt(C3/C1)

and the paper bounds the sub-optimality gap by it, whatever n (section 6 of the theory, Lemma 6 and
Theorem 7). Here C1, C2, C3 of the policy that training starts from are held against held-out
accuracy, or mean reward, of training runs that differ in G, n and seed alone.

What counts was fixed before any of the compared runs: the mean of a run's evaluations after step 0,
which carries less noise of evaluation than the last one alone; that is reported beside it. A G is
significantly different from the best where the simultaneous 95 % interval of their difference,
paired on seeds, lies below 0 (see `reports.accuracy.accuracy_cells`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy import stats

from grpo_ustat.config.gap import BestGroupSizeConfig, Experiment
from grpo_ustat.estimators.intervals import LEVEL, Interval
from grpo_ustat.gap.claims import AGREES, DISAGREES, OPEN, Claim, comma_list, verdict_of
from grpo_ustat.gap.evidence import Evidence, Panel, PlotLine, Theorem, draws_nothing
from grpo_ustat.gap.trained_runs import (
    RunGrid,
    StartLaw,
    check_same_start,
    run_names,
    start_law,
    trained_runs,
)
from grpo_ustat.records import joint_quantity
from grpo_ustat.report.accuracy import AccuracyCell, accuracy_cells
from grpo_ustat.rollout.draws import generator
from grpo_ustat.runs.record import RunRecord

MEAN, LAST = "mean of the evaluations", "last evaluation"  # the first counts
RESAMPLES = 4000
STATEMENT = (
    "At a fixed number n of rollouts a step the gradient's error is smallest at "
    "G* = 1 + sqrt(C3/C1), for every n; the bounds on training depend on G through that error "
    "alone."
)


def mean_evaluation(run: RunRecord) -> float:
    """Mean of a run's evaluations after step 0."""
    return float(np.mean([row["mean_reward"] for row in run.evals if row["step"] > 0]))


def last_evaluation(run: RunRecord) -> float:
    """A run's last evaluation."""
    return float(run.evals[-1]["mean_reward"])


OUTCOMES = {MEAN: mean_evaluation, LAST: last_evaluation}


@dataclass(frozen=True)
class BudgetResult:
    """How every G trained at one n.

    Attributes:
        rollouts: n.
        seeds: on which every G was trained.
        cells: of each outcome, a cell for each G, ascending.
        mean_SG: what counts, of each seed and G.
    """

    rollouts: int
    seeds: list[int]
    cells: dict[str, list[AccuracyCell]]
    mean_SG: np.ndarray

    @property
    def quantity(self) -> str:
        """What the cells are means of, an accuracy or a mean reward."""
        return joint_quantity(cell["quantity"] for cell in self.cells[MEAN])

    @property
    def sizes(self) -> list[int]:
        """Every G, ascending."""
        return [cell["group_size"] for cell in self.cells[MEAN]]

    def best(self, outcome: str = MEAN) -> int:
        """The G of the largest mean."""
        return next(cell["group_size"] for cell in self.cells[outcome] if cell["best"])

    def indistinct(self, outcome: str = MEAN) -> list[int]:
        """The best G and those that are not significantly different from it."""
        return [cell["group_size"] for cell in self.cells[outcome] if not cell["distinct"]]

    def distinct(self, outcome: str = MEAN) -> list[int]:
        """Those that are significantly different from the best."""
        return [cell["group_size"] for cell in self.cells[outcome] if cell["distinct"]]

    def p_values(self, outcome: str = MEAN) -> dict[int, float]:
        """The p-value that each G is the best one: of its difference from the best mean, two-sided
        paired t, Bonferroni over the differences. At most 5 % where it differs significantly from
        the best.
        """
        cells, dof = self.cells[outcome], len(self.seeds) - 1
        others = max(len(cells) - 1, 1)
        critical = stats.t.ppf(1 - (1 - LEVEL) / others / 2, dof)
        p_values = {}
        for cell in cells:
            p_value = 1.0
            if not cell["best"]:
                error = (cell["difference"] - cell["difference_low"]) / critical
                p_value = min(1.0, 2 * others * float(stats.t.sf(-cell["difference"] / error, dof)))
            p_values[cell["group_size"]] = p_value
        return p_values

    def verdict(self, predicted: int, outcome: str = MEAN) -> str:
        """Whether a predicted G trains best: not decided where no G is significantly
        different from the best.
        """
        distinct = self.distinct(outcome)
        return verdict_of(predicted not in distinct if distinct else None)


def budget_result(runs: RunGrid, rollouts: int) -> BudgetResult:
    """Compare every G at one n, by both outcomes.

    Raises:
        ConfigError: fewer than three seeds have every G.
    """
    seeds, rows = runs.seeds(rollouts), []
    for seed in seeds:
        for size in runs.sizes:
            run = runs.runs[rollouts, size, seed]
            row = {"series": "", "rollouts": rollouts, "group_size": size, "seed": seed}
            row |= {key: run.evals[-1][key] for key in ("quantity", "low", "high", "n")}
            for outcome, value_of in OUTCOMES.items():  # in place of the step of accuracy_cells
                rows.append(row | {"step": outcome, "mean_reward": value_of(run)})
    cells = accuracy_cells(rows)
    by_outcome = {name: [cell for cell in cells if cell["step"] == name] for name in OUTCOMES}
    mean_SG = [
        [mean_evaluation(runs.runs[rollouts, size, seed]) for size in runs.sizes] for seed in seeds
    ]
    return BudgetResult(rollouts, seeds, by_outcome, np.array(mean_SG))


def best_group_size(trained: Sequence[str], measured: Sequence[str]) -> Evidence:
    """Training at several G, n and seeds beside the G* of the policy that it starts from.

    Args:
        trained: patterns of run folders of `train`, or of folders that they are in.
        measured: the same of one study of `mse`, of the policy before training.

    Raises:
        ConfigError: no finished run of either kind, fewer than three seeds with every G at some n,
            runs of several series, or a study of another policy.
    """
    start, runs = start_law(measured), trained_runs(trained)
    check_same_start(runs, start)
    budgets = [budget_result(runs, rollouts) for rollouts in runs.budgets]
    claims = [_best_claim(budget, start) for budget in budgets]
    claims += [_same_claim(budgets)] if len(budgets) > 1 else []
    claims += [_order_claim(budget, start) for budget in budgets]
    keys = ("group_size", "seeds", "quantity", "mean_reward", "low", "high", "best", "difference")
    keys += ("difference_low", "difference_high", "distinct")
    rows = []  # one for every n, outcome and G
    for budget in budgets:
        least = min(start.error_at(size) for size in budget.sizes)
        for name, cells in budget.cells.items():
            for cell in cells:
                error = start.error_at(cell["group_size"])
                row = {"n": budget.rollouts, "outcome": name} | {key: cell[key] for key in keys}
                row |= {"predicted_n_mse": error, "predicted_error_ratio": error / least}
                rows.append(row)
    config, result = runs.any.config, start.result
    return Evidence(
        bed={
            "policy": start.run.policy,
            "dataset": config["dataset"]["name"],
            f"{result['policy']['quantity']}, study questions": result["policy"]["mean_reward"],
            f"held-out {runs.quantity} at step 0": runs.start_mean,
            "C1": start.law.c1,
            "C2": start.law.c2,
            "C3": start.law.c3,
            "G*": start.gstar.estimate,
            "G* low": start.gstar.low,
            "G* high": start.gstar.high,
            "questions": float(result["questions"]),
            "optimizer": config["optimizer"]["name"],
            "learning rate": config["learning_rate"],
            "steps": float(runs.any.evals[-1]["step"]),
        },
        claims=claims,
        panels=_panels(budgets, start),
        rows=rows,
        answer=_answer(budgets, start),
        notes=_notes(runs, budgets, start),
        rollouts=int(runs.rollouts + result["cost"]["rollouts"]),
    )


def nearest(gstar: float, sizes: Sequence[int]) -> int:
    """The G of least predicted error among some, which depends on G* alone.

    >>> nearest(8.9, [2, 4, 8, 16]), nearest(2.5, [2, 4, 8]), nearest(11.0, [8, 16])
    (8, 2, 8)
    """
    return min(sizes, key=lambda size: size + (gstar - 1) ** 2 / (size - 1))


def rank_correlation(mean_SG: np.ndarray, error_G: np.ndarray, level: float = 0.95) -> Interval:
    """Spearman correlation over G of the seeds' mean evaluation with minus the predicted error.

    The interval is the percentile bootstrap's over seeds, whole rows of G drawn again. Noise in the
    means weakens a rank correlation, so the interval leans towards 0.

    Args:
        mean_SG: mean evaluation of each seed and group size.
        error_G: predicted error of each group size.
        level: coverage.

    >>> mean_SG = np.array([[0.3, 0.5, 0.4]] * 3)
    >>> [round(float(x), 3) for x in rank_correlation(mean_SG, np.array([2.0, 1.0, 3.0]))]
    [0.5, 0.5, 0.5]
    """
    count = len(mean_SG)
    resample_RS = generator(0, "best_group_size", count).integers(count, size=(RESAMPLES, count))
    mean_RG = np.concatenate([mean_SG.mean(axis=0)[None], mean_SG[resample_RS].mean(axis=1)])
    rank_RG = _centred_ranks(mean_RG)
    expected_G = _centred_ranks(-np.asarray(error_G, dtype=float)[None])[0]
    norm_R = np.linalg.norm(rank_RG, axis=1) * np.linalg.norm(expected_G)
    zero_R = np.zeros(len(rank_RG))
    correlation_R = np.divide(rank_RG @ expected_G, norm_R, out=zero_R, where=norm_R > 0)
    low, high = np.quantile(correlation_R[1:], [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(correlation_R[0]), float(low), float(high))


def sign_flip_p_value(values_S: np.ndarray) -> float:
    """The p-value that values, symmetric about their mean, have a mean of 0 or more; never below
    2^-S.

    Of all signs of S values, up to 12, the share whose mean is as small; of more, of RESAMPLES
    random signs. A t test is too sure of few correlations that are all alike.

    >>> sign_flip_p_value(np.array([-1.0, -1.0, -1.0])), sign_flip_p_value(np.array([-1.0, 1.0]))
    (0.125, 0.75)
    """
    count = len(values_S)
    if count <= 12:
        signs_MS = np.array(list(product((1, -1), repeat=count)))
    else:
        flips_MS = generator(0, "sign flips", count).choice([-1, 1], size=(RESAMPLES, count))
        signs_MS = np.concatenate([np.ones((1, count)), flips_MS])
    return float((signs_MS @ values_S <= values_S.sum() + 1e-9).mean())


def _centred_ranks(values_RG: np.ndarray) -> np.ndarray:
    """Ranks less their mean; equal values share theirs."""
    ranks_RG = stats.rankdata(values_RG.round(12), axis=1)
    return ranks_RG - ranks_RG.mean(axis=1, keepdims=True)


def _best_claim(budget: BudgetResult, start: StartLaw) -> Claim:
    """The predicted G is the best one or is not significantly different from it."""
    predicted, indistinct = nearest(start.gstar.estimate, budget.sizes), budget.indistinct()
    return Claim(
        what=f"the G of {comma_list(budget.sizes)} that trains best at n = {budget.rollouts}",
        predicted=float(predicted),
        measured=float(budget.best()),
        low=float(min(indistinct)),
        high=float(max(indistinct)),
        verdict=AGREES if budget.verdict(predicted) == AGREES else OPEN,
        p_value=budget.p_values()[predicted],
        when_rejected=DISAGREES,
        severity=f"{len(indistinct)} of {len(budget.sizes)} group sizes would have agreed: "
        f"{comma_list(indistinct)}",
        how=f"held-out {budget.quantity}, {MEAN} after step 0, {len(budget.seeds)} seeds; "
        f"not significantly different from the best: G = {comma_list(indistinct)}; paired t "
        f"intervals of the differences, 95 % simultaneous (Bonferroni over "
        f"{len(budget.sizes) - 1}); the predicted G is the trained one of least predicted error, "
        f"of G* = {start.gstar_text}",
    )


def _same_claim(budgets: Sequence[BudgetResult]) -> Claim:
    """Whether one G can be the best at every n."""
    first, last = budgets[0], budgets[-1]
    common = set.intersection(*(set(budget.indistinct()) for budget in budgets))
    decisive = all(budget.distinct() for budget in budgets)
    sizes = [size for size in first.sizes if all(size in budget.sizes for budget in budgets)]
    p_values = {size: [budget.p_values()[size] for budget in budgets] for size in sizes}
    return Claim(
        what=f"G that trains best at n = {last.rollouts} over that at n = {first.rollouts}",
        predicted=1.0,
        measured=last.best() / first.best(),
        low=min(last.indistinct()) / max(first.indistinct()),
        high=max(last.indistinct()) / min(first.indistinct()),
        verdict=AGREES if common and decisive else OPEN,
        how="agrees where one G is not significantly different from the best at any n, and "
        "others are at every n; shared: "
        f"G = {comma_list(sorted(common)) or 'none'}; the p-value is the largest of all G, "
        "Bonferroni over n",
        p_value=max(min(1.0, len(budgets) * min(p_of_n)) for p_of_n in p_values.values()),
        when_rejected=DISAGREES,
        severity=f"{len(common)} of {len(sizes)} group sizes may be best at every n",
    )


def _order_claim(budget: BudgetResult, start: StartLaw) -> Claim:
    """A G of less predicted error trains better."""
    error_G = np.array([start.error_at(size) for size in budget.sizes])
    correlation = rank_correlation(budget.mean_SG, error_G)
    correlation_S = [rank_correlation(seed_G[None], error_G).estimate for seed_G in budget.mean_SG]
    return Claim(
        what=f"rank correlation over G of less error with more {budget.quantity}, "
        f"n = {budget.rollouts}",
        predicted="> 0",
        measured=correlation.estimate,
        low=correlation.low,
        high=correlation.high,
        verdict=AGREES if correlation.low > 0 else OPEN,
        p_value=sign_flip_p_value(np.array(correlation_S)),
        when_rejected=DISAGREES,
        how=f"Spearman, {len(budget.sizes)} G; 95 % percentile bootstrap over {len(budget.seeds)} "
        f"seeds, {RESAMPLES} resamples; the p-value is the sign-flip test's of the "
        "seeds' own correlations, one-sided",
    )


def _panels(budgets: Sequence[BudgetResult], start: StartLaw) -> list[Panel]:
    curves = []
    for budget in budgets:
        means, low, high = (
            [cell[key] for cell in budget.cells[MEAN]] for key in ("mean_reward", "low", "high")
        )
        curves.append(PlotLine(f"n = {budget.rollouts}", budget.sizes, means, low, high))
    sizes, points = budgets[0].sizes, start.result["scaling"]["curve"]
    inside = [point for point in points if sizes[0] <= point["group_size"] <= sizes[-1]]
    x, error, low, high = (
        [point[key] for point in inside] for key in ("group_size", "n_mse", "low", "high")
    )
    predicted = PlotLine("predicted", x, error, low, high, predicted=True)
    return [
        Panel("Training", "group size G", f"held-out {budgets[0].quantity}, {MEAN}", curves, "x"),
        Panel("Predicted", "group size G", "n x MSE", [predicted], "xy"),
    ]


def _compared_sizes(budget: BudgetResult, outcome: str = MEAN) -> str:
    """The G that trained best, and which others are significantly different from it."""
    alike = [size for size in budget.indistinct(outcome) if size != budget.best(outcome)]
    return (
        f"the best is G = {budget.best(outcome)}; not significantly different from it: "
        f"{comma_list(alike) or 'no other G'}; significantly different: "
        f"{comma_list(budget.distinct(outcome)) or 'no G'}"
    )


def _answer(budgets: Sequence[BudgetResult], start: StartLaw) -> str:
    predicted = nearest(start.gstar.estimate, budgets[0].sizes)
    words = {
        AGREES: "is not significantly different from the best",
        DISAGREES: "is significantly different from the best",
        OPEN: "cannot be judged, because no G is significantly different from the best",
    }
    sentences = [
        f"at n = {budget.rollouts} it {words[budget.verdict(predicted)]} "
        f"({_compared_sizes(budget)})"
        for budget in budgets
    ]
    return f"G* = {start.gstar_text} predicts G = {predicted}: {'; '.join(sentences)}."


def _notes(runs: RunGrid, budgets: Sequence[BudgetResult], start: StartLaw) -> list[str]:
    config, sizes, before = runs.any.config, budgets[0].sizes, runs.start_mean
    decoding, optimizer = config["eval"]["decoding"][0], config["optimizer"]["name"]
    predicted = nearest(start.gstar.estimate, sizes)
    ends = sorted({nearest(end, sizes) for end in start.gstar})
    prompts = ", ".join(
        f"{budget.rollouts // budget.sizes[0]} to {budget.rollouts // budget.sizes[-1]} "
        f"at n = {budget.rollouts}"
        for budget in budgets
    )
    lower = {
        budget.rollouts: [c["group_size"] for c in budget.cells[MEAN] if c["mean_reward"] < before]
        for budget in budgets
    }
    below = "; ".join(
        f"at n = {n} with {f'G = {comma_list(g)}' if g else 'no G'}" for n, g in lower.items()
    )
    notes = [
        f"{runs.quantity.capitalize()} is of {decoding} completions on "
        f"{runs.any.evals[-1]['n']} test questions, intervals over seeds, "
        "conditional on these questions; C1, C2, C3 are of the study questions, intervals "
        f"{start.over}; training draws from the train questions.",
        f"Over the interval of G* the predicted G of {comma_list(sizes)} is {comma_list(ends)}.",
        "C1, C2, C3 are those of the policy before training, and change with it. The theorem on "
        "the gap is about a policy near a maximiser with learning rates c/t; here it is the "
        "beginning of training at one constant learning rate, the same for all G and n.",
        f"A step has n / G prompts: {prompts}; they are drawn without replacement, which "
        "shifts the error of all G alike.",
        *(
            f"By the {LAST} alone, n = {budget.rollouts}: {_compared_sizes(budget, LAST)}; the "
            f"prediction: {budget.verdict(predicted, LAST)}."
            for budget in budgets
        ),
        f"Held-out {runs.quantity} was {before:.3f} before training; the mean after step 0 is "
        f"below it {below}.",
    ]
    if optimizer != "sgd":
        notes.append(
            f"The theory is of theta + eta g; {optimizer} scales each coordinate by its noise."
        )
    if runs.missing:
        names = run_names(runs.missing)
        notes.append(f"Missing, their seeds left out at that n: {names} (each as n, G, seed).")
    return notes + runs.notes


def study(experiment: Experiment) -> Evidence:
    """`best_group_size` of the folders that a configuration names."""
    return best_group_size(experiment.study.trained, experiment.study.measured)


def check(experiment: Experiment) -> None:
    """Refuse folders that hold no comparable runs, see `best_group_size`."""
    law = start_law(experiment.study.measured)
    check_same_start(trained_runs(experiment.study.trained), law)


THEOREM = Theorem(BestGroupSizeConfig, STATEMENT, study, check, draws_nothing)
