"""Tokens from logits: drawn by inverting the cumulative distribution, or the likeliest."""

from __future__ import annotations

import torch

from grpo_ustat.policy.logprobs import widen

LOGITS_AT_ONCE = {"cpu": 2**19}  # fits the processor's cache; elsewhere 2**24


def choose(
    logits_RV: torch.Tensor, uniform_R: torch.Tensor, temperature: float, greedy: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A token of each row, its log-probability, and the entropy of its distribution.

    The distribution is p = softmax(logits / temperature) over the whole vocabulary, the logits in
    float32 or wider, as they are scored. With s = logits / temperature - max and Z = sum exp(s),
    a drawn token is the first at which the cumulative sum of exp(s) passes u Z, summed in float64.

    Args:
        logits_RV: logits of R rows.
        uniform_R: u of each row, in [0, 1), float64.
        temperature: divides the logits.
        greedy: the token with the largest logit instead, the first of equals; u is not used.

    Returns:
        Tokens [R] (int64), log p(token) = s_token - log Z [R], and the entropies
        H = log Z - sum_v p_v s_v [R] in nats, both float64.
    """
    rows = max(1, LOGITS_AT_ONCE.get(logits_RV.device.type, 2**24) // logits_RV.shape[1])
    tokens, logprobs, entropies = [], [], []
    parts = zip(logits_RV.split(rows), uniform_R.split(rows), strict=True)
    for part_RV, part_uniform_R in parts:
        scaled_RV = widen(part_RV) / temperature
        scaled_RV -= scaled_RV.amax(dim=-1, keepdim=True)
        weights_RV = scaled_RV.exp()
        cumulative_RV = weights_RV.cumsum(dim=-1, dtype=torch.float64)
        total_R1 = cumulative_RV[:, -1:]
        if greedy:
            token_R1 = part_RV.argmax(dim=-1, keepdim=True)
        else:
            threshold_R1 = part_uniform_R[:, None] * total_R1
            token_R1 = torch.searchsorted(cumulative_RV, threshold_R1, right=True)
            token_R1.clamp_(max=part_RV.shape[1] - 1)
        tokens.append(token_R1[:, 0])
        log_total_R1 = total_R1.log()
        logprobs.append((scaled_RV.gather(1, token_R1) - log_total_R1)[:, 0])
        # a logit of -inf has probability 0 and adds 0 to the entropy, not 0 * inf
        mean_R = torch.linalg.vecdot(weights_RV, scaled_RV.clamp_(min=-1e30)) / total_R1[:, 0]
        entropies.append(log_total_R1[:, 0] - mean_R)
    if len(tokens) == 1:
        return tokens[0], logprobs[0], entropies[0]
    return torch.cat(tokens), torch.cat(logprobs), torch.cat(entropies)
