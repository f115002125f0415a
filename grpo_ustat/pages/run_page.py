"""The page of a run folder, `report.html`: the folder's content, finished or not.

It is made from files alone, so the same folder makes the same page wherever it is read.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo_ustat.config.reward_funcs import reward_text
from grpo_ustat.pages.caveats import summary_and_warnings
from grpo_ustat.pages.findings import (
    WHY_FIXED_ROLLOUTS,
    further_findings,
    interval_note,
    training_noise_sentence,
)
from grpo_ustat.pages.losses import losses_sentences
from grpo_ustat.pages.off_policy import off_policy_sentences
from grpo_ustat.pages.page import (
    NAME,
    Completions,
    Figure,
    Page,
    provenance_line,
    read_figure,
    render,
)
from grpo_ustat.pages.study_page import (
    gap_answer,
    gap_facts,
    gap_tables,
    gap_title,
    mse_answer,
    mse_facts,
    mse_next_step,
    mse_tables,
    mse_title,
)
from grpo_ustat.pages.symbols import ALARM_WORDS
from grpo_ustat.pages.tables import (
    Cell,
    Table,
    as_cell,
    open_interval,
    rows_table,
    with_interval,
)
from grpo_ustat.records import ACCURACY, MEAN_REWARD, joint_quantity
from grpo_ustat.runs import history
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.record import RunRecord
from grpo_ustat.runs.status import duration_text
from grpo_ustat.terminal.console import warn
from grpo_ustat.terminal.streams import best_size

# Keys of metrics.jsonl, and their columns.
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
ENDS = ("", "_low", "_high")
MONITORED = {
    "c1": "C1", "c2": "C2", "c3": "C3", "corr": "corr(q, Z)",
}  # fmt: skip
NOISE_COLUMNS = {
    "noise_scale": "noise scale, rollouts", "noise_share": "noise in a step",
    "prompt_share": "of it from prompts",
}  # fmt: skip
# Rows of the table of steps.
MOST_STEPS = 200
WORTHS_CAPTION = "What a rollout of each loss is worth"
OFF_POLICY_CAPTION = "What a rollout is worth that another policy wrote"
ERRORS_CAPTION = "Mean squared error of the gradient against group size"
COSTS_CAPTION = "What each group size costs at the same number of rollouts"
PUBLISHED_CAPTION = "What a rollout of each published recipe is worth"
PREDICTED_CAPTION = "Predictions are lines, measurements markers with 95 % intervals"
# Figures that our runs draw: title, caption, data.
FIGURES = {
    "train": {"learning": ("How training went", "Numbers:", "metrics.jsonl")},
    "mse": {
        "losses": (WORTHS_CAPTION, "", None),
        "off_policy": (OFF_POLICY_CAPTION, "", None),
        "scaling": (COSTS_CAPTION, "", None),
        "recipes": (PUBLISHED_CAPTION, "", None),
        "figure": (ERRORS_CAPTION, "Numbers:", "curves.csv"),
    },
    "gap": {"figure": (PREDICTED_CAPTION, "Numbers:", "curves.csv")},
}


def leave_page(folder: RunFolder, result: dict[str, Any] | None = None) -> None:
    """Write the run's `report.html`; a failure is a warning, and never costs the run.

    Args:
        result: content of `result.json`, which is written last of all; None while it is unfinished.
    """
    try:
        final = result and result | {"config_hash": folder.config_hash}
        folder.write(NAME, render(run_page(folder.path, final, datetime.now(UTC))))
    except Exception as error:
        # The page is a view of the run's files: no failure of it may end the run.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        warn(f"{folder.path / NAME} could not be made, the run goes on without it: {reason}")


def run_page(
    folder: Path, result: dict[str, Any] | None = None, now: datetime | None = None
) -> Page:
    """Return the page of a run folder of `train`, `mse` or `gap`.

    Args:
        result: content of `result.json`, where that is not written yet.
        now: the end of the launch under way; None where none is.
    """
    run = RunRecord(folder, result=result)
    title, answer, command_facts, tables = {
        "train": (train_title, train_answer, train_facts, train_tables),
        "mse": (mse_title, mse_answer, mse_facts, mse_tables),
        "gap": (gap_title, gap_answer, gap_facts, gap_tables),
    }[run.command]
    figures = _figures(run)
    rows, sentence = run.completions()
    final = run.result or {}
    if final.get("pool_completions"):
        sentence += (
            f" The pool holds {final['pool_completions']} of each of {final.get('questions')} "
            "questions."
        )
    facts: list[tuple[str, Cell]] = []
    if run.command != "gap":
        value = run.value
        model = f"{value('model.name')} ({value('model.model_name_or_path')})"
        facts = [
            ("Model", f"{model}, {value('model.dtype')} on {value('launch.device')}"),
            ("Questions of", str(value("dataset.name"))),
            ("Prompt", str(value("prompt.name"))),
            ("Seed", str(value("seed"))),
        ]
        functions, weights = value("reward_funcs"), value("reward_weights")
        if isinstance(functions, list) and isinstance(weights, list | None):
            facts.append(("Reward", reward_text(list(map(str, functions)), weights) or "task"))
    facts += command_facts(run)
    page_tables, provenance = tables(run), ""
    starts = [row for row in run.launches if row.get("event") == "start"]
    if timed := [row for row in starts if "time" in row]:
        last = timed[-1]
        provenance = provenance_line("started", last["time"], last.get("host"), last.get("command"))
    if len(starts) > 1:
        page_tables.append(rows_table("Starts and ends", run.launches))
    return Page(
        title=title(run),
        answer=answer(run),
        next_step=mse_next_step(run) if run.command == "mse" else "",
        notes=[*_result_notes(run), *run.notes],  # once all files are read
        facts=[*facts, *_provenance(run, now)],
        figures=figures,
        tables=page_tables,
        completions=Completions(rows, sentence) if rows else None,
        configurations={run.label: run.config},
        provenance=provenance,
    )


def _result_notes(run: RunRecord) -> list[str]:
    """Return the run's notes beside its answer; each warning apart."""
    result = run.result or {}
    if run.command == "gap":
        return [*filter(None, [result.get("statement")]), *result.get("notes", [])]
    first, warnings = summary_and_warnings(result.get("summary", ""))
    dropped = result.get("left_out") or {}
    details = []
    if run.command == "mse" and result and first != mse_answer(run):
        details = [
            *off_policy_sentences(result),
            *losses_sentences(result),
            *further_findings(result),
            f"{interval_note(result)} {WHY_FIXED_ROLLOUTS}",
            first,
        ]
    return [
        *details,
        *warnings,
        *(f"WARNING: {count} questions left out: {why}" for why, count in dropped.items()),
    ]


