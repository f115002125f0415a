r"""Compare the group size with the smallest gradient error and the group size that trains best.

At a fixed number n of rollouts per step, the error of the gradient is

    n MSE(G) = G C1 + C2 + C3/(G-1) = C1 ( G + (G*-1)^2/(G-1) ) + C2      G* = 1 + sqrt(C3/C1)

For every n the error is smallest at G*. In the paper, a smaller error gives a smaller bound on the
sub-optimality gap (section 6 of the theory, Lemma 6 and Theorem 7). So the prediction is that the G
with the smallest error trains best. This module computes the error from C1, C2 and C3 of the
initial policy. It compares the prediction with held-out accuracy or mean reward of training runs
that differ only in G, n and seed.

The outcome of a run is the mean of its evaluations after step 0, which has less evaluation noise
than the last evaluation. This outcome was chosen before any of the compared runs. The last
evaluation is also reported. A group size is significantly worse than the best group size if the
simultaneous 95 % interval of the difference, paired on seeds, lies below 0 (see
`accuracy.accuracy_cells`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
from scipy import stats

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.intervals import CONFIDENCE, Interval
from grpo_ustat.estimators.scaling import ScalingLaw
from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.group_size import SCALING
from grpo_ustat.pages.claims import CLAIM_COLUMNS, claim_cells
from grpo_ustat.pages.tables import Table, enumeration
from grpo_ustat.records import joint_quantity
from grpo_ustat.report.accuracy import AccuracyCell, accuracy_cells
from grpo_ustat.report.rank_correlation import RESAMPLES, rank_correlation, sign_flip_p_value
from grpo_ustat.runs.claims import Claim, comma_list, correct_family, verdict_of, worst_verdict
from grpo_ustat.runs.record import AGREES, DISAGREES, OPEN, RunRecord, distinguishing_keys

# Outcomes of a run; the claims use only the first outcome.
MEAN, LAST = "mean of the evaluations", "last evaluation"
# Minimum number of seeds that were run with every G.
MIN_SEEDS = 3
POLICY_KEYS = ("model.", "dataset.", "prompt.", "temperature", "max_completion_length", "weights")
CELL_KEYS = (
    "group_size", "seeds", "quantity", "mean_reward", "low", "high", "best", "difference",
    "difference_low", "difference_high", "distinct",
)  # fmt: skip


def mean_evaluation(run: RunRecord) -> float:
    """Return the mean of a run's evaluations after step 0."""
    return float(np.mean([row["mean_reward"] for row in run.evals if row["step"] > 0]))


def last_evaluation(run: RunRecord) -> float:
    """Return a run's last evaluation."""
    return float(run.evals[-1]["mean_reward"])


OUTCOMES = {MEAN: mean_evaluation, LAST: last_evaluation}


@dataclass(frozen=True)
class Start:
    """Scaling law of the initial policy."""

    # Study that measured the initial policy.
    run: RunRecord
    law: ScalingLaw
    # G* = 1 + sqrt(C3/C1) and its interval.
    gstar: Interval

    @property
    def gstar_text(self) -> str:
        """G* and its interval as text."""
        estimate, low, high = self.gstar
        return f"{estimate:.1f} [{low:.1f}, {high:.1f}]"

    def error_at(self, size: int) -> float:
        """Return the predicted error, n MSE(G)."""
        return self.law.n_mse(size)

    def nearest(self, sizes: Sequence[int]) -> int:
        """Return the given size with the smallest predicted error."""
        return nearest(self.gstar.estimate, sizes)


