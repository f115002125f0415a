"""Measure the time and memory of programs in alternating turns, in separate processes.

    python scripts/benchmarks/speed.py scores FOLDER --rows 8 --prompt 40 --completion 88
    python scripts/benchmarks/speed.py train --model FOLDER --questions gsm8k/train.jsonl
    python scripts/benchmarks/speed.py mse

A turn starts a process, prepares it (loading a model is not measured), makes `--warm` unmeasured
runs and then `--repeats` measured runs. The turns of the programs alternate, so that other load on
the machine affects all programs equally. `--against FOLDER` also runs each program with the package
in another checkout. Wall and CPU seconds include child processes. The table shows the median and
the range over all runs, and the ratio to the first program, as the median over turns of the ratio
of the medians within a turn. Memory is the peak resident set of a turn's process (on a GPU, the
peak of the allocator), in total and above its size before the runs.

scores   `ordinary` computes the log-probabilities of the completions and a backward pass to all
         parameters, `scores` squared norms and one pooled gradient, and `study` the Gram matrix,
         two pooled gradients and the sketches that a study stores.
train    A run is a training step of ours, or of TRL's GRPOTrainer with transformers generation.
         Both sides use the same model, questions, group size, completion length, sampling,
         optimizer (AdamW) and learning rate. Rewards are drawn at random, so that no advantage is
         zero. The gradients are the same up to a constant; see `trl_case.py`. Micro-batches are in
         tokens (--ours) and in completions (--trl), where `8c` means 8 with gradient checkpointing,
         TRL's default.
mse      A run is a study by closed forms or by fresh rollouts. The column `to target` has the CPU
         seconds that would bring the widest 95 % interval of the study's curves to +-5 %: the
         measured seconds times the square of the half-width relative to 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import numpy as np
import torch

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.policy.loading import load_policy
from grpo_ustat.policy.logprobs import Rows, completion_logprobs
from grpo_ustat.policy.scores.backward import completion_scores, parameter_sizes
from grpo_ustat.policy.scores.sketch import Sketch
from grpo_ustat.records import Prompt
from grpo_ustat.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[[], dict[str, float] | None]
# Rows of a turn's runs, the peak memory, and the peak above the memory before the runs.
Turn = dict[str, Any]


def prepare_scores(options: argparse.Namespace, program: str) -> Run:
    """Load the model; a run processes a batch of rows that share a prompt."""
    torch.set_num_threads(options.threads)
    model = load_policy(options.model, dtype=options.dtype).model.to(options.device)
    draws = torch.Generator().manual_seed(0)
    shape = (options.rows, options.prompt + options.completion)
    ids = torch.randint(0, model.config.vocab_size, shape, generator=draws)
    ids[:, : options.prompt] = ids[0, : options.prompt]
    mask = torch.ones(shape, dtype=torch.int64)
    completion = mask * (torch.arange(shape[1]) >= options.prompt)
    rows = [x.to(options.device) for x in (ids, mask, completion)]
    weights = torch.linspace(-1, 1, options.rows, device=options.device)
    sizes = parameter_sizes(model)
    studied = {"gram": True, "features": Sketch(sizes, 1021), "pooled": Sketch(sizes, 32749)}

    def ordinary() -> None:
        model.zero_grad(set_to_none=True)
        packed = Rows(*rows, width=options.completion)
        (completion_logprobs(model, packed) * weights).sum().backward()

    def scores() -> None:
        completion_scores(model, *rows, weights_KB=weights[None])

    def study() -> None:
        both = torch.stack([weights, torch.ones_like(weights)])
        completion_scores(model, *rows, weights_KB=both, **studied)

    return {"ordinary": ordinary, "scores": scores, "study": study}[program]


class Questions:
    """Task with given questions, and with uniform rewards that ignore the completions."""

    note, reward_weights_F = "", np.ones(1)
    dropped: ClassVar[dict[str, int]] = {}
    reward_funcs: ClassVar[dict[str, Callable]] = {}

    def __init__(self, texts: list[str], seed: int):
        self.seed, self.drawn = seed, Counter[str]()
        self.given = [Prompt(f"{i}", text, text, "", "drawn") for i, text in enumerate(texts)]

    def prompts(self, split: str) -> list[Prompt]:
        """Return the same prompts for every split."""
        return self.given

    def extract(self, completion: str) -> str | None:
        """Return None, because there are no answers."""

    def take_counts(self) -> dict[str, int]:
        """Return no counts of failures."""
        return {}

    def draw(self, prompt_id: str) -> float:
        """Draw the next completion's reward."""
        self.drawn[prompt_id] += 1
        return random.Random(f"{self.seed}/{prompt_id}/{self.drawn[prompt_id]}").random()

    def rewards(self, prompts: list[Prompt], completions: list[str]) -> list[float]:
        """Draw the completions' rewards."""
        return [self.draw(prompt.id) for prompt in prompts]


