"""What a GPU would launch and wait for, counted on the CPU by watching every operation."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations whose result the host must know before it can go on.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim",
           "_unique2", "unique_consecutive"}  # fmt: skip
# Operations that make no kernel: metadata, and memory without content.
SILENT = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach",
          "_unsafe_view", "lift_fresh", "sym_size", "sym_stride", "sym_numel", "is_same_size",
          "resize_", "set_"}  # fmt: skip
TO_HOST = ("cpu", "tolist")


class Launches(TorchDispatchMode):
    """Within, counts by name the operations that would launch a kernel, and those that would make
    the host wait for the device, backward passes included.

    A wait is an `item`, a `nonzero`, an index by a boolean mask, or a copy to the host (`cpu`,
    `tolist`). A CPU's tensors are all counted, those that would stay on the host beside a GPU too.

    Attributes:
        kernels, waits: how often each name came.
    """

    def __init__(self):
        super().__init__()
        self.kernels, self.waits = Counter(), Counter()

    def __enter__(self):
        self._before = {name: getattr(torch.Tensor, name) for name in TO_HOST}
        for name, method in self._before.items():
            setattr(torch.Tensor, name, self._counting(name, method))
        return super().__enter__()

    def __exit__(self, *error):
        for name, method in self._before.items():
            setattr(torch.Tensor, name, method)
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[-1]
        masks = name in ("index", "index_put", "index_put_") and any(
            isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8)
            for x in tree_leaves(args[1])
        )
        if name in WAITING or masks:
            self.waits[f"{name} by a mask" if masks else name] += 1
        if name not in SILENT and not function.is_view:
            self.kernels[name] += 1
        return function(*args, **(kwargs or {}))

    def _counting(self, name, method):
        def copy(tensor, *rest, **options):
            self.waits[name] += 1
            return method(tensor, *rest, **options)

        return copy
