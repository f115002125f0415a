"""Make rows of the table in docs/numbers.md from studies, and write the table.

    python scripts/benchmarks/numbers_table.py outputs/mse/NAME/seed-0    # rows of these studies
    python scripts/benchmarks/numbers_table.py                            # the table of all rows

A row describes a policy by its model, its data, its stage of training, and the parameters of the
gradient (all weights or LoRA adapters). Each row is a JSON file in docs/examples/numbers. An
estimate has the keys NAME, NAME_low and NAME_high.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from grpo_ustat.pages.tables import three_digits
from grpo_ustat.runs.library import load_run
from grpo_ustat.runs.record import RunRecord

ROOT = Path(__file__).resolve().parents[2]
ROWS, PAGE = ROOT / "docs/examples/numbers", ROOT / "docs/numbers.md"
BEGIN, END = "<!-- rows: numbers_table.py -->", "<!-- end of rows -->"
# TRL's default loss, and the G and n at which the loss's efficiency is measured.
TRL, GROUP_SIZE, ROLLOUTS = "trl_dapo", 8, 256
ESTIMATES = ("accuracy", "gstar", "n_c", "prompt_share", "efficiency_trl_default")
NAMES = ("model", "data", "stage", "space")
COLUMNS = (
    "model", "data, prompt", "stage", "space", "accuracy", "G*", "n_c", "prompt share",
    "relative efficiency of TRL's default", "questions x completions", "device",
)  # fmt: skip


def row_of(folder: Path) -> dict:
    """Return the row of a finished study; the run that trained its checkpoint is read too."""
    study = load_run(folder)
    result = study.result
    if study.command != "mse" or result is None or "equal_rewards" in result:
        raise SystemExit(f"error: {folder} is not a finished study with mse whose rewards differ")
    noise = [x for x in result["noise"]["curve"] if x["group_size"] == GROUP_SIZE]
    efficiency = [
        x for x in result.get("losses", ())
        if (x["loss"], x["group_size"], x["rollouts"]) == (TRL, GROUP_SIZE, ROLLOUTS)
    ]  # fmt: skip
    if not noise or not efficiency:
        raise SystemExit(
            f"error: {folder} has no {TRL} at G = {GROUP_SIZE} and {ROLLOUTS} rollouts: repeat "
            f"its command with objectives=[{TRL}] study.rollouts={ROLLOUTS} pool={folder / 'pool'}"
        )
    checkpoint = Path(study.value("model.model_name_or_path"))
    steps = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    runs = [load_run(checkpoint.parent)] if steps else []
    return {
        "model": runs[0].value("model.model_name_or_path") if steps else checkpoint.name,
        "data": f"{study.dataset}, {study.policy.partition(', ')[2]}",
        "stage": f"{steps[1]} steps" if steps else "base",
        "space": "adapter" if "adapters" in result["metric"]["norm"] else "full",
        **three(result["policy"], "mean_reward", "accuracy"),
        **three(result["scaling"], "gstar", "gstar"),
        **three(noise[0], "rollouts", "n_c"),
        **three(noise[0], "prompt_share", "prompt_share"),
        **three(efficiency[0], "efficiency_best_g", "efficiency_trl_default"),
        "questions": result["questions"],
        "completions": result["pool_completions"],
        "tokens": result["cost"]["tokens"],
        "heavy_tails": result["metric"]["heavy_tails"],
        "device": "GPU" if str(study.value("launch.device")).startswith("cuda") else "CPU",
        "versions": result["versions"],
        "commit": study.commit,
        "commands": [command_of(run) for run in (*runs, study)],
    }


def three(row: dict, name: str, key: str) -> dict[str, float | None]:
    """Return an estimate and the ends of its interval, each rounded to six digits."""
    ends = {f"{key}{end}": row[f"{name}{end}"] for end in ("", "_low", "_high")}
    return {key: None if x is None else float(f"{x:.6g}") for key, x in ends.items()}


def command_of(run: RunRecord) -> str:
    """Return the command of a run's first launch."""
    return next(row["command"] for row in run.launches if "command" in row)


def file_name(row: dict) -> str:
    """Make a file name from model, data, stage and space; the owner in a hub id is dropped."""
    parts = (re.sub(r"[^\w.]+", "-", row[x].rpartition("/")[2].lower()) for x in NAMES)
    return "_".join(parts) + ".json"


def cell_text(row: dict, name: str) -> str:
    """Format an estimate with its interval, or as `at least` if the interval has no upper end."""

    def text(value: float) -> str:
        return three_digits(value) if name in ("gstar", "n_c") else f"{value:.2f}"

    value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    if high is None:
        is_bound = low is not None and low > (2 if name == "gstar" else 0)
        return f"at least {text(low)}" if is_bound else "not decided"
    return "not decided" if value is None else f"{text(value)} [{text(low)}, {text(high)}]"


def table(rows: Sequence[dict]) -> str:
    """Format the table as Markdown."""

    def place(row: dict) -> tuple[str, str, int, bool]:
        steps = row["stage"].removesuffix(" steps")
        return row["model"], row["data"], int(steps.replace("base", "0")), row["space"] != "full"

    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    for row in sorted(rows, key=place):
        sizes = f"{row['questions']} x {row['completions']}" + ", few" * row["heavy_tails"]
        cells = (cell_text(row, x) for x in ESTIMATES)
        lines.append([*(row[x] for x in NAMES), *cells, sizes, row["device"]])
    return "\n".join(f"|{'|'.join(line)}|".replace("*", "\\*") for line in lines)


def page_with(page: str, rows: Sequence[dict]) -> str:
    """Return the page with the table of these rows between the markers."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Make rows of the given studies, or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", type=Path, nargs="*", help="run folders of finished studies")
    for folder in (studies := parser.parse_args().studies):
        row = row_of(folder)
        (ROWS / file_name(row)).write_text(json.dumps(row, indent=1) + "\n")
        print(ROWS / file_name(row))
    if not studies:
        rows = [json.loads(file.read_text()) for file in ROWS.glob("*.json")]
        PAGE.write_text(page_with(PAGE.read_text(), rows))


if __name__ == "__main__":
    main()
