"""CUDA graphs on tensors that say they are on a GPU: operations are recorded, and done at replays.

As on CUDA: recording computes nothing, and what it allocates has no content until a replay. A
replay does the recorded operations on the memory that they had, with the numbers of the host that
they had. A recording in which the host waits for the device, or gives it more than numbers, fails.
Memory that a graph did not allocate itself must still be there when it is replayed.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager, nullcontext

import torch
from emulated_device import EmulatedDevice, emulated_device
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten


class EmulatedGraphs(EmulatedDevice):
    """An `EmulatedDevice` that records.

    Attributes:
        recording: the graph that is recorded.
        graphs: those that exist.
    """

    def __init__(self):
        super().__init__()
        self.recording, self.graphs = None, weakref.WeakSet()

    def compute(self, function, args, kwargs, on_device, with_host):
        """Its result, which has no meaning within a recording."""
        if self.recording is None:
            return super().compute(function, args, kwargs, on_device, with_host)
        if with_host:
            raise RuntimeError(f"operation not permitted when stream is capturing: {function}")
        if not on_device:
            return super().compute(function, args, kwargs, on_device, with_host)
        return self.recording.record(function, args, kwargs)

    def graph(self):
        """A `torch.cuda.CUDAGraph`."""
        graph = Graph(self.launches)
        self.graphs.add(graph)
        return graph

    @contextmanager
    def record(self, graph, **options):
        """`torch.cuda.graph`."""
        self.recording = graph
        try:
            yield
        finally:
            self.recording = None
            graph.end()


class Graph:
    """Recorded operations.

    Attributes:
        launches: counts replays.
    """

    def __init__(self, launches):
        self.launches, self._operations, self._own, self._before = launches, [], {}, {}

    def record(self, function, args, kwargs):
        """Compute for the shapes; remember the operation, and what was where it writes."""
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if _is(x)}
        if function._schema.is_mutable:
            for x in filter(_is, tree_leaves((args, kwargs))):
                storage = x.untyped_storage()
                if storage._cdata not in self._own | self._before:
                    self._before[storage._cdata] = storage, storage.clone()
        result = function(*args, **kwargs)
        made = [x for x in tree_leaves(result) if _is(x)]
        fresh = [x for x in made if x.untyped_storage()._cdata not in given]
        self._own.update((x.untyped_storage()._cdata, x.untyped_storage()) for x in fresh)
        if not function.is_view and (fresh or function._schema.is_mutable):
            places = tree_map(
                lambda x: self._place(x) if _is(x) and hasattr(x, "tagged") else x, (args, kwargs)
            )  # a number of the host stays what it is
            self._operations.append((function, places, [self._place(x) for x in fresh]))
        return result

    def end(self):
        """Nothing was computed."""
        for storage, before in self._before.values():
            storage.copy_(before)
        for storage in self._own.values():
            storage.fill_(255)  # NaN, -1
        self._before.clear()

    def replay(self):
        """Do all of it."""
        self.launches["replay"] += 1
        with _disable_current_modes():
            for function, places, fresh in self._operations:
                leaves, tree = tree_flatten(places)
                args, kwargs = tree_unflatten([_at(x) for x in leaves], tree)
                result = function(*args, **kwargs)
                for place, value in zip(fresh, filter(_is, tree_leaves(result)), strict=False):
                    _at(place).copy_(value)

    def _place(self, x):
        storage = x.untyped_storage()
        own = self._own.get(storage._cdata)
        return Place(
            own or StorageWeakRef(storage), x.dtype, x.storage_offset(), x.shape, x.stride()
        )


class Place:
    """Where a tensor is."""

    def __init__(self, storage, dtype, offset, shape, stride):
        self.storage, self.dtype, self.geometry = storage, dtype, (offset, shape, stride)


def _at(place):
    """The tensor at a place; anything else as it is."""
    if not isinstance(place, Place):
        return place
    storage = place.storage
    if isinstance(storage, StorageWeakRef):
        if storage.expired():
            raise RuntimeError("a graph reads or writes memory that was freed")
        storage = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
    return torch.empty(0, dtype=place.dtype).set_(storage, *place.geometry)


class _Stream:
    def __init__(self, device=None):
        self.device = device

    def wait_stream(self, stream):
        pass


@contextmanager
def emulated_graphs():
    """An `EmulatedGraphs` behind `torch.cuda`."""
    with emulated_device(EmulatedGraphs) as device:
        ours = {
            "CUDAGraph": device.graph, "graph": device.record, "Stream": _Stream,
            "stream": lambda stream: nullcontext(), "current_stream": _Stream,
            "graph_pool_handle": lambda: (0, 0),
        }  # fmt: skip
        before = {name: getattr(torch.cuda, name) for name in ours}
        for name, value in ours.items():
            setattr(torch.cuda, name, value)
        try:
            yield device
        finally:
            for name, value in before.items():
                setattr(torch.cuda, name, value)


def _is(value):
    return isinstance(value, torch.Tensor)
