"""The training loop: sample, reward, advantage, surrogate, step; read from top to bottom."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.console import Console

from grpo_ustat.checks import ConfigError
from grpo_ustat.config import TrainConfig
from grpo_ustat.estimators.baselines import advantages
from grpo_ustat.estimators.intervals import Interval, paired_difference
from grpo_ustat.policy.loading import Policy, check_device, configured_policy
from grpo_ustat.policy.logprobs import completion_logprobs, pack
from grpo_ustat.records import Prompt, Rollouts
from grpo_ustat.rollout.draws import generator
from grpo_ustat.rollout.local import Sampling
from grpo_ustat.runs.folder import RunFolder, versions
from grpo_ustat.runs.log import MetricsLog, TrainingBar
from grpo_ustat.runs.summary import clipped_warning, train_table, write_csv
from grpo_ustat.tasks.base import Task
from grpo_ustat.tasks.registry import make_task
from grpo_ustat.training import checkpoint
from grpo_ustat.training.batch import Batch, baseline_context, draw_batch
from grpo_ustat.training.evaluate import eval_row, held_out
from grpo_ustat.training.memory import Memory, make_memory
from grpo_ustat.training.objective import surrogate


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


@dataclass(frozen=True)
class Run:
    """Everything the loop holds on to."""

    config: TrainConfig
    folder: RunFolder
    accelerator: Accelerator
    policy: Policy
    model: torch.nn.Module  # the policy's model as accelerate wrapped it
    optimizer: torch.optim.Optimizer
    task: Task
    train_prompts: list[Prompt]
    test_prompts: list[Prompt]
    memory: Memory


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
    run = _set_up(config, folder)
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


def _set_up(config: TrainConfig, folder: RunFolder) -> Run:
    check_device(config.launch.device)
    accelerator = Accelerator(cpu=config.launch.device == "cpu")
    if config.prompts_per_step % accelerator.num_processes:
        raise ConfigError(
            f"{config.prompts_per_step} prompts a step do not divide among "
            f"{accelerator.num_processes} processes: change budget.rollouts or group_size"
        )
    policy = configured_policy(config, device=str(accelerator.device))
    optimizer = _optimizer(config, policy)
    model, prepared = accelerator.prepare(policy.model, optimizer)
    task = make_task(config)
    return Run(
        config, folder, accelerator, policy, model, prepared, task,
        task.prompts("train"), task.prompts("test"), make_memory(config.baseline),
    )  # fmt: skip


def _optimizer(config: TrainConfig, policy: Policy) -> torch.optim.Optimizer:
    options = config.optimizer
    if options.name == "sgd":
        return torch.optim.SGD(
            policy.model.parameters(), lr=config.learning_rate, weight_decay=options.weight_decay
        )
    return torch.optim.AdamW(
        policy.model.parameters(),
        lr=config.learning_rate,
        betas=(options.beta1, options.beta2),
        weight_decay=options.weight_decay,
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
    advantage_PG = advantages(
        config.baseline.name, batch.rewards_PG, context, config.baseline.options
    )
    run.memory.learn(run, batch)
    generated = time.perf_counter()
    grad_norm = apply_gradient(run, batch.rollouts, own_rows(run, advantage_PG))
    row = _metrics(batch)
    progress.step += 1
    progress.rollouts += config.budget.rollouts
    progress.value_rollouts += extra.rollouts
    progress.tokens += row["tokens"] + extra.tokens
    progress.clipped_ratio = row["completions/clipped_ratio"]
    progress.seconds += time.perf_counter() - start
    return row | {
        "step": progress.step,
        "grad_norm": grad_norm,
        "learning_rate": config.learning_rate,
        "num_tokens": progress.tokens,
        "rollouts": progress.rollouts,
        "value_rollouts": progress.value_rollouts,
        "seconds_generate": generated - start,
        "step_time": time.perf_counter() - start,
    }


def own_rows(run: Run, values_PG: np.ndarray) -> np.ndarray:
    """Rows of this rank's prompts, of what is known of all."""
    return values_PG[run.accelerator.process_index :: run.accelerator.num_processes]


def apply_gradient(run: Run, rollouts: Rollouts, advantage_PG: np.ndarray) -> float:
    """Ascend the surrogate of these rollouts by one optimizer step; returns the gradient's norm.

    Completions with advantage 0 add exactly nothing and are skipped. All ranks run as many
    micro-batches, the shorter ones on a row of weight 0, so that collectives meet.

    Raises:
        FloatingPointError: the gradient is not finite; the parameters are left as they were.
    """
    run.optimizer.zero_grad()
    accumulate_gradient(run, rollouts, advantage_PG)
    grads = [p.grad for p in run.policy.model.parameters() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(grads))
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient's norm is {norm}: lower learning_rate")
    run.optimizer.step()
    return norm


def accumulate_gradient(run: Run, rollouts: Rollouts, advantage_PG: np.ndarray) -> None:
    """Add the surrogate's gradient, negated for descent, to the parameters' `grad`."""
    accelerator, size = run.accelerator, run.config.micro_batch_size
    weight_N = advantage_PG.ravel()
    active = np.flatnonzero(weight_N)
    active = active[np.argsort(rollouts.lengths_PG.ravel()[active], kind="stable")]
    batches = [active[i : i + size] for i in range(0, len(active), size)]
    rounds = max(1, *gather_object([len(batches)]))
    for k in range(rounds):
        index = batches[k] if k < len(batches) else np.array([0])
        weights = weight_N[index] if k < len(batches) else np.zeros(1)
        rows = pack(rollouts, index, run.policy.pad_token, accelerator.device)
        sync = k + 1 == rounds or accelerator.num_processes == 1
        with _synchronised(run, sync):
            logprob_B = completion_logprobs(run.model, rows, run.config.temperature)
            advantage_B = torch.from_numpy(weights).to(logprob_B)
            part = surrogate(logprob_B, advantage_B, run.config.budget.rollouts)
            # DistributedDataParallel averages over ranks; the divisor above is already global.
            accelerator.backward(-part * accelerator.num_processes)


def _synchronised(run: Run, sync: bool):
    """Reduce gradients across ranks in this backward pass, or only accumulate them."""
    return run.accelerator.no_sync(run.model) if not sync else torch.enable_grad()


def _metrics(batch: Batch) -> dict[str, Any]:
    """Metrics of the whole step, of all ranks, under TRL's names."""
    rewards_PG, lengths_PG, ended_PG = batch.rewards_PG, batch.lengths_PG, batch.ended_PG
    return {
        "reward": float(rewards_PG.mean()),
        "reward_std": float(rewards_PG.std()),
        "frac_reward_zero_std": float((rewards_PG == rewards_PG[:, :1]).all(axis=1).mean()),
        "completions/mean_length": float(lengths_PG.mean()),
        "completions/clipped_ratio": float((~ended_PG).mean()),
        "tokens": int(lengths_PG.sum()),
    }


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
