"""Costs of planned runs: rollouts, tokens, memory, disk space and time."""
