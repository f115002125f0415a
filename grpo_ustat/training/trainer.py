"""The training loop: sample, reward, advantage, update; read from top to bottom."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import numpy as np
from rich.console import Console

from grpo_ustat.checks import ConfigError
from grpo_ustat.config import TrainConfig
from grpo_ustat.estimators.baselines import advantages
from grpo_ustat.estimators.intervals import Interval, matched_difference
from grpo_ustat.pace import heard_by
from grpo_ustat.ranks import is_main, lost_ranks_named, on_main
from grpo_ustat.records import BaselineContext, Prompt
from grpo_ustat.rollout.draws import generator
from grpo_ustat.runs.folder import NotSaved, RunFolder, versions
from grpo_ustat.runs.log import RunLog, attempt
from grpo_ustat.runs.meter import TrainingBar, waiting
from grpo_ustat.runs.run_page import leave_page
from grpo_ustat.runs.summary import clipped_warning, train_table, write_csv
from grpo_ustat.signals import Stopped, StopRequest
from grpo_ustat.training.alarms import ring
from grpo_ustat.training.batch import Batch, Extra, baseline_context, draw_batch
from grpo_ustat.training.checkpoint import check_finite
from grpo_ustat.training.evaluate import eval_row, held_out, right
from grpo_ustat.training.grace import tell_grace
from grpo_ustat.training.metrics import batch_metrics, judging, tokens_seen, update_metrics
from grpo_ustat.training.monitor import gradient_mse
from grpo_ustat.training.progress import Progress, drop_old, named, resume, save
from grpo_ustat.training.samples import completion_rows
from grpo_ustat.training.setup import Run, check_same_start, joined, set_up
from grpo_ustat.training.update import Constants, fixed_logprobs, judged_rewards, update

Stepped = tuple[dict[str, Any], list[dict[str, Any]]]  # a metrics row, completions to keep


def fit(config: TrainConfig, folder: RunFolder) -> float:
    """Train, or show the finished run that the folder already holds.

    Returns:
        The final held-out accuracy.
    """
    console = Console(quiet=not is_main())
    with lost_ranks_named():
        joined(config)  # before they agree on anything
        result = on_main(_finished, config, folder)
        if result is not None:
            text = f"{folder.path} is complete; on_existing=overwrite runs it again."
            console.print(text, markup=False, soft_wrap=True)
        else:
            with folder.held(), lost_ranks_named():
                # Another process may have finished it just now.
                result = on_main(_finished, config, folder) or _train(config, folder)
    console.print(train_table(result))
    console.print(result["summary"], highlight=False, markup=False)
    wrote = f"Wrote {folder.path} (checkpoint in {result['seconds_save']:.1f} s)"
    console.print(wrote, soft_wrap=True, highlight=False, markup=False)
    return result["final_accuracy"]


def _finished(config: TrainConfig, folder: RunFolder) -> dict[str, Any] | None:
    """What the folder holds, if that has all steps."""
    result = folder.result()
    if result is not None:
        _refuse_fewer_steps(config, folder, result["steps"])
    return result if result and result["steps"] == config.max_steps else None


def _train(config: TrainConfig, folder: RunFolder) -> dict[str, Any]:
    with StopRequest() as stop:
        with waiting(f"loading {config.model.name} and {config.dataset.name}", shown=is_main()):
            run = set_up(config, folder)
        main = run.accelerator.is_main_process
        on_main(folder.open)
        progress = resume(run)
        check_same_start(run, progress.step)
        _refuse_fewer_steps(config, folder, progress.step)
        if main and progress.step:
            print(f"going on from checkpoint-{progress.step} of {folder.path}", file=sys.stderr)
            folder.note(event="resumed", step=progress.step)
        log = RunLog(folder.path, keep_up_to=progress.step) if main else None
        bar = TrainingBar(config.max_steps, progress.step, shown=main)
        with bar, heard_by(bar.meter.hear if main else None):
            _loop(run, progress, log, bar, stop)
    return _finish(run, progress, log)


def _loop(
    run: Run, progress: Progress, log: RunLog | None, bar: TrainingBar, stop: StopRequest
) -> None:
    """Evaluate, save and take a step, until none is left or a signal asks to stop.

    What is due depends on the step alone, so a resumed run does what an uninterrupted one does.

    Raises:
        Stopped: after a checkpoint, because of a signal to any rank.
        NotSaved: the last checkpoint could not be written.
    """
    config, saved, told, row = run.config, progress.step, False, {}
    while True:
        last = progress.step == config.max_steps
        if (last or progress.step % config.eval_steps == 0) and not _asked(run, stop):
            _evaluate_once(run, progress, bar)
        stopping = _asked(run, stop)
        due = last or progress.step % config.save_steps == 0
        if progress.step > saved and (stopping or due) and save(run, progress, log):
            if log and not (told or stopping):
                tell_grace(row["step_time"], progress.seconds_save, config.launch.grace_seconds)
            saved, told = progress.step, True
        if log and saved == progress.step > 0:
            drop_old(run, saved)
        if stopping:
            if log:
                leave_page(run.folder)
            _leave(progress, saved, stop)
        if last:
            break
        row, completions = _finite_step(run, progress)
        if log:
            run.folder.check_held()
            log.write(row | {"seconds_save": progress.seconds_save}, completions)
        bar.step(row, config.budget.rollouts)
        for line in ring(config, row, progress.streaks, progress.alarms):
            bar.alarm(line)
    if saved < progress.step:
        raise NotSaved(
            f"{run.folder.path}: the last checkpoint could not be written (reason above); with "
            f"room on the disk the same command goes on from the checkpoint before"
        )


def _asked(run: Run, stop: StopRequest) -> bool:
    """Whether any rank was told to stop; the same answer on all.

    Raises:
        Held: another process took the run folder over.
    """
    on_main(run.folder.check_held)
    return bool(run.all_ranks_sum(np.array([stop.received])).any())


def _leave(progress: Progress, saved: int, stop: StopRequest) -> None:
    kept = f"checkpoint-{saved} took {progress.seconds_save:.1f} s to write"
    if saved < progress.step:
        kept = "a checkpoint could not be written"
    text = f"stopped by {stop.name} after step {progress.step}; "
    raise Stopped(text + kept if progress.step else text + "nothing to save")


def _finish(run: Run, progress: Progress, log: RunLog | None) -> dict[str, Any]:
    """Write `result.json`, after everything else is on the disk."""
    result = _result(run.config, progress) | {"left_out": run.task.dropped}
    if log:
        try:
            log.sync()
            write_csv(run.folder, "eval.csv", progress.evals)
            _leave_views(run.folder, result)
            run.folder.finish(result)
        except OSError as error:
            raise NotSaved(
                f"{run.folder.path}: training is done but its files could not be written "
                f"({error}): the same command writes them from the last checkpoint"
            ) from error
    return result


def _leave_views(folder: RunFolder, result: dict[str, Any]) -> None:
    """The figure of how training went, and the page that shows it."""
    from grpo_ustat.runs.learning import draw_learning  # and matplotlib, which no step needs

    draw_learning(folder.path)
    leave_page(folder, result)


def _refuse_fewer_steps(config: TrainConfig, folder: RunFolder, done: int) -> None:
    if done > config.max_steps:
        raise ConfigError(
            f"{folder.path} is at step {done}, beyond max_steps={config.max_steps}: "
            f"use max_steps={done} or more, or on_existing=overwrite"
        )


def choose_prompts(config: TrainConfig, prompts: list[Prompt], step: int) -> list[Prompt]:
    """The step's P distinct prompts, a function of seed and step alone."""
    rng = generator(config.seed, "prompts", step)
    return [prompts[i] for i in rng.choice(len(prompts), config.prompts_per_step, replace=False)]


