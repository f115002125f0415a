"""Time our training step and a step of TRL's GRPOTrainer with transformers generation.

    python scripts/benchmarks/speed.py train --model FOLDER --questions gsm8k/train.jsonl

Both sides use the same model, questions, group size, completion length, sampling (temperature 1,
full vocabulary), optimizer (AdamW) and learning rate. Rewards are drawn at random, so that no
advantage is zero. A turn loads the model, makes `--warm` steps and then `--repeats` timed steps.
TRL runs in a separate environment with the project's versions of torch and transformers, once for
each micro-batch size in --trl. These sizes are in completions, and `8c` means 8 completions with
gradient checkpointing, which is TRL's default. The option --ours gives values of
`micro_batch_tokens`.

Each side uses its default variant of PyTorch's AdamW (TRL's is fused). Our side uses leave_one_out
with algorithm1, and TRL uses dr_grpo without scaling. The two gradients are the same up to a
constant; see `compare_trl.py`. The columns `generate` are the wall and CPU seconds of generation,
and `tokens` is the number of completion tokens per step.
"""

from __future__ import annotations

import argparse
import atexit
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from both_sides import DrawnRewards, now
from trl_environment import add_environment_argument, environment, run_worker

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.config.train import TrainConfig
from grpo_ustat.records import Prompt
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.train import setup, trainer

