"""One training step of ours against one of TRL's GRPOTrainer with transformers generation.

    python scripts/benchmarks/train.py --model FOLDER --questions gsm8k/train.jsonl
    python scripts/benchmarks/train.py --model FOLDER --questions gsm8k/train.jsonl --device cuda \\
        --shape qwen2.5-0.5b --dtype bfloat16 --prompts 16 --length 256 --peak-tflops 989

Same model, questions, group size, completion length, sampling (temperature 1, whole vocabulary),
optimizer (AdamW) and learning rate; rewards are drawn at random, so no advantage is zero. A turn is
a program of its own on `--threads` threads: it loads the model, takes warm steps that do not count,
then timed ones. Programs take turns, so that a busy machine hits them alike. TRL runs in an
environment of its own, with the project's versions of torch and transformers, once for each
micro-batch given by --trl, in completions; --ours gives `micro_batch_tokens`. `8c` is 8 with
gradient checkpointing, TRL's default. `silent` has no reward in half of the groups: completions
whose advantage is zero, which ours skips.

Each side has PyTorch's AdamW as it comes (TRL's is fused). Objective: ours leave_one_out and
algorithm1, TRL's dr_grpo without scaling: the same gradient up to a constant, see `compare_trl.py`.
Printed: medians with the range over steps; ratios are of a turn's medians to those of the first row
with the same rewards in the same turn, their median and range over turns.
Memory: the peak of the program's resident set, libraries and model included; on a GPU that of
PyTorch's allocator. tokens/s counts completion tokens, length is a completion's on average.
--peak-tflops adds the share of that rate spent on the products of ordinary training: 2 operations
for each parameter and token in generation, 6 in the update; prompts count once a group in
generation and once a completion in the update. --shape puts random weights of that shape in place
of the model's, with the model's tokenizer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from both_sides import DrawnRewards, clock, peak_memory
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from trl_environment import add_environment_argument, environment, run_worker

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.config.train import TrainConfig
from grpo_ustat.records import Prompt
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.train import setup, trainer

TEMPLATE = "Question: {question}\nAnswer:"
QWEN = dict(
    vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
    num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """One row of the table.

    Attributes:
        side: `ours` or `TRL`.
        micro_batch: of a backward pass, in completions (TRL) or padded tokens (ours).
        gradient_checkpointing: whether activations are computed again in the backward pass.
        silent: whether half of the groups have no reward.
    """

    side: str
    micro_batch: int
    gradient_checkpointing: bool = False
    silent: bool = False

    @property
    def name(self) -> str:
        """As in the table."""
        words = [self.side, str(self.micro_batch) + "c" * self.gradient_checkpointing]
        return " ".join([*words, *(["silent"] if self.silent else [])])


def micro_batch(text: str) -> tuple[int, bool]:
    """8 or 8c: how much, and whether gradients are checkpointed.

    >>> micro_batch("8"), micro_batch("16c")
    ((8, False), (16, True))
    """
    number = text.removesuffix("c")
    if not number.isdigit() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number, as 8, or 8c")
    return int(number), text.endswith("c")


class Questions:
    """The task: questions of a file with drawn rewards."""

    def __init__(self, job: dict):
        self.given = [Prompt(p["id"], p["text"], p["text"], "", "drawn") for p in job["prompts"]]
        self.drawn = DrawnRewards(job["seed"], job["silent"])

    def prompts(self, split: str) -> list[Prompt]:
        """The same for every split."""
        return self.given

    def extract(self, completion: str) -> str | None:
        """Nothing: there are no answers."""
        return None

    def rewards(self, prompts: list[Prompt], completions: list[str]) -> list[float]:
        """Whatever the completions say."""
        return [self.drawn.draw(prompt.id) for prompt in prompts]

    def take_counts(self) -> dict[str, int]:
        """Nothing goes wrong."""
        return {}

    @property
    def dropped(self) -> dict[str, int]:
        """Nothing."""
        return {}

    note = ""  # there is nothing to say of them
    reward_funcs: ClassVar[dict] = {}
    reward_weights_F = np.ones(1)


def our_configuration(job: dict) -> TrainConfig:
    """The project's own configuration of a job."""
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


def our_turn(folder: Path) -> None:
    """Steps of our trainer on the job in `folder`, as `trl_worker.steps` does with TRL's."""
    job = json.loads((folder / "job.json").read_text())
    now, rows, original = clock(job), [], trainer.sample_batch

    def sample_batch(*arguments):
        start = now()
        batch = original(*arguments)
        rows.append({"generate": now() - start, "tokens": int(batch.lengths_PG.sum())})
        return batch

    setup.configured_task, trainer.sample_batch = lambda *_: Questions(job), sample_batch
    config = our_configuration(job)
    run, progress = setup.set_up(config, RunFolder(folder, config)), trainer.TrainProgress()
    for _ in range(job["warm"] + job["steps"]):
        start = now()
        trainer.train_step(run, progress)
        rows[-1]["step"] = now() - start
    found = {"rows": rows, "peak": peak_memory(job["device"])}
    (folder / "result.json").write_text(json.dumps(found))


