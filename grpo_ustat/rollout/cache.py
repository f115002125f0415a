"""Key-value cache that grows in place and whose rows can be replaced.

The `DynamicCache` of transformers copies its whole content for every token. This cache instead
stores keys and values in buffers with room for more tokens, so only the entries of a new token are
written. Attention reads the same numbers. On CPUs, short keys and values are still copied, because
reading them from a part of a buffer would cost more than the copy.

All rows of a batch end in the same column, no matter when they started. A finished row can
therefore be replaced: the entries of a new prompt overwrite the last columns of the row, and the
row's mask hides all columns before.

In the shapes of tensors, B is the number of rows, H the number of heads, T the number of columns
(tokens), and D the width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# Number of tokens for which a new buffer has room. Every 64 tokens the buffer is copied to a larger
# one, which costs little compared with the reads of attention.
SPARE_TOKENS = 64
# From this size of one head of one row, in bytes, a copy costs more than reading from a part of a
# buffer.
MIN_IN_PLACE_BYTES = 12 * 1024


def growing_cache(config: PreTrainedConfig, most: int = 0) -> DynamicCache:
    """Create a `DynamicCache(config=config)` whose attention layers grow in place.

    Layers of other kinds (recurrent states, hybrids) are left unchanged.

    Args:
        config: configuration of the model.
        most: number of columns beyond which buffers on accelerators are not rounded up.
    """
    cache = DynamicCache(config=config)
    for place, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[place] = GrowingLayer(most)
        elif type(layer) is DynamicSlidingWindowLayer:
            cache.layers[place] = GrowingSlidingWindowLayer(layer.sliding_window, most)
    return cache


def replaceable_rows(cache: DynamicCache, length: int) -> bool:
    """Return True if a finished row can be replaced in all layers of the cache.

    Every layer must be a `GrowingLayer` or a `GrowingSlidingWindowLayer`, and must contain the
    `length` columns that the model has read. Layers without them show that the model keeps its
    state elsewhere.
    """
    return all(
        isinstance(layer, GrowingLayer | GrowingSlidingWindowLayer) and layer.holds(length)
        for layer in cache.layers
    )


class GrowingLayer(DynamicLayer):
    """Keys and values of all tokens so far, [B, H, T, D]."""

    def __init__(self, most: int = 0) -> None:
        super().__init__()
        self._keys, self._values = GrowingTensor(most), GrowingTensor(most)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of new tokens, and return those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self.keys = self._keys.append(self.keys, key_states)
        self.values = self._values.append(self.values, value_states)
        return self.keys, self.values

    def holds(self, length: int) -> bool:
        """Return True if the layer contains the columns of a text of `length` tokens."""
        return self.get_seq_length() == length

    def replace(
        self, rows_B: torch.Tensor, other: GrowingLayer, index_B: torch.Tensor, count: int
    ) -> None:
        """Replace rows of this layer, in their last columns, by rows of another layer.

        Args:
            rows_B: rows of this layer that are replaced.
            other: layer with the new rows.
            index_B: rows of `other` that are copied.
            count: number of last columns that are copied.
        """
        assert self.keys is not None and self.values is not None
        assert other.keys is not None and other.values is not None
        replace_rows(self.keys, rows_B, other.keys, index_B, count)
        replace_rows(self.values, rows_B, other.values, index_B, count)

    def drop(self, count: int) -> None:
        """Drop the first `count` columns."""
        assert self.keys is not None and self.values is not None
        self.keys = self._keys.crop(self.keys, count)
        self.values = self._values.crop(self.values, count)


class GrowingSlidingWindowLayer(DynamicSlidingWindowLayer):
    """Keys and values of the tokens in the sliding window, [B, H, min(T, window - 1), D]."""

    def __init__(self, sliding_window: int, most: int = 0):
        super().__init__(sliding_window)
        self._keys, self._values = GrowingTensor(most), GrowingTensor(most)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values, and return the keys and values that the new tokens read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self.cumulative_length += key_states.shape[-2]
        keys = self._keys.append(self.keys, key_states)
        values = self._values.append(self.values, value_states)
        self.keys = self._keys.crop(keys, 1 - self.sliding_window)
        self.values = self._values.crop(values, 1 - self.sliding_window)
        return keys, values

    def holds(self, length: int) -> bool:
        """Return True if the layer contains what the window keeps of a text of `length` tokens."""
        kept = min(length, self.sliding_window - 1)
        columns = -1 if self.keys is None else self.keys.shape[-2]
        return self.cumulative_length == length and columns == kept

    def replace(
        self,
        rows_B: torch.Tensor,
        other: GrowingSlidingWindowLayer,
        index_B: torch.Tensor,
        count: int,
    ) -> None:
        """Replace rows like `GrowingLayer.replace`, but only columns within the window."""
        assert self.keys is not None and self.values is not None
        assert other.keys is not None and other.values is not None
        count = min(count, self.sliding_window - 1)
        replace_rows(self.keys, rows_B, other.keys, index_B, count)
        replace_rows(self.values, rows_B, other.values, index_B, count)

    def drop(self, count: int) -> None:
        """Drop the first `count` columns of the text, as far as the window still contains them."""
        assert self.keys is not None and self.values is not None
        self.cumulative_length -= count
        excess = max(0, self.keys.shape[-2] - self.cumulative_length)
        self.keys = self._keys.crop(self.keys, excess)
        self.values = self._values.crop(self.values, excess)


def replace_rows(
    target: torch.Tensor,
    rows_B: torch.Tensor,
    source: torch.Tensor,
    index_B: torch.Tensor,
    count: int,
) -> None:
    """Copy the last `count` columns of `source`'s rows `index_B` to `target`'s rows `rows_B`.

    Both tensors have shape [rows, H, T, D].
    """
    columns = source[:, :, source.shape[-2] - count :]
    target[:, :, target.shape[-2] - count :].index_copy_(0, rows_B, columns[index_B])


class GrowingTensor:
    """Tensor [B, H, T, D] that grows along T within a buffer.

    The view that was returned last is extended in place. Any other tensor, such as a view with
    fewer rows, is first copied into a new buffer. On accelerators, a buffer's number of columns is
    a power of two or `most`. There are then only a few sizes, so the allocator can reuse freed
    buffers.
    """

    def __init__(self, most: int = 0) -> None:
        # Number of columns beyond which a buffer is not rounded up; see `growing_cache`.
        self.most = most
        # Tensor returned last; it ends where the used part of the buffer ends.
        self.view: torch.Tensor | None = None
        # Buffer [B, H, T + room, D]; None if the tensors are so short that they are copied.
        self.buffer: torch.Tensor | None = None
        # Number of used columns of the buffer.
        self.length = 0

    def append(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return `old` followed by `new` along T, as a view of the buffer if it has room."""
        count, on_cpu = new.shape[-2], new.device.type == "cpu"
        if not old.numel() or (on_cpu and old[0, 0].nbytes < MIN_IN_PLACE_BYTES):
            self.buffer, self.view = None, torch.cat([old, new], dim=-2) if old.numel() else new
            return self.view
        buffer = self.buffer
        if buffer is None or old is not self.view or buffer.shape[-2] - self.length < count:
            *rows, self.length, width = old.shape
            needed = self.length + count
            columns = needed + SPARE_TOKENS
            if not on_cpu:
                columns = min(1 << (columns - 1).bit_length(), max(self.most, columns))
            buffer = old.new_empty((*rows, columns, width))
            buffer[..., : self.length, :] = old
        start, self.length = self.length - old.shape[-2], self.length + count
        buffer[..., self.length - count : self.length, :] = new
        self.buffer, self.view = buffer, buffer[..., start : self.length, :]
        return self.view

    def crop(self, old: torch.Tensor, start: int) -> torch.Tensor:
        """Return `old` without the columns before `start`.

        The result can be extended in place if `old` was the tensor returned last.
        """
        view = old[..., start:, :]
        if old is self.view:
            self.view = view
        return view
