"""Rollouts of earlier policies in several studies: worth against how far the policy has moved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import PercentFormatter

from grpo_ustat.pages.figures import FONTS, legend_label, line_style, note, plt, save
from grpo_ustat.pages.gradient_error import study_columns
from grpo_ustat.pages.losses import (
    NOISE_NOTE,
    by_loss,
    cosine_text,
    loss_words,
    nearest_usual,
    worth_text,
)
from grpo_ustat.pages.off_policy import DRIFT_NOTE, share_text
from grpo_ustat.pages.tables import Table, enumeration, row_interval
from grpo_ustat.runs.record import RunRecord

SHARES = {"effective_tokens": "ratios of tokens", "effective_completions": "of whole completions"}
LAG_NOTE = (
    "Worth: rollouts of an unbiased leave-one-out gradient at the same G, written by the policy at "
    "hand, that do as much as one of the loss that another policy wrote; 95 % intervals for new "
    "questions. Nats a token: the divergence of the policy at hand from the other."
)
FIGURE_NOTES = (
    "Bars: 95 % intervals for new questions. Losses stand side by side.",
    "A loss has no marker where its worth is not decided.",
)
APART = 1.03  # of the distances at which losses stand side by side


def lag_table(studies: Sequence[RunRecord], study_keys: Sequence[str]) -> Table:
    """A row per study and loss at G = 8 or the nearest, by the distance of the policies.

    Args:
        studies: with rollouts of another policy.
        study_keys: by which they differ.
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
        figure_notes=list(FIGURE_NOTES),
        headings=True,
    )  # fmt: skip


def by_distance(studies: Sequence[RunRecord]) -> list[RunRecord]:
    """Studies by how far the policy at hand is from the one that wrote their rollouts."""
    return sorted(studies, key=lambda run: run.final_result["off_policy"]["kl"])


def lag_figure(folder: Path, name: str, studies: Sequence[RunRecord], notes: Sequence[str]) -> None:
    """Worth of each loss, and effective shares below, against the distance of the policies;
    `<name>.{pdf,svg,png}`.
    """
    ordered = [run.final_result["off_policy"] for run in by_distance(studies)]
    points: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
    for found in ordered:
        for rows in by_loss(found):
            measured = [row for row in rows if "noise" in row]
            if measured:
                points.setdefault(rows[0]["loss"], []).append(
                    (found["kl"], nearest_usual(measured))
                )
    with plt.rc_context(FONTS):
        figure, (axes, below) = plt.subplots(
            2, 1, figsize=(6.4, 5.6), layout="constrained", sharex=True, height_ratios=(2, 1)
        )
        most = 1.0
        for place, (loss, line) in enumerate(points.items()):
            known = [(x, row_interval(row, "worth")) for x, row in line]
            known = [(x, worth) for x, worth in known if math.isfinite(worth.estimate)]
            colour, marker = line_style(place)
            aside = APART ** (place - (len(points) - 1) / 2)
            xs = [x * aside for x, _ in known]
            axes.plot(xs, [worth.estimate for _, worth in known], color=colour, marker=marker,
                      markersize=4, linewidth=0.6, label=legend_label(loss))  # fmt: skip
            axes.vlines(xs, [worth.low for _, worth in known], [
                min(worth.high, 10 * worth.estimate) for _, worth in known
            ], color=colour, linewidth=1.2, alpha=0.6)  # fmt: skip
            most = max([most, *(min(worth.high, 1.5 * worth.estimate) for _, worth in known)])
        axes.axhline(1.0, color="black", linestyle="--", linewidth=1)
        axes.set_ylim(0, 1.05 * most)
        axes.set_ylabel("worth of a rollout, in unbiased\nones of the policy at hand")
        axes.set_title(
            f"written by {enumeration([*dict.fromkeys(found['written_by'] for found in ordered)])}",
            fontsize=9, loc="left",
        )  # fmt: skip
        axes.legend(frameon=False, fontsize=8)
        distances = [found["kl"] for found in ordered]
        for key, (label, style) in zip(
            SHARES, zip(SHARES.values(), ("-", "--"), strict=True), strict=True
        ):
            shares = [row_interval(found, key) for found in ordered]
            below.plot(distances, [x.estimate for x in shares], style, color="black", marker=".",
                       linewidth=1, label=label)  # fmt: skip
            below.vlines(distances, [x.low for x in shares], [min(1.0, x.high) for x in shares],
                         color="black", linewidth=1, alpha=0.5)  # fmt: skip
        below.set_ylim(0, 1.05)
        below.yaxis.set_major_formatter(PercentFormatter(1.0))
        below.set_ylabel("effective share")
        below.set_xlabel("nats a token between the two policies")
        if min(distances) > 0:
            below.set_xscale("log")
        below.legend(frameon=False, fontsize=8)
        for one in (axes, below):
            one.grid(alpha=0.3, linewidth=0.5)
        note(figure, notes, 6.4)
        save(figure, folder, name)


def lag_answer(studies: Sequence[RunRecord]) -> str:
    """What a rollout of each loss is worth at the nearest and at the farthest policy."""
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
