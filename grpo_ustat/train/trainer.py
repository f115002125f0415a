"""Training loop: each step samples completions, computes rewards and advantages, and updates."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import numpy as np

from grpo_ustat.config.command_line import command_line
from grpo_ustat.config.reward_funcs import reward_names
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.config.train import TrainConfig
from grpo_ustat.distributed.ranks import is_main, main_only, name_lost_ranks
from grpo_ustat.distributed.signals import Stopped, StopRequest
from grpo_ustat.draws import generator
from grpo_ustat.estimators.baselines import advantages
from grpo_ustat.pages.caveats import clipped_warning
from grpo_ustat.pages.run_page import leave_page
from grpo_ustat.pages.symbols import ALARM_WORDS
from grpo_ustat.pages.tables import write_csv
from grpo_ustat.records import Prompt
from grpo_ustat.rollout.local import Sampling
from grpo_ustat.runs.contents import content_of
from grpo_ustat.runs.faults import NotSaved
from grpo_ustat.runs.folder import RunFolder, versions
from grpo_ustat.runs.log import RunLog, attempt
from grpo_ustat.runs.result import TrainResult
from grpo_ustat.terminal.console import Console
from grpo_ustat.terminal.progress import TrainingBar, listening, waiting
from grpo_ustat.terminal.streams import tell, wrapped
from grpo_ustat.train import fsdp2
from grpo_ustat.train.alarms import check_alarms
from grpo_ustat.train.batch import baseline_context, sample_batch
from grpo_ustat.train.checkpoint import (
    check_finite,
    drop_old,
    name_failed_step,
    resume,
    save_checkpoint,
)
from grpo_ustat.train.context import TrainContext, TrainProgress
from grpo_ustat.train.evaluate import eval_row, held_out_gain, name_jointly, sample_eval
from grpo_ustat.train.gradient_monitor import gradient_mse
from grpo_ustat.train.metrics import (
    batch_metrics,
    completion_rows,
    judge_failures,
    num_tokens,
    update_metrics,
)
from grpo_ustat.train.page import VIEW, evaluation_table
from grpo_ustat.train.setup import check_same_start, join_ranks, set_up
from grpo_ustat.train.update import fixed_logprobs, penalised_rewards, update


def fit(config: TrainConfig, folder: RunFolder) -> float:
    """Train, or show the results if the folder already contains a finished run.

    Returns:
        Final held-out accuracy or mean reward.
    """
    console = Console(quiet=not is_main())
    with name_lost_ranks():
        # `main_only` needs the connection between ranks.
        join_ranks(config)
        result = main_only(finished_result, config, folder)
        if result is not None:
            text = f"{folder.path} is complete; on_existing=overwrite runs it again."
            console.print(text, soft_wrap=True)
        else:
            with folder.lock(), name_lost_ranks():
                # Another process could have finished the run in the meantime.
                result = main_only(finished_result, config, folder) or train(config, folder)
    console.print(f"{wrapped(result['summary'])}\n", soft_wrap=True)
    console.print(evaluation_table(result["evals"], all_pass_at=False))
    console.print(f"next: {command_line('advise', str(folder.path))}", soft_wrap=True)
    console.print(f"page: {folder.path / 'report.html'}", soft_wrap=True)
    return result["final_mean_reward"]


def finished_result(config: TrainConfig, folder: RunFolder) -> dict[str, Any] | None:
    """Return the folder's result if the run has taken all steps, otherwise None."""
    result = folder.result()
    if result is not None:
        refuse_fewer_steps(config, folder, result["steps"])
    return result if result and result["steps"] == config.max_steps else None


def refuse_fewer_steps(config: TrainConfig, folder: RunFolder, step: int) -> None:
    """Raise an error if the run in the folder has already taken more than `max_steps` steps."""
    if step > config.max_steps:
        raise ConfigError(
            f"{folder.path} is at step {step}, already past max_steps={config.max_steps}: "
            f"use max_steps={step} or more, or on_existing=overwrite"
        )


