"""Exact score norms, gradients and inner products of completions, by one backward pass."""

from grpo_ustat.policy.scores.backward import completion_scores

__all__ = ["completion_scores"]
