r"""The output layer: gradients at its logits, in chunks of rows or of the vocabulary.

With logits o and what the model makes of them, l = f(o) (a scale, a soft cap, mostly nothing),
the log-probability of token y has the gradient `f'(o) (onehot(y) - softmax(l / temperature))` over
temperature. Only completion positions are computed, and never all logits of a large batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers.utils import ModelOutput

from grpo_ustat.policy.totals import Totals, widened

LOGITS = {"cpu": 2**26, "cuda": 2**30}  # bytes of logits computed at a time


@dataclass(frozen=True)
class Window:
    """The positions whose next tokens are scored.

    Attributes:
        hidden_BTD: hidden states before the output layer.
        targets_BT: the tokens predicted there.
        mask_BT: 1 where the prediction counts.
    """

    hidden_BTD: torch.Tensor
    targets_BT: torch.Tensor
    mask_BT: torch.Tensor

    def part(self, index: torch.Tensor) -> tuple[Window, slice]:
        """Some rows, and the columns in which any of them counts."""
        used = self.mask_BT[index].any(dim=0).nonzero()
        columns = slice(int(used.min()), int(used.max()) + 1) if len(used) else slice(0, 1)
        return Window(*(x[index][:, columns] for x in vars(self).values())), columns


class OutputLayer:
    """The last layer of a causal model, whatever it does to its logits.

    Args:
        model: the causal language model that owns it (without a PEFT wrapper).
        output: class of what the model below the output layer returns.
        temperature: divides the logits.
    """

    def __init__(self, model: nn.Module, output: type[ModelOutput], temperature: float):
        self.model, self.output, self.temperature = model, output, temperature
        self.head = model.get_output_embeddings()
        self.opaque = type(self.head).forward is not nn.Linear.forward
        self._plain: bool | None = None

    def gradients(self, window: Window, vocabulary=slice(None), normaliser_BT=None):
        """Gradients of the summed log-probabilities at the logits, [B, T, V], and a normaliser.

        Args:
            window: where.
            vocabulary: which tokens' logits.
            normaliser_BT: log of the sum of exponentials over the whole vocabulary, needed where
                only a part of it is asked for.
        """
        with torch.enable_grad():
            logits, final = self._logits(window.hidden_BTD, vocabulary)
        scores = widened(final.detach()) / self.temperature
        if normaliser_BT is None:
            normaliser_BT = scores.logsumexp(dim=-1)
        grads = scores.sub_(normaliser_BT[:, :, None]).exp_().neg_()
        _add_one(grads, window.targets_BT, vocabulary)
        grads *= (window.mask_BT.to(grads) / self.temperature)[:, :, None]
        if final is not logits:
            grads = torch.autograd.grad(final, logits, grads.to(final.dtype))[0]
        return grads, normaliser_BT

    def back(self, grads_BTV: torch.Tensor, vocabulary=slice(None)) -> torch.Tensor:
        """Gradients at the hidden states from those at the logits."""
        return grads_BTV.to(self.head.weight.dtype) @ self.head.weight[vocabulary]

    def through(self, window: Window) -> torch.Tensor:
        """Gradients of the summed log-probabilities at the hidden states, by differentiation."""
        hidden = window.hidden_BTD.detach().requires_grad_()
        with torch.enable_grad():
            scores = widened(self.final(hidden)) / self.temperature
            chosen = scores.log_softmax(dim=-1).gather(-1, window.targets_BT[:, :, None])[..., 0]
            return torch.autograd.grad((chosen * window.mask_BT).sum(), hidden)[0]

    def final(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """The model's logits from hidden states."""
        given = self.output(last_hidden_state=hidden_BTD)
        below = {body(self.model), self.model.get_decoder()} - {self.model}  # either is called
        with ExitStack() as patched:
            for module in below:
                patched.enter_context(_forward(module, lambda *_, **__: given))
            ids = torch.zeros(hidden_BTD.shape[:2], dtype=torch.int64, device=hidden_BTD.device)
            return self.model(input_ids=ids, use_cache=False).logits

    def _logits(self, hidden_BTD: torch.Tensor, vocabulary: slice):
        """Logits as the layer gives them and as the model returns them; one tensor if equal."""
        if self._plain:
            with torch.no_grad(), self._only(vocabulary):
                logits = self.head(hidden_BTD)
            return logits, logits
        seen = []
        with self._only(vocabulary, seen):
            final = self.final(hidden_BTD)
        if self._plain is None:
            self._plain = final.data_ptr() == seen[0].data_ptr()
        return seen[0], seen[0] if self._plain else final

    @contextmanager
    def _only(self, vocabulary: slice, seen: list | None = None) -> Iterator[None]:
        """Let the layer compute part of its logits; with `seen`, as a leaf that is kept there."""
        head = self.head

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            bias = None if head.bias is None else head.bias[vocabulary]
            logits = nn.functional.linear(hidden, head.weight[vocabulary], bias).detach()
            if seen is not None:
                seen.append(logits.requires_grad_())
            return logits

        with _forward(head, forward):
            yield


