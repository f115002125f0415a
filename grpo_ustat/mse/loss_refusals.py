"""Reasons why a study does not tell the worth of a rollout of a loss, in the study's fields."""

from __future__ import annotations

from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.estimators.losses import FROM_A_POOL, LossRow


def refusal_line(row: LossRow) -> str | None:
    """Return the reason of an absent worth; None where the loss is measured."""
    if row.reason is None:
        return None
    kind, needed, found = row.reason
    loss, size, rollouts = row.loss, row.group_size, row.rollouts
    rule = f"baseline {loss.rule}"
    if kind == "questions":
        few = "1 question gives" if found == 1 else f"{found} questions give"
        return f"{few} no interval: use study.questions={needed}"
    if kind == "rule reads more":
        missing = ", ".join(sorted(BASELINES[loss.rule].needs - FROM_A_POOL))
        return f"{rule} reads {missing}, which no pool of one policy has"
    if kind == "completions":
        return (
            f"groups of {size} need as many completions of each question, the pool has {found}: "
            f"use budget.pool_completions={needed}, or log larger groups"
        )
    if kind == "mixed questions":
        return (
            f"{found} questions have groups of {size} whose rewards differ: use {needed} or more "
            "of such"
        )
    if kind == "rule's prompts":
        return (
            f"{rule} needs {needed} prompts in an update, and study.rollouts={rollouts} in groups "
            f"of {size} has {found}"
        )
    if kind == "coupled questions":
        return (
            f"an update has {rollouts // size} questions whose rows are weighed together: batches "
            f"of so many need a study of {needed}, got {found}"
        )
    return {
        "rule remembers": f"{rule} remembers past batches, which a pool has none of",
        "rule's groups": f"{rule} needs groups of {needed} or more",
        "no multiple": f"study.rollouts={rollouts} is no multiple of {size}",
        "metrics": (
            "rows of several questions are weighed together, and each half has its own metric"
        ),
        "micro-batches": (
            f"micro-batches of {loss.micro_batch_size} do not divide {rollouts} rollouts"
        ),
    }[kind]
