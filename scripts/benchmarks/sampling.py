"""Time of `rollout=local`: completions of unequal lengths, of one length, of the model's own.

Every completion is as long as a reference answer of the questions in tokens of the model
(`gsm8k`), as the longest allowed (`equal`), or ends where the model ends it (`own`, on arithmetic).
With `--against FOLDER`, another checkout, the two take turns, a process each.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and tokens of one call of `sample`, after a short one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from grpo_ustat.policy.loading import Policy, load_policy
    from grpo_ustat.records import Prompt
    from grpo_ustat.rollout import local

    torch.set_num_threads(options.threads)
    policy = load_policy(options.model)
    longest = options.longest
    if options.lengths == "own":
        texts = [f"{i % 89 + 10}+{i % 7 + 2}*3=" for i in range(options.prompts)]
    else:
        rows = [json.loads(line) for line in Path(options.questions).read_text().splitlines()]
        rows = rows[: options.prompts * options.group]
        texts = [row["question"] for row in rows[: options.prompts]]
        texts = [text[: len(text) // options.letters] for text in texts]
        ids = policy.encode([row["answer"] for row in rows])
        answers = [len(row) // options.letters + 1 for row in ids]
        uniforms = local.uniforms

        def until_the_end(*args: Any) -> np.ndarray:
            """u = 0 draws token 0, which ends, at the row's length, and never before it."""
            draws, prompt, completions = np.maximum(uniforms(*args), 0.02), args[3], args[4]
            for row, i in zip(draws, completions, strict=True):
                length = answers[(int(prompt) * options.group + i) % len(answers)]
                if options.lengths == "gsm8k":
                    row[min(length, longest, len(row)) - 1] = 0
            return draws

        if options.shape == "small":
            torch.manual_seed(0)
            config = LlamaConfig(
                vocab_size=len(policy.tokenizer), hidden_size=256, intermediate_size=688,
                num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
            )  # fmt: skip
            policy = Policy(LlamaForCausalLM(config).eval(), policy.tokenizer, frozenset({0}), 0)
        policy = Policy(policy.model, policy.tokenizer, frozenset({0}), 0)
        local.uniforms = until_the_end
    prompts = [Prompt(str(i), text, text, "", "") for i, text in enumerate(texts)]
    sampling = local.Sampling(0, "benchmark", longest, rows=options.rows)
    local.sample(policy, prompts[:1], 2, local.Sampling(0, "warm", 4, rows=2))
    start, cpu = time.perf_counter(), cpu_seconds()
    rollouts = local.sample(policy, prompts, options.group, sampling)
    wall, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    tokens = rollouts.lengths_PG
    return {
        "wall": wall, "cpu": cpu, "tokens": int(tokens.sum()), "longest": int(tokens.max()),
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "check": int((rollouts.tokens_PGT % 9973).sum()),
    }  # fmt: skip


def cpu_seconds() -> float:
    """Of this process, user and system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure this checkout, or it and another in turns; print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="embedded:tiny", help="embedded:NAME or a folder")
    parser.add_argument("--shape", choices=["own", "small"], default="own")
    parser.add_argument("--lengths", choices=["gsm8k", "equal", "own"], default="own")
    parser.add_argument("--questions", help="gsm8k/train.jsonl")
    parser.add_argument("--letters", type=int, default=1, help="of a token, if the model spells")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--longest", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(measure(options)))
        return
    trees = {"this": ROOT} | ({"other": options.against} if options.against else {})
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for turn in range(options.turns):
        for name in sorted(trees, reverse=bool(turn % 2)):
            environment = os.environ | {"PYTHONPATH": str(trees[name])}
            command = [sys.executable, __file__, "--inside", *sys.argv[1:]]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            results[name].append(json.loads(done.stdout.splitlines()[-1]))
    for name, rows in results.items():
        cells = [f"{rows[0]['tokens']} tokens, check {rows[0]['check']}"]
        for key in ("cpu", "wall", "peak MB"):
            values = [row[key] for row in rows]
            cells.append(
                f"{key} {statistics.median(values):.4g} ({min(values):.4g} - {max(values):.4g})"
            )
        print(f"{name}: {', '.join(cells)}")
    if options.against:
        ratios = [
            statistics.median(r[key] for r in results["other"])
            / statistics.median(r[key] for r in results["this"])
            for key in ("cpu", "wall")
        ]
        print(f"other / this: cpu {ratios[0]:.2f}, wall {ratios[1]:.2f}")


if __name__ == "__main__":
    main()
