"""Relative efficiency of rollouts that another policy or an inexact sampler wrote.

Reports sort studies by KL(policy that wrote the rollouts || current policy).
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
    "The effective share is the effective sample size of the importance weights w, "
    "(sum w)^2 / sum w^2, divided by the number of weights."
)
LAG_NOTE = (
    "The efficiency compares rollouts that another policy wrote with rollouts of the current "
    "policy. One rollout of the other policy, used with the loss, is worth this many rollouts of "
    "the current policy, used with the unbiased leave-one-out gradient at the same G. The 95 % "
    "intervals are for new questions. The column nats per token is the KL divergence KL(policy "
    "that wrote the rollouts || current policy)."
)


@dataclass(frozen=True, kw_only=True)
class OffPolicy:
    """Relative efficiency of rollouts that another policy or an inexact sampler wrote."""

    # Policy that wrote the rollouts.
    written_by: str
    # Policy whose gradient is estimated.
    policy: str
    # Reference policy of a KL penalty.
    reference: str
    # Kind of comparison. "lag": rollouts of an earlier policy are compared with rollouts of
    # `policy`. "gap": rollouts from a file, written by its sampler, are compared with the same
    # rollouts weighted by exact importance ratios. "penalty": on rollouts of `policy`, a loss with
    # a KL penalty is compared with the unbiased gradient without a penalty.
    question: str
    # True if any loss has a penalty.
    penalised: bool
    # KL(written_by || policy), in nats per token.
    kl: Interval
    # Effective share of the tokens, `(sum w)^2 / (count sum w^2)`, with their importance ratios as
    # weights w.
    effective_tokens: Interval
    # Effective share of the completions; a completion's weight is the product of its tokens'
    # ratios.
    effective_completions: Interval
    # Relative efficiency of each loss on these rollouts.
    losses: list[LossEfficiency]


def measure(study: PoolStudy) -> OffPolicy | None:
    """Measure the relative efficiency of each loss on completions scored by the current policy."""
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
    """Return sentences on the distance between the two policies and on relative efficiency."""
    efficiencies = efficiency_sentences(result.losses, _wrote(result), _compared(result))
    if result.question == "penalty":
        return efficiencies
    kl = result.kl
    return [
        f"The KL divergence between {result.written_by} and {result.policy} is {kl.estimate:.2g} "
        f"[{kl.low:.2g}, {kl.high:.2g}] nats per token. Importance weights reduce the effective "
        f"sample size to {share_text(result.effective_tokens)} of the tokens and "
        f"{share_text(result.effective_completions)} of the completions.",
        *efficiencies,
    ]


def tables(results_by_study: Mapping[Study, OffPolicy]) -> list[Table]:
    """Return tables of relative efficiency; the terminal shows only the first.

    The other tables, with the losses that published claims refer to and with all numbers, are only
    on the page.
    """
    shown = []
    for result in results_by_study.values():
        of_study = efficiency_tables(result.losses, _wrote(result), _notes(result))
        shown += [replace(table, page_only=place > 0) for place, table in enumerate(of_study)]
    return shown


def draw(folder: Path, results_by_study: Mapping[Study, OffPolicy], lines: Sequence[str]) -> None:
    """Plot each loss's relative efficiency against G and save it as `off_policy.{pdf,svg,png}`."""
    for result in results_by_study.values():
        title = f"written by {result.written_by}, current policy {result.policy}"
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
    return f" on rollouts that {result.written_by} wrote"


def _compared(result: OffPolicy) -> str:
    return {
        "lag": f"the unbiased gradient on rollouts that {result.policy} wrote",
        "gap": "the same loss with exact importance ratios",
        "penalty": "the unbiased gradient without a penalty",
    }[result.question]


def _notes(result: OffPolicy) -> list[str]:
    notes = [
        f"The relative efficiency compares a loss with {_compared(result)}: one rollout with the "
        "loss is worth this many rollouts of this alternative. The 95 % intervals are for new "
        "questions. All losses and G are measured on the same completions."
    ]
    if result.penalised:
        notes.append(
            f"The loss includes a KL penalty towards {result.reference}; the target is the "
            "gradient of the expected reward without the penalty."
        )
    return notes if result.question == "penalty" else [*notes, DRIFT_NOTE]


def joint_tables(results_by_study: Mapping[Study, OffPolicy]) -> list[Table]:
    """Return a table with a row per study and loss, at the measured G nearest to 8.

    The rows are sorted by KL divergence.
    """
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
        columns=["written by,\ncurrent policy", "nats\nper token",
                 "effective share by\ntokens, completions", "loss", "G", "efficiency",
                 "cosine with\nthe gradient", "share of\nnoise"],
        rows=rows,
        notes=[LAG_NOTE, DRIFT_NOTE, NOISE_NOTE, described(all_rows)],
        data=data,
        headings=True,
    )  # fmt: skip
    return [table]


def by_distance(results_by_study: Mapping[Study, OffPolicy]) -> dict[Study, OffPolicy]:
    """Sort studies by KL(policy that wrote the rollouts || current policy)."""
    return dict(sorted(results_by_study.items(), key=lambda item: item[1].kl.estimate))


def answer(results_by_study: Mapping[Study, OffPolicy]) -> str:
    """State each loss's relative efficiency at the smallest and the largest KL divergence."""
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
