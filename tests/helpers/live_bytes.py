"""The largest number of bytes that tensors held at once, by watching every operation."""

from __future__ import annotations

import functools
import weakref

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves


def uncounted(function):
    """The function, of whose operations only what it returns is counted."""

    @functools.wraps(function)
    def call(*args, **options):
        modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, LiveBytes)]
        with _disable_current_modes():
            result = function(*args, **options)
        for mode in modes:
            mode.add(result.untyped_storage())
        return result

    return call


class LiveBytes(TorchDispatchMode):
    """Within, counts the storages that operations made and that are not freed yet.

    Attributes:
        now, peak: bytes.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if _is(x)}
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if _is(value) and value.untyped_storage()._cdata not in inputs | self._known:
                self.add(value.untyped_storage())
        return result

    def add(self, storage):
        """Count a storage until it is freed, once."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key, size):
        self._known.discard(key)
        self.now -= size


def _is(value):
    return isinstance(value, torch.Tensor)
