"""Errors of the gradient in studies: MSE against G, and at a fixed number of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_ustat.pages.symbols import baseline_word
from grpo_ustat.pages.tables import Table, count_text, interval_scope, three_digits, with_interval
from grpo_ustat.records import LEAST_QUESTIONS, joint_quantity
from grpo_ustat.runs.record import RunRecord, key_label
from grpo_ustat.terminal.streams import best_size

# Keys of a curve, beside its baseline.
CURVE_KEYS = ("method", "setting")
ENDS = ("", "_low", "_high")
# Scopes of intervals.
INTERVAL_WORDS = {
    "completions": "conditional on these questions",
    "questions": "generalising to new questions",
}
NEED_VALUES = ("oracle", "optimal")
SMALLEST_NOTE = "Bold: the least error of a line among unbiased rules that know no values"
ALIKE_NOTE = "underlined: its 95 % interval reaches that of the least"
# Baselines side by side on a terminal of 80 characters.
MOST_BASELINES = 4


def study_tables(result: dict[str, Any]) -> list[Table]:
    """Return one study's tables, each of a method and of at most `MOST_BASELINES` baselines.

    A table has a row per group size and a column per baseline.
    """
    kinds: dict[tuple, list[dict[str, Any]]] = {}
    for row in result["curves"]:
        kinds.setdefault(tuple(row[key] for key in CURVE_KEYS), []).append(row)
    tables = []
    for rows in kinds.values():
        names = list(dict.fromkeys(row["baseline"] for row in rows))
        for first in range(0, len(names), MOST_BASELINES):
            part = names[first : first + MOST_BASELINES]
            tables.append(_study_table(result, [r for r in rows if r["baseline"] in part]))
    return tables


def _study_table(result: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Table:
    policy, first, questions = result["policy"], rows[0], result["questions"]
    setting = f"averaged over {count_text(questions, 'question')} ({first['method']})"
    if first["setting"] == "with_replacement":
        setting = f"of {first['num_prompts'] * first['group_size']} rollouts of new questions"
    source = f"{result['pool_completions']} completions a question"
    if first["method"] == "monte_carlo":
        source = f"replicates of the largest G: {min(row['replicates'] for row in rows)}"
    unbiased = {row["baseline"]: row["unbiased"] for row in rows}
    cells = {(row["group_size"], row["baseline"]): mse_text(row) for row in rows}
    sizes = sorted({row["group_size"] for row in rows})
    return Table(
        title=(
            f"MSE of the gradient, {setting}\n"
            f"against the {first['target']}\n"
            f"policy {policy['name']}, {policy['quantity']} {policy['mean_reward']:.3f} "
            f"[{policy['mean_reward_low']:.3f}, {policy['mean_reward_high']:.3f}] "
            f"({interval_scope(questions)})"
        ),
        columns=["G", *(baseline_word(x) + " (biased)" * (not unbiased[x]) for x in unbiased)],
        rows=[[str(size), *(cells.get((size, x), "-") for x in unbiased)] for size in sizes],
        notes=[
            f"95 % intervals {INTERVAL_WORDS[first['interval']]}; {source}",
            *missing_numbers(result | {"curves": rows}),
        ],
    )


def mse_text(row: dict[str, Any]) -> str:
    """Format an error with its interval below it."""
    return (with_interval(row, "mse") or "-").replace(" ", "\n", 1)


def missing_numbers(result: dict[str, Any]) -> list[str]:
    """Return a line for every baseline without an error at some group sizes, with the reason.

    >>> curves = [{"baseline": "oracle", "group_size": g, "mse": None} for g in (2, 4)]
    >>> missing_numbers({"curves": curves})
    ['No error of oracle at G = 2, 4: result.json holds no number.']
    """
    sizes: dict[str, list[int]] = {}
    for row in result["curves"]:
        if row["mse"] is None:
            sizes.setdefault(row["baseline"], []).append(row["group_size"])
    return [
        f"No error of {baseline_word(name)} at G = {', '.join(map(str, dict.fromkeys(missing)))}: "
        "result.json holds no number."
        for name, missing in sizes.items()
    ]


def mse_table(studies: Sequence[RunRecord], study_keys: Sequence[str]) -> Table:
    """Return a table with a row per policy, kind of curve and group size, a column per baseline.

    Args:
        studies: finished ones.
        study_keys: keys by which they differ.
    """
    data = []
    for run in studies:
        result = run.final_result
        study = study_columns(run, study_keys) | {"seed": run.config["seed"]}
        study |= {key: result[key] for key in ("questions", "pool_completions")}
        names = ("quantity", *(f"mean_reward{end}" for end in ENDS))
        study |= {name: result["policy"][name] for name in names}
        data += [study | row for row in result["curves"]]
    names = list(dict.fromkeys(row["baseline"] for row in data))
    kinds: dict[tuple, list[dict[str, Any]]] = {}
    for row in data:
        kinds.setdefault((row["run"], *(row[key] for key in CURVE_KEYS)), []).append(row)
    several = [key for key in ("method", "setting") if len({row[key] for row in data}) > 1]
    rows, marks = [], {}
    for kind in kinds.values():
        first = kind[0]
        heading = (
            f"{first['policy']}\n{first['dataset']}\n"
            f"{first['questions']} x {first['pool_completions']}\n"
            f"{first['mean_reward']:.2f} "
            f"[{first['mean_reward_low']:.2f}, {first['mean_reward_high']:.2f}]"
            f"{''.join(f'{chr(10)}{first[key]}'.replace('_', ' ') for key in several)}"
        )
        cells = {(row["group_size"], row["baseline"]): mse_text(row) for row in kind}
        for size in sorted({row["group_size"] for row in kind}):
            of_size = [row for row in kind if row["group_size"] == size]
            for name, best in smallest(of_size).items():
                marks[len(rows), 2 + names.index(name)] = best
            rows.append([heading, str(size), *(cells.get((size, name), "-") for name in names)])
    notes = [_interval_note(studies), *_missing_points(studies), *missing_in(studies)]
    words = [SMALLEST_NOTE] * (True in marks.values()) + [ALIKE_NOTE] * (False in marks.values())
    legend = [f"{'; '.join(words)}."] if words else []
    return Table(
        name="mse",
        title="MSE of the gradient",
        columns=["policy", "G", *map(baseline_word, names)],
        rows=rows,
        notes=notes,
        data=data,
        figure_notes=notes,
        headings=True,
        marks=marks,
        latex_notes=[*notes, *legend],
    )


def missing_in(studies: Sequence[RunRecord]) -> list[str]:
    """Return lines on missing numbers, each with its study's name, see `missing_numbers`."""
    return [f"{run.label}: {line}" for run in studies for line in missing_numbers(run.final_result)]


