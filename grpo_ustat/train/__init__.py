"""What `train` does: the loop, objectives, updates, held-out evaluation, checkpoints."""
