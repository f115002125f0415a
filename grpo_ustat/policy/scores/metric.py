r"""The norm in which a gradient's error is measured: Euclidean, or that of an optimizer's step.

AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019) moves entry j of the parameters by the learning
rate times `d_j m_j`, where m is a mean of gradients and

    d_j = 1 / (sqrt(v_j) + eps),        v_j = a running mean of the squared entries g_j^2

With v held at a checkpoint's, the error of that step is `||D (ghat - grad J)||`, D = diag(d). Every
estimator here is linear in the scores, so its bias, variance and error in this norm are those of
the scores D s_i: norms, Gram matrices, sketches and closed forms need no other change. A common
factor of d, as Adam's correction of v for its start, changes no ratio of errors and no best G.

An entry that never had a gradient has v_j = 0 and no scale; it counts with weight 0. So do the
entries of parameters that are left out: with weight 1 for the others the norm is that of a part of
the gradient.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from grpo_ustat.config.model import OPTIMIZER
from grpo_ustat.config.schema import ConfigError

SECOND_MOMENT = "exp_avg_sq"
EPS = 1e-8  # torch's AdamW


class Metric:
    """The weights d of a model's trainable parameters.

    Args:
        weights: by parameter name, flat, float32.
    """

    def __init__(self, weights: dict[str, torch.Tensor]):
        self._weights = weights

    @classmethod
    def of_parts(cls, parameters: list[tuple[str, nn.Parameter]], counted: set[str]) -> Metric:
        """Euclidean over the entries of the counted parameters, without memory for the weights."""
        return cls({name: _constant(parameter, name in counted) for name, parameter in parameters})

    @property
    def entries(self) -> tuple[int, int]:
        """How many entries have a weight, and how many there are."""
        counted = sum(int(torch.count_nonzero(weight)) for weight in self._weights.values())
        return counted, sum(weight.numel() for weight in self._weights.values())

    def of(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Of entries `start ... stop` of a parameter."""
        return self._weights[name][start:stop]

    def rows(self, name: str, shape: torch.Size, ids_U: torch.Tensor) -> torch.Tensor:
        """Of some rows of a matrix, [U, D]."""
        return self._weights[name].view(shape)[ids_U]


def counted_parameters(parameters: list[tuple[str, nn.Parameter]], pattern: str | None) -> set[str]:
    """The names in which a regular expression occurs; all without one.

    Raises:
        ConfigError: it occurs in none.
    """
    names = [name for name, _ in parameters]
    counted = {name for name in names if pattern is None or re.search(pattern, name)}
    if not counted:
        some = ", ".join(names[:: max(1, len(names) // 4)][:4])
        raise ConfigError(
            f"study.parameters={pattern} fits none of the model's {len(names)} trainable "
            f"parameters, such as {some}: use part of a name"
        )
    return counted


def _constant(parameter: nn.Parameter, value: float) -> torch.Tensor:
    """As many of one number, in the memory of one."""
    return torch.tensor([float(value)], device=parameter.device).expand(parameter.numel())


def adam_metric(
    parameters: list[tuple[str, nn.Parameter]], counted: set[str], folder: Path
) -> Metric:
    """The metric of the AdamW state that a checkpoint holds.

    Args:
        parameters: names and trainable parameters of the model that is loaded from it.
        counted: the names of those whose entries count.
        folder: the checkpoint.

    Raises:
        ConfigError: there is no such state, or it is damaged or of other parameters.
    """
    file = folder / OPTIMIZER
    weights = {}
    try:
        with safe_open(file, framework="pt") as state:
            for name, parameter in parameters:
                if name not in counted:
                    weights[name] = _constant(parameter, 0)
                    continue
                second = state.get_tensor(f"{name}/{SECOND_MOMENT}")
                if second.shape != parameter.shape:
                    raise ConfigError(
                        f"{file}: {name}/{SECOND_MOMENT} has shape {tuple(second.shape)}, the "
                        f"model's {name} {tuple(parameter.shape)}: it is of another model"
                    )
                weight = 1 / (second.double().sqrt() + EPS)
                weight[second == 0] = 0
                weights[name] = weight.float().flatten().to(parameter.device)
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{file} cannot be read as the state of AdamW for this model: {error}; use another "
            "checkpoint of the run"
        ) from error
    return Metric(weights)