def train(config: TrainConfig, folder: RunFolder) -> dict[str, Any]:
    """Train from the newest checkpoint, or from the beginning, to the last step; write the results.

    `result.json` is written last, so that a folder with this file is complete.

    Returns:
        Content of `result.json`.
    """
    with StopRequest() as stop:
        with waiting(f"loading {config.model.name} and {config.dataset.name}", visible=is_main()):
            run = set_up(config, folder)
        main = run.accelerator.is_main_process
        main_only(folder.open)
        progress = resume(run)
        check_same_start(run, progress.step)
        if run.sharded_policy is not None:
            # `check_same_start` has read the weights in full precision. From here on, they are
            # gathered from the ranks in bfloat16 if bf16=true, which needs fewer bytes.
            fsdp2.gather_weights(run)
        refuse_fewer_steps(config, folder, progress.step)
        if main and progress.step:
            tell(f"going on from checkpoint-{progress.step} of {folder.path}", file=sys.stderr)
            folder.note(event="resumed", step=progress.step)
        log = RunLog(folder.path, keep_up_to=progress.step) if main else None
        bar = TrainingBar(config.max_steps, progress.step, visible=main)
        with bar, listening(bar.meter.hear if main else None):
            loop(run, progress, log, bar, stop)
    result = train_result(config, progress, run.task.dropped)
    content = content_of(result)
    if log:
        from grpo_ustat.pages.learning import draw_learning

        try:
            log.sync()
            write_csv(folder, "eval.csv", progress.evals)
            draw_learning(folder.path)
            leave_page(folder, VIEW, content)
            folder.finish(result)
        except OSError as error:
            raise NotSaved(
                f"{folder.path}: training is done but its files could not be written "
                f"({error}): run the same command again to write them from the last checkpoint"
            ) from error
    return content


def loop(
    run: TrainContext,
    progress: TrainProgress,
    log: RunLog | None,
    bar: TrainingBar,
    stop: StopRequest,
) -> None:
    """Evaluate, save and take a step in turn, until the last step or a signal to stop.

    Evaluations and checkpoints are due at fixed step numbers, so a resumed run makes the same ones.

    Args:
        run: training run.
        progress: progress of the run, which is updated.
        log: log of metrics and completions; None on ranks other than 0.
        bar: progress bar.
        stop: signals that this process has received.

    Raises:
        Stopped: If any rank received a signal. A checkpoint is written first.
        NotSaved: If the last checkpoint could not be written.
    """
    config, saved_step = run.config, progress.step
    while True:
        last = progress.step == config.max_steps
        if (last or progress.step % config.eval_steps == 0) and not stop_requested(run, stop):
            evaluate(run, progress, bar)
        stopping = stop_requested(run, stop)
        due = last or progress.step % config.save_steps == 0
        if progress.step > saved_step and (stopping or due) and save_checkpoint(run, progress, log):
            saved_step = progress.step
        if log and saved_step == progress.step > 0:
            drop_old(run, saved_step)
        if stopping:
            if log:
                leave_page(run.folder, VIEW)
            checkpoint = "nothing to save"
            if progress.step:
                checkpoint = "a checkpoint could not be written"
                if saved_step == progress.step:
                    seconds = progress.seconds_save
                    checkpoint = f"checkpoint-{saved_step} took {seconds:.1f} s to write"
            raise Stopped(f"stopped by {stop.name} after step {progress.step}; {checkpoint}")
        if last:
            break
        row, completions = train_step(run, progress)
        if log:
            row |= {"seconds_save": progress.seconds_save}
            log.write(row, completions)
            run.folder.track(row, completions)
        bar.step(row, config.budget.rollouts)
        for line in check_alarms(config, row, progress.streaks, progress.alarms):
            bar.print_alarm(line)
    if saved_step < progress.step:
        raise NotSaved(
            f"{run.folder.path}: the last checkpoint could not be written (reason above): free "
            "disk space and run the same command, which continues from the previous checkpoint"
        )


def stop_requested(run: TrainContext, stop: StopRequest) -> bool:
    """Return True on all ranks if any rank has received a signal to stop."""
    return bool(run.all_ranks_sum(np.array([stop.received])).any())


def choose_prompts(config: TrainConfig, prompts: list[Prompt], step: int) -> list[Prompt]:
    """Choose the prompts of a step at random, without repetition, from the seed and the step."""
    rng = generator(config.seed, "prompts", step)
    return [prompts[i] for i in rng.choice(len(prompts), config.prompts_per_step, replace=False)]


