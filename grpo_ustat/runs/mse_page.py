"""What the page of a gradient-MSE study says: the answer, what was run, its tables."""

from __future__ import annotations

from typing import Any

from grpo_ustat.runs.contents import Contents
from grpo_ustat.runs.page import Cell, Table, as_cell
from grpo_ustat.runs.train_page import rows_table, with_interval

QUANTITIES = {  # of the scaling law and of Assumption 2
    "c1": "C1", "c2": "C2", "c3": "C3",
    "gstar": "G*, rollouts", "gstar_paper": "G*, as in the paper",
    "gstar_tokens": "G*, tokens", "gstar_seconds": "G*, seconds",
    "corr": "corr(q, Z)", "a0": "A_0, vanilla", "a_v": "A_V, oracle", "a_bstar": "A_b*, best",
    "av_minus_a0": "A_V - A_0", "av_minus_abstar": "A_V - A_b*",
    "crossover_group_size": "G from which GRPO beats vanilla",
}  # fmt: skip


def mse_title(run: Contents) -> str:
    """What was studied."""
    names = (run.value(key) for key in ("model.name", "dataset.name", "seed"))
    return "Gradient MSE study of {} on {}, seed {}".format(*names)


def mse_answer(run: Contents) -> str:
    """The best group size and which baseline wins, in one sentence."""
    if run.result is None:
        done, of = _questions_scored(run), run.value("study.questions")
        return f"Unfinished: completions of {done} of {of} questions are scored, no curve is drawn."
    scaling, found = run.result["scaling"], run.result["assumption2"]
    if found.get("corr") is None:
        return run.result["summary"].split(" WARNING: ")[0]
    return f"{_best_size(scaling)}; {_ordering(found)}."


def _best_size(scaling: dict[str, Any]) -> str:
    best = [scaling[f"gstar{end}"] for end in ("", "_low", "_high")]
    if None in best:
        return "The best group size G* has no finite interval"
    numbers = "{:.1f} [{:.1f}, {:.1f}]".format(*best)
    return f"At a fixed number of rollouts GRPO's best group size is G* = {numbers}"


def _ordering(found: dict[str, Any]) -> str:
    if found["av_minus_a0_low"] is None or found["av_minus_a0_high"] is None:
        return "which of vanilla and the oracle is better has no interval"
    if found["av_minus_a0_low"] > 0:
        return "vanilla beats the oracle and GRPO at every G"
    if found["av_minus_a0_high"] >= 0:
        return "which of vanilla and the oracle is better is not decided"
    at, low, high = (found[f"crossover_group_size{end}"] for end in ("", "_low", "_high"))
    ends = ", ".join("infinity" if end is None else f"{end:.1f}" for end in (low, high))
    beats = f"GRPO beats vanilla from G > {at:.1f} [{ends}] on"
    return f"the oracle beats vanilla at every G, and {beats}"


def _questions_scored(run: Contents) -> int:
    parts = (run.path / "pool").glob("*.safetensors")
    return len({part.name.split("-")[0] for part in parts})


def mse_facts(run: Contents) -> list[tuple[str, Cell]]:
    """Settings and cost."""
    if run.result is None:
        return []
    result, value = run.result, run.value
    policy, metric, cost = (result.get(key) or {} for key in ("policy", "metric", "cost"))
    unjudged = sum(cost.get(key, 0) for key in ("judge_timeouts", "judge_failures"))
    return [
        ("Accuracy of the policy", with_interval(policy, "accuracy", "accuracy_")),
        ("Mean length", f"{policy['mean_length']:.1f} tokens"),
        ("Questions", as_cell(result.get("questions"))),
        ("Completions a question", as_cell(result.get("pool_completions"))),
        ("Methods", ", ".join(map(str, value("study.methods") or ()))),
        ("Parameters measured", f"{metric.get('parameters')}; {metric.get('norm')}"),
        ("Products between questions", as_cell(metric.get("between_questions"))),
        ("Sampling", f"temperature {value('temperature')}, at most "
                     f"{value('max_completion_length')} tokens"),
        ("Rollouts in all", as_cell(cost.get("rollouts"))),
        ("Tokens sampled", as_cell(cost.get("tokens"))),
        ("Answers not judged", unjudged),
    ]  # fmt: skip


def mse_tables(run: Contents) -> list[Table]:
    """Curves, the scaling law with Assumption 2, and what was not measured."""
    if run.result is None:
        return []
    tables = [_curves(run.result["curves"])]
    found = run.result["scaling"] | run.result["assumption2"]
    rows = [
        [name, *(found.get(f"{key}{end}") for end in ("", "_low", "_high"))]
        for key, name in QUANTITIES.items()
        if key in found
    ]
    reasons = [run.result[key].get("reason") for key in ("scaling", "assumption2", "grad_sq")]
    note = ". ".join(dict.fromkeys(reason for reason in reasons if reason))
    columns = ["quantity", "estimate", "low", "high"]
    tables.append(Table("Scaling law and Assumption 2", columns, rows, note))
    if run.result.get("not_measured"):
        tables.append(rows_table("Not measured", run.result["not_measured"]))
    return tables


def _curves(rows: list[dict[str, Any]]) -> Table:
    """A row for every point; what is the same of all rows is said once, below them."""
    rows = [row | {"mse": with_interval(row, "mse"), "low": None, "high": None} for row in rows]
    keep = {"baseline", "group_size", "mse"}
    same = [key for key in rows[0] if key not in keep and len({row[key] for row in rows}) == 1]
    said = [f"{key.replace('_', ' ')}: {rows[0][key]}" for key in same if rows[0][key] is not None]
    shown = [{key: value for key, value in row.items() if key not in same} for row in rows]
    note = f"Of all rows: {'; '.join(said)}. In brackets: 95 % intervals."
    return rows_table("Mean squared error of the gradient", shown, note)
