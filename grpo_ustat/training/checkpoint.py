"""What a checkpoint holds: the model as save_pretrained writes it, and everything else of a run.

No random state is stored: every draw is keyed by the step. Files are safetensors, JSON and npz
without pickle, so loading one runs no code of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from grpo_ustat.checks import ConfigError
from grpo_ustat.policy.loading import Policy
from grpo_ustat.runs.snapshots import publish
from grpo_ustat.training.deepspeed import ZeroOptimizer
from grpo_ustat.training.sharded import load_moments

STATE = "grpo_ustat_state.json"
OPTIMIZER = "optimizer.safetensors"
MEMORY = "memory.npz"
ADAPTERS = "adapter_model.safetensors"


def save(
    folder: Path,
    step: int,
    policy: Policy,
    moments: dict[str, torch.Tensor],
    state: dict[str, Any],
    memory: dict[str, np.ndarray],
    describe: Callable[[Path], None] | None = None,
) -> Path:
    """Publish `checkpoint-<step>/`: model, tokenizer, `moments` (see `sharded`), state, memory,
    and what `describe` adds to them.

    With adapters the model part is PEFT's: the adapters alone, which name their base model.

    Raises:
        FloatingPointError: see `check_finite`; nothing is published.
    """
    check_finite(policy, moments)

    def write(staged: Path) -> None:
        policy.model.save_pretrained(staged)
        policy.tokenizer.save_pretrained(staged)
        save_file(moments, staged / OPTIMIZER)
        np.savez(staged / MEMORY, **memory)
        (staged / STATE).write_text(json.dumps(state | {"step": step}))
        if describe is not None:
            describe(staged)

    return publish(folder, step, write)


def load(
    checkpoint: Path, policy: Policy, optimizer: torch.optim.Optimizer | ZeroOptimizer
) -> dict[str, Any]:
    """Restore model and optimizer in place and return the stored state.

    Raises:
        ConfigError: a tensor of the checkpoint does not fit the model.
    """
    _load_weights(checkpoint, policy.model)
    _load_moments(checkpoint, policy, optimizer)
    return json.loads((checkpoint / STATE).read_text())


def load_memory(checkpoint: Path) -> dict[str, np.ndarray]:
    """What the baseline remembered."""
    with np.load(checkpoint / MEMORY, allow_pickle=False) as stored:
        return dict(stored)


def check_finite(policy: Policy, moments: dict[str, torch.Tensor] | None = None) -> None:
    """Refuse weights, and state of an optimizer, that are not finite.

    Raises:
        FloatingPointError: naming the first such tensor.
    """
    named = {f"weight {name}": p.detach() for name, p in policy.model.named_parameters()}
    named |= {f"optimizer state {name}": value for name, value in (moments or {}).items()}
    for what, value in named.items():
        if not torch.isfinite(value).all():
            raise FloatingPointError(f"{what} is not finite: lower learning_rate")


def _load_weights(checkpoint: Path, model: torch.nn.Module) -> None:
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        stored = load_file(checkpoint / ADAPTERS)
        _check_fit(checkpoint, stored, get_peft_model_state_dict(model))
        set_peft_model_state_dict(model, stored)
        return
    # The class's own loading undoes what its save_pretrained does to names.
    options = dict(dtype="auto", use_safetensors=True, ignore_mismatched_sizes=True)
    loaded, found = type(model).from_pretrained(checkpoint, output_loading_info=True, **options)
    differing = [*found["missing_keys"], *found["unexpected_keys"], *found["mismatched_keys"]]
    if differing:
        raise ConfigError(
            f"{checkpoint}: {differing[0]} is absent there or of another shape: use the model "
            "that wrote it, or on_existing=overwrite"
        )
    _check_fit(checkpoint, loaded.state_dict(), model.state_dict())
    model.load_state_dict(loaded.state_dict())


def _load_moments(
    checkpoint: Path, policy: Policy, optimizer: torch.optim.Optimizer | ZeroOptimizer
) -> None:
    stored = load_file(checkpoint / OPTIMIZER)
    parameters = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    moments = {key: value for key, value in stored.items() if value.ndim}  # others count updates
    _check_fit(checkpoint, moments, {k: parameters.get(k.rpartition("/")[0]) for k in moments})
    fields: dict[str, set[str]] = {}
    for name, _, field in (key.rpartition("/") for key in stored):
        fields.setdefault(name, set()).add(field)
    if stored and (
        fields.keys() != parameters.keys() or len(set(map(frozenset, fields.values()))) > 1
    ):
        raise ConfigError(
            f"{checkpoint / OPTIMIZER} lacks state of some of the {len(parameters)} trained "
            "parameters: use the model that wrote it, or on_existing=overwrite"
        )
    load_moments(policy, optimizer, stored)


def _check_fit(checkpoint: Path, stored: dict[str, Any], here: dict[str, Any]) -> None:
    """Names, shapes and types are the model's."""
    for name in dict.fromkeys([*here, *stored]):
        there, mine = _described(stored.get(name)), _described(here.get(name))
        if there != mine:
            raise ConfigError(
                f"{checkpoint}: {name} is {there} there, {mine} in this model: use the model and "
                "model.dtype that wrote it, or on_existing=overwrite"
            )


def _described(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
