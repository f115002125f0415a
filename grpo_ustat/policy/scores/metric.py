r"""Norm of AdamW's step, in which a gradient's error can be measured instead of the Euclidean norm.

AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019) changes parameter j by the learning rate times
`d_j m_j`, where m is a running mean of the gradients and

    d_j = 1 / (sqrt(v_j) + eps),        v_j = a running mean of the squared entries ghat_j^2

If v equals its expectation for a fixed policy, v_j = E ghat_j^2, the error of AdamW's step is
||D (ghat - grad J)|| with D = diag(d). Each parameter adds at most 1 to E ||D ghat||^2, even if its
gradient is rarely different from 0. `mse.adam_pool` explains the choice of ghat and the estimate of
v.

Every gradient estimator here is a weighted sum of scores s_i (gradients of log-probabilities).
Replacing each score s_i by D s_i therefore gives the estimator's bias, variance and error in this
norm, and nothing else changes. If v is multiplied by a constant, the ratios of errors and the best
G stay the same.

A parameter whose gradient is always 0 has v_j = 0 and no error, so its weight is set to 0.
"""

from __future__ import annotations

import torch

# Default epsilon of torch's AdamW.
EPS = 1e-8


class Metric:
    """Weight d_j of every entry of a model's trainable parameters.

    Args:
        weights: flat array with a weight for each entry of a parameter, by parameter name.
    """

    def __init__(self, weights: dict[str, torch.Tensor]):
        self._weights = weights

    def of(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return the weights of entries `start` to `stop` of a parameter."""
        return self._weights[name][start:stop]

    def rows(self, name: str, shape: torch.Size, ids_U: torch.Tensor) -> torch.Tensor:
        """Return the weights of some rows of a matrix.

        Args:
            name: name of the matrix.
            shape: shape of the matrix, with D columns.
            ids_U: indices of the U rows.

        Returns:
            Weights [U, D].
        """
        return self._weights[name].view(shape)[ids_U]


def adam_metric(second_moments: dict[str, torch.Tensor]) -> Metric:
    """Return the weights of the norm in which the error of AdamW's step is measured.

    Args:
        second_moments: v for the entries of every trainable parameter, by parameter name.
    """
    weights = {}
    for name, v in second_moments.items():
        weight = 1 / (v.sqrt() + EPS)
        weight[v == 0] = 0
        weights[name] = weight.flatten()
    return Metric(weights)
