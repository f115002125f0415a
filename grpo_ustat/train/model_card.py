"""Model card of a finished run: README.md of the last checkpoint, in the format of the Hub.

Next to the card, the checkpoint contains the full configuration, with which the run can be
repeated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from grpo_ustat.config.identity import data_fingerprint
from grpo_ustat.config.model import EMBEDDED, model_folder
from grpo_ustat.config.train import TrainConfig
from grpo_ustat.pages.tables import Table, fenced, plain
from grpo_ustat.runs import history
from grpo_ustat.runs.files import read_rows
from grpo_ustat.terminal.console import warn
from grpo_ustat.terminal.streams import percentage
from grpo_ustat.train.context import TrainContext, TrainProgress
from grpo_ustat.train.evaluate import held_out_gain

NAME, CONFIG = "README.md", "grpo_ustat_config.yaml"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Largest number of rows in a table of evaluations, of steps, or of launches.
MAX_ROWS = 10
HEADER = """\
# Repeats this run: grpo-ustat train --config-dir=FOLDER --config-name=grpo_ustat_config
defaults:
  - train_schema
  - _self_
  - override hydra/job_logging: stdout
hydra:
  output_subdir: null
  run:
    dir: ${output_root}/train/${folder_name:}/seed-${seed}
  sweep:
    dir: ${output_root}/train
    subdir: ${folder_name:}/seed-${seed}
