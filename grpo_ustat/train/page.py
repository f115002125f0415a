"""Page of a training run: held-out results, metrics of steps, and the measured gradient error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_ustat.config.command_line import command_line
from grpo_ustat.pages.caveats import summary_and_warnings
from grpo_ustat.pages.learning import training_noise_sentence
from grpo_ustat.pages.run_page import RunView, spaced
from grpo_ustat.pages.symbols import ALARM_WORDS
from grpo_ustat.pages.tables import Cell, Table, as_cell, open_interval, rows_table, with_interval
from grpo_ustat.records import ACCURACY, MEAN_REWARD, joint_quantity
from grpo_ustat.runs.record import RunRecord
from grpo_ustat.terminal.streams import best_size

# Titles of the columns in the table of steps, by key of metrics.jsonl.
METRICS = {
    "step": "step",
    "reward": "reward",
    "frac_reward_zero_std": "zero-variance groups (frac_reward_zero_std)",
    "completions/mean_length": "mean length",
    "completions/clipped_ratio": "cut",
    "entropy": "entropy",
    "kl": "KL",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "num_tokens": "tokens so far",
    "step_time": "seconds",
}
# Endings of the keys of an estimate and of its interval's ends.
ENDS = ("", "_low", "_high")
# Titles of further columns in the table of the gradient error, by key without `monitor/`.
MONITORED = {
    "c1": "C1", "c2": "C2", "c3": "C3", "corr": "corr(q, Z)",
}  # fmt: skip
NOISE_COLUMNS = {
    "noise_scale": "noise scale, rollouts", "noise_share": "noise in a step",
    "prompt_share": "share of noise from prompts",
}  # fmt: skip
# Largest number of rows in the table of steps.
MAX_STEPS = 200


def title(run: RunRecord) -> str:
    """Return the page's title, which names the model, data set, baseline, G, n and seed."""
    names = [run.value(key) for key in ("model.name", "dataset.name", "baseline.name")]
    model, dataset, baseline = names
    size, rollouts, seed = (run.value(key) for key in ("group_size", "budget.rollouts", "seed"))
    return f"Training of {model} on {dataset}: {baseline}, G = {size}, n = {rollouts}, seed {seed}"


def answer(run: RunRecord) -> str:
    """Return the page's first sentence: the change of held-out accuracy or mean reward."""

    def mean(row: dict[str, Any]) -> str:
        return "{mean_reward:.3f} [{low:.3f}, {high:.3f}]".format(**row)

    progress = f"Unfinished ({steps_done(run)} of {run.value('max_steps')} steps done)"
    if not run.evals:
        return f"{progress}; no evaluation so far."
    first, last = run.evals[0], run.evals[-1]
    name = last["quantity"]
    setting = (
        f"{last['step']} steps of {run.value('budget.rollouts')} rollouts with "
        f"G = {run.value('group_size')}"
    )
    if run.result is None:
        change = "was" if len(run.evals) == 1 else f"went from {mean(first)} to"
        return f"{progress}: held-out {name} {change} {mean(last)} after {setting}."
    gain, low, high = (run.result[f"gain{end}"] for end in ("", "_low", "_high"))
    return (
        f"Held-out {name} went from {mean(first)} to {mean(last)} in {setting}. The paired "
        f"difference is {gain:+.3f} [{low:+.3f}, {high:+.3f}] on the same {last['n']} questions "
        f"({last['decoding']})."
    )


def facts(run: RunRecord) -> list[tuple[str, Cell]]:
    """Return the run's main settings and costs, as pairs of a name and a value."""
    result, value = run.result or {}, run.value
    size, rollouts = value("group_size"), value("budget.rollouts")
    rollouts_per_step = as_cell(rollouts)
    if isinstance(size, int) and isinstance(rollouts, int) and size > 0:
        rollouts_per_step = f"{rollouts} = {rollouts // size} prompts x G = {size}"
    last = run.metrics[-1] if run.metrics else {}
    noise = ""
    if isinstance(size, int) and isinstance(rollouts, int) and size > 1:
        noise = training_noise_sentence(run.metrics, size, rollouts)
    tokens = result.get("tokens", last.get("tokens"))
    if run.result is None:
        tokens = sum(row.get("tokens", 0) for row in run.metrics)
    alarms = result.get("alarms") or {}
    monitored = [row for row in run.metrics if "monitor/gstar" in row]
    latest_gstar = ""
    if monitored:
        size_text = best_size(*(monitored[-1].get(f"monitor/gstar{end}") for end in ENDS))
        latest_gstar = f"{size_text or 'not enough data'}, step {monitored[-1]['step']}"
    return [
        ("Objective", as_cell(value("objective.name"))),
        ("Baseline", as_cell(value("baseline.name"))),
        ("Rollouts per step", rollouts_per_step),
        ("Steps", f"{steps_done(run)} of {value('max_steps')}"),
        ("Optimizer", f"{value('optimizer.name')}, learning rate {value('learning_rate')}"),
        ("Sampling", f"temperature {value('temperature')}, at most "
                     f"{value('max_completion_length')} tokens"),
        ("Rollouts in total", as_cell(result.get("rollouts", last.get("rollouts")))),
        ("Tokens sampled", as_cell(tokens)),
        *([("G* of the latest monitored step", latest_gstar)] if latest_gstar else []),
        *([("Noise of a step", noise.removeprefix("Noise: "))] if noise else []),
        (
            "Alarms",
            ", ".join(f"{ALARM_WORDS.get(x, x)} in {n} steps" for x, n in alarms.items()) or "none",
        ),
        ("Checkpoints that could not be written", as_cell(result.get("failed_saves", 0))),
    ]  # fmt: skip


