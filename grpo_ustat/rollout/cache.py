"""A key-value cache that grows in place, and whose rows can be replaced.

`DynamicCache` copies its whole content for every token. Here long keys and values are in buffers
with room for more tokens, so a token costs only its own entry; attention reads the same numbers.
Short ones on CPUs are still copied, because reading them with gaps costs more.

All rows end in the same column, whenever they began, so a finished row can be replaced: the new
prompt's entries overwrite the last columns, and the row's mask begins with them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# Room of a new buffer: copying it costs little beside what attention reads.
SPARE_TOKENS = 64
# Size of a row's head from which a copy costs more than reading with gaps.
MIN_IN_PLACE_BYTES = 12 * 1024


def growing_cache(config: PreTrainedConfig, most: int = 0) -> DynamicCache:
    """Make `DynamicCache(config=config)` with attention layers that grow in place.

    Layers of other kinds (recurrent states, hybrids) stay as transformers made them.

    Args:
        most: columns beyond which buffers of accelerators do not grow to the next power of two.
    """
    cache = DynamicCache(config=config)
    for place, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[place] = GrowingLayer(most)
        elif type(layer) is DynamicSlidingWindowLayer:
            cache.layers[place] = GrowingSlidingWindowLayer(layer.sliding_window, most)
    return cache


def replaceable_rows(cache: DynamicCache, length: int) -> bool:
    """Return True if rows can be replaced: each layer is of a class below, with `length` columns.

    The layers stay empty if the model keeps its state elsewhere.
    """
    return all(
        isinstance(layer, GrowingLayer | GrowingSlidingWindowLayer) and layer.holds(length)
        for layer in cache.layers
    )


class GrowingLayer(DynamicLayer):
    """Keys and values [B, H, T, D] of all tokens so far."""

    def __init__(self, most: int = 0) -> None:
        super().__init__()
        self._keys, self._values = GrowingTensor(most), GrowingTensor(most)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values; return all of them. See `DynamicLayer`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self.keys = self._keys.append(self.keys, key_states)
        self.values = self._values.append(self.values, value_states)
        return self.keys, self.values

    def holds(self, length: int) -> bool:
        """Return True if these are the columns of a text of `length` tokens."""
        return self.get_seq_length() == length

    def replace(
        self, rows_B: torch.Tensor, other: GrowingLayer, index_B: torch.Tensor, count: int
    ) -> None:
        """Write the last `count` columns of `other`'s rows `index_B` over the rows `rows_B`."""
        assert self.keys is not None and self.values is not None
        assert other.keys is not None and other.values is not None
        replace_rows(self.keys, rows_B, other.keys, index_B, count)
        replace_rows(self.values, rows_B, other.values, index_B, count)

    def drop(self, count: int) -> None:
        """Forget the first `count` columns."""
        assert self.keys is not None and self.values is not None
        self.keys = self._keys.crop(self.keys, count)
        self.values = self._values.crop(self.values, count)


class GrowingSlidingWindowLayer(DynamicSlidingWindowLayer):
    """Keys and values [B, H, min(T, window - 1), D] of the last tokens."""

    def __init__(self, sliding_window: int, most: int = 0):
        super().__init__(sliding_window)
        self._keys, self._values = GrowingTensor(most), GrowingTensor(most)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values; return those that the new tokens read."""
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
        """Return True if these are the columns of a text of `length` tokens, within the window."""
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
        """Write the last columns of `other`'s rows over rows, within the window."""
        assert self.keys is not None and self.values is not None
        assert other.keys is not None and other.values is not None
        count = min(count, self.sliding_window - 1)
        replace_rows(self.keys, rows_B, other.keys, index_B, count)
        replace_rows(self.values, rows_B, other.values, index_B, count)

    def drop(self, count: int) -> None:
        """Forget the first `count` columns that are still kept."""
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
    """Copy `source`'s rows `index_B` over `target`'s `rows_B`, only the last `count` columns.

    Both tensors are [rows, H, T, D].
    """
    columns = source[:, :, source.shape[-2] - count :]
    target[:, :, target.shape[-2] - count :].index_copy_(0, rows_B, columns[index_B])


class GrowingTensor:
    """A tensor [B, H, T, D] that grows along T within a buffer.

    The last returned view is extended in place. Any other tensor, such as that view with fewer
    rows, moves into a new buffer first. On accelerators a buffer's columns are a power of two, or
    `most`: with few sizes the allocator can reuse a freed buffer.
    """

    def __init__(self, most: int = 0) -> None:
        # See `growing_cache`.
        self.most = most
        # The tensor returned last, at the end of the used part of the buffer.
        self.view: torch.Tensor | None = None
        # [B, H, T + room, D]; None if tensors are short and copied instead.
        self.buffer: torch.Tensor | None = None
        # Columns of the buffer in use.
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
        """Return `old` without the tokens before `start`, to be extended in place if `old` was."""
        view = old[..., start:, :]
        if old is self.view:
            self.view = view
        return view
