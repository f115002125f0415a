"""Rollouts that another policy or an inexact sampler wrote: its distance, and their efficiency.

In a report studies are in the order of that distance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.estimators.losses import loss_efficiencies
from grpo_ustat.measurements.base import Figure, Joint, Measurement, PoolStudy, Study, study_columns
from grpo_ustat.measurements.loss_efficiencies import (
    NOISE_NOTE,
    LossEfficiency,
    by_loss,
    cosine_text,
    described,
    draw_efficiencies,
    efficiency_sentences,
    efficiency_tables,
    efficiency_text,
    loss_records,
    measured_rows,
    nearest_usual,
)
from grpo_ustat.pages.tables import Table
from grpo_ustat.runs.contents import content_of
from grpo_ustat.runs.record import distinguishing_keys

DRIFT_NOTE = (
    "Effective share: (sum of weights)^2 over the sum of their squares, as a share of their number."
)
LAG_NOTE = (
    "Relative efficiency: rollouts of the unbiased leave-one-out gradient at the same G, written "
    "by the policy at hand, that do as much as one of the loss that another policy wrote; 95 % "
    "intervals for new questions. Nats a token: the divergence of the policy at hand from the "
    "other."
)


@dataclass(frozen=True, kw_only=True)
class OffPolicy:
    """Efficiency of rollouts written by another policy, or by a sampler that differs from it."""

    # The policy that wrote them.
    written_by: str
    # The policy whose gradient is estimated.
    policy: str
    # The policy that a penalty is measured from.
    reference: str
    # lag: an earlier policy wrote them, and the comparison is with rollouts of `policy` itself;
    # gap: the sampler of a file wrote them, and the comparison is with the same ones weighted by
    # their exact ratios; penalty: `policy` itself wrote them.
    question: str
    # True if any loss has a penalty.
    penalised: bool
    # KL divergence of `written_by` from `policy`, nats a token.
    kl: Interval
    # Effective share `(sum w)^2 / (count sum w^2)` of the ratios w of tokens.
    effective_tokens: Interval
    # Effective share of the products of these ratios over a completion.
    effective_completions: Interval
    # Efficiency of a rollout of each loss.
    losses: list[LossEfficiency]


def measure(study: PoolStudy) -> OffPolicy | None:
    """Measure every loss of the completions that the policy at hand has scored."""
    scored = study.rescored
    if scored is None:
        return None
    rows = loss_efficiencies(
        scored.compared, scored.losses, study.group_sizes, study.rollouts, study.draws, study.seed,
        scored.weighted,
    )  # fmt: skip
    return OffPolicy(
        written_by=scored.written_by,
        policy=scored.policy,
        reference=scored.reference,
        question=scored.question,
        penalised=any(loss.tokens and loss.tokens.beta for loss in scored.losses),
        kl=scored.drift.kl,
        effective_tokens=scored.drift.tokens,
        effective_completions=scored.drift.completions,
        losses=loss_records(rows),
    )


def sentences(result: OffPolicy, study: Study) -> list[str]:
    """Return sentences on the distance from the writer's policy, and on efficiency."""
    efficiencies = efficiency_sentences(result.losses, _wrote(result), _compared(result))
    if result.question == "penalty":
        return efficiencies
    kl = result.kl
    return [
        f"{result.policy} is {kl.estimate:.2g} [{kl.low:.2g}, {kl.high:.2g}] nats a token from "
        f"{result.written_by}: weighted by their ratios tokens count as "
        f"{share_text(result.effective_tokens)} of as many, completions by the products of theirs "
        f"as {share_text(result.effective_completions)}.",
        *efficiencies,
    ]


def tables(results_by_study: Mapping[Study, OffPolicy]) -> list[Table]:
    """Return tables of relative efficiency; a terminal shows the table of the first losses.

    Further losses are those of published claims.
    """
    shown = []
    for result in results_by_study.values():
        of_study = efficiency_tables(result.losses, _wrote(result), _notes(result))
        shown += [replace(table, page_only=place > 0) for place, table in enumerate(of_study)]
    return shown


def draw(folder: Path, results_by_study: Mapping[Study, OffPolicy], lines: Sequence[str]) -> None:
    """Draw the relative efficiency of each loss's rollout against G, `off_policy.{pdf,svg,png}`."""
    for result in results_by_study.values():
        title = f"written by {result.written_by}, at {result.policy}"
        draw_efficiencies(folder, "off_policy", title, result.losses, lines)


