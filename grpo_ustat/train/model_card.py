"""The model card of a finished run: README.md of its last checkpoint, as the Hub reads it.

Beside it lie `curves.svg` and the whole configuration, from which the run can be repeated. All are
written into the staged checkpoint, so its manifest covers them.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from grpo_ustat.checks import EMBEDDED, model_folder
from grpo_ustat.config import TrainConfig
from grpo_ustat.estimators.intervals import matched_difference
from grpo_ustat.identity import data_fingerprint
from grpo_ustat.runs import history
from grpo_ustat.runs.curve_svg import Curve, curve_svg
from grpo_ustat.runs.log import warn
from grpo_ustat.runs.markdown import fenced, plain, table
from grpo_ustat.runs.rowfiles import read_rows

NAME, PICTURE, CONFIG = "README.md", "curves.svg", "grpo_ustat_config.yaml"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
ROWS = 10  # of a table of steps, and of launches at its end
HEADER = """\
# Repeats this run: python -m grpo_ustat.train --config-dir=FOLDER --config-name=grpo_ustat_config
defaults:
  - train_schema
  - _self_
  - override hydra/job_logging: stdout
hydra:
  output_subdir: null
  run:
    dir: outputs/train/${folder_name:}/seed=${seed}
  sweep:
    dir: outputs/train
    subdir: ${folder_name:}/seed=${seed}
"""


def write_card(staged: Path, run: Any, progress: Any) -> None:
    """Add card, picture and configuration to a staged checkpoint.

    Args:
        staged: its folder.
        run: a `setup.Run`.
        progress: a `progress.Progress` at the last step.

    Raises:
        OSError: the disk refuses them.
    """
    try:
        rows, _ = read_rows(run.folder.path / "metrics.jsonl")
        texts = {
            NAME: card(run, progress, rows),
            PICTURE: _picture(rows, progress.evals),
            CONFIG: HEADER + yaml.safe_dump(asdict(run.config), sort_keys=False),
        }
    except Exception as error:  # words about a model must not cost the model
        return warn(f"no model card: {type(error).__name__}: {error}")
    for name, text in texts.items():
        (staged / name).write_text(text)


def card(run: Any, progress: Any, rows: list[dict[str, Any]]) -> str:
    """The card's text; `rows` are those of metrics.jsonl."""
    config = run.config
    parts = [
        f"---\n{yaml.safe_dump(front_matter(config), sort_keys=False)}---",
        f"# {plain(config.run_name)}",
        _what(config, progress),
        "## Evaluation\n\n" + _evaluation(config, progress),
        f"## Curves\n\n![mean reward and held-out accuracy by step]({PICTURE})\n\n" + _steps(rows),
        "## Data\n\n" + _data(run),
        "## Training\n\n" + _training(config, progress),
        "## History\n\n" + _history(run.folder.path),
        "## To repeat it\n\n" + _repeat(run),
        "## Limits\n\n" + _limits(config, progress),
    ]
    return "\n\n".join(parts) + "\n"


def front_matter(config: TrainConfig) -> dict[str, Any]:
    """What the Hub sorts models by; what is not known is left out."""
    name, lora = config.model.model_name_or_path, config.lora.r > 0
    dataset = config.dataset
    paths = (getattr(dataset, key, None) for key in ("path", "test_path"))
    found = {
        "library_name": "peft" if lora else "transformers",
        "pipeline_tag": "text-generation",
        "license": _license(name),
        "base_model": name if _on_hub(name) else None,
        "base_model_relation": ("adapter" if lora else "finetune") if _on_hub(name) else None,
        "datasets": list(dict.fromkeys(path for path in paths if _on_hub(path))),
        "tags": ["grpo", "grpo-ustat", "reinforcement-learning", *(["lora"] if lora else [])],
    }
    return {key: value for key, value in found.items() if value}


def _on_hub(name: str | None) -> bool:
    return bool(name and HUB_ID.fullmatch(name)) and not Path(name).expanduser().exists()


def _license(name: str) -> str | None:
    """What the base model's own card says; embedded policies have this package's."""
    if name.startswith(EMBEDDED):
        return "apache-2.0"
    with suppress(OSError, ValueError, AttributeError, yaml.YAMLError):
        text = (model_folder(name) / NAME).read_text()
        found = yaml.safe_load(text.split("---")[1]).get("license") if text[:3] == "---" else None
        return found if isinstance(found, str) else None
    return None


def _what(config: TrainConfig, progress: Any) -> str:
    kind = f"LoRA adapters of rank {config.lora.r} for" if config.lora.r else "A fine-tune of"
    return (
        f"{kind} {plain(config.model.model_name_or_path)}"
        f"{plain(_at(config.model.revision))}, by {progress.step} steps of GRPO with the baseline "
        f"{plain(config.baseline.name)} and the objective {plain(config.objective.name)} on "
        f"{plain(config.dataset.name)}. Written by grpo\\_ustat when training ended."
    )


def _at(revision: str | None) -> str:
    return "" if revision is None else f" at {revision}"


def _evaluation(config: TrainConfig, progress: Any) -> str:
    header = ("step", "decoding", "accuracy", "95 % interval", "questions", "cut")
    rows = [
        (
            row["step"], row["decoding"], f"{row['accuracy']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}", row["n"], f"{row['clipped_ratio']:.1%}",
        )
        for row in _thinned(progress.evals)
    ]  # fmt: skip
    gain = matched_difference(np.array(progress.rewards_last), np.array(progress.rewards_first))
    asked, most = config.eval.decoding[0], config.max_completion_length
    return (
        f"Questions of the test split of {plain(config.dataset.name)}.\n\n"
        f"{table(header, rows)}\n\nFirst to last, {asked}, paired on the same questions: "
        f"{gain.estimate:+.3f}, 95 % interval {gain.low:+.3f} to {gain.high:+.3f}. Cut: "
        f"longer than {most} tokens."
    )


