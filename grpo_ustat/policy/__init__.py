"""The model: loading, log-probabilities, and exact gradients of single completions."""
