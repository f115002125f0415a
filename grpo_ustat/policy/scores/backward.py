r"""Scores of completions: squared norms, pooled gradients and Gram matrices from one backward pass.

The score of completion i is `s_i = grad_theta log pi(y_i | x)`, summed over completion tokens. A
module's input and the gradient at its output determine the module's part of every s_i. One forward
and one backward pass over the batch are therefore enough. The batch can also be split into several
passes, each over some of its rows. During a pass, the parameters require no gradient. The steps, in
the order of the methods of `_Backward`, are:

1. `_hooks` registers a forward hook on each module with a rule in `layers`, and on each embedding.
2. The forward pass calls the hook, `_called`. For an embedding, the hook replaces the output with a
   leaf, at which the graph begins (`_root`). For any other module, the hook keeps the arguments,
   counts one more expected part of each parameter's gradient (`_expect`), and registers a gradient
   hook on the output. A module whose arguments do not separate the completions (a fused expert)
   gets no gradient hook; its parameters are added to `left_out`.
3. If scoring proceeds layer by layer (`LayerByLayer`), each module is called twice. The first call,
   without a graph, only counts the expected part. The second call, in the backward pass, registers
   the gradient hook.
4. The output layer has no hook. `_output_layer` computes the logits in chunks, adds the gradients
   of the layer's parameters to the totals, and sets the gradients at the last hidden states, at
   which the backward pass begins.
5. The gradient hook is called once and calls `_arrive`. The module's rule computes a part of each
   parameter's gradient from the arguments and the gradient at the output. The arguments and the
   gradient at the output are then dropped.
6. When a parameter's expected parts have arrived from all passes and all modules that share the
   parameter, `_reduce` joins the parts, adds the result to the totals and drops the parts.
7. After the backward pass, `_add_embeddings` computes the embeddings' parts from the gradients at
   the leaves. If the loss does not depend on a module's output, the module's part is 0 and never
   arrives, so `_reduce` joins only the parts that have arrived.
8. Trainable parameters whose modules have no rule (fused experts, routers, attention sinks) are
   missing from the totals. `one_by_one` differentiates them for one completion at a time, which is
   exact and costs one more pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, cast

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
from grpo_ustat.policy.scores.metric import Metric
from grpo_ustat.policy.scores.one_by_one import one_by_one
from grpo_ustat.policy.scores.output_layer import add_output_layer
from grpo_ustat.policy.scores.sketch import Sketch


@dataclass(frozen=True)
class CompletionScores:
    """Norms, inner products and weighted sums of the scores s_i of B completions."""

    # ||s_i||^2, float64.
    sq_norm_B: torch.Tensor
    # For each weight vector w_k, the pooled gradient `sum_i w_ki s_i` by parameter name, float32 or
    # wider; empty if sketches of the pooled gradients were requested.
    gradients_K: list[dict[str, torch.Tensor]]
    # <s_i, s_j>, float64; None unless requested.
    gram_BB: torch.Tensor | None
    # Sketches of the s_i, float64; None unless requested.
    features_BR: torch.Tensor | None = None
    # Sketches of the pooled gradients, float64; None unless requested.
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
    metric: Metric | None = None,
    by_layer: bool = False,
    layer_weights: LayerWeights | None = None,
    passes: Sequence[int] | None = None,
    contiguous: bool = False,
    images: Mapping[str, torch.Tensor] | None = None,
    drops: bool = False,
    all_columns: bool = False,
) -> CompletionScores:
    """Compute score norms, pooled gradients and the Gram matrix over all trainable parameters.

    Args:
        model: loaded causal language model in evaluation mode, with or without PEFT adapters;
            scores cover the parameters with requires_grad. If the model is in training mode,
            `drops` must be True.
        input_ids_BT: token ids of prompts and completions.
        attention_mask_BT: 1 on real tokens.
        completion_mask_BT: weights of the tokens' log-probabilities in the score: usually 1 on
            completion tokens and 0 elsewhere, but any number is allowed. The first column must be
            0, because token t is predicted from token t-1.
        weights_KB: K weight vectors over the B completions, for pooled gradients.
        gram: True to compute the Gram matrix.
        temperature: temperature that divides the logits, as in sampling.
        features: sketch of every completion's score.
        pooled: sketch of the pooled gradients, returned instead of the gradients.
        metric: weights of gradient entries in norms, products and pooled gradients, see `metric`;
            None for Euclidean norms.
        by_layer: True to keep only the layers' inputs and compute each layer twice, which saves
            memory; this has no effect if the model has no layers that can be checkpointed.
        layer_weights: function that returns a context within which a layer has its weights, for
            models whose layers do not always have them. It requires `by_layer` and a model made of
            layers that can be checkpointed.
        passes: number of completions in each pass through the model, in order; None for one pass.
            A pass omits the columns that are padding in all its rows. The split into passes changes
            the scores only by rounding.
        contiguous: True to pass no mask if the rows of a pass are padded only at the end, so that
            the model can use fast kernels for causal attention. `can_read_contiguous` must be True
            for the model.
        images: additional inputs from the images of the prompt that all rows share; see
            `images.row_inputs`. Trainable parameters of a vision tower or projector are
            differentiated for one completion at a time.
        drops: True to allow dropout; each score is then computed with its completion's masks.
        all_columns: True to also read columns that are padding in all rows of a pass. The dropout
            masks are then the same as in a forward pass over the whole batch. Trainable parameters
            without a rule raise an error, because scoring them would read their completions once
            more, with other masks.
    """
    if model.training and not drops:
        raise ConfigError("the model is in training mode: scores need model.eval()")
    assert input_ids_BT.shape == attention_mask_BT.shape == completion_mask_BT.shape
    assert not completion_mask_BT[:, 0].any(), "column 0 has no prediction"
    names = {id(parameter): name for name, parameter in trainable(model)}
    batch, device = len(input_ids_BT), input_ids_BT.device
    totals = Accumulator(batch, device, weights_KB, gram, features, pooled, metric)
    with unpacked(model), same_positions(model):
        with _activations_only(model):
            backward_pass = _Backward(
                model, names, input_ids_BT, attention_mask_BT, totals, images or {}
            )
            passes = [batch] if passes is None else passes
            backward_pass.run(
                completion_mask_BT, temperature, by_layer=by_layer, layer_weights=layer_weights,
                counts=passes, contiguous=contiguous, all_columns=all_columns,
            )  # fmt: skip
        rest = [(name, p) for name, p in trainable(model) if name not in backward_pass.added]
        if rest and layer_weights is not None:
            raise ConfigError(
                f"{rest[0][0]} has no score rule, and plain differentiation needs all weights at "
                "once: choose other parameters, or freeze it (requires_grad=False)"
            )
        if rest and all_columns:
            raise ConfigError(
                f"{rest[0][0]} has no score rule, so its completions are read one at a time, with "
                "other dropout masks"
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
    """Return the names of the parameters that scores cover, namely all trainable parameters."""
    return [name for name, _ in trainable(model)]


def parameter_sizes(model: nn.Module) -> dict[str, int]:
    """Return the number of entries of every trainable parameter."""
    return {name: p.numel() for name, p in trainable(model)}


@contextmanager
def _activations_only(model: nn.Module) -> Iterator[None]:
    """Disable gradients of parameters within the block; activations still have gradients."""
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
    """Pass of some rows through the model, usually without columns that contain only padding."""

    # Window of the positions whose next tokens are scored; set by `cut_window`.
    window: Window
    # Columns of the pass that the window covers; set by `cut_window`.
    scored: slice

    def __init__(
        self,
        rows: slice,
        ids_BT: torch.Tensor,
        attention_BT: torch.Tensor,
        layers: LayerByLayer | None,
        all_columns: bool,
    ):
        real = attention_BT[rows].any(dim=0).nonzero()
        # A pass needs one token to read and one token to predict.
        first = min(int(real.min()), ids_BT.shape[1] - 2)
        # Range of columns that contains all real tokens of these rows.
        columns = slice(first, max(int(real.max()) + 1, first + 2))
        self.rows, self.columns = rows, slice(0, ids_BT.shape[1]) if all_columns else columns
        # Token ids and mask of these rows and columns.
        self.ids, self.attention = ids_BT[rows, self.columns], attention_BT[rows, self.columns]
        # Layers of the model; None if the pass is not computed layer by layer.
        self.layers = layers
        # For each call of an embedding: the leaf that replaced its output, the module, and the
        # arguments of the call, or None if no rule covers the call.
        self.roots: list[tuple[torch.Tensor, nn.Module, tuple | None]] = []
        # The last hidden states, the gradients at the window's hidden states, and the gradients at
        # the window's logits for the tokens that occur in the batch.
        self.hidden = self.grad_window = self.grad_logits = torch.empty(0)

    def cut_window(self, completion_mask_BT: torch.Tensor) -> Window:
        """Return the window of detached hidden states that predict scored tokens."""
        ids_BT, mask_BT = self.ids[:, 1:], completion_mask_BT[self.rows, self.columns][:, 1:]
        window = Window(self.hidden.detach()[:, :-1], ids_BT, mask_BT)
        self.window, self.scored = window.part(slice(None))
        return self.window

    def head_rows(self, place_U: torch.Tensor) -> torch.Tensor:
        """Return the output layer's weight gradients in the rows of some tokens, [B, U, D]."""
        hidden = widen(self.window.hidden_BTD)
        return torch.bmm(self.grad_logits[:, :, place_U].mT.to(hidden), hidden)

    def backward(self) -> Iterator[None]:
        """Propagate the gradient at the last hidden states to the roots; yield after each layer."""
        grad_hidden = torch.zeros_like(self.hidden)
        grad_hidden[:, self.scored] = self.grad_window
        self.grad_window = torch.empty(0)
        leaves, hidden, self.hidden = [x for x, _, _ in self.roots], self.hidden, torch.empty(0)
        if self.layers:
            yield from self.layers.backward(hidden, grad_hidden, leaves)
        else:
            torch.autograd.backward(hidden, grad_hidden, inputs=leaves)


