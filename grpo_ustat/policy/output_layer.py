r"""Log-probabilities of tokens and their gradients at the logits, computed in chunks.

A model may transform the logits o of its output layer into l = f(o), for example by a scale or a
soft cap. In most models, f is the identity. The derivative of token y's log-probability with
respect to o is `f'(o) (onehot(y) - softmax(l / temperature)) / temperature`. Logits take much
memory, so they are computed only for completion tokens, and in chunks if the batch is large.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from grpo_ustat.policy.logprobs import widen

# `Policy` is imported only for type checkers, because `loading` imports packages that are not
# needed to compute scores.
if TYPE_CHECKING:
    from grpo_ustat.policy.loading import Policy

# Largest size in bytes of the logits that `Head` computes at a time.
CHUNK_BYTES = {"cpu": 2**27, "cuda": 2**30}


class Head:
    """Output layer of a policy, with the model's transformation of its logits.

    Args:
        policy: policy with the model.
        output: class of the object that the model without its output layer returns.
        temperature: temperature that divides the logits.
    """

    def __init__(self, policy: Policy, output: type[ModelOutput], temperature: float):
        self.policy, self.temperature = policy, temperature
        self.layer = OutputLayer(causal(policy.model), output, temperature)

    @torch.no_grad()
    def logprobs(self, window: Window) -> torch.Tensor:
        """Return the log-probabilities of the window's targets, [B, T], 0 where the mask is 0."""
        return self._by_token(
            window, lambda scores, targets_N: _chosen(scores, targets_N) - scores.logsumexp(dim=-1)
        )

    @torch.no_grad()
    def entropies(self, window: Window) -> torch.Tensor:
        """Return the entropies of the tokens' distributions in nats, [B, T], 0 where masked out."""
        return self._by_token(window, lambda scores, _: _entropy(scores.log_softmax(dim=-1)))

    def _by_token(
        self, window: Window, of_scores: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Apply a function to the tokens with mask 1.

        Args:
            window: hidden states and targets.
            of_scores: function from the logits divided by the temperature, [N, V], and the targets,
                [N], to a value for each of the N tokens, [N]. V is the size of the vocabulary.

        Returns:
            Values of the tokens, [B, T], 0 where the mask is 0.
        """
        place_N = window.mask_BT.flatten().nonzero().squeeze(1)
        targets_N, values = window.targets_BT.flatten()[place_N], []
        for part, hidden_ND in self._chunks(window.hidden_BTD.flatten(0, 1)[place_N]):
            values.append(of_scores(self._scores(self._logits(hidden_ND)), targets_N[part]))
        result = widen(window.hidden_BTD[:0]).new_zeros(window.mask_BT.shape)
        if values:
            result.view(-1)[place_N] = torch.cat(values).to(result)
        return result

    def backward(
        self, window: Window, factor_BT: torch.Tensor, entropy_BT: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Differentiate a weighted sum of log-probabilities and entropies with autograd.

        The gradient is added to the `grad` of all parameters: those of the output layer, and those
        in autograd's graph of the window's hidden states. Tokens with weight 0 are skipped.

        Args:
            window: hidden states with autograd's graph, and targets.
            factor_BT: weight of each token's log-probability in the sum.
            entropy_BT: weight of each token's entropy in the sum; None for weights 0.

        Returns:
            Log-probabilities, [B, T], 0 at skipped tokens.
        """
        used = factor_BT != 0 if entropy_BT is None else (factor_BT != 0) | (entropy_BT != 0)
        result = widen(window.hidden_BTD[:0].detach()).new_zeros(used.shape)
        # `nonzero` is the only call in which the host waits for the device.
        place_N = used.flatten().nonzero().squeeze(1)
        if not len(place_N):
            return result
        hidden_ND = window.hidden_BTD.flatten(0, 1).index_select(0, place_N)
        targets_N = window.targets_BT.flatten()[place_N]
        factors = [x if x is None else x.flatten()[place_N] for x in (factor_BT, entropy_BT)]
        grads_ND, logprobs = torch.empty_like(hidden_ND), []
        for part, hidden in self._chunks(hidden_ND.detach()):
            hidden.requires_grad_()
            logits_NV = self._logits(hidden)
            grad_NV, logprob_N = self._gradient(
                logits_NV.detach(), targets_N[part], *(f if f is None else f[part] for f in factors)
            )
            logits_NV.backward(grad_NV)
            assert hidden.grad is not None
            grads_ND[part] = hidden.grad
            logprobs.append(logprob_N)
        if hidden_ND.requires_grad:
            hidden_ND.backward(grads_ND)
        result.view(-1)[place_N] = torch.cat(logprobs).to(result)
        return result

    def _gradient(self, logits_NV, targets_N, factor_N, entropy_N):
        """Return the gradients at the logits, [N, V], and the targets' log-probabilities, [N]."""
        log_NV = self._scores(logits_NV).log_softmax(dim=-1)
        logprob_N = _chosen(log_NV, targets_N)
        factor_N1 = factor_N.to(log_NV)[:, None] / self.temperature
        if entropy_N is None:
            grad_NV = log_NV.exp_().mul_(-factor_N1)
        else:
            # A token with logit -inf must add 0 to the entropy. Without this bound, p log p would
            # be 0 * inf, which is NaN.
            log_NV.clamp_(min=-1e30)
            p_NV = log_NV.exp()
            entropy_N1 = -(p_NV * log_NV).sum(dim=-1, keepdim=True)
            weight_N1 = entropy_N.to(log_NV)[:, None] / self.temperature
            grad_NV = p_NV.mul_(-factor_N1 - weight_N1 * (log_NV + entropy_N1))
        grad_NV.scatter_add_(1, targets_N[:, None], factor_N1)
        return grad_NV.to(logits_NV.dtype), logprob_N

    def _logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        with self.policy.computing():
            return self.layer.final(hidden_ND[None])[0]

    def _scores(self, logits_NV: torch.Tensor) -> torch.Tensor:
        scores_NV = widen(logits_NV)
        return scores_NV if self.temperature == 1 else scores_NV / self.temperature

    def _chunks(self, hidden_ND: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Divide N tokens into slices whose logits fit into `CHUNK_BYTES`.

        Yields:
            A slice, and the hidden states of its tokens.
        """
        vocabulary = self.layer.head.weight.shape[0]
        entry = widen(hidden_ND[:0]).element_size()
        size = max(1, CHUNK_BYTES[hidden_ND.device.type] // (entry * vocabulary))
        for start in range(0, len(hidden_ND), size):
            part = slice(start, start + size)
            yield part, hidden_ND[part]


def _chosen(scores_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    return scores_NV.gather(1, targets_N[:, None])[:, 0]


def _entropy(log_NV: torch.Tensor) -> torch.Tensor:
    # As in `_gradient`, a logit of -inf adds 0 to the entropy.
    log_NV = log_NV.clamp(min=-1e30)
    return -(log_NV.exp() * log_NV).sum(dim=-1)


@dataclass(frozen=True)
class Window:
    """Hidden states and the tokens that are predicted from them, in B rows and T columns."""

    # Hidden states before the output layer, of size D.
    hidden_BTD: torch.Tensor
    # Tokens that are predicted from these hidden states.
    targets_BT: torch.Tensor
    # 1 (or another weight) if the log-probability of the predicted token is used, otherwise 0.
    mask_BT: torch.Tensor

    def part(self, index: torch.Tensor | slice) -> tuple[Window, slice]:
        """Cut out some rows and the range of columns in which their mask is not 0.

        Args:
            index: indices or slice of the rows.

        Returns:
            The smaller window, and the slice of columns that it covers.
        """
        used = self.mask_BT[index].any(dim=0).nonzero()
        columns = slice(int(used.min()), int(used.max()) + 1) if len(used) else slice(0, 1)
        return Window(*(x[index][:, columns] for x in vars(self).values())), columns


class OutputLayer:
    """Last layer of a causal model, with the model's transformation of its logits.

    Args:
        model: causal language model, without a PEFT wrapper.
        output: class of the object that the model without its output layer returns.
        temperature: temperature that divides the logits.
    """

    def __init__(self, model: PreTrainedModel, output: type[ModelOutput], temperature: float):
        self.model, self.output, self.temperature = model, output, temperature
        self.head = cast(nn.Linear, model.get_output_embeddings())
        self.opaque = type(self.head).forward is not nn.Linear.forward
        self._plain: bool | None = None

    def gradients(self, window: Window, vocabulary=slice(None), normaliser_BT=None):
        """Differentiate the masked sum of log-probabilities with respect to the logits.

        Args:
            window: hidden states and targets.
            vocabulary: slice of the vocabulary for whose logits gradients are computed.
            normaliser_BT: log-sum-exp of all logits. It may be None only if `vocabulary` is the
                full vocabulary.

        Returns:
            Gradients [B, T, V] at the V logits of the slice, and log-sum-exp of all logits, [B, T].
        """
        with torch.enable_grad():
            logits, final = self.logits(window.hidden_BTD, vocabulary)
        scores = widen(final.detach()) / self.temperature
        if normaliser_BT is None:
            normaliser_BT = scores.logsumexp(dim=-1)
        grads = scores.sub_(normaliser_BT[:, :, None]).exp_().neg_()
        low, targets_BT = vocabulary.start or 0, window.targets_BT
        inside = (targets_BT >= low) & (targets_BT < low + grads.shape[-1])
        place = torch.where(inside, targets_BT - low, 0)[:, :, None]
        grads.scatter_add_(-1, place, inside[:, :, None].to(grads))
        grads *= (window.mask_BT.to(grads) / self.temperature)[:, :, None]
        if final is not logits:
            grads = torch.autograd.grad(final, logits, grads.to(final.dtype))[0]
        return grads, normaliser_BT

    def back(self, grads_BTV: torch.Tensor, vocabulary=slice(None)) -> torch.Tensor:
        """Return the gradients at the hidden states, given those at the logits."""
        return grads_BTV.to(self.head.weight.dtype) @ self.head.weight[vocabulary]

    def through(self, window: Window) -> torch.Tensor:
        """Differentiate the masked sum of log-probabilities with respect to the hidden states.

        This uses plain autograd, for output layers that are not an ordinary linear layer.
        """
        hidden = window.hidden_BTD.detach().requires_grad_()
        with torch.enable_grad():
            scores = widen(self.final(hidden)) / self.temperature
            chosen = scores.log_softmax(dim=-1).gather(-1, window.targets_BT[:, :, None])[..., 0]
            return torch.autograd.grad((chosen * window.mask_BT).sum(), hidden)[0]

    def final(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Return the model's final logits, [B, T, V], computed from the last hidden states.

        The model itself is called, so that it applies its transformation of the logits. Only the
        part below the output layer is replaced, by a function that returns these hidden states.
        """
        output = self.output(last_hidden_state=hidden_BTD)
        # Some models call their base model, and others call their decoder.
        below = {body(self.model), self.model.get_decoder()} - {self.model}
        with ExitStack() as patched:
            for module in below:
                patched.enter_context(replaced_forward(module, lambda *_, **__: output))
            ids = torch.zeros(hidden_BTD.shape[:2], dtype=torch.int64, device=hidden_BTD.device)
            return self.model(input_ids=ids, use_cache=False).logits

    def logits(
        self, hidden_BTD: torch.Tensor, vocabulary: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits of a slice of the vocabulary before and after the model's transformation.

        Both results have shape [B, T, V], where V is the size of the slice. They are the same
        tensor if the model does not transform the logits of its output layer.
        """
        if self._plain:
            with torch.no_grad(), self._only(vocabulary):
                logits = self.head(hidden_BTD)
            return logits, logits
        leaves = []
        with self._only(vocabulary, leaves):
            final = self.final(hidden_BTD)
        if self._plain is None:
            self._plain = final.data_ptr() == leaves[0].data_ptr()
        return leaves[0], leaves[0] if self._plain else final

    @contextmanager
    def _only(self, vocabulary: slice, leaves: list | None = None) -> Iterator[None]:
        """Restrict the output layer to the logits of a vocabulary slice within the block.

        If the list `leaves` is given, the logits are appended to it, as a leaf tensor at which
        autograd's graph begins.
        """
        head = self.head

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            bias = None if head.bias is None else head.bias[vocabulary]
            logits = nn.functional.linear(hidden, head.weight[vocabulary], bias).detach()
            if leaves is not None:
                leaves.append(logits.requires_grad_())
            return logits

        with replaced_forward(head, forward):
            yield


def causal(model: Any) -> PreTrainedModel:
    """Return the causal language model without a PEFT wrapper; adapters stay in place."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def body(model: PreTrainedModel) -> nn.Module:
    """Return the part of a causal model that computes the last hidden states."""
    candidates = (model.base_model, model.get_decoder(), getattr(model, "model", None))
    return next(module for module in candidates if module is not None and module is not model)


def cache_name(module: nn.Module) -> str | None:
    """Return the name of the argument of `forward` that takes the cache, or None.

    Transformers renamed `past_key_values` to `cache` in version 5.24.
    """
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in ("past_key_values", "cache") if name in parameters), None)


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable) -> Iterator[None]:
    """Replace a module's forward pass with `forward` within the block."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
