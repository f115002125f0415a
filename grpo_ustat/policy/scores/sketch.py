r"""Seeded sketches: inner products of long vectors from short ones, unbiased.

With independent random signs `e_j = +-1` and buckets `h(j) = j mod R`, R prime,

    (F u)_r = sum_{j: h(j) = r} e_j u_j        E <F u, F v> = <u, v>
    Var <F u, F v> <= ( ||u||^2 ||v||^2 + <u, v>^2 ) / R   on average over buckets

(count sketch, Charikar, Chen & Farach-Colton 2002, with the signs alone random: cross terms
e_j e_k have mean zero whatever the buckets, so every fixed F is one draw of an unbiased product).
A model with no more parameters than R is kept in full, and products are exact.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


class Sketch:
    """A linear map from named parameter gradients to R numbers.

    Args:
        sizes: number of entries of every parameter by name; the order of names does not matter.
        size: R, best a prime; at least as many as parameters keeps vectors in full.
        seed: of the signs; a parameter's signs are a function of (seed, name) alone.
    """

    def __init__(self, sizes: dict[str, int], size: int, seed: int = 0):
        total = sum(sizes.values())
        self.full = total <= size
        self.dimension = total if self.full else size
        self.seed = seed
        starts = np.cumsum([0, *(sizes[name] for name in sorted(sizes))])
        self._start = dict(zip(sorted(sizes), starts.tolist(), strict=False))
        self._sizes = sizes
        self._signs: dict[str, torch.Tensor] = {}

    def signs(self, name: str, device: torch.device) -> torch.Tensor:
        """The random signs +-1 of one parameter's entries, int8 [entries]; computed once."""
        if name not in self._signs:
            digest = hashlib.blake2b(f"{self.seed}\x1f{name}".encode(), digest_size=16).digest()
            bits = np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64))
            count = self._sizes[name]
            words = bits.random_raw((count + 63) // 64)
            flips = np.unpackbits(words.view(np.uint8), count=count).astype(np.int8)
            self._signs[name] = torch.from_numpy(1 - 2 * flips).to(device)
        return self._signs[name]

    def add(self, out_NR: torch.Tensor, name: str, start: int, flat_NC: torch.Tensor) -> None:
        """Add entries `start ... start + C` of a parameter's N vectors to their sketches.

        Overwrites `flat_NC` where the sketch is not in full.
        """
        count = flat_NC.shape[1]
        if self.full:
            first = self._start[name] + start
            out_NR[:, first : first + count] += flat_NC
            return
        flat_NC *= self.signs(name, flat_NC.device)[start : start + count]
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
        """The sketch of one gradient by parameter name, [R], at least float32."""
        some = next(iter(gradient.values()))
        wide = torch.promote_types(some.dtype, torch.float32)
        out = torch.zeros((1, self.dimension), dtype=wide, device=some.device)
        for name, value in gradient.items():
            self.add(out, name, 0, value.to(wide).reshape(1, -1).clone())
        return out[0]
