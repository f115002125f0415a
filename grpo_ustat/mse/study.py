"""Study of the gradient error: from the configuration to `result.json`, tables and figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_ustat.config.mse import MseConfig
from grpo_ustat.config.reward_funcs import reward_names
from grpo_ustat.costs.cost import score_bytes, weight_bytes
from grpo_ustat.distributed.ranks import is_main, main_only, own_device
from grpo_ustat.distributed.signals import Stopped
from grpo_ustat.distributed.workers import WorkCost
from grpo_ustat.estimators.baselines import BASELINES
from grpo_ustat.estimators.closed_form import closed_form
from grpo_ustat.logs.pairing import other_policy_sentence
from grpo_ustat.measurements import error_figures, group_size
from grpo_ustat.measurements.base import PoolStudy, Study
from grpo_ustat.measurements.errors import CURVES, NOT_MEASURED
from grpo_ustat.measurements.losses import LOSSES
from grpo_ustat.measurements.next_step import next_step
from grpo_ustat.measurements.off_policy import OFF_POLICY
from grpo_ustat.measurements.registry import (
    MEASUREMENTS,
    draw_figures,
    measure_all,
    printed_tables,
    sentences,
)
from grpo_ustat.measurements.study_page import VIEW
from grpo_ustat.mse.equal_rewards import equal_rewards_result
from grpo_ustat.mse.import_rollouts import import_pool, logged_rollouts
from grpo_ustat.mse.monte_carlo import monte_carlo
from grpo_ustat.mse.off_policy import (
    check_tokenizers,
    rescored_pool,
    stored_completions,
)
from grpo_ustat.mse.pool import (
    EqualRewards,
    ModelFacts,
    build_part,
    build_pool,
    greedy_rewards,
    model_facts,
)
from grpo_ustat.mse.pool_store import PoolStore, draws_of, leave_sample, prompt_date, reuse_pool
from grpo_ustat.mse.result import closed_form_request, study_result
from grpo_ustat.mse.until_decided import pool_until_decided, study_order
from grpo_ustat.pages.caveats import summary_and_warnings
from grpo_ustat.pages.run_page import leave_page
from grpo_ustat.pages.tables import write_csv
from grpo_ustat.policy.chat import reads_clock, tell_date, warn_of_options
from grpo_ustat.policy.configured import (
    check_device,
    check_lengths,
    check_parameters,
    configured_task,
)
from grpo_ustat.policy.tokenizer import configured_tokenizer
from grpo_ustat.records import Prompt, ScorePool
from grpo_ustat.runs.contents import content_of
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.record import RunRecord
from grpo_ustat.runs.result import StudyResult
from grpo_ustat.tasks.base import tell_dropped, warn_of_prompt
from grpo_ustat.terminal.console import Console
from grpo_ustat.terminal.progress import waiting
from grpo_ustat.terminal.streams import wrapped

# Maximum number of sentences on losses that the terminal shows; the tables and the page show all.
MAX_LOSS_SENTENCES = 3


def run(config: MseConfig, folder: RunFolder) -> float | None:
    """Run the study, or show the finished study in the folder.

    Returns:
        Mean squared error of the first baseline at the first group size. None if all rewards are
        equal, or if `study.part` requests only a part of the pool. In the second case the run
        folder is removed, because the study has no result yet.
    """
    console = Console(quiet=not is_main())
    if config.study.part is not None:
        console.print(fill_part(config), soft_wrap=True)
        main_only(folder.leave)
        return None
    result = main_only(folder.result)
    if result is None:
        # Another process may have finished the study while this process waited for the lock.
        with folder.lock():
            result = main_only(folder.result) or _complete_study(config, folder)
    else:
        console.print(
            f"{folder.path} is complete and is shown again; on_existing=overwrite repeats the "
            "study.",
            soft_wrap=True,
        )
    view = Study(RunRecord(folder.path, result=result))
    answer = group_size.study_answer(view, config.study.rollouts)
    console.print(f"{wrapped(answer)}\n", soft_wrap=True)
    leading = [measurement for measurement in MEASUREMENTS if measurement.leads]
    if view.of(OFF_POLICY) is not None:
        leading.remove(LOSSES)
    for sentence in sentences(view, leading)[:MAX_LOSS_SENTENCES]:
        console.print(f"{wrapped(sentence)}\n", soft_wrap=True)
    rest = [measurement for measurement in MEASUREMENTS if not measurement.leads]
    first, last = (printed_tables(view, of) for of in (leading, rest))
    for table in filter(None, (group_size.extra_error_table(view), *first, *last)):
        console.print(table)
    if absent := dict.fromkeys(row.baseline for row in view.of(NOT_MEASURED) or []):
        text = f"Some errors of {', '.join(absent)} were not measured; the page has the reasons."
        console.print(wrapped(text))
    _, warnings = summary_and_warnings(view.result.summary)
    for sentence in warnings:
        console.print(wrapped(sentence), soft_wrap=True)
    console.print(f"next: {next_step(view)}", soft_wrap=True)
    console.print(f"page: {folder.path / 'report.html'}", soft_wrap=True)
    return result["curves"][0]["mse"] if view.of(CURVES) else None


def _complete_study(config: MseConfig, folder: RunFolder) -> dict[str, Any]:
    # Unusable settings raise an error before anything is sampled and before a run folder exists.
    if config.imports_pool:
        logged_rollouts(config)
    elif config.pool:
        main_only(PoolStore(Path(config.pool), draws_of(config)).open)
    check_device(own_device(config.launch.device))
    check_tokenizers(config)
    check_parameters(config.policy_options)
    main_only(folder.open)
    try:
        result = study(config, folder.path)
    except Stopped:
        if is_main():
            leave_page(folder, VIEW)
        raise
    content = content_of(result)
    if content.get("curves"):
        write_csv(folder, "curves.csv", content["curves"])
    if is_main():
        if content.get("curves"):
            view = Study(RunRecord(folder.path, result=content))
            error_figures.draw(folder.path, view)
            group_size.draw(folder.path, view)
            draw_figures(folder.path, view)
        leave_page(folder, VIEW, content)
    folder.finish(result)
    return content


def fill_part(config: MseConfig) -> str:
    """Fill the part `study.part` of the pool, and return text on the progress of the pool."""
    # `config.fills_part` guarantees this.
    assert config.pool is not None
    pool = Path(config.pool)
    main_only(PoolStore(pool, draws_of(config)).open)
    prompts, _ = _prompts(config, pool)
    complete, size = build_part(config, prompts, pool), config.budget.pool_completions
    text = (
        f"part {config.study.part} of {config.pool} is done: {complete} of {len(prompts)} "
        f"questions have {size} completions"
    )
    if complete < len(prompts):
        return f"{text}, and {len(prompts) - complete} remain for other parts"
    return f"{text}; run the same command without study.part to run the study"


def study(config: MseConfig, folder: Path) -> StudyResult:
    """Build the pool, make all measurements, and return the result.

    If all rewards are equal, the result contains no measurements.
    """
    left_out, rollouts, looks = {}, None, None
    pool_folder = folder / "pool"
    if config.pool and not config.imports_pool:
        pool_folder = Path(config.pool)
    try:
        if config.imports_pool:
            pool, pool_cost, prompts, logged = import_pool(config, pool_folder)
            rollouts = [logged.of_prompt(place) for place in range(len(prompts))]
            facts = _facts(config, prompts)
        else:
            with waiting(f"loading {config.dataset.name}", visible=is_main()):
                prompts, left_out = _prompts(config, pool_folder)
            facts = _facts(config, prompts)
            if not config.pool:
                size = config.budget.pool_completions
                root, draws = Path(config.output_root), draws_of(config)
                if line := main_only(reuse_pool, root, draws, pool_folder, prompts, size):
                    Console(quiet=not is_main()).print(line, soft_wrap=True)
            if config.study.until is None:
                pool, pool_cost = build_pool(config, prompts, pool_folder)
            else:
                pool, pool_cost, looks = pool_until_decided(config, prompts, pool_folder)
                prompts = prompts[: len(pool.rewards_PN)]
            pool = _with_greedy_rewards(config, prompts, pool)
    except EqualRewards as equal:
        main_only(
            leave_sample, config.sampling, equal.prompts, pool_folder, folder, config.imports_pool
        )
        return equal_rewards_result(config, equal, left_out)
    request = closed_form_request(config, pool, facts)
    curves_by_baseline, replicate_cost, rescored = {}, WorkCost(), None
    if "monte_carlo" in config.study.methods:
        curves_by_baseline, replicate_cost = monte_carlo(
            config.sampling, config.budget, config.compared_options, config.group_sizes, prompts
        )
    if config.measured.is_off_policy:
        size = pool.rewards_PN.shape[1]
        written = rollouts or stored_completions(config, prompts, pool_folder, size)
        rescored, further = rescored_pool(config, pool, prompts, written, folder)
        pool_cost += further
    pool_study = PoolStudy(
        pool=pool,
        group_sizes=config.group_sizes,
        rollouts=config.study.rollouts,
        draws=config.budget.loss_draws,
        seed=config.seed,
        losses=config.measured.first_update,
        max_completion_length=config.max_completion_length,
        reward_names=reward_names(config.reward_funcs),
        verdicts=config.study.verdicts,
        methods=config.study.methods,
        baselines=config.baselines,
        by_groups=config.baselines_by_groups if config.compares_by_groups else {},
        monte_carlo=curves_by_baseline,
        population=closed_form(pool, request),
        request=request,
        rescored=rescored,
    )
    measured = main_only(measure_all, pool_study)
    main_only(leave_sample, config.sampling, prompts, pool_folder, folder, config.imports_pool)
    rows = logged_rollouts(config) if config.imports_pool else []
    remarks = ""
    if rows and (other := other_policy_sentence(rows[0].path, config.model.model_name_or_path)):
        remarks += f" {other}"
    if rows and not rows[0].is_exact:
        remarks += (
            " WARNING: the log has only texts, which were tokenised again. Where the policy had "
            "split a text into other tokens, its score is of the wrong tokens, so this result is "
            "inexact."
        )
    return study_result(
        config, pool_study, facts, pool_cost, replicate_cost, left_out=left_out, remarks=remarks,
        measured=measured, looks=looks,
    )  # fmt: skip


def _facts(config: MseConfig, prompts: list[Prompt]) -> ModelFacts:
    one_completion = score_bytes(config.model, config.max_completion_length)
    with waiting(f"loading {config.model.name}", visible=is_main()):
        return model_facts(
            config.policy_options, prompts, weight_bytes(config.model), one_completion
        )


def _prompts(config: MseConfig, pool: Path | None = None) -> tuple[list[Prompt], dict[str, int]]:
    """Return the study's prompts, and the number of excluded questions by reason.

    An error is raised if there are too few prompts or if a prompt is too long. If the chat template
    writes a date, the date is the day on which the pool was started or, without a pool, today.
    """
    tokenizer, moment = configured_tokenizer(config.model), None
    if pool is not None and reads_clock(tokenizer):
        root = None if config.pool else Path(config.output_root)
        moment = main_only(prompt_date, pool, root, draws_of(config))
    task = configured_task(config.task_options, config.model, tokenizer, moment)
    prompts = task.prompts("study")
    if config.study.until is not None:
        prompts = study_order(config, prompts)
    prompts = prompts[: config.study.questions]
    tell_dropped(task)
    warn_of_prompt(config.task_options, prompts)
    warn_of_options(config.prompt, tokenizer)
    tell_date(moment)
    config.check_questions(len(prompts))
    check_lengths(config.policy_options, config.sampler_options, tokenizer, prompts)
    return prompts, task.dropped


def _with_greedy_rewards(config: MseConfig, prompts: list[Prompt], pool: ScorePool) -> ScorePool:
    """Return the pool, with greedy rewards if a baseline needs them."""
    if not any("greedy_P" in BASELINES[name].needs for name in config.baselines):
        return pool
    return replace(pool, greedy_P=greedy_rewards(config.sampling, prompts))