"""


def card_files(run: TrainContext, progress: TrainProgress) -> dict[str, str]:
    """Return the texts of the card and the configuration by file name.

    If writing the card fails, a warning is printed and the result is empty, so that the checkpoint
    is still written.
    """
    try:
        rows, _ = read_rows(run.folder.path / "metrics.jsonl")
        return {
            NAME: card(run, progress, rows),
            CONFIG: HEADER + yaml.safe_dump(_published(run.config), sort_keys=False),
        }
    except Exception as error:
        warn(f"no model card: {type(error).__name__}: {error}")
        return {}


def card(run: TrainContext, progress: TrainProgress, rows: list[dict[str, Any]]) -> str:
    """Return the text of the card.

    Args:
        run: training run.
        progress: progress of the run after the last step.
        rows: rows of metrics.jsonl.
    """
    config = run.config
    kind = f"LoRA adapters of rank {config.lora.r} for" if config.lora.r else "A fine-tune of"
    revision = "" if config.model.revision is None else f" at {config.model.revision}"
    parts = [
        f"---\n{yaml.safe_dump(front_matter(config), sort_keys=False)}---",
        f"# {plain(config.run_name)}",
        f"{kind} {plain(config.model.model_name_or_path)}{plain(revision)}, trained for "
        f"{progress.step} steps of GRPO with the baseline {plain(config.baseline.name)} and the "
        f"objective {plain(config.objective.name)} on {plain(config.dataset.name)}. grpo\\_ustat "
        "wrote this card when training ended.",
    ]
    for title, section in SECTIONS.items():
        parts.append(f"## {title}\n\n{section(run, progress, rows)}")
    return "\n\n".join(parts) + "\n"


def front_matter(config: TrainConfig) -> dict[str, Any]:
    """Return the metadata that the Hub reads from a card; fields without a value are left out."""
    name, lora = config.model.model_name_or_path, config.lora.r > 0
    paths = (getattr(config.dataset, key, None) for key in ("path", "test_path"))
    fields = {
        "library_name": "peft" if lora else "transformers",
        "pipeline_tag": "text-generation",
        "license": license_of(name),
        "base_model": name if on_hub(name) else None,
        "base_model_relation": ("adapter" if lora else "finetune") if on_hub(name) else None,
        "datasets": list(dict.fromkeys(path for path in paths if on_hub(path))),
        "tags": ["grpo", "grpo-ustat", "reinforcement-learning", *(["lora"] if lora else [])],
    }
    return {key: value for key, value in fields.items() if value}


def on_hub(name: str | None) -> bool:
    """Return True for the name of a model or data set on the Hub, False for a local folder."""
    return bool(name and HUB_ID.fullmatch(name)) and not is_local(name)


def is_local(name: str | None) -> bool:
    """Return True if the name is the path of an existing file or folder."""
    return bool(name) and Path(name).expanduser().exists()


def license_of(name: str) -> str | None:
    """Return the licence of the base model, or None if it is unknown.

    The licence comes from the base model's card. Models in this package have the licence of the
    package.
    """
    if name.startswith(EMBEDDED):
        return "apache-2.0"
    with suppress(OSError, ValueError, AttributeError, yaml.YAMLError):
        text = (model_folder(name) / NAME).read_text()
        value = yaml.safe_load(text.split("---")[1]).get("license") if text[:3] == "---" else None
        return value if isinstance(value, str) else None
    return None


def evaluation_section(run: TrainContext, progress: TrainProgress, rows: list[Any]) -> str:
    """Write held-out accuracy or mean reward by step, and the change over the run."""
    config, name = run.config, progress.evals[0]["quantity"]
    header = ("step", "decoding", name, "95 % interval", "questions", "cut")
    cells = [
        (
            row["step"], row["decoding"], f"{row['mean_reward']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}", row["n"],
            percentage(row["clipped_ratio"], 1),
        )
        for row in thinned(progress.evals)
    ]  # fmt: skip
    gain = held_out_gain(progress)
    evaluations = Table("", header, cells).markdown()
    return (
        f"Evaluated on the test split of {plain(config.dataset.name)}.\n\n"
        f"{evaluations}\n\nChange from first to last evaluation ({config.eval.decoding[0]}, "
        f"paired by question): {gain.estimate:+.3f}, 95 % interval {gain.low:+.3f} to "
        f"{gain.high:+.3f}. The column cut is the share of completions truncated at "
        f"{config.max_completion_length} tokens."
    )


def steps_section(run: TrainContext, progress: TrainProgress, rows: list[Any]) -> str:
    """Write a table of the metrics of some steps."""
    names = ("step", "reward", "frac_reward_zero_std", "completions/mean_length", "grad_norm")
    cells = [
        [f"{row[name]:.4g}" if isinstance(row.get(name), int | float) else "" for name in names]
        for row in thinned(rows)
    ]
    return Table("", names, cells).markdown()


def thinned(rows: list[Any]) -> list[Any]:
    """Select about `MAX_ROWS` evenly spaced rows, including the first and the last."""
    if len(rows) <= MAX_ROWS:
        return rows
    places = np.unique(np.linspace(0, len(rows) - 1, MAX_ROWS).round().astype(int))
    return [rows[place] for place in places]


def data_section(run: TrainContext, progress: TrainProgress, rows: list[Any]) -> str:
    """Describe the questions.

    The path of local data is not published; a fingerprint (hash) identifies them instead.
    """
    dataset, dropped = run.config.dataset, run.task.dropped
    facts = {
        "data set": f"{dataset.name} (kind {dataset.kind}, seed {dataset.seed})",
        "train questions": len(run.train_prompts),
        "test questions": len(run.test_prompts),
        "left out": ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "none",
        "fingerprint of local files": data_fingerprint(dataset) or "no local files",
    }
    for key in ("path", "subset", "revision", "test_path", "test_revision"):
        if hasattr(dataset, key):
            value = getattr(dataset, key)
            facts[key] = "local" if is_local(value) else value or "not given"
    facts["prompt"] = run.config.prompt.name
    return Table("", ("", ""), list(facts.items())).markdown()


def training_section(run: TrainContext, progress: TrainProgress, rows: list[Any]) -> str:
    """Write the main settings, the resources used, and the full configuration."""
    config = run.config
    facts = {
        "completions per step": f"n = {config.budget.rollouts} = {config.prompts_per_step} "
        f"prompts x group size {config.group_size}",
        "steps": progress.step,
        "learning rate": f"{config.learning_rate:g}, {config.schedule.lr_scheduler_type}",
        "optimizer": config.optimizer.name,
        "temperature": config.temperature,
        "longest completion": f"{config.max_completion_length} tokens",
        "precision": f"{config.model.dtype} weights" + (", bf16 computation" * config.bf16),
        "seed": config.seed,
        "completions in total": progress.rollouts + progress.value_rollouts,
        "tokens sampled": progress.tokens,
        "seconds spent in steps": round(progress.seconds, 1),
    }
    settings = fenced(yaml.safe_dump(_published(config), sort_keys=False), "yaml")
    details = f"<details><summary>Full configuration</summary>\n\n{settings}\n\n</details>"
    return Table("", ("", ""), list(facts.items())).markdown() + "\n\n" + details


def history_section(run: TrainContext, progress: TrainProgress, rows: list[Any]) -> str:
    """List when the run was started, resumed and stopped. Names of machines are not published."""
    cells, starts = [], 0
    for row in history.launches(run.folder.path):
        event = row.get("event")
        if event == "start":
            starts += 1
            text = f"{row.get('processes')} processes"
        elif event == "resumed":
            text = f"from checkpoint-{row.get('step')}"
        else:
            reason = row.get("reason") or row.get("error")
            text = f"{row.get('outcome')}" + (f": {reason}" if reason else "")
        cells.append((row.get("time"), event, text))
    more = f" The last {MAX_ROWS} of {len(cells)} events:" if len(cells) > MAX_ROWS else ""
    return (
        f"The run had {starts} launch{'es' * (starts != 1)}. The last one was still running when "
        "this card was written."
        f"{more}\n\n" + Table("", ("time (UTC)", "event", ""), cells[-MAX_ROWS:]).markdown()
    )


def repeat_section(run: TrainContext, progress: TrainProgress, rows: list[Any]) -> str:
    """Write the commit, the configuration, the command and the package versions."""
    state = json.loads((run.folder.path / "code.json").read_text())
    commit = state["commit"] or "not from a git clone"
    changed = "; with uncommitted changes, see `diff` in the run folder's code.json"
    command = f"grpo-ustat train --config-dir=FOLDER_OF_THIS_CARD --config-name={CONFIG[:-5]}"
    return (
        f"Commit {plain(commit)}{changed if state['diff'] else ''}; configuration "
        f"{run.folder.config_hash}.\n\n{fenced(command, 'sh')}\n\n"
        + Table("", ("package", "version"), list(state["versions"].items())).markdown()
    )


def limits_section(run: TrainContext, progress: TrainProgress, rows: list[Any]) -> str:
    """List the limits of the results."""
    config = run.config
    lines = [
        f"This is a single run, with seed {config.seed}. The intervals cover the variation from "
        "drawing other questions, but not the variation between seeds.",
        f"The model was trained and evaluated only on {plain(config.dataset.name)} with the prompt "
        f"{plain(config.prompt.name)}. Other tasks, other languages and safety were not tested.",
        "The reward depends only on final answers; the reasoning before an answer can be wrong.",
    ]
    if on_hub(config.model.model_name_or_path):
        lines.append("It is unknown whether the base model was trained on the test questions.")
    if progress.clipped_ratio > 0.05:
        lines.append(
            f"{percentage(progress.clipped_ratio)} of the last step's completions were truncated."
        )
    for name, count in progress.alarms.items():
        lines.append(f"Alarm {plain(name)} was active in {count} steps.")
    if progress.failed_saves:
        lines.append(f"{progress.failed_saves} checkpoints could not be written.")
    return "\n".join(f"- {line}" for line in lines)


Section = Callable[[TrainContext, TrainProgress, list[Any]], str]
# Sections of the card, by title.
SECTIONS: dict[str, Section] = {
    "Evaluation": evaluation_section,
    "Steps": steps_section,
    "Data": data_section,
    "Training": training_section,
    "History": history_section,
    "To repeat it": repeat_section,
    "Limits": limits_section,
}


def _published(config: TrainConfig) -> dict[str, Any]:
    """Return the configuration with the run's output folder replaced by the text `outputs`."""
    return asdict(config) | {"output_root": "outputs"}