def causal(model: nn.Module) -> nn.Module:
    """The causal language model itself, without a PEFT wrapper; adapters stay in place."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def body(model: nn.Module) -> nn.Module:
    """What a causal model has below its output layer."""
    candidates = (model.base_model, model.get_decoder(), getattr(model, "model", None))
    return next(module for module in candidates if module is not None and module is not model)


@contextmanager
def _forward(module: nn.Module, forward: Callable) -> Iterator[None]:
    """Let a module compute something else for a while."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _add_one(grads_BTV: torch.Tensor, targets_BT: torch.Tensor, vocabulary: slice) -> None:
    low = vocabulary.start or 0
    inside = (targets_BT >= low) & (targets_BT < low + grads_BTV.shape[-1])
    place = torch.where(inside, targets_BT - low, 0)[:, :, None]
    grads_BTV.scatter_add_(-1, place, inside[:, :, None].to(grads_BTV))


def add_output_layer(
    layer: OutputLayer, window: Window, names: dict[int, str], totals: Totals, tokens_U
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the output layer's parameters to the totals.

    Args:
        layer: the output layer.
        window: positions that count.
        names: of the trainable parameters, by identity.
        totals: to add to.
        tokens_U: tokens whose logits' gradients are returned too.

    Returns:
        Gradients at the hidden states of the window, [B, T, D], and at the logits of the tokens
        asked for, [B, T, U].
    """
    vocabulary = layer.head.weight.shape[0]
    batch, length, _ = window.hidden_BTD.shape
    entry = widened(window.hidden_BTD[:0]).element_size()
    budget = LOGITS[window.hidden_BTD.device.type]
    grad_hidden = torch.zeros_like(window.hidden_BTD)
    kept = widened(window.hidden_BTD[:0]).new_zeros((batch, length, len(tokens_U)))
    found = (grad_hidden, kept)
    if layer.opaque:
        for index in torch.arange(batch).split(max(1, budget // (entry * length * vocabulary))):
            part, columns = window.part(index)
            grad_hidden[index, columns] = layer.through(part)
    elif entry * batch * length * vocabulary <= budget:
        _all_at_once(layer, window, names, totals, tokens_U, found)
    elif totals.gram_BB is None:
        per_chunk = max(1, budget // (entry * length * vocabulary))
        _by_rows(layer, window, names, totals, tokens_U, found, per_chunk)
    else:
        step = max(1, budget // (entry * batch * length))
        _by_vocabulary(layer, window, names, totals, tokens_U, found, step)
    return found


def _all_at_once(layer, window, names, totals, tokens_U, found) -> None:
    grads, _ = layer.gradients(window)
    found[0][:] = layer.back(grads)
    found[1][:] = grads[:, :, tokens_U]
    _add(layer, window, names, totals, grads)


def _by_rows(layer, window, names, totals, tokens_U, found, per_chunk: int) -> None:
    """Rows of similar length together; each row's logits exist once."""
    lengths = window.mask_BT.sum(dim=1)
    for index in lengths.argsort().split(per_chunk):
        part, columns = window.part(index)
        grads, _ = layer.gradients(part)
        found[0][index, columns] = layer.back(grads)
        found[1][index, columns] = grads[:, :, tokens_U]
        _add(layer, part, names, totals, grads, rows=index)


def _by_vocabulary(layer, window, names, totals, tokens_U, found, step: int) -> None:
    """Every completion's gradient of some rows of the weight; normalisers in a pass before."""
    vocabulary = layer.head.weight.shape[0]
    slices = [slice(low, min(low + step, vocabulary)) for low in range(0, vocabulary, step)]
    normaliser = _normaliser(layer, window, slices)
    for part in slices:
        grads, _ = layer.gradients(window, part, normaliser)
        found[0][:] += layer.back(grads, part)
        here = (tokens_U >= part.start) & (tokens_U < part.stop)
        found[1][:, :, here] = grads[:, :, tokens_U[here] - part.start]
        _add(layer, window, names, totals, grads, part.start)


def _normaliser(layer: OutputLayer, window: Window, slices: list[slice]) -> torch.Tensor:
    total = None
    for part in slices:
        with torch.no_grad():
            _, final = layer._logits(window.hidden_BTD, part)
        here = (widened(final) / layer.temperature).logsumexp(dim=-1)
        total = here if total is None else torch.logaddexp(total, here)
    return total


def _add(layer, window, names, totals: Totals, grads, first_row: int = 0, rows=None) -> None:
    head = layer.head
    name = names.get(id(head.weight))
    if name is not None:
        totals.outer(name, head.weight.shape, grads, window.hidden_BTD, first_row, rows)
    name = names.get(id(head.bias)) if head.bias is not None else None
    if name is not None:
        totals.take(name, head.bias.shape, grads.sum(dim=1), first_row, rows)
