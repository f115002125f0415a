"""What `mse` does: score pools, what they tell, Monte Carlo, and the study that runs them."""
