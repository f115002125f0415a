"""What `mse` does: score pools, closed forms, replay, Monte Carlo, and the study that runs them."""
