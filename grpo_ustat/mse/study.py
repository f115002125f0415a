"""A gradient-MSE study from configuration to `result.json`, table and figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from grpo_ustat.config import MseConfig
from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.policy.lengths import check_lengths
from grpo_ustat.policy.loading import configured_task, configured_tokenizer
from grpo_ustat.ranks import is_main, on_main
from grpo_ustat.records import Prompt, ScorePool
from grpo_ustat.runs.curves import write_curves
from grpo_ustat.runs.figures import mse_figure, scaling_figure
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.meter import waiting
from grpo_ustat.runs.run_page import leave_page
from grpo_ustat.runs.summary import mse_tables, write_csv
from grpo_ustat.signals import Stopped
from grpo_ustat.study.closed_form import ClosedForm, closed_form
from grpo_ustat.study.imported import import_pool
from grpo_ustat.study.monte_carlo import monte_carlo
from grpo_ustat.study.pool import (
    ModelFacts,
    build_part,
    build_pool,
    greedy_rewards,
    model_facts,
)
from grpo_ustat.study.replay import replay, unmeasured
from grpo_ustat.study.result import (
    asked_of,
    closed_form_rows,
    monte_carlo_rows,
    points,
    replayed_rows,
    study_result,
)
from grpo_ustat.study.samples import leave_sample
from grpo_ustat.study.workers import Done, share
from grpo_ustat.study_checks import check_questions
from grpo_ustat.tasks.base import tell_dropped


def run(config: MseConfig, folder: RunFolder) -> float | None:
    """Run the study, or show the one that the folder already holds.

    Returns:
        The first curve's mean squared error at the first group size; None where `study.part` asked
        for a part of the pool alone, which leaves no run folder.
    """
    console = Console(quiet=not is_main())
    if config.study.part is not None:
        console.print(fill_part(config), soft_wrap=True, highlight=False, markup=False)
        on_main(folder.leave)
        return None
    result = on_main(folder.result)
    if result is None:
        with folder.held():  # which another process may have finished just now
            result = on_main(folder.result) or _made(config, folder)
    else:
        console.print(
            f"{folder.path} is complete; on_existing=overwrite runs it again.", markup=False
        )
    for table in mse_tables(result):
        console.print(table)
    for row in result["not_measured"]:
        console.print(f"{row['method']}, {row['setting']}: {row['reason']}", markup=False)
    console.print(result["summary"], highlight=False, markup=False)
    console.print(f"Wrote {folder.path}", soft_wrap=True, highlight=False, markup=False)
    return result["curves"][0]["mse"]


def _made(config: MseConfig, folder: RunFolder) -> dict[str, Any]:
    on_main(folder.open)
    try:
        result = study(config, folder.path)
    except Stopped:
        if is_main():
            leave_page(folder)
        raise
    write_csv(folder, "curves.csv", result["curves"])
    write_curves(folder, result["curves"])
    if is_main():
        mse_figure(folder.path, result)
        scaling_figure(folder.path, result)
        leave_page(folder, result)
    folder.finish(result)
    return result


def fill_part(config: MseConfig) -> str:
    """Fill one part of the pool, `study.part`; says what is there and what remains."""
    prompts, _ = _prompts(config)
    there, size = build_part(config, prompts, Path(config.pool)), config.budget.pool_completions
    text = (
        f"part {config.study.part} of {config.pool} is done: {there} of {len(prompts)} questions "
        f"have {size} completions"
    )
    if there < len(prompts):
        return f"{text}, {len(prompts) - there} remain for other parts"
    return f"{text}; the same command without study.part runs the study"


def study(config: MseConfig, folder: Path) -> dict[str, Any]:
    """Build the pool, run the methods, and say what they found."""
    left_out = {}
    if config.imports_pool:
        place = folder / "pool"
        pool, of_pool, prompts = import_pool(config, place)
        facts = _facts(config, prompts)
        asked = asked_of(config, pool, facts, of_pool)
        found = closed_form(pool, asked, config.study.interval)
    else:
        with waiting(f"loading {config.dataset.name}", shown=is_main()):
            prompts, left_out = _prompts(config)
        facts = _facts(config, prompts)
        place = Path(config.pool) if config.pool else folder / "pool"
        pool, found, of_pool = _pool(config, prompts, place, facts)
    on_main(leave_sample, config, prompts, place, folder)
    curves, of_replicates = [], Done()
    if "closed_form" in config.study.methods:
        curves += closed_form_rows(config, found)
    missing = []
    if "replay" in config.study.methods:
        replayed, missing = replay_rows(config, pool, found)
        curves += replayed
    if "monte_carlo" in config.study.methods:
        estimated, of_replicates = monte_carlo(config, prompts)
        curves += monte_carlo_rows(config, estimated, found, len(prompts))
    result = study_result(config, pool, found, curves, facts.parameters, of_pool, of_replicates)
    return result | {"left_out": left_out, "not_measured": missing}


def _facts(config: MseConfig, prompts: list[Prompt]) -> ModelFacts:
    with waiting(f"loading {config.model.name}", shown=is_main()):
        return model_facts(config, prompts)


def _prompts(config: MseConfig) -> tuple[list[Prompt], dict[str, int]]:
    """The questions to ask, and what was left out; refuses what cannot be asked of them."""
    tokenizer = configured_tokenizer(config)
    task = configured_task(config, tokenizer)
    prompts = task.prompts("study")[: config.study.questions]
    tell_dropped(task)
    check_questions(config, len(prompts))
    check_lengths(config, tokenizer, prompts)
    return prompts, task.dropped


def replay_rows(config: MseConfig, pool: ScorePool, found: ClosedForm) -> tuple[list, list]:
    """Rows of the replay method, shared out by rule and group size, and what has no row and why."""
    settings = points(config, len(pool.rewards_PN))
    items = [(name, size) for name in config.baselines for size in config.group_sizes]
    total = len(items) * config.budget.replay_draws
    parts, _ = share(
        _replay, items, config.launch.workers, "replay", total, config, pool, settings,
        unit="groups",
    )  # fmt: skip
    parts.sort(key=lambda part: items.index(part[0]))
    missing = [
        {"method": "replay", "baseline": name, "setting": setting, "num_prompts": count}
        | {"reason": unmeasured(name, setting, count)}
        for name in config.baselines
        for setting, count in settings
        if unmeasured(name, setting, count)
    ]
    rows = [row for _, replayed in parts for row in replayed]
    return replayed_rows(config, rows, found), missing


def _replay(items: list[tuple[str, int]], config: MseConfig, pool: ScorePool, settings) -> Iterator:
    options = {name: config.rules[name].options for name in config.baselines}
    draws = config.budget.replay_draws
    for name, size in items:
        arguments = (settings, draws, config.seed, config.study.interval)
        yield (name, size), replay(pool, [name], options, [size], *arguments)
        yield Done(rollouts=draws)


def _pool(
    config: MseConfig, prompts: list[Prompt], place: Path, facts: ModelFacts
) -> tuple[ScorePool, ClosedForm, Done]:
    """The pool and its closed forms; with target_halfwidth, extended until it is reached."""
    size, largest = config.budget.pool_completions, config.budget.max_pool_completions
    greedy_P = None
    if any("greedy_P" in BASELINES[name].needs for name in config.baselines):
        greedy_P = greedy_rewards(config, prompts)
    while True:
        pool, spent = build_pool(config, prompts, place, size)
        pool = replace(pool, greedy_P=greedy_P)
        asked = asked_of(config, pool, facts, spent)
        found = closed_form(pool, asked, config.study.interval)
        wanted = _wanted(found, config.target_halfwidth, size)
        if wanted <= size or size >= largest:
            return pool, found, spent
        size = min(wanted, largest)


def _wanted(found: ClosedForm, target: float | None, size: int) -> int:
    """Completions a question that should bring every curve's relative half-width to the target.

    A half-width falls like 1/sqrt(N); a tenth more makes up for the pilot's own error.
    """
    if target is None:
        return size
    points = [x for name, x in found.statistics.items() if name.startswith("mse/")]
    widths = [(x.high - x.low) / 2 / x.estimate if x.estimate > 0 else math.inf for x in points]
    worst = max(widths, default=0.0)
    if worst <= target:
        return size
    factor = min(4.0, 1.1 * (worst / target) ** 2) if math.isfinite(worst) else 4.0
    return int(np.ceil(size * max(factor, 1.2)))