def _finite_step(run: Run, progress: Progress) -> Stepped:
    """A step, and a look at what it measured and at the weights that it leaves."""
    with named(run, progress.step + 1):
        row, completions = _step(run, progress)
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise FloatingPointError(f"{name} is {value}: lower learning_rate")
        check_finite(run.policy)
    return row, completions


def _step(run: Run, progress: Progress) -> Stepped:
    """One step; returns its metrics row and the completions to keep."""
    start, step = time.perf_counter(), progress.step
    batch = draw_batch(run, choose_prompts(run.config, run.train_prompts, step), step)
    context, extra = baseline_context(run, batch, step)
    generated = time.perf_counter()
    constants = fixed_logprobs(run, batch.rollouts)
    advantage_PG = _advantages(run, batch, context, constants)
    watched = _watched(run, batch, step)
    completions = completion_rows(run, batch, advantage_PG, step + 1)
    own_PG = own_rows(run, advantage_PG)
    grad_norm, found = update(run, batch, own_PG, constants, step)
    run.engine.refresh()
    row = batch_metrics(batch) | update_metrics(found, batch.rollouts, constants) | watched
    row |= {"grad_norm": grad_norm, "learning_rate": run.scheduler.get_last_lr()[0]}
    run.scheduler.step()
    row |= _counted(run, progress, batch, row, extra) | judging(run)
    progress.seconds += time.perf_counter() - start
    times = {"seconds_generate": generated - start, "step_time": time.perf_counter() - start}
    return row | times, completions


