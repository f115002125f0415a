r"""Scores of completions: norms, inner products and weighted sums from one backward pass.

The score of completion i is the gradient of its log-probability, `s_i = grad_theta log pi(y_i|x)`.
For most modules, a rule in `layers` computes the module's part of every s_i from the module's input
and the gradient at its output. One forward and one backward pass over the batch are therefore
enough. In this backward pass, autograd computes only gradients of activations. The batch can also
be divided into several passes, each over some of its rows. The steps, in the order of the methods
of `_Backward`, are:

1. `_hooks` registers a forward hook on each module with a rule in `layers`, and on each embedding.
2. The forward pass calls the hook, `_called`. For an embedding, the hook replaces the output with a
   new leaf tensor, at which autograd's graph begins (`_root`). For any other module, the hook keeps
   the arguments of the call and registers a gradient hook on the output. It also notes that one
   more part of the gradient of the module's parameters is to come (`_expect`). In some modules
   (fused experts), the arguments mix the tokens of different completions. They get no gradient
   hook, and their parameters are added to `left_out`.
3. If scores are computed layer by layer (`LayerByLayer`), each module is called twice. The first
   call, without a graph, only notes that a part is to come. The second call, during the backward
   pass, registers the gradient hook.
4. The output layer has no hook. `_output_layer` computes the logits in chunks, adds the gradients
   of the layer's parameters to the totals, and computes the gradients at the last hidden states, at
   which the backward pass begins.
5. The backward pass calls each gradient hook once, and the hook calls `_arrive`. The module's rule
   computes a part of each parameter's gradient from the arguments and the gradient at the output.
   Both are then freed.
6. A parameter has several parts if there are several passes or if several modules share it. When
   all parts have arrived, `_reduce` joins them, adds the result to the totals and frees the parts.
7. After the backward pass, `_add_embeddings` computes the embeddings' parts from the gradients at
   the leaf tensors. If the loss does not depend on a module's output, the module's part is 0 and
   never arrives. `_reduce` is then called with the parts that have arrived.
8. Trainable parameters whose modules have no rule (fused experts, routers, attention sinks) are
   missing from the totals. `one_by_one` differentiates them for one completion after another, which
   is exact and costs one more pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.policy.logprobs import positions, widen
from grpo_ustat.policy.output_layer import OutputLayer, Window, body, causal
from grpo_ustat.policy.quantized import unpacked
from grpo_ustat.policy.scores import layers
from grpo_ustat.policy.scores.accumulate import Accumulator
from grpo_ustat.policy.scores.by_layer import LayerByLayer, LayerWeights
from grpo_ustat.policy.scores.images import (
    outside_language,
    row_inputs,
    same_positions,
    without_graph,
)
from grpo_ustat.policy.scores.one_by_one import one_by_one
from grpo_ustat.policy.scores.output_layer import add_output_layer
from grpo_ustat.policy.scores.sketch import Sketch


@dataclass(frozen=True)
class CompletionScores:
    """Norms, inner products and weighted sums of the scores s_i of B completions.

    A sketch is a random projection of a gradient to a short vector of R entries; see `sketch`.
    """

    # Squared norms ||s_i||^2, float64.
    sq_norm_B: torch.Tensor
    # For each weight vector w_k, the weighted sum `sum_i w_ki s_i`, by parameter name, float32 or
    # wider. The dictionaries are empty if only sketches of these sums were requested.
    gradients_K: list[dict[str, torch.Tensor]]
    # Inner products <s_i, s_j>, float64; None if they were not requested.
    gram_BB: torch.Tensor | None
    # Sketches of the scores s_i, float64; None if they were not requested.
    features_BR: torch.Tensor | None = None
    # Sketches of the weighted sums, float64; None if they were not requested.
    pooled_KR: torch.Tensor | None = None


def completion_scores(
    model: PreTrainedModel,
    input_ids_BT: torch.Tensor,
    attention_mask_BT: torch.Tensor,
    completion_mask_BT: torch.Tensor,
    weights_KB: torch.Tensor | None = None,
    gram: bool = False,
    temperature: float = 1.0,
    *,
    features: Sketch | None = None,
    pooled: Sketch | None = None,
    by_layer: bool = False,
    layer_weights: LayerWeights | None = None,
    passes: Sequence[int] | None = None,
    contiguous: bool = False,
    images: Mapping[str, torch.Tensor] | None = None,
    drops: bool = False,
    all_columns: bool = False,
) -> CompletionScores:
    """Compute norms, weighted sums and inner products of scores over all trainable parameters.

    Args:
        model: loaded causal language model, with or without PEFT adapters. Scores cover the
            parameters with requires_grad. The model must be in evaluation mode if `drops` is False.
        input_ids_BT: token ids of prompts and completions.
        attention_mask_BT: 1 on real tokens, 0 on padding.
        completion_mask_BT: weights of the tokens' log-probabilities in the score: usually 1 on
            completion tokens and 0 elsewhere, but any number is allowed. The first column must be
            0, because the first token is not predicted.
        weights_KB: K weight vectors over the B completions, for weighted sums of scores; None for
            no sums.
        gram: True to compute the inner products of all pairs of scores.
        temperature: temperature that divides the logits, as in sampling.
        features: map that sketches each score; None for no sketches.
        pooled: map that sketches the weighted sums; the sketches then replace the sums.
        by_layer: True to keep only the layers' inputs and compute each layer twice, which saves
            memory. It has no effect if the model has no layers that can be checkpointed.
        layer_weights: for models whose layers have their weights only at times: function that
            returns a context manager, within which a layer has its weights. It requires `by_layer`
            and a model made of layers that can be checkpointed.
        passes: number of completions in each forward pass, in order; None for one pass. A pass
            leaves out the columns that are padding in all its rows. The division into passes
            changes the scores only by rounding. Layer by layer, there is always one pass.
        contiguous: True to pass no attention mask if the rows of a pass are padded only at the end,
            so that the model can use fast kernels for causal attention. It is allowed only if
            `can_read_contiguous` is True for the model.
        images: additional inputs from the images of the prompt that all rows share; see
            `images.row_inputs`. Trainable parameters of a vision tower or projector are
            differentiated for one completion after another.
        drops: True to allow dropout. Each score is then computed with its completion's masks.
        all_columns: True to also read columns that are padding in all rows of a pass, so that
            dropout masks are the same as in a forward pass over the whole batch. An error is raised
            if a trainable parameter has no rule, because its gradient would need a second pass over
            the completions, with other dropout masks.
    """
    if model.training and not drops:
        raise ConfigError("the model is in training mode: call model.eval() first")
    assert input_ids_BT.shape == attention_mask_BT.shape == completion_mask_BT.shape
    assert not completion_mask_BT[:, 0].any(), "column 0 has no prediction"
    names = {id(parameter): name for name, parameter in trainable(model)}
    batch, device = len(input_ids_BT), input_ids_BT.device
    totals = Accumulator(batch, device, weights_KB, gram, features, pooled)
    with unpacked(model), same_positions(model):
        with _activations_only(model):
            layer_by_layer = LayerByLayer(causal(model), layer_weights) if by_layer else None
            if layer_by_layer is not None and not layer_by_layer.layers:
                layer_by_layer = None
            if passes is None or layer_by_layer is not None:
                # Several passes would hold the gradients of all layers until the last pass.
                passes = [batch]
            backward_pass = _Backward(model, names, totals, images or {}, layer_by_layer)
            stops = np.cumsum(passes)
            backward_pass.run(
                [
                    _Pass(
                        input_ids_BT[rows], attention_mask_BT[rows], completion_mask_BT[rows],
                        all_columns,
                    )
                    for rows in map(slice, stops - passes, stops)
                ],
                temperature, contiguous,
            )  # fmt: skip
        rest = [(name, p) for name, p in trainable(model) if name not in backward_pass.added]
        if rest and layer_weights is not None:
            raise ConfigError(
                f"{rest[0][0]} has no formula for the gradients of single completions, and plain "
                "differentiation needs all weights at once: choose other parameters, or freeze it "
                "(requires_grad=False)"
            )
        if rest and all_columns:
            raise ConfigError(
                f"{rest[0][0]} has no formula for the gradients of single completions, and plain "
                "differentiation reads one completion at a time, with other dropout masks"
            )
        rows = (input_ids_BT, attention_mask_BT, completion_mask_BT)
        one_by_one(model, rest, rows, temperature, totals, images)
    missing = set(covered_parameters(model)) - totals.names
    assert not missing, f"parameters without a gradient: {sorted(missing)}"
    return CompletionScores(
        totals.sq_norm_B,
        totals.gradients_K,
        totals.gram_BB,
        totals.features_BR,
        totals.pooled_KR,
    )


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) for every parameter with requires_grad."""
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError("the model has no trainable parameter: nothing to differentiate")
    return parameters


