"""The page of a study of the gradient's error."""

from __future__ import annotations

from grpo_ustat.measurements.assumption2 import rewards_vary
from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.group_size import WHY_FIXED_ROLLOUTS, interval_note, study_answer
from grpo_ustat.measurements.next_step import next_step
from grpo_ustat.measurements.registry import finished_study
from grpo_ustat.measurements.registry import sentences as measured_sentences
from grpo_ustat.measurements.registry import tables as measured_tables
from grpo_ustat.pages.caveats import summary_and_warnings
from grpo_ustat.pages.losses import loss_details, losses_sentences, losses_tables
from grpo_ustat.pages.off_policy import off_policy_sentences, off_policy_tables
from grpo_ustat.pages.recipes import recipe_table
from grpo_ustat.pages.run_page import RunView
from grpo_ustat.pages.tables import Cell, Table, closed_interval_text, interval_scope
from grpo_ustat.pages.verdicts import verdicts_table
from grpo_ustat.runs.record import RunRecord


def title(run: RunRecord) -> str:
    """Return model, data set and seed."""
    names = (run.value(key) for key in ("model.name", "dataset.name", "seed"))
    return "Gradient MSE study of {} on {}, seed {}".format(*names)


def answer(run: RunRecord) -> str:
    """Return the best G, the costs of its neighbours, and the share of a step that is noise."""
    study = finished_study(run)
    if study is None:
        parts = (run.folder / "pool").glob("*.safetensors")
        scored = len({part.name.split("-")[0] for part in parts})
        questions = run.value("study.questions")
        return (
            f"Unfinished: completions of {scored} of {questions} questions are scored, no curve "
            "is drawn."
        )
    return study_answer(study, study.rollouts)


def following(run: RunRecord) -> str:
    """Return the command to type next; "" while the study is unfinished."""
    study = finished_study(run)
    return "" if study is None else next_step(study)


def further_findings(study: Study) -> list[str]:
    """Return further findings; none where all rewards of every question are equal."""
    return measured_sentences(study) if rewards_vary(study) else []


def facts(run: RunRecord) -> list[tuple[str, Cell]]:
    """Return settings and cost."""
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
        ("Completions a question", result.pool_completions),
        ("Methods", ", ".join(map(str, value("study.methods") or ()))),
        *([("Parameters measured", f"{metric.parameters}; {metric.norm}"),
           ("Products between questions", metric.between_questions)]
          if metric else []),
        ("Sampling", f"temperature {value('temperature')}, at most "
                     f"{value('max_completion_length')} tokens"),
        ("Rollouts in all", cost.rollouts),
        ("Tokens sampled", cost.tokens),
        ("Answers not judged", cost.judge_timeouts + cost.judge_failures),
    ]  # fmt: skip


def tables(run: RunRecord) -> list[Table]:
    """Return tables of what was measured; none where all rewards are equal."""
    study = finished_study(run)
    if study is None or run.result is None or study.result.equal_rewards is not None:
        return []
    verdicts, published = verdicts_table(run.result), recipe_table(run.result)
    return [
        *([verdicts] if verdicts else []),
        *losses_tables(run.result),
        *loss_details(run.result),
        *off_policy_tables(run.result),
        *([published] if published else []),
        *measured_tables([study]),
    ]


def notes(run: RunRecord) -> list[str]:
    """Return findings beside the answer, each warning apart."""
    study = finished_study(run)
    if study is None:
        return []
    result = study.result
    first, warnings = summary_and_warnings(result.summary)
    details = []
    if first != answer(run):
        details = [
            *off_policy_sentences(run.final_result),
            *losses_sentences(run.final_result),
            *further_findings(study),
            f"{interval_note(study)} {WHY_FIXED_ROLLOUTS}",
            first,
        ]
    return [
        *details,
        *warnings,
        *(f"WARNING: {count} questions left out: {why}" for why, count in result.left_out.items()),
    ]


WORTHS_CAPTION = "What a rollout of each loss is worth"
OFF_POLICY_CAPTION = "What a rollout is worth that another policy wrote"
ERRORS_CAPTION = "Mean squared error of the gradient against group size"
COSTS_CAPTION = "What each group size costs at the same number of rollouts"
PUBLISHED_CAPTION = "What a rollout of each published recipe is worth"
VIEW = RunView(
    title=title, answer=answer, facts=facts, tables=tables, notes=notes, following=following,
    figures={
        "losses": (WORTHS_CAPTION, "", None),
        "off_policy": (OFF_POLICY_CAPTION, "", None),
        "scaling": (COSTS_CAPTION, "", None),
        "recipes": (PUBLISHED_CAPTION, "", None),
        "figure": (ERRORS_CAPTION, "Numbers:", "curves.csv"),
    },
)  # fmt: skip
