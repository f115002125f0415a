"""Page of a study that measures the error of the gradient."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_ustat.measurements import group_size
from grpo_ustat.measurements.assumption2 import rewards_vary
from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.group_size import WHY_FIXED_ROLLOUTS, interval_note, study_answer
from grpo_ustat.measurements.next_step import next_step
from grpo_ustat.measurements.registry import MEASUREMENTS, finished_study
from grpo_ustat.measurements.registry import sentences as measured_sentences
from grpo_ustat.measurements.registry import tables as measured_tables
from grpo_ustat.pages.caveats import summary_and_warnings
from grpo_ustat.pages.run_page import RunView
from grpo_ustat.pages.tables import Cell, Table, closed_interval_text, interval_scope
from grpo_ustat.runs.record import RunRecord
from grpo_ustat.runs.study_parts import Look
from grpo_ustat.terminal.streams import percentage


def title(run: RunRecord) -> str:
    """Return a title with model, data set and seed."""
    names = (run.value(key) for key in ("model.name", "dataset.name", "seed"))
    return "Gradient MSE study of {} on {}, seed {}".format(*names)


def answer(run: RunRecord) -> str:
    """Return the best G, the extra errors of neighbouring G, and the noise share of a step."""
    study = finished_study(run)
    if study is None:
        parts = (run.folder / "pool").glob("*.safetensors")
        scored = len({part.name.split("-")[0] for part in parts})
        questions = run.value("study.questions") or run.value("dataset.study_size")
        most = "at most " * (run.value("study.until") is not None)
        return (
            f"Unfinished: completions of {scored} of {most}{questions} questions are scored; no "
            "curve has been drawn yet."
        )
    return study_answer(study, study.rollouts)


def following(run: RunRecord) -> str:
    """Return the suggested next command, or "" if the study is unfinished."""
    study = finished_study(run)
    return "" if study is None else next_step(study)


def further_findings(study: Study) -> list[str]:
    """Return sentences on further results; no sentences if each question's rewards are equal."""
    if not rewards_vary(study):
        return []
    return measured_sentences(
        study, [measurement for measurement in MEASUREMENTS if not measurement.leads]
    )


def facts(run: RunRecord) -> list[tuple[str, Cell]]:
    """Return the settings and costs of a study."""
    study, value = finished_study(run), run.value
    if study is None:
        return []
    result = study.result
    policy, metric, cost = result.policy, result.metric, result.cost
    return [
        (
            f"{policy.quantity.capitalize()} of the policy",
            f"{closed_interval_text(policy.mean_reward)}, {interval_scope(result.questions)}",
        ),
        ("Mean length", f"{policy.mean_length:.1f} tokens"),
        ("Questions", result.questions),
        ("Completions per question", result.pool_completions),
        ("Methods for the errors", ", ".join(map(str, value("study.methods") or ()))),
        *([("Parameters of the gradient", f"{metric.parameters}; {metric.norm}"),
           ("Inner products between questions", metric.between_questions)]
          if metric else []),
        ("Sampling", f"temperature {value('temperature')}, at most "
                     f"{value('max_completion_length')} tokens"),
        ("Completions sampled in total", cost.rollouts),
        ("Tokens sampled", cost.tokens),
        ("Answers that could not be judged", cost.judge_timeouts + cost.judge_failures),
    ]  # fmt: skip


def tables(run: RunRecord) -> list[Table]:
    """Return the tables of all measurements; no tables if all rewards are equal."""
    study = finished_study(run)
    if study is None or run.result is None or study.result.equal_rewards is not None:
        return []
    looks = [looks_table(study.result.looks)] if study.result.looks else []
    return [*measured_tables(study, MEASUREMENTS), *looks]


def looks_table(looks: Sequence[Look]) -> Table:
    """Return a table with a row per look at the data, for a study that drew until it decided."""
    rows = [
        [
            f"{look.questions} x {look.completions}",
            look.group_size,
            None if look.probability is None else f"{look.probability:.2f}",
            "not decided" if look.tolerance is None else f"within {percentage(look.tolerance)}",
            look.more_questions,
        ]
        for look in looks
    ]
    columns = [
        "questions x completions",
        "G",
        "probability",
        "decision",
        "further questions",
    ]
    return Table("The decision, look by look", columns, rows, [LOOKS_NOTE])


def notes(run: RunRecord) -> list[str]:
    """Return sentences shown beside the answer; each warning is a separate item."""
    study = finished_study(run)
    if study is None:
        return []
    result = study.result
    first, warnings = summary_and_warnings(result.summary)
    details = []
    if first != answer(run):
        details = [
            *measured_sentences(
                study,
                [measurement for measurement in MEASUREMENTS if measurement.leads],
            ),
            *further_findings(study),
            f"{interval_note(study)} {WHY_FIXED_ROLLOUTS}",
            first,
        ]
    return [
        *details,
        *warnings,
        *(
            f"WARNING: {count} questions were left out: {why}"
            for why, count in result.left_out.items()
        ),
    ]


LOOKS_NOTE = (
    "The data were analysed after each batch of questions (a look). The column probability is the "
    "probability that the error at this G is within 5 % of the smallest error. The column further "
    "questions is the number of additional questions with which half of all similar studies would "
    "decide."
)
ERRORS_CAPTION = "Mean squared error of the gradient against group size"
COSTS_CAPTION = "Extra gradient error of each group size at a fixed number of rollouts"


def _figures(leads: bool) -> dict[str, tuple[str, str, None]]:
    """Return the figures of the built-in measurements that lead the page, or of the others."""
    figures = [
        measurement.figure
        for measurement in MEASUREMENTS
        if measurement.figure and measurement.leads == leads
    ]
    return {figure.name: (figure.title, "", None) for figure in figures}


def overview(run: RunRecord) -> Table | None:
    """Return the table of extra errors of a finished study."""
    study = finished_study(run)
    return None if study is None else group_size.extra_error_table(study)


VIEW = RunView(
    title=title, answer=answer, facts=facts, tables=tables, notes=notes, following=following,
    overview=overview, lead="scaling",
    figures={
        **_figures(leads=True),
        "scaling": (COSTS_CAPTION, "", None),
        **_figures(leads=False),
        "figure": (ERRORS_CAPTION, "Numbers:", "curves.csv"),
    },
)  # fmt: skip