@dataclass(frozen=True)
class BudgetResult:
    """Training results for each G at one n."""

    # Number of rollouts per step, n.
    rollouts: int
    # Seeds that were run with every G.
    seeds: list[int]
    # For each outcome, the cells of all G, in ascending order of G.
    cells: dict[str, list[AccuracyCell]]
    # Outcome `MEAN` for each seed and G.
    mean_SG: np.ndarray

    @property
    def quantity(self) -> str:
        """Name of the averaged quantity: accuracy or mean reward."""
        return joint_quantity(cell["quantity"] for cell in self.cells[MEAN])

    @property
    def sizes(self) -> list[int]:
        """Group sizes in ascending order."""
        return [cell["group_size"] for cell in self.cells[MEAN]]

    def best(self, outcome: str = MEAN) -> int:
        """Return the G with the largest mean."""
        return next(cell["group_size"] for cell in self.cells[outcome] if cell["best"])

    def indistinct(self, outcome: str = MEAN) -> list[int]:
        """Return the best G and all other G that are not significantly different from the best."""
        return [cell["group_size"] for cell in self.cells[outcome] if not cell["distinct"]]

    def distinct(self, outcome: str = MEAN) -> list[int]:
        """Return the G that are significantly different from the best."""
        return [cell["group_size"] for cell in self.cells[outcome] if cell["distinct"]]

    def p_values(self, outcome: str = MEAN) -> dict[int, float]:
        """Return, for each G, the p-value of the hypothesis that this G is the best.

        The p-value is from a two-sided paired t test on the difference from the largest mean, with
        a Bonferroni correction over the differences. It is at most 5 % if this G is significantly
        different from the best.
        """
        cells, dof = self.cells[outcome], len(self.seeds) - 1
        others = max(len(cells) - 1, 1)
        critical = stats.t.ppf(1 - (1 - CONFIDENCE) / others / 2, dof)
        p_values = {}
        for cell in cells:
            p_value = 1.0
            if not cell["best"]:
                error = (cell["difference"] - cell["difference_low"]) / critical
                p_value = min(1.0, 2 * others * float(stats.t.sf(-cell["difference"] / error, dof)))
            p_values[cell["group_size"]] = p_value
        return p_values

    def verdict(self, predicted: int, outcome: str = MEAN) -> str:
        """Return the verdict on whether a predicted G trains best.

        The verdict is "not decided" if no G is significantly different from the best.
        """
        distinct = self.distinct(outcome)
        return verdict_of(predicted not in distinct if distinct else None)


def budget_result(grid: dict[tuple[int, int, int], RunRecord], rollouts: int) -> BudgetResult:
    """Compare all G at one n by both outcomes, on the seeds that were run with every G.

    Args:
        grid: Runs by n, G and seed.
        rollouts: Number of rollouts per step, n.
    """
    sizes = sorted({size for _, size, _ in grid})
    seeds = sorted({seed for n, _, seed in grid if n == rollouts})
    seeds = [seed for seed in seeds if all((rollouts, size, seed) in grid for size in sizes)]
    if len(seeds) < MIN_SEEDS:
        raise ConfigError(
            f"n={rollouts} has {len(seeds)} seeds that were run with every G of {sizes}, but "
            f"{MIN_SEEDS} are needed"
        )
    rows = []
    for seed, size in product(seeds, sizes):
        run = grid[rollouts, size, seed]
        row = {"series": "", "rollouts": rollouts, "group_size": size, "seed": seed}
        row |= {key: run.evals[-1][key] for key in ("quantity", "low", "high", "n")}
        # `accuracy_cells` groups by step, so the outcome is stored as the step.
        for outcome, value_of in OUTCOMES.items():
            rows.append(row | {"step": outcome, "mean_reward": value_of(run)})
    cells = accuracy_cells(rows)
    by_outcome = {name: [cell for cell in cells if cell["step"] == name] for name in OUTCOMES}
    mean_SG = [[mean_evaluation(grid[rollouts, size, seed]) for size in sizes] for seed in seeds]
    return BudgetResult(rollouts, seeds, by_outcome, np.array(mean_SG))


