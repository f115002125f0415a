"""Completions: keyed randomness and the in-process sampler."""
