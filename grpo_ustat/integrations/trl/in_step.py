"""Layer-by-layer gathering of a sharded model's weights, with all ranks in step.

Gathering is collective: a layer's weights arrive only if all ranks ask for the same layer. But each
rank scores different groups, and may finish early, have no group, or fail. Scoring is therefore
divided into rounds. A round is a fixed sequence of gatherings, from the first layer to the last and
back. A rank that does not need a gathering of the sequence still takes part in it and releases the
weights immediately.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.memory import out_of_memory
from grpo_ustat.policy.output_layer import causal
from grpo_ustat.policy.scores.by_layer import LayerByLayer

Gathered = tuple[list[int], AbstractContextManager[object]]
"""Size in bytes of each memory allocation that a gathering makes, and its context manager.

The full weights are available within the context."""

Gather = Callable[[nn.Module, Sequence[nn.Module]], Gathered]
"""Function that gathers the weights of a module (first argument).

It leaves out the weights of some inner modules (second argument)."""


class LayersInStep:
    """Layers of a model whose full weights are available only within a `weights` block.

    Args:
        layers: layers in the order in which the model calls them.
        gather: function that gathers the weights of a layer.
    """

    def __init__(self, layers: Sequence[nn.Module], gather: Gather):
        self.layers, self._gather = layers, gather
        self._places: dict[nn.Module, list[_Place]] = {}
        # Layers that are still to be gathered in this round, in order.
        self._ahead: deque[nn.Module] = deque()
        self._largest: list[int] = []
        self._reserve: list[torch.Tensor] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Remove the weights from all layers within the block, so that they are not held in memory.

        All ranks must enter together.
        """
        try:
            for layer in self.layers:
                sizes, gathered = self._gather(layer, ())
                self._largest = max(self._largest, sizes, key=sum)
                with gathered:
                    places = _places(layer)
                self._places[layer] = places
                for place in places:
                    place.leave()
            yield
        finally:
            for place in sum(self._places.values(), []):
                place.put(place.sharded)

    @contextmanager
    def round(self, sweeps: int) -> Iterator[None]:
        """Allow a fixed number of forward and backward passes through the layers within the block.

        All ranks enter and leave together. If a rank makes fewer passes, it takes part in the
        remaining gatherings when it leaves the block.

        Args:
            sweeps: number of passes.
        """
        self._ahead.extend([*self.layers, *reversed(self.layers)] * sweeps)
        self._reserve = self._reserved()
        try:
            yield
        finally:
            while self._ahead:
                self._skip()
            self._reserve = []

    @contextmanager
    def weights(self, layer: nn.Module) -> Iterator[None]:
        """Make a layer's full weights available within the block."""
        while self._ahead and self._ahead[0] is not layer:
            self._skip()
        if not self._ahead:
            raise ConfigError(f"layer {type(layer).__name__} is computed out of order")
        with self._gathered(self._ahead.popleft()):
            yield

    def _skip(self) -> None:
        with self._gathered(self._ahead.popleft()):
            pass

    @contextmanager
    def _gathered(self, layer: nn.Module) -> Iterator[None]:
        """Gather a layer's full weights for the block."""
        places, self._reserve = self._places[layer], []
        for place in places:
            place.put(place.sharded)
        try:
            with self._gather(layer, ())[1]:
                parameters = [place.fill() for place in places]
                try:
                    yield
                finally:
                    for place, parameter in zip(places, parameters, strict=True):
                        place.put(parameter)
        finally:
            for place in places:
                place.leave()
            self._reserve = self._reserved()

    def _reserved(self) -> list[torch.Tensor]:
        """Reserve memory for the weights of the next layer, if there is enough.

        Without the reserve, scoring could use this memory, and the next gathering would fail on
        this rank. The other ranks would then wait forever.
        """
        try:
            device = next(iter(self.layers[0].parameters())).device
            return [torch.empty(size, dtype=torch.uint8, device=device) for size in self._largest]
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            return []


class _Place:
    """Place of a trainable parameter in a module, which a stand-in for the parameter can take.

    The stand-in has the shape of the parameter and takes no memory. Its values are NaN while the
    layer has no weights, so any computation with missing weights gives NaN.
    """

    def __init__(self, module: nn.Module, name: str, stand_in: nn.Parameter):
        self.module, self.name, self.stand_in = module, name, stand_in
        self.sharded: nn.Parameter | None = None

    def put(self, parameter: nn.Parameter | None) -> None:
        """Set the module's attribute to a parameter."""
        self.module._parameters[self.name] = parameter

    def fill(self) -> nn.Parameter:
        """Install the stand-in with the current parameter's weights; return that parameter."""
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        self.stand_in.data = parameter.data
        self.put(self.stand_in)
        return parameter

    def leave(self) -> None:
        """Install the stand-in without weights; keep the sharded parameter in `sharded`."""
        self.sharded = self.module._parameters[self.name]
        self.stand_in.data = _nothing(self.stand_in)
        self.put(self.stand_in)


def _places(layer: nn.Module) -> list[_Place]:
    """Return the places of a layer's trainable parameters; a shared parameter has one stand-in."""
    stand_ins: dict[int, nn.Parameter] = {}
    places: list[_Place] = []
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                stand_in = stand_ins.setdefault(id(parameter), nn.Parameter(_nothing(parameter)))
                places.append(_Place(module, name, stand_in))
    return places


def _nothing(like: torch.Tensor) -> torch.Tensor:
    return torch.full((), float("nan"), dtype=like.dtype, device=like.device).expand(like.shape)


def separate_layers(model: nn.Module) -> list[nn.Module]:
    """Return a model's layers, or an empty list if weights cannot be gathered layer by layer.

    The list is empty if the model does not consist of supported layers, or if a layer shares a
    weight with a module outside the layer.
    """
    layers = LayerByLayer(causal(model)).layers
    layer_of = {module: layer for layer in layers for module in layer.modules()}
    homes: dict[int, nn.Module | None] = {}
    for module in model.modules():
        home = layer_of.get(module)
        for parameter in module.parameters(recurse=False):
            if homes.setdefault(id(parameter), home) is not home:
                return []
    return layers