@dataclass(frozen=True)
class Comparison:
    """Comparison of the predicted best group size with training results."""

    start: Start
    budgets: Sequence[BudgetResult]
    # Claims with verdicts corrected for multiple testing; see `correct_family`.
    claims: Sequence[Claim]
    # One row for each n, outcome and G.
    rows: Sequence[dict[str, Any]]
    answer: str
    # Notes on ways in which training differs from the theory.
    notes: Sequence[str]

    @property
    def verdict(self) -> str:
        """Joint verdict on all claims."""
        return worst_verdict(self.claims)

    def tables(self) -> list[Table]:
        """Return a table of predicted errors and training results by G, and a table of claims."""
        rows, quantity = [], joint_quantity(row["quantity"] for row in self.rows)
        for row in self.rows:
            difference, verdict = "-", "largest mean"
            if not row["best"]:
                names = ("difference", "difference_low", "difference_high")
                difference = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*(row[name] for name in names))
                verdict = "significantly less" if row["distinct"] else "not significantly different"
            if row["outcome"] == MEAN:
                mean = "{mean_reward:.3f} [{low:.3f}, {high:.3f}]".format(**row)
                error = f"{row['predicted_error_ratio']:.3g}"
                rows.append([f"n={row['n']}", row["group_size"], error, mean, difference, verdict])
        columns = [
            "",
            "G",
            "predicted error\nrelative to\nthe smallest",
            f"held-out {quantity}",
            "difference",
        ]
        claims = [asdict(claim) for claim in self.claims]
        return [
            Table(
                name="best_group_size",
                title=f"Does G* = {self.start.gstar_text} train best? Held-out {quantity}, {MEAN}",
                columns=[*columns, "verdict"],
                rows=rows,
                notes=["The 95 % intervals cover the variation between seeds, but not the "
                       "variation from drawing other test questions. Differences from the largest "
                       "mean are paired by seed. Their intervals hold simultaneously for all G "
                       "(Bonferroni)."],
                data=self.rows,
                headings=True,
            ),
            Table(
                name="best_group_size_claims",
                title="The scaling law in training, predicted and measured",
                columns=CLAIM_COLUMNS,
                rows=[[cell or "-" for cell in claim_cells(claim)] for claim in claims],
                notes=["The file best_group_size_claims.csv explains how each claim is decided."],
                data=[{k: x for k, x in row.items() if k != "alternatives"} for row in claims],
                headings=True,
                sentences=("severity",),
            ),
        ]  # fmt: skip


def best_group_size(training: Sequence[RunRecord], studies: Sequence[RunRecord]) -> Comparison:
    """Compare training results at several G, n and seeds with the G* of the initial policy.

    Args:
        training: Training runs; unfinished runs are ignored.
        studies: Finished `mse` studies; exactly one of them must have measured the initial policy.
    """
    grid: dict[tuple[int, int, int], RunRecord] = {}
    for run in training:
        if run.result is not None:
            config = run.config
            grid[config["budget"]["rollouts"], config["group_size"], config["seed"]] = run
    runs = list(grid.values())
    check_one_series(runs)
    start = start_of(runs[0], studies)
    budgets = [budget_result(grid, rollouts) for rollouts in sorted({n for n, _, _ in grid})]
    claims = [_best_claim(budget, start) for budget in budgets]
    claims += [_same_claim(budgets)] if len(budgets) > 1 else []
    claims += [_order_claim(budget, start) for budget in budgets]
    rows = []
    for budget in budgets:
        least = min(start.error_at(size) for size in budget.sizes)
        for name, cells in budget.cells.items():
            for cell in cells:
                error = start.error_at(cell["group_size"])
                row = {"n": budget.rollouts, "outcome": name}
                row |= {key: cell[key] for key in CELL_KEYS}
                row |= {"predicted_n_mse": error, "predicted_error_ratio": error / least}
                rows.append(row)
    answer, notes = _answer(budgets, start), _notes(runs, budgets, start)
    return Comparison(start, budgets, correct_family(claims), rows, answer, notes)


def check_one_series(runs: Sequence[RunRecord]) -> None:
    """Raise an error if the runs cannot be compared, or if G* does not apply to their baseline."""
    if not runs:
        raise ConfigError("no training run is finished")
    sizes = sorted({run.config["group_size"] for run in runs})
    if len(sizes) < 2:
        raise ConfigError(f"all finished training runs have the same G={sizes}")
    keys = distinguishing_keys([run.keys for run in runs])
    if keys:
        raise ConfigError(
            f"the training runs differ not only in n, G and seed but also in {', '.join(keys)}: "
            "name only folders of runs that agree in all other settings"
        )
    steps = sorted({tuple(row["step"] for row in run.evals) for run in runs})
    if len(steps) > 1:
        raise ConfigError(
            f"the training runs were evaluated at steps {list(steps[0])} and {list(steps[1])}: "
            "name folders with the same max_steps and eval_steps"
        )
    if not any(steps[0]):
        raise ConfigError("the training runs were not evaluated after step 0")
    baseline = runs[0].config["baseline"]["name"]
    if baseline != "leave_one_out":
        raise ConfigError(f"baseline={baseline}: G* applies only to leave_one_out")