@dataclass
class Measured:
    """What one program gave: its timed steps turn by turn, and the peaks of memory."""

    turns: list[list[dict]] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def values(self, what: str) -> list[float]:
        """`step`, `generate`, `update` or `tokens` of every step."""
        return [value(row, what) for rows in self.turns for row in rows]

    def median(self, what: str) -> float:
        """Over steps."""
        return statistics.median(self.values(what))

    def ratios(self, base: Measured, what: str) -> list[float]:
        """Of each turn's median to that of the base in the same turn, ascending."""
        pairs = zip(self.turns, base.turns, strict=True)
        return sorted(middle(mine, what) / middle(theirs, what) for mine, theirs in pairs)


def middle(rows: list[dict], what: str) -> float:
    """The median of some steps."""
    return statistics.median(value(row, what) for row in rows)


def value(row: dict, what: str) -> float:
    """A measurement of one step; the update is what generation leaves of the step."""
    return row["step"] - row["generate"] if what == "update" else row[what]


def take_turn(program: Program, job: dict, python: Path, measured: Measured) -> None:
    """Run one program once."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "job.json").write_text(json.dumps(job))
        if program.side == "ours":
            subprocess.run([sys.executable, __file__, "--turn", folder], check=True)
        else:
            run_worker(python, "steps", folder)
        found = json.loads((folder / "result.json").read_text())
    measured.turns.append(found["rows"][job["warm"] :])
    measured.peaks.append(found["peak"])


def job_of(program: Program, asked, model: str, questions: list[str], turn: int) -> dict:
    """What a program is told; prompts in the order of the steps."""
    job = {
        "model": model, "dtype": asked.dtype, "device": asked.device, "clock": asked.clock,
        "bf16": asked.bf16,
        "threads": asked.threads, "group_size": asked.group_size,
        "prompts_per_step": asked.prompts,
        "max_completion_length": asked.length, "learning_rate": asked.learning_rate,
        "micro_batch": program.micro_batch, "warm": asked.warm, "steps": asked.steps,
        "gradient_checkpointing": program.gradient_checkpointing, "seed": turn, "silent": [],
    }  # fmt: skip
    texts = questions[: asked.prompts * (asked.warm + asked.steps)]
    prompts = [{"id": f"question-{i}", "text": text} for i, text in enumerate(texts)]
    job["prompts"] = prompts
    config, given = our_configuration(job), Questions(job).given
    chosen = [trainer.choose_prompts(config, given, s) for s in range(asked.warm + asked.steps)]
    order = [{"id": prompt.id, "text": prompt.text} for step in chosen for prompt in step]
    if program.silent:
        job["silent"] = [p.id for step in chosen for p in step[: asked.prompts // 2]]
    return job | ({} if program.side == "ours" else {"prompts": order})


def read_questions(file: Path, count: int) -> list[str]:
    """The first `count` rendered prompts of a file with a `question` in every row.

    Raises:
        SystemExit: there are fewer.
    """
    if file.suffix == ".parquet":
        import pyarrow.parquet

        found = pyarrow.parquet.read_table(file, columns=["question"])["question"].to_pylist()
    else:
        found = [json.loads(line)["question"] for line in file.read_text().splitlines()]
    if len(found) < count:
        raise SystemExit(f"error: {file} has {len(found)} questions, {count} are needed")
    return [TEMPLATE.format(question=question) for question in found[:count]]


def random_weights(asked, folder: Path) -> str:
    """A folder with random weights of the shape asked for and the model's own tokenizer."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(asked.model)
    ends = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Qwen2Config(**QWEN, **ends), dtype=getattr(torch, asked.dtype)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@dataclass(frozen=True)
class Facts:
    """What the table says of model and prompts: parameters, and tokens of a prompt on average."""

    parameters: int
    prompt_tokens: float


