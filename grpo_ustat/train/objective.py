r"""Objective of an update as a function of the log-probabilities of completion tokens.

Token t of completion i has three log-probabilities: `l_it` under the current policy, `o_it` under
the policy that sampled the completion, and `r_it` under the reference model. `A_i` is the advantage
of completion i, and L_i its number of tokens. `w_i` is the weight of its tokens, which depends on
`loss_type`; see the table in `estimators.row_weights`. The setting `importance_sampling_level`
selects the form of the objective. `algorithm1` is the form `none` with w_i = 1/n:

    algorithm1       1/n sum_i A_i sum_t l_it                                 paper, Algorithm 1
    none             sum_i w_i sum_t   A_i l_it
    token            sum_i w_i sum_t   clip( exp(l_it - o_it), A_i )          paper, Algorithm 2
    sequence         sum_i 1/n         clip( exp(1/L_i sum_t (l_it - o_it)), A_i ) Zheng et al. 2025
    whole_sequence   sum_i 1/n         clip( exp(sum_t (l_it - o_it)), A_i )  the unbiased reference

The gradient of `sequence` is `sum_i 1/(n L_i) ratio_i A_i grad sum_t l_it`. Differentiating the
ratio thus divides each completion by its length L_i.

Some loss types have a form of their own, which is that of TRL 1.16's `GRPOTrainer._compute_loss`
with its default constants. `sg` marks a factor that is not differentiated:

    cispo    sum_i w_i sum_t sg min(rho_it, epsilon_high) A_i l_it            MiniMax-M1 2025
    sapo     sum_i w_i sum_t 4/tau sigmoid(tau (rho_it - 1)) A_i              arXiv 2511.20347
             tau = 1 if A_i > 0, else 1.05
    vespo    sum_i w_i sum_t sg W_i^k exp(lambda (1 - W_i)) A_i l_it          arXiv 2602.10693
             (k, lambda) = (2, 3) if A_i >= 0, else (3, 2); W_i = exp(sum_t (l_it - o_it))
    luspo    sum_i L_i/n       clip( exp(1/L_i sum_t (l_it - o_it)), A_i )    arXiv 2602.05261

Here, rho_it = exp(l_it - o_it) is the importance ratio of a token. The sums run over the update's
minibatch on all ranks, and n is the number of its completions. Three settings exclude completions
or tokens:

- `mask_truncated_completions` sets L_i = 0 for truncated completions, but they count in n (Yu et
  al. 2025).
- A filter of rows (`row_weights.rows_that_count`) excludes completions from all sums and from n.
- `top_entropy_quantile` q < 1 restricts the sums over t to tokens of high entropy: the entropy
  under the current policy is at or above the quantile 1 - q over all tokens of the update. The
  weights w_i and the penalty stay the same (Wang et al. 2025, arXiv 2506.01939). TRL instead uses
  the quantile of each micro-batch.

Without epsilon, `clip(rho, A)` is `rho A`. With epsilon, it is
`min(rho A, A clamp(rho, 1 - epsilon, 1 + epsilon_high))` (Schulman et al. 2017).

The ratios correct for the updates since the completions were sampled. In the first update of a
batch, every ratio is 1, and each form has the gradient of `none`, with w_i = 1/(n L_i) for
`sequence` and w_i = 1/n for `whole_sequence`. In later updates, token-level ratios give a biased
gradient. Whole-sequence ratios give an unbiased gradient if no earlier update used the same
completions, but its variance explodes (Theorem 12). A single pass over minibatches of independently
drawn prompts meets this condition. In a second pass over a batch, the gradient is biased with any
ratio.

A penalty in the loss subtracts `beta K` from each token's term, where K estimates the divergence
from the reference model. An entropy bonus adds `entropy_coef H` to each token's term, where H is
the entropy. The estimates K differ in the divergence whose gradient they give in expectation, if
the completions are from the current policy:

    k3 = exp(r - l) - (r - l) - 1  gradient of KL(reference || policy)
    k2 = (l - r)^2 / 2             gradient of KL(policy || reference)
                                   (both token by token, with the preceding tokens held fixed)

The third estimate, k1, is subtracted from the reward: Z_i - beta sum_t (o_it - r_it). The policy
gradient with this reward is an unbiased estimate of the gradient of
E Z - beta KL(policy || reference).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from grpo_ustat.config.objective import ObjectiveConfig
from grpo_ustat.estimators.token_weights import (
    SAPO_TEMPERATURES,
    VESPO_DECAYS,
    VESPO_LOG_RATIOS,
    VESPO_POWERS,
)


@dataclass(frozen=True)
class Part:
    """B completions of an update, with all that the objective needs except log-probabilities."""

    advantage_B: torch.Tensor
    # 1 on completion tokens, 0 on padding.
    mask_BT: torch.Tensor
    # Log-probabilities under the policy that sampled the completions; None if the current policy
    # sampled them.
    old_BT: torch.Tensor | None
    # Log-probabilities under the reference model; None if there is no reference model.
    reference_BT: torch.Tensor | None
    # Weight w_i of each completion; see `estimators.row_weights.token_weights`.
    weight_B: torch.Tensor
    # Number n of completions; see `update.Minibatch`.
    num_rollouts: int
    # 1 on the tokens that `top_entropy_quantile` selects; None if all tokens are used.
    chosen_BT: torch.Tensor | None = None


def surrogate(objective: ObjectiveConfig, logprob_BT: torch.Tensor, part: Part) -> torch.Tensor:
    """Return the sum of these completions' terms in the objective, without the entropy bonus.

    Args:
        objective: settings of the objective.
        logprob_BT: log-probabilities l under the current policy, with autograd's graph.
        part: the completions.
    """
    assert logprob_BT.shape == part.mask_BT.shape
    token_BT, advantage_B1 = part.weight_B[:, None] * part.mask_BT, part.advantage_B[:, None]
    chosen_BT = token_BT if part.chosen_BT is None else token_BT * part.chosen_BT
    level, loss_type = objective.importance_sampling_level, objective.loss_type
    if level == "none":
        value = (chosen_BT * advantage_B1 * logprob_BT).sum()
    elif loss_type in ("cispo", "vespo"):
        weight_BT = fixed_weights(objective, logprob_BT.detach(), part)
        value = (chosen_BT * weight_BT * advantage_B1 * logprob_BT).sum()
    else:
        # Ratios of tokens have shape [B, T], those of sequences have shape [B].
        ratio, _ = ratios(objective, logprob_BT, part)
        advantage = advantage_B1 if level == "token" else part.advantage_B
        term = ratio * advantage
        if loss_type == "sapo":
            above, others = SAPO_TEMPERATURES
            tau_B1 = torch.full_like(advantage_B1, others).masked_fill(advantage_B1 > 0, above)
            term = torch.sigmoid(tau_B1 * (ratio - 1)) * 4 / tau_B1 * advantage
        elif objective.epsilon is not None:
            assert objective.epsilon_high is not None
            bounded = ratio.clamp(1 - objective.epsilon, 1 + objective.epsilon_high)
            term = torch.minimum(term, bounded * advantage)
        if loss_type == "luspo":
            term = term * part.mask_BT.sum(dim=1)
        value = (chosen_BT * term).sum() if level == "token" else term.sum() / part.num_rollouts
    if objective.beta and objective.kl_in == "loss":
        value = value - objective.beta * (token_BT * penalty(objective, logprob_BT, part)).sum()
    return value


def fixed_weights(objective: ObjectiveConfig, logprob_BT: torch.Tensor, part: Part) -> torch.Tensor:
    """Return the factors `sg ...` of the loss types `cispo`, [B, T], or `vespo`, [B, 1]."""
    ratio, _ = ratios(objective, logprob_BT, part)
    if objective.loss_type == "cispo":
        return ratio if objective.epsilon_high is None else ratio.clamp(max=objective.epsilon_high)
    log_B = ratio.log().clamp(*VESPO_LOG_RATIOS)
    power_B, decay_B = (
        torch.full_like(log_B, others).masked_fill(part.advantage_B >= 0, above)
        for above, others in (VESPO_POWERS, VESPO_DECAYS)
    )
    return (decay_B + power_B * log_B - decay_B * log_B.exp()).exp()[:, None]


def ratios(
    objective: ObjectiveConfig, logprob_BT: torch.Tensor, part: Part
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return importance ratios and a mask of the ratios that are used.

    Both have shape [B, T] for ratios of tokens, and [B] for ratios of sequences.
    """
    old_BT = logprob_BT.detach() if part.old_BT is None else part.old_BT
    change_BT = (logprob_BT - old_BT) * part.mask_BT
    if objective.importance_sampling_level == "token":
        return change_BT.exp(), part.mask_BT.bool()
    total_B = change_BT.sum(dim=1)
    if objective.importance_sampling_level == "sequence":
        total_B = total_B / part.mask_BT.sum(dim=1)
    return total_B.exp(), torch.ones_like(total_B, dtype=torch.bool)


