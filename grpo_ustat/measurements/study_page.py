"""The page of a study of the gradient's error."""

from __future__ import annotations

from typing import Any

from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.registry import OURS, shown
from grpo_ustat.measurements.registry import sentences as measured_sentences
from grpo_ustat.measurements.registry import tables as measured_tables
from grpo_ustat.pages.caveats import summary_and_warnings
from grpo_ustat.pages.findings import (
    WHY_FIXED_ROLLOUTS,
    assumption2_sentence,
    interval_note,
    study_answer,
)
from grpo_ustat.pages.next_step import next_step
from grpo_ustat.pages.run_page import RunView
from grpo_ustat.pages.symbols import baseline_word
from grpo_ustat.pages.tables import (
    Cell,
    Table,
    as_cell,
    interval_scope,
    number_text,
    open_interval,
    rows_table,
    with_interval,
)
from grpo_ustat.runs.record import RunRecord, study_rollouts

NOISE_COLUMNS = {
    "rollouts": "n_c, rollouts",
    "tokens": "n_c, tokens",
    "prompt_share": "from prompts",
}
# Quantities of the scaling law and of Assumption 2.
QUANTITIES = {
    "c1": "C1", "c2": "C2", "c3": "C3",
    "gstar": "G*, rollouts", "gstar_paper": "G*, as in the paper",
    "gstar_tokens": "G*, tokens",
    "corr": "corr(q, Z)", "a0": "A_0, vanilla (no baseline)", "a_v": "A_V, oracle",
    "a_bstar": "A_b*, best",
    "av_minus_a0": "A_V - A_0", "av_minus_abstar": "A_V - A_b*", "share": "(A_V - A_b*) / A_V",
    "crossover_group_size": "G from which GRPO beats vanilla (no baseline)",
}  # fmt: skip


def title(run: RunRecord) -> str:
    """Return model, data set and seed."""
    names = (run.value(key) for key in ("model.name", "dataset.name", "seed"))
    return "Gradient MSE study of {} on {}, seed {}".format(*names)


def answer(run: RunRecord) -> str:
    """Return the best G, the costs of its neighbours, and the share of a step that is noise."""
    if run.result is None:
        parts = (run.folder / "pool").glob("*.safetensors")
        scored = len({part.name.split("-")[0] for part in parts})
        questions = run.value("study.questions")
        return (
            f"Unfinished: completions of {scored} of {questions} questions are scored, no curve "
            "is drawn."
        )
    return study_answer(run.result, study_rollouts(run.config))


def following(run: RunRecord) -> str:
    """Return the command to type next; "" while the study is unfinished."""
    if run.result is None:
        return ""
    return next_step(run.result, run.config, run.folder)


def further_findings(study: Study) -> list[str]:
    """Return further findings, on Assumption 2 first; none where all rewards are equal."""
    result = study.run.final_result
    if result["assumption2"].get("corr") is None:
        return []
    sentence = assumption2_sentence(result)
    rest = [one for one in shown([study]) if not one.leads]
    return [*filter(None, [sentence]), *measured_sentences(study, rest)]


def facts(run: RunRecord) -> list[tuple[str, Cell]]:
    """Return settings and cost."""
    if run.result is None:
        return []
    result, value = run.result, run.value
    policy, metric, cost = (result.get(key) or {} for key in ("policy", "metric", "cost"))
    unjudged = sum(cost.get(key, 0) for key in ("judge_timeouts", "judge_failures"))
    return [
        (
            f"{policy['quantity'].capitalize()} of the policy",
            f"{with_interval(policy, 'mean_reward', 'mean_reward_')}, "
            f"{interval_scope(result['questions'])}",
        ),
        ("Mean length", f"{policy['mean_length']:.1f} tokens"),
        ("Questions", as_cell(result.get("questions"))),
        ("Completions a question", as_cell(result.get("pool_completions"))),
        ("Methods", ", ".join(map(str, value("study.methods") or ()))),
        *([("Parameters measured", f"{metric['parameters']}; {metric['norm']}"),
           ("Products between questions", as_cell(metric.get("between_questions")))]
          if metric else []),
        ("Sampling", f"temperature {value('temperature')}, at most "
                     f"{value('max_completion_length')} tokens"),
        ("Rollouts in all", as_cell(cost.get("rollouts"))),
        ("Tokens sampled", as_cell(cost.get("tokens"))),
        ("Answers not judged", unjudged),
    ]  # fmt: skip


