"""The training loop: sample, reward, advantage, update; read from top to bottom."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from accelerate.utils import broadcast_object_list
from rich.console import Console

from grpo_ustat.checks import ConfigError
from grpo_ustat.config import TrainConfig
from grpo_ustat.estimators.baselines import advantages
from grpo_ustat.estimators.intervals import Interval, paired_difference
from grpo_ustat.records import Prompt
from grpo_ustat.rollout.draws import generator
from grpo_ustat.rollout.local import Sampling
from grpo_ustat.runs.folder import NotSaved, RunFolder, versions
from grpo_ustat.runs.log import MetricsLog, TrainingBar, attempt
from grpo_ustat.runs.snapshots import newest_whole, prune
from grpo_ustat.runs.summary import clipped_warning, train_table, write_csv
from grpo_ustat.training import checkpoint
from grpo_ustat.training.batch import baseline_context, draw_batch
from grpo_ustat.training.evaluate import eval_row, held_out
from grpo_ustat.training.metrics import batch_metrics, update_metrics
from grpo_ustat.training.setup import Run, set_up
from grpo_ustat.training.signals import EXIT_CODE, StopRequest
from grpo_ustat.training.update import fixed_logprobs, judged_rewards, update


@dataclass
class Progress:
    """What a run has done so far; stored in each checkpoint.

    Attributes:
        seconds_save: what the latest checkpoint took to write.
        failed_saves: checkpoints that the disk refused.
    """

    step: int = 0
    rollouts: int = 0
    value_rollouts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    seconds_save: float = 0.0
    failed_saves: int = 0
    clipped_ratio: float = 0.0
    evals: list[dict[str, Any]] = field(default_factory=list)
    rewards_first: list[float] = field(default_factory=list)
    rewards_last: list[float] = field(default_factory=list)


def fit(config: TrainConfig, folder: RunFolder) -> float:
    """Train, or show the finished run that the folder already holds.

    Returns:
        The final held-out accuracy.
    """
    console = Console()
    result = folder.result()
    if result is not None:
        _refuse_fewer_steps(config, folder, result["steps"])
    if result is None or result["steps"] < config.max_steps:
        result = _train(config, folder)
    else:
        console.print(
            f"{folder.path} is complete; on_existing=overwrite runs it again.", markup=False
        )
    if int(os.environ.get("RANK", 0)) == 0:
        console.print(train_table(result))
        console.print(result["summary"], highlight=False, markup=False)
        wrote = f"Wrote {folder.path} (checkpoint in {result['seconds_save']:.1f} s)"
        console.print(wrote, soft_wrap=True, highlight=False, markup=False)
    return result["final_accuracy"]


def _train(config: TrainConfig, folder: RunFolder) -> dict[str, Any]:
    with StopRequest() as stop:
        run = set_up(config, folder)
        main = run.accelerator.is_main_process
        if main:
            folder.open()
        run.accelerator.wait_for_everyone()
        progress = _resume(run)
        _refuse_fewer_steps(config, folder, progress.step)
        log = MetricsLog(folder.path, keep_up_to=progress.step) if main else None
        with TrainingBar(config.max_steps, progress.step, shown=main) as bar:
            _loop(run, progress, log, bar, stop)
    return _finish(run, progress, log)


def _loop(
    run: Run, progress: Progress, log: MetricsLog | None, bar: TrainingBar, stop: StopRequest
) -> None:
    """Evaluate, save and take a step, until none is left or a signal asks to stop.

    What is due depends on the step alone, so a resumed run does what an uninterrupted one does.

    Raises:
        SystemExit: with code 75, after a checkpoint, because of a signal to any rank.
        NotSaved: the last checkpoint could not be written.
    """
    config, saved = run.config, progress.step
    while True:
        last = progress.step == config.max_steps
        if (last or progress.step % config.eval_steps == 0) and not _asked(run, stop):
            _evaluate_once(run, progress, bar)
        stopping = _asked(run, stop)
        due = last or progress.step % config.save_steps == 0
        if progress.step > saved and (stopping or due) and _save(run, progress, log):
            saved = progress.step
        if log and saved == progress.step > 0:
            _prune(run, saved)
        if stopping:
            _leave(run, progress, saved, stop)
        if last:
            break
        row = _finite_step(run, progress)
        if log:
            log.write(row | {"seconds_save": progress.seconds_save})
        bar.step(row["reward"])
    if saved < progress.step:
        raise NotSaved(
            f"{run.folder.path}: the last checkpoint could not be written (reason above); with "
            f"room on the disk the same command goes on from the checkpoint before"
        )


def _asked(run: Run, stop: StopRequest) -> bool:
    """Whether any rank was told to stop; the same answer on all."""
    return bool(run.all_ranks_sum(np.array([stop.received])).any())


def _leave(run: Run, progress: Progress, saved: int, stop: StopRequest) -> None:
    if run.accelerator.is_main_process:
        kept = f"checkpoint-{saved} took {progress.seconds_save:.1f} s to write"
        if saved < progress.step:
            kept = "a checkpoint could not be written"
        text = f"stopped by {stop.name} after step {progress.step}; "
        text += kept if progress.step else "nothing to save"
        print(f"{text}; the same command goes on from there", file=sys.stderr)
    raise SystemExit(EXIT_CODE)


def _finish(run: Run, progress: Progress, log: MetricsLog | None) -> dict[str, Any]:
    """Write `result.json`, after everything else is on the disk."""
    result = _result(run.config, progress)
    if log:
        try:
            log.sync()
            write_csv(run.folder, "eval.csv", progress.evals)
            run.folder.finish(result)
        except OSError as error:
            raise NotSaved(
                f"{run.folder.path}: training is done but its files could not be written "
                f"({error}): the same command writes them from the last checkpoint"
            ) from error
    return result


def _refuse_fewer_steps(config: TrainConfig, folder: RunFolder, done: int) -> None:
    if done > config.max_steps:
        raise ConfigError(
            f"{folder.path} is at step {done}, beyond max_steps={config.max_steps}: "
            f"use max_steps={done} or more, or on_existing=overwrite"
        )


def _resume(run: Run) -> Progress:
    """Go on from the newest checkpoint that is whole; without any, start.

    Raises:
        ConfigError: see `newest_whole` and `checkpoint.load`.
    """
    (found,) = broadcast_object_list(
        [newest_whole(run.folder.path) if run.accelerator.is_main_process else None]
    )
    if found is None:
        return Progress()
    state = checkpoint.load(found, run.policy, run.optimizer)
    run.scheduler.load_state_dict(state["scheduler"])
    for group, rate in zip(run.optimizer.param_groups, run.scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
    run.memory.load_state_dict(checkpoint.load_memory(found))
    return Progress(step=state["step"], **state["progress"])


def choose_prompts(config: TrainConfig, prompts: list[Prompt], step: int) -> list[Prompt]:
    """The step's P distinct prompts, a function of seed and step alone."""
    rng = generator(config.seed, "prompts", step)
    return [prompts[i] for i in rng.choice(len(prompts), config.prompts_per_step, replace=False)]