def tables(run: RunRecord) -> list[Table]:
    """Return the tables of evaluations, of the gradient error, and of steps, if there are data."""
    tables = []
    if run.eval_rows:
        tables.append(evaluation_table(run.eval_rows))
    monitored = [row for row in run.metrics if "monitor/gstar" in row]
    if monitored:
        places = spaced(len(monitored), MAX_STEPS)
        rows = [
            {
                "step": row["step"],
                "G*": best_size(*(row.get(f"monitor/gstar{end}") for end in ENDS))
                or "not enough data",
                "MSE of leave_one_out's gradient": row.get("monitor/mse"),
                **{
                    name: with_interval(row, f"monitor/{key}", f"monitor/{key}_")
                    for key, name in MONITORED.items()
                },
                **{
                    name: open_interval(row, f"monitor/{key}")
                    for key, name in NOISE_COLUMNS.items()
                },
            }
            for row in (monitored[place] for place in places)
        ]
        note = (
            "Each row is measured on the groups of one step, before its update. The column noise "
            "in a step is the share of the squared gradient norm that is noise. Brackets contain "
            "95 % intervals for new prompts."
        )
        tables.append(rows_table("Best group size and error of the gradient", rows, note))
    if run.metrics:
        places = spaced(len(run.metrics), MAX_STEPS)
        steps = [run.metrics[place] for place in places]
        rows = [{METRICS[k]: row.get(k) for k in METRICS if k in row} for row in steps]
        note = (
            f"The table shows {len(steps)} of {len(run.metrics)} steps. The file metrics.jsonl "
            "contains all steps."
        )
        tables.append(rows_table("Steps", rows, note))
    return tables


def evaluation_table(rows: Sequence[Mapping[str, Any]], all_pass_at: bool = True) -> Table:
    """Return a table of held-out accuracy, or mean reward, by step and decoding.

    Args:
        rows: rows of `eval.csv`.
        all_pass_at: True to show pass@k for every k, False to show it only for the largest k.
    """
    name = joint_quantity(row.get("quantity", MEAN_REWARD) for row in rows)
    pass_at = [key for key in rows[0] if key.startswith("pass@") and key[5:].isdigit()]
    pass_at = (pass_at if all_pass_at else pass_at[-1:]) if name == ACCURACY else []
    cells = [
        {
            "step": row.get("step"),
            "decoding": row.get("decoding"),
            name: with_interval(row, "mean_reward"),
            **{key: row.get(key) for key in pass_at},
            "questions": row.get("n"),
            "cut": row.get("clipped_ratio"),
            "no answer": row.get("extraction_failure_ratio"),
        }
        for row in rows
    ]
    note = (
        "Brackets contain 95 % intervals for new questions. The column cut is the share of "
        "completions that reached max_completion_length. The column no answer is the share of "
        "completions without a readable answer."
    )
    return rows_table(f"Held-out {name}", cells, note)


def following(run: RunRecord) -> str:
    """Return the command that assesses the group size, or "" if the run is unfinished."""
    return command_line("advise", str(run.folder)) if run.result else ""


def steps_done(run: RunRecord) -> int:
    """Return the number of steps taken."""
    last = run.metrics[-1]["step"] if run.metrics else 0
    return (run.result or {}).get("steps") or last


def notes(run: RunRecord) -> list[str]:
    """Return the warnings of the run, including one for each reason of left-out questions."""
    result = run.result or {}
    _, warnings = summary_and_warnings(result.get("summary", ""))
    dropped = result.get("left_out") or {}
    return [
        *warnings,
        *(f"WARNING: {count} questions left out: {why}" for why, count in dropped.items()),
    ]


VIEW = RunView(
    title=title, answer=answer, facts=facts, tables=tables, notes=notes, following=following,
    figures={"learning": ("How training went", "Numbers:", "metrics.jsonl")},
)  # fmt: skip
