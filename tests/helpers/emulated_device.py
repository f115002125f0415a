"""CPU tensors that say they are on another device: what waits for it, and what it is told to do.

Operations on a mix of devices fail as they do on a GPU; scalars may be mixed with anything, and the
host's integers may be an index.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)  # needs no CUDA: nothing is ever stored there
aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.repeat_interleave.Tensor,
    aten.is_nonzero.default,
}


class Tagged(torch.Tensor):
    """A CPU tensor that says it is on the other device."""

    @staticmethod
    def __new__(cls, value):
        return torch.Tensor._make_wrapper_subclass(
            cls, value.shape, value.stride(), value.storage_offset(),
            dtype=value.dtype, device="meta", requires_grad=value.requires_grad,
        )  # fmt: skip

    def __init__(self, value):
        self.value = value
        value.tagged = True

    @property
    def device(self):
        return DEVICE

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError(f"{function} outside of EmulatedDevice")


class EmulatedDevice(TorchDispatchMode):
    """Within, tensors made on or moved to `DEVICE` are tagged.

    `compute` gets the CPU tensors, whether they are on the device, and whether the host takes part.

    Attributes:
        waits: reads of a value by the host, by operation.
        launches: operations on the device that are not views, by name.
    """

    def __init__(self):
        super().__init__()
        self.waits, self.launches = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is not aten.scaled_dot_product_attention.default:
            with self:  # in inference mode composite operations come whole
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        tagged = [x for x in leaves if isinstance(x, Tagged)]
        target = kwargs.get("device")
        target = None if target is None else torch.device(target)
        copies = function in (aten._to_copy.default, aten.copy_.default)
        moved = function is aten._to_copy.default and target == DEVICE and tagged
        if moved and kwargs.get("dtype", args[0].dtype) == args[0].dtype:
            return args[0]  # is there already
        plain = [x for x in leaves if not isinstance(x, Tagged) and x.ndim]
        host_index = function is aten.index.Tensor and isinstance(args[0], Tagged) and bool(plain)
        if tagged and plain and not copies and not host_index:
            raise RuntimeError(f"{function} on two devices: {[x.shape for x in leaves]}")
        to_host = copies and (
            (target is not None and target.type == "cpu" and bool(tagged))
            or (function is aten.copy_.default and not isinstance(args[0], Tagged) and bool(tagged))
        )
        boolean_index = function in (aten.index.Tensor, aten.index_put_.default) and any(
            x.dtype == torch.bool for x in tree_leaves(args[1]) if isinstance(x, torch.Tensor)
        )
        waits = bool(tagged) and (function in WAITS or to_host or boolean_index or host_index)
        self.waits.update([str(function)] * waits)
        on_device = (bool(tagged) or (target is not None and target.type == DEVICE.type)) and (
            not to_host
        )
        from_host = copies and on_device and len(tagged) < len(leaves)
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        unwrap = {id(x): x.value for x in tagged}
        inner = tree_map(
            lambda x: unwrap.get(id(x), x) if isinstance(x, torch.Tensor) else x, (args, kwargs)
        )
        result = self.compute(function, *inner, on_device, waits or from_host)
        if on_device and not function.is_view:
            self.launches[str(function)] += 1
        if function._schema.is_mutable:
            return args[0]
        return tree_map(
            lambda x: Tagged(x) if on_device and isinstance(x, torch.Tensor) else x, result
        )

    def compute(self, function, args, kwargs, on_device, with_host):
        """The operation's result."""
        return function(*args, **kwargs)


@contextmanager
def emulated_device(mode=EmulatedDevice):
    """An `EmulatedDevice`, where PyTorch does not look for a GPU."""
    lazy_init, tensor = torch.cuda._lazy_init, torch.tensor
    torch.cuda._lazy_init, torch.tensor = lambda: None, _tensor(tensor)
    try:
        with mode() as device:
            yield device
    finally:
        torch.cuda._lazy_init, torch.tensor = lazy_init, tensor


def on_device(model):
    """The model with tagged parameters and buffers."""
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, value in store.items():
                if value is not None:
                    tagged = Tagged(value.detach())
                    store[name] = (
                        torch.nn.Parameter(tagged, requires_grad=False)
                        if store is module._parameters
                        else tagged
                    )
    return model


def _tensor(make):
    """`torch.tensor`, which asks no dispatcher where to make its value."""

    def tensor(data, *, device=None, **options):
        value = make(data, **options)
        return value if device is None else value.to(device)

    return tensor