def _finite_step(run: Run, progress: Progress) -> dict[str, Any]:
    """A step, and a look at the weights that it leaves."""
    with _named(run, progress.step + 1):
        row = _step(run, progress)
        checkpoint.check_finite(run.policy)
    return row


@contextmanager
def _named(run: Run, step: int) -> Iterator[None]:
    """Say where and when a number was not finite."""
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(f"{run.folder.path} stopped in step {step}: {error}") from error


def _step(run: Run, progress: Progress) -> dict[str, Any]:
    """One step of Algorithm 1; returns its metrics row."""
    start = time.perf_counter()
    config = run.config
    batch = draw_batch(run, choose_prompts(config, run.train_prompts, progress.step), progress.step)
    context, extra = baseline_context(run, batch, progress.step)
    constants = fixed_logprobs(run, batch.rollouts)
    judged_PG = judged_rewards(run, batch, constants)
    advantage_PG = advantages(config.baseline.name, judged_PG, context, config.baseline.options)
    run.memory.learn(run, batch)
    generated = time.perf_counter()
    mine_PG = own_rows(run, advantage_PG)
    grad_norm, found = update(run, batch.rollouts, mine_PG, constants, progress.step)
    row = batch_metrics(batch) | update_metrics(found)
    learning_rate = run.scheduler.get_last_lr()[0]
    run.scheduler.step()
    progress.step += 1
    progress.rollouts += config.budget.rollouts
    progress.value_rollouts += extra.rollouts
    progress.tokens += row["tokens"] + extra.tokens
    progress.clipped_ratio = row["completions/clipped_ratio"]
    progress.seconds += time.perf_counter() - start
    return row | {
        "step": progress.step,
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "num_tokens": progress.tokens,
        "rollouts": progress.rollouts,
        "value_rollouts": progress.value_rollouts,
        "seconds_generate": generated - start,
        "step_time": time.perf_counter() - start,
    }


