"""Make rows of the table in docs/numbers.md from studies, write the page, and check both.

    python scripts/benchmarks/numbers_table.py --from-run outputs/mse/NAME/seed-0
    python scripts/benchmarks/numbers_table.py --table    # docs/numbers.md from the rows
    python scripts/benchmarks/numbers_table.py --check    # print one line per fault

A row describes a policy by its model, its data, its stage of training, and the parameters of the
gradient (all weights or LoRA adapters). Each row is stored as a small JSON file in
docs/examples/numbers. The script `gpu_numbers.py` measures several rows.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated

from grpo_ustat.estimators.intervals import Interval
from grpo_ustat.pages.tables import three_digits
from grpo_ustat.records import ACCURACY
from grpo_ustat.runs.contents import (
    Bounded,
    Size,
    checked,
    content_of,
    keys_of,
    parsed_json,
    row_interval,
)
from grpo_ustat.runs.library import load_run
from grpo_ustat.runs.record import RunRecord

ROOT = Path(__file__).resolve().parents[2]
ROWS, PAGE = ROOT / "docs/examples/numbers", ROOT / "docs/numbers.md"
BEGIN, END = "<!-- rows: numbers_table.py --table -->", "<!-- end of rows -->"
FULL, ADAPTER, BASE = "full", "adapter", "base"
# TRL's default loss, and the G and n at which the loss's efficiency is measured.
TRL, GROUP_SIZE, ROLLOUTS = "trl_dapo", 8, 256
NEEDED_VERSIONS = ("grpo-ustat", "torch", "transformers")
ESTIMATES = ("accuracy", "gstar", "n_c", "prompt_share", "efficiency_trl_default")
SHARES = ("accuracy", "prompt_share")
# A local path, which must not occur in a row.
PATH = re.compile(r"(?:^|[\s='\"\[(,:])(?:~|\.{0,2}/|[A-Za-z]:[\\/])")
OF_THE_MACHINE = ("output_root", "hydra.run.dir", "pool", "on_existing")
COLUMNS = (
    "model", "data, prompt", "stage", "space", "accuracy", "G*", "n_c", "prompt share",
    "relative efficiency of TRL's default", "questions x completions", "device",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """Content of a row file; each estimate has three keys, see `runs.contents.Ends`."""

    # Hub id, or name of a model in `conf/model`.
    model: str
    # Data set and prompt.
    data: str
    # `base`, or the number of training steps, such as `20 steps`.
    stage: str
    # Parameters of the gradient: all weights, or LoRA adapters.
    space: Annotated[str, (FULL, ADAPTER)]
    accuracy: Bounded
    gstar: Interval
    # Noise scale in rollouts, and the prompts' share of the noise, both at G = 8.
    n_c: Interval
    prompt_share: Interval
    # Efficiency of TRL's default loss at G = 8 and 256 rollouts per update, relative to the
    # unbiased estimate at its best G.
    efficiency_trl_default: Interval
    # Numbers of questions in the pool, of completions per question, and of tokens.
    questions: Size
    completions: Size
    tokens: Size
    # True if the row's intervals are likely to cover the true values in less than 90 % of studies.
    heavy_tails: bool
    device: str
    precision: str
    versions: dict[str, str]
    date: str
    # Commit of the code; null for an installed package, whose version is in `versions`.
    commit: str | None
    # Commands that reproduce the row.
    commands: list[str]


def folders_by_id(pairs: Sequence[str]) -> dict[str, str]:
    """Parse `ID=FOLDER` pairs; return absolute folders by id of the model or data set in them."""
    parted = (pair.partition("=") for pair in pairs)
    return {name: str(Path(folder).resolve()) for name, _, folder in parted}


def row_of(folder: Path, local: dict[str, str], gpu: str | None = None) -> dict:
    """Return the content of the row file of a finished study.

    Args:
        folder: run folder of a study with `mse`; if the study's model is a checkpoint from `train`,
            the training run's folder is read too.
        local: folders from `folders_by_id`; the row contains the ids instead of the folders.
        gpu: name of the study's GPU; None means the GPU of this machine.
    """
    study = load_run(folder)
    result = study.result
    if study.command != "mse" or result is None or "equal_rewards" in result:
        raise ValueError(
            f"{folder}: not a finished study with mse in which rewards differ: choose "
            "another folder"
        )
    if result["policy"]["quantity"] != ACCURACY:
        raise ValueError(
            f"{folder}: it measures {result['policy']['quantity']}, but rows need accuracy"
        )
    trained, steps = trained_by(study)
    adapted = "adapters" in result["metric"]["norm"]
    at_size = [x for x in result["noise"]["curve"] if x["group_size"] == GROUP_SIZE]
    efficiencies = [
        x for x in result.get("losses", ())
        if (x["loss"], x["group_size"], x["rollouts"]) == (TRL, GROUP_SIZE, ROLLOUTS)
    ]  # fmt: skip
    if not at_size or not efficiencies:
        raise ValueError(
            f"{folder}: no {TRL} at G = {GROUP_SIZE} and {ROLLOUTS} rollouts: repeat its command "
            f"with objectives=[{TRL}] study.rollouts={ROLLOUTS} pool={folder / 'pool'}"
        )
    ends = [row["time"] for row in study.launches if row.get("event") == "end" and "time" in row]
    changed = " with changes" if study.code.get("diff") else ""
    texts = {
        "model": public_model(trained or study),
        "data": f"{study.dataset}, {study.policy.partition(', ')[2]}",
        "commands": commands_of(study, trained),
    }
    text = json.dumps(texts)
    for name, place in local.items():
        text = text.replace(place, name)
    texts = json.loads(text)
    return content_of(
        Row(
            model=texts["model"],
            data=texts["data"],
            stage=f"{steps} steps" if steps else BASE,
            space=ADAPTER if adapted else FULL,
            accuracy=three(result["policy"], "mean_reward"),
            gstar=three(result["scaling"], "gstar"),
            n_c=three(at_size[0], "rollouts"),
            prompt_share=three(at_size[0], "prompt_share"),
            efficiency_trl_default=three(efficiencies[0], "efficiency_best_g"),
            questions=result["questions"],
            completions=result["pool_completions"],
            tokens=result["cost"]["tokens"],
            heavy_tails=result["metric"]["heavy_tails"],
            device=device_name(study, gpu),
            precision=result["precision"]["weights"] + " with TF32" * result["precision"]["tf32"],
            versions=result["versions"],
            date=ends[-1][:10] if ends else "",
            commit=f"{study.commit}{changed}" if study.commit else None,
            commands=texts["commands"],
        )
    )


def three(row: dict, name: str) -> tuple[float, float, float]:
    """Return an estimate and the ends of its interval, each rounded to six digits."""
    estimate, low, high = (float(f"{x:.6g}") for x in row_interval(row, name))
    return estimate, low, high


def trained_by(study: RunRecord) -> tuple[RunRecord | None, int]:
    """Return the training run and step that made a study's model, or None and 0."""
    place = study.value("model.model_name_or_path")
    within = [(base / place).resolve() for base in (Path.cwd(), *study.folder.resolve().parents)]
    for checkpoint in within:
        match = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
        if match and (checkpoint.parent / ".hydra/config.yaml").is_file():
            return load_run(checkpoint.parent), int(match[1])
    return None, 0


