"""What studies of theorems found: a verdict on each result, the claims behind it, the figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_ustat.reports.found import Run
from grpo_ustat.reports.series import label, telling
from grpo_ustat.reports.sheets import Sheet
from grpo_ustat.runs.gap_page import TITLES, interval_text, number_text
from grpo_ustat.runs.page import Figure
from grpo_ustat.runs.run_page import PREDICTED
from grpo_ustat.runs.svg import inlined
from grpo_ustat.runs.verdicts import AGREES, COUNTED, DISAGREES, OPEN, verdict_counts

UNFINISHED = "unfinished"
RULE = "A study disagrees where any of its claims does, and is else not decided where any is not."


def in_order(runs: Sequence[Run]) -> list[Run]:
    """Studies of theorems as the paper has their results."""
    places = list(TITLES)
    mine = [run for run in runs if run.entry == "gap"]
    return sorted(mine, key=lambda run: (*places, kind_of(run)).index(kind_of(run)))


def kind_of(run: Run) -> str:
    """Which result a study is of."""
    return run.config["study"]["kind"]


def theorems_sheet(runs: Sequence[Run]) -> Sheet:
    """A row per study: how many of its claims agree, the verdict, the answer.

    Args:
        runs: studies of theorems in order, finished or not.
    """
    of = _identities(runs)
    return Sheet(
        name="theorems",
        title="What is predicted, and whether it is measured",
        columns=["result", "about", "bed", *COUNTED.values(), "verdict", "answer"],
        rows=[_row(run, one) for run, one in zip(runs, of, strict=True)],
        notes=[RULE, f"{', '.join(COUNTED.values())}: claims."],
        data=[one | _found(run) for run, one in zip(runs, of, strict=True)],
        long=("about", "answer"),
    )


def _row(run: Run, of: dict[str, Any]) -> list[str]:
    found = _found(run)
    counts = ["-" if found[name] is None else str(found[name]) for name in _keys()]
    about = of["result"].partition(", ")[2] or "-"
    return [_head(of), about, _where(of, "\n"), *counts, found["verdict"], found["answer"]]


def _found(run: Run) -> dict[str, Any]:
    """A study's numbers, None where they are not there yet."""
    if run.result is None:
        said = {"verdict": UNFINISHED, "answer": run.lacking, "statement": None, "rollouts": None}
        return dict.fromkeys(_keys()) | said
    counts = verdict_counts(run.result["claims"])
    found = dict(zip(_keys(), counts.values(), strict=True))
    found |= {key: str(run.result[key]) for key in ("verdict", "answer", "statement")}
    return found | {"rollouts": run.result["cost"].get("rollouts")}


def _keys() -> list[str]:
    return [name.replace(" ", "_") for name in COUNTED.values()]


def claims_sheet(runs: Sequence[Run]) -> Sheet:
    """A row per claim: prediction, measurement, interval, verdict.

    Args:
        runs: finished studies of theorems in order.
    """
    pairs = [
        (one, claim)
        for run, one in zip(runs, _identities(runs), strict=True)
        for claim in run.result["claims"]
    ]
    return Sheet(
        name="claims",
        title="Every claim, predicted and measured",
        columns=["study", "claim", "predicted", "measured", "95 % interval", "verdict"],
        rows=[[_short(one), *_cells(claim)] for one, claim in pairs],
        notes=["Without an interval: enumerated, or compared as one number. How each is decided "
               "is said in claims.csv and on the study's own page."],
        data=[one | claim for one, claim in pairs],
        long=("claim",),
    )  # fmt: skip


def _cells(claim: dict[str, Any]) -> list[str]:
    numbers = number_text(claim["predicted"]), number_text(claim["measured"])
    return [claim["what"], *numbers, interval_text(claim) or "-", claim["verdict"]]


def study_figures(runs: Sequence[Run]) -> tuple[list[Figure], list[str]]:
    """The studies' own figures, and a line for each that cannot be shown.

    Args:
        runs: finished studies of theorems in order.
    """
    figures, lines = [], []
    for run, of in zip(runs, _identities(runs), strict=True):
        where = _where(of, ", ")
        title = of["result"] if where == "-" else f"{of['result']}, on {where}"
        try:
            svg = (run.folder / "figure.svg").read_text()
            inlined(svg, "figure")
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            lines.append(f"damaged: {run.label}: figure.svg is not shown: {reason}")
            continue
        caption = f"{PREDICTED}. {run.label}"
        figures.append(Figure(title, svg, caption))
    return figures, lines


def verdict_sentence(runs: Sequence[Run]) -> str:
    """How many studies agree, and which do not.

    Args:
        runs: finished studies of theorems in order.
    """
    claims = [claim["verdict"] for run in runs for claim in run.result["claims"]]
    agree = _named(runs, AGREES)
    if len(agree) == len(runs):
        return f"All {len(claims)} claims agree with theory ({_listed(agree)})."
    said = [f"{len(agree)} of {len(runs)} studies agree with theory in every claim"]
    if disagree := _named(runs, DISAGREES):
        said.append(f"some claims of {_listed(disagree)} disagree")
    if undecided := _named(runs, OPEN):
        said.append(f"some claims of {_listed(undecided)} are not decided")
    return f"{', '.join(said)}; {claims.count(AGREES)} of all {len(claims)} claims agree."


def _named(runs: Sequence[Run], verdict: str) -> list[str]:
    """The studies with a verdict: by their result, and its bed where several are of one."""
    kinds = [kind_of(run) for run in runs]
    return [
        _short(of) if kinds.count(of["study"]) > 1 else _head(of)
        for run, of in zip(runs, _identities(runs), strict=True)
        if run.result["verdict"] == verdict
    ]


def _listed(names: Sequence[str]) -> str:
    """Names as a sentence has them.

    >>> _listed(["a"]), _listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _identities(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What each study is of; `differs_in`: from others of the same result, beside its bed."""
    found = []
    for run in runs:
        alike = [other.keys for other in runs if kind_of(other) == kind_of(run)]
        asked = [key for key in telling(alike, but=()) if key != "bed.name"]
        bed = run.config["bed"]
        of = {"result": TITLES.get(kind_of(run), kind_of(run)), "study": kind_of(run)}
        of |= {"bed": None if bed.get("kind") == "none" else run.policy}
        found.append(of | {"differs_in": label(run.keys, asked), "run": run.label})
    return found


def _where(of: dict[str, Any], between: str) -> str:
    """Bed, and what else tells a study from another of its kind; - where there is neither."""
    return between.join(filter(None, (of["bed"], of["differs_in"]))) or "-"


def _short(of: dict[str, Any]) -> str:
    where = _where(of, ", ")
    return _head(of) if where == "-" else f"{_head(of)} ({where})"


def _head(of: dict[str, Any]) -> str:
    return of["result"].partition(", ")[0]
