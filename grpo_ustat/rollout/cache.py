"""A key-value cache that grows in place.

`DynamicCache` copies all it holds for every token. Here long keys and values stand in buffers with
room for more tokens, so a token costs its own entry; what attention reads is the same. Short ones
are copied all the same: reading them from where they do not lie side by side costs more.
"""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

ROOM = 64  # tokens of room in a new buffer: what it copies is little beside what attention reads
IN_PLACE_FROM = 12 * 1024  # bytes of one row's head, where a copy costs more than reading with gaps


def growing_cache(config: PreTrainedConfig) -> DynamicCache:
    """`DynamicCache(config=config)` whose attention layers grow in place.

    Layers of other kinds (recurrent states, hybrids) stay as transformers made them.
    """
    cache = DynamicCache(config=config)
    cache.layers = [_growing(layer) for layer in cache.layers]
    return cache


def _growing(layer):
    if type(layer) is DynamicLayer:
        return GrowingLayer()
    if type(layer) is DynamicSlidingWindowLayer:
        return GrowingSlidingWindowLayer(layer.sliding_window)
    return layer


class _Buffered:
    """Room for a layer's keys and for its values."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """See `DynamicLayer`."""
        super().lazy_initialization(key_states, value_states)
        self._buffers = _Buffer(), _Buffer()


class GrowingLayer(_Buffered, DynamicLayer):
    """Keys and values [B, H, T, D] of all tokens so far."""

    def update(self, key_states, value_states, *args, **kwargs):
        """See `DynamicLayer`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._buffers
        self.keys = keys.append(self.keys, key_states)
        self.values = values.append(self.values, value_states)
        return self.keys, self.values


class GrowingSlidingWindowLayer(_Buffered, DynamicSlidingWindowLayer):
    """Keys and values [B, H, min(T, window - 1), D] of the last tokens."""

    def update(self, key_states, value_states, *args, **kwargs):
        """See `DynamicSlidingWindowLayer`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        keys, values = self._buffers
        whole = keys.append(self.keys, key_states), values.append(self.values, value_states)
        self.keys = keys.keep(1 - self.sliding_window)
        self.values = values.keep(1 - self.sliding_window)
        return whole


class _Buffer:
    """Room for a tensor [B, H, T, D] to grow along T.

    What it handed out last is extended in place. Anything else, such as that with fewer rows, moves
    into a new buffer first.
    """

    def __init__(self):
        self.kept = None  # the tensor handed out last, a view of the end of what is filled
        self.buffer, self.filled = None, 0

    def append(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """`old` and then `new` along T."""
        count = new.shape[-2]
        if not old.numel() or old[0, 0].nbytes < IN_PLACE_FROM:
            self.buffer, self.kept = None, torch.cat([old, new], dim=-2) if old.numel() else new
            return self.kept
        if self.buffer is None or old is not self.kept or self._room() < count:
            self._move(old, count)
        start, self.filled = self.filled - old.shape[-2], self.filled + count
        self.buffer[..., self.filled - count : self.filled, :] = new
        self.kept = self.buffer[..., start : self.filled, :]
        return self.kept

    def keep(self, start: int) -> torch.Tensor:
        """Only the tokens from `start` on."""
        self.kept = self.kept[..., start:, :]
        return self.kept

    def _room(self) -> int:
        return self.buffer.shape[-2] - self.filled

    def _move(self, old: torch.Tensor, count: int) -> None:
        *rows, self.filled, width = old.shape
        self.buffer = old.new_empty((*rows, self.filled + count + ROOM, width))
        self.buffer[..., : self.filled, :] = old
