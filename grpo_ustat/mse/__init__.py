"""Room of `mse`: score pools, statistics from them, Monte Carlo, and the study that runs them."""
