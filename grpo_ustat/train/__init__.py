"""What `train` does: objectives, updates, held-out evaluation, checkpoints."""
