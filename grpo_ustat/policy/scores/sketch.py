r"""Sketches: short vectors that give unbiased estimates of long vectors' inner products.

A sketch F u of a long vector u has R entries, R prime. Entry j of u gets a random sign
`e_j = +-1` and is added to entry `h(j) = j mod R` of the sketch, its bucket:

    (F u)_r = sum_{j: h(j) = r} e_j u_j        E <F u, F v> = <u, v>
    Var <F u, F v> <= ( ||u||^2 ||v||^2 + <u, v>^2 ) / R   on average over buckets

This is a count sketch (Charikar, Chen & Farach-Colton 2002) in which only the signs are random. In
<F u, F v>, the products of different entries j and k have the factor e_j e_k with expectation 0, so
the inner product is unbiased for any buckets. If a model has at most R parameters, the sketch is
the vector itself, and inner products are exact.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

# The signs of a parameter with at most this many entries are kept unpacked, with one byte per sign
# instead of one bit, which is faster.
MAX_UNPACKED = 2**18
# Number of entries that `Sketch.of` sketches at a time.
ENTRIES_AT_ONCE = 2**26


class Signs:
    """Random signs of all entries of named parameters, one bit per entry.

    Args:
        sizes: number of entries of every parameter by name.
        seed: seed of the signs. A parameter's signs depend only on this seed and its name.
    """

    def __init__(self, sizes: dict[str, int], seed: int = 0):
        self.sizes, self.seed = sizes, seed
        self._bits: dict[str, torch.Tensor] = {}
        self._kept: dict[str, torch.Tensor] = {}

    def of(self, name: str, start: int, stop: int, device: torch.device) -> torch.Tensor:
        """Return the signs, +-1 as int8, of entries `start` to `stop` of a parameter."""
        if name in self._kept:
            return self._kept[name][start:stop]
        if self.sizes[name] <= MAX_UNPACKED:
            self._kept[name] = _unpacked(self._packed(name), 0, self.sizes[name]).to(device)
            return self._kept[name][start:stop]
        if name not in self._bits:
            self._bits[name] = self._packed(name).to(device)
        return _unpacked(self._bits[name], start, stop)

    def _packed(self, name: str) -> torch.Tensor:
        """Draw one random bit per entry, packed to bytes with the first entry's bit the highest."""
        digest = hashlib.blake2b(f"{self.seed}\x1f{name}".encode(), digest_size=16).digest()
        bits = np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64))
        words = bits.random_raw((self.sizes[name] + 63) // 64)
        return torch.from_numpy(words.view(np.uint8))


def _unpacked(bytes_M: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Convert bits `start` to `stop` to int8 signs: 1 for bit 0, -1 for bit 1."""
    first = start // 8
    shifts_8 = torch.arange(7, -1, -1, dtype=torch.uint8, device=bytes_M.device)
    bits = (bytes_M[first : (stop + 7) // 8, None] >> shifts_8).bitwise_and_(1).flatten()
    return bits.view(torch.int8).mul_(-2).add_(1)[start - 8 * first : stop - 8 * first]


class Sketch:
    """Linear map from the gradients of named parameters to R numbers.

    Args:
        sizes: number of entries of every parameter by name, in any order.
        size: length R of a sketch, preferably prime. If the parameters have at most R entries in
            all, the sketch is the gradient itself.
        seed: seed of the random signs.
        signs: signs of another sketch of the same parameters, to save memory; None to draw signs.
    """

    def __init__(self, sizes: dict[str, int], size: int, seed: int = 0, signs: Signs | None = None):
        total = sum(sizes.values())
        self.full = total <= size
        self.dimension = total if self.full else size
        starts = np.cumsum([0, *(sizes[name] for name in sorted(sizes))])
        self._start = dict(zip(sorted(sizes), starts.tolist(), strict=False))
        self.signs = signs or Signs(sizes, seed)

    def add(self, out_NR: torch.Tensor, name: str, start: int, flat_NC: torch.Tensor) -> None:
        """Add entries `start` to `start + C` of a parameter's gradients to their sketches.

        Args:
            out_NR: sketches of the N gradients, to which the entries are added.
            name: name of the parameter.
            start: index of the first entry in the flat parameter.
            flat_NC: the entries of the N gradients; the array may be overwritten.
        """
        count = flat_NC.shape[1]
        if self.full:
            first = self._start[name] + start
            out_NR[:, first : first + count] += flat_NC
            return
        flat_NC *= self.signs.of(name, start, start + count, flat_NC.device)
        bucket, size = start % self.dimension, self.dimension
        head = min(count, -bucket % size)
        middle = (count - head) // size
        if head:
            out_NR[:, bucket : bucket + head] += flat_NC[:, :head]
        if middle:
            body = flat_NC[:, head : head + middle * size].unflatten(1, (middle, size))
            out_NR += body.sum(dim=1)
        tail = flat_NC[:, head + middle * size :]
        out_NR[:, : tail.shape[1]] += tail

    def of(self, gradient: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the sketch of one gradient, [R], in float32 or a wider type.

        Args:
            gradient: gradient of each parameter, by name.
        """
        some = next(iter(gradient.values()))
        wide = torch.promote_types(some.dtype, torch.float32)
        out = torch.zeros((1, self.dimension), dtype=wide, device=some.device)
        for name, value in gradient.items():
            flat = value.reshape(1, -1)
            for start in range(0, flat.shape[1], ENTRIES_AT_ONCE):
                self.add(
                    out, name, start, flat[:, start : start + ENTRIES_AT_ONCE].to(wide, copy=True)
                )
        return out[0]
