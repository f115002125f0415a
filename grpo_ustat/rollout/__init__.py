"""Completions: keyed draws, the in-process sampler, vLLM."""