def public_model(run: RunRecord) -> str:
    """Return a hub id, or the name of an embedded or cached model."""
    return run.value("model.model_name_or_path").rpartition(":")[2]


def commands_of(study: RunRecord, trained: RunRecord | None) -> list[str]:
    """Return the commands that reproduce a row, without settings that depend on the machine."""
    if trained is None:
        return [command_text("mse", typed_words(study))]
    parts = trained.folder.resolve().parts
    name = "/".join(parts[-2:] if parts[-1].startswith("seed-") else parts[-1:])
    place = str(Path(study.value("model.model_name_or_path")).parent)
    mse = [word.replace(place, f"outputs/train/{name}") for word in typed_words(study)]
    train = [*typed_words(trained), f"hydra.run.dir=outputs/train/{name}"]
    return [command_text("train", train), command_text("mse", mse)]


def typed_words(run: RunRecord) -> list[str]:
    """Return the words that were typed after the command at the first launch."""
    typed = [row["command"] for row in run.launches if "command" in row]
    if not typed:
        raise ValueError(f"{run.folder}: its launches.jsonl has no command")
    words = shlex.split(typed[0])
    words = words[1 + next(i for i, word in enumerate(words) if word.endswith(run.command)) :]
    return [word for word in words if word.partition("=")[0] not in OF_THE_MACHINE]


def command_text(command: str, words: Sequence[str]) -> str:
    """Format a command as a user would type it."""
    return f"grpo-ustat {command} {shlex.join(words)}"


def device_name(study: RunRecord, gpu: str | None) -> str:
    """Return `CPU` or the GPU's name, which run folders do not contain."""
    if not str(study.value("launch.device")).startswith("cuda"):
        return "CPU"
    if gpu is not None:
        return gpu
    # Rows measured on CPUs do not need torch.
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            f"{study.folder}: it ran on a GPU: give the GPU's name, such as --gpu 'NVIDIA H100'"
        )
    return torch.cuda.get_device_name()


def row_text(row: dict) -> str:
    """Return a row file's text."""
    return json.dumps(row, indent=1) + "\n"


def file_name(*parts: str) -> str:
    """Make a file name from model, data, stage and space; the owner in a hub id is dropped."""
    plain = (re.sub(r"[^\w.]+", "-", part.rpartition("/")[2].lower()) for part in parts)
    return "_".join(plain)


def key_of(row: dict) -> tuple[str, str, int, bool]:
    """Return the unique key of a row: model, data, steps, and True for adapters."""
    steps = 0 if row["stage"] == BASE else int(row["stage"].split()[0])
    return row["model"], row["data"], steps, row["space"] == ADAPTER


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
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    for row in sorted(rows, key=key_of):
        sizes = f"{row['questions']} x {row['completions']}" + ", few" * row["heavy_tails"]
        names = [row[name] for name in ("model", "data", "stage", "space")]
        lines.append([*names, *(cell_text(row, x) for x in ESTIMATES), sizes, row["device"]])
    return "\n".join(f"|{'|'.join(line)}|".replace("*", "\\*") for line in lines)


