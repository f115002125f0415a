"""Bias and efficiency of plans, which decide how many completions each prompt gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_ustat.estimators.group_size import USUAL_SIZE
from grpo_ustat.estimators.intervals import CONFIDENCE, Interval, normal_quantile
from grpo_ustat.estimators.plan_efficiencies import RATES, PlanRow, plan_efficiencies
from grpo_ustat.estimators.plans import PLANS
from grpo_ustat.measurements.base import (
    Figure,
    Joint,
    Measurement,
    PoolStudy,
    Study,
    by_pool,
    study_columns,
    table_of_studies,
)
from grpo_ustat.measurements.loss_efficiencies import direction_text, efficiency_text
from grpo_ustat.pages.figures import (
    figure_fonts,
    legend_above,
    line_style,
    note,
    panel_figure,
    save,
)
from grpo_ustat.pages.tables import Table, enumeration
from grpo_ustat.runs.contents import Size, Sometimes, content_of, keys_of
from grpo_ustat.runs.record import distinguishing_keys

# Plans that published claims refer to; a study of published claims measures them too.
CLAIMED = ("vip", "p_one_minus_p", "knapsack")
# Estimates that trainers use; the other estimates are remedies for the bias of a plan.
USUAL = ("per_rollout", "per_prompt")
ESTIMATE_WORDS = {
    "per_rollout": "each rollout weighs the same",
    "per_prompt": "each prompt weighs the same",
    "earlier": "baseline from the same and earlier stages",
    "without_last": "baseline without the last stage",
    "all_orders": "unbiased weights over all orders",
}
# Success rates in the table and in the sentence, of those in `RATES`.
SHOWN_RATES = (0.1, 0.9)
HARD_RATE = SHOWN_RATES[0]
# A sentence reports a bias if a prompt's weight differs from 1 by more than this number.
BIAS = 0.1
# Estimate of the lines in the figure. Weights outside the range are drawn at its ends.
DRAWN_ESTIMATE, DRAWN_WEIGHTS = "per_rollout", (0.05, 20.0)
# If all weights of a plan differ from 1 by at most this number, the figure calls it unbiased.
FLAT = 1e-6
FIGURE_NOTE = (
    "The weight is set to 1 at success rate 1/2. All trained rollouts of a batch have the same "
    "weight in the update, as with losses that average over tokens."
)
COLUMNS = (
    "plan", "estimate", "mean G", "generated", "trained", "cosine",
    "weight at 10 %", "weight at 90 %", "efficiency, generated", "efficiency, trained",
)  # fmt: skip
NOTES = (
    "A plan decides from the rewards drawn so far how many completions a prompt gets. An "
    "efficiency compares the plan with leave_one_out at its best fixed G: one rollout of the plan "
    "is worth this many rollouts of leave_one_out. One column counts generated rollouts, the other "
    "counts trained rollouts. Brackets contain 95 % intervals for new questions.",
    "A weight shows the bias of the expected update towards easy or hard prompts. It is how much a "
    "prompt counts if 10 % or 90 % of its completions are right, relative to its share of an "
    "unbiased gradient. Prompts with 50 % right completions have weight 1. The cosine is between "
    "the expected update and the gradient.",
    "Some plans use prices or priors from a history of earlier completions. These are fitted to "
    "half of the questions, and the plan is judged on the other half. Completions of the history "
    "are not counted as generated.",
)


@dataclass(frozen=True, kw_only=True)
class PromptWeight:
    """Weight of prompts with a success rate, relative to success rate 1/2."""

    success_rate: float
    weight: float


@dataclass(frozen=True, kw_only=True)
class PlanEfficiency:
    """Bias and efficiency of a plan at one size; see `estimators.plan_efficiencies.PlanRow`."""

    plan: str
    # Name of the estimate; absent if the plan was not measured.
    estimate: Sometimes[str] = None
    # Requested mean number of completions per prompt, and the largest number for one prompt.
    mean_size: Size
    most: Size
    # Mean numbers of completions per prompt of an update.
    generated: Sometimes[Interval] = None
    trained: Sometimes[Interval] = None
    unbiased_direction: bool = False
    # Squared cosine between the expected update and the gradient; 1 if `unbiased_direction`.
    direction: Sometimes[Interval] = None
    # Share of noise in an update of n generated rollouts.
    noise: Sometimes[Interval] = None
    efficiency_generated: Sometimes[Interval] = None
    efficiency_trained: Sometimes[Interval] = None
    weights: list[PromptWeight]
    # Standard error of `efficiency_generated` from drawn orders.
    monte_carlo_error: Sometimes[float] = None
    # Reason why the plan was not measured.
    reason: Sometimes[str] = None

    @property
    def label(self) -> str:
        """Name of the plan and of its estimate, if the estimate is a remedy."""
        of_trainers = self.estimate in USUAL or self.estimate is None
        return self.plan if of_trainers else f"{self.plan}, {self.estimate}"


def measure(study: PoolStudy) -> list[PlanEfficiency] | None:
    """Measure the requested plans and, if published claims are tested, the plans they refer to."""
    plans = [*study.plans, *(CLAIMED if "verdicts" in study.asked else ())]
    if not plans:
        return None
    rows = plan_efficiencies(
        study.pool, list(dict.fromkeys(plans)), study.plan_sizes, study.group_sizes,
        study.rollouts, study.seed,
    )  # fmt: skip
    return [_record(row) for row in rows]


def _record(row: PlanRow) -> PlanEfficiency:
    return PlanEfficiency(
        plan=row.plan.name,
        estimate=row.estimate or None,
        mean_size=row.setting.size,
        most=row.setting.most,
        generated=row.generated,
        trained=row.trained,
        unbiased_direction=row.unbiased,
        direction=row.direction,
        noise=row.noise,
        efficiency_generated=row.at_generated,
        efficiency_trained=row.at_trained,
        weights=[
            PromptWeight(success_rate=rate, weight=weight)
            for rate, weight in zip(RATES, row.weights or (), strict=False)
        ],
        monte_carlo_error=row.monte_carlo_error,
        reason=row.reason,
    )


def _usual_size(rows: Sequence[PlanEfficiency]) -> list[PlanEfficiency]:
    """Return the measured rows of the mean size nearest to 8."""
    measured = [row for row in rows if row.reason is None]
    sizes = {row.mean_size for row in measured}
    nearest = min(sizes, key=lambda size: abs(size - USUAL_SIZE), default=None)
    return [row for row in measured if row.mean_size == nearest]


def sentences(rows: list[PlanEfficiency], study: Study) -> list[str]:
    """Return sentences on the best plan, on biased plans, and on plans that were not measured."""
    return [*_efficiency_sentences(_usual_size(rows)), *_absence_sentences(rows)]


def _absence_sentences(rows: Sequence[PlanEfficiency]) -> list[str]:
    """Return sentences with the plans that were not measured, one for each size and reason."""
    absent: dict[tuple[int, str], list[str]] = {}
    for row in rows:
        if row.reason is not None:
            absent.setdefault((row.mean_size, row.reason), []).append(row.plan)
    return [
        f"Not measured at a mean G of {size}: {enumeration(plans)}, because {reason}."
        for (size, reason), plans in absent.items()
    ]


def _efficiency_sentences(rows: Sequence[PlanEfficiency]) -> list[str]:
    """Return sentences on the best plan and on biased plans, for rows of the same mean size."""
    known = [
        (row.efficiency_generated, row)
        for row in rows
        if row.efficiency_generated is not None and row.efficiency_generated.is_known
    ]
    if not known:
        return []
    best, row = max(known, key=lambda pair: pair[0].estimate)
    best = _for_all(best, len(known))
    all_decided = len(known) == len(rows)
    rank = "best" if all_decided else "best decided"
    value = f"the relative efficiency of {row.label}, the {rank} plan, is {efficiency_text(best)}"
    finding = "The data do not show that unequal group sizes help"
    if best.low > 1:
        finding = "Unequal group sizes help"
    elif best.high <= 1 and all_decided:
        finding = "Unequal group sizes do not help"
    lines = [f"{finding}: at equal generated rollouts and mean G = {row.mean_size}, {value}."]
    biased = [f"{weight:.2g} times under {plan}" for plan, weight in _biased(rows).items()]
    if biased:
        lines.append(
            "Group sizes that depend on rewards bias the expected update. Prompts with "
            f"{100 * HARD_RATE:.0f} % right completions should have weight 1, like prompts with "
            f"50 %, but they count {enumeration(biased)}."
        )
    return lines


def _biased(rows: Sequence[PlanEfficiency]) -> dict[str, float]:
    """Return the weight of hard prompts under plans that change it by more than `BIAS`."""
    weights = {
        row.plan: each.weight
        for row in rows
        if row.estimate == DRAWN_ESTIMATE
        for each in row.weights
        if each.success_rate == HARD_RATE
    }
    return {plan: weight for plan, weight in weights.items() if abs(weight - 1) > BIAS}


def _for_all(efficiency: Interval, count: int) -> Interval:
    """Widen an interval on the log scale, so that it holds for the best of several efficiencies.

    The level is Bonferroni-corrected for the number of efficiencies.
    """
    wider = normal_quantile(1 - (1 - CONFIDENCE) / count) / normal_quantile()
    estimate, low, high = efficiency
    if not low > 0:
        return efficiency
    return Interval(
        estimate, estimate * (low / estimate) ** wider, estimate * (high / estimate) ** wider
    )


def tables(rows_by_study: Mapping[Study, list[PlanEfficiency]]) -> list[Table]:
    """Return a table with a row per plan, estimate and mean G."""
    cells = {
        study: [_cells(row) for row in rows if row.reason is None]
        for study, rows in rows_by_study.items()
    }
    missing = dict.fromkeys(
        line for rows in rows_by_study.values() for line in _absence_sentences(rows)
    )
    cells = {study: rows for study, rows in cells.items() if rows}
    measured = [row for rows in rows_by_study.values() for row in rows if row.reason is None]
    errors = [row.monte_carlo_error for row in measured if row.monte_carlo_error is not None]
    drawn = [
        f"The efficiencies use randomly drawn orders of the completions, the same for all plans. "
        f"Their largest Monte Carlo standard error is {max(errors):.2g}."
    ] if errors else []  # fmt: skip
    estimates = list(dict.fromkeys(row.estimate for row in measured if row.estimate is not None))
    words = "; ".join(f"{name}: {ESTIMATE_WORDS[name]}" for name in estimates)
    names = dict.fromkeys(row.plan for row in measured if row.plan in PLANS)
    rules = [f"{name}: {PLANS[name].words} ({PLANS[name].source})" for name in names]
    notes = [*NOTES, f"{words}.", *rules, *drawn, *missing]
    if not cells:
        return [Table("Budgets by prompt", list(COLUMNS), [], list(missing))] if missing else []
    return [table_of_studies("Budgets by prompt", COLUMNS, cells, notes)]


def _cells(row: PlanEfficiency) -> list[str]:
    """Return the cells of a measured plan."""
    weights = {each.success_rate: each.weight for each in row.weights}
    assert row.estimate is not None and row.generated is not None and row.trained is not None
    return [
        row.plan,
        row.estimate,
        str(row.mean_size),
        f"{row.generated.estimate:.1f}",
        f"{row.trained.estimate:.1f}",
        direction_text(row.unbiased_direction, row.direction),
        *(f"{weights[rate]:.2f}" if rate in weights else "-" for rate in SHOWN_RATES),
        efficiency_text(row.efficiency_generated),
        efficiency_text(row.efficiency_trained),
    ]


def draw(
    folder: Path, rows_by_study: Mapping[Study, list[PlanEfficiency]], lines: Sequence[str]
) -> None:
    """Plot the weight of a prompt against its success rate; save it as `plans.{pdf,svg,png}`.

    There is a line for each plan at the mean size nearest to 8, and the line of an unbiased
    gradient. Nothing is drawn if no plan has weights.
    """
    for rows in rows_by_study.values():
        shown = {
            row.plan: row
            for row in _usual_size(rows)
            if row.weights and row.estimate == DRAWN_ESTIMATE
        }
        if shown:
            _draw(folder, list(shown.values()), [FIGURE_NOTE, *lines])


def _draw(folder: Path, rows: Sequence[PlanEfficiency], lines: Sequence[str]) -> None:
    """Plot a line for each row."""
    low, high = DRAWN_WEIGHTS
    with figure_fonts():
        figure, [[[axes]]] = panel_figure([1])
        biased = [row for row in rows if any(abs(x.weight - 1) > FLAT for x in row.weights)]
        for place, row in enumerate(biased):
            colour, marker = line_style(place)
            axes.plot(
                [each.success_rate for each in row.weights],
                [min(max(each.weight, low), high) for each in row.weights],
                color=colour, marker=marker, markersize=4, label=row.plan,
            )  # fmt: skip
        axes.axhline(1.0, color="black", linewidth=1.2, zorder=0.5, label="unbiased")
        axes.set_yscale("log")
        drawn = [each.weight for row in rows for each in row.weights]
        bottom, top = max(min(*drawn, 0.5), low) / 1.2, 1.2 * min(max(*drawn, 2.0), high)
        ticks = [x for x in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if bottom < x < top]
        axes.set_ylim(bottom, top)
        axes.set_yticks(ticks, [f"{x:g}" for x in ticks])
        axes.set_yticks([], minor=True)
        axes.set_xlabel("success rate of the prompt")
        axes.set_ylabel("weight of the prompt\nin the update")
        axes.set_title(f"mean G = {rows[0].mean_size}", loc="left")
        axes.grid(alpha=0.3, linewidth=0.5)
        legend_above(figure)
        unbiased = ", ".join(row.plan for row in rows if row not in biased)
        note(figure, [*lines, f"Unbiased plans: {unbiased}."] if unbiased else lines)
        save(figure, folder, "plans")


def joint_tables(rows_by_study: Mapping[Study, list[PlanEfficiency]]) -> list[Table]:
    """Return the table of a report, with one study per pool, and the data for its CSV file."""
    study_keys = distinguishing_keys([study.run.keys for study in rows_by_study])
    firsts = [members[0] for members in by_pool(rows_by_study)]
    data = [
        study_columns(study.run, study_keys) | _flat(row)
        for study in firsts
        for row in rows_by_study[study]
    ]
    shown = tables({study: rows_by_study[study] for study in firsts})
    return [replace(table, name="plans", data=data) for table in shown]


def _flat(row: PlanEfficiency) -> dict[str, Any]:
    """Return a row of a CSV file, which has the same keys for all plans."""
    content = content_of(row)
    weights = {each.success_rate: each.weight for each in row.weights}
    of_plan = {key: content.get(key) for key in keys_of(PlanEfficiency) if key != "weights"}
    return of_plan | {f"weight_{rate:g}": weights.get(rate) for rate in RATES}


PLAN_EFFICIENCIES = Measurement(
    "plans",
    list[PlanEfficiency],
    measure,
    sentences,
    tables,
    figure=Figure("plans", "Weight of a prompt by its success rate", draw),
    joint=Joint(joint_tables),
)
