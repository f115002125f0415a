"""Theorem runs in a report: verdicts on theoretical results, claims, and figures."""

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
    "The verdict on a run is 'disagrees' if any of its claims disagrees after Holm's correction "
    "over the run's claims. If no claim disagrees but at least one is not decided, the verdict is "
    "'not decided'."
)
COUNT_COLUMNS = [name.replace(" ", "_") for name in COUNT_WORDS.values()]


def in_order(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the theorem runs in the order of the paper's theorems."""
    kinds = list(TITLES)
    tested = [run for run in runs if run.command == "gap"]
    return sorted(tested, key=lambda run: (*kinds, kind_of(run)).index(kind_of(run)))


def kind_of(run: RunRecord) -> str:
    """Return the key of the theorem or lemma that a run tests."""
    return run.config["theorem"]["kind"]


def theorems_table(tested: Sequence[RunRecord]) -> Table:
    """Return a table with each run's counts of claims by verdict and joint verdict.

    Args:
        tested: Theorem runs in order, finished or not.
    """
    rows, data = [], []
    for run, identity in zip(tested, _identities(tested), strict=True):
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
        problem = _problem_text(identity, "\n")
        rows.append([result, about or "-", problem, *cells, outcome["verdict"]])
        data.append(identity | outcome)
    return Table(
        name="theorems",
        title="Theoretical results and their tests",
        columns=["result", "about", "test problem", *COUNT_WORDS.values(), "verdict"],
        rows=rows,
        notes=[RULE, f"The columns {enumeration([*COUNT_WORDS.values()])} count claims."],
        data=data,
        headings=True,
        sentences=("about",),
    )


def claims_table(tested: Sequence[RunRecord]) -> Table:
    """Return a table with the prediction, measurement, interval and verdict of each claim.

    Args:
        tested: Finished theorem runs in order.
    """
    rows, data = [], []
    for run, identity in zip(tested, _identities(tested), strict=True):
        for claim in run.final_result["claims"]:
            rows.append([_theorem_name(identity), *(cell or "-" for cell in claim_cells(claim))])
            data.append(identity | {k: x for k, x in claim.items() if k != "alternatives"})
    return Table(
        name="claims",
        title="All claims, predicted and measured",
        columns=["theorem", *CLAIM_COLUMNS],
        rows=rows,
        notes=["A claim without an interval was decided by enumeration or by comparing a single "
               "number. p is the uncorrected p-value; the p-value in brackets has Holm's "
               "correction over the run's claims. A claim disagrees if the corrected p-value is "
               "at most 0.05. The column severity names other outcomes that would also have "
               "counted as agreement. The file claims.csv and the page of each run explain how a "
               "claim is decided."],
        data=data,
        headings=True,
        sentences=("claim", "severity"),
    )  # fmt: skip


def theorem_figures(tested: Sequence[RunRecord]) -> tuple[list[Figure], list[str]]:
    """Return the figures in the run folders, and a line for each figure that cannot be shown.

    Args:
        tested: Finished theorem runs in order.
    """
    figures, lines = [], []
    for run, identity in zip(tested, _identities(tested), strict=True):
        problem = _problem_text(identity, ", ")
        title = identity["result"] if problem == "-" else f"{identity['result']}, on {problem}"
        figure, wrong = read_figure(
            run.folder / "figure.svg", title, f"{PREDICTED_CAPTION}. {run.label}"
        )
        if figure is None:
            lines.append(f"damaged: {run.label}: figure.svg is not shown: {wrong}")
        else:
            figures.append(figure)
    return figures, lines


def verdict_sentence(tested: Sequence[RunRecord]) -> str:
    """Return a sentence with the number of runs that agree with theory, and names of other runs.

    Args:
        tested: Finished theorem runs in order.
    """
    kinds = [kind_of(run) for run in tested]
    # Names of the runs with each verdict.
    names: dict[str, list[str]] = {AGREES: [], DISAGREES: [], OPEN: []}
    for run, identity in zip(tested, _identities(tested), strict=True):
        several = kinds.count(identity["theorem"]) > 1
        name = _theorem_name(identity) if several else identity["result"].partition(", ")[0]
        names.setdefault(run.final_result["verdict"], []).append(name)
    claims = [claim["verdict"] for run in tested for claim in run.final_result["claims"]]
    agree = names[AGREES]
    if len(agree) == len(tested):
        return f"All {len(claims)} claims agree with theory ({enumeration(agree)})."
    parts = [f"{len(agree)} of {len(tested)} runs agree with theory in all their claims"]
    if names[DISAGREES]:
        parts.append(f"some claims of {enumeration(names[DISAGREES])} disagree")
    if names[OPEN]:
        parts.append(f"some claims of {enumeration(names[OPEN])} are not decided")
    return f"{'; '.join(parts)}. In total, {claims.count(AGREES)} of {len(claims)} claims agree."


def _identities(tested: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return the columns that identify each run; `differs_in` tells runs of one theorem apart."""
    identities = []
    for run in tested:
        same_kind = [other.keys for other in tested if kind_of(other) == kind_of(run)]
        keys = distinguishing_keys(same_kind, ("theorem.replicates",)) or distinguishing_keys(
            same_kind, ()
        )
        kind = kind_of(run)
        identities.append(
            {
                "result": TITLES.get(kind, kind),
                "theorem": kind,
                "problem": run.policy,
                "differs_in": key_label(run.keys, [x for x in keys if x != "theorem.problem"]),
                "run": run.label,
            }
        )
    return identities


def _problem_text(identity: dict[str, Any], separator: str) -> str:
    """Name the test problem and the difference from the theorem's other runs; "-" if empty."""
    return separator.join(filter(None, (identity["problem"], identity["differs_in"]))) or "-"


def _theorem_name(identity: dict[str, Any]) -> str:
    """Return the name of a run, e.g. `Theorem 8 (coins)`."""
    result, problem = identity["result"].partition(", ")[0], _problem_text(identity, ", ")
    return result if problem == "-" else f"{result} ({problem})"
