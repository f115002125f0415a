"""grpo_ustat: how good a GRPO policy gradient is, which group size to use, and training with it."""

__version__ = "0.1.0"
