"""Gradient checkpointing (Chen et al. 2016) of each layer.

The forward pass keeps only the inputs of the layers. The backward pass computes each layer again,
with the same dropout masks, so that autograd's graph of only one layer exists at a time.

Gradient checkpointing in transformers cannot be used here: it would call the hooks of
`scores.backward` twice, and it works only in training mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_ustat.policy.dropout import random_states, same_draws
from grpo_ustat.policy.output_layer import body, replaced_forward

LayerWeights = Callable[[nn.Module], AbstractContextManager[None]]
"""Function of a layer that returns a context manager, within which the layer has its weights."""


class LayerByLayer:
    """Layers of a model, each computed again when its gradients are needed.

    `layers` is empty if the model has no layers that can be checkpointed, or if a layer contains an
    embedding.

    Args:
        model: causal language model.
        weights: function that takes a layer and returns a context manager. Inside this context, the
            layer has its full weights, for example gathered from the shards of all ranks. None if
            every layer has them at all times.
    """

    def __init__(self, model: PreTrainedModel, weights: LayerWeights | None = None):
        self._weights = weights or (lambda _: nullcontext())
        layers = [m for m in body(model).modules() if isinstance(m, GradientCheckpointingLayer)]
        inside = {m for layer in layers for m in layer.modules() if m is not layer}
        embeds = any(isinstance(m, nn.Embedding) for m in inside)
        self.layers: list[nn.Module] = [] if embeds else [m for m in layers if m not in inside]
        # True while a layer is computed for the first time, without a graph.
        self.computes = False
        # True while a layer is computed for the second time.
        self.recomputes = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Make the layers compute without a graph and keep their inputs, within the block."""
        with ExitStack() as patched:
            for layer in self.layers:
                patched.enter_context(replaced_forward(layer, self._forward(layer, layer.forward)))
            yield

    def first(self, call: _Call, inputs: tuple) -> tuple:
        """Compute a layer without a graph."""
        self.computes = True
        try:
            with self._weights(call.layer):
                return call.outputs(inputs)
        finally:
            self.computes = False

    def again(self, call: _Call, inputs: list, grads: tuple[torch.Tensor | None, ...]) -> None:
        """Compute a layer with its graph, and run the backward pass to its inputs."""
        device = next(filter(_flows, inputs)).device
        draws = same_draws(device, call.states) if call.states else nullcontext()
        with torch.enable_grad(), self._weights(call.layer), draws:
            self.recomputes = True
            try:
                outputs = call.outputs(inputs)
            finally:
                self.recomputes = False
            ends = [
                (output, grad) for output, grad in zip(outputs, grads, strict=True)
                if grad is not None and _flows(output)
            ]  # fmt: skip
            if ends:
                tensors, at_tensors = map(list, zip(*ends, strict=True))
                torch.autograd.backward(tensors, at_tensors, inputs=list(filter(_flows, inputs)))

    def _forward(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward pass that keeps only the layer's inputs for the backward pass."""

        def compute(*args: Any, **kwargs: Any) -> Any:
            """Return the layer's output, at which a new graph begins."""
            inputs, structure = tree_flatten((args, kwargs))
            if not any(map(_flows, inputs)):
                with self._weights(layer):
                    return forward(*args, **kwargs)
            call = _Call(layer, forward, structure, inputs)
            outputs = _Recomputed.apply(self, call, *inputs)
            return tree_unflatten(list(outputs), call.structure_of_outputs)

        return compute


class _Call:
    """Call of a layer, which the backward pass repeats.

    Args:
        layer: the layer.
        forward: the layer's original forward pass.
        structure: structure of the call's flattened arguments.
        inputs: flattened arguments.
    """

    def __init__(self, layer: nn.Module, forward: Callable[..., Any], structure, inputs: list):
        self.layer, self._forward, self._structure = layer, forward, structure
        # States of the random generators before the call, for the same dropout masks in the second
        # call; None if the layer is in evaluation mode.
        device = next(filter(_flows, inputs)).device
        self.states = random_states(device) if layer.training else None
        self.structure_of_outputs: Any = None

    def outputs(self, inputs: Any) -> tuple:
        """Return the layer's flattened outputs."""
        args, kwargs = tree_unflatten(list(inputs), self._structure)
        outputs, self.structure_of_outputs = tree_flatten(self._forward(*args, **kwargs))
        return tuple(outputs)


class _Recomputed(torch.autograd.Function):
    """Call of a layer that keeps the layer's inputs, and repeats the call in the backward pass."""

    @staticmethod
    def forward(ctx, layers: LayerByLayer, call: _Call, *inputs: Any) -> tuple:
        """Return the layer's flattened outputs."""
        ctx.set_materialize_grads(False)
        ctx.layers, ctx.call, ctx.inputs = layers, call, inputs
        return layers.first(call, inputs)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor | None) -> tuple:
        """Return the gradients at the layer's inputs."""
        inputs = [x.detach().requires_grad_() if _flows(x) else x for x in ctx.inputs]
        # The graph of the later layers still references this call. Without its inputs, their memory
        # is free.
        ctx.inputs = ()
        ctx.layers.again(ctx.call, inputs, grads)
        return (None, None, *(x.grad if _flows(x) else None for x in inputs))


def _flows(value: Any) -> bool:
    """Return True if a value is a tensor that requires a gradient."""
    return isinstance(value, torch.Tensor) and value.requires_grad
