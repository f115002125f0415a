"""Sampling of completions, by the policy's own model or by vLLM."""
