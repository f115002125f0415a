"""Measure G*, n_c, the prompts' share of the noise and a loss's efficiency by checkpoint.

    python scripts/tools/along_training.py outputs/train/NAME/seed-0 [more runs] [mse overrides]
    python scripts/tools/along_training.py docs/examples/smollm2/full docs/examples/smollm2/lora

Studies are written to `mse/checkpoint-<step>/` in the run folder and are not repeated. If a run's
checkpoints no longer exist, its finished studies are read. The studies use the run's questions,
prompt and temperature. They measure n_c, the prompts' share and the efficiency at the run's group
size G. `objective=trl_dapo study.rollouts=64` adds the relative efficiency of TRL's default loss in
updates of 64 rollouts, compared with the unbiased gradient at the same G. The script prints a
table, and writes it to `along_training.csv` and a figure to `along_training.png`. The files are in
the run folder or, for several runs, in the folder that contains the runs.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import yaml

from grpo_ustat.terminal.streams import best_size

ENDS = ("", "_low", "_high")
PANELS = {
    "mean_reward": "accuracy or mean reward",
    "gstar": "G*",
    "noise_scale": "n_c, rollouts",
    "prompt_share": "prompts' share of the noise",
    "efficiency_same_g": "efficiency at this G",
}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def steps_of(run: Path) -> list[int]:
    """Return the steps that have a checkpoint or a finished study, in order."""
    models = ("config.json", "adapter_config.json")
    saved = [path.parent for name in models for path in run.glob(f"checkpoint-*/{name}")]
    studied = [path.parent for path in run.glob("mse/checkpoint-*/result.json")]
    return sorted({int(path.name.split("-")[1]) for path in (*saved, *studied)})


def study(run: Path, step: int, trained: dict, overrides: list[str]) -> dict:
    """Run a checkpoint's study unless it is already finished; return its result."""
    checkpoint, folder = run / f"checkpoint-{step}", run / "mse" / f"checkpoint-{step}"
    if checkpoint.is_dir():
        subprocess.run(
            [
                sys.executable, "-m", "grpo_ustat.mse", "model=hub", f"model.name=step-{step}",
                f"model.model_name_or_path={checkpoint.resolve()}", f"hydra.run.dir={folder}",
                f"dataset={trained['dataset']['name']}", f"prompt={trained['prompt']['name']}",
                f"temperature={trained['temperature']}",
                f"max_completion_length={trained['max_completion_length']}", *overrides,
            ],
            check=True,
        )  # fmt: skip
    return json.loads((folder / "result.json").read_text())


def row(name: str, step: int, group_size: int, result: dict) -> dict:
    """Make a row of the table; values at the run's G are None if they were not measured."""
    scaling, noises = result["scaling"], result["noise"]["curve"]
    noise = next((x for x in noises if x["group_size"] == group_size), {})
    losses = (x for x in result.get("losses", ()) if x["group_size"] == group_size)
    loss = next(losses, {})
    values = {"run": name, "step": step}
    values |= {"quantity": result["policy"]["quantity"], "questions": result["questions"]}
    values["loss"] = loss.get("loss")
    for end in ENDS:
        values[f"mean_reward{end}"] = result["policy"][f"mean_reward{end}"]
        values |= {f"{key}{end}": scaling[f"{key}{end}"] for key in ("gstar", "c1", "c2", "c3")}
        values[f"noise_scale{end}"] = noise.get(f"rollouts{end}")
        values[f"prompt_share{end}"] = noise.get(f"prompt_share{end}")
        values[f"efficiency_same_g{end}"] = loss.get(f"efficiency_same_g{end}")
    if not values["noise_scale_low"] and values["noise_scale_high"] is None:
        values |= {f"noise_scale{end}": None for end in ENDS}
    if best_size(*(values[f"gstar{end}"] for end in ENDS)) is None:
        values |= {f"gstar{end}": None for end in ENDS}
    values |= {key: result["assumption2"][key] for key in ("corr", "a0", "a_v")}
    return values | {"grad_sq": result["grad_sq"]["grad_sq"]}


def is_known(values: dict, key: str) -> bool:
    """Return True if a quantity has an estimate or at least one end of its interval."""
    return any(values[f"{key}{end}"] for end in ENDS)