def train_step(
    run: TrainContext, progress: TrainProgress
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Take one training step, from the choice of prompts to the update of the policy.

    Returns:
        The step's row for metrics.jsonl and its rows for completions.parquet.

    Raises:
        FloatingPointError: If a metric, or a weight after the update, is not finite.
    """
    start, step, config = time.perf_counter(), progress.step, run.config
    with name_failed_step(run, step + 1):
        prompts = choose_prompts(config, run.train_prompts, step)
        sampling = Sampling.of(config.sampler_options, "rollout")
        batch = sample_batch(run, prompts, config.group_size, sampling, step)
        context, extra_cost = baseline_context(run, batch, step)
        seconds_generate = time.perf_counter() - start

        fixed = fixed_logprobs(run, batch.own_rollouts)
        rewards_PG, baseline = penalised_rewards(run, batch, fixed), config.baseline
        advantage_PG = advantages(baseline.name, rewards_PG, context, baseline.options)
        run.baseline_state.update(run, batch)
        monitor_interval = config.monitor.gradient_mse_every
        monitor = (
            gradient_mse(run, batch) if monitor_interval and step % monitor_interval == 0 else {}
        )
        completions = completion_rows(run, batch, advantage_PG, step + 1)

        grad_norm, stats = update(run, batch, advantage_PG, fixed, step)
        run.engine.refresh()
        names = reward_names(config.reward_funcs)
        row = (
            batch_metrics(batch, names) | update_metrics(stats, batch.own_rollouts, fixed) | monitor
        )
        row |= {"grad_norm": grad_norm, "learning_rate": run.scheduler.get_last_lr()[0]}
        run.scheduler.step()

        progress.step += 1
        progress.rollouts += config.budget.rollouts
        progress.value_rollouts += extra_cost.rollouts
        progress.tokens += row["tokens"] + extra_cost.tokens
        progress.num_tokens += num_tokens(batch) + extra_cost.tokens
        progress.clipped_ratio = row["completions/clipped_ratio"]
        totals = ("step", "num_tokens", "rollouts", "value_rollouts")
        row |= {name: getattr(progress, name) for name in totals} | judge_failures(run)
        progress.seconds += time.perf_counter() - start
        row["seconds_generate"], row["step_time"] = seconds_generate, time.perf_counter() - start
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise FloatingPointError(f"{name} is {value}: lower learning_rate")
        check_finite(run.policy)
    return row, completions


def evaluate(run: TrainContext, progress: TrainProgress, bar: TrainingBar) -> None:
    """Measure held-out rewards with each decoding (greedy or sampled).

    A resumed run may already have the evaluation of this step. It is then not repeated.

    Raises:
        FloatingPointError: If a reward is not finite.
    """
    if progress.evals and progress.evals[-1]["step"] == progress.step:
        return
    options = run.config.eval
    with name_failed_step(run, progress.step):
        for decoding in options.decoding:
            batch = sample_eval(run, decoding)
            row = eval_row(progress.step, decoding, batch, options.num_generations)
            progress.evals.append(row | judge_failures(run))
            name_jointly(progress.evals)
            bar.print_evaluation(progress.evals[-1])
            shown = {f"eval/{decoding}/{key}": value for key, value in progress.evals[-1].items()}
            run.folder.track(shown | {"step": progress.step})
            if decoding == options.decoding[0]:
                progress.rewards_last = batch.rewards_PGF[..., 0].mean(axis=1).tolist()
                progress.rewards_first = progress.rewards_first or progress.rewards_last
        if run.accelerator.is_main_process:
            path = run.folder.path / "eval.csv"
            attempt(str(path), lambda: write_csv(run.folder, "eval.csv", progress.evals))


def train_result(
    config: TrainConfig, progress: TrainProgress, left_out: dict[str, int]
) -> TrainResult:
    """Build the result with a summary of the change in held-out accuracy or mean reward.

    The summary refers to the first decoding in `eval.decoding`.
    """
    evals = [row for row in progress.evals if row["decoding"] == config.eval.decoding[0]]
    first, last = evals[0], evals[-1]
    gain = held_out_gain(progress)
    greedy = last["decoding"] == "greedy"
    decoding = "greedy" if greedy else f"sampled at temperature {config.temperature}"
    summary = (
        f"Held-out {last['quantity']} went from {first['mean_reward']:.3f} to "
        f"{last['mean_reward']:.3f}. The paired difference is {gain.estimate:+.3f} "
        f"[{gain.low:+.3f}, {gain.high:+.3f}] on the same {last['n']} questions ({decoding})."
    )
    if progress.alarms:
        alarms = ", ".join(
            f"{ALARM_WORDS.get(name, name)} in {steps} steps"
            for name, steps in progress.alarms.items()
        )
        summary += f" Alarms: {alarms}."
    summary += clipped_warning("last step's", progress.clipped_ratio, config.max_completion_length)
    return TrainResult(
        quantity=last["quantity"],
        final_mean_reward=last["mean_reward"],
        mean_reward_low=last["low"],
        mean_reward_high=last["high"],
        gain=gain,
        steps=progress.step,
        rollouts=progress.rollouts,
        value_rollouts=progress.value_rollouts,
        tokens=progress.tokens,
        seconds=progress.seconds,
        seconds_save=progress.seconds_save,
        failed_saves=progress.failed_saves,
        evals=progress.evals,
        alarms=progress.alarms,
        run=config.run_name,
        summary=summary,
        versions=versions(),
        left_out=left_out,
    )
