"""The model: loading, log-probabilities, exact scores."""