def facts_of(model: str, questions: list[str]) -> Facts:
    """Without loading the weights."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    tokens = PreTrainedTokenizerFast.from_pretrained(model)(questions)["input_ids"]
    count = sum(parameter.numel() for parameter in empty.parameters())
    return Facts(count, statistics.mean(map(len, tokens)))


def programs(asked) -> list[Program]:
    """Every row of the table, those with silent groups last."""
    sides = [("ours", *each) for each in asked.ours] + [("TRL", *each) for each in asked.trl]
    silent = [Program("ours", *asked.ours[0], True), Program("TRL", *asked.trl[0], True)]
    return [Program(*side) for side in sides] + (silent if asked.silent else [])


def check(asked) -> None:
    """Refuse what one side could not do.

    Raises:
        SystemExit: naming the values.
    """
    count = asked.prompts * asked.group_size
    for micro, _ in asked.trl:
        if count % micro:
            raise SystemExit(
                f"error: --trl {micro} does not divide {asked.prompts} x {asked.group_size} = "
                f"{count} completions a step"
            )
    if asked.bf16 and asked.dtype != "float32":
        raise SystemExit(
            f"error: --bf16 computes over float32 weights: leave out --dtype {asked.dtype}"
        )
    if asked.silent and asked.prompts < 2:
        raise SystemExit("error: --silent needs --prompts of at least 2")
    if not asked.model or not asked.questions:
        raise SystemExit("error: --model FOLDER and --questions FILE are needed")
    if not (Path(asked.model) / "tokenizer.json").is_file():
        raise SystemExit(f"error: --model {asked.model} is not a folder with a tokenizer.json")


def share_of_peak(asked, facts: Facts, found: Measured) -> float:
    """The products of ordinary training in a median step, as a share of --peak-tflops."""
    tokens, read = found.median("tokens"), asked.prompts * facts.prompt_tokens
    generation = 2 * facts.parameters * (read + tokens)
    update = 6 * facts.parameters * (read * asked.group_size + tokens)
    return (generation + update) / found.median("step") / (asked.peak_tflops * 1e12)


def report(asked, facts: Facts, measured: dict[Program, Measured]) -> None:
    """Print the table; ratios are to the first row with the same rewards."""
    title, dtype = asked.shape or asked.model, asked.dtype + " with bf16" * asked.bf16
    print(f"\n{title}: {facts.parameters / 1e6:.1f} M parameters, {dtype}, {asked.device}, ")
    print(f"{asked.prompts} prompts of {facts.prompt_tokens:.0f} tokens on average x ", end="")
    print(f"{asked.group_size} completions of at most {asked.length}, ", end="")
    print(f"{asked.turns} turns of {asked.steps} steps, torch {torch.__version__}, ", end="")
    print(f"{asked.clock} time, {asked.threads} thread(s)")
    print(f"{'':18}{'step s':>8}{'range':>17}{'ratio':>7}{'range':>14}{'generate':>10}", end="")
    print(
        f"{'ratio':>7}{'update':>8}{'ratio':>7}{'peak MB':>9}{'ratio':>7}{'tokens/s':>10}", end=""
    )
    print(f"{'length':>8}", end="")
    print(f"{'of peak':>9}" if asked.peak_tflops else "")
    for program, found in measured.items():
        base = next(x for p, x in measured.items() if p.silent == program.silent)
        share = f"{share_of_peak(asked, facts, found):9.1%}" if asked.peak_tflops else ""
        print(row(asked, program, found, base) + share)


def row(asked, program: Program, found: Measured, base: Measured) -> str:
    """One line of the table."""
    text = f"{program.name:18}{found.median('step'):8.2f}{span(found.values('step')):>17}"
    for what, width in (("step", 0), ("generate", 10), ("update", 8)):
        ratios = found.ratios(base, what)
        text += f"{found.median(what):{width}.2f}" if width else ""
        text += f"{statistics.median(ratios):7.2f}"
        text += "" if width else f"{span(ratios):>14}"
    peak, tokens = max(found.peaks), found.values("tokens")
    text += f"{peak / 1e6:9.0f}{peak / max(base.peaks):7.2f}"
    text += f"{sum(tokens) / sum(found.values('step')):10.1f}"
    return text + f"{statistics.mean(tokens) / asked.prompts / asked.group_size:8.1f}"


def span(values: list[float]) -> str:
    """Smallest and largest."""
    return f"{min(values):.2f} - {max(values):.2f}"


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_environment_argument(parser)
    parser.add_argument("--model", help="folder in save_pretrained layout")
    parser.add_argument("--questions", type=Path, help="GSM8K as .jsonl or .parquet")
    numbers = dict(prompts=4, group_size=8, length=48, threads=1, turns=3, warm=1, steps=2)
    for key, default in numbers.items():
        parser.add_argument(f"--{key.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    sides = dict(ours=[(16384, False), (2048, False)], trl=[(8, False), (8, True), (32, False)])
    for side, default in sides.items():
        parser.add_argument(
            f"--{side}", type=micro_batch, nargs="+", default=default, metavar="MICRO"
        )
    parser.add_argument("--silent", action="store_true", help="rows with silent groups too")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--clock", default="wall", choices=["wall", "process"],
        help="process: of each program alone, for a busy machine",
    )  # fmt: skip
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--bf16", action="store_true", help="compute in it over --dtype float32")
    parser.add_argument("--shape", choices=["qwen2.5-0.5b"], help="random weights")
    parser.add_argument("--peak-tflops", type=float, help="of the device, in 10^12 a second")
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)  # a folder: be one program
    return parser.parse_args()


def main() -> None:
    """Entry."""
    asked = arguments()
    if asked.turn:
        return our_turn(asked.turn)
    check(asked)
    questions = read_questions(asked.questions, asked.prompts * (asked.warm + asked.steps))
    python, measured = environment(asked.environment), {p: Measured() for p in programs(asked)}
    with tempfile.TemporaryDirectory() as folder:
        model = random_weights(asked, Path(folder)) if asked.shape else asked.model
        for turn in range(asked.turns):
            for program, found in measured.items():
                take_turn(program, job_of(program, asked, model, questions, turn), python, found)
                print(f"turn {turn}, {program.name}: {found.turns[-1]}", file=sys.stderr)
        report(asked, facts_of(model, questions), measured)


if __name__ == "__main__":
    main()
