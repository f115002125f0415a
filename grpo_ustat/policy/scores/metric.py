r"""The norm in which a gradient's error is measured: Euclidean, or that of AdamW's step.

AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019) moves entry j of the parameters by the learning
rate times `d_j m_j`, where m is a mean of gradients and

    d_j = 1 / (sqrt(v_j) + eps),        v_j = a running mean of the squared entries ghat_j^2

With v at its mean for this policy, v_j = E ghat_j^2, the error of that step is
||D (ghat - grad J)|| with D = diag(d), and no entry adds more than 1 to E ||D ghat||^2, however
rarely it is moved. `mse.adam_pool` says how v is had from a pool. Every estimator here is linear in
the scores, so its bias, variance and error in this norm are those of the scores D s_i: norms, Gram
matrices, sketches and closed forms need no other change. A common factor of v, as of the number of
prompts in a batch, changes no ratio of errors and no best G.

The state v of a checkpoint is no substitute: entries whose last gradients were long ago or none
have a v near 0, and their few completions are then all of the error.

An entry without any gradient has v_j = 0 and no error; its weight is 0. So is that of entries of
parameters that are left out: with weight 1 for the others the norm is that of a part of the
gradient.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from grpo_ustat.config.schema import ConfigError

EPS = 1e-8  # torch's AdamW


class Metric:
    """The weights d of a model's trainable parameters.

    Args:
        weights: by parameter name, flat.
    """

    def __init__(self, weights: dict[str, torch.Tensor]):
        self._weights = weights

    @classmethod
    def of_parts(cls, parameters: list[tuple[str, nn.Parameter]], counted: set[str]) -> Metric:
        """Euclidean over the entries of the counted parameters, without memory for the weights."""
        return cls({name: _constant(parameter, name in counted) for name, parameter in parameters})

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


def adam_metric(second_moments: dict[str, torch.Tensor], counted: set[str]) -> Metric:
    """The metric of AdamW's step.

    Args:
        second_moments: v of every trainable parameter, by name.
        counted: the names of those whose entries count.
    """
    weights = {}
    for name, v in second_moments.items():
        weight = 1 / (v.sqrt() + EPS)
        weight[v == 0] = 0
        weights[name] = weight.flatten() * (name in counted)
    return Metric(weights)
