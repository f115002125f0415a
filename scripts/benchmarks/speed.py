"""Measure the time and memory of programs in alternating turns, in separate processes.

    python scripts/benchmarks/speed.py CASE --help

{cases}

A turn starts a process, prepares it (loading a model is not measured), makes `--warm` unmeasured
runs and then `--repeats` measured runs. The turns of the programs alternate, so that other load on
the machine affects all programs equally. `--against FOLDER` also runs each program with the package
in another checkout. Wall and CPU seconds include child processes. For wall and CPU seconds, the
table shows the median and the range over all runs, and the ratio to the first program. To compute
this ratio, the medians within each turn are divided, and the median over turns is taken. Memory is
the peak resident set of a turn's process (on a GPU, the peak of the allocator), in total and
relative to its size before the runs. Further columns are medians of numbers that the programs
themselves count.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from both_sides import now, peak_memory

ROOT = Path(__file__).resolve().parents[2]
CASES = ("scores", "sampling", "train", "mse", "questions", "estimates", "gap", "start", "meter")
# A turn's result: rows of its runs, and bytes of memory. `peak` is the total peak, and `above` is
# the peak minus the memory before the runs.
Turn = dict[str, Any]


def run_here(case: Any, options: argparse.Namespace) -> Turn:
    """Prepare and run a program in this process."""
    run = case.prepare(options, options.inside)
    device = getattr(options, "device", "cpu")
    before, rows = peak_memory(device), []
    for number in range(options.warm + options.repeats):
        wall, cpu = now(device)
        counted = run() or {}
        wall_end, cpu_end = now(device)
        if number >= options.warm:
            rows.append({"wall": wall_end - wall, "cpu": cpu_end - cpu} | counted)
    peak = peak_memory(device)
    return {"rows": rows, "peak": peak, "above": peak - before}


def take_turn(
    case: Any, options: argparse.Namespace, program: str, tree: Path, number: int
) -> Turn:
    """Run a program in a separate process with the package in the given checkout."""
    if hasattr(case, "turn_elsewhere") and (turn := case.turn_elsewhere(options, program, number)):
        return turn
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


def ratio_of(turns: Sequence[Turn], base: Sequence[Turn], key: str) -> float:
    """Return the median over turns of the ratio of the two programs' medians within a turn."""
    pairs = zip(turns, base, strict=True)
    return median(median(values_of([x], key)) / median(values_of([y], key)) for x, y in pairs)


def report(measured: dict[str, list[Turn]]) -> None:
    """Print the table; ratios are to the first program."""
    base = next(iter(measured.values()))
    counted = [key for key, x in base[0]["rows"][0].items() if isinstance(x, int | float)]
    counted = [key for key in counted if key not in ("wall", "cpu")]
    columns = ["program", "wall s", "range", "ratio", "CPU s", "range", "ratio", "peak MB", "above"]
    rows = [columns + counted]
    for program, turns in measured.items():
        cells = [program]
        for key in ("wall", "cpu"):
            seconds = values_of(turns, key)
            cells += [f"{median(seconds):.2f}", f"{min(seconds):.2f} - {max(seconds):.2f}"]
            cells.append(f"{ratio_of(turns, base, key):.2f}")
        cells += [f"{max(turn[key] for turn in turns) / 1e6:.0f}" for key in ("peak", "above")]
        cells += [f"{median(values_of(turns, key)):.6g}" for key in counted]
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        print("  ".join(x.rjust(width) for x, width in zip(cells, widths, strict=True)))


def first_lines() -> str:
    """Return one line per case, with the first line of the case's docstring."""
    files = {case: Path(__file__).parent / "timed" / f"{case}.py" for case in CASES}
    texts = {case: ast.get_docstring(ast.parse(file.read_text())) for case, file in files.items()}
    return "\n".join(f"    {case:12}{text.splitlines()[0]}" for case, text in texts.items() if text)


def arguments() -> tuple[Any, argparse.Namespace]:
    """Import the case's module, and parse the command line with its options."""
    layout = argparse.RawDescriptionHelpFormatter
    description = (__doc__ or "").replace("{cases}", first_lines())
    top = argparse.ArgumentParser(description=description, formatter_class=layout)
    top.add_argument("case", choices=CASES)
    top.add_argument("options", nargs=argparse.REMAINDER)
    chosen = top.parse_args()
    case = import_module(f"timed.{chosen.case}")
    parser = argparse.ArgumentParser(
        prog=f"speed.py {chosen.case}", description=case.__doc__, formatter_class=layout
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--warm", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    case.add_arguments(parser)
    return case, parser.parse_args(chosen.options)


def main() -> None:
    """Take turns and print the table, or run a single turn as a child process."""
    case, options = arguments()
    if options.inside:
        print(json.dumps(run_here(case, options)))
        return
    programs = {name: (name, ROOT) for name in case.programs(options)}
    if options.against:
        other = options.against.resolve()
        programs |= {f"{name}, {other.name}": (name, other) for name in list(programs)}
    measured: dict[str, list[Turn]] = {name: [] for name in programs}
    for number in range(options.turns):
        order = list(programs) if number % 2 == 0 else list(programs)[::-1]
        for name in order:
            program, tree = programs[name]
            measured[name].append(take_turn(case, options, program, tree, number))
            print(f"turn {number}, {name}: {measured[name][-1]}", file=sys.stderr)
    report(measured)
    if hasattr(case, "compare"):
        case.compare(measured)


if __name__ == "__main__":
    main()