def prepare_train(options: argparse.Namespace, program: str) -> Run:
    """Set up a trainer; a run is a training step."""
    from grpo_ustat.train import setup, trainer

    side, micro = program.split()
    steps = options.warm + options.repeats
    lines = options.questions.read_text().splitlines()[: options.prompts * steps]
    texts = [f"Question: {json.loads(line)['question']}\nAnswer:" for line in lines]
    task = Questions(texts, options.number)
    config = compose_config("train", [
        "model=hub", f"model.model_name_or_path={options.model}", f"model.dtype={options.dtype}",
        f"launch.device={options.device}", f"launch.num_threads={options.threads}",
        "baseline=leave_one_out", f"group_size={options.group_size}",
        f"budget.rollouts={options.group_size * options.prompts}",
        f"max_completion_length={options.length}", f"seed={options.number}",
        f"learning_rate={options.learning_rate}", f"dataset.train_size={len(texts)}",
        f"micro_batch_tokens={micro.removesuffix('c') if side == 'ours' else 2048}",
        f"gradient_checkpointing={str(micro.endswith('c')).lower()}",
    ])  # fmt: skip
    if side == "TRL":
        order = [
            p for step in range(steps) for p in trainer.choose_prompts(config, task.given, step)
        ]
        return trl_steps(options, order, task, micro)
    setup.configured_task = lambda *_: task
    folder = tempfile.mkdtemp()
    run, progress = setup.set_up(config, RunFolder(Path(folder), config)), trainer.TrainProgress()

    def step() -> None:
        trainer.train_step(run, progress)

    return step


def trl_steps(options: argparse.Namespace, order: list[Prompt], task: Questions, micro: str) -> Run:
    """Start TRL's trainer in a thread that waits before every step; a run lets it take one."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl_case import trl_arguments

    may_begin, ended = threading.Semaphore(0), threading.Semaphore(0)

    class Wait(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            may_begin.acquire()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended.release()

    torch.set_num_threads(options.threads)
    rows, count = int(micro.removesuffix("c")), options.prompts * options.group_size
    arguments = GRPOConfig(
        **trl_arguments(tempfile.mkdtemp(), options.group_size, options.length, options.device),
        max_steps=options.warm + options.repeats, learning_rate=options.learning_rate,
        per_device_train_batch_size=rows, gradient_accumulation_steps=count // rows,
        gradient_checkpointing=micro.endswith("c"), max_grad_norm=0.0, loss_type="dr_grpo",
        scale_rewards="none", beta=0.0, seed=options.number,
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.model, padding_side="left")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype),
        args=arguments, callbacks=[Wait()], processing_class=tokenizer,
        reward_funcs=lambda id, **_: [task.draw(name) for name in id],
        train_dataset=Dataset.from_list([{"prompt": p.text, "id": p.id} for p in order]),
    )  # fmt: skip

    def train() -> None:
        try:
            trainer.train()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=train, daemon=True).start()

    def step() -> None:
        may_begin.release()
        ended.acquire()

    return step


def prepare_mse(options: argparse.Namespace, program: str) -> Run:
    """Compose a study; a run measures it and returns the CPU seconds to the target."""
    from grpo_ustat.mse import study

    words = [f"study.methods=[{program}]", "launch.workers=1", "launch.num_threads=1"]
    config = compose_config("mse", [
        "model=tiny", "study.questions=25", "baselines=[none,leave_one_out,oracle]",
        "group_sizes=[2,4,8,16]", *words, *options.overrides,
    ])  # fmt: skip

    def run() -> dict[str, float]:
        began = now("cpu")[1]
        with tempfile.TemporaryDirectory() as folder:
            study.run(config, RunFolder(Path(folder), config))
            rows = json.loads((Path(folder) / "result.json").read_text())["curves"]
        worst = max((row["high"] - row["low"]) / 2 / row["mse"] for row in rows)
        return {"widest": worst, "to target": (now("cpu")[1] - began) * (worst / 0.05) ** 2}

    return run


PREPARE = {"scores": prepare_scores, "train": prepare_train, "mse": prepare_mse}


def programs_of(options: argparse.Namespace) -> list[str]:
    """Return the names of a case's programs."""
    if options.case == "scores":
        return ["ordinary", "scores", "study"]
    if options.case == "mse":
        return ["closed_form", "monte_carlo"]
    return [f"ours {x}" for x in options.ours] + [f"TRL {x}" for x in options.trl]


