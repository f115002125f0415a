"""Studies of theorems together: a verdict on each result, the claims behind it, the figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_ustat.pages.claims import CLAIM_COLUMNS, TITLES, claim_cells
from grpo_ustat.pages.page import Figure, read_figure
from grpo_ustat.pages.run_page import PREDICTED_CAPTION
from grpo_ustat.pages.tables import Table, enumeration
from grpo_ustat.runs.record import (
    AGREES,
    COUNT_WORDS,
    DISAGREES,
    OPEN,
    RunRecord,
    distinguishing_keys,
    key_label,
    verdict_counts,
)

UNFINISHED = "unfinished"
RULE = (
    "A study disagrees if any of its claims does, after Holm's correction over its claims. If none "
    "disagrees but some claim is not decided, the study is not decided."
)
COUNT_COLUMNS = [name.replace(" ", "_") for name in COUNT_WORDS.values()]


def in_order(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the studies of theorems among the runs, in the paper's order."""
    kinds = list(TITLES)
    studies = [run for run in runs if run.command == "gap"]
    return sorted(studies, key=lambda run: (*kinds, kind_of(run)).index(kind_of(run)))


def kind_of(run: RunRecord) -> str:
    """Return the kind of a study, which names the theorem or lemma."""
    return run.config["study"]["kind"]


def theorems_table(studies: Sequence[RunRecord]) -> Table:
    """Make a table with a row per study: counts of its claims by verdict, its verdict and answer.

    Args:
        studies: studies of theorems in order, finished or not.
    """
    rows, data = [], []
    for run, identity in zip(studies, _identities(studies), strict=True):
        if run.result is None:
            outcome = dict.fromkeys(COUNT_COLUMNS) | {
                "verdict": UNFINISHED, "answer": run.unfinished, "statement": None, "rollouts": None
            }  # fmt: skip
        else:
            counts = verdict_counts([claim["verdict"] for claim in run.result["claims"]])
            outcome = dict(zip(COUNT_COLUMNS, counts.values(), strict=True))
            outcome |= {k: str(run.result[k]) for k in ("verdict", "answer", "statement")}
            outcome["rollouts"] = run.result["cost"].get("rollouts")
        cells = ["-" if outcome[name] is None else str(outcome[name]) for name in COUNT_COLUMNS]
        result, _, about = identity["result"].partition(", ")
        bed = _bed_text(identity, "\n")
        rows.append([result, about or "-", bed, *cells, outcome["verdict"], outcome["answer"]])
        data.append(identity | outcome)
    return Table(
        name="theorems",
        title="What is predicted, and whether it is measured",
        columns=["result", "about", "test problem", *COUNT_WORDS.values(), "verdict", "answer"],
        rows=rows,
        notes=[RULE, f"{', '.join(COUNT_WORDS.values())}: claims."],
        data=data,
        headings=True,
        sentences=("about", "answer"),
    )


def claims_table(studies: Sequence[RunRecord]) -> Table:
    """Make a table with a row per claim: prediction, measurement, interval, verdict.

    Args:
        studies: finished studies of theorems in order.
    """
    rows, data = [], []
    for run, identity in zip(studies, _identities(studies), strict=True):
        for claim in run.final_result["claims"]:
            rows.append([_study_name(identity), *(cell or "-" for cell in claim_cells(claim))])
            data.append(identity | {k: x for k, x in claim.items() if k != "alternatives"})
    return Table(
        name="claims",
        title="Every claim, predicted and measured",
        columns=["study", *CLAIM_COLUMNS],
        rows=rows,
        notes=["Without an interval: enumerated, or compared as one number. p: raw, in brackets "
               "with Holm's correction over the study's claims; a claim disagrees where that is at "
               "most 0.05. Severity: what else would have agreed. How each is decided is said in "
               "claims.csv and on the study's own page."],
        data=data,
        headings=True,
        sentences=("claim", "severity"),
    )  # fmt: skip


def study_figures(studies: Sequence[RunRecord]) -> tuple[list[Figure], list[str]]:
    """Return the studies' own figures, and a line for each that cannot be shown.

    Args:
        studies: finished studies of theorems in order.
    """
    figures, lines = [], []
    for run, identity in zip(studies, _identities(studies), strict=True):
        bed = _bed_text(identity, ", ")
        title = identity["result"] if bed == "-" else f"{identity['result']}, on {bed}"
        figure, wrong = read_figure(
            run.folder / "figure.svg", title, f"{PREDICTED_CAPTION}. {run.label}"
        )
        if figure is None:
            lines.append(f"damaged: {run.label}: figure.svg is not shown: {wrong}")
        else:
            figures.append(figure)
    return figures, lines


def verdict_sentence(studies: Sequence[RunRecord]) -> str:
    """State how many studies agree, and which do not.

    Args:
        studies: finished studies of theorems in order.
    """
    kinds = [kind_of(run) for run in studies]
    # Names of studies by verdict.
    names: dict[str, list[str]] = {AGREES: [], DISAGREES: [], OPEN: []}
    for run, identity in zip(studies, _identities(studies), strict=True):
        several = kinds.count(identity["study"]) > 1
        name = _study_name(identity) if several else identity["result"].partition(", ")[0]
        names.setdefault(run.final_result["verdict"], []).append(name)
    claims = [claim["verdict"] for run in studies for claim in run.final_result["claims"]]
    agree = names[AGREES]
    if len(agree) == len(studies):
        return f"All {len(claims)} claims agree with theory ({enumeration(agree)})."
    parts = [f"{len(agree)} of {len(studies)} studies agree with theory in every claim"]
    if names[DISAGREES]:
        parts.append(f"some claims of {enumeration(names[DISAGREES])} disagree")
    if names[OPEN]:
        parts.append(f"some claims of {enumeration(names[OPEN])} are not decided")
    return f"{', '.join(parts)}; {claims.count(AGREES)} of all {len(claims)} claims agree."


def _identities(studies: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Identify each study; `differs_in` separates studies of the same result and test problem."""
    identities = []
    for run in studies:
        same_kind = [other.keys for other in studies if kind_of(other) == kind_of(run)]
        keys = distinguishing_keys(same_kind, ("study.replicates",)) or distinguishing_keys(
            same_kind, ()
        )
        kind = kind_of(run)
        identities.append(
            {
                "result": TITLES.get(kind, kind),
                "study": kind,
                "bed": run.policy,
                "differs_in": key_label(run.keys, [key for key in keys if key != "bed.name"]),
                "run": run.label,
            }
        )
    return identities


def _bed_text(identity: dict[str, Any], separator: str) -> str:
    """Name the test problem and the difference from other studies of its kind; "-" without both."""
    return separator.join(filter(None, (identity["bed"], identity["differs_in"]))) or "-"


def _study_name(identity: dict[str, Any]) -> str:
    """Name a study, as in `Theorem 8 (coins)`."""
    result, bed = identity["result"].partition(", ")[0], _bed_text(identity, ", ")
    return result if bed == "-" else f"{result} ({bed})"