def _advantages(run: Run, batch: Batch, context: BaselineContext, constants: Constants):
    """Of all prompts, [P, G]; the baseline's memory takes the batch in after they are known."""
    judged_PG, rule = judged_rewards(run, batch, constants), run.config.baseline
    advantage_PG = advantages(rule.name, judged_PG, context, rule.options)
    run.memory.learn(run, batch)
    return advantage_PG


def _watched(run: Run, batch: Batch, step: int) -> dict[str, Any]:
    every = run.config.monitor.gradient_mse_every
    return gradient_mse(run, batch) if every and step % every == 0 else {}


def _counted(run: Run, progress: Progress, batch: Batch, row: dict[str, Any], extra: Extra):
    """Add a step to what the run has done; the totals that its row shows."""
    progress.step += 1
    progress.rollouts += run.config.budget.rollouts
    progress.value_rollouts += extra.rollouts
    progress.tokens += row["tokens"] + extra.tokens
    progress.num_tokens += tokens_seen(batch) + extra.tokens
    progress.clipped_ratio = row["completions/clipped_ratio"]
    return {
        name: getattr(progress, name)
        for name in ("step", "num_tokens", "rollouts", "value_rollouts")
    }


def own_rows(run: Run, values_PG: np.ndarray) -> np.ndarray:
    """Rows of this rank's prompts, of what is known of all."""
    return values_PG[run.accelerator.process_index :: run.accelerator.num_processes]


def _evaluate_once(run: Run, progress: Progress, bar: TrainingBar) -> None:
    if not progress.evals or progress.evals[-1]["step"] != progress.step:
        with named(run, progress.step):
            _evaluate(run, progress, bar)


def _evaluate(run: Run, progress: Progress, bar: TrainingBar) -> None:
    asked = run.config.eval
    for decoding in asked.decoding:
        batch = held_out(run, decoding)
        row = eval_row(progress.step, decoding, batch, asked.num_generations)
        progress.evals.append(row | judging(run))
        bar.evaluated(progress.evals[-1])
        if decoding == asked.decoding[0]:
            progress.rewards_last = right(batch).mean(axis=1).tolist()
            progress.rewards_first = progress.rewards_first or progress.rewards_last
    if run.accelerator.is_main_process:
        path = run.folder.path / "eval.csv"
        attempt(str(path), lambda: write_csv(run.folder, "eval.csv", progress.evals))


def _summary(config: TrainConfig, progress: Progress, gain: Interval) -> str:
    """What training did to held-out accuracy, in words."""
    first, last = _of_first_decoding(config, progress)
    how = f"sampled at temperature {config.temperature}"
    how = "greedy" if last["decoding"] == "greedy" else how
    text = (
        f"Held-out accuracy {first['accuracy']:.3f} -> {last['accuracy']:.3f}, paired difference "
        f"{gain.estimate:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}] on the same {last['n']} "
        f"questions, {how}."
    )
    if progress.alarms:
        text += f" Alarms (steps): {', '.join(f'{k} ({n})' for k, n in progress.alarms.items())}."
    most = config.max_completion_length
    return text + clipped_warning("last step's", progress.clipped_ratio, most)


def _of_first_decoding(config: TrainConfig, progress: Progress) -> tuple[dict, dict]:
    """The first and the last evaluation by the first decoding listed."""
    rows = [row for row in progress.evals if row["decoding"] == config.eval.decoding[0]]
    return rows[0], rows[-1]


def _result(config: TrainConfig, progress: Progress) -> dict[str, Any]:
    _, last = _of_first_decoding(config, progress)
    gain = matched_difference(np.array(progress.rewards_last), np.array(progress.rewards_first))
    return {
        "final_accuracy": last["accuracy"],
        "accuracy_low": last["low"],
        "accuracy_high": last["high"],
        "gain": gain.estimate,
        "gain_low": gain.low,
        "gain_high": gain.high,
        "steps": progress.step,
        "rollouts": progress.rollouts,
        "value_rollouts": progress.value_rollouts,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "seconds_save": progress.seconds_save,
        "failed_saves": progress.failed_saves,
        "evals": progress.evals,
        "alarms": progress.alarms,
        "run": config.run_name,
        "summary": _summary(config, progress, gain),
        "versions": versions(),
    }
