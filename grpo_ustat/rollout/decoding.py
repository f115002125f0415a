"""Choice of the next tokens from logits, at random or greedily."""

from __future__ import annotations

import torch

from grpo_ustat.policy.logprobs import widen

# Number of logits processed at a time, by device type; 2**24 on other devices. On a CPU this many
# logits fit into the processor's cache.
LOGITS_AT_ONCE = {"cpu": 2**19}
# Number of tokens of the vocabulary in a block of `draw_by_blocks`.
BLOCK_TOKENS = 256


def choose(
    logits_RV: torch.Tensor, uniform_R: torch.Tensor, temperature: float, greedy: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose the next token of each row; return it with its log-probability and the entropy.

    The distribution is p = softmax(logits / temperature) over the full vocabulary, with logits in
    float32 or a wider type. It is the same distribution as in scoring. Tokens are drawn by inverse
    transform sampling: with s = logits / temperature - max and Z = sum exp(s), the drawn token is
    the first at which the cumulative sum of exp(s), in float64, exceeds u Z. For a large
    vocabulary, `draw_by_blocks` saves time.

    Args:
        logits_RV: logits of R rows over a vocabulary of V tokens.
        uniform_R: random number u of each row, uniform in [0, 1), float64.
        temperature: divisor of the logits.
        greedy: True to choose the token with the largest logit (the first one in a tie) instead of
            drawing a token.

    Returns:
        Tokens [R] (int64), log-probabilities log p(token) = s_token - log Z [R], and entropies
        H = log Z - sum_v p_v s_v [R] in nats. The last two are float64.
    """
    rows = max(1, LOGITS_AT_ONCE.get(logits_RV.device.type, 2**24) // logits_RV.shape[1])
    draw = draw_by_blocks if logits_RV.shape[1] > 32 * BLOCK_TOKENS else draw_token
    tokens, logprobs, entropies = [], [], []
    parts = zip(logits_RV.split(rows), uniform_R.split(rows), strict=True)
    for part_RV, part_uniform_R in parts:
        scaled_RV = part_RV if temperature == 1 else widen(part_RV) / temperature
        scaled_RV = scaled_RV - widen(scaled_RV.amax(dim=-1, keepdim=True))
        weights_RV = scaled_RV.exp()
        token_R1, total_R1 = draw(weights_RV, part_uniform_R[:, None])
        if greedy:
            token_R1 = part_RV.argmax(dim=-1, keepdim=True)
        tokens.append(token_R1[:, 0])
        log_total_R1 = total_R1.log()
        logprobs.append((scaled_RV.gather(1, token_R1) - log_total_R1)[:, 0])
        # A logit of -inf has probability 0 and must add 0 to the entropy instead of 0 * inf.
        mean_R = torch.linalg.vecdot(weights_RV, scaled_RV.clamp_(min=-1e30)) / total_R1[:, 0]
        entropies.append(log_total_R1[:, 0] - mean_R)
    if len(tokens) == 1:
        return tokens[0], logprobs[0], entropies[0]
    return torch.cat(tokens), torch.cat(logprobs), torch.cat(entropies)


def draw_token(
    weights_RV: torch.Tensor, uniform_R1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's first token at which the cumulative sum of the weights exceeds u Z.

    Args:
        weights_RV: nonnegative weights, with at least one positive weight in each row.
        uniform_R1: random number u of each row, uniform in [0, 1), float64.

    Returns:
        Tokens [R, 1], whose weights are positive, and the sums Z of the weights, [R, 1], float64.
    """
    cumulative_RV = weights_RV.cumsum(dim=-1, dtype=torch.float64)
    total_R1 = cumulative_RV[:, -1:]
    return first_beyond(cumulative_RV, uniform_R1 * total_R1), total_R1


def draw_by_blocks(
    weights_RV: torch.Tensor, uniform_R1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token like `draw_token`, but with one pass fewer over the vocabulary.

    The vocabulary is divided into blocks of `BLOCK_TOKENS` tokens. The first step finds the block
    in which the cumulative sum exceeds u Z. The second step finds the token in this block. Sums
    within blocks have the precision of the weights; all other sums are float64.
    """
    vocabulary = weights_RV.shape[1]
    full = vocabulary // BLOCK_TOKENS * BLOCK_TOKENS
    sums_RK = weights_RV[:, :full].unflatten(1, (-1, BLOCK_TOKENS)).sum(dim=-1)
    rest_R1 = weights_RV[:, full:].sum(dim=-1, keepdim=True)
    cumulative_RK = torch.cat([sums_RK, rest_R1], dim=1).cumsum(dim=-1, dtype=torch.float64)
    total_R1 = cumulative_RK[:, -1:]
    threshold_R1 = uniform_R1 * total_R1
    block_R1 = first_beyond(cumulative_RK, threshold_R1)
    before_RK = torch.nn.functional.pad(cumulative_RK, (1, 0))
    place_RB = block_R1 * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=weights_RV.device)
    inside_RB = weights_RV.gather(1, place_RB.clamp(max=vocabulary - 1))
    inside_RB = inside_RB.masked_fill(place_RB >= vocabulary, 0)
    cumulative_RB = inside_RB.cumsum(dim=-1, dtype=torch.float64)
    token_R1 = first_beyond(cumulative_RB, threshold_R1 - before_RK.gather(1, block_R1))
    return (block_R1 * BLOCK_TOKENS + token_R1).clamp_(max=vocabulary - 1), total_R1


def first_beyond(cumulative_RN: torch.Tensor, threshold_R1: torch.Tensor) -> torch.Tensor:
    """Return the first index at which each row exceeds its threshold, [R, 1].

    Rounding can make a threshold as large as the row's last value. The result is then the first
    index with this last value. For a row that is not finite, the result is the last index.
    """
    last_R1 = cumulative_RN[:, -1:]
    below_R1 = last_R1.nextafter(torch.zeros_like(last_R1))
    place_R1 = torch.searchsorted(cumulative_RN, threshold_R1.minimum(below_R1), right=True)
    return place_R1.clamp_(max=cumulative_RN.shape[1] - 1)