def page_with(page: str, rows: Sequence[dict]) -> str:
    """Return the page with the table of these rows between the markers."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{rest.partition(END)[2]}"


def faults(folder: Path, page: Path) -> list[str]:
    """Return a line for each fault in a folder's row files and in the page's table."""
    lines, rows, names = [], [], {}
    for file in sorted(folder.glob("*.json")):
        row, wrong = checked(folder, file.name, parsed_json, Row)
        problems = [wrong] if wrong else [*row_faults(row)]
        if not problems and key_of(row) in names:
            problems = [f"model, data, stage and space are the same as in {names[key_of(row)]}"]
        lines += [f"{file.name}: {fault}" for fault in problems]
        if not problems:
            names[key_of(row)] = file.name
            rows.append(row)
    text = page.read_text()
    if BEGIN not in text or END not in text:
        lines.append(f"{page.name}: it lacks the markers {BEGIN} and {END}")
    elif not lines and text != page_with(text, rows):
        lines.append(
            f"{page.name}: its table does not match the row files: run this script with --table"
        )
    return lines


def row_faults(row: dict) -> Iterator[str]:
    """Yield a row's faults, each beginning with the field; the types must already be right."""
    for name in sorted(row.keys() - keys_of(Row).keys()):
        yield f"{name} is not a field of a row"
    for name in ESTIMATES:
        value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
        ends = [x for x in (low, value, high) if x is not None]
        if value is not None and low is None:
            yield f"{name}_low is missing although {name} is {value}"
        if ends != sorted(ends):
            yield f"{name} {value} is not within [{low}, {high}]"
        least, most = 1 if name == "gstar" else 0, 1 if name in SHARES else None
        beyond = [x for x in ends if x < least or (most is not None and x > most)]
        if beyond:
            yield f"{name} has {beyond[0]}, not in {least} to {'inf' if most is None else most}"
    if not re.fullmatch(r"base|[1-9]\d* steps", row["stage"]):
        yield f"stage is {row['stage']!r}, not 'base' or a number such as '20 steps'"
    if row["questions"] < 8 or row["completions"] < GROUP_SIZE:
        sizes = f"{row['questions']} x {row['completions']}"
        yield f"questions x completions is {sizes}, but must be at least 8 x {GROUP_SIZE}"
    for name in NEEDED_VERSIONS:
        if not row["versions"].get(name):
            yield f"versions has no {name}"
    try:
        if date.fromisoformat(row["date"]) > date.today():
            yield f"date {row['date']} is in the future"
    except ValueError:
        yield f"date is {row['date']!r}, not in the form 2026-03-01"
    if row["commit"] is not None and not re.fullmatch(r"[0-9a-f]{40}", row["commit"]):
        yield f"commit is {row['commit']!r}, not 40 hexadecimal digits: measure committed code"
    commands = row["commands"]
    if not commands or not all(re.match(r"grpo-ustat (mse|train) \S", x) for x in commands):
        yield "commands must be lines that begin with grpo-ustat mse or grpo-ustat train"
    if len(commands) < 2 and row["stage"] != BASE:
        yield f"commands lacks the training for stage {row['stage']}"
    for name in ("model", "data", "device", "precision"):
        if not row[name].strip():
            yield f"{name} is empty"
    for name, value in row.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and PATH.search(text):
                yield f"{name} contains a local path: {text!r}; write its id by --local ID=FOLDER"


def main() -> None:
    """Make rows, write the table and check both, as chosen by the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--from-run", type=Path, nargs="+", metavar="FOLDER", help="make rows from finished studies"
    )
    add("--gpu", metavar="NAME", help="GPU on which the studies ran (default: this machine's)")
    add(
        "--local",
        nargs="+",
        default=[],
        metavar="ID=FOLDER",
        help="ids of the models and data sets in local folders",
    )
    add("--table", action="store_true", help="write the rows' table into the page")
    add("--check", action="store_true", help="print a line for each fault in rows and page")
    add("--rows", type=Path, default=ROWS, help="folder of the row files")
    add("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    try:
        for folder in options.from_run or ():
            row = row_of(folder, folders_by_id(options.local), options.gpu)
            name = file_name(*(row[x] for x in ("model", "data", "stage", "space")))
            options.rows.mkdir(parents=True, exist_ok=True)
            (options.rows / f"{name}.json").write_text(row_text(row))
            print(options.rows / f"{name}.json")
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")
    if options.table:
        rows = [json.loads(file.read_text()) for file in options.rows.glob("*.json")]
        options.page.write_text(page_with(options.page.read_text(), rows))
    if options.check:
        lines = faults(options.rows, options.page)
        print("\n".join(lines) or f"{len(list(options.rows.glob('*.json')))} rows, no faults")
        sys.exit(bool(lines))


if __name__ == "__main__":
    main()
