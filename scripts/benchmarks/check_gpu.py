"""Test and measure a GPU: products, correctness, sampling, scores, updates, ranks, a study.

    python scripts/benchmarks/check_gpu.py                              # everything, on cuda
    python scripts/benchmarks/check_gpu.py correct sampling scores --minutes 4 --json gpu.json
    python scripts/benchmarks/check_gpu.py --device cpu --shape tiny    # trial run without a GPU

    rates      speed of products of two square matrices in float32, TF32 and bfloat16, in TFLOP/s
    correct    tests/gpu: draws, scores and an update, compared with the CPU in float64
    sampling   tokens per second at `--rows` in float32, TF32 and bfloat16, and the numbers of
               kernels and of launches for one token of all rows
    scores     seconds and peak memory for a question's completions of unequal lengths, with the
               full graph and layer by layer, in float32, with TF32 products, and in bfloat16; also
               the difference of the Gram matrix from its float32 value
    update     steps of `train` with random rewards: tokens per second of sampling and of updates
    ranks      two steps of `train` with FSDP2 on one NCCL rank (two gloo ranks on a CPU), stopped
               after the first step and resumed
    study      A_0, A_V and G* of `mse model=tiny` on the device and on the CPU, in float64

Each part runs in a separate process, which is stopped after `--minutes`. If a part fails or is
stopped, the other parts still run. The model with `--shape qwen2.5-0.5b` has random weights, and
the model with `--shape tiny` is the embedded policy. The script prints a table; `--json` stores the
rows with the device and the versions. Repeated measurements are shown as a median with its range.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
QWEN = dict(
    vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
    num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
DRAWN_REWARD = """import zlib


def drawn(prompt, completion):
    return zlib.crc32(completion.encode()) / 2**32
"""
Row = dict[str, Any]


def policy_of(options: argparse.Namespace, dtype: str) -> Any:
    """Load the embedded policy, or make a model of the shape that never ends a completion.

    Models are imported within functions, because four of the parts only start commands and need no
    model.
    """
    from transformers import AutoModelForCausalLM, Qwen2Config

    from grpo_ustat.policy.loading import Policy, load_policy

    policy = load_policy("embedded:tiny", dtype=dtype, device=options.device)
    if options.shape == "tiny":
        return policy
    torch.manual_seed(0)
    with torch.device(options.device):
        # The weights are the same in every precision, up to rounding.
        model = AutoModelForCausalLM.from_config(Qwen2Config(**QWEN), dtype=torch.float32)
        model = model.to(getattr(torch, dtype)).eval()
    return Policy(model, policy.tokenizer, frozenset({QWEN["vocab_size"]}), 0)


def clock(options: argparse.Namespace, work: Callable[[], Any], repeats: int = 3) -> list[float]:
    """Time each repetition of the work in seconds, after an unmeasured warm-up."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if options.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def spread(name: str, values: Sequence[float]) -> Row:
    """Return a median and its range."""
    return {name: statistics.median(values), "range": [min(values), max(values)]}


def rates(options: argparse.Namespace) -> Iterator[Row]:
    """Time products of square matrices."""
    size = 8192 if options.device == "cuda" else 512
    for name, dtype, tf32 in (
        ("float32", torch.float32, False), ("TF32", torch.float32, True),
        ("bfloat16", torch.bfloat16, False),
    ):  # fmt: skip
        torch.backends.cuda.matmul.allow_tf32 = tf32
        a = torch.randn(size, size, dtype=dtype, device=options.device)
        seconds = clock(options, lambda a=a: a @ a, repeats=5)
        per_second = [2 * size**3 / each / 1e12 for each in seconds]
        yield {"what": f"{name}, {size}^3", **spread("TFLOP/s", per_second)}


def correct(options: argparse.Namespace) -> Iterator[Row]:
    """Run tests/gpu on the device."""
    environment = os.environ | {"GRPO_USTAT_TEST_DEVICE": options.device}
    command = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests/gpu")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    yield {"what": "tests/gpu", "exit code": done.returncode, "said": done.stdout[-3000:].strip()}


