"""Costs of planned runs: completions, tokens, memory and disk space."""
