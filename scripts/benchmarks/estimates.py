"""How far `dry_run=true` is from what runs take: memory, and time after a short run of the model.

    python scripts/benchmarks/estimates.py --model FOLDER --json estimates.json

Each command runs once to be measured. Time is estimated from a short run of the same model before
it, as `dry_run=true` advises. Seconds are of the wall clock with start-up; memory is the largest
process's peak.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

from grpo_ustat.cli.compose import parse
from grpo_ustat.costs.cost import total
from grpo_ustat.costs.duration import duration, one_after_the_other

SMALL = ("dataset=plus_one", "prompt=plain", "max_completion_length=24", "study.questions=4")
COMMANDS = {  # name: verb, words, words of the short run before it
    "train, seconds": ("train", ["debug=train"], None),
    "train": (
        "train",
        ["model=tiny", "max_steps=4", "eval_steps=4"],
        ["model=tiny", "max_steps=2"],
    ),
    "mse": ("mse", ["study.questions=100"], ["study.questions=8"]),
    "mse, another model": (
        "mse",
        ["model={model}", *SMALL, "budget.pool_completions=16", "baselines=[none,oracle]"],
        ["model={model}", *SMALL, "budget.pool_completions=4", "study.questions=2"],
    ),
    "sweep": (
        "mse",
        ["-m", "model=tiny_direct", "study.questions=40", "budget.pool_completions=16,32"],
        ["model=tiny_direct", "study.questions=8"],
    ),
}


def measured(verb: str, words: list[str], root: str) -> dict[str, float]:
    """Seconds and peak MB of a command, in a process of its own that has no other children."""
    process = subprocess.run(
        [sys.executable, __file__, "--measure", verb, *words, f"output_root={root}"],
        stdout=subprocess.PIPE, check=True, text=True,
    )  # fmt: skip
    return json.loads(process.stdout.splitlines()[-1])


def measure(verb: str, words: list[str]) -> None:
    start = time.monotonic()
    command = [sys.executable, "-m", "grpo_ustat", verb, *words]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6
    print(json.dumps({"seconds": time.monotonic() - start, "peak_mb": peak}))


def estimated(verb: str, words: list[str], root: str) -> dict[str, float | None]:
    """Seconds, None where nothing is known, and MB."""
    planned_runs = parse(verb, [*words, f"output_root={root}"]).planned_runs
    planner = import_module(f"grpo_ustat.{verb}.plan")
    plans = [planner.plan(planned) for planned in planned_runs]
    seconds = one_after_the_other([duration(plan) for plan in plans])
    memory = total([plan.cost for plan in plans]).memory
    return {"seconds": seconds, "peak_mb": None if memory is None else memory / 1e6}


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder, for the study of another model")
    parser.add_argument("--only", nargs="*", default=list(COMMANDS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = {}
    for name in options.only:
        verb, words, before = COMMANDS[name]
        if "{model}" in " ".join(words) and not options.model:
            continue
        words = [word.format(model=options.model) for word in words]
        with tempfile.TemporaryDirectory() as root:
            if before is not None:
                measured(verb, [word.format(model=options.model) for word in before], root)
            row = {"estimated": estimated(verb, words, root)}
            row["measured"] = measured(verb, words, root)
        rows[name] = row
        pairs = [(key, row["estimated"][key], row["measured"][key]) for key in row["measured"]]
        texts = [
            f"{key} {first:.0f} / {second:.0f} = {first / second:.2f}"
            if first
            else f"{key} unknown"
            for key, first, second in pairs
        ]
        print(f"{name}: {', '.join(texts)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
