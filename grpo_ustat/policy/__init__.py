"""The model: loading, log-probabilities, scores, and an enumerable policy with exact truth."""
