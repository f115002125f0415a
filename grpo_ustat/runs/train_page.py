"""What the page of a training run says: the answer, what was run, its tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_ustat.runs.contents import Contents
from grpo_ustat.runs.page import Cell, Table, as_cell

METRICS = {  # of metrics.jsonl
    "step": "step",
    "reward": "reward",
    "frac_reward_zero_std": "silent groups",
    "completions/mean_length": "mean length",
    "completions/clipped_ratio": "cut",
    "entropy": "entropy",
    "kl": "KL",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "num_tokens": "tokens so far",
    "step_time": "seconds",
}
MOST_STEPS = 200  # that the table of steps holds


def train_title(run: Contents) -> str:
    """What was trained."""
    names = [run.value(key) for key in ("model.name", "dataset.name", "baseline.name")]
    model, dataset, rule = names
    size, rollouts, seed = (run.value(key) for key in ("group_size", "budget.rollouts", "seed"))
    return f"Training of {model} on {dataset}: {rule}, G = {size}, n = {rollouts}, seed {seed}"


def train_answer(run: Contents) -> str:
    """What training did to held-out accuracy, in one sentence."""
    rows = first_decoding(run)
    asked, done = run.value("max_steps"), steps_done(run)
    begun = f"Unfinished, {done} of {asked} steps are done"
    if not rows:
        return f"{begun}; nothing was evaluated yet."
    first, last = rows[0], rows[-1]
    setting = f"rollouts, G = {run.value('group_size')}"
    setting = f"{last['step']} steps of {run.value('budget.rollouts')} {setting}"
    if run.result is None:
        said = "was" if len(rows) == 1 else f"went from {_accuracy(first)} to"
        return f"{begun}: held-out accuracy {said} {_accuracy(last)} after {setting}."
    gain = f"{_signed(run.result, 'gain')}; the same {last['n']} questions, {last['decoding']}"
    return (
        f"Held-out accuracy went from {_accuracy(first)} to {_accuracy(last)} in {setting} "
        f"(paired difference {gain})."
    )


def train_facts(run: Contents) -> list[tuple[str, Cell]]:
    """Settings and cost."""
    result, value = run.result or {}, run.value
    size, rollouts = value("group_size"), value("budget.rollouts")
    whole = isinstance(size, int) and isinstance(rollouts, int) and size > 0
    prompts = f"{rollouts // size} prompts x G = {size}" if whole else None
    spent = {key: result.get(key, _last(run.metrics, key)) for key in ("rollouts", "tokens")}
    if run.result is None:
        spent["tokens"] = sum(row.get("tokens", 0) for row in run.metrics)
    alarms = result.get("alarms") or {}
    return [
        ("Objective", as_cell(value("objective.name"))),
        ("Baseline", as_cell(value("baseline.name"))),
        ("Rollouts a step", f"{rollouts} = {prompts}" if prompts else as_cell(rollouts)),
        ("Steps", f"{steps_done(run)} of {value('max_steps')}"),
        ("Optimizer", f"{value('optimizer.name')}, learning rate {value('learning_rate')}"),
        ("Sampling", f"temperature {value('temperature')}, at most "
                     f"{value('max_completion_length')} tokens"),
        ("Rollouts in all", as_cell(spent["rollouts"])),
        ("Tokens sampled", as_cell(spent["tokens"])),
        ("Alarms", ", ".join(f"{name} in {n} steps" for name, n in alarms.items()) or "none"),
        ("Checkpoints refused by the disk", as_cell(result.get("failed_saves", 0))),
    ]  # fmt: skip


def train_tables(run: Contents) -> list[Table]:
    """Evaluations and steps."""
    tables = []
    if run.evals:
        note = "95 % intervals over questions; cut: at max_completion_length."
        tables.append(rows_table("Held-out accuracy", list(map(_evaluated, run.evals)), note))
    if run.metrics:
        shown = _spaced(run.metrics, MOST_STEPS)
        rows = [{METRICS[k]: row.get(k) for k in METRICS if k in row} for row in shown]
        note = f"{len(shown)} of {len(run.metrics)} steps; metrics.jsonl holds all of them."
        tables.append(rows_table("Steps", rows, note))
    return tables


def _evaluated(row: dict[str, Any]) -> dict[str, Any]:
    passed = {key: value for key, value in row.items() if key.startswith("pass@")}
    return {
        "step": row.get("step"),
        "decoding": row.get("decoding"),
        "accuracy": with_interval(row, "accuracy"),
        **passed,
        "questions": row.get("n"),
        "cut": row.get("clipped_ratio"),
        "no answer": row.get("extraction_failure_ratio"),
    }


def with_interval(row: dict[str, Any], key: str, prefix: str = "") -> str | None:
    """A number with its interval after it, in `<prefix>low` and `<prefix>high`."""
    value, *ends = (row.get(name) for name in (key, f"{prefix}low", f"{prefix}high"))
    if not isinstance(value, int | float):
        return None
    if None in ends:
        return f"{value:#.3g} (no interval)"
    return "{:#.3g} [{:#.3g}, {:#.3g}]".format(value, *ends)


def rows_table(title: str, rows: Sequence[dict[str, Any]], note: str = "") -> Table:
    """A table of rows; columns without any value are left out."""
    keys = dict.fromkeys(key for row in rows for key in row)
    kept = [key for key in keys if any(row.get(key) is not None for row in rows)]
    cells = [[as_cell(row.get(key)) for key in kept] for row in rows]
    return Table(title, [key.replace("_", " ") for key in kept], cells, note)


def first_decoding(run: Contents) -> list[dict[str, Any]]:
    """The evaluations by the first decoding listed."""
    rows = [row for row in run.evals if {"step", "accuracy", "low", "high", "n"} <= set(row)]
    return [row for row in rows if row.get("decoding") == rows[0].get("decoding")]


def steps_done(run: Contents) -> int:
    """How many steps have left a row."""
    return (run.result or {}).get("steps") or _last(run.metrics, "step") or 0


def _last(rows: Sequence[dict[str, Any]], key: str) -> Any:
    return rows[-1].get(key) if rows else None


def _spaced(rows: Sequence[Any], most: int) -> list[Any]:
    """At most so many rows, evenly spaced, with the first and the last."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def _accuracy(row: dict[str, Any]) -> str:
    return "{accuracy:.3f} [{low:.3f}, {high:.3f}]".format(**row)


def _signed(result: dict[str, Any], key: str) -> str:
    value, low, high = (result[key + end] for end in ("", "_low", "_high"))
    return f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"