TEMPLATE = "Question: {question}\nAnswer:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for the model, the questions, the shape of a step, and the micro-batches."""
    add_environment_argument(parser)
    parser.add_argument("--model", help="model's folder in save_pretrained layout")
    parser.add_argument("--questions", type=Path, help="GSM8K questions as .jsonl or .parquet")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument(
        "--length", type=int, default=48, help="largest number of tokens in a completion"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--ours", type=micro_batch, nargs="*", default=["16384", "2048"])
    parser.add_argument("--trl", type=micro_batch, nargs="*", default=["8", "8c", "32"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--bf16", action="store_true", help="compute in bfloat16 over float32 weights"
    )
    parser.set_defaults(warm=1, repeats=2)


def micro_batch(text: str) -> str:
    """Check a micro-batch: 8, or 8c with gradient checkpointing.

    >>> micro_batch("8"), micro_batch("16c")
    ('8', '16c')
    """
    number = text.removesuffix("c")
    if not number.isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a micro-batch: give a number, such as 8 or 8c"
        )
    return text


def programs(options: argparse.Namespace) -> list[str]:
    """Return the programs, each named by its side and micro-batch."""
    check(options)
    asked_questions(options)
    return [f"ours {x}" for x in options.ours] + [f"TRL {x}" for x in options.trl]


def check(options: argparse.Namespace) -> None:
    """Refuse options that a side cannot run."""
    count = options.prompts * options.group_size
    for micro in options.trl:
        if count % int(micro.removesuffix("c")):
            raise SystemExit(
                f"error: --trl {micro} does not divide {options.prompts} x {options.group_size} = "
                f"{count} completions per step: choose a divisor"
            )
    if options.bf16 and options.dtype != "float32":
        raise SystemExit(f"error: --bf16 needs float32 weights: remove --dtype {options.dtype}")
    if not options.model or not options.questions:
        raise SystemExit("error: --model FOLDER and --questions FILE are needed")
    if not (Path(options.model) / "tokenizer.json").is_file():
        raise SystemExit(f"error: --model {options.model} is not a folder with a tokenizer.json")


def read_questions(file: Path, count: int) -> list[str]:
    """Read the first `count` rendered prompts of a file with a `question` in every row."""
    if file.suffix == ".parquet":
        import pyarrow.parquet

        questions = pyarrow.parquet.read_table(file, columns=["question"])["question"].to_pylist()
    else:
        questions = [json.loads(line)["question"] for line in file.read_text().splitlines()]
    if len(questions) < count:
        raise SystemExit(f"error: {file} has {len(questions)} questions, {count} are needed")
    return [TEMPLATE.format(question=question) for question in questions[:count]]


class Questions:
    """Task with the questions of a file and random rewards."""

    def __init__(self, job: dict):
        self.given = [Prompt(p["id"], p["text"], p["text"], "", "drawn") for p in job["prompts"]]
        self.drawn = DrawnRewards(job["seed"], job["zero_variance"])

    def prompts(self, split: str) -> list[Prompt]:
        """Return the same prompts for every split."""
        return self.given

    def extract(self, completion: str) -> str | None:
        """Return None, because there are no answers."""
        return None

    def rewards(self, prompts: list[Prompt], completions: list[str]) -> list[float]:
        """Draw rewards that ignore the completions."""
        return [self.drawn.draw(prompt.id) for prompt in prompts]

    def take_counts(self) -> dict[str, int]:
        """Return no counts of failures."""
        return {}

    @property
    def dropped(self) -> dict[str, int]:
        """Counts of dropped questions, which are empty."""
        return {}

    # The task has no notes.
    note = ""
    reward_funcs: ClassVar[dict] = {}
    reward_weights_F = np.ones(1)


def our_configuration(job: dict) -> TrainConfig:
    """Compose this project's configuration for a job."""
    return compose_config("train", [
        "model=hub", f"model.model_name_or_path={job['model']}", f"model.dtype={job['dtype']}",
        f"launch.device={job['device']}", f"launch.num_threads={job['threads']}",
        "baseline=leave_one_out", f"group_size={job['group_size']}",
        f"budget.rollouts={job['group_size'] * job['prompts_per_step']}",
        f"max_completion_length={job['max_completion_length']}", f"seed={job['seed']}",
        f"learning_rate={job['learning_rate']}", f"micro_batch_tokens={job['micro_batch']}",
        f"dataset.train_size={len(job['prompts'])}",
        f"gradient_checkpointing={str(job['gradient_checkpointing']).lower()}",
        f"bf16={str(job['bf16']).lower()}",
    ])  # fmt: skip


def job_of(program: str, options: argparse.Namespace, questions: list[str], turn: int) -> dict:
    """Describe a program's job, with prompts in the order in which the steps use them."""
    side, micro = program.split()
    steps = options.warm + options.repeats
    job = {
        "model": options.model, "dtype": options.dtype, "device": options.device,
        "bf16": options.bf16, "threads": options.threads, "group_size": options.group_size,
        "prompts_per_step": options.prompts, "max_completion_length": options.length,
        "learning_rate": options.learning_rate, "micro_batch": int(micro.removesuffix("c")),
        "steps": steps, "gradient_checkpointing": micro.endswith("c"), "seed": turn,
        "zero_variance": [],
    }  # fmt: skip
    prompts = [
        {"id": f"question-{i}", "text": text}
        for i, text in enumerate(questions[: options.prompts * steps])
    ]
    job["prompts"] = prompts
    if side == "ours":
        return job
    config, given = our_configuration(job), Questions(job).given
    chosen = [trainer.choose_prompts(config, given, step) for step in range(steps)]
    order = [{"id": prompt.id, "text": prompt.text} for step in chosen for prompt in step]
    return job | {"prompts": order}


def asked_questions(options: argparse.Namespace) -> list[str]:
    """Read the questions for all steps."""
    return read_questions(options.questions, options.prompts * (options.warm + options.repeats))


def prepare(options: argparse.Namespace, program: str) -> Callable[[], dict[str, float]]:
    """Set up our trainer; a run is a training step."""
    job = job_of(program, options, asked_questions(options), options.number)
    sample_batch, generation = trainer.sample_batch, {}

    def timed_sample_batch(*arguments: Any) -> Any:
        start = now(options.device)
        batch = sample_batch(*arguments)
        wall, cpu = np.subtract(now(options.device), start)
        generation.update({"generate": float(wall), "generate CPU": float(cpu)})
        generation["tokens"] = int(batch.lengths_PG.sum())
        return batch

    setup.configured_task, trainer.sample_batch = lambda *_: Questions(job), timed_sample_batch
    config = our_configuration(job)
    place = tempfile.TemporaryDirectory()
    atexit.register(place.cleanup)
    run, progress = (
        setup.set_up(config, RunFolder(Path(place.name), config)),
        trainer.TrainProgress(),
    )

    def step() -> dict[str, float]:
        trainer.train_step(run, progress)
        return dict(generation)

    return step


def turn_elsewhere(options: argparse.Namespace, program: str, turn: int) -> dict | None:
    """Run a turn of TRL in its environment; return None for our programs."""
    if program.startswith("ours"):
        return None
    job = job_of(program, options, asked_questions(options), turn)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.json").write_text(json.dumps(job))
        run_worker(environment(options.environment), "steps", Path(folder))
        result = json.loads((Path(folder) / "result.json").read_text())
    return result | {"rows": result["rows"][options.warm :]}
