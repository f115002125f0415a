"""Checkpoints in save_pretrained layout with the optimizer's moments and our counters.

A checkpoint is written beside its final place and renamed, so it is either absent or whole. No
random state is stored: every draw is keyed by the step.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from grpo_ustat.policy.loading import Policy
from grpo_ustat.training.sharded import load_moments

STATE = "grpo_ustat_state.json"
OPTIMIZER = "optimizer.safetensors"
MEMORY = "memory.npz"


def save(
    folder: Path,
    step: int,
    policy: Policy,
    moments: dict[str, torch.Tensor],
    state: dict[str, Any],
    memory: dict[str, np.ndarray],
) -> Path:
    """Write `checkpoint-<step>/`: model, tokenizer, `moments` (see `sharded`), state, memory."""
    target, staged = folder / f"checkpoint-{step}", folder / f".checkpoint-{step}.tmp"
    for old in (staged, target):
        if old.exists():
            shutil.rmtree(old)
    policy.model.save_pretrained(staged)
    policy.tokenizer.save_pretrained(staged)
    save_file(moments, staged / OPTIMIZER)
    np.savez(staged / MEMORY, **memory)
    (staged / STATE).write_text(json.dumps(state | {"step": step}))
    os.replace(staged, target)
    return target


def newest(folder: Path) -> Path | None:
    """The checkpoint of the latest step, None without one."""
    numbered = [p for p in folder.glob("checkpoint-*") if p.name[len("checkpoint-") :].isdigit()]
    found = [p for p in numbered if (p / STATE).is_file()]
    return max(found, key=lambda p: int(p.name.rpartition("-")[2]), default=None)


def load(checkpoint: Path, policy: Policy, optimizer) -> dict[str, Any]:
    """Restore model and optimizer in place and return the stored state."""
    weights = load_file(checkpoint / "model.safetensors")
    missing = policy.model.load_state_dict(weights, strict=False).missing_keys
    tied = set(policy.model._tied_weights_keys or ())
    if set(missing) - tied:
        raise ValueError(f"{checkpoint} lacks weights of {sorted(set(missing) - tied)}")
    load_moments(policy, optimizer, load_file(checkpoint / OPTIMIZER))
    return json.loads((checkpoint / STATE).read_text())


def load_memory(checkpoint: Path) -> dict[str, np.ndarray]:
    """What the baseline remembered."""
    with np.load(checkpoint / MEMORY, allow_pickle=False) as stored:
        return dict(stored)
