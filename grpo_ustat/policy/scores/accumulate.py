r"""Sums over layers of what each layer adds to norms, inner products and sketches of scores.

A score is the gradient of a completion's log-probability. In a linear layer, the score of
completion i is a matrix `G_i = sum_t left_it right_it'` with R rows and C columns, where t runs
over tokens. It is computed in chunks of its rows for all completions, so that the matrices G_i of
all completions are never in memory together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_ustat.policy.logprobs import widen
from grpo_ustat.policy.precision import full_products, sums_wider, wide_bmm
from grpo_ustat.policy.scores.sketch import Sketch

# Largest size in bytes of the gradients that are computed at a time, by device type.
GRADIENT_BYTES = {"cpu": 2**22, "cuda": 2**28}
# Number of slices into which long vectors are divided on a GPU; see `sliced_products`.
VECTOR_SLICES = 256

Factors = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Factors of the gradients G_i, one pair (left [n, T, R], right [n, T, C]) for each forward pass.

A pass reads n consecutive completions in T columns. These sizes may differ between passes.
"""


class Accumulator:
    """Norms, inner products and sketches of the scores of B completions, summed over parameters.

    The gradients of each parameter must be added only once, because squared norms of parts do not
    add up.

    Args:
        batch: number of completions, B.
        device: device of the sums.
        weights_KB: K weight vectors for weighted sums of scores; None for no sums.
        gram: True to compute the inner products <s_i, s_j> of the scores.
        features: map that sketches each score; None for no sketches.
        pooled: map that sketches the weighted sums; the sketches then replace the sums.
    """

    def __init__(
        self,
        batch: int,
        device: torch.device,
        weights_KB: torch.Tensor | None = None,
        gram: bool = False,
        features: Sketch | None = None,
        pooled: Sketch | None = None,
    ):
        def zeros(*shape, dtype=torch.float64):
            return torch.zeros(shape, dtype=dtype, device=device)

        self.batch, self.device, self.features, self.pooled = batch, device, features, pooled
        self.weights_KB = weights_KB if weights_KB is None else weights_KB.to(device)
        count = 0 if weights_KB is None else len(weights_KB)
        self.names: set[str] = set()
        self.sq_norm_B = zeros(batch)
        self.gram_BB = zeros(batch, batch) if gram else None
        self.gradients_K: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
        self.features_BR = zeros(batch, features.dimension) if features else None
        self.pooled_KR = zeros(count, pooled.dimension) if pooled else None

    def add_outer(self, name: str, shape: torch.Size, factors: Factors, first_row: int = 0) -> None:
        """Add the gradients `sum_t left_t right_t'` of all completions in R rows of a parameter.

        Args:
            name, shape: name and shape of the parameter.
            factors: left and right factors of the gradients.
            first_row: first of the R rows.
        """
        self.names.add(name)
        # Widen the factors only once for all slices.
        wide = [(left, r if sums_wider(left, r) else widen(r)) for left, r in factors]
        (left, right), sizes = wide[0], [len(left) for left, _ in wide]
        count, columns = sum(sizes), right.shape[2]
        dtype = torch.promote_types(widen(left[:0]).dtype, right.dtype)
        step = max(1, GRADIENT_BYTES[self.device.type] // (4 * count * columns))
        for low in range(0, left.shape[2], step):
            high = min(low + step, left.shape[2])
            products = right.new_empty((count, high - low, columns), dtype=dtype)
            for (left, right), some in zip(wide, products.split(sizes), strict=True):
                wide_bmm(left[:, :, low:high].mT, right, out=some)
            self.add_flat(name, shape, products.flatten(1), (first_row + low) * columns)

    def add_flat(self, name: str, shape: torch.Size, flat_NC: torch.Tensor, start: int = 0) -> None:
        """Add entries `start` to `start + C` of a parameter's gradients for N completions.

        Args:
            name, shape: name and shape of the parameter.
            flat_NC: the entries of the gradients; the array may be overwritten.
            start: index of the first entry in the flat parameter.
        """
        self.names.add(name)
        flat_NC = widen(flat_NC)
        self._square(flat_NC)
        if self.weights_KB is not None:
            self._pool(name, shape, self._weights(flat_NC.dtype) @ flat_NC, start)
        if self.features is None:
            return
        assert self.features_BR is not None
        self.features.add(self.features_BR, name, start, flat_NC)

    def add_rows(self, name: str, shape: torch.Size, ids_U, dense_NUD: torch.Tensor) -> None:
        """Add some rows of a matrix's gradients.

        Args:
            name, shape: name and shape of the matrix, with D columns.
            ids_U: indices of the U rows, in ascending order.
            dense_NUD: these rows of the gradients of N completions; the array may be overwritten.
        """
        if self.features is None and self.pooled is None:
            self.names.add(name)
            flat = dense_NUD.flatten(1)
            self._square(flat)
            if self.weights_KB is not None:
                values_KC = self._weights(flat.dtype) @ flat
                for k, value_UD in enumerate(values_KC.unflatten(1, dense_NUD.shape[1:])):
                    self._gradient(k, name, shape, flat.dtype).index_add_(0, ids_U, value_UD)
            return
        # Rows with consecutive indices are added in one call.
        breaks = (ids_U.diff() != 1).nonzero().flatten() + 1
        edges, width = [0, *breaks.tolist(), len(ids_U)], dense_NUD.shape[2]
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            flat = dense_NUD[:, low:high].flatten(1)
            self.add_flat(name, shape, flat, int(ids_U[low]) * width)

    def add_zero(self, name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        """Note a parameter whose gradients are 0, so that weighted sums contain it."""
        self.names.add(name)
        if self.pooled is None:
            for k in range(len(self.gradients_K)):
                self._gradient(k, name, shape, torch.promote_types(dtype, torch.float32))

    def cross(
        self, name: str, shape: torch.Size, ids_U, first_NUD: torch.Tensor, second_NUD: torch.Tensor
    ) -> None:
        """Add the cross terms of the norms and inner products if a gradient is a sum of two arrays.

        For the squared norms, this term is 2 <first, second>. The squared norms of the two arrays
        must be added separately.

        Args:
            name, shape: name and shape of the matrix.
            ids_U: indices of the U rows in which both arrays may be nonzero.
            first_NUD, second_NUD: these rows of the two arrays.
        """
        first_NC, second_NC = first_NUD.flatten(1), second_NUD.flatten(1)
        if self.gram_BB is None:
            self.sq_norm_B += 2 * torch.linalg.vecdot(first_NC, second_NC)
            return
        with full_products():
            products = first_NC @ second_NC.T
        products = products + products.T
        self.gram_BB += products
        self.sq_norm_B += products.diagonal()

    def _square(self, flat_NC: torch.Tensor) -> None:
        """Add the inner products, or only the squared norms, of a part of the gradients."""
        if self.gram_BB is None:
            self.sq_norm_B += torch.linalg.vecdot(flat_NC, flat_NC)
            return
        products = inner_products(flat_NC)
        self.gram_BB += products
        self.sq_norm_B += products.diagonal()

    def _weights(self, dtype: torch.dtype) -> torch.Tensor:
        assert self.weights_KB is not None
        return self.weights_KB.to(dtype)

    def _pool(self, name, shape, values_KC: torch.Tensor, start: int) -> None:
        """Add entries of weighted sums to the sums, or to their sketches.

        Args:
            name, shape: name and shape of the parameter.
            values_KC: C entries of the sums for K weight vectors.
            start: index of the first entry in the flat parameter.
            first: index of the first of these weight vectors.
        """
        if self.pooled is not None:
            assert self.pooled_KR is not None
            self.pooled.add(self.pooled_KR, name, start, values_KC)
            return
        stop = start + values_KC.shape[1]
        for k, value in enumerate(values_KC):
            self._gradient(k, name, shape, value.dtype).view(-1)[start:stop] += value

    def _gradient(self, k: int, name: str, shape, dtype: torch.dtype) -> torch.Tensor:
        if name not in self.gradients_K[k]:
            self.gradients_K[k][name] = torch.zeros(shape, dtype=dtype, device=self.device)
        return self.gradients_K[k][name]


def inner_products(flat_NC: torch.Tensor) -> torch.Tensor:
    """Compute all inner products of N long vectors, [N, N]."""
    with full_products():
        if flat_NC.device.type == "cpu":
            return flat_NC @ flat_NC.T
        return sliced_products(flat_NC)


def sliced_products(flat_NC: torch.Tensor, slices: int = VECTOR_SLICES) -> torch.Tensor:
    """Compute all inner products of N long vectors, [N, N], as sums over slices of the vectors.

    A GPU computes the entries of a product in parallel. The result here has few entries, each a
    long sum, so without slices most of the GPU would be idle.
    """
    even = flat_NC.shape[1] // slices * slices
    parts_SNK = flat_NC[:, :even].unflatten(1, (slices, -1)).transpose(0, 1)
    rest = flat_NC[:, even:]
    return torch.bmm(parts_SNK, parts_SNK.mT).sum(dim=0) + rest @ rest.T
