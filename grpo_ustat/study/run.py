"""A gradient-MSE study from configuration to `result.json`, table and figure."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from grpo_ustat.config import CLOSED_FORMS, MseConfig
from grpo_ustat.runs.figures import mse_figure
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.summary import mse_tables, write_csv
from grpo_ustat.study.closed_form import closed_form
from grpo_ustat.study.monte_carlo import monte_carlo
from grpo_ustat.study.pool import build_pool
from grpo_ustat.study.result import closed_form_rows, monte_carlo_rows, study_result
from grpo_ustat.study.workers import Done
from grpo_ustat.tasks.registry import make_task


def run(config: MseConfig, folder: RunFolder) -> float | None:
    """Run the study, or show the one that the folder already holds.

    Returns:
        The first curve's mean squared error at the first group size.
    """
    console = Console()
    result = folder.result()
    if result is None:
        folder.open()
        result = study(config)
        write_csv(folder, "curves.csv", result["curves"])
        mse_figure(folder.path, result, config)
        folder.finish(result)
    else:
        console.print(
            f"{folder.path} is complete; on_existing=overwrite runs it again.", markup=False
        )
    for table in mse_tables(result):
        console.print(table)
    console.print(result["summary"], highlight=False, markup=False)
    console.print(f"Wrote {folder.path}", soft_wrap=True, highlight=False, markup=False)
    return result["curves"][0]["mse"]


def study(config: MseConfig) -> dict[str, Any]:
    """Build the pool, run the methods, and say what they found."""
    prompts = make_task(config).prompts("study")[: config.study.questions]
    pool, of_pool, parameters = build_pool(config, prompts)
    known = [name for name in config.baselines if name in CLOSED_FORMS]
    found = closed_form(pool, known, config.group_sizes, config.study.interval)
    curves, of_replicates = [], Done()
    if "closed_form" in config.study.methods:
        curves += closed_form_rows(config, found, len(prompts))
    if "monte_carlo" in config.study.methods:
        estimated, of_replicates = monte_carlo(config, prompts)
        curves += monte_carlo_rows(config, estimated, found, len(prompts))
    return study_result(config, pool, found, curves, parameters, of_pool, of_replicates)