def _steps(rows: list[dict[str, Any]]) -> str:
    names = ("step", "reward", "frac_reward_zero_std", "completions/mean_length", "grad_norm")
    shown = [[_number(row.get(name)) for name in names] for row in _thinned(rows)]
    return table(names, shown)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""


def _thinned(rows: list[Any]) -> list[Any]:
    """About `ROWS` of them with the first and the last."""
    if len(rows) <= ROWS:
        return rows
    places = np.unique(np.linspace(0, len(rows) - 1, ROWS).round().astype(int))
    return [rows[place] for place in places]


def _data(run: Any) -> str:
    dataset, left_out = run.config.dataset, run.task.dropped
    told = {
        "data set": f"{dataset.name} (kind {dataset.kind}, seed {dataset.seed})",
        "train questions": len(run.train_prompts),
        "test questions": len(run.test_prompts),
        "left out": ", ".join(f"{count} {why}" for why, count in left_out.items()) or "none",
        "fingerprint of local files": data_fingerprint(dataset) or "no local files",
    }
    for key in ("path", "subset", "revision", "test_path", "test_revision"):
        if hasattr(dataset, key):
            told[key] = _place(getattr(dataset, key)) or "not given"
    told["prompt"] = run.config.prompt.name
    return table(("", ""), told.items())


def _place(path: str | None) -> str | None:
    """Local data are known by their fingerprint, not by where they lay."""
    return "local" if path and Path(path).expanduser().exists() else path


def _training(config: TrainConfig, progress: Any) -> str:
    told = {
        "completions a step": f"n = {config.budget.rollouts} = {config.prompts_per_step} prompts x "
        f"group size {config.group_size}",
        "steps": progress.step,
        "learning rate": f"{config.learning_rate:g}, {config.schedule.lr_scheduler_type}",
        "optimizer": config.optimizer.name,
        "temperature": config.temperature,
        "longest completion": f"{config.max_completion_length} tokens",
        "precision": f"{config.model.dtype} weights" + (", bf16 computation" * config.bf16),
        "seed": config.seed,
        "completions in all": progress.rollouts + progress.value_rollouts,
        "tokens written": progress.tokens,
        "seconds in steps": round(progress.seconds, 1),
    }
    whole = fenced(yaml.safe_dump(asdict(config), sort_keys=False), "yaml")
    details = f"<details><summary>Whole configuration</summary>\n\n{whole}\n\n</details>"
    return table(("", ""), told.items()) + "\n\n" + details


def _history(folder: Path) -> str:
    """Starts, resumptions and ends; machines are not named."""
    rows = [(row.get("time"), row.get("event"), _event(row)) for row in history.launches(folder)]
    starts = sum(event == "start" for _, event, _ in rows)
    more = f" The last {ROWS} of {len(rows)} events:" if len(rows) > ROWS else ""
    return (
        f"{starts} launch{'es' * (starts != 1)}; the last one was under way when this was written."
        f"{more}\n\n" + table(("time (UTC)", "event", ""), rows[-ROWS:])
    )


def _event(row: dict[str, Any]) -> str:
    if row.get("event") == "start":
        again = row.get("slurm_restart_count")
        return f"{row.get('processes')} processes" + (f", SLURM restart {again}" if again else "")
    if row.get("event") == "resumed":
        return f"from checkpoint-{row.get('step')}"
    why = row.get("reason") or row.get("error")
    return f"{row.get('outcome')}" + (f": {why}" if why else "")


def _repeat(run: Any) -> str:
    state = json.loads((run.folder.path / "code.json").read_text())
    commit = state["commit"] or "not from a git clone"
    changed = "; with uncommitted changes, see `diff` in the run folder's code.json"
    command = (
        f"python -m grpo_ustat.train --config-dir=FOLDER_OF_THIS_CARD --config-name={CONFIG[:-5]}"
    )
    return (
        f"Commit {plain(commit)}{changed if state['diff'] else ''}; configuration "
        f"{run.folder.config_hash}.\n\n{fenced(command, 'sh')}\n\n"
        + table(("package", "version"), state["versions"].items())
    )


def _limits(config: TrainConfig, progress: Any) -> str:
    lines = [
        f"One run with seed {config.seed}: the intervals are over questions, not over seeds.",
        f"Trained and measured on {plain(config.dataset.name)} alone, in the prompt "
        f"{plain(config.prompt.name)}; nothing is known of other tasks, languages or safety.",
        "It was rewarded for final answers: what stands before them may be wrong.",
    ]
    if _on_hub(config.model.model_name_or_path):
        lines.append("Whether its base model has seen the test questions is not known.")
    if progress.clipped_ratio > 0.05:
        lines.append(f"{progress.clipped_ratio:.0%} of the last step's completions were cut.")
    for name, count in progress.alarms.items():
        lines.append(f"Alarm {plain(name)} rang in {count} steps.")
    if progress.failed_saves:
        lines.append(f"{progress.failed_saves} checkpoints could not be written on the way.")
    return "\n".join(f"- {line}" for line in lines)


def _picture(rows: list[dict[str, Any]], evals: list[dict[str, Any]]) -> str:
    curves = [Curve("mean reward", [(row["step"], row["reward"]) for row in rows])]
    for decoding in dict.fromkeys(row["decoding"] for row in evals):
        mine = [row for row in evals if row["decoding"] == decoding]
        points = [(row["step"], row["accuracy"]) for row in mine]
        bars = [(row["low"], row["high"]) for row in mine]
        curves.append(Curve(f"accuracy ({decoding})", points, bars))
    return curve_svg(curves)
