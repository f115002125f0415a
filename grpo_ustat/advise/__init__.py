"""Advice to keep, raise or lower the group size, from a run, a log of rollouts, or rewards."""
