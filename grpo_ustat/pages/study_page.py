"""The page of a study: claims and verdicts of a theorem, or errors of the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from grpo_ustat.config.gap import STUDIES
from grpo_ustat.pages.findings import study_answer
from grpo_ustat.pages.losses import loss_details, losses_tables
from grpo_ustat.pages.next_step import next_step
from grpo_ustat.pages.off_policy import off_policy_tables
from grpo_ustat.pages.recipes import recipe_table
from grpo_ustat.pages.reward_functions import reward_tables
from grpo_ustat.pages.symbols import baseline_word
from grpo_ustat.pages.tables import (
    Cell,
    Table,
    as_cell,
    interval_scope,
    open_interval,
    percent,
    rows_table,
    with_interval,
)
from grpo_ustat.pages.verdicts import verdicts_table
from grpo_ustat.runs.contents import row_interval
from grpo_ustat.runs.record import RunRecord, study_rollouts
from grpo_ustat.runs.result import AGREES, DISAGREES, OPEN

# Rows of a table on a page.
MOST_ROWS = 200
# p-values are raw, and corrected for the claims of a study.
CLAIM_COLUMNS = (
    "claim", "predicted", "measured", "95 % interval", "p (Holm)", "verdict", "severity",
)  # fmt: skip
FAMILY_RULE = (
    "p: the p-value of the hypothesis that the prediction holds; in brackets with Holm's "
    "correction "
    "over the claims of the study that have one. A claim disagrees if the corrected one is at most "
    "0.05, so that at most 5 % of studies without an error disagree. Intervals are of each claim "
    "by "
    "itself. Without p: enumerated, or not tested. Severity: what else would have agreed."
)
VERDICT_WORDS = {
    AGREES: "Theory and measurement agree.",
    DISAGREES: "Theory and measurement disagree in at least one claim.",
    OPEN: "Not enough data to say whether theory and measurement agree in every claim.",
}
TITLES = {kind: schema.title for kind, schema in STUDIES.items()}

RESAMPLING_COLUMNS = {
    "kept": "groups kept", "generated": "generated for a kept one",
    "break_even": "break-even share thrown away",
}  # fmt: skip
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


def gap_title(run: RunRecord) -> str:
    """Return the study's result, test problem and seed."""
    kind, bed = str(run.value("study.kind")), run.value("bed.name")
    return f"{TITLES.get(kind, kind)}, on {bed}, seed {run.value('seed')}"


def gap_answer(run: RunRecord) -> str:
    """Return the verdict and the study's answer."""
    if run.result is None:
        return "Unfinished: nothing is measured yet."
    return f"{VERDICT_WORDS[run.result['verdict']]} {run.result['answer']}"


def gap_facts(run: RunRecord) -> list[tuple[str, Cell]]:
    """Return test problem and cost."""
    if run.result is None:
        return []
    bed = "\n".join(f"{name}: {number_text(value)}" for name, value in run.result["bed"].items())
    rollouts = run.result["cost"]["rollouts"]
    return [
        ("Test problem", bed),
        ("Completions drawn", f"{rollouts:,}".replace(",", " ") if rollouts else "0: enumerated"),
    ]


def gap_tables(run: RunRecord) -> list[Table]:
    """Return tables of predictions beside measurements."""
    if run.result is None:
        return []
    columns = [*CLAIM_COLUMNS, "how it is decided"]
    rows = [[*claim_cells(claim), claim["how"]] for claim in run.result["claims"]]
    tables = [Table("Predicted and measured", columns, rows, [FAMILY_RULE])]
    numbers = run.csv_rows("curves.csv")
    if numbers:
        note = f"The first {MOST_ROWS} of {len(numbers)}, all in curves.csv."
        note = note if len(numbers) > MOST_ROWS else ""
        tables.append(rows_table("Numbers", numbers[:MOST_ROWS], note))
    return tables


def claim_cells(claim: dict[str, Any]) -> list[str]:
    """Return a claim's cells in `CLAIM_COLUMNS`; "" is missing.

    A page, a terminal and a report show the same cells.
    """
    return [
        claim["what"],
        number_text(claim["predicted"]),
        number_text(claim["measured"]),
        interval_text(claim),
        p_value_text(claim),
        claim["verdict"],
        claim.get("severity", ""),
    ]