def sampling(options: argparse.Namespace) -> Iterator[Row]:
    """Time `rollout=local`; unless the shape is `tiny`, all rows have the maximum length."""
    from grpo_ustat.policy.precision import set_tf32
    from grpo_ustat.records import Prompt
    from grpo_ustat.rollout.local import Sampling, sample

    width = 16 if options.device == "cpu" else 256
    for kind in ("bfloat16", "TF32", "float32"):
        set_tf32(kind == "TF32")
        policy = policy_of(options, "bfloat16" if kind == "bfloat16" else "float32")
        for rows in options.rows[: 1 if options.device == "cpu" else None]:
            prompts = [Prompt(str(i), f"What is {i} + {i}?", "", "", "") for i in range(rows // 8)]

            def work(policy=policy, prompts=prompts, rows=rows, length=width):
                return sample(policy, prompts, 8, Sampling(0, "check", length, rows=rows))

            tokens = []
            seconds = clock(options, lambda w=work, t=tokens: t.append(w().lengths_PG.sum()))
            yield {
                "what": f"{rows} rows x {width}, {kind}",
                **spread("tokens/s", [int(tokens[-1]) / each for each in seconds]),
                **launches(options, work),
            }


def launches(options: argparse.Namespace, work: Callable[..., Any]) -> Row:
    """Count kernels and host launches per additional token of all rows; empty on a CPU."""
    if options.device == "cpu":
        return {}
    counts = []
    for length in (8, 16):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work(length=length)
        events = profile.key_averages()
        by_host = sum(event.count for event in events if "Launch" in event.key)
        on_device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
        counts.append((sum(event.count for event in on_device), by_host))
    (kernels, by_host), (more_kernels, more_by_host) = counts
    return {
        "kernels a token": (more_kernels - kernels) / 8,
        "launches a token": (more_by_host - by_host) / 8,
    }


def scores(options: argparse.Namespace) -> Iterator[Row]:
    """Time everything that a study computes for a question's completions of 64 to 256 tokens."""
    from grpo_ustat.policy.scores import completion_scores

    count, prompt, longest = (32, 60, 256) if options.device == "cuda" else (4, 6, 16)
    in_float32 = None
    for dtype, tf32 in (("float32", False), ("float32", True), ("bfloat16", False)):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        model = policy_of(options, dtype).model
        # The tokens are random. The vocabulary has at least 90 tokens.
        torch.manual_seed(0)
        most = min(model.config.vocab_size, 2000)
        ids = torch.randint(0, most, (count, prompt + longest), device=options.device)
        lengths = torch.linspace(longest // 4, longest, count).long().to(options.device)
        place = torch.arange(prompt + longest, device=options.device)
        attention = (place < prompt + lengths[:, None]).long()
        completion = attention * (place >= prompt)
        weights = torch.ones(2, count, device=options.device)
        for by_layer in (False, True):
            work = partial(
                completion_scores, model, ids, attention, completion, weights, gram=True,
                by_layer=by_layer,
            )  # fmt: skip
            grams = []
            if options.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds = clock(options, lambda w=work, g=grams: g.append(w().gram_BB.cpu()))
            peak = torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else None
            in_float32 = grams[-1] if in_float32 is None else in_float32
            difference = (grams[-1] - in_float32).norm() / in_float32.norm()
            way = "layer by layer" if by_layer else "whole"
            kind = "TF32" if tf32 else dtype
            what = f"{count} x ({prompt} + {longest}), {kind}, {way}"
            yield {
                "what": what, **spread("seconds", seconds), "peak GiB": peak,
                "Gram matrix off by": float(difference),
            }  # fmt: skip


def update(options: argparse.Namespace) -> Iterator[Row]:
    """Time steps of `train`, using the times in its metrics.

    On a GPU each step has 128 completions of 256 tokens. The steps run in bfloat16 over float32
    weights, and in float32.
    """
    with tempfile.TemporaryDirectory() as place:
        reward = Path(place) / "reward.py"
        reward.write_text(DRAWN_REWARD)
        words = [f"reward_funcs=[task,{reward}:drawn]", "max_steps=6", "save_steps=6"]
        words += ["eval_steps=6", "dataset.test_size=4"]
        model = "tiny"
        if options.shape != "tiny":
            model = str(Path(place) / "model")
            policy = policy_of(options, "float32")
            policy.model.save_pretrained(model)
            policy.tokenizer.save_pretrained(model)
            del policy
            words += ["prompt=bare", "budget.rollouts=128", "max_completion_length=256"]
        for bf16 in ("true", "false")[options.device == "cpu" :]:
            folder = Path(place) / bf16
            folder.mkdir()
            train(options, str(folder), *words, f"bf16={bf16}", model=model)
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            last = [json.loads(line) for line in lines][2:]
            updates = [row["tokens"] / (row["step_time"] - row["seconds_generate"]) for row in last]
            samples = [row["tokens"] / row["seconds_generate"] for row in last]
            for what, values in (("sampling", samples), ("update", updates)):
                name = f"train bf16={bf16}, {Path(model).name}, {what}"
                yield {"what": name, **spread("tokens/s", values)}
            step = [row["step_time"] for row in last]
            yield {"what": f"train bf16={bf16}, a step", **spread("seconds", step)}


def ranks(options: argparse.Namespace) -> Iterator[Row]:
    """Train with FSDP2 for a step, and resume the run for a second step."""
    count = 1 if options.device == "cuda" else 2
    config = str(ROOT / "grpo_ustat/launch/accelerate/fsdp2.yaml")
    launcher = [
        "accelerate.commands.launch",
        "--config_file",
        config,
        "--num_processes",
        str(count),
    ]
    launcher += ["--main_process_port", "0", "-m"]
    with tempfile.TemporaryDirectory() as folder:
        for steps in ("max_steps=1", "max_steps=2"):
            train(options, folder, steps, "save_steps=1", launcher=launcher)
        rows = len((Path(folder) / "metrics.jsonl").read_text().splitlines())
        yield {"what": f"FSDP2 on {count} ranks, saved and resumed", "steps": rows}


def train(
    options: argparse.Namespace,
    folder: str,
    *overrides: str,
    launcher: Sequence[str] = (),
    model: str = "tiny",
) -> None:
    """Run a small `train` on the device, directly or with a launcher's module."""
    small = ("debug=train", f"model={model}", "model.dtype=float32", "budget.rollouts=64")
    place = (f"hydra.run.dir={folder}", f"launch.device={options.device}", "on_existing=resume")
    command = [sys.executable, "-m", *launcher, "grpo_ustat.train", *small, *place, *overrides]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])


def study(options: argparse.Namespace) -> Iterator[Row]:
    """Run the same study on the device and on the CPU.

    In float64, both devices draw the same tokens. A GPU also runs the study in float32 with TF32
    products, which is the default on GPUs.
    """
    questions = 50 if options.device == "cuda" else 6
    runs = [("cpu", "float64")]
    if options.device == "cuda":
        runs += [("cuda", "float64"), ("cuda", "float32")]
    for device, dtype in runs:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable, "-m", "grpo_ustat.mse", "model=tiny", "launch.workers=1",
                f"study.questions={questions}", "budget.pool_completions=16",
                f"launch.device={device}", f"model.dtype={dtype}", f"hydra.run.dir={folder}",
            ]  # fmt: skip
            start = time.perf_counter()
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr[-1500:])
            seconds = time.perf_counter() - start
            result = json.loads((Path(folder) / "result.json").read_text())
            a0 = result["assumption2"]["a0"]
            yield {
                "what": f"mse model=tiny, {questions} questions, {dtype}, {device}",
                "seconds": seconds,
                "A_0": a0,
                "A_V": a0 + result["assumption2"]["av_minus_a0"],
                "G*": result["scaling"]["gstar"],
            }


