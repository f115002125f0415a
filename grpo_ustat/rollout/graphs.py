"""CUDA graphs of tokens: the work of a GPU for a token is recorded once and launched as a whole.

A token of all rows takes about a thousand kernels, and the host needs longer to launch them than a
GPU to run them. A graph launches them all, on the memory that they had when they were recorded. So
the state of a batch is in tensors that stay in place: keys and values in buffers as long as the
longest text, read up to a power of two of columns and written at a column that is a number on the
device, and a mask that hides what is not written. There is a graph for each number of rows, that of
the first batch, half as many, a quarter, ..., and of columns.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from grpo_ustat.policy.loading import out_of_memory
from grpo_ustat.rollout.batch import DecodingBatch
from grpo_ustat.rollout.cache import GrowingLayer
from grpo_ustat.terminal.streams import single_line

LEAST_COLUMNS = 128  # that a graph reads
SPARE_COLUMNS = 64  # beyond the longest text: tokens until the next look, and alignment
ATTENTION = ("sdpa", "eager")  # implementations that add a mask of four axes
# difference of logits with and without graphs, over the largest of them; other types 0.1
LOGIT_TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3}
STATE_TENSORS = (
    *("prompt_lengths_R", "lengths_R", "unfinished_R", "token_R"),
    *("uniforms_RT", "tokens_RT", "logprobs_RT", "entropy_RT"),
)
_one_by_one: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose tokens are no graphs


def token_graphs(batch: DecodingBatch) -> TokenGraphs | None:
    """Return the object that writes a batch's tokens as graphs; None if unwanted or impossible.

    It is possible on CUDA if the model is whole on one device, is called without hooks, takes a
    mask of numbers that are added, and keeps all keys and values: no sliding windows, no states.
    """
    model = batch.model
    if (
        batch.sampling.cuda_graphs
        and batch.device.type == "cuda"
        and batch.replaceable
        and all(type(layer) is GrowingLayer for layer in batch.cache.layers)
        and model.config._attn_implementation in ATTENTION
        and model not in _one_by_one
        and all(p.device == batch.device for p in model.parameters())
        and not any(hasattr(p, "device_mesh") for p in model.parameters())  # FSDP2's shards
        and not any(
            hasattr(m, "_hf_hook") or m._forward_hooks or m._forward_pre_hooks
            for m in model.modules()
        )
    ):
        return TokenGraphs(batch)
    return None


class StaticLayer(DynamicLayer):
    """Keys and values [B, H, C, D] that stay in place.

    Args:
        column_1: column into which the keys and values of the next token are written.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, column_1: torch.Tensor):
        super().__init__()
        self.keys, self.values, self.column_1 = keys, values, column_1
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of one token; return all columns, unwritten ones too."""
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self.column_1, key_states)
        self.values.index_copy_(2, self.column_1, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of all columns, and an offset of 0."""
        assert self.keys is not None
        return self.keys.shape[-2], 0


