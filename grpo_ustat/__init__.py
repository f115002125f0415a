"""Errors of GRPO policy gradients, the best group size, and training.

Each name below is loaded on first use, so that `import grpo_ustat` is fast:

- `GradientNoiseCallback`: measures the gradient's error during training with TRL's GRPOTrainer.
- `audit`: checks whether a trainer applies the gradient that its loss declares; `UpdateRows`
  describes the rows of the update, and `Loss` describes the loss.
- `completion_scores`: computes exact norms and inner products of the scores of completions under a
  loaded model; a score is the gradient of a completion's log-probability.
- `scaling_from_arrays`: estimates the constants C1, C2, C3 of the gradient's error, and the best
  group size G*, from arrays of rewards, squared norms of scores and inner products of gradients.
- `noise_scale_from_norms`: estimates the gradient noise scale from norms of gradients.
- `watch`: measures the gradient noise scale in any PyTorch training loop.
- `Baseline`: declares a user-defined baseline.
- `load_run`: loads the folder of a finished or unfinished run.
- `read_curves`: reads a study's table of the error of each baseline at each group size.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_ustat.estimators.baselines import Baseline
    from grpo_ustat.estimators.gradient_norms import noise_scale_from_norms
    from grpo_ustat.estimators.groups import scaling_from_arrays
    from grpo_ustat.estimators.row_weights import Loss
    from grpo_ustat.policy.audit import UpdateRows, audit
    from grpo_ustat.policy.scores import completion_scores
    from grpo_ustat.policy.watch import watch
    from grpo_ustat.runs.library import load_run, read_curves

__version__ = "0.2.0"
__all__ = [
    "Baseline",
    "Loss",
    "UpdateRows",
    "audit",
    "completion_scores",
    "load_run",
    "noise_scale_from_norms",
    "read_curves",
    "scaling_from_arrays",
    "watch",
]

# Module that defines each name, and the extra (optional dependencies) that the name needs.
_HOMES = {
    "Baseline": ("grpo_ustat.estimators.baselines", ""),
    "GradientNoiseCallback": ("grpo_ustat.integrations.trl", "trl"),
    "Loss": ("grpo_ustat.estimators.row_weights", ""),
    "UpdateRows": ("grpo_ustat.policy.audit", "torch"),
    "audit": ("grpo_ustat.policy.audit", "torch"),
    "completion_scores": ("grpo_ustat.policy.scores", "torch"),
    "load_run": ("grpo_ustat.runs.library", "cli"),
    "noise_scale_from_norms": ("grpo_ustat.estimators.gradient_norms", ""),
    "read_curves": ("grpo_ustat.runs.library", "cli"),
    "scaling_from_arrays": ("grpo_ustat.estimators.groups", ""),
    "watch": ("grpo_ustat.policy.watch", "torch"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'grpo_ustat' has no attribute {name!r}")
    home, extra = _HOMES[name]
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if not extra:
            raise
        raise ImportError(
            f"grpo_ustat.{name} needs {error.name}: pip install 'grpo-ustat[{extra}]'"
        ) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