def start_of(trained: RunRecord, studies: Sequence[RunRecord]) -> Start:
    """Return the scaling law of a run's initial policy from the study that measured this policy."""
    policy_keys = {key: value for key, value in trained.keys.items() if key.startswith(POLICY_KEYS)}
    differing = [
        [key for key in policy_keys if policy_keys[key] != run.keys.get(key)] for run in studies
    ]
    same = [run for run, keys in zip(studies, differing, strict=True) if not keys]
    if studies and not same:
        key = differing[0][0]
        raise ConfigError(
            f"{key} is {policy_keys[key]} in training and {studies[0].keys.get(key)} in the study: "
            "measure the policy that training starts from"
        )
    if len(same) != 1:
        raise ConfigError(f"{len(same)} finished studies measured the policy before training, but "
                          "exactly one is needed")  # fmt: skip
    scaling = Study(same[0]).need(SCALING)
    if not scaling.is_decided:
        raise ConfigError(
            f"{same[0].label} has no G* with an interval (C1 = {scaling.c1.estimate}, C3 = "
            f"{scaling.c3.estimate}): raise its budget.pool_completions"
        )
    return Start(same[0], scaling.law, scaling.gstar)


def nearest(gstar: float, sizes: Sequence[int]) -> int:
    """Return the given size with the smallest predicted error, which depends only on G*.

    >>> nearest(8.9, [2, 4, 8, 16]), nearest(2.5, [2, 4, 8]), nearest(11.0, [8, 16])
    (8, 2, 8)
    """
    return min(sizes, key=lambda size: size + (gstar - 1) ** 2 / (size - 1))


def _best_claim(budget: BudgetResult, start: Start) -> Claim:
    """Return the claim that the predicted G is not significantly worse than the best G."""
    predicted, indistinct = start.nearest(budget.sizes), budget.indistinct()
    return Claim(
        what=f"G among {comma_list(budget.sizes)} that trains best at n = {budget.rollouts}",
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
        f"not significantly different from the best: G = {comma_list(indistinct)}; simultaneous "
        f"95 % paired t intervals of the differences (Bonferroni over "
        f"{len(budget.sizes) - 1}); the predicted G is the trained G with the smallest error "
        f"predicted by G* = {start.gstar_text}",
    )


def _same_claim(budgets: Sequence[BudgetResult]) -> Claim:
    """Return the claim that the same G can be the best at every n."""
    first, last = budgets[0], budgets[-1]
    common = set.intersection(*(set(budget.indistinct()) for budget in budgets))
    decisive = all(budget.distinct() for budget in budgets)
    sizes = [size for size in first.sizes if all(size in budget.sizes for budget in budgets)]
    p_values = {size: [budget.p_values()[size] for budget in budgets] for size in sizes}
    return Claim(
        what=f"ratio of the G that train best at n = {last.rollouts} and n = {first.rollouts}",
        predicted=1.0,
        measured=last.best() / first.best(),
        low=min(last.indistinct()) / max(first.indistinct()),
        high=max(last.indistinct()) / min(first.indistinct()),
        verdict=AGREES if common and decisive else OPEN,
        how="agrees if at least one G may be best at every n, and if at every n at least one G is "
        "significantly different from the best; G that may be best at every n: "
        f"{comma_list(sorted(common)) or 'none'}; the p-value is the largest over G, with a "
        "Bonferroni correction over n",
        p_value=max(min(1.0, len(budgets) * min(p_of_n)) for p_of_n in p_values.values()),
        when_rejected=DISAGREES,
        severity=f"{len(common)} of {len(sizes)} group sizes may be best at every n",
    )


def _order_claim(budget: BudgetResult, start: Start) -> Claim:
    """Return the claim that a G with a smaller predicted error trains better."""
    error_G = np.array([start.error_at(size) for size in budget.sizes])
    correlation = rank_correlation(budget.mean_SG, error_G)
    correlation_S = [rank_correlation(seed_G[None], error_G).estimate for seed_G in budget.mean_SG]
    return Claim(
        what=f"rank correlation over G between {budget.quantity} and the negative predicted error, "
        f"n = {budget.rollouts}",
        predicted="> 0",
        measured=correlation.estimate,
        low=correlation.low,
        high=correlation.high,
        verdict=AGREES if correlation.low > 0 else OPEN,
        p_value=sign_flip_p_value(np.array(correlation_S)),
        when_rejected=DISAGREES,
        how=f"Spearman, {len(budget.sizes)} G; 95 % percentile bootstrap over {len(budget.seeds)} "
        f"seeds, {RESAMPLES} resamples; the p-value is from a one-sided sign-flip test of the "
        "correlations of individual seeds",
    )


