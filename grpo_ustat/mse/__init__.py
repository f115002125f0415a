"""The command `mse`: score pools, Monte Carlo, and the study that uses both."""
