"""Short runs, what they leave behind without the clock, and how two of them differ."""

from __future__ import annotations

import json
import shutil

from commands import compose
from safetensors.torch import load_file

from grpo_ustat.distributed import lock
from grpo_ustat.pages import page
from grpo_ustat.runs import history
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.train import model_card, trainer
from grpo_ustat.train.checkpoint import STATE_FILE

SHORT = (  # answers of three tokens; every item of state matters: moments, schedule, running mean
    "model=tiny_direct", "max_steps=4", "eval_steps=2", "save_steps=1", "save_total_limit=null",
    "budget.rollouts=16", "group_size=4", "dataset.test_size=10", "dataset.train_size=8",
    "max_completion_length=6", "rollout_batch_size=64", "learning_rate=1e-3",
    "baseline=running_mean", "schedule=linear", "schedule.warmup_steps=2",
)  # fmt: skip
VIEWS = (
    history.NAME,
    lock.NAME,
    page.NAME,
    model_card.NAME,
    model_card.CONFIG,
)  # of launches
CLOCK = ("step_time", "versions", "digest", "files")  # and whatever says seconds


def config_of(*overrides):
    return compose("train", *SHORT, *overrides)


def fit(path, *overrides):
    config = config_of(*overrides)
    trainer.fit(config, RunFolder(path, config))
    return path


def rewind(path, *steps):
    """Make a finished run one that was killed before these checkpoints were written."""
    (path / "result.json").unlink()
    for step in steps:
        shutil.rmtree(path / f"checkpoint-{step}")
    return path


def timeless(content):
    """A nested value without what depends on the clock."""
    if isinstance(content, dict):
        return {k: timeless(v) for k, v in content.items() if k not in CLOCK and "seconds" not in k}
    return content


def rows(path):
    return [timeless(json.loads(line)) for line in (path / "metrics.jsonl").open()]


def weights(path, step):
    return load_file(path / f"checkpoint-{step}" / "model.safetensors")


def left(path):
    """Every file of a run folder and its content; without the clock."""
    found = {}
    for file in sorted(path.rglob("*")):
        if file.name in VIEWS or file.stem == "learning":
            continue
        name = file.relative_to(path).as_posix()
        if file.name in (STATE_FILE, "result.json"):
            found[name] = timeless(json.loads(file.read_text()))
        elif file.name == "metrics.jsonl":
            found[name] = rows(path)
        elif file.is_file() and file.name != "code.json":
            found[name] = file.read_bytes()
        else:
            found[name] = None
    return found


def differences(one, two):
    """Names of files that two run folders do not share bit by bit."""
    a, b = left(one), left(two)
    return sorted(
        name for name in a.keys() | b.keys() if (name in a, a.get(name)) != (name in b, b.get(name))
    )