def number_text(value: float | str) -> str:
    """Format a number with four significant digits; a text stays as it is.

    >>> number_text(0.123456), number_text("<= 1"), number_text(-0.0)
    ('0.1235', '<= 1', '0')
    """
    return value if isinstance(value, str) else f"{value + 0.0:.4g}"


def interval_text(claim: dict[str, Any]) -> str:
    """Format the interval of a claim; "" where it was enumerated."""
    if claim["low"] is None or claim["high"] is None:
        return ""
    return f"[{number_text(claim['low'])}, {number_text(claim['high'])}]"


def p_value_text(claim: dict[str, Any]) -> str:
    """Format the p-value of a claim, raw and with Holm's correction; "" where it has none.

    >>> p_value_text({"p_value": 0.0312, "holm_p": 0.312}), p_value_text({"p_value": None})
    ('0.0312 (0.312)', '')
    """
    if claim.get("p_value") is None:
        return ""
    return f"{claim['p_value']:.3g} ({claim.get('holm_p', claim['p_value']):.3g})"


def mse_title(run: RunRecord) -> str:
    """Return model, data set and seed."""
    names = (run.value(key) for key in ("model.name", "dataset.name", "seed"))
    return "Gradient MSE study of {} on {}, seed {}".format(*names)


def mse_answer(run: RunRecord) -> str:
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


def mse_next_step(run: RunRecord) -> str:
    """Return the command to type next; "" while the study is unfinished."""
    if run.result is None:
        return ""
    return next_step(run.result, run.config, run.folder)


def mse_facts(run: RunRecord) -> list[tuple[str, Cell]]:
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


def mse_tables(run: RunRecord) -> list[Table]:
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
    verdicts = verdicts_table(run.result)
    tables = [
        *([verdicts] if verdicts else []),
        *losses_tables(run.result),
        *loss_details(run.result),
        *off_policy_tables(run.result),
        *([_curves_table(run.result["curves"])] if run.result["curves"] else []),
        Table("Scaling law and Assumption 2", columns, rows, notes),
    ]
    tables += reward_tables(run.result)
    published = recipe_table(run.result)
    if published is not None:
        tables.append(published)
    tables.append(_noise_table(run.result["noise"]))
    if run.result.get("dynamic_sampling"):
        tables.append(dynamic_sampling_table(run.result["dynamic_sampling"]))
    if run.result.get("allocation"):
        tables.append(allocation_table(run.result["allocation"]))
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


def dynamic_sampling_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the cost of dynamic sampling at every G."""
    cells = [
        [str(row["group_size"]), *(open_interval(row, name) for name in RESAMPLING_COLUMNS)]
        for row in rows
    ]
    notes = [
        "Groups are drawn until enough have rewards that differ (DAPO). The gradient then has the "
        "right direction, and the length of the column generated. Per rollout it beats leaving "
        "zero-variance groups out, without new ones for them, only while it throws away less than "
        "the last column of its kept groups. In brackets 95 % intervals over prompts, of the last "
        "column 90 % at least.",
    ]
    return Table("Dynamic sampling", ["G", *RESAMPLING_COLUMNS.values()], cells, notes)


def allocation_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the error's change by unequal group sizes, see `estimators.allocation`."""
    sizes = list(dict.fromkeys(row["group_size"] for row in rows))
    cells = []
    for plan in dict.fromkeys(row["plan"] for row in rows):
        of_plan = {row["group_size"]: row for row in rows if row["plan"] == plan}
        cells.append([plan, *(_change_text(of_plan[size], "change") for size in sizes)])
    own = {row["group_size"]: row for row in rows if row["in_sample"] is not None}
    if own:
        changes = (percent(own[size]["in_sample"]) if size in own else "-" for size in sizes)
        cells.append(["the best sizes, in sample", *changes])
    notes = [
        "Error at the same number of rollouts over that of equal groups, less 1: planned from one "
        "half of the pool, judged on the other, both ways; at least 2 completions a prompt. In "
        "brackets 95 % intervals for other prompts, of all plans of a column together. In sample "
        "the plan follows the errors of its own estimates, so it saves less than that.",
    ]
    columns = ["plan", *(f"mean G = {size}" for size in sizes)]
    return Table("Unequal group sizes", columns, cells, notes)


def _change_text(row: dict[str, Any], name: str) -> str:
    """Format a change in percent with its interval; `-` where it is not known."""
    change, low, high = row_interval(row, name)
    if math.isnan(change):
        return "-"
    return f"{percent(change)} [{percent(low)}, {percent(high)}]"


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