def own_rows(run: Run, values_PG: np.ndarray) -> np.ndarray:
    """Rows of this rank's prompts, of what is known of all."""
    return values_PG[run.accelerator.process_index :: run.accelerator.num_processes]


def _evaluate_once(run: Run, progress: Progress, bar: TrainingBar) -> None:
    if not progress.evals or progress.evals[-1]["step"] != progress.step:
        with _named(run, progress.step):
            _evaluate(run, progress, bar)


def _evaluate(run: Run, progress: Progress, bar: TrainingBar) -> None:
    reward_P = held_out(
        run.policy, run.task, run.test_prompts, Sampling.of(run.config, "eval"), run.accelerator
    )
    progress.evals.append(eval_row(progress.step, reward_P))
    progress.rewards_first = progress.rewards_first or reward_P.tolist()
    progress.rewards_last = reward_P.tolist()
    if run.accelerator.is_main_process:
        path = run.folder.path / "eval.csv"
        attempt(str(path), lambda: write_csv(run.folder, "eval.csv", progress.evals))
    bar.evaluated(progress.evals[-1])


def _save(run: Run, progress: Progress, log: MetricsLog | None) -> bool:
    """Write a checkpoint, after the rows up to it; returns whether it is there.

    A disk that refuses it stops nothing: that is said and counted, and the checkpoint before stays.

    Raises:
        FloatingPointError: see `checkpoint.check_finite`.
    """
    start, failed = time.perf_counter(), 0
    with _named(run, progress.step):
        checkpoint.check_finite(run.policy, run.optimizer)
    if log:
        attempt(f"metrics.jsonl of {run.folder.path}", log.sync)
        what = f"checkpoint-{progress.step} of {run.folder.path}"
        failed = not attempt(what, lambda: _write_checkpoint(run, progress))
    failed = int(run.all_ranks_sum(np.array([int(failed)]))[0])
    progress.failed_saves += failed
    progress.seconds_save = time.perf_counter() - start
    return not failed


def _prune(run: Run, step: int) -> None:
    """Also where a killed run had come no further than the save."""
    path, limit = run.folder.path, run.config.save_total_limit
    attempt(f"removal of old checkpoints in {path}", lambda: prune(path, step, limit))


def _write_checkpoint(run: Run, progress: Progress) -> None:
    state = {
        "progress": {key: value for key, value in vars(progress).items() if key != "step"},
        "scheduler": run.scheduler.state_dict(),
    }
    checkpoint.save(
        run.folder.path, progress.step, run.policy, run.optimizer, state, run.memory.state_dict()
    )


def _summary(config: TrainConfig, progress: Progress, gain: Interval) -> str:
    """What training did to held-out accuracy, in words."""
    first, last = progress.evals[0], progress.evals[-1]
    text = (
        f"Held-out accuracy {first['accuracy']:.3f} -> {last['accuracy']:.3f}, paired difference "
        f"{gain.estimate:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}] on the same {last['n']} "
        f"questions, sampled at temperature {config.temperature}."
    )
    return text + clipped_warning(progress.clipped_ratio, config.max_completion_length)


def _result(config: TrainConfig, progress: Progress) -> dict[str, Any]:
    last = progress.evals[-1]
    gain = paired_difference(np.array(progress.rewards_last), np.array(progress.rewards_first))
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
        "run": config.run_name,
        "summary": _summary(config, progress, gain),
        "versions": versions(),
    }
