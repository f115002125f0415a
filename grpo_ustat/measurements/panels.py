"""Titles of figure panels, and their arrangement for several studies."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from grpo_ustat.measurements.assumption2 import ASSUMPTION2
from grpo_ustat.measurements.base import Study
from grpo_ustat.pages.figures import panel_rows
from grpo_ustat.pages.tables import count_text


def study_title(study: Study) -> str:
    """Return the title of a single-study figure: policy, mean reward, correlation and pool size."""
    policy, corr = study.result.policy, study.need(ASSUMPTION2).corr
    relation = "all rewards of each question are equal"
    if corr.is_known:
        relation = f"corr(q, Z) = {corr.estimate:.2f}"
    return (
        f"{policy.name}: {policy.quantity} {policy.mean_reward.estimate:.2f}, {relation}\n"
        f"{pool_text(study)}"
    )


def panel_title(study: Study) -> str:
    """Return the title of one panel among several studies: policy, mean reward, data set, size."""
    run, policy = study.run, study.result.policy
    mean, low, high = policy.mean_reward
    seed = f", seed {run.config['seed']}" if run.config["seed"] else ""
    return (
        f"{run.policy}{seed}\n{policy.quantity} {mean:.3f} [{low:.3f}, {high:.3f}]\n"
        f"{run.dataset}: {pool_text(study)}"
    )


def pool_text(study: Study) -> str:
    """Describe the size of a study's pool."""
    result = study.result
    return f"{count_text(result.questions, 'question')} x {result.pool_completions} completions"


def panel_grid(studies: Iterable[Study]) -> list[list[Study]]:
    """Arrange studies in rows of panels, in order; each row shows a single data set."""
    by_dataset: dict[str | None, list[Study]] = {}
    for study in studies:
        by_dataset.setdefault(study.run.dataset, []).append(study)
    grid = []
    for of_dataset in by_dataset.values():
        remaining = iter(of_dataset)
        grid += [list(islice(remaining, count)) for count in panel_rows(len(of_dataset))]
    return grid
