"""Rollouts of earlier policies in several studies: relative efficiency against policy drift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_ustat.measurements.base import study_columns
from grpo_ustat.pages.losses import (
    NOISE_NOTE,
    by_loss,
    cosine_text,
    loss_words,
    nearest_usual,
    worth_text,
)
from grpo_ustat.pages.off_policy import DRIFT_NOTE, share_text
from grpo_ustat.pages.tables import Table
from grpo_ustat.runs.contents import row_interval
from grpo_ustat.runs.record import RunRecord

SHARES = {"effective_tokens": "ratios of tokens", "effective_completions": "of whole completions"}
LAG_NOTE = (
    "Worth: rollouts of an unbiased leave-one-out gradient at the same G, written by the policy at "
    "hand, that do as much as one of the loss that another policy wrote; 95 % intervals for new "
    "questions. Nats a token: the divergence of the policy at hand from the other."
)


def lag_table(studies: Sequence[RunRecord], study_keys: Sequence[str]) -> Table:
    """Make a table with a row per study and loss at G = 8 or the nearest, by policy distance.

    Args:
        studies: studies with rollouts of another policy.
        study_keys: configuration keys in which they differ.
    """
    rows, data = [], []
    for run in by_distance(studies):
        found: Mapping[str, Any] = run.final_result["off_policy"]
        for own in by_loss(found):
            distance = {key: x for key, x in found.items() if key not in ("losses", "policy")}
            study = study_columns(run, study_keys) | distance | {"at": found["policy"]}
            data += [study | row for row in own]
            measured = [row for row in own if "noise" in row]
            if not measured:
                continue
            row = nearest_usual(measured)
            rows.append([
                f"{found['written_by']}\n{found['policy']}",
                worth_text(row_interval(found, "kl"), "\n", 4),
                "\n".join(share_text(row_interval(found, key)) for key in SHARES),
                row["loss"],
                str(row["group_size"]),
                worth_text(row_interval(row, "worth"), "\n"),
                cosine_text(row, "\n"),
                worth_text(row_interval(row, "noise"), "\n"),
            ])  # fmt: skip
    words = {row["loss"]: loss_words(row) for row in data}
    described = "; ".join(f"{name}: {text}" for name, text in words.items())
    return Table(
        name="lag",
        title="Worth of a rollout that another policy wrote",
        columns=["written by\nat", "nats a token", "effective share by\ntokens, completions",
                 "loss", "G", "worth", "cos with the gradient", "share of noise"],
        rows=rows,
        notes=[LAG_NOTE, DRIFT_NOTE, NOISE_NOTE, f"{described}."],
        data=data,
        headings=True,
    )  # fmt: skip


def by_distance(studies: Sequence[RunRecord]) -> list[RunRecord]:
    """Sort studies by the distance of the policy at hand from the one that wrote the rollouts."""
    return sorted(studies, key=lambda run: run.final_result["off_policy"]["kl"])


def lag_answer(studies: Sequence[RunRecord]) -> str:
    """State the worth of a rollout of each loss at the nearest and at the farthest policy."""
    ends = by_distance(studies)
    lines: dict[str, list[str]] = {}
    for run in dict.fromkeys([ends[0], ends[-1]]):
        found: Mapping[str, Any] = run.final_result["off_policy"]
        for own in by_loss(found):
            measured = [row for row in own if "noise" in row]
            if measured:
                worth = worth_text(row_interval(nearest_usual(measured), "worth"))
                lines.setdefault(own[0]["loss"], []).append(f"{worth} at {found['policy']}")
    told = "; ".join(f"{loss} {', '.join(texts)}" for loss, texts in lines.items())
    return (
        f"A rollout that {ends[0].final_result['off_policy']['written_by']} wrote is worth: {told}."
    )
