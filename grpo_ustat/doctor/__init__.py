"""Checks of the machine, for `grpo-ustat doctor`."""