def share_text(share: Interval) -> str:
    """Format a share with its interval in percent.

    >>> share_text(Interval(0.753, 0.721, 0.7963))
    '75 % [72 %, 80 %]'
    """
    percents = [f"{100 * min(1.0, x):.0f} %" for x in share]
    return f"{percents[0]} [{percents[1]}, {percents[2]}]"


def _wrote(result: OffPolicy) -> str:
    if result.question == "penalty":
        return " with its penalty"
    return f" that {result.written_by} wrote"


def _compared(result: OffPolicy) -> str:
    return {
        "lag": f"the unbiased gradient of rollouts that {result.policy} wrote",
        "gap": "the same loss weighted by exact ratios",
        "penalty": "the unbiased gradient without a penalty",
    }[result.question]


def _notes(result: OffPolicy) -> list[str]:
    notes = [
        f"Relative efficiency: rollouts of {_compared(result)} that do as much as one of the loss; "
        "95 % intervals for new questions, paired among losses and G."
    ]
    if result.penalised:
        notes.append(
            f"A penalty is from {result.reference} and part of a loss; what is measured is the "
            "gradient of the reward alone."
        )
    return notes if result.question == "penalty" else [*notes, DRIFT_NOTE]


def joint_tables(results_by_study: Mapping[Study, OffPolicy]) -> list[Table]:
    """Return a table with a row per study and loss at G = 8 or the nearest, by policy distance."""
    study_keys = distinguishing_keys([study.run.keys for study in results_by_study])
    rows, data, all_rows = [], [], []
    for study, result in by_distance(results_by_study).items():
        facts = {k: x for k, x in content_of(result).items() if k not in ("losses", "policy")}
        of_study = study_columns(study.run, study_keys) | facts | {"at": result.policy}
        data += [of_study | content_of(row) for row in result.losses]
        all_rows += result.losses
        shares = (result.effective_tokens, result.effective_completions)
        for of_loss in by_loss(result.losses):
            measured = measured_rows(of_loss)
            if not measured:
                continue
            row = nearest_usual(measured)
            rows.append([
                f"{result.written_by}\n{result.policy}",
                efficiency_text(result.kl, "\n", 4),
                "\n".join(map(share_text, shares)),
                row.loss,
                str(row.group_size),
                efficiency_text(row.efficiency_same_g, "\n"),
                cosine_text(row, "\n"),
                efficiency_text(row.noise, "\n"),
            ])  # fmt: skip
    table = Table(
        name="lag",
        title="Relative efficiency of rollouts that another policy wrote",
        columns=["written by\nat", "nats a token", "effective share by\ntokens, completions",
                 "loss", "G", "efficiency", "cos with the gradient", "share of noise"],
        rows=rows,
        notes=[LAG_NOTE, DRIFT_NOTE, NOISE_NOTE, described(all_rows)],
        data=data,
        headings=True,
    )  # fmt: skip
    return [table]


def by_distance(results_by_study: Mapping[Study, OffPolicy]) -> dict[Study, OffPolicy]:
    """Sort studies by the distance of the policy at hand from the one that wrote the rollouts."""
    return dict(sorted(results_by_study.items(), key=lambda item: item[1].kl.estimate))


def answer(results_by_study: Mapping[Study, OffPolicy]) -> str:
    """State the relative efficiency of each loss at the nearest and at the farthest policy."""
    nearest, *further = by_distance(results_by_study).values()
    lines: dict[str, list[str]] = {}
    for result in [nearest, *further[-1:]]:
        for of_loss in by_loss(result.losses):
            measured = measured_rows(of_loss)
            if measured:
                efficiency = efficiency_text(nearest_usual(measured).efficiency_same_g)
                lines.setdefault(of_loss[0].loss, []).append(f"{efficiency} at {result.policy}")
    values = "; ".join(f"{loss} {', '.join(texts)}" for loss, texts in lines.items())
    return f"Relative efficiency of rollouts that {nearest.written_by} wrote: {values}."


OFF_POLICY = Measurement(
    "off_policy",
    OffPolicy,
    measure,
    sentences,
    tables,
    prints=True,
    figure=Figure("off_policy", "Relative efficiency of rollouts that another policy wrote", draw),
    joint=Joint(joint_tables, answer),
    leads=True,
)