def penalty(objective: ObjectiveConfig, logprob_BT: torch.Tensor, part: Part) -> torch.Tensor:
    """Return each token's estimate K of the divergence from the reference model, [B, T]."""
    assert part.reference_BT is not None
    log_BT = (part.reference_BT - logprob_BT) * part.mask_BT
    if objective.kl_estimator == "k2":
        return log_BT.square() / 2
    return log_BT.exp() - log_BT - 1 if objective.kl_estimator == "k3" else -log_BT


def factors(
    objective: ObjectiveConfig, logprob_BT: torch.Tensor, part: Part
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Differentiate the objective with respect to each token's log-probability and entropy.

    With these derivatives, the gradient is `sum factor grad l + entropy_factor grad H`.

    Returns:
        Factors of log-probabilities and of entropies, [B, T]; None for the latter if there is no
        entropy bonus.
    """
    with torch.enable_grad():
        leaf_BT = logprob_BT.detach().requires_grad_()
        (factor_BT,) = torch.autograd.grad(surrogate(objective, leaf_BT, part), leaf_BT)
    if not objective.entropy_coef:
        return factor_BT, None
    return factor_BT, objective.entropy_coef * part.weight_B[:, None] * part.mask_BT


def penalised_loss(objective: ObjectiveConfig) -> bool:
    """Return True if the loss has a penalty for divergence from the reference model."""
    return objective.beta > 0 and objective.kl_in == "loss"


def has_ratio(objective: ObjectiveConfig, part: Part) -> bool:
    """Return True if the objective uses importance ratios and they can differ from 1."""
    return part.old_BT is not None and objective.importance_sampling_level != "none"


def depends_on_logprobs(objective: ObjectiveConfig, part: Part) -> bool:
    """Return True if the result of `factors` depends on the current log-probabilities.

    In a plain on-policy update, it does not, so that a pass through the output layer is saved.
    """
    return penalised_loss(objective) or has_ratio(objective, part)


def skips_zero_variance(objective: ObjectiveConfig) -> bool:
    """Return True if a completion with advantage 0 adds exactly 0, so that it can be skipped."""
    return not penalised_loss(objective) and not objective.entropy_coef


def needs_old(objective: ObjectiveConfig, num_rollouts: int) -> bool:
    """Return True if the log-probabilities before a step's first update are needed.

    They are needed for importance ratios if a batch has several updates, and for a penalty in the
    reward.
    """
    several = objective.num_iterations > 1 or objective.update_size(num_rollouts) < num_rollouts
    return several or (objective.beta > 0 and objective.kl_in == "reward")


@torch.no_grad()
def diagnostics(objective: ObjectiveConfig, logprob_BT: torch.Tensor, part: Part) -> dict[str, Any]:
    """Return sums over tokens or sequences for the step's metrics of ratios, clipping and KL."""
    sums: dict[str, Any] = {}
    if has_ratio(objective, part):
        ratio, counts = ratios(objective, logprob_BT, part)
        advantage = part.advantage_B if ratio.dim() == 1 else part.advantage_B[:, None]
        sums |= {"ratio_count": int(counts.sum()), "ratio_sum": float(ratio[counts].sum())}
        if objective.loss_type == "cispo" and objective.epsilon_high is not None:
            high = (ratio > objective.epsilon_high) & counts
            sums |= {"clip_low": 0, "clip_high": int(high.sum())}
        elif objective.epsilon is not None:
            assert objective.epsilon_high is not None
            low = (ratio < 1 - objective.epsilon) & (advantage < 0) & counts
            high = (ratio > 1 + objective.epsilon_high) & (advantage > 0) & counts
            sums |= {"clip_low": int(low.sum()), "clip_high": int(high.sum())}
    if part.reference_BT is not None and objective.kl_in == "loss":
        kl_BT = penalty(objective, logprob_BT, part) * part.mask_BT
        sums |= {"kl_sum": float(kl_BT.sum()), "kl_count": int(part.mask_BT.sum())}
    return sums
