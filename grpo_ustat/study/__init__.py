"""What `mse` does: score pools, closed forms, Monte Carlo, and the study that runs them."""
