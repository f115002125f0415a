"""C1, C2, C3, G* and accuracy or mean reward along a training run: a study of every checkpoint.

    python scripts/tools/along_training.py outputs/train/NAME/seed-0 [mse overrides]

Studies go to `mse/checkpoint-<step>/` in the run folder and are not repeated; the questions, the
prompt and the temperature are the run's. Writes `scaling_along_training.csv` and `.png` there.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import yaml

COLUMNS = ("c1", "c2", "c3", "gstar")


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint, in order."""
    found = [(int(path.name.split("-")[1]), path) for path in run.glob("checkpoint-*")]
    models = ("config.json", "adapter_config.json")
    return sorted((s, path) for s, path in found if any((path / name).is_file() for name in models))


def study(run: Path, step: int, checkpoint: Path, overrides: list[str]) -> dict:
    """The result of one checkpoint's study, run unless it is there."""
    trained = yaml.safe_load((run / ".hydra" / "config.yaml").read_text())
    folder = run / "mse" / checkpoint.name
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


def row(step: int, result: dict) -> dict:
    """One line of the table."""
    scaling, policy = result["scaling"], result["policy"]
    ends = ("", "_low", "_high")
    return (
        {"step": step, "quantity": policy["quantity"]}
        | {f"mean_reward{end}": policy[f"mean_reward{end}"] for end in ends}
        | {f"{name}{end}": scaling[f"{name}{end}"] for name in COLUMNS for end in ends}
        | {"corr": result["assumption2"]["corr"], "a0": result["assumption2"]["a0"]}
        | {"a_v": result["assumption2"]["a_v"], "grad_sq": result["grad_sq"]["grad_sq"]}
    )


def figure(rows: list[dict], path: Path) -> None:
    """The constants and G* against the step, with 95 % intervals; an arrow: no upper end."""
    image, panels = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    steps = [r["step"] for r in rows]
    for name, colour in zip(COLUMNS, ("#D55E00", "#009E73", "#0072B2", "#000000"), strict=True):
        axes = panels[1 if name == "gstar" else 0]
        known = [r for r in rows if r[name] is not None and r[f"{name}_low"] is not None]
        open_ended = [r[f"{name}_high"] is None for r in known]
        lower = [r[name] - r[f"{name}_low"] for r in known]
        upper = [0 if r[f"{name}_high"] is None else r[f"{name}_high"] - r[name] for r in known]
        axes.errorbar(
            [r["step"] for r in known], [r[name] for r in known], [lower, upper], lolims=open_ended,
            marker="o", markersize=4, capsize=3, color=colour, label=name,
        )  # fmt: skip
    panels[0].set_yscale("log")
    for axes in panels:
        axes.set_xlabel("training step")
        axes.set_xticks(steps)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    image.savefig(path, dpi=150)


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a training run with checkpoints")
    parser.add_argument("overrides", nargs="*", help="of the studies: study.questions=50")
    arguments = parser.parse_args()
    run = arguments.run
    saved = checkpoints(run)
    if not saved:
        parser.error(f"{run} has no checkpoint-* with a model: train first")
    rows = [row(step, study(run, step, path, arguments.overrides)) for step, path in saved]
    with (run / "scaling_along_training.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    figure(rows, run / "scaling_along_training.png")
    print(f"Wrote {run / 'scaling_along_training.csv'} and .png")


if __name__ == "__main__":
    main()