PARTS = {part.__name__: part for part in (rates, correct, sampling, scores, update, ranks, study)}


def main() -> None:
    """Run each part in a process with a time limit, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=["qwen2.5-0.5b", "tiny"])
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128, 512], help="of sampling")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of each part")
    parser.add_argument("--json", type=Path, help="file to which the rows are written")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        for row in PARTS[options.parts[0]](options):
            print(json.dumps(row), flush=True)
        return
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    facts = {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    results: dict[str, Any] = {**facts, "rows": []}
    for part in options.parts or PARTS:
        print(f"\n{part}", flush=True)
        for row in run_part(part, options):
            results["rows"].append({"part": part, **row})
            cells = [f"{key} {cell(value)}" for key, value in row.items() if key != "what"]
            print(f"  {row['what']}: {', '.join(cells)}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))


def run_part(part: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield a part's rows, and a further row if the part failed or was stopped."""
    command = [
        sys.executable, __file__, part, "--inside", "--device", options.device, "--shape",
        options.shape, "--rows", *map(str, options.rows),
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        timer = threading.Timer(60 * options.minutes, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        code, cut = process.wait(), not timer.is_alive()
        timer.cancel()
        errors.seek(0)
        reason = f"exit code {code}: {errors.read()[-1500:].strip()}"
    if code:
        yield {
            "what": "not finished",
            "why": f"stopped after {options.minutes:g} minutes" if cut else reason,
        }


def cell(value: Any) -> str:
    """Format a value for the table."""
    if isinstance(value, list):
        return " to ".join(map(cell, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