def now(device: str) -> tuple[float, float]:
    """Return wall seconds and CPU seconds, children included, after waiting for the device."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter(), sum(os.times()[:4])


def peak_memory(device: str) -> int:
    """Return the peak memory in bytes, of the allocator on a GPU and of this process on a CPU.

    The peak resident set is read from VmHWM, which starts with this program; ru_maxrss would
    include the program that started this process.
    """
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def run_here(options: argparse.Namespace) -> Turn:
    """Prepare and run a program in this process."""
    run = PREPARE[options.case](options, options.inside)
    before, rows = peak_memory(options.device), []
    for number in range(options.warm + options.repeats):
        wall, cpu = now(options.device)
        counted = run() or {}
        wall_end, cpu_end = now(options.device)
        if number >= options.warm:
            rows.append({"wall": wall_end - wall, "cpu": cpu_end - cpu} | counted)
    peak = peak_memory(options.device)
    return {"rows": rows, "peak": peak, "above": peak - before}


def take_turn(options: argparse.Namespace, program: str, tree: Path, number: int) -> Turn:
    """Run a program in a separate process with the package in the given checkout."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": str(options.threads)}
    command = [sys.executable, __file__, *sys.argv[1:], "--inside", program]
    command += ["--number", str(number)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {program}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def values_of(turns: Sequence[Turn], key: str) -> list[float]:
    """Return the value of `key` for each run in all turns."""
    return [row[key] for turn in turns for row in turn["rows"]]


def report(measured: dict[str, list[Turn]]) -> None:
    """Print the table; ratios are to the first program."""
    base = next(iter(measured.values()))
    counted = [key for key in base[0]["rows"][0] if key not in ("wall", "cpu")]
    columns = ["program", "wall s", "range", "ratio", "CPU s", "range", "ratio", "peak MB", "above"]
    rows = [columns + counted]
    for program, turns in measured.items():
        cells = [program]
        for key in ("wall", "cpu"):
            seconds, pairs = values_of(turns, key), zip(turns, base, strict=True)
            cells += [f"{median(seconds):.2f}", f"{min(seconds):.2f} - {max(seconds):.2f}"]
            ratios = [median(values_of([x], key)) / median(values_of([y], key)) for x, y in pairs]
            cells.append(f"{median(ratios):.2f}")
        cells += [f"{max(turn[key] for turn in turns) / 1e6:.0f}" for key in ("peak", "above")]
        rows.append(cells + [f"{median(values_of(turns, key)):.6g}" for key in counted])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        print("  ".join(x.rjust(width) for x, width in zip(cells, widths, strict=True)))


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    shape = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    cases = top.add_subparsers(dest="case", required=True)
    scores, train, mse = (cases.add_parser(name) for name in PREPARE)
    scores.add_argument("model", help="embedded:NAME, or a model's folder")
    scores.add_argument("--rows", type=int, default=16)
    scores.add_argument("--prompt", type=int, default=40, help="tokens")
    scores.add_argument("--completion", type=int, default=88, help="tokens")
    scores.set_defaults(warm=1, turns=5)
    train.add_argument("--model", required=True, help="folder in save_pretrained layout")
    train.add_argument("--questions", type=Path, required=True, help="GSM8K questions as .jsonl")
    train.add_argument("--prompts", type=int, default=4)
    train.add_argument("--group-size", type=int, default=8)
    train.add_argument("--length", type=int, default=48, help="tokens of the longest completion")
    train.add_argument("--learning-rate", type=float, default=1e-6)
    train.add_argument("--ours", nargs="*", default=["16384", "2048"])
    train.add_argument("--trl", nargs="*", default=["8", "8c", "32"])
    train.set_defaults(warm=1, repeats=2)
    mse.add_argument("overrides", nargs="*", help="overrides for the configuration, key=value")
    for case in (scores, train, mse):
        given = {"turns": 3, "warm": 0, "repeats": 1, "threads": 1}
        for name, default in given.items():
            known = case.get_default(name)
            case.add_argument(f"--{name}", type=int, default=default if known is None else known)
        case.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
        case.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
        case.add_argument("--against", type=Path, help="another checkout")
        case.add_argument("--inside", help=argparse.SUPPRESS)
        case.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    return top.parse_args()


def main() -> None:
    """Take turns and print the table, or run a single turn as a child process."""
    options = arguments()
    if options.inside:
        print(json.dumps(run_here(options)))
        return
    programs = {name: (name, ROOT) for name in programs_of(options)}
    if options.against:
        other = options.against.resolve()
        programs |= {f"{name}, {other.name}": (name, other) for name in list(programs)}
    measured: dict[str, list[Turn]] = {name: [] for name in programs}
    for number in range(options.turns):
        for name in list(programs) if number % 2 == 0 else list(programs)[::-1]:
            program, tree = programs[name]
            measured[name].append(take_turn(options, program, tree, number))
            print(f"turn {number}, {name}: {measured[name][-1]}", file=sys.stderr)
    report(measured)


if __name__ == "__main__":
    main()