def _figures(run: RunRecord) -> list[Figure]:
    """Return every SVG of the folder, those that our runs draw first."""
    files = {file.stem: file for file in sorted(run.folder.glob("*.svg"))}
    figures, catalogue = [], FIGURES[run.command]
    for name in [name for name in catalogue if name in files] + sorted(set(files) - set(catalogue)):
        title, caption, data = catalogue.get(name, (name, "", None))
        if data is None or not (run.folder / data).is_file():
            caption, data = "", None
        figure, wrong = read_figure(files[name], title, caption, data)
        if figure is None:
            run.add_note(f"{name}.svg is not shown: {wrong}")
        else:
            figures.append(figure)
    return figures


def _provenance(run: RunRecord, now: datetime | None) -> list[tuple[str, Cell]]:
    """Return wall and worker time, starts, commit, versions and fingerprint."""
    result = run.result or {}
    cost = result.get("cost") or {}
    wall, own_time = history.wall_seconds(run.launches, now), []
    if "seconds" in result:
        own_time = [("Wall time of training steps", duration_text(result["seconds"]))]
    elif "seconds_generate" in cost:
        own_time = [
            (
                "Worker time, summed over workers",
                f"{cost['seconds_generate']:.1f} s generating, "
                f"{cost['seconds_score']:.1f} s scoring",
            )
        ]
    elif wall is None:
        wall = cost.get("seconds")
    starts = sum(row.get("event") == "start" for row in run.launches)
    resumed = [str(row.get("step")) for row in run.launches if row.get("event") == "resumed"]
    again = f"; went on from step {', '.join(resumed)}" if resumed else ""
    commit = run.commit or "not from a git repository"
    diff = run.code.get("diff") or ""
    if diff:
        commit += f", with {len(diff.splitlines())} lines of uncommitted changes"
    versions = run.code.get("versions") or {}
    return [
        ("Wall time", None if wall is None else duration_text(wall)),
        *own_time,
        ("Starts", f"{starts}{again}"),
        ("Commit", commit),
        ("Versions", "\n".join(f"{name} {number}" for name, number in versions.items())),
        ("Fingerprint", result.get("config_hash")),
        ("Folder", "/".join(run.folder.absolute().parts[-2:])),
    ]


def train_title(run: RunRecord) -> str:
    """Return model, data set, baseline and sizes."""
    names = [run.value(key) for key in ("model.name", "dataset.name", "baseline.name")]
    model, dataset, rule = names
    size, rollouts, seed = (run.value(key) for key in ("group_size", "budget.rollouts", "seed"))
    return f"Training of {model} on {dataset}: {rule}, G = {size}, n = {rollouts}, seed {seed}"