def smallest(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Return the best unbiased baselines of one group size.

    They are the baseline of least error, True, and those whose interval reaches that of the least,
    False. Biased rules, whose error is their length, and rules that need the values of the
    questions do not take part.

    Errors whose intervals are apart are significantly different; those whose intervals meet may be
    so in a paired comparison.
    """
    own = [
        row
        for row in rows
        if row["unbiased"] and row["baseline"] not in NEED_VALUES and row["mse"] is not None
    ]
    if len(own) < 2:
        return {}
    least = min(own, key=lambda row: row["mse"])
    marks = {least["baseline"]: True}
    for row in own:
        if row is not least and row["low"] is not None and least["high"] is not None:
            marks |= {row["baseline"]: False} if row["low"] <= least["high"] else {}
    return marks


def scaling_table(studies: Sequence[RunRecord], study_keys: Sequence[str]) -> Table:
    """Return a table with a row per policy: the scaling law, G* and the crossover.

    The crossover is the group size at which GRPO passes vanilla (paper, section 6).

    Args:
        studies: finished ones.
        study_keys: keys by which they differ.
    """
    rows, data = [], []
    for run in studies:
        result = run.final_result
        policy, scaling, assumption = (result[k] for k in ("policy", "scaling", "assumption2"))
        rows.append([
            f"{run.policy}\n{run.dataset}",
            _estimate_text(policy, "mean_reward", 2),
            _estimate_text(assumption, "corr", 2),
            _estimate_text(assumption, "av_minus_a0", None),
            _estimate_text(assumption, "crossover_group_size", 1),
            _best_size_text(scaling),
        ])  # fmt: skip
        names = [f"{name}{end}" for name in ("c1", "c2", "c3", "gstar") for end in ENDS]
        study = study_columns(run, study_keys) | {name: scaling[name] for name in names}
        data += [study | point for point in scaling["curve"]]
    interval_note = f"95 % intervals {_scopes_text(studies)}, of one seed."
    law = "G* = 1 + sqrt(C3/C1), for every n; leave_one_out, questions drawn independently."
    crossover = (
        "Above the crossover G leave_one_out beats vanilla (no baseline). -: no finite number."
    )
    return Table(
        name="fixed_n",
        title="What each group size costs at the same number of rollouts",
        columns=[
            "policy",
            policies_quantity(studies),
            "corr(q, Z)",
            "A_V - A_0",
            "crossover G",
            "G*",
        ],
        rows=rows,
        notes=[law, crossover, interval_note],
        data=data,
        figure_notes=[f"Extra error over the best size that divides n. {interval_note}"],
        headings=True,
    )


def study_columns(run: RunRecord, study_keys: Sequence[str]) -> dict[str, Any]:
    """Return the columns of the CSV files that name the study of a row."""
    return {
        "run": run.label,
        "differs_in": key_label(run.keys, study_keys),
        "policy": run.policy,
        "dataset": run.dataset,
    }


def policies_quantity(studies: Sequence[RunRecord]) -> str:
    """Return the name of the policies' quantity, an accuracy or a mean reward."""
    return joint_quantity(run.final_result["policy"]["quantity"] for run in studies)


def _interval_note(studies: Sequence[RunRecord]) -> str:
    """Return a note on the scope of the intervals."""
    curves = [row for run in studies for row in run.final_result["curves"]]
    kinds = dict.fromkeys(INTERVAL_WORDS[row["interval"]] for row in curves)
    return (
        f"95 % intervals {' or '.join(kinds)}, of one seed; those of {policies_quantity(studies)} "
        f"{_scopes_text(studies)}."
    )


def _scopes_text(studies: Sequence[RunRecord]) -> str:
    """Describe intervals for new questions, where studies have enough of them and where not."""
    scopes = sorted({interval_scope(run.final_result["questions"]) for run in studies})
    few = f" (fewer than {LEAST_QUESTIONS})" * (len(scopes) > 1)
    return f"{' or '.join(scopes)}{few}"


def _missing_points(studies: Sequence[RunRecord]) -> list[str]:
    """List baselines and group sizes that one study has and another has not."""
    points = {
        run.label: {(row["baseline"], row["group_size"]) for row in run.final_result["curves"]}
        for run in studies
    }
    every = set().union(*points.values())
    return [
        f"Missing in {name}: "
        f"{', '.join(f'{baseline_word(b)} at G = {g}' for b, g in sorted(every - own))}."
        for name, own in points.items()
        if every - own
    ]


def _best_size_text(scaling: dict[str, Any]) -> str:
    """Format G* with its interval below it; "not decided" where any size may be the best."""
    best, low, high = (scaling[f"gstar{end}"] for end in ENDS)
    return (best_size(best, low, high) or "not decided").replace(" [", "\n[")


def _estimate_text(row: dict[str, Any], name: str, digits: int | None) -> str:
    """Format an estimate with its interval below it; null: `-`.

    Numbers have so many decimals, or three significant digits.
    """

    def text(value: float | None) -> str:
        if value is None:
            return "-"
        return three_digits(value) if digits is None else f"{value:.{digits}f}"

    value, low, high = (row.get(f"{name}{end}") for end in ENDS)
    if low is None:
        return f"{text(value)}\n-" if value is not None else "-"
    if value is None:
        return f"at least {text(low)}"
    return f"{text(value)}\n[{text(low)}, {'infinity)' if high is None else f'{text(high)}]'}"