def table(rows: list[dict]) -> str:
    """Format the rows as Markdown, each number with its 95 % interval; `-` means unknown."""

    def cell(values: dict, name: str) -> str:
        if not is_known(values, name):
            return "-"
        value, low, high = (
            "-" if values[f"{name}{end}"] is None else f"{float(f'{values[name + end]:.3g}'):g}"
            for end in ENDS
        )
        return f"{value} [{low}, {high}]"

    names = " | ".join(("run", "step", "questions", *PANELS.values()))
    lines = [f"| {names} |", "|---" * (len(PANELS) + 3) + "|"]
    for values in rows:
        cells = " | ".join(cell(values, name) for name in PANELS)
        places = " | ".join(str(values[name]) for name in ("run", "step", "questions"))
        lines.append(f"| {places} | {cells} |")
    return "\n".join(lines)


def figure(rows: list[dict], path: Path) -> None:
    """Plot quantities against the step, with 95 % intervals; an arrow means no upper end."""
    shown = [key for key in PANELS if any(is_known(r, key) for r in rows)]
    image, panels = plt.subplots(
        1, len(shown), figsize=(3.1 * len(shown), 3.2), layout="constrained", squeeze=False
    )
    runs = list(dict.fromkeys(r["run"] for r in rows))
    last = max(r["step"] for r in rows)
    # Horizontal offset between the markers of successive runs.
    offset = 0.012 * last
    for axes, key in zip(panels[0], shown, strict=True):
        endless = []
        for place, (run, colour) in enumerate(zip(runs, COLOURS, strict=False)):
            run_rows = [r for r in rows if r["run"] == run and is_known(r, key)]
            at = [r["step"] + offset * (2 * place - len(runs) + 1) for r in run_rows]
            middle = [math.nan if r[key] is None else r[key] for r in run_rows]
            axes.plot(at, middle, "o-", markersize=4, linewidth=1, color=colour, label=run)
            for x, r in zip(at, run_rows, strict=True):
                if r[f"{key}_low"] is None:
                    continue
                if r[f"{key}_high"] is None:
                    endless.append((x, r[f"{key}_low"], colour))
                else:
                    axes.plot(
                        [x, x], [r[f"{key}_low"], r[f"{key}_high"]], "_-", linewidth=1, color=colour
                    )
        if key == "noise_scale":
            axes.set_yscale("log")
        bottom, top = axes.get_ylim()
        for x, low, colour in endless:
            axes.plot([x, x], [low, top], color=colour)
            axes.plot(x, top, "^", color=colour, clip_on=False)
        axes.set_ylim(min([bottom, *(low for _, low, _ in endless)]), top)
        axes.set(title=PANELS[key], xlabel="training step", xlim=(-0.06 * last, 1.06 * last))
        axes.set_xticks(sorted({r["step"] for r in rows}))
        axes.grid(alpha=0.3)
    panels[0][0].legend(frameon=False)
    image.savefig(path, dpi=150)


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a training run with checkpoints")
    parser.add_argument(
        "more",
        nargs="*",
        help="further run folders, and overrides for the studies such as study.questions=50",
    )
    arguments = parser.parse_args()
    overrides = [word for word in arguments.more if "=" in word]
    rows, runs = [], [arguments.run, *(Path(x) for x in arguments.more if "=" not in x)]
    distinct = len({run.name for run in runs}) == len(runs)
    for run in runs:
        steps = steps_of(run)
        if not steps:
            parser.error(
                f"{run} contains no checkpoint-* with a model: train first, or give "
                "another run folder"
            )
        trained = yaml.safe_load((run / ".hydra" / "config.yaml").read_text())
        for step in steps:
            result = study(run, step, trained, overrides)
            name = run.name if distinct else str(run)
            rows.append(row(name, step, trained["group_size"], result))
    print(table(rows))
    folder = Path(os.path.commonpath([run.absolute() for run in runs]))
    with (folder / "along_training.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    figure(rows, folder / "along_training.png")
    print(f"Wrote {folder / 'along_training.csv'} and .png")


if __name__ == "__main__":
    main()