def _compared_sizes(budget: BudgetResult, outcome: str = MEAN) -> str:
    """Name the best G, the G that are not significantly worse, and the G that are."""
    not_different = [size for size in budget.indistinct(outcome) if size != budget.best(outcome)]
    return (
        f"best G: {budget.best(outcome)}; not significantly worse: "
        f"{comma_list(not_different) or 'no other G'}; significantly worse: "
        f"{comma_list(budget.distinct(outcome)) or 'no G'}"
    )


def _answer(budgets: Sequence[BudgetResult], start: Start) -> str:
    predicted = start.nearest(budgets[0].sizes)
    words = {
        AGREES: "the prediction holds: G = {} is among the sizes that may be best",
        DISAGREES: "the prediction fails: G = {} is significantly worse than the best G",
        OPEN: "the prediction G = {} is not tested, because no G is significantly worse than the "
        "best",
    }
    sentences = [
        f"At n = {budget.rollouts}, {words[budget.verdict(predicted)].format(predicted)} "
        f"({_compared_sizes(budget)})."
        for budget in budgets
    ]
    return (
        f"G* = {start.gstar_text} predicts that G = {predicted} trains best. {' '.join(sentences)}"
    )


def _notes(runs: Sequence[RunRecord], budgets: Sequence[BudgetResult], start: Start) -> list[str]:
    config, sizes = runs[0].config, budgets[0].sizes
    before = float(np.mean([run.evals[0]["mean_reward"] for run in runs]))
    quantity = joint_quantity(row["quantity"] for run in runs for row in run.evals)
    optimizer = config["optimizer"]["name"]
    ends = [str(size) for size in sorted({nearest(end, sizes) for end in start.gstar})]
    prompts = "; ".join(
        f"at n = {budget.rollouts}, from {budget.rollouts // budget.sizes[0]} "
        f"(G = {budget.sizes[0]}) to {budget.rollouts // budget.sizes[-1]} (G = {budget.sizes[-1]})"
        for budget in budgets
    )
    lower = {
        budget.rollouts: [c["group_size"] for c in budget.cells[MEAN] if c["mean_reward"] < before]
        for budget in budgets
    }
    below = " ".join(
        f"At n = {n}, the mean after step 0 is below this value at G = {comma_list(g)}."
        if g
        else f"At n = {n}, no group size has a mean below this value after step 0."
        for n, g in lower.items()
    )
    notes = [
        f"{quantity.capitalize()} is measured with {config['eval']['decoding'][0]} completions on "
        f"{runs[0].evals[-1]['n']} test questions. Its intervals cover the variation between "
        "seeds, but not the variation from drawing other questions. C1, C2 and C3 are measured on "
        "the study questions. Their intervals are for new questions. Training uses the train "
        "questions.",
        f"Among the trained G ({comma_list(sizes)}), the estimate of G* and the ends of its "
        f"interval predict that G = {enumeration(ends, 'or')} trains best.",
        "C1, C2 and C3 are measured before training and change during training. The theorem on the "
        "sub-optimality gap assumes a policy near a maximiser, and a learning rate c/t at step t. "
        "These runs are at the beginning of training instead, and their learning rate is constant "
        "and the same for all G and n.",
        f"A step has n / G prompts: {prompts}. Prompts are drawn without replacement, which shifts "
        "the error of all G equally.",
        *(
            f"If only the {LAST} at n = {budget.rollouts} counts, the verdict on the prediction is "
            f'"{budget.verdict(start.nearest(sizes), LAST)}" ({_compared_sizes(budget, LAST)}).'
            for budget in budgets
        ),
        f"Held-out {quantity} was {before:.3f} before training. {below}",
    ]
    if optimizer != "sgd":
        notes.append(
            "The theory assumes that a step adds the learning rate times the gradient to the "
            f"parameters, but {optimizer} also scales each coordinate of the gradient by its noise."
        )
    return notes
