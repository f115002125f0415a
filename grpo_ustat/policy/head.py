r"""Log-probabilities and their gradients at the output layer, some tokens at a time.

With logits l, `log p(y) = l_y / t - logsumexp(l / t)`. Its gradient at l is `(onehot(y) - p) / t`,
that of the entropy H of p is `-p (log p + H) / t`. Both are formed in the forward pass of a chunk
and carried back at once, so that memory holds one chunk of logits, never tokens x vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers.utils import ModelOutput

from grpo_ustat.policy.loading import Policy
from grpo_ustat.policy.output_layer import OutputLayer, Window, causal
from grpo_ustat.policy.totals import widened

LOGITS = {"cpu": 2**27, "cuda": 2**30}  # bytes of logits computed at a time


class Head:
    """A policy's output layer, whatever it does to its logits.

    Args:
        policy: whose.
        output: class of what the model below the output layer returns.
        temperature: t, divides the logits.
    """

    def __init__(self, policy: Policy, output: type[ModelOutput], temperature: float):
        self.policy, self.temperature = policy, temperature
        self.layer = OutputLayer(causal(policy.model), output, temperature)

    @torch.no_grad()
    def logprobs(self, window: Window) -> torch.Tensor:
        """Log-probabilities of the window's targets, [B, T], 0 where its mask is 0."""
        place = window.mask_BT.bool()
        targets_N, found = window.targets_BT[place], []
        for part, hidden_ND in self._chunks(window.hidden_BTD[place]):
            scores_NV = self._scores(self._logits(hidden_ND))
            found.append(_chosen(scores_NV, targets_N[part]) - scores_NV.logsumexp(dim=-1))
        result = widened(window.hidden_BTD[:0]).new_zeros(place.shape)
        result[place] = torch.cat(found).to(result)
        return result

    def backward(
        self, window: Window, factor_BT: torch.Tensor, entropy_BT: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add the gradient of `sum factor * logprob + entropy_factor * H` to the parameters' `grad`
        and to what the window was made from.

        Args:
            window: hidden states, with the graph behind them.
            factor_BT: of each token's log-probability; where it is 0, nothing is computed.
            entropy_BT: of each token's entropy.

        Returns:
            The log-probabilities, [B, T], 0 where nothing was computed.
        """
        used = factor_BT != 0 if entropy_BT is None else (factor_BT != 0) | (entropy_BT != 0)
        result = widened(window.hidden_BTD[:0].detach()).new_zeros(used.shape)
        if not used.any():
            return result
        hidden_ND, targets_N = window.hidden_BTD[used], window.targets_BT[used]
        factors = (factor_BT[used], None if entropy_BT is None else entropy_BT[used])
        grads_ND, found = torch.empty_like(hidden_ND), []
        for part, hidden in self._chunks(hidden_ND.detach()):
            hidden.requires_grad_()
            logits_NV = self._logits(hidden)
            grad_NV, logprob_N = self._gradient(
                logits_NV.detach(), targets_N[part], *(f if f is None else f[part] for f in factors)
            )
            logits_NV.backward(grad_NV)
            grads_ND[part], _ = hidden.grad, found.append(logprob_N)
        if hidden_ND.requires_grad:
            hidden_ND.backward(grads_ND)
        result[used] = torch.cat(found).to(result)
        return result

    def _gradient(self, logits_NV, targets_N, factor_N, entropy_N):
        """What is to be carried back from the logits, and the log-probabilities."""
        scores_NV = self._scores(logits_NV)
        normaliser_N = scores_NV.logsumexp(dim=-1, keepdim=True)
        logprob_N = _chosen(scores_NV, targets_N) - normaliser_N[:, 0]
        factor_N1 = factor_N.to(scores_NV)[:, None]
        if entropy_N is None:
            grad_NV = scores_NV.sub_(normaliser_N).exp_().mul_(-factor_N1)
        else:
            # a logit of -inf adds 0 to the entropy, not 0 * inf
            scores_NV.sub_(normaliser_N).clamp_(min=-1e30)
            p_NV = scores_NV.exp()
            entropy_N1 = -(p_NV * scores_NV).sum(dim=-1, keepdim=True)
            weight_N1 = entropy_N.to(scores_NV)[:, None]
            grad_NV = p_NV.mul_(-factor_N1 - weight_N1 * (scores_NV + entropy_N1))
        grad_NV.scatter_add_(1, targets_N[:, None], factor_N1)
        return grad_NV.div_(self.temperature).to(logits_NV.dtype), logprob_N

    def _logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        with self.policy.computing():
            return self.layer.final(hidden_ND[None])[0]

    def _scores(self, logits_NV: torch.Tensor) -> torch.Tensor:
        return widened(logits_NV) / self.temperature

    def _chunks(self, hidden_ND: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        vocabulary = self.layer.head.weight.shape[0]
        entry = widened(hidden_ND[:0]).element_size()
        size = max(1, LOGITS[hidden_ND.device.type] // (entry * vocabulary))
        for start in range(0, len(hidden_ND), size):
            part = slice(start, start + size)
            yield part, hidden_ND[part]


def _chosen(scores_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    return scores_NV.gather(1, targets_N[:, None])[:, 0]
