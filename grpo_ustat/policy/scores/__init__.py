"""Norms, inner products and weighted sums of the scores of completions, by one backward pass.

The score of a completion is the gradient of its log-probability in all trainable parameters.
"""

from grpo_ustat.policy.scores.backward import completion_scores

__all__ = ["completion_scores"]
