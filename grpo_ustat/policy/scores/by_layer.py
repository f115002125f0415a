"""Gradient checkpointing (Chen et al. 2016) of each layer.

The forward pass keeps only the inputs of the layers. The backward pass computes each layer again,
with the same dropout masks, so that autograd's graph of only one layer exists at a time.

Gradient checkpointing in transformers cannot be used here: it would call the hooks of
`scores.backward` twice, and it works only in training mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_ustat.policy.dropout import RandomStates, random_states, same_draws
from grpo_ustat.policy.output_layer import body

LayerWeights = Callable[[nn.Module], AbstractContextManager[None]]
"""Function of a layer that returns a context manager, within which the layer has its weights."""


@dataclass
class _Call:
    """Recorded call of a layer, which the backward pass repeats."""

    layer: nn.Module
    # The layer's original forward pass.
    forward: Callable[..., Any]
    # Flattened arguments of the call, and their structure.
    inputs: list[Any]
    structure: Any
    # States of the random generators before the call, for the same dropout masks in the second
    # call; None if the layer is in evaluation mode.
    states: RandomStates | None
    # Gradient accumulated at each floating-point output; None as long as no gradient has arrived.
    grads: list[torch.Tensor | None] = field(default_factory=list)


class _Top(torch.autograd.Function):
    """Output of a layer, at which autograd's graph of the later layers begins.

    The backward pass through this graph stores the gradient at the output in the recorded call.
    """

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, call: _Call, output: list[torch.Tensor]) -> torch.Tensor:
        """Return the output, which comes in a list so that autograd treats it as a new tensor."""
        ctx.call, ctx.place = call, len(call.grads)
        call.grads.append(None)
        return output.pop()

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> tuple[None, None, None]:
        """Store the gradient for `LayerByLayer.backward`."""
        before = ctx.call.grads[ctx.place]
        ctx.call.grads[ctx.place] = grads[0] if before is None else before + grads[0]
        return None, None, None


class LayerByLayer:
    """Forward and backward pass of a model's layers, with the graph of one layer at a time.

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
        self.layers = [m for m in layers if m not in inside]
        # True while a layer is computed for the first time, without a graph.
        self.computes = False
        # True while a layer is computed for the second time.
        self.recomputes = False
        self._calls: list[_Call] = []
        # Input of every `_Top`. It requires a gradient, so that autograd builds the graph.
        self._anchor = torch.zeros((), requires_grad=True)

    @property
    def fits(self) -> bool:
        """True if the model has layers that can be checkpointed and none contains an embedding."""
        embeddings = (isinstance(m, nn.Embedding) for x in self.layers for m in x.modules())
        return bool(self.layers) and not any(embeddings)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Make the layers compute without a graph and keep their inputs, within the block."""
        before = [vars(layer).get("forward") for layer in self.layers]
        try:
            for layer in self.layers:
                layer.forward = self._first(layer, layer.forward)
            yield
        finally:
            for layer, forward in zip(self.layers, before, strict=True):
                del layer.forward
                if forward is not None:
                    layer.forward = forward

    def backward(
        self, hidden: torch.Tensor, grad: torch.Tensor, roots: list[torch.Tensor]
    ) -> Iterator[None]:
        """Run the backward pass from the last hidden states through all layers to the roots.

        The generator yields after each layer.

        Args:
            hidden: last hidden states.
            grad: gradient at the last hidden states.
            roots: leaf tensors below all layers (outputs of embeddings). Their gradients are added
                to their `grad`.
        """
        below = [*roots, self._anchor]
        torch.autograd.backward(hidden, grad, inputs=below)
        at_the_bottom: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        while self._calls:
            call = self._calls.pop()
            reached = [value is not None for value in call.grads]
            if not any(reached):
                continue
            inputs = [x.detach().requires_grad_() if _flows(x) else x for x in call.inputs]
            args, kwargs = tree_unflatten(inputs, call.structure)
            grads = [value for value in call.grads if value is not None]
            states = call.states
            draws = same_draws(grads[0].device, states) if states else nullcontext()
            with self._weights(call.layer), draws:
                self.recomputes = True
                try:
                    outputs = tree_leaves(call.forward(*args, **kwargs))
                finally:
                    self.recomputes = False
                real = filter(_is_real, outputs)
                ends = [x for x, used in zip(real, reached, strict=True) if used]
                torch.autograd.backward(ends, grads, inputs=list(filter(_flows, inputs)))
            for before, value in zip(call.inputs, inputs, strict=True):
                if not _flows(before) or value.grad is None:
                    continue
                if _is_above_a_layer(before):
                    torch.autograd.backward(before, value.grad, inputs=below, retain_graph=True)
                else:
                    # This input was computed from the embeddings only. Several layers can share it,
                    # such as Gemma 3n's per-layer inputs. Its gradients are therefore summed here
                    # and propagated once, at the end.
                    _, total = at_the_bottom.get(id(before), (before, 0.0))
                    at_the_bottom[id(before)] = (before, total + value.grad)
            # The graph of the later layers still references the call. Clearing the lists frees the
            # tensors in spite of this.
            call.inputs, call.grads = [], []
            yield
        if at_the_bottom:
            ends, grads = map(list, zip(*at_the_bottom.values(), strict=True))
            torch.autograd.backward(ends, grads, inputs=below)

    def _first(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward pass without a graph that records each call for the backward pass."""

        def compute(*args: Any, **kwargs: Any) -> Any:
            """Return the layer's output, at which a new graph begins."""
            inputs, structure = tree_flatten((args, kwargs))
            if not any(map(_flows, inputs)):
                with self._weights(layer):
                    return forward(*args, **kwargs)
            device = next(filter(_flows, inputs)).device
            states = random_states(device) if layer.training else None
            self.computes = True
            try:
                with torch.no_grad(), self._weights(layer):
                    outputs, shape = tree_flatten(forward(*args, **kwargs))
            finally:
                self.computes = False
            call = _Call(layer, forward, inputs, structure, states)
            self._calls.append(call)
            for place, output in enumerate(outputs):
                if _is_real(output):
                    outputs[place] = _Top.apply(self._anchor, call, [output])
            return tree_unflatten(outputs, shape)

        return compute


def _flows(value: Any) -> bool:
    """Return True if a value is a tensor that requires a gradient."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_above_a_layer(value: torch.Tensor) -> bool:
    """Return True if a value was computed from the output of a layer."""
    nodes, visited = [value.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        if isinstance(node, _Top._backward_cls):
            return True
        visited.add(node)
        nodes.extend(below for below, _ in node.next_functions)
    return False


def _is_real(value: Any) -> bool:
    """Return True if a value is a floating-point tensor."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()
