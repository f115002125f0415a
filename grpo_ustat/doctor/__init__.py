"""Checks of `grpo-ustat doctor`; each is a function of the output folder."""
