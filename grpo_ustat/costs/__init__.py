"""Costs of a planned run: rollouts, tokens, memory, disk, time."""