def tables(run: RunRecord) -> list[Table]:
    """Return tables of curves, of the scaling law with Assumption 2, and of missing measurements.

    There are none where all rewards are equal.
    """
    if run.result is None or "equal_rewards" in run.result:
        return []
    estimates = run.result["scaling"] | run.result["assumption2"]
    rows = [
        [name, *(estimates.get(f"{key}{end}") for end in ("", "_low", "_high"))]
        for key, name in QUANTITIES.items()
        if key in estimates
    ]
    reasons = [run.result[key].get("reason") for key in ("scaling", "assumption2", "grad_sq")]
    notes = [f"95 % intervals {interval_scope(run.result['questions'])}."]
    notes += dict.fromkeys(reason for reason in reasons if reason)
    columns = ["quantity", "estimate", "low", "high"]
    study = Study(run)
    measured = shown([study])
    tables = [
        *measured_tables(study, [one for one in measured if one.leads]),
        *([_curves_table(run.result["curves"])] if run.result["curves"] else []),
        Table("Scaling law and Assumption 2", columns, rows, notes),
    ]
    tables.append(_noise_table(run.result["noise"]))
    tables += measured_tables(study, [one for one in measured if not one.leads])
    ratios = run.result.get("ratio_to_oracle")
    if ratios:
        ratio_rows = [
            row
            | {"ratio": with_interval(row, "ratio", "ratio_")}
            | {"baseline": baseline_word(row["baseline"]), "ratio_low": None, "ratio_high": None}
            for row in ratios
        ]
        note = "In brackets: 95 % intervals, paired."
        tables.append(rows_table("Error of the gradient over the oracle's", ratio_rows, note))
    if run.result.get("not_measured"):
        tables.append(rows_table("Not measured", run.result["not_measured"]))
    return tables


def _noise_table(noise: dict[str, Any]) -> Table:
    """Return a table of the noise scale at every G, and at the best in rollouts and in tokens."""
    best = noise["best"]
    rows = [
        [number_text(row["group_size"]), *(open_interval(row, name) for name in NOISE_COLUMNS)]
        for row in noise["curve"]
    ]
    if best["group_size"] is not None:
        size, size_tokens = best["group_size"], best["group_size_tokens"]
        sizes = f"G* = {size:.1f}" + (f", of tokens {size_tokens:.1f}" if size_tokens else "")
        rows.append([sizes, *(open_interval(best, name) for name in NOISE_COLUMNS)])
    notes = [
        "n_c: rollouts of a step (tokens, prompts read once a group) at which half of E||ghat||^2 "
        "is noise. leave_one_out, prompts drawn independently; in brackets 95 % intervals.",
        *([noise["reason"]] if "reason" in noise else []),
    ]
    return Table("Noise scale", ["G", *NOISE_COLUMNS.values()], rows, notes)


def _curves_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table with a row for every point; a column with one value becomes a note."""
    rows = [
        row
        | {"baseline": baseline_word(row["baseline"]), "mse": with_interval(row, "mse")}
        | {"low": None, "high": None}
        for row in rows
    ]
    axes = {"baseline", "group_size", "mse"}
    same = [key for key in rows[0] if key not in axes and len({row[key] for row in rows}) == 1]
    values = [
        f"{key.replace('_', ' ')}: {rows[0][key]}" for key in same if rows[0][key] is not None
    ]
    differing = [{key: value for key, value in row.items() if key not in same} for row in rows]
    note = f"Of all rows: {'; '.join(values)}. In brackets: 95 % intervals."
    return rows_table("Mean squared error of the gradient", differing, note)


def notes(run: RunRecord) -> list[str]:
    """Return findings beside the answer, each warning apart."""
    result = run.result or {}
    first, warnings = summary_and_warnings(result.get("summary", ""))
    dropped = result.get("left_out") or {}
    details = []
    if result and first != answer(run):
        study = Study(run)
        details = [
            *measured_sentences(study, [one for one in shown([study]) if one.leads]),
            *further_findings(study),
            f"{interval_note(result)} {WHY_FIXED_ROLLOUTS}",
            first,
        ]
    return [
        *details,
        *warnings,
        *(f"WARNING: {count} questions left out: {why}" for why, count in dropped.items()),
    ]


ERRORS_CAPTION = "Mean squared error of the gradient against group size"
COSTS_CAPTION = "What each group size costs at the same number of rollouts"


def _figures(leads: bool) -> dict[str, tuple[str, str, None]]:
    """Return the figures of our measurements, those that lead or the others."""
    figures = [one.figure for one in OURS if one.figure and one.leads == leads]
    return {figure.name: (figure.title, "", None) for figure in figures}


VIEW = RunView(
    title=title, answer=answer, facts=facts, tables=tables, notes=notes, following=following,
    figures={
        **_figures(leads=True),
        "scaling": (COSTS_CAPTION, "", None),
        **_figures(leads=False),
        "figure": (ERRORS_CAPTION, "Numbers:", "curves.csv"),
    },
)  # fmt: skip
