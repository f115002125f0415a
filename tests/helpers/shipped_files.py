"""The files of `conf/` and our baselines, and the commands that take them."""

from __future__ import annotations

import pytest
from commands import CONF

from grpo_ustat.config.gap import THEOREMS, GapConfig
from grpo_ustat.config.mse import MseConfig
from grpo_ustat.config.presets import PRESETS
from grpo_ustat.config.train import TrainConfig
from grpo_ustat.estimators.baselines import BASELINES

SCHEMAS = {"mse": MseConfig, "train": TrainConfig, "gap": GapConfig}


MODELS = ("budget", "dataset", "debug", "model", "prompt", "rollout")  # a problem has none
LOSSES, TRAINING = ("baseline", "objective"), ("optimizer", "schedule", "lora")
TAKERS = {  # of each group's files, where not all entries take them
    **dict.fromkeys((*MODELS, *LOSSES), ("mse", "train")), **dict.fromkeys(TRAINING, ("train",)),
    "theorem": ("gap",), "experiment": ("train",),
}  # fmt: skip
OTHER_TAKERS = {  # files that are not as others of their group
    ("experiment", "figure4"): ("mse",), ("experiment", "figure4_offline"): ("mse",),
    ("experiment", "figure4_smollm2"): ("mse",), ("experiment", "best_group_size_start"): ("mse",),
    ("experiment", "algorithm2"): ("mse", "train"),
    ("experiment", "monte_carlo_check"): ("mse",), ("experiment", "smollm2"): ("mse",),
    ("experiment", "verdicts"): ("mse",),
    ("experiment", "theorems"): ("gap",),
    ("debug", "mse"): ("mse",), ("debug", "train"): ("train",),
}  # fmt: skip


def takers(group, name):
    if group == "budget":
        return ("mse",) if name.startswith("study") else ("train",)
    return OTHER_TAKERS.get((group, name), TAKERS.get(group, tuple(SCHEMAS)))


def group_files():
    """Each file and baseline with each command that takes it; at push with the first."""
    files = [(file.parent.name, file.stem) for file in CONF.glob("*/*.yaml")]
    ours = [("baseline", name) for name in BASELINES] + [("objective", name) for name in PRESETS]
    ours += [("theorem", name) for name in THEOREMS]
    for group, name in sorted(files + ours):
        for entry in SCHEMAS:
            if entry not in takers(group, name) or name in ("own", "jsonl"):
                continue  # tests/docs/test_own_packages.py, tests/tasks/test_jsonl.py
            often = entry == takers(group, name)[0]
            mark = pytest.mark.slow if often else pytest.mark.nightly
            marks = [mark(minutes=0.01)] * (group != "debug")
            yield pytest.param(entry, group, name, id=f"{entry}-{group}-{name}", marks=marks)