class _Backward:
    """Forward and backward passes, in which hooks add the parameters' gradients to the totals."""

    def __init__(
        self,
        model: PreTrainedModel,
        names: dict[int, str],
        input_ids_BT: torch.Tensor,
        attention_mask_BT: torch.Tensor,
        totals: Accumulator,
        images: Mapping[str, torch.Tensor],
    ):
        self.model, self.images = causal(model), images
        self.outside = outside_language(self.model)
        # Names of the parameters that are scored here, by id.
        self.names, self.totals = names, totals
        self.ids, self.attention = input_ids_BT, attention_mask_BT
        # Names of the parameters whose gradients are in the totals.
        self.added: set[str] = set()
        # Number of expected parts of each parameter's gradient, and the parts that have arrived.
        self.expected: dict[str, int] = {}
        self.arrived: dict[str, list[tuple[_Pass, layers.Part]]] = {}
        # Names of parameters for which no rule computes some part of the gradient.
        self.left_out: set[str] = set()
        self.passes: list[_Pass] = []
        self.shapes = {names[id(p)]: p.shape for p in model.parameters() if id(p) in names}
        embedding = cast(nn.Embedding, self.model.get_input_embeddings())
        head = cast(nn.Linear, self.model.get_output_embeddings())
        # Name of the weight that the embedding and the output layer share; None if none is shared.
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
        """Return the names of a module's direct parameters that are scored here."""
        parameters = module.parameters(recurse=False)
        return [self.names[id(p)] for p in parameters if id(p) in self.names]

    def _score_shared_alone(self) -> None:
        """Leave the weight shared by the embedding and the output layer to `one_by_one`."""
        self.names = {key: name for key, name in self.names.items() if name != self.shared}
        self.shared = None

    def run(
        self,
        completion_mask_BT: torch.Tensor,
        temperature: float,
        *,
        by_layer: bool,
        layer_weights: LayerWeights | None,
        counts: Sequence[int],
        contiguous: bool,
        all_columns: bool,
    ) -> None:
        """Run the forward and backward passes, which fill the totals.

        The arguments have the same meaning as in `completion_scores`. `counts` lists the number of
        rows in each pass.
        """
        by_layer = by_layer and LayerByLayer(self.model).fits
        with self._hooks():
            stop = 0
            for count in counts:
                start, stop = stop, stop + count
                pass_ = _Pass(
                    slice(start, stop), self.ids, self.attention,
                    LayerByLayer(self.model, layer_weights) if by_layer else None, all_columns,
                )  # fmt: skip
                self.passes.append(pass_)
                self._forward(pass_, contiguous)
            if self.shared in self.left_out:
                self._score_shared_alone()
            self._output_layer(completion_mask_BT, temperature)
            layer_steps = [pass_.backward() for pass_ in self.passes]
            # All passes finish a layer before the next one begins.
            for _ in zip_longest(*layer_steps):
                pass
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
        by_layers = pass_.layers.forward() if pass_.layers else nullcontext()
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
        """Begin the graph at an embedding's output, or register a gradient hook on the output."""
        # The pass that is recomputing a layer, or the newest pass if no pass is.
        pass_ = next(
            (x for x in self.passes if x.layers is not None and x.layers.recomputes),
            self.passes[-1],
        )
        if layers.looks_up_tokens(module):
            return self._root(pass_, module, args, output)
        called_twice = pass_.layers is not None and pass_.layers.computes
        if not output.requires_grad and not called_twice:
            # This call comes from a rule, which calls the module without a graph.
            return None
        by_row = self._by_row(pass_, path, args, kwargs)
        if by_row is None:
            self.left_out.update(self._scored_names(module))
        elif self._scored_names(module):
            if pass_.layers is None or not pass_.layers.recomputes:
                self._expect(module)
            if output.requires_grad:
                # The arguments are dropped as soon as the gradient arrives.
                held = [by_row]
                output.register_hook(lambda grad: self._arrive(pass_, module, held.pop(), grad))
        return None

    def _root(self, pass_: _Pass, module: nn.Module, args, output: torch.Tensor) -> torch.Tensor:
        """Replace an embedding's output with a leaf, at which the backward pass ends."""
        leaf = output.detach().requires_grad_()
        if layers.kind(module) and args and args[0].shape == pass_.ids.shape:
            self._expect(module)
            pass_.roots.append((leaf, module, args))
        else:
            self.left_out.update(self._scored_names(module))
            pass_.roots.append((leaf, module, None))
        # A model can scale its embeddings in place.
        return leaf.clone()

    def _by_row(self, pass_: _Pass, path: str, args: tuple, kwargs: dict) -> tuple | None:
        """Return a module's arguments with the batch dimension first, or None.

        The result is None if the completions cannot be separated, as in mixtures of experts.
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
        """Expect one more part of the gradient for each scored parameter of a module."""
        for name in self._scored_names(module):
            self.expected[name] = self.expected.get(name, 0) + 1

    def _output_layer(self, completion_mask_BT: torch.Tensor, temperature: float) -> None:
        """Add the output layer's gradients; set the gradients at each pass's last hidden states."""
        windows = [pass_.cut_window(completion_mask_BT) for pass_ in self.passes]
        layer = OutputLayer(self.model, self.output, temperature)
        self.tokens_U = self.ids.unique() if self.shared else self.ids.new_zeros(0)
        with torch.no_grad():
            grads = add_output_layer(layer, windows, self.names, self.totals, self.tokens_U)
        for pass_, (grad_BTD, grad_BTU) in zip(self.passes, grads, strict=True):
            pass_.grad_window, pass_.grad_logits = grad_BTD, grad_BTU
        names = [] if layer.opaque else self._scored_names(layer.head)
        self.added.update(name for name in names if name != self.shared)

    def _arrive(self, pass_: _Pass, module: nn.Module, args: tuple, grad: torch.Tensor) -> None:
        """Compute gradient parts of a module's parameters from the gradient at its output.

        A parameter's gradient is added to the totals when its last part has arrived.
        """
        grad = grad.detach()
        if grad.shape[0] != len(pass_.ids):
            # The module received the tokens of all rows along a single axis.
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
            # The parameter is scored one completion at a time.
            return
        if name == self.shared:
            assert isinstance(part, layers.Lookup)
            # The gradient is H + E, where H comes from the output layer and E from the embedding,
            # and ||H + E||^2 = ||H||^2 + ||E||^2 + 2 <H, E>. Rows of E are 0 for tokens that do not
            # occur in the batch.
            for ids_U, dense_BUD in layers.dense_rows(part):
                place = torch.searchsorted(self.tokens_U, ids_U)
                products = torch.cat([pass_.head_rows(place) for pass_ in self.passes])
                self.totals.cross(name, self.shapes[name], ids_U, products, dense_BUD)
        layers.add(self.totals, name, self.shapes[name], part)
        self.added.add(name)

    def _add_embeddings(self) -> None:
        """Add the embeddings' gradients, which are at the leaves, and all remaining parts."""
        for pass_ in self.passes:
            for leaf, module, args in pass_.roots:
                if args is not None and leaf.grad is not None:
                    self._arrive(pass_, module, args, leaf.grad)
        for name in list(self.arrived):
            self._reduce(name)
