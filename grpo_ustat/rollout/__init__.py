"""Sampling of completions: keyed draws, the in-process sampler, and vLLM."""
