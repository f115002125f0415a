"""The command `train`: loop, objectives, updates, held-out evaluation, checkpoints."""
