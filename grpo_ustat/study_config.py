"""Typed schemas of what only studies know; what is checked of them is in `study_checks`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from grpo_ustat.meanings import key
from grpo_ustat.study_checks import INTERVALS, METHODS, SETTINGS


@dataclass
class StudyBudget:
    """How many completions stand behind each number."""

    pool_completions: int = key(
        "of each question, N, scored: behind closed_form and replay", "completions"
    )
    max_pool_completions: int = key(
        "of each question, where target_halfwidth stops asking for more", "completions"
    )
    replay_draws: int = key("that replay draws from each question's pool", "groups")
    feature_sketch: int = key(
        "kept of each completion's score; models with no more parameters are kept in full",
        "numbers",
    )
    gradient_sketch: int = key(
        "kept of each question's gradient; models with no more parameters are kept in full",
        "numbers",
    )
    replicates: int = key("of the largest size that monte_carlo draws of each question", "groups")
    reference_completions: int = key(
        "of each question behind monte_carlo's reference gradient", "completions"
    )
    reference_blocks: int = key("that are independent, into which those are cut", "blocks")
    value_completions: int = key(
        "of each question, K, behind monte_carlo's V (oracle), b* (optimal) and running mean",
        "completions",
    )


@dataclass
class StudyConfig:
    """What is measured, and how."""

    methods: list[str] = key(
        "closed_form: exact formulas on the pool; replay: groups drawn from the pool, for every "
        "baseline; monte_carlo: fresh rollouts and real gradients, as the paper",
        choices=METHODS,
    )
    settings: list[str] = key("how a batch's questions are drawn", choices=SETTINGS)
    num_prompts: list[int] = key(
        "of a batch, B, in with_replacement and without_replacement", "questions"
    )
    interval: str = key(
        "completions: given the questions; questions: as a sample of questions", choices=INTERVALS
    )
    questions: int | None = key("of the study, the first so many; null: all", "questions")
    part: str | None = key(
        "such as 3/8: fill the 3rd of 8 parts of pool=DIR and end; null: the study"
    )

    @property
    def share(self) -> tuple[int, int]:
        """(k, n) of `part`, (1, 1) without; (0, 0) where it is not of the form k/n."""
        found = re.fullmatch(r"(\d+)/(\d+)", "1/1" if self.part is None else self.part)
        return (int(found[1]), int(found[2])) if found else (0, 0)
