"""Key-value cache that grows in place and whose rows can be replaced.

`DynamicCache` copies its whole content for every token. This cache stores long keys and values in
buffers with room for more tokens, so only the entries of a new token are written. Attention still
reads the same numbers. Short keys and values on CPUs are still copied, because non-contiguous reads
would cost more.

All rows end in the same column, no matter when they started, so a finished row can be replaced. The
new prompt's entries overwrite the last columns, and the row's mask starts at these columns.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# Number of spare tokens in a new buffer. Copying a buffer once per 64 tokens costs little compared
# with the reads of attention.
SPARE_TOKENS = 64
# Size in bytes of one head of one row, from which a copy costs more than non-contiguous reads.
MIN_IN_PLACE_BYTES = 12 * 1024


def growing_cache(config: PreTrainedConfig, most: int = 0) -> DynamicCache:
    """Create a `DynamicCache(config=config)` whose attention layers grow in place.

    Layers of other kinds (recurrent states, hybrids) stay as transformers created them.

    Args:
        most: maximum number of columns to which buffers on accelerators are rounded up.
    """
    cache = DynamicCache(config=config)
    for place, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[place] = GrowingLayer(most)
        elif type(layer) is DynamicSlidingWindowLayer:
            cache.layers[place] = GrowingSlidingWindowLayer(layer.sliding_window, most)
    return cache


def replaceable_rows(cache: DynamicCache, length: int) -> bool:
    """Return True if the rows of all layers can be replaced.

    Every layer must be a `GrowingLayer` or a `GrowingSlidingWindowLayer` and contain `length`
    columns. If the model keeps its state elsewhere, the layers stay empty.
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
        """Append keys and values, and return all keys and values; see `DynamicLayer`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self.keys = self._keys.append(self.keys, key_states)
        self.values = self._values.append(self.values, value_states)
        return self.keys, self.values

    def holds(self, length: int) -> bool:
        """Return True if the layer holds the columns of a text of `length` tokens."""
        return self.get_seq_length() == length

    def replace(
        self, rows_B: torch.Tensor, other: GrowingLayer, index_B: torch.Tensor, count: int
    ) -> None:
        """Copy the last `count` columns of `other`'s rows `index_B` to this layer's `rows_B`."""
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
    """Keys and values of the last tokens, [B, H, min(T, window - 1), D]."""

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
        """Return True if the layer holds the columns in the window of a text of `length` tokens."""
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
        """Overwrite rows as `GrowingLayer.replace` does, within the window."""
        assert self.keys is not None and self.values is not None
        assert other.keys is not None and other.values is not None
        count = min(count, self.sliding_window - 1)
        replace_rows(self.keys, rows_B, other.keys, index_B, count)
        replace_rows(self.values, rows_B, other.values, index_B, count)

    def drop(self, count: int) -> None:
        """Drop those of the first `count` columns of the text that are still in the window."""
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

    The last returned view is extended in place. Any other tensor, such as a view with fewer rows,
    is first copied into a new buffer. On accelerators, the number of columns of a buffer is a power
    of two or `most`, because with only a few sizes the allocator can reuse freed buffers.
    """

    def __init__(self, most: int = 0) -> None:
        # See `growing_cache`.
        self.most = most
        # Tensor returned last, at the end of the used part of the buffer.
        self.view: torch.Tensor | None = None
        # Buffer [B, H, T + room, D]; None if tensors are short and therefore copied.
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
        """Return `old` without the tokens before `start`.

        The result can be extended in place if `old` could be.
        """
        view = old[..., start:, :]
        if old is self.view:
            self.view = view
        return view