def covered_parameters(model: PreTrainedModel) -> list[str]:
    """Return the names of the parameters in which scores are computed: all trainable ones."""
    return [name for name, _ in trainable(model)]


def parameter_sizes(model: nn.Module) -> dict[str, int]:
    """Return the number of entries of every trainable parameter."""
    return {name: p.numel() for name, p in trainable(model)}


@contextmanager
def _activations_only(model: nn.Module) -> Iterator[None]:
    """Compute gradients of activations but not of parameters within the block."""
    switched = [p for _, p in trainable(model)]
    for parameter in switched:
        parameter.requires_grad_(False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter in switched:
            parameter.requires_grad_(True)


class _Pass:
    """Forward and backward pass over some rows, usually without columns that are all padding."""

    # Hidden states and tokens of the columns in which scored tokens are predicted; set by
    # `cut_window`.
    window: Window
    # These columns of the pass; set by `cut_window`.
    scored: slice
    # Last hidden states.
    hidden: torch.Tensor
    # Gradients at the window's logits of the tokens that occur in the batch.
    grad_logits: torch.Tensor

    def __init__(
        self,
        ids_BT: torch.Tensor,
        attention_BT: torch.Tensor,
        completion_BT: torch.Tensor,
        all_columns: bool,
    ):
        columns = slice(0, None)
        if not all_columns:
            real = attention_BT.any(dim=0).nonzero()
            # A pass needs at least two columns: one token to read and one token to predict.
            first = min(int(real.min()), ids_BT.shape[1] - 2)
            columns = slice(first, max(int(real.max()) + 1, first + 2))
        # Token ids and masks of these rows and columns.
        self.ids, self.attention = ids_BT[:, columns], attention_BT[:, columns]
        self.completion = completion_BT[:, columns]
        # For each call of an embedding: the leaf tensor that replaced its output, the module, and
        # the arguments of the call. The arguments are None if no rule can use them.
        self.roots: list[tuple[torch.Tensor, nn.Module, tuple | None]] = []

    def cut_window(self) -> Window:
        """Return the detached hidden states from which scored tokens are predicted."""
        window = Window(self.hidden.detach()[:, :-1], self.ids[:, 1:], self.completion[:, 1:])
        self.window, self.scored = window.part(slice(None))
        return self.window

    def head_rows(self, place_U: torch.Tensor) -> torch.Tensor:
        """Return some rows of the gradients of the output layer's weight.

        Args:
            place_U: indices of the U rows' tokens among the tokens that occur in the batch.

        Returns:
            Array [B, U, D] for B completions and hidden size D.
        """
        hidden = widen(self.window.hidden_BTD)
        return torch.bmm(self.grad_logits[:, :, place_U].mT.to(hidden), hidden)

    def backward(self, grad_window_BTD: torch.Tensor) -> None:
        """Run the backward pass from the window's hidden states to the embeddings' leaf tensors."""
        hidden, self.hidden = self.hidden, torch.empty(0)
        grad_hidden = torch.zeros_like(hidden)
        grad_hidden[:, self.scored] = grad_window_BTD
        torch.autograd.backward(hidden, grad_hidden, inputs=[leaf for leaf, _, _ in self.roots])


class _Backward:
    """Forward and backward passes in which hooks add each completion's gradients to the totals."""

    def __init__(
        self,
        model: PreTrainedModel,
        names: dict[int, str],
        totals: Accumulator,
        images: Mapping[str, torch.Tensor],
        layer_by_layer: LayerByLayer | None,
    ):
        self.model, self.images, self.layers = causal(model), images, layer_by_layer
        self.outside = outside_language(self.model)
        # Names of the parameters whose gradients the hooks compute, keyed by the parameter's id.
        self.names, self.totals = names, totals
        # Names of the parameters whose gradients are in the totals.
        self.added: set[str] = set()
        # For each parameter, the number of parts of its gradient that will arrive, and the parts
        # that have arrived.
        self.expected: dict[str, int] = {}
        self.arrived: dict[str, list[tuple[_Pass, layers.Part]]] = {}
        # Names of parameters with at least one part of the gradient that no rule can compute.
        self.left_out: set[str] = set()
        self.passes: list[_Pass] = []
        self.shapes = {names[id(p)]: p.shape for p in model.parameters() if id(p) in names}
        embedding = cast(nn.Embedding, self.model.get_input_embeddings())
        head = cast(nn.Linear, self.model.get_output_embeddings())
        # Name of the weight if the embedding and the output layer share one, otherwise None.
        self.shared = names.get(id(head.weight)) if head.weight is embedding.weight else None
        others = (
            m for m in body(self.model).modules() if m is not embedding and self._scored_names(m)
        )
        used_elsewhere = self.shared in {
            name for module in others for name in self._scored_names(module)
        }
        if self.shared and (None in (layers.kind(embedding), layers.kind(head)) or used_elsewhere):
            self._score_shared_alone()

    def _scored_names(self, module: nn.Module) -> list[str]:
        """Return the names of a module's direct parameters whose gradients the hooks compute."""
        parameters = module.parameters(recurse=False)
        return [self.names[id(p)] for p in parameters if id(p) in self.names]

    def _score_shared_alone(self) -> None:
        """Leave the weight shared by the embedding and the output layer to `one_by_one`."""
        self.names = {key: name for key, name in self.names.items() if name != self.shared}
        self.shared = None

    def run(self, passes: Sequence[_Pass], temperature: float, contiguous: bool) -> None:
        """Run the forward and backward passes, which fill the totals.

        Args:
            passes: rows of each pass.
            temperature, contiguous: see `completion_scores`.
        """
        with self._hooks():
            for pass_ in passes:
                self.passes.append(pass_)
                self._forward(pass_, contiguous)
            if self.shared in self.left_out:
                self._score_shared_alone()
            for pass_, grad_BTD in zip(passes, self._output_layer(temperature), strict=True):
                pass_.backward(grad_BTD)
        with torch.no_grad():
            self._add_embeddings()

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        """Register forward hooks on embeddings and on modules with a rule, within the block."""
        outside = {module for top in self.outside for module in top.modules()}
        handles = [
            module.register_forward_hook(partial(self._called, name), with_kwargs=True)
            for name, module in body(self.model).named_modules()
            if layers.kind(module) is not None or layers.looks_up_tokens(module)
            if module not in outside
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _forward(self, pass_: _Pass, contiguous: bool) -> None:
        """Compute the last hidden states of a pass."""
        base = body(self.model)
        places = row_inputs(self.images, pass_.attention, self.model.dtype)
        begun_BT = nn.functional.pad(pass_.attention, (1, 0), value=1)
        if not (contiguous and (begun_BT.diff(dim=1) <= 0).all()):
            places["attention_mask"] = pass_.attention
            has_own_positions = self.images and hasattr(base, "get_rope_index")
            takes_positions = "position_ids" in inspect.signature(base.forward).parameters
            if takes_positions and not has_own_positions:
                places["position_ids"] = positions(pass_.attention)
        by_layers = self.layers.forward() if self.layers else nullcontext()
        with by_layers, without_graph(self.outside) as called:
            output = base(input_ids=pass_.ids, use_cache=False, **places)
        self.output, pass_.hidden = type(output), output.last_hidden_state
        self._add_zeros([top for top in self.outside if top not in called])

    def _add_zeros(self, modules: list[nn.Module]) -> None:
        """Add gradients of 0 for the parameters of these modules, which were not called."""
        for module in modules:
            for parameter in module.parameters():
                name = self.names.get(id(parameter))
                if name is not None and name not in self.added:
                    self.totals.add_zero(name, self.shapes[name], parameter.dtype)
                    self.added.add(name)

    def _called(
        self, path: str, module: nn.Module, args: tuple, kwargs: dict, output: Any
    ) -> torch.Tensor | None:
        """Prepare the backward pass at a module that was called: steps 2 and 3 above.

        The returned value, if any, replaces the module's output.
        """
        pass_ = self.passes[-1]
        if layers.looks_up_tokens(module):
            return self._root(pass_, module, args, output)
        called_twice = self.layers is not None and self.layers.computes
        if not output.requires_grad and not called_twice:
            # A rule calls its module without a graph. Such a call is not part of the model's pass.
            return None
        by_row = self._by_row(pass_, path, args, kwargs)
        if by_row is None:
            self.left_out.update(self._scored_names(module))
        elif self._scored_names(module):
            if self.layers is None or not self.layers.recomputes:
                self._expect(module)
            if output.requires_grad:
                # `pop` frees the arguments as soon as the gradient has arrived.
                held = [by_row]
                output.register_hook(lambda grad: self._arrive(pass_, module, held.pop(), grad))
        return None

    def _root(self, pass_: _Pass, module: nn.Module, args, output: torch.Tensor) -> torch.Tensor:
        """Replace an embedding's output with a leaf tensor, at which the backward pass ends."""
        leaf = output.detach().requires_grad_()
        if layers.kind(module) and args and args[0].shape == pass_.ids.shape:
            self._expect(module)
            pass_.roots.append((leaf, module, args))
        else:
            self.left_out.update(self._scored_names(module))
            pass_.roots.append((leaf, module, None))
        # Some models scale their embeddings in place, which autograd does not allow for a leaf.
        return leaf.clone()

    def _by_row(self, pass_: _Pass, path: str, args: tuple, kwargs: dict) -> tuple | None:
        """Return a module's arguments with one entry per completion along the first axis, or None.

        The result is None if the arguments mix tokens of different completions, as in mixtures of
        experts.
        """
        batch, length = pass_.ids.shape
        if kwargs or ".experts." in f".{path}." or not args:
            return None
        inputs = args[0]
        if inputs.dim() >= 3 and inputs.shape[0] == batch:
            return args
        if inputs.dim() == 2 and inputs.shape[0] == batch * length and len(args) == 1:
            return (inputs.view(batch, length, -1),)
        return None

    def _expect(self, module: nn.Module) -> None:
        """Note that one more part of the gradient of a module's parameters will arrive."""
        for name in self._scored_names(module):
            self.expected[name] = self.expected.get(name, 0) + 1

    def _output_layer(self, temperature: float) -> list[torch.Tensor]:
        """Add the output layer's gradients; return the gradients at each window's hidden states."""
        windows = [pass_.cut_window() for pass_ in self.passes]
        layer = OutputLayer(self.model, self.output, temperature)
        ids = torch.cat([pass_.ids.flatten() for pass_ in self.passes])
        self.tokens_U = ids.unique() if self.shared else ids[:0]
        with torch.no_grad():
            grads = add_output_layer(layer, windows, self.names, self.totals, self.tokens_U)
        for pass_, (_, grad_BTU) in zip(self.passes, grads, strict=True):
            pass_.grad_logits = grad_BTU
        names = [] if layer.opaque else self._scored_names(layer.head)
        self.added.update(name for name in names if name != self.shared)
        return [grad_BTD for grad_BTD, _ in grads]

    def _arrive(self, pass_: _Pass, module: nn.Module, args: tuple, grad: torch.Tensor) -> None:
        """Compute gradient parts of a module's parameters from the gradient at its output.

        A parameter's gradient is added to the totals when its last part has arrived.
        """
        grad = grad.detach()
        if grad.shape[0] != len(pass_.ids):
            # The module read the tokens of all rows along one axis. Separate the rows again.
            grad = grad.view(*pass_.ids.shape, -1)
        for local, part in layers.parts(module, args, grad):
            name = self.names.get(id(getattr(module, local)))
            if name is None:
                continue
            self.arrived.setdefault(name, []).append((pass_, part))
            if len(self.arrived[name]) == self.expected[name]:
                self._reduce(name)

    def _reduce(self, name: str) -> None:
        """Join the arrived parts of a parameter's gradient, and add it to the totals."""
        arrived = self.arrived.pop(name)
        by_pass = [
            layers.joined([part for of, part in arrived if of is pass_]) for pass_ in self.passes
        ]
        part = layers.stacked(by_pass)
        if part is None or name in self.left_out:
            # `one_by_one` computes the gradient of this parameter later.
            return
        if name == self.shared:
            assert isinstance(part, layers.Lookup)
            # The gradient is H + E, where H comes from the output layer and E from the embedding.
            # Its squared norm is ||H||^2 + ||E||^2 + 2 <H, E>, and the last term is added here. E
            # has nonzero rows only for the tokens of the batch, so only these rows are needed.
            for ids_U, dense_BUD in layers.dense_rows(part):
                place = torch.searchsorted(self.tokens_U, ids_U)
                products = torch.cat([pass_.head_rows(place) for pass_ in self.passes])
                self.totals.cross(name, self.shapes[name], ids_U, products, dense_BUD)
        layers.add(self.totals, name, self.shapes[name], part)
        self.added.add(name)

    def _add_embeddings(self) -> None:
        """Add the embeddings' gradients, computed at the leaf tensors, and all remaining parts."""
        for pass_ in self.passes:
            for leaf, module, args in pass_.roots:
                if args is not None and leaf.grad is not None:
                    self._arrive(pass_, module, args, leaf.grad)
        for name in list(self.arrived):
            self._reduce(name)