class TokenGraphs:
    """Graphs of the batches that `local.decode` writes after each other, and their memory."""

    def __init__(self, batch: DecodingBatch):
        # `rows`: of the largest batch, the first. `columns`: columns read at present.
        self.rows, self.columns = len(batch.rows), 0
        # Columns of the buffers.
        self.most = (
            -(-(batch.length + batch.width) // SPARE_COLUMNS) * SPARE_COLUMNS + SPARE_COLUMNS
        )
        # Tensors of `STATE_TENSORS`.
        self.state = {name: torch.empty_like(getattr(batch, name)) for name in STATE_TENSORS}
        self.goes_on_V = batch.goes_on_V
        # Keys and values of each layer.
        self.buffers = [
            [x.new_zeros((*x.shape[:2], self.most, x.shape[3])) for x in _tensors(layer)]
            for layer in batch.cache.layers
        ]
        # Added to the attention scores of a column: 0, or -inf if a row must not attend to it.
        self.bias_RC = self.buffers[0][1].new_zeros((self.rows, self.most))
        # Column of the next token.
        self.column_1 = torch.zeros(1, dtype=torch.int64, device=batch.device)
        # By rows and columns.
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.stream = torch.cuda.Stream(batch.device)
        self.pool = torch.cuda.graph_pool_handle()

    def fewer_rows(self, rows: int, count: int) -> int:
        """Return the smallest of all rows, half, a quarter, ..., none that is at least `count`.

        It is at most `rows`.
        """
        size = self.rows if count else 0
        while size > 1 and -(-size // 2) >= count:
            size = -(-size // 2)
        return min(size, rows)

    def write(self, batch: DecodingBatch, count: int) -> int:
        """Read the tokens drawn last and draw the next ones, `count` times.

        Returns:
            How many times it was done: fewer if the model's tokens cannot be a graph, which a
                warning
            reports; the batch then goes on without graphs, and so does the model.
        """
        if batch.length + count > self.columns:
            batch.drop_columns()
            needed = batch.length + count
            self.columns = min(max(LEAST_COLUMNS, 1 << (needed - 1).bit_length()), self.most)
        self._take_in(batch)
        key, written = (len(batch.rows), self.columns), 0
        if key not in self.graphs:
            try:
                if not self.graphs:
                    self._compare(batch)
                self._aside(partial(self._token, batch))
                written = 1
                self.graphs[key] = self._recorded(partial(self._token, batch))
            except Exception as error:
                if any(out_of_memory(cast(Any, e)) for e in (error, error.__context__)):
                    raise
                batch.count(written)
                self._hand_back(batch)
                leave(batch, error)
                return written
        for _ in range(count - written):
            self.graphs[key].replay()
        batch.count(count)
        self._hand_back(batch)
        return count

    def _take_in(self, batch: DecodingBatch) -> None:
        """Move a batch's tensors here unless they are here already; set the mask of its columns."""
        rows, length = len(batch.rows), batch.length
        if batch.moved:
            for name, whole in self.state.items():
                whole[:rows].copy_(getattr(batch, name).clone())
            for layer, buffers in zip(batch.cache.layers, self.buffers, strict=True):
                for value, buffer in zip(_tensors(layer), buffers, strict=True):
                    buffer[:rows, :, :length].copy_(value.clone())
            self._hand_back(batch)
            batch.goes_on_V, batch.moved = self.goes_on_V, False
        column_C = torch.arange(self.columns, device=batch.device)
        start_R1 = torch.from_numpy(batch.starts).to(batch.device)[:, None]
        hidden_RC = (column_C < start_R1) | (column_C >= length)
        self.bias_RC[:rows, : self.columns].zero_().masked_fill_(hidden_RC, -torch.inf)
        self.column_1.fill_(length)

    def _hand_back(self, batch: DecodingBatch) -> None:
        """Make the batch's tensors views of the written part of the buffers."""
        rows, length = len(batch.rows), batch.length
        for name, whole in self.state.items():
            setattr(batch, name, whole[:rows])
        for layer, buffers in zip(batch.cache.layers, self.buffers, strict=True):
            cast(Any, layer).stand_in(*(buffer[:rows, :, :length] for buffer in buffers))

    def _read(self, batch: DecodingBatch) -> torch.Tensor:
        """Do the work of `DecodingBatch.read` with tensors that stay in place."""
        rows, columns = len(batch.rows), self.columns
        cache: Any = DynamicCache()
        for keys, values in self.buffers:
            layer = StaticLayer(keys[:rows, :, :columns], values[:rows, :, :columns], self.column_1)
            cache.layers.append(layer)
        bias_RC = self.bias_RC[:rows, :columns].index_fill_(1, self.column_1, 0)
        return batch.next_logits(cache, bias_RC[:, None, None])

    def _token(self, batch: DecodingBatch) -> None:
        """Read a token of all rows and draw the next one; this becomes a graph."""
        token_R = batch.token_R
        batch.draw(self._read(batch))
        batch.token_R = token_R.copy_(batch.token_R)
        self.column_1 += 1

    def _compare(self, batch: DecodingBatch) -> None:
        """Read once without graphs and once in their way: both write the same column.

        Raises:
            ValueError: the logits are not the same.
        """
        expected_RV = batch.read()
        self._hand_back(batch)
        found_RV = self._read(batch)
        scale = expected_RV.nan_to_num(posinf=0, neginf=0).abs().max()
        room = LOGIT_TOLERANCE.get(expected_RV.dtype, 0.1) * float(scale)
        if not torch.allclose(found_RV, expected_RV, rtol=0, atol=room, equal_nan=True):
            raise ValueError("its logits are others than one operation after the other")

    def _aside(self, work: Callable[[], None]) -> None:
        """Do the work on the stream of recordings before they begin, which allow no set-up."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            work()
        current.wait_stream(self.stream)

    def _recorded(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record a graph of the work; nothing is computed.

        A failed recording leaves its stream current, and other threads may go on using the device.
        """
        graph, options = torch.cuda.CUDAGraph(), {"pool": self.pool, "stream": self.stream}
        recording: Any = partial(torch.cuda.graph, capture_error_mode="thread_local", **options)
        with torch.cuda.stream(self.stream), recording(graph):
            work()
        return graph


def leave(batch: DecodingBatch, error: Exception) -> None:
    """Let a batch and its model continue without graphs; a warning gives the reason."""
    batch.shortcut = None
    _one_by_one.add(batch.model)
    name = batch.model.config.name_or_path or batch.model.config.model_type
    reason = single_line(error, 200)
    warnings.warn(
        f"tokens of {name} are written without CUDA graphs ({reason}): "
        "rollout.cuda_graphs=false spares the attempt",
        stacklevel=2,
    )


def _tensors(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values."""
    return layer.keys, layer.values
