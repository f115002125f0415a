"""The training loop: sample, reward, advantage, update; read from top to bottom."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from grpo_ustat.checks import ConfigError
from grpo_ustat.config import TrainConfig
from grpo_ustat.estimators.baselines import advantages
from grpo_ustat.estimators.intervals import Interval, paired_difference
from grpo_ustat.records import Prompt
from grpo_ustat.rollout.draws import generator
from grpo_ustat.rollout.local import Sampling
from grpo_ustat.runs.folder import RunFolder, versions
from grpo_ustat.runs.log import MetricsLog, TrainingBar
from grpo_ustat.runs.summary import clipped_warning, train_table, write_csv
from grpo_ustat.training import checkpoint
from grpo_ustat.training.batch import baseline_context, draw_batch
from grpo_ustat.training.evaluate import eval_row, held_out
from grpo_ustat.training.metrics import batch_metrics, update_metrics
from grpo_ustat.training.setup import Run, set_up
from grpo_ustat.training.update import fixed_logprobs, judged_rewards, update


@dataclass
class Progress:
    """What a run has done so far; stored in each checkpoint."""

    step: int = 0
    rollouts: int = 0
    value_rollouts: int = 0
    tokens: int = 0
    seconds: float = 0.0
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
        console.print(f"Wrote {folder.path}", soft_wrap=True, highlight=False, markup=False)
    return result["final_accuracy"]


def _train(config: TrainConfig, folder: RunFolder) -> dict[str, Any]:
    run = set_up(config, folder)
    main = run.accelerator.is_main_process
    if main:
        folder.open()
    run.accelerator.wait_for_everyone()
    progress = _resume(run)
    _refuse_fewer_steps(config, folder, progress.step)
    log = MetricsLog(folder.path, keep_up_to=progress.step) if main else None
    with TrainingBar(config.max_steps, progress.step, shown=main) as bar:
        if not progress.evals:
            _evaluate(run, progress, bar)
        while progress.step < config.max_steps:
            row = _step(run, progress)
            if log:
                log.write(row)
            bar.step(row["reward"])
            last = progress.step == config.max_steps
            if progress.step % config.eval_steps == 0 or last:
                _evaluate(run, progress, bar)
            if progress.step % config.save_steps == 0 or last:
                _save(run, progress)
        if progress.evals[-1]["step"] != progress.step:
            _evaluate(run, progress, bar)
    result = _result(config, progress)
    if main:
        folder.finish(result)
    return result


def _refuse_fewer_steps(config: TrainConfig, folder: RunFolder, done: int) -> None:
    if done > config.max_steps:
        raise ConfigError(
            f"{folder.path} is at step {done}, beyond max_steps={config.max_steps}: "
            f"use max_steps={done} or more, or on_existing=overwrite"
        )


def _resume(run: Run) -> Progress:
    found = checkpoint.newest(run.folder.path)
    if found is None:
        return Progress()
    state = checkpoint.load(found, run.policy, run.optimizer)
    run.memory.load_state_dict(checkpoint.load_memory(found))
    return Progress(**state)


def choose_prompts(config: TrainConfig, prompts: list[Prompt], step: int) -> list[Prompt]:
    """The step's P distinct prompts, a function of seed and step alone."""
    rng = generator(config.seed, "prompts", step)
    return [prompts[i] for i in rng.choice(len(prompts), config.prompts_per_step, replace=False)]


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


def _evaluate(run: Run, progress: Progress, bar: TrainingBar) -> None:
    reward_P = held_out(
        run.policy, run.task, run.test_prompts, Sampling.of(run.config, "eval"), run.accelerator
    )
    progress.evals.append(eval_row(progress.step, reward_P))
    progress.rewards_first = progress.rewards_first or reward_P.tolist()
    progress.rewards_last = reward_P.tolist()
    if run.accelerator.is_main_process:
        write_csv(run.folder, "eval.csv", progress.evals)
    bar.evaluated(progress.evals[-1])


def _save(run: Run, progress: Progress) -> None:
    if run.accelerator.is_main_process:
        state = {key: value for key, value in vars(progress).items() if key != "step"}
        checkpoint.save(
            run.folder.path, progress.step, run.policy, run.optimizer, state,
            run.memory.state_dict(),
        )  # fmt: skip
    run.accelerator.wait_for_everyone()


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
        "evals": progress.evals,
        "run": config.run_name,
        "summary": _summary(config, progress, gain),
        "versions": versions(),
    }