def train_answer(run: RunRecord) -> str:
    """Return the change of held-out accuracy or mean reward, in one sentence."""

    def mean(row: dict[str, Any]) -> str:
        return "{mean_reward:.3f} [{low:.3f}, {high:.3f}]".format(**row)

    progress = f"Unfinished, {steps_done(run)} of {run.value('max_steps')} steps are done"
    if not run.evals:
        return f"{progress}; nothing was evaluated yet."
    first, last = run.evals[0], run.evals[-1]
    name = last["quantity"]
    setting = (
        f"{last['step']} steps of {run.value('budget.rollouts')} rollouts, "
        f"G = {run.value('group_size')}"
    )
    if run.result is None:
        change = "was" if len(run.evals) == 1 else f"went from {mean(first)} to"
        return f"{progress}: held-out {name} {change} {mean(last)} after {setting}."
    gain, low, high = (run.result[f"gain{end}"] for end in ("", "_low", "_high"))
    return (
        f"Held-out {name} went from {mean(first)} to {mean(last)} in {setting} (paired "
        f"difference {gain:+.3f} [{low:+.3f}, {high:+.3f}]; the same {last['n']} questions, "
        f"{last['decoding']})."
    )


def train_facts(run: RunRecord) -> list[tuple[str, Cell]]:
    """Return settings and cost."""
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
        ("Rollouts a step", rollouts_per_step),
        ("Steps", f"{steps_done(run)} of {value('max_steps')}"),
        ("Optimizer", f"{value('optimizer.name')}, learning rate {value('learning_rate')}"),
        ("Sampling", f"temperature {value('temperature')}, at most "
                     f"{value('max_completion_length')} tokens"),
        ("Rollouts in all", as_cell(result.get("rollouts", last.get("rollouts")))),
        ("Tokens sampled", as_cell(tokens)),
        *([("G* of the gradient, latest", latest_gstar)] if latest_gstar else []),
        *([("Noise of a step", noise.removeprefix("Noise: "))] if noise else []),
        (
            "Alarms",
            ", ".join(f"{ALARM_WORDS.get(x, x)} in {n} steps" for x, n in alarms.items()) or "none",
        ),
        ("Checkpoints refused by the disk", as_cell(result.get("failed_saves", 0))),
    ]  # fmt: skip


def train_tables(run: RunRecord) -> list[Table]:
    """Return tables of evaluations and steps."""
    tables = []
    if run.eval_rows:
        name = joint_quantity(row.get("quantity", MEAN_REWARD) for row in run.eval_rows)
        pass_at = [key for key in run.eval_rows[0] if key.startswith("pass@") and name == ACCURACY]
        rows = [
            {
                "step": row.get("step"),
                "decoding": row.get("decoding"),
                name: with_interval(row, "mean_reward"),
                **{key: row.get(key) for key in pass_at},
                "questions": row.get("n"),
                "cut": row.get("clipped_ratio"),
                "no answer": row.get("extraction_failure_ratio"),
            }
            for row in run.eval_rows
        ]
        note = "95 % intervals generalising to new questions; cut: at max_completion_length."
        tables.append(rows_table(f"Held-out {name}", rows, note))
    monitored = [row for row in run.metrics if "monitor/gstar" in row]
    if monitored:
        places = spaced(len(monitored), MOST_STEPS)
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
        note = "Of the step's own groups, before its update; 95 % intervals over prompts."
        tables.append(rows_table("Best group size and error of the gradient", rows, note))
    if run.metrics:
        places = spaced(len(run.metrics), MOST_STEPS)
        steps = [run.metrics[place] for place in places]
        rows = [{METRICS[k]: row.get(k) for k in METRICS if k in row} for row in steps]
        note = f"{len(steps)} of {len(run.metrics)} steps; metrics.jsonl holds all of them."
        tables.append(rows_table("Steps", rows, note))
    return tables


def spaced(count: int, most: int) -> list[int]:
    """Return at most so many places of `count`, evenly spaced, with the first and the last.

    >>> spaced(3, 5), spaced(9, 3)
    ([0, 1, 2], [0, 4, 8])
    """
    number = min(count, most)
    return [round(i * (count - 1) / max(number - 1, 1)) for i in range(number)]


def steps_done(run: RunRecord) -> int:
    """Count the steps that have left a row."""
    last = run.metrics[-1]["step"] if run.metrics else 0
    return (run.result or {}).get("steps") or last
