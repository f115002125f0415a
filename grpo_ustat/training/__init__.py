"""What `train` does: Algorithm 1, held-out evaluation, checkpoints."""
